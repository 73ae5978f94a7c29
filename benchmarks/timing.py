"""How long a call takes: device time from CUDA events, versions in turns; host time from the host's clock.

Every timed launch finds a cold L2 cache, as a model's next layer would. The versions of one problem take turns, a
few launches each, over several rounds: a GPU's clock and power drift by more than the versions differ, so each must see
the same drift. Who went before leaves its heat and its clock behind, so from round to round another one goes before
each; or the GPU rests before each turn, as it does between the bursts that published figures are.
"""

import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median, quantiles
from typing import Protocol, TypeVar

import torch

from benchmarks.telemetry import Reading, Telemetry

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Budget:
    """How long one version may take on one problem."""

    rounds: int = 5
    warmup_ms: float = 25.0
    round_ms: float = 25.0  # device time of one turn; a version slower than this gets one launch a turn
    max_launches: int = 20  # of one turn
    idle_ms: int = 0  # how long the GPU has nothing to do before each turn


@dataclass(frozen=True)
class Timing:
    """The spread of a call's times in ms, and the median clock and power while it ran."""

    ms: float
    ms_p20: float
    ms_p80: float
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    def of_one(self, num_calls: int) -> "Timing":
        """The timing of one of `num_calls` calls that were timed together."""
        return replace(self, ms=self.ms / num_calls, ms_p20=self.ms_p20 / num_calls, ms_p80=self.ms_p80 / num_calls)


class Timer(Protocol):
    """What `in_turns` needs from a device."""

    def settle(self, call: Call, estimate_ms: float) -> Call:
        """The form of `call` whose device time is least disturbed by the host."""

    def burst(self, call: Call, launches: int) -> tuple[list[float], Reading]:
        """Device time in ms of each of `launches` launches, and a reading taken while they ran."""

    def rest(self, ms: int) -> None:
        """Leaves the device idle for `ms`."""


class DeviceTimer:
    """Times launches on the current CUDA device."""

    # Below this the host may be slower than the GPU, so the launch is captured once and replayed as a CUDA graph. Above
    # it, a launch is queued long before the GPU comes to it.
    HOST_BOUND_MS = 1.0

    def __init__(self, telemetry: Telemetry):
        self._telemetry = telemetry
        # Writing four times the L2 evicts whatever the last launch left there.
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.int8, device="cuda").zero_

    def settle(self, call: Call, estimate_ms: float) -> Call:
        """`call` replayed from a CUDA graph when it is short and can be captured, else `call` itself."""
        return call if estimate_ms >= self.HOST_BOUND_MS else self.captured(call) or call

    def captured(self, call: Call) -> Call | None:
        """`call` replayed from a CUDA graph; None when it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        try:
            # The outer context restores the stream even where the capture fails, which the inner one does not.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                call()
        except RuntimeError:  # some libraries synchronise or allocate by themselves; they are timed as they are
            torch.cuda.synchronize()
            generator.graphsafe_set_state(random_state)  # its own still takes part in the broken capture
            return None
        return graph.replay

    def burst(self, call: Call, launches: int) -> tuple[list[float], Reading]:
        """Times `launches` launches after one that is not timed.

        The untimed one warms the instruction cache and keeps the GPU busy while the host queues the rest.
        """
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(launches)]
        self._flush()
        call()
        for start, end in events:
            self._flush()
            start.record()
            call()
            end.record()
        reading = self._telemetry.read()  # the queue is still full here
        events[-1][1].synchronize()
        return [start.elapsed_time(end) for start, end in events], reading

    def rest(self, ms: int) -> None:
        """Waits until the device is done, then sleeps for `ms`."""
        torch.cuda.synchronize()
        time.sleep(ms / 1000)

    def loop(self, call: Call, launches: int, seconds: float) -> tuple[list[float], list[Reading]]:
        """Launches back to back for `seconds`; ms a launch over each `launches` of them, and a reading in each.

        Nothing flushes the L2 and nothing leaves the GPU idle: the host is always one such chunk ahead.
        """
        ends, readings = [torch.cuda.Event(enable_timing=True)], []
        ends[0].record()
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            for _ in range(launches):
                call()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            ends[-2].synchronize()
            readings.append(self._telemetry.read())
        ends[-1].synchronize()
        return [begin.elapsed_time(end) / launches for begin, end in pairwise(ends)], readings


@dataclass
class _Turns:
    """One version's share of the rounds."""

    call: Call
    launches: int
    times: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)


