"""How far each way to compute attention is from fp64: types, generations, FP8's scales, its rotation and its sums.

    inputs      normal     N(0, 1)
                outliers   N(0, 1) + N(0, 100) * Bernoulli(0.001), the FA3 paper's
                positive   a few queries over a long row of keys, V without a sign: what adding up loses shows
    versions    standard   S and P go through memory in 16 bits, as without FlashAttention
                fa1 to fa3
    sums        one        fa3's FP8: O is one sum in the tensor cores, which keep fewer bits than fp32
                two        P V of each block is one there, and O adds up those in fp32

Q, K and V are drawn in fp32, and fp64 attention of these numbers is what is right: rounding the inputs counts. In FP8,
`standard` computes in fp16 with what the e4m3 numbers stand for, so it has the error of the inputs and not that of P,
and out is fp16, lest its rounding hide the rest.

On a Hopper GPU the kernels run, anywhere else the algorithms, on smaller tensors: there tensor_cores.py emulates the
sums of FP8.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from einops import repeat
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import Tensor

import fa3
from benchmarks import machine, rows
from benchmarks.comparison import NOTHING, STALE, STALE_NOTE
from benchmarks.contenders import Ours
from benchmarks.plot import save
from benchmarks.rows import AccuracyRow
from benchmarks.tables import Table
from benchmarks.tensor_cores import FRACTION_BITS, TensorCores
from fa import GENERATIONS
from fa3.config import KV_BLOCK, Q_BLOCK, default_fp8_config
from fa3.fp8 import SCALES
from fa3.fp8_launch import build_forward, forward_key, quantized_by_columns
from fa_common.compile import Build, KernelKey, precompile
from fa_common.problem import Problem
from fa_common.reference import attention

SUITE = "accuracy"
PICTURE = rows.ROOT / "docs" / "accuracy-latest.svg"

FP8 = "float8_e4m3fn"
SIXTEEN_BITS = ("float16", "bfloat16")
DTYPES = (*SIXTEEN_BITS, FP8)
STANDARD = "standard"
HEAD_DIMS = (64, 128)
ROW_QUERIES = 16  # of the long row
# A second O takes as many registers again: this tile has them, up to this head_dim.
TWO_LEVELS = fa3.Config(tile_m=128, tile_n=64, stages=4, pingpong=False, two_level_accumulation=True)
WIDEST_OF_TWO = 128
LEAST_COSINE = 0.98  # less than this to the right result is no rounding

source_sha = cache(rows.source_sha)  # of each generation, once a run


class Size(NamedTuple):
    """How much is computed."""

    seqlen: int  # queries and keys
    heads: int
    row: int  # keys of the long row


SIZES = {"cpu": Size(1024, 2, 16384), "cuda": Size(4096, 16, 131072)}


@dataclass(frozen=True)
class Method:
    """One way to compute attention."""

    dtype: str
    version: str
    scales: str | None = None  # FP8 only, as `hadamard`
    hadamard: bool | None = None
    two_level: bool | None = None  # FP8 of fa3 only

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """O of fp32 tensors (batch, seqlen, heads, head_dim)."""
        if self.dtype != FP8:
            tensors = (x.to(getattr(torch, self.dtype)) for x in (q, k, v))
            return standard(*tensors) if self.version == STANDARD else GENERATIONS[self.version].forward(*tensors)[0]
        quantized = fa3.quantize(q, k, v, scales=self.scales, hadamard=self.hadamard)
        if self.version == STANDARD:
            return standard(*(x.half() for x in dequantized(quantized)))
        with TensorCores(self.two_level) if q.device.type == "cpu" else nullcontext():
            config = TWO_LEVELS if self.two_level else None
            return fa3.flash_attn_func(**quantized._asdict(), out_dtype=torch.float16, config=config)

    def runs(self, head_dim: int) -> bool:
        """Whether there is a kernel for it."""
        return not self.two_level or head_dim <= WIDEST_OF_TWO

    @property
    def label(self) -> str:
        """ "fa3 float16", "fa3 fp8 block, rotated, two levels" """
        if self.dtype != FP8:
            return f"{self.version} {self.dtype}"
        marks = [", rotated"] * bool(self.hadamard) + [", two levels"] * bool(self.two_level)
        return f"{self.version} fp8 {self.scales}{''.join(marks)}"


METHODS = (
    *(Method(dtype, version) for dtype in SIXTEEN_BITS for version in (STANDARD, *GENERATIONS)),
    *(Method(FP8, STANDARD, *choices) for choices in product(SCALES, (False, True))),
    *(Method(FP8, "fa3", *choices) for choices in product(SCALES, (False, True), (False, True))),
)

# Root mean square errors in table 3 of the FA3 paper, for the inputs with outliers. It names no sizes, nor a head_dim.
PAPER = {
    Method("float16", STANDARD): 3.2e-4,
    Method("float16", "fa2"): 1.9e-4,
    Method("float16", "fa3"): 1.9e-4,
    Method(FP8, STANDARD, "tensor", False): 2.4e-2,
    Method(FP8, "fa3", "block", True, False): 9.1e-3,
    Method(FP8, "fa3", "tensor", True, False): 9.3e-3,
    Method(FP8, "fa3", "block", False, False): 2.4e-2,
}


# ---- Inputs and methods


def normal(generator: torch.Generator, size: Size, head_dim: int) -> tuple[Tensor, ...]:
    """N(0, 1)."""
    return tuple(torch.randn(1, size.seqlen, size.heads, head_dim, generator=generator) for _ in range(3))


def outliers(generator: torch.Generator, size: Size, head_dim: int) -> tuple[Tensor, ...]:
    """One number in a thousand has a variance of 101."""

    def one(x: Tensor) -> Tensor:
        is_outlier = torch.rand(x.shape, generator=generator) < 0.001
        return x + is_outlier * 10 * torch.randn(x.shape, generator=generator)

    return tuple(map(one, normal(generator, size, head_dim)))


def positive(generator: torch.Generator, size: Size, head_dim: int) -> tuple[Tensor, ...]:
    """A long row of keys whose V has no sign."""
    q = torch.randn(1, ROW_QUERIES, size.heads, head_dim, generator=generator)
    k, v = torch.randn(2, 1, size.row, size.heads, head_dim, generator=generator)
    return q, k, v.abs()


INPUTS: dict[str, Callable[[torch.Generator, Size, int], tuple[Tensor, ...]]] = {
    "normal": normal,
    "outliers": outliers,
    "positive": positive,
}
KINDS = tuple(INPUTS)


def tensors(inputs: str, size: Size, head_dim: int, device: str) -> tuple[Tensor, ...]:
    """q, k and v, fp32; the same numbers each time and on each device."""
    return tuple(x.to(device) for x in INPUTS[inputs](torch.Generator().manual_seed(0), size, head_dim))


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as three kernels, S and P in the type of q in between."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    S = q @ k.mT * q.shape[-1] ** -0.5
    P = torch.softmax(S.float(), -1).to(q.dtype)
    return (P @ v).transpose(1, 2)


def dequantized(quantized: fa3.Quantized) -> Iterator[Tensor]:
    """The numbers that e4m3 tensors stand for, fp32: q, k and v."""
    for x, descale, block in zip(quantized[:3], quantized[3:], (Q_BLOCK, KV_BLOCK, KV_BLOCK), strict=True):
        seqlen, heads = x.shape[1:3]
        if descale.ndim == 2:
            descale = repeat(descale, "b h -> b 1 (h g) 1", g=heads // descale.shape[1])
        elif descale.ndim == 3:
            descale = repeat(descale, "b h n -> b (n r) h 1", r=block)[:, :seqlen]
        yield x.float() * descale


# ---- The run


def kernels(method: Method, inputs: str, size: Size, head_dim: int) -> list[tuple[KernelKey, Build]]:
    """What a GPU needs for a method, to be compiled beforehand and all at once."""
    seqlen_q, seqlen_k = (ROW_QUERIES, size.row) if inputs == "positive" else (size.seqlen, size.seqlen)
    dtype = getattr(torch, method.dtype)
    problem = Problem(1, seqlen_q, seqlen_k, size.heads, size.heads, head_dim, dtype=dtype)
    if method.dtype != FP8:
        return [] if method.version == STANDARD else [Ours(method.version).kernel(problem)]
    from fa3.quantize import build_quantize, quantize_key  # it imports the DSL, which takes seconds

    like_q = torch.empty(1, 1, 1, head_dim, device="meta")
    stages = ("block",) if method.scales == "block" else ("maximum", "scale")
    columns = quantized_by_columns(problem)
    found = [(quantize_key(like_q, stage, method.hadamard, columns), build_quantize) for stage in stages]
    if method.version != STANDARD:
        config = TWO_LEVELS if method.two_level else default_fp8_config(problem, columns)
        found.append((forward_key(problem, config, torch.float16, columns), build_forward))
    return found


@torch.no_grad()
def measure(
    head_dims: Sequence[int],
    results: Path,
    picture: Path,
    console: Console,
    dtypes: Sequence[str] = DTYPES,
    kinds: Sequence[str] = KINDS,
    **sizes: int | None,
) -> int:
    """Measures every method on all kinds of inputs, on the GPU if it can run the kernels; 1 if one is wrong or breaks.

    `sizes` are fields of Size; None is what suits the device.
    """
    device = "cpu" if machine.why_no_hopper() else "cuda"
    size = SIZES[device]._replace(**{name: number for name, number in sizes.items() if number is not None})
    facts = machine.facts() if device == "cuda" else machine.facts_without_gpu()
    place = facts | {"run": rows.new_run()}
    measured, wrong = [], []
    cells = [
        (inputs, head_dim, [method for method in METHODS if method.dtype in dtypes and method.runs(head_dim)])
        for inputs, head_dim in product(kinds, head_dims)
    ]
    if device == "cuda":
        console.print("Compiling the kernels ...")
        precompile(one for i, d, methods in cells for method in methods for one in kernels(method, i, size, d))
    for inputs, head_dim, methods in cells:
        given = tensors(inputs, size, head_dim, device)
        exact, _ = attention(*given)
        for method in track(methods, f"{inputs} d={head_dim}", console=console, transient=True):
            try:
                out = method(*given)
            except torch.AcceleratorError:  # nothing after it could be measured
                raise
            except Exception as failure:  # however one is broken, the others are measured
                wrong.append(f"{method.label} fails on {inputs}, d={head_dim}: {type(failure).__name__}: {failure}")
                continue
            row = row_of(method, inputs, given, errors(out, exact) | place)
            rows.append(row, results)
            measured.append(row)
            if not row.cosine >= LEAST_COSINE:
                wrong.append(f"{method.label} is wrong on {inputs}, d={head_dim}: cosine {row.cosine:.4f}")
    if measured:
        console.print(table(measured).to_rich())
        draw(measured, picture)
        console.print(f"{len(measured)} rows of run {place['run']} in {rows.path_of(SUITE, place['gpu'], results)}")
        console.print(f"their picture in {picture}")
    for line in wrong:
        console.print(line, highlight=False)
    return int(bool(wrong))


def errors(out: Tensor, exact: Tensor) -> dict[str, float]:
    """Root mean square error, largest error and cosine to the exact result: columns of a row."""
    out = out.double()
    return {
        "rmse": (out - exact).square().mean().sqrt().item(),
        "max_err": (out - exact).abs().max().item(),
        "cosine": torch.cosine_similarity(out.flatten(), exact.flatten(), dim=0).item(),
    }


def row_of(method: Method, inputs: str, given: Sequence[Tensor], columns: dict) -> AccuracyRow:
    """A row with `columns` for its errors, its run and its machine."""
    q, k, _ = given
    batch, seqlen_q, heads_q, head_dim = q.shape
    return AccuracyRow(
        version=method.version,
        dtype=method.dtype,
        scales=method.scales,
        hadamard=method.hadamard,
        two_level=method.two_level,
        inputs=inputs,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        heads_q=heads_q,
        heads_kv=k.shape[2],
        head_dim=head_dim,
        time=rows.now(),
        source_sha=None if method.version == STANDARD else source_sha(method.version),
        **columns,
    )


def method_of(row: AccuracyRow) -> Method:
    """What a row measured."""
    return Method(row.dtype, row.version, row.scales, row.hadamard, row.two_level)


# ---- What it shows


def newest_run(gpu: Path) -> list[AccuracyRow] | None:
    """The rows of the run in a GPU's directory that lacks least, of several the newest; None if there is none."""
    return rows.newest_run(gpu / f"{SUITE}.jsonl", missing)


