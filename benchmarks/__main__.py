"""Measure FlashAttention 1, 2 and 3 and their peers; keep the rows; make tables and pictures of them."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import benchmarks.ablate
import benchmarks.accuracy
import benchmarks.compare
import benchmarks.decode
import benchmarks.doctor
import benchmarks.fp8
import benchmarks.gpu_tests
import benchmarks.quantize
import benchmarks.report
import benchmarks.shapes
import benchmarks.sustained
import benchmarks.tiles
import benchmarks.without_gpu
from benchmarks import machine
from benchmarks.contenders import OURS
from benchmarks.peers import FP8_PEERS, PEERS
from benchmarks.problems import DTYPES, HEAD_DIMS, MASKS, QUICK_SEQLENS, SEQLENS, grid
from benchmarks.rows import RESULTS
from benchmarks.shapes import WINDOW_SEQLEN
from benchmarks.timing import Budget
from fa import GENERATIONS
from fa3.config import FP8_CAPABILITIES
from fa_common.problem import Problem
from fa_common.switches import switches

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


def console() -> Console:
    """As wide as the terminal; wide enough for every table where the output goes to a file."""
    out = Console()
    return out if out.is_terminal else Console(width=200)


def several(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of words separated by commas; an empty string is none of them."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        if unknown := [word for word in words if word not in choices]:
            raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(choices)}")
        return words

    return parse


def several_numbers(text: str) -> tuple[int, ...]:
    """A parser of positive integers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise typer.BadParameter(f"positive integers separated by commas are needed, got {text!r}")
    return tuple(map(int, words))


def one_with_switches(text: str) -> str:
    """A parser of a generation whose ideas can be turned off."""
    choices = [version for version, generation in GENERATIONS.items() if switches(generation.config_type)]
    if text not in choices:
        what = f"{text} has no switches" if text in GENERATIONS else text
        raise typer.BadParameter(f"{what}: choose from {', '.join(choices)}")
    return text


def one_pass(text: str) -> str:
    """A parser of a pass."""
    if text not in OURS:
        raise typer.BadParameter(f"{text}: choose from {', '.join(OURS)}")
    return text


def fields_of(given: Sequence[str]) -> dict[str, tuple]:
    """The values of each field: FIELD=VALUE,VALUE each, numbers or true and false."""
    words = {"true": True, "false": False}
    space = {}
    for text in given:
        field, _, values = text.partition("=")
        try:
            space[field.strip()] = tuple(
                words[word] if (word := value.strip().lower()) in words else int(word) for value in values.split(",")
            )
        except ValueError:
            raise typer.BadParameter(
                f"FIELD=VALUE,VALUE is needed, values numbers, true or false; got {text!r}"
            ) from None
    return space


def space_of(version: str, pass_: str, given: Sequence[str]) -> dict[str, tuple]:
    """What to search; if nothing is given the generation's own."""
    try:
        return fields_of(given) or dict(benchmarks.tiles.space_of(version, pass_))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def problems_of(*arguments: Any, **shape: int) -> list[Problem]:
    """`grid`, or the option's error where there are no such problems."""
    try:
        return grid(*arguments, **shape)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def check_fp8_head_dims(head_dims: Iterable[int]) -> None:
    """Raises the option's error for one that FP8 has not."""
    if wrong := [d for d in head_dims if d not in FP8_CAPABILITIES.head_dims]:
        raise typer.BadParameter(f"{', '.join(map(str, wrong))}: head_dims of FP8 are multiples of 16 up to 256")


def peers_of(given: Sequence[str] | None, of_dtype: Sequence[str]) -> tuple[str, ...]:
    """The peers that were given, or all of the dtype; the option's error for one of another dtype."""
    if wrong := [peer for peer in given or () if peer not in of_dtype]:
        raise typer.BadParameter(f"{', '.join(wrong)}: the peers in this dtype are {', '.join(of_dtype)}")
    return tuple(of_dtype if given is None else given)


def nothing_measured(out: Console) -> bool:
    """Whether no speed can be measured here; says why."""
    reason = machine.why_no_hopper()
    if reason:
        out.print(f"No speed is measured here: {reason}. What needs no GPU:")
    return reason is not None


def typed(**options: Iterable) -> dict[str, str]:
    """Several values of each option, as they would be typed."""
    return {option: ",".join(map(str, values)) for option, values in options.items()}


