"""What a generation's CUDA kernels can do, and the reason when they cannot."""

from collections.abc import Sequence
from dataclasses import dataclass

from fa_common.problem import Problem

NO_BACKWARD = "it has no backward kernel yet: call under torch.no_grad() or detach() q, k and v"


@dataclass(frozen=True)
class Capabilities:
    """What the kernels of one generation can do now; on a CPU its algorithm.py does everything but other dtypes."""

    archs: tuple[int, ...]  # 90 for sm_90
    dtypes: tuple[str, ...]  # "bfloat16", ...
    head_dims: tuple[int, ...]
    varlen: bool
    window: bool
    softcap: bool
    backward: bool
    other_call: str | None = None  # what to call, and why, where flash_attn_func's usual arguments are not enough

    def why_not(self, problem: Problem) -> str | None:
        """The first reason why this generation cannot run `problem`, in one clause; None if it can."""
        if problem.dtype_name not in self.dtypes:
            return f"it takes {_either(self.dtypes)}, not {problem.dtype_name}: convert q, k and v with .to(dtype)"
        if problem.device == "cpu":
            return None
        if problem.arch not in self.archs:
            archs = _either([f"sm_{arch}" for arch in self.archs])
            return f"its kernels run on {archs}, this GPU is sm_{problem.arch}: move q, k and v there, or to the CPU"
        if problem.head_dim not in self.head_dims:
            return f"it has kernels for head_dim {_either(self.head_dims)} and none yet for {problem.head_dim}"
        if problem.varlen and not self.varlen:
            return "it has no varlen kernel yet: pad to (batch, seqlen, heads, head_dim), or call once a sequence"
        if problem.window != (None, None) and not self.window:
            return f"it has no kernel for {problem.mask_name} yet, only for full and causal attention"
        if problem.softcap and not self.softcap:
            return f"it has no kernel for softcap={problem.softcap} yet, only for softcap=0.0"
        if problem.needs_grad and not self.backward:
            return NO_BACKWARD
        return None


def _either(choices: Sequence) -> str:
    """ "64, 128 or 256" """
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last
