"""What this machine can run, and why not; and on a Hopper GPU, what one call costs the host."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import machine, probe, rows
from benchmarks.contenders import Ours
from benchmarks.correctness import limit, relative_error
from benchmarks.peers import FP8_PEERS, PEERS, Sdpa
from benchmarks.problems import problem_columns, random_tensors
from benchmarks.rows import Row
from benchmarks.tables import Table
from benchmarks.timing import host_time
from fa import GENERATIONS
from fa3.config import FP8_CAPABILITIES
from fa_common.capabilities import Capabilities
from fa_common.compile import load, stats
from fa_common.problem import Problem
from fa_common.reference import attention
from fa_common.report import find_nvdisasm

SUITE = "host"
CALLED = (Sdpa("torch-sdpa"), *PEERS.values())  # torch's own choice of backend too, as most programs call it
TINY = Problem(batch=1, seqlen_q=128, seqlen_k=128, heads_q=1, heads_kv=1, head_dim=128)  # the GPU is done at once


def examine(versions: Sequence[str], results: Path, console: Console) -> int:
    """Shows the findings; on a Hopper GPU measures the host's time and keeps its rows; 1 if one of ours fails."""
    console.print(machine_table().to_rich())
    console.print(generations_table().to_rich())
    console.print(peers_table().to_rich())
    if reason := machine.why_no_hopper():
        console.print(f"The host's time for a call is not measured: {reason}.")
        return 0
    ours = [Ours(version) for version in versions]
    failed = probe.unfit(ours, [TINY])
    for (version, _), reason in failed.items():
        console.print(f"{version} fails: {reason}")
    measured = measure_host([one for one in ours if (one.name, TINY) not in failed], console)
    for row in measured:
        rows.append(row, results)
    console.print(host_table(measured).to_rich())
    return int(bool(failed))


def machine_table() -> Table:
    """Software, GPU and kernel cache."""
    why, cache = machine.why_no_hopper(), stats()
    table = Table("This machine", ["what", "found"], labels=2)
    table.add("Python", machine.python())
    table.add("torch", torch.__version__)
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "einops"):
        table.add(name, machine.package(name) or "not installed")
    table.add("GPU", f"none that the kernels run on: {why}" if why else machine.gpu())
    table.add("driver", machine.driver() or "none")
    table.add("nvdisasm", find_nvdisasm() or "none: kernel reports come without instructions")
    table.add("kernel cache", str(cache.directory))
    table.add("", cache.why_unused or f"{cache.objects} kernels, {cache.size / 2**20:.1f} MiB")
    return table


def generations_table() -> Table:
    """What each generation does here, on the CPU and on the GPU."""
    table = Table("Generations", ["version", "on the CPU", "on the GPU", "its kernels"], labels=4)
    why = machine.why_no_hopper()
    for version, generation in GENERATIONS.items():
        has = generation.capabilities
        extras = [name for name in ("backward", "varlen", "window", "softcap") if getattr(has, name)]
        claims = ", ".join(["forward", *extras, *has.dtypes, _head_dims(has)])
        table.add(version, "all, slowly", f"nothing: {why}" if why else "the kernels", claims)
        if version == "fa3":
            fp8 = ", ".join(["forward alone", *FP8_CAPABILITIES.dtypes, _head_dims(FP8_CAPABILITIES)])
            table.add("fa3 in FP8", *table.rows[-1][1:-1], fp8)
    return table


def _head_dims(has: Capabilities) -> str:
    return f"head_dim {has.head_dims[0]} to {has.head_dims[-1]}"


def peers_table() -> Table:
    """Which peers `compare` will find."""
    table = Table("Peers", ["peer", "found"], labels=2)
    for peer in (*PEERS.values(), *FP8_PEERS.values()):
        table.add(peer.name, peer.missing or "yes")
    return table


@torch.no_grad()
def measure_host(ours: Sequence[Ours], console: Console) -> list[Row]:
    """The host's time for each way to call each generation, and for the peers; what is wrong is said and not timed."""
    tensors = random_tensors(TINY)
    exact, _ = attention(*tensors)
    facts, run, measured = machine.facts(), rows.new_run(), []

    def measure(who: str, name: str, prepare: Callable[[], Callable[[], Tensor]], **columns) -> None:
        try:
            call = prepare()
            error = relative_error(call(), exact)
        except Exception as failure:  # however a peer is broken, the others are measured
            console.print(f"{who}, {name}, fails: {type(failure).__name__}: {failure}")
            return
        if not error <= limit(TINY.dtype):
            console.print(f"{who}, {name}, is wrong: relative error {error:.1e}")
            return
        columns |= problem_columns(TINY) | asdict(host_time(call, torch.cuda.synchronize)) | facts
        columns |= {"version": who, "call": name, "rel_err": error}
        measured.append(Row(run=run, suite=SUITE, pass_="host", time=rows.now(), **columns))

    for one in ours:
        for name, prepare in ways_to_call(one, *tensors):
            measure(one.name, name, prepare, **one.columns(TINY))
    for peer in CALLED:
        if not peer.why_not(TINY):
            with peer.scope():
                measure(peer.name, "public function", partial(peer.prepare, TINY, *tensors))
    return measured


def ways_to_call(
    ours: Ours, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[str, Callable[[], Callable[[], Tensor]]]]:
    """From the public function down to the compiled kernel alone; each as what prepares the call."""
    generation = ours.generation
    yield "flash_attn_func", lambda: lambda: generation.flash_attn_func(q, k, v)
    yield "forward", lambda: lambda: generation.forward(q, k, v)[0]
    yield "forward(out=, lse=)", partial(ours.prepare, TINY, q, k, v)
    yield "the kernel alone", partial(kernel_alone, ours, q, k, v)


def kernel_alone(ours: Ours, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The launch of the compiled kernel, nothing checked."""
    kernel, out = load(*ours.kernel(TINY)), torch.empty_like(q)
    lse = torch.empty(TINY.batch, TINY.heads_q, TINY.seqlen_q, device=q.device)
    bound = ours.generation.bind_forward(kernel, TINY, ours.config(TINY), 1)  # one tile: one SM is enough

    def launch() -> Tensor:
        bound(q, k, v, out, lse, None, None)
        return out

    return launch


def host_table(measured: Sequence[Row]) -> Table:
    """The rows of one run of suite `host`, in microseconds."""
    table = Table("The host's time for one call, us", ["version", "call", "median", "p20", "p80"], labels=2)
    for row in measured:
        table.add(row.version, row.call, *(f"{1e3 * ms:.1f}" for ms in (row.ms, row.ms_p20, row.ms_p80)))
    return table