def missing(run: Sequence[AccuracyRow]) -> list[str]:
    """What a complete run has and this one has not: each method on each input and default head_dim."""
    known = {(row.inputs, row.head_dim, method_of(row)) for row in run}
    wanted = [one for one in product(INPUTS, HEAD_DIMS, METHODS) if one[-1].runs(one[1])]
    return [f"{method.label} {inputs} d={d}" for inputs, d, method in wanted if (inputs, d, method) not in known]


def table(run: Sequence[AccuracyRow]) -> Table:
    """Every error of a run."""
    result = Table(
        f"Errors against fp64, {'of the algorithms' if run[0].gpu == machine.CPU else 'of the kernels'}",
        [
            "inputs",
            "d",
            "size",
            "dtype",
            "version",
            "scales",
            "rotated",
            "sums",
            "RMSE",
            "FA3 paper",
            "max. error",
            "1 - cosine",
        ],
        labels=8,
        notes=["Sizes are queries x keys x heads. The paper names neither its sizes nor its head_dim."],
    )
    if run[0].gpu == machine.CPU:
        result.notes.append(
            f"Sums of fa3 in FP8 are an emulation of tensor cores that keep {FRACTION_BITS} bits behind the leading "
            "one of the largest product or sum (DeepSeek-V3, 3.3.2 and 3.5.2), not a measurement."
        )
    stale = {row.version for row in run if row.source_sha and row.source_sha != source_sha(row.version)}
    for row in run:
        paper = PAPER.get(method_of(row)) if row.inputs == "outliers" else None
        result.add(
            row.inputs,
            str(row.head_dim),
            f"{row.seqlen_q} x {row.seqlen_k} x {row.heads_q}",
            row.dtype,
            row.version + (STALE if row.version in stale else ""),
            row.scales or NOTHING,
            {None: NOTHING, False: "no", True: "yes"}[row.hadamard],
            {None: NOTHING, False: "one", True: "two"}[row.two_level],
            f"{row.rmse:.1e}",
            f"{paper:.1e}" if paper else NOTHING,
            f"{row.max_err:.1e}",
            f"{1 - row.cosine:.1e}",
        )
    if stale:
        result.notes.append(STALE_NOTE)
    if lacking := missing(run):
        result.notes.append(f"An incomplete run: it lacks {len(lacking)} measurements of a full one.")
    return result


def draw(run: Sequence[AccuracyRow], path: Path) -> None:
    """Writes the picture of one run, root mean square errors: a panel for each kind of inputs, a line a method."""
    methods = list(dict.fromkeys(method_of(row) for row in run))
    kinds = list(dict.fromkeys(row.inputs for row in run))
    figure = Figure(figsize=(2 + 3 * len(kinds), 1 + 0.25 * len(methods)), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(kinds), squeeze=False, sharex=True, sharey=True)[0]
    for panel, inputs in zip(panels, kinds, strict=True):
        for head_dim, marker in zip(sorted({row.head_dim for row in run}), "os^vD*Px", strict=False):
            shown = [row for row in run if (row.inputs, row.head_dim) == (inputs, head_dim)]
            places = [methods.index(method_of(row)) for row in shown]
            panel.plot([row.rmse for row in shown], places, marker, color="#08306b", label=f"head_dim {head_dim}")
        panel.set_title(inputs, fontsize=10)
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
    panels[0].set_yticks(range(len(methods)), [method.label for method in methods], fontsize=8)
    panels[0].invert_yaxis()
    figure.supxlabel("root mean square error", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=4, fontsize=9, frameon=False)
    save(figure, path)
