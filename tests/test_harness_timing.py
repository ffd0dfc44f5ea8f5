"""The benches' harness without a GPU: statistics, choices, and the timing logic on a scripted clock."""

from types import SimpleNamespace

import pytest

from bench import gpu, timing
from tests.bench_fakes import L2_BYTES, FakeDevice

# Statistics and choices.


def test_stats_are_median_and_tenth_and_ninetieth_percentile():
    stats = timing.Stats.of(range(101))
    assert (stats.median, stats.p10, stats.p90) == (50, 10, 90)
    assert timing.Stats.of([3.0]) == timing.Stats(3.0, 3.0, 3.0)


@pytest.mark.parametrize("call_us", [0.0, 0.5, 2.3, 14.1, 133.6, 400.0, 999.0])
@pytest.mark.parametrize("copies", [1, 3, 64])
def test_a_launch_lasts_long_enough_in_whole_rotations(call_us, copies):
    calls = timing.calls_per_launch(call_us, copies)
    assert calls % copies == 0
    assert calls * max(call_us, timing.EVENT_US) >= timing.REPLAY_US
    assert calls == copies or (calls - copies) * max(call_us, timing.EVENT_US) < timing.REPLAY_US


@pytest.mark.parametrize(
    "footprint", [L2_BYTES // 31, L2_BYTES // 2, L2_BYTES, 2 * L2_BYTES, 2 * L2_BYTES + 1]
)
def test_cold_copies_exceed_twice_l2_and_one_fewer_would_not(footprint):
    plan = timing.plan_l2("cold", footprint, L2_BYTES)
    assert plan.copies * footprint > 2 * L2_BYTES >= (plan.copies - 1) * footprint
    assert plan.label == ("cold" if plan.copies == 1 else f"cold x{plan.copies}")
    assert not plan.flush


@pytest.mark.parametrize("footprint", [None, 0, 1, 2 * L2_BYTES // timing.MAX_COPIES])
def test_cold_flushes_when_copies_would_be_too_many_or_the_size_is_unknown(footprint):
    assert timing.plan_l2("cold", footprint, L2_BYTES) == timing.L2Plan("cold flush", flush=True)


@pytest.mark.parametrize(
    ("footprint", "label"),
    [
        (None, "warm"),
        (L2_BYTES, "warm"),
        (L2_BYTES + 1, "mixed"),
        (2 * L2_BYTES, "mixed"),
        (2 * L2_BYTES + 1, "cold"),
    ],
)
def test_warm_is_called_warm_only_when_the_inputs_fit(footprint, label):
    assert timing.plan_l2("warm", footprint, L2_BYTES) == timing.L2Plan(label)


def test_version_text():
    assert gpu.version_text(13020) == "13.2"


# Timing on a scripted clock.


def test_short_calls_go_into_a_graph_whose_length_ignores_launch_cost():
    device = FakeDevice()
    timed = timing.prepare(device, [device.call("k", 2.0, launch_us=12.0)], timing.L2Plan("warm"))
    assert (timed.mode, timed.calls) == ("graph", 200)
    times = timing.sample(device, timed, 0.01, timing.L2Plan("warm"))
    assert times == pytest.approx([2.0] * len(times))


def test_a_graph_visits_all_copies():
    device = FakeDevice()
    plan = timing.L2Plan("cold x3", copies=3)
    timed = timing.prepare(device, [device.call(name, 10.0) for name in "abc"], plan)
    assert timed.calls == 42
    device.log.clear()
    next(timed.launches)()
    assert device.log == list("abc") * 14


def test_long_calls_have_a_pair_of_events_each_and_rotate_across_bursts():
    device = FakeDevice()
    plan = timing.L2Plan("cold x3", copies=3)
    timed = timing.prepare(device, [device.call(name, 6000.0) for name in "abc"], plan)
    assert (timed.mode, timed.calls, device.graph_sizes) == ("single", 1, [])
    device.log.clear()
    times = timing.sample(device, timed, 0.03, plan)
    assert times == pytest.approx([6000.0] * len(times))
    assert device.log == (list("abc") * 5)[: len(times)]
    assert len(times) > 4


def test_calls_that_cannot_be_captured_are_timed_eagerly_with_the_reason():
    device = FakeDevice()
    calls = [device.call(name, 20.0, launch_us=60.0, capturable=False) for name in "ab"]
    timed = timing.prepare(device, calls, timing.L2Plan("cold x2", copies=2))
    assert (timed.mode, timed.calls, timed.note) == ("eager", 8, "RuntimeError: not in a graph")
    device.log.clear()
    next(timed.launches)()
    assert device.log == list("ab") * 4


@pytest.mark.parametrize("capturable", [True, False])
def test_flush_runs_before_every_call_and_is_not_timed(capturable):
    device = FakeDevice()
    plan = timing.L2Plan("cold flush", flush=True)
    timed = timing.prepare(device, [device.call("k", 5.0, capturable=capturable)], plan)
    assert timed.calls == 1
    device.log.clear()
    times = timing.sample(device, timed, 0.0, plan)
    assert times == pytest.approx([5.0] * timing.MAX_BURST)
    assert device.log == ["flush", "k"] * (timing.MAX_BURST + 1)  # one more: the first of a burst is dropped


def test_contestants_take_turns_in_every_round():
    device = FakeDevice()
    plan = timing.L2Plan("warm")
    timed = {name: timing.prepare(device, [device.call(name, 2000.0)], plan) for name in ("ours", "peer")}
    device.log.clear()
    rounds = timing.alternate(device, timed, plan, timing.Durations(0.0, 0.0, 0.0, rounds=4))
    turns = [name for i, name in enumerate(device.log) if i == 0 or device.log[i - 1] != name]
    assert turns == ["ours", "peer"] * 5  # the warm-up and four rounds
    assert all(len(times) == 4 and all(times) for times in rounds.values())


def test_the_ratio_survives_a_clock_that_drifts():
    device = FakeDevice()
    plan = timing.L2Plan("warm")

    def slower(us):
        return lambda seconds: us * (1 + seconds)

    timed = {
        n: timing.prepare(device, [device.call(n, slower(us))], plan) for n, us in (("a", 8.0), ("b", 10.0))
    }
    rounds = timing.alternate(device, timed, plan, timing.FULL)
    ratio = timing.ratio(rounds["a"], rounds["b"])
    assert timing.flat(rounds["a"]).p90 > 1.3 * timing.flat(rounds["a"]).p10
    assert ratio["min"] <= ratio["median"] <= ratio["max"]
    assert ratio["median"] == pytest.approx(0.8, rel=0.06)


def test_ratio_and_its_range_over_rounds():
    assert timing.ratio([[1.0, 1.0], [3.0]], [[2.0], [2.0]]) == {"median": 0.5, "min": 0.5, "max": 1.5}


def test_host_time_excludes_waiting_and_bounds_the_queue():
    device = FakeDevice()
    device.synchronize = lambda: (device.log.append("sync"), device.call("wait", 9e5)())
    assert timing.host_us(device, device.call("e", 30.0), 100.0, 0.0) == pytest.approx(30.0)
    assert device.log.count("e") == 1 + timing.HOST_BATCH
    device.log.clear()
    timing.host_us(device, device.call("e", 30.0), 2e5, 0.0)
    assert device.log.count("e") == 2


def test_ceilings():
    device = FakeDevice()
    assert timing.ceilings(device, True, timing.QUICK) == {
        "copy_gb_per_s": pytest.approx(2 * 2**30 / 500e-6 / 1e9),
        "matmul_tflop_per_s": pytest.approx(2 * 8192**3 / 1400e-6 / 1e12),
    }
    assert timing.ceilings(device, False, timing.QUICK)["matmul_tflop_per_s"] is None


@pytest.mark.parametrize("fails_at", ["call", "end", "call and end"])
def test_a_failed_capture_is_ended_and_reported(fails_at):
    log = []

    def end_capture():
        log.append("end")
        if "end" in fails_at:
            raise OSError("capture invalidated")

    def call():
        log.append("call")
        if "call" in fails_at:
            raise RuntimeError("not permitted")

    device = object.__new__(gpu.GpuDevice)  # its constructor needs a GPU
    device._stream = SimpleNamespace(begin_capture=lambda: log.append("begin"), end_capture=end_capture)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(CUDARuntimeError=OSError)))
    first = "RuntimeError: not permitted" if "call" in fails_at else "OSError: capture invalidated"
    with pytest.raises(timing.CaptureError, match=first):
        device.capture([call])
    assert log == ["begin", "call", "end"]
