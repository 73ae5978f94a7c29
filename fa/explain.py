"""What would run, and why."""

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from fa.dispatch import AUTO, GENERATIONS, resolve, select, why_not
from fa_common.generation import LaunchShape
from fa_common.isolated import IsolatedFailure
from fa_common.problem import Problem, UnsupportedProblem, Window
from fa_common.report import RESERVED_SHARED_MEMORY, SHARED_MEMORY_LIMIT, KernelReport, report
from fa_common.switches import label, switches

NUM_SMS = 132  # of an H100 or H200
HOPPER = 90

# The SASS classes that tell how a kernel loads, multiplies and exponentiates.
TELLING_INSTRUCTIONS = ("HMMA", "HGMMA", "QGMMA", "LDGSTS", "LDSM", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU")

# What one SM of sm_90 has for the CTAs on it.
SM_THREADS, SM_CTAS = 2048, 32
SM_REGISTERS, REGISTERS_UNIT = 65_536, 256  # a warp gets them in units
SM_SHARED_MEMORY = 233_472  # of which the system keeps RESERVED_SHARED_MEMORY for each CTA


@dataclass(frozen=True)
class Kernel:
    """The CUDA kernel for a problem, as compiled for sm_90a."""

    version: str
    config: Any
    launch: LaunchShape
    report: KernelReport | None
    why_no_report: str | None = None

    @property
    def ctas_per_sm(self) -> int | None:
        """How many CTAs of the kernel an SM can hold at once."""
        if self.report is None:
            return None
        num_warps = -(-self.launch.num_threads // 32)
        registers_per_warp = -(-self.report.registers * 32 // REGISTERS_UNIT) * REGISTERS_UNIT
        return min(
            SM_CTAS,
            SM_THREADS // (32 * num_warps),
            SM_REGISTERS // (registers_per_warp * num_warps),
            SM_SHARED_MEMORY // (self.report.shared_memory + RESERVED_SHARED_MEMORY),
        )

    @property
    def waves(self) -> float | None:
        """How many times the grid fills the GPU's SMs; just above a whole number, the last wave is nearly idle."""
        return self.launch.num_ctas / (NUM_SMS * self.ctas_per_sm) if self.ctas_per_sm else None


@dataclass(frozen=True)
class Explanation:
    """What a call runs, and why; `str()` is the text that `explain` prints."""

    problem: Problem
    asked_for: str  # the version of the call, or of `use`, or "auto"
    version: str | None  # the generation that runs; None if the call is refused
    reasons: dict[str, str | None]  # each generation's reason against the problem, oldest first; None where it fits
    hopper_reasons: dict[str, str | None]  # the same for the problem on a Hopper GPU
    kernel: Kernel | None  # what runs, or would on a Hopper GPU; None if that is refused or launches nothing

    def __str__(self) -> str:
        lines = [_describe(self.problem), self._choice(), *_fits(self.reasons)]
        if self.reasons != self.hopper_reasons:
            lines += ["on a Hopper GPU", *_fits(self.hopper_reasons)]
        rows = self._work_rows() if self.kernel is None else _kernel_rows(self.kernel) + self._work_rows()
        return "\n".join([*lines, "", *(f"{name:<14}{value}" for name, value in rows)])

    def _choice(self) -> str:
        if self.version is None:
            return f"refused: {'no generation fits' if self.asked_for == AUTO else f'{self.asked_for} does not fit'}"
        chosen = "the newest generation that fits" if self.asked_for == AUTO else "as asked for"
        how = "its kernel" if self.problem.device == "cuda" else f"{self.version}/algorithm.py, exact and slow"
        return f"{self.version} runs, {chosen}: {how}"

    def _work_rows(self) -> list[tuple[str, str]]:
        direction = "fwd+bwd" if self.problem.needs_grad else "fwd"
        size = self.problem.bytes(direction)
        traffic = f"at least {size / 1e6:,.3f} MB"
        if self.problem.varlen and self.problem.seqlens is None:
            return [("work", "unknown, it depends on the sequences' lengths"), ("HBM", traffic)]
        flops = self.problem.flops(direction)
        intensity = f", {flops / size:,.0f} FLOPs a byte" if size else ""
        return [
            ("work", f"{flops / 1e9:,.3f} GFLOP in matrix products ({direction})"),
            ("HBM", f"{traffic}{intensity}"),
        ]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    version: str = AUTO,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    config: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Explanation:
    """Prints and returns which generation runs such a call and why, and what its kernel is like; runs nothing.

    Takes the arguments of flash_attn_func, or with cu_seqlens of flash_attn_varlen_func. The kernel is compiled for its
    report, which takes seconds at the first time and no GPU. A call that is refused is explained too.

    Raises TypeError or ValueError where the call itself would for a wrong argument.
    """
    problem = Problem.from_tensors(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    if problem.varlen and problem.seqlens is None:  # on a GPU; the work depends on them, and here one may wait for it
        lengths = ([end - start for start, end in pairwise(x.tolist())] for x in (cu_seqlens_q, cu_seqlens_k))
        problem = replace(problem, seqlens=tuple(zip(*lengths, strict=True)))
    on_hopper = replace(problem, device="cuda", arch=HOPPER)
    explanation = Explanation(
        problem=problem,
        asked_for=resolve(version),
        version=_selected(problem, version, config),
        reasons=why_not(problem),
        hopper_reasons=why_not(on_hopper),
        kernel=_kernel(on_hopper, _selected(on_hopper, version, config), config),
    )
    print(explanation)
    return explanation


def _selected(problem: Problem, version: str, config: Any) -> str | None:
    try:
        selected = select(problem, version=version)
    except UnsupportedProblem:
        return None
    GENERATIONS[selected].check_config(config)
    return selected


def _kernel(problem: Problem, version: str | None, config: Any) -> Kernel | None:
    if version is None or problem.is_empty:
        return None
    generation = GENERATIONS[version]
    config = generation.default_config(problem) if config is None else config
    launch = generation.shape_forward(problem, config, NUM_SMS)
    try:
        made = report(generation.forward_key(problem, config), generation.build_forward)
    except (ImportError, IsolatedFailure, ValueError) as error:  # no DSL, no compilation, an output of another compiler
        return Kernel(version, config, launch, report=None, why_no_report=str(error))
    return Kernel(version, config, launch, made)


def _describe(problem: Problem) -> str:
    heads = f"heads {problem.heads_q}" + (f" / {problem.heads_kv}" if problem.group > 1 else "")
    lengths = f"{problem.seqlen_q} x {problem.seqlen_k}"
    if problem.varlen:
        lengths = f"up to {lengths}, {problem.total_q} x {problem.total_k} in all"
    parts = [
        f"{problem.dtype_name}, batch {problem.batch}, seqlen {lengths}, {heads}, head_dim {problem.head_dim}",
        problem.mask_name,
        *([f"softcap {problem.softcap}"] if problem.softcap else []),
        *(["with gradient"] if problem.needs_grad else []),
        "CPU" if problem.device == "cpu" else f"sm_{problem.arch}",
    ]
    return ", ".join(parts)


def _fits(reasons: dict[str, str | None]) -> list[str]:
    return [f"  {name}  {'fits' if reason is None else reason}" for name, reason in reasons.items()]


def _occupancy(kernel: Kernel) -> str:
    if not kernel.ctas_per_sm:
        return "too large for an SM"
    return f"{kernel.ctas_per_sm} to an SM: {kernel.waves:.2f} waves on {NUM_SMS} SMs"


def _kernel_rows(kernel: Kernel) -> list[tuple[str, str]]:
    config, launch, made = kernel.config, kernel.launch, kernel.report
    switch_names = [f.name for f in switches(config)]
    sizes = ", ".join(f"{f.name} {getattr(config, f.name)}" for f in fields(config) if f.name not in switch_names)
    grid = f"{' x '.join(map(str, launch.grid))} = {launch.num_ctas:,} CTAs of {launch.num_threads} threads"
    rows = [("kernel", f"{kernel.version} forward, sm_90a"), ("config", sizes)]
    if switch_names:
        rows.append(("switches", label(config)))
    if made is None:
        return [*rows, ("grid", grid), ("not compiled", kernel.why_no_report)]
    total = made.instructions.total()
    telling = ", ".join(f"{name} {made.instructions[name]}" for name in TELLING_INSTRUCTIONS if made.instructions[name])
    return [
        *rows,
        ("grid", f"{grid}, {_occupancy(kernel)}"),
        ("registers", f"{made.registers} a thread at launch, {made.spill_stores} bytes spilled"),
        ("shared memory", f"{made.shared_memory:,} of {SHARED_MEMORY_LIMIT:,} bytes a CTA"),
        ("instructions", f"{total:,}, of them {telling}" if total else f"unknown: {made.why_no_instructions}"),
        *(("problem", f"the kernel {problem}") for problem in made.problems()),
    ]