def in_turns(timer: Timer, calls: Mapping[Name, Call], budget: Budget = Budget()) -> dict[Name, Timing]:
    """Times every call on the same device, interleaved over `budget.rounds` rounds."""
    turns = {name: _warmed_up(timer, call, budget) for name, call in calls.items()}
    names = list(turns)
    for first in range(budget.rounds):
        for name in _order(names, first):
            turn = turns[name]
            if budget.idle_ms:
                timer.rest(budget.idle_ms)
            times, reading = timer.burst(turn.call, turn.launches)
            turn.times += times
            turn.readings.append(reading)
    return {name: summary(turn.times, turn.readings) for name, turn in turns.items()}


def _order(names: Sequence[Name], first: int) -> list[Name]:
    """A round's order (Williams): over as many rounds as there are names each follows each other one once.

    If they are odd in number it takes twice as many, every other round reversed, and each follows each other one twice.
    """
    last = len(names) - 1
    zigzag = [last - i // 2 if i % 2 else i // 2 for i in range(len(names))]
    order = [names[(first + i) % len(names)] for i in zigzag]
    return order[::-1] if len(names) % 2 and first % 2 else order


def _warmed_up(timer: Timer, call: Call, budget: Budget) -> _Turns:
    """Runs `call` until the warm-up time is spent, and sizes its turns from how long it took."""
    [estimate], _ = timer.burst(call, 1)
    call = timer.settle(call, estimate)
    spent, launches = estimate, 1
    while spent < budget.warmup_ms:
        times, _ = timer.burst(call, launches)
        estimate = median(times)
        spent += sum(times)
        launches = min(2 * launches, budget.max_launches)
    return _Turns(call, launches=max(1, min(budget.max_launches, int(budget.round_ms / estimate))))


CHUNK_MS = 50.0  # of a sustained loop: one reading, one time


def sustained(timer: DeviceTimer, call: Call, estimate_ms: float, seconds: float) -> Timing:
    """`call` back to back for `seconds`; what is kept is the second half, once clock and temperature have settled."""
    call = timer.settle(call, estimate_ms)
    times, readings = timer.loop(call, max(1, round(CHUNK_MS / estimate_ms)), seconds)
    return summary(times[len(times) // 2 :], readings[len(readings) // 2 :])


def summary(times: Sequence[float], readings: Sequence[Reading] = ()) -> Timing:
    """Median and 20th and 80th percentile of `times`, medians of what the readings hold."""
    p20, *_, p80 = quantiles(times, n=5, method="inclusive") if len(times) > 1 else (times[0], times[0])
    clocks = [reading.sm_clock_mhz for reading in readings if reading.sm_clock_mhz is not None]
    powers = [reading.power_w for reading in readings if reading.power_w is not None]
    return Timing(
        ms=median(times),
        ms_p20=p20,
        ms_p80=p80,
        sm_clock_mhz=median(clocks) if clocks else None,
        power_w=median(powers) if powers else None,
    )


def host_time(call: Call, synchronize: Call, calls: int = 4000, warmup: int = 200, queue: int = 64) -> Timing:
    """The host's time for one call, the work it launches not waited for.

    The device is drained every `queue` calls, outside what is timed: a full launch queue would make the host wait.
    """
    for _ in range(warmup):
        call()
    synchronize()
    times = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(calls):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e6)
            if i % queue == queue - 1:
                synchronize()
    finally:
        if collecting:
            gc.enable()
    synchronize()
    return summary(times)
