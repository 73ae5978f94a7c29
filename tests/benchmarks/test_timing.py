import gc
import time
from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch

from benchmarks.telemetry import Reading, Telemetry
from benchmarks.timing import CHUNK_MS, Budget, DeviceTimer, Timing, host_time, in_turns, summary, sustained


def test_summary_is_median_and_spread():
    timing = summary([5.0, 1.0, 2.0, 3.0, 4.0, 6.0], [Reading(1700.0, 500.0), Reading(1600.0, None), Reading()])
    assert (timing.ms, timing.ms_p20, timing.ms_p80) == (3.5, 2.0, 5.0)
    assert (timing.sm_clock_mhz, timing.power_w) == (1650.0, 500.0)


def test_summary_of_a_single_time():
    timing = summary([2.0])
    assert (timing.ms, timing.ms_p20, timing.ms_p80) == (2.0, 2.0, 2.0)
    assert timing.sm_clock_mhz is None


def orders_of(fake_timer, names: str, rounds: int) -> list[list[str]]:
    """In which the calls of these names take turns, round by round."""
    timer = fake_timer(lambda call: 100.0)  # one launch is warm-up enough
    in_turns(timer, {name: lambda name=name: name for name in names}, Budget(rounds=rounds))
    order = [call() for call, _ in timer.bursts[len(names) :]]
    return [order[i : i + len(names)] for i in range(0, len(order), len(names))]


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcdef", "abcdefg"])
def test_versions_take_turns(fake_timer, names):
    orders = orders_of(fake_timer, names, rounds=5)
    assert [sorted(order) for order in orders] == [list(names)] * 5


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde", "abcdef", "abcdefg"])
def test_each_goes_first_and_follows_each_other_one_equally_often(fake_timer, names):
    is_odd = len(names) % 2
    orders = orders_of(fake_timer, names, rounds=len(names) * (1 + is_odd))
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert pairs == dict.fromkeys(permutations(names, 2), 1 + is_odd)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 1 + is_odd)


@pytest.mark.parametrize("names", ["abcd", "abcdef", "abcdefg"])
def test_in_few_rounds_nobody_follows_the_same_one_twice(fake_timer, names):
    pairs = [pair for order in orders_of(fake_timer, names, rounds=3) for pair in pairwise(order)]
    assert len(pairs) == len(set(pairs))


def test_the_device_rests_before_each_turn_and_not_while_it_warms_up(fake_timer):
    timer = fake_timer(lambda call: 100.0)
    calls = {name: lambda: None for name in "ab"}
    in_turns(timer, calls, Budget(rounds=3, idle_ms=250))
    assert timer.rests == [(250, burst) for burst in range(2, 8)]
    assert len(timer.bursts) == 8
    timer.rests.clear()
    in_turns(timer, calls, Budget(rounds=3))
    assert not timer.rests


def test_a_rest_begins_once_the_device_is_done(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("done"))
    monkeypatch.setattr(time, "sleep", events.append)
    DeviceTimer.rest(None, 250)
    assert events == ["done", 0.25]


def test_each_call_keeps_its_own_times(fake_timer):
    slow, fast = (lambda: "slow"), (lambda: "fast")
    timings = in_turns(fake_timer(lambda call: 9.0 if call is slow else 0.5), {"slow": slow, "fast": fast})
    assert (timings["slow"].ms, timings["fast"].ms) == (9.0, 0.5)
    assert timings["fast"].sm_clock_mhz == 1700.0


@pytest.mark.parametrize(("ms", "launches"), [(0.1, 20), (10.0, 4), (500.0, 1)])
def test_slow_versions_get_fewer_launches(fake_timer, ms: float, launches: int):
    timer = fake_timer(lambda call: ms)
    in_turns(timer, {"a": lambda: None}, Budget(rounds=2, round_ms=40.0, max_launches=20))
    assert [count for _, count in timer.bursts[-2:]] == [launches, launches]


def test_the_warm_up_lasts_as_long_as_asked(fake_timer):
    timer = fake_timer(lambda call: 2.0)
    in_turns(timer, {"a": lambda: None}, Budget(rounds=1, warmup_ms=25.0))
    *warm_up, _ = (count for _, count in timer.bursts)
    assert 25.0 <= 2.0 * sum(warm_up) < 60.0


def test_a_settled_call_replaces_the_original(fake_timer):
    class Settling(fake_timer):
        def settle(self, call, estimate_ms):
            return replay

    def replay():
        pass

    timer = Settling()
    in_turns(timer, {"a": lambda: None}, Budget(rounds=2))
    assert {call for call, _ in timer.bursts[1:]} == {replay}


def test_a_sustained_loop_counts_from_its_middle(fake_timer):
    timer = fake_timer(lambda call: 5.0)
    timing = sustained(timer, lambda: None, 4.0, seconds=10.0)
    assert (timing.ms, timing.ms_p20, timing.ms_p80) == (10.0, 10.0, 10.0)
    assert (timing.sm_clock_mhz, timing.power_w) == (1500.0, 690.0)
    [(_, launches, seconds)] = timer.loops
    assert (launches, seconds) == (round(CHUNK_MS / 4.0), 10.0)


def test_the_timing_of_one_call_of_many():
    timing = Timing(8.0, 4.0, 16.0, 1700.0, 600.0).of_one(4)
    assert timing == Timing(2.0, 1.0, 4.0, 1700.0, 600.0)


def test_host_time_drains_the_queue_outside_what_is_timed():
    events = []
    timing = host_time(lambda: events.append("call"), lambda: events.append("drain"), calls=128, warmup=3, queue=64)
    assert events.count("call") == 131
    drains = [i for i, event in enumerate(events) if event == "drain"]
    assert [b - a - 1 for a, b in pairwise(drains)] == [64, 64, 0]
    assert 0 < timing.ms_p20 <= timing.ms <= timing.ms_p80
    assert gc.isenabled()


def test_host_time_turns_garbage_collection_back_on_after_a_failure():
    def fail():
        if not gc.isenabled():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        host_time(fail, lambda: None, calls=1, warmup=1)
    assert gc.isenabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to read")
def test_telemetry_without_a_gpu_says_why_and_reads_nothing():
    telemetry = Telemetry()
    assert telemetry.why_not
    assert telemetry.read() == Reading()


@pytest.mark.gpu
def test_device_time_agrees_with_and_without_a_graph():
    timer = DeviceTimer(Telemetry())
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def call():
        return torch.mm(a, b, out=out)

    timer.burst(call, 20)
    replay = timer.settle(call, 0.2)
    assert replay is not call
    direct, captured = (summary(timer.burst(form, 50)[0]).ms for form in (call, replay))
    assert captured == pytest.approx(direct, rel=0.1)


@pytest.mark.gpu
def test_a_loop_takes_as_long_as_asked():
    timer = DeviceTimer(Telemetry())
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    times, readings = timer.loop(lambda: torch.mm(a, a, out=out), 100, 0.5)
    assert 0.4 < sum(times) * 100 / 1000 < 1.0
    assert len(times) == len(readings)


@pytest.mark.gpu
def test_a_call_that_cannot_be_captured_is_timed_as_it_is():
    timer = DeviceTimer(Telemetry())
    x = torch.ones(1, device="cuda")
    call = x.item
    assert timer.settle(call, 0.01) == call
    assert len(timer.burst(call, 3)[0]) == 3
    assert torch.randn(2, device="cuda").isfinite().all()  # no random numbers were to be had after a broken capture