SWEEP = typed(head_dim=HEAD_DIMS, mask=MASKS, seqlen=SEQLENS, dtype=DTYPES, versions=GENERATIONS)
ABLATION = typed(
    head_dim=benchmarks.ablate.HEAD_DIMS, mask=benchmarks.ablate.MASKS, seqlen=benchmarks.ablate.SEQLENS, dtype=DTYPES
)
SHAPES = typed(
    head_dim=benchmarks.shapes.HEAD_DIMS,
    mask=MASKS,
    seqlen=benchmarks.shapes.SEQLENS,
    kind=benchmarks.shapes.KINDS,
    versions=benchmarks.shapes.VERSIONS,
)
TILES = typed(head_dim=benchmarks.tiles.HEAD_DIMS, mask=benchmarks.tiles.MASKS, seqlen=benchmarks.tiles.SEQLENS)
SUSTAINED = typed(versions=benchmarks.sustained.VERSIONS, peers=benchmarks.sustained.DEFAULT_PEERS)
ACCURACY = typed(
    head_dim=benchmarks.accuracy.HEAD_DIMS, dtype=benchmarks.accuracy.DTYPES, inputs=benchmarks.accuracy.KINDS
)
QUANTIZE = typed(head_dim=benchmarks.quantize.HEAD_DIMS, seqlen=benchmarks.quantize.SEQLENS)
DECODE = typed(
    batch=benchmarks.decode.BATCHES,
    seqlen=benchmarks.decode.SEQLENS,
    versions=benchmarks.decode.VERSIONS,
    peers=benchmarks.decode.DEFAULT_PEERS,
)

HeadDims = Annotated[Any, typer.Option(parser=several_numbers, metavar="D,D")]
Masks = Annotated[Any, typer.Option(parser=several(MASKS), metavar="MASK,MASK")]
Seqlens = Annotated[Any, typer.Option(parser=several_numbers, metavar="N,N")]
SIXTEEN_BITS = ("bfloat16", "float16")
Dtypes = Annotated[Any, typer.Option(parser=several(SIXTEEN_BITS), metavar="T,T")]
Versions = Annotated[Any, typer.Option(parser=several(GENERATIONS), metavar="V,V")]
Peers = Annotated[Any, typer.Option(parser=several(PEERS), metavar="P,P", help='"" for none.')]
Switched = Annotated[Any, typer.Option(parser=one_with_switches, metavar="V", help="A generation with switches.")]
Causal = Annotated[bool, typer.Option("--causal", help="Short for --mask causal.")]
Positive = Annotated[int, typer.Option(min=1)]
AnyHeads = Annotated[int | None, typer.Option(min=1, help="As many as make up 2048 with head_dim if left out.")]
AnyBatch = Annotated[int | None, typer.Option(min=1, help="As many as make up 16384 tokens if left out.")]
HeadsKv = Annotated[int | None, typer.Option(min=1, help="As many as query heads if left out.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds in which they take turns.")]
Decoders = Annotated[Any, typer.Option(parser=several(benchmarks.decode.DECODERS), metavar="P,P", help='"" for none.')]
Pass = Annotated[Any, typer.Option("--pass", parser=one_pass, metavar="PASS", help=f"One of {', '.join(OURS)}.")]
Results = Annotated[Path, typer.Option(help="Where rows are kept, as <gpu>/<suite>.jsonl.")]
Picture = Annotated[Path, typer.Option(help="Where this run is drawn.")]


@app.command()
def compare(
    head_dim: HeadDims = SWEEP["head_dim"],
    mask: Masks = SWEEP["mask"],
    seqlen: Seqlens = SWEEP["seqlen"],
    dtype: Annotated[
        Any,
        typer.Option(
            parser=several((*SIXTEEN_BITS, benchmarks.fp8.DTYPE)),
            metavar="T,T",
            help=f"{', '.join(SIXTEEN_BITS)}; or {benchmarks.fp8.DTYPE}, alone: beside bfloat16.",
        ),
    ] = SWEEP["dtype"],
    versions: Versions = SWEEP["versions"],
    peers: Annotated[
        Any,
        typer.Option(
            parser=several((*PEERS, *FP8_PEERS)),
            metavar="P,P",
            show_default="all of the dtype",
            help=f'{", ".join(PEERS)}; in {benchmarks.fp8.DTYPE} {", ".join(FP8_PEERS)}. "" for none.',
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which the versions take turns.")] = Budget.rounds,
    quick: Annotated[bool, typer.Option(help=f"Only sequence lengths {QUICK_SEQLENS}, in two rounds.")] = False,
    idle_ms: Annotated[
        int,
        typer.Option(min=0, help="Rest of the GPU before each turn, in ms: bursts, whose rows are kept by themselves."),
    ] = Budget.idle_ms,
    pass_: Pass = "fwd",
    results: Results = RESULTS,
    picture: Picture = benchmarks.compare.PICTURE,
) -> None:
    """Compare the generations with each other and with their peers.

    On a Hopper GPU it measures their speed and keeps the rows. Anywhere else it shows their errors, the bytes and FLOPs
    they count, and what their kernels were compiled to. In FP8 it is fa3 on quantised tensors, with quantisation, and
    in bf16, and peers on quantised tensors; there is no picture.
    """
    out, in_fp8 = console(), benchmarks.fp8.DTYPE in dtype
    if in_fp8:
        if len(dtype) > 1 or pass_ != "fwd":
            raise typer.BadParameter(f"{benchmarks.fp8.DTYPE} is compared alone, and only its forward")
        check_fp8_head_dims(head_dim)
        dtype = DTYPES
    peers = peers_of(peers, FP8_PEERS if in_fp8 else PEERS)
    problems = problems_of(head_dim, mask, QUICK_SEQLENS if quick else seqlen, dtype)
    if nothing_measured(out):
        if in_fp8:
            raise typer.Exit(benchmarks.fp8.without_a_gpu(problems, versions, out))
        if pass_ != "fwd":
            out.print(f"Of {pass_} only the speed is compared, on a GPU; this is the forward.")
        raise typer.Exit(benchmarks.without_gpu.compare(problems, versions, out))
    budget = Budget(rounds=2 if quick else repeats, idle_ms=idle_ms)
    if in_fp8:
        raise typer.Exit(benchmarks.fp8.measure(problems, versions, budget, results, out, peers))
    everyone = [*versions, *peers]
    raise typer.Exit(benchmarks.compare.compare(problems, everyone, budget, results, picture, out, pass_))


@app.command()
def ablate(
    version: Switched = benchmarks.ablate.VERSION,
    head_dim: HeadDims = ABLATION["head_dim"],
    mask: Masks = ABLATION["mask"],
    causal: Causal = False,
    seqlen: Seqlens = ABLATION["seqlen"],
    batch: Positive = benchmarks.ablate.BATCH,
    heads: Positive = benchmarks.ablate.HEADS,
    heads_kv: HeadsKv = None,
    dtype: Dtypes = ABLATION["dtype"],
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=V", help="A number of its Config, for every line; again for each field."),
    ] = None,
    repeats: Rounds = benchmarks.ablate.ROUNDS,
    results: Results = RESULTS,
    picture: Picture = benchmarks.ablate.PICTURE,
) -> None:
    """Turn one generation's ideas on one after another, and each off alone; the FA3 paper's own ablation by default.

    On a Hopper GPU it measures what each is worth and keeps the rows. Anywhere else it shows what each of the
    configurations was compiled to.
    """
    out = console()
    masks = ("causal",) if causal else mask
    problems = problems_of(head_dim, masks, seqlen, dtype, batch=batch, heads=heads, heads_kv=heads_kv)
    chosen = fields_of(fields or ())
    if several_values := [field for field, values in chosen.items() if len(values) != 1]:
        raise typer.BadParameter(f"{', '.join(several_values)}: one value is needed; `tiles` searches among several")
    chosen = {field: value for field, (value,) in chosen.items()}
    try:
        for problem in problems:
            benchmarks.ablate.full_config(version, problem, chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if nothing_measured(out):
        raise typer.Exit(benchmarks.ablate.compile_only(version, problems, chosen, out))
    budget = Budget(rounds=repeats)
    raise typer.Exit(benchmarks.ablate.ablate(version, problems, chosen, budget, results, picture, out))


@app.command()
def tiles(
    version: Annotated[str, typer.Option(help=f"One of {', '.join(GENERATIONS)}.")] = benchmarks.tiles.VERSION,
    head_dim: HeadDims = TILES["head_dim"],
    mask: Masks = TILES["mask"],
    causal: Causal = False,
    seqlen: Seqlens = TILES["seqlen"],
    pass_: Annotated[
        str, typer.Option("--pass", help=f"One of {', '.join(benchmarks.tiles.PASSES)}.")
    ] = benchmarks.tiles.PASSES[0],
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=V,V", help="Values of a field of its Config; again for each field."),
    ] = None,
    at_most: Annotated[
        int | None,
        typer.Option(min=1, help="Candidates: the default, then those that differ from it in fewest fields."),
    ] = None,
    repeats: Rounds = benchmarks.tiles.ROUNDS,
    results: Results = RESULTS,
) -> None:
    """Search one generation's tiles, warps and stages for the fastest of each problem.

    On a Hopper GPU every candidate is checked, then all are timed in turns, and the rows kept. Anywhere else it shows
    what each is compiled to.
    """
    out = console()
    for text, choices in ((version, GENERATIONS), (pass_, benchmarks.tiles.PASSES)):
        if text not in choices:
            raise typer.BadParameter(f"{text}: choose from {', '.join(choices)}")
    problems = problems_of(head_dim, ("causal",) if causal else mask, seqlen)
    space = space_of(version, pass_, fields or ())
    try:
        benchmarks.tiles.candidates(version, problems[0], space, pass_)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if nothing_measured(out):
        raise typer.Exit(benchmarks.tiles.compile_only(version, problems, space, out, pass_, at_most))
    budget = Budget(rounds=repeats)
    raise typer.Exit(benchmarks.tiles.search(version, problems, space, budget, results, out, pass_, at_most))


@app.command()
def shapes(
    head_dim: HeadDims = SHAPES["head_dim"],
    mask: Masks = SHAPES["mask"],
    seqlen: Seqlens = SHAPES["seqlen"],
    kinds: Annotated[
        Any,
        typer.Option(
            "--kind", parser=several(benchmarks.shapes.KINDS), metavar="K,K", help="In the order of the default."
        ),
    ] = SHAPES["kind"],
    versions: Versions = SHAPES["versions"],
    peers: Peers = "",
    repeats: Rounds = Budget.rounds,
    results: Results = RESULTS,
) -> None:
    """Measure grouped heads, fp16, packed sequences, a sliding window and softcap against plain attention.

    Anywhere but on a Hopper GPU it shows what it would measure, the errors of the algorithms, and what the kernels were
    compiled to.
    """
    out = console()
    problems_of(head_dim, mask, seqlen)  # an option that is wrong says so
    problems = benchmarks.shapes.shapes(head_dim, mask, seqlen, kinds)
    if not problems:
        raise typer.BadParameter(f"nothing to measure: a window needs mask causal and seqlen {WINDOW_SEQLEN}")
    if nothing_measured(out):
        raise typer.Exit(benchmarks.shapes.without_a_gpu(problems, versions, out))
    raise typer.Exit(benchmarks.shapes.measure(problems, [*versions, *peers], Budget(rounds=repeats), results, out))


@app.command()
def sustained(
    head_dim: Positive = benchmarks.sustained.DEFAULT.head_dim,
    mask: Masks = "full",
    causal: Causal = False,
    seqlen: Positive = benchmarks.sustained.DEFAULT.seqlen_q,
    batch: AnyBatch = None,
    heads: AnyHeads = None,
    dtype: Dtypes = SWEEP["dtype"],
    versions: Versions = SUSTAINED["versions"],
    peers: Peers = SUSTAINED["peers"],
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each loop.")] = benchmarks.sustained.SECONDS,
    results: Results = RESULTS,
) -> None:
    """Measure one problem in a loop of seconds, where power sets the clock, beside a burst of it.

    Anywhere but on a Hopper GPU it shows what the kernels were compiled to.
    """
    out = console()
    masks = ("causal",) if causal else mask
    problem, *others = problems_of([head_dim], masks, [seqlen], dtype, batch=batch, heads=heads)
    if others:
        raise typer.BadParameter("one mask and one dtype are needed")
    if nothing_measured(out):
        raise typer.Exit(benchmarks.sustained.compile_only(problem, versions, out))
    everyone = [*versions, *peers]
    raise typer.Exit(benchmarks.sustained.measure(problem, everyone, seconds, Budget(), results, out))


@app.command()
def decode(
    batch: Annotated[Any, typer.Option(parser=several_numbers, metavar="B,B")] = DECODE["batch"],
    seqlen: Annotated[Any, typer.Option(parser=several_numbers, metavar="N,N", help="Of the cache.")] = DECODE[
        "seqlen"
    ],
    seqlen_q: Annotated[int, typer.Option(min=1, help="New tokens of each sequence.")] = 1,
    heads: Positive = benchmarks.decode.HEADS,
    heads_kv: Positive = benchmarks.decode.HEADS_KV,
    head_dim: Positive = benchmarks.decode.HEAD_DIM,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    versions: Annotated[Any, typer.Option(parser=several(benchmarks.decode.VERSIONS))] = DECODE["versions"],
    peers: Decoders = DECODE["peers"],
    num_splits: Annotated[int, typer.Option(min=0, help="Of the keys, for ours; 0 leaves it to the call.")] = 0,
    repeats: Rounds = Budget.rounds,
    results: Results = RESULTS,
) -> None:
    """Measure the attention of a new token to a long cache of K and V, in bytes of the cache a second.

    Anywhere but on a Hopper GPU it shows what it would measure, and the errors on a small cache.
    """
    out = console()
    if dtype not in benchmarks.decode.DTYPES:
        raise typer.BadParameter(f"{dtype}: choose from {', '.join(benchmarks.decode.DTYPES)}")
    shape = {"seqlen_q": seqlen_q, "heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "dtype": dtype}
    try:
        problems = benchmarks.decode.cells(batch, seqlen, **shape)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    everyone = [*versions, *peers]
    if nothing_measured(out):
        raise typer.Exit(benchmarks.decode.without_a_gpu(problems, everyone, out))
    raise typer.Exit(benchmarks.decode.measure(problems, everyone, num_splits, Budget(rounds=repeats), results, out))


@app.command()
def accuracy(
    head_dim: HeadDims = ACCURACY["head_dim"],
    dtype: Annotated[Any, typer.Option(parser=several(benchmarks.accuracy.DTYPES), metavar="T,T")] = ACCURACY["dtype"],
    inputs: Annotated[Any, typer.Option(parser=several(benchmarks.accuracy.KINDS), metavar="I,I")] = ACCURACY["inputs"],
    seqlen: Annotated[int | None, typer.Option(min=1, help="Queries and keys.")] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    row: Annotated[int | None, typer.Option(min=1, help="Keys of the long row.")] = None,
    results: Results = RESULTS,
    picture: Picture = benchmarks.accuracy.PICTURE,
) -> None:
    """Measure how far fp16, bf16 and FP8 are from fp64: FP8's scales of each kind, with and without rotation, its sums
    in one level and in two.

    On a Hopper GPU it is the kernels' error, anywhere else the algorithms', on smaller tensors, with the sums of FP8
    emulated (two minutes); the rows are kept.
    """
    out = console()
    check_fp8_head_dims(head_dim)
    sizes = {"seqlen": seqlen, "heads": heads, "row": row}
    raise typer.Exit(benchmarks.accuracy.measure(head_dim, results, picture, out, dtype, inputs, **sizes))


@app.command()
def quantize(
    head_dim: HeadDims = QUANTIZE["head_dim"],
    seqlen: Seqlens = QUANTIZE["seqlen"],
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(SIXTEEN_BITS)}.")] = DTYPES[0],
    repeats: Rounds = Budget.rounds,
    results: Results = RESULTS,
) -> None:
    """Measure quantising Q, K and V to FP8, each kind of scales with and without rotation, beside a copy.

    Anywhere but on a Hopper GPU it shows what it would measure, and the errors on small tensors.
    """
    out = console()
    if dtype not in SIXTEEN_BITS:
        raise typer.BadParameter(f"{dtype}: choose from {', '.join(SIXTEEN_BITS)}")
    check_fp8_head_dims(head_dim)
    problems = benchmarks.quantize.problems_of(head_dim, seqlen, dtypes=[dtype])
    if nothing_measured(out):
        raise typer.Exit(benchmarks.quantize.without_a_gpu(problems, out))
    raise typer.Exit(benchmarks.quantize.measure(problems, Budget(rounds=repeats), results, out))


@app.command()
def doctor(versions: Versions = SWEEP["versions"], results: Results = RESULTS) -> None:
    """Say what this machine can run and why not; on a Hopper GPU, measure what a call costs the host."""
    raise typer.Exit(benchmarks.doctor.examine(versions, results, console()))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def gpu_tests(context: typer.Context, results: Results = RESULTS) -> None:
    """Run `pytest -m gpu`, with any further arguments, and keep how it ended as a row."""
    if reason := machine.why_no_hopper():
        console().print(f"The GPU tests cannot run here: {reason}.")
        raise typer.Exit(1)
    raise typer.Exit(benchmarks.gpu_tests.run(context.args, results))


@app.command()
def report(results: Results = RESULTS) -> None:
    """Generate the tables and pictures of README.md and docs/ from the rows."""
    changed = benchmarks.report.regenerate(results=results)
    console().print("\n".join(f"written: {path}" for path in changed) or "Everything is up to date.")


if __name__ == "__main__":
    app()
