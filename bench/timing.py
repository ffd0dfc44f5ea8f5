"""Timing on the GPU: what lies between two events, in which order, and from which L2 state.

A short call is captured many times into one CUDA graph, because launching it costs the host more than running
it costs the GPU. Launches are queued in bursts without synchronising, so that the GPU does not wait for the
host inside a timed interval. Contestants take turns, round after round, so that drifting clocks and power hit
all of them.

Only `bench.gpu` touches the GPU; this module sees it through `Device` and is tested with a scripted clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Call = Callable[[], object]

LONG_US = 1000.0  # from here on a launch gap of a few µs is below 1 %, so a call has its own pair of events
REPLAY_US = 400.0  # a replay lasts at least this, so that the 1 to 2 µs between replays stay below 0.5 %
EVENT_US = 0.5  # resolution of an event, hence the shortest time that is believed
BURST_US = 10_000.0  # work queued between two synchronisations
MAX_BURST = 64
MAX_COPIES = 64  # more copies of the inputs take longer to build than flushing takes to run
HOST_BATCH = 50  # the driver's queue holds about 1000 launches; a full queue would make the host wait


class CaptureError(RuntimeError):
    """The calls cannot be captured in a CUDA graph."""


class Device(Protocol):
    """What timing needs of a GPU."""

    l2_bytes: int

    def capture(self, calls: Sequence[Call]) -> Call: ...
    def time_us(self, launches: Sequence[Call], before: Call | None = None) -> list[float]: ...
    def flush(self) -> None: ...
    def synchronize(self) -> None: ...
    def now(self) -> float: ...
    def copy_call(self, num_bytes: int) -> Call: ...
    def matmul_call(self, n: int) -> Call | None: ...
    def describe(self) -> dict[str, object]: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class Durations:
    """How long to measure, in seconds; `repeat_s` is shared out over the rounds."""

    warmup_s: float
    repeat_s: float
    host_s: float
    rounds: int


FULL = Durations(warmup_s=0.05, repeat_s=0.3, host_s=0.1, rounds=6)
QUICK = Durations(warmup_s=0.01, repeat_s=0.06, host_s=0.02, rounds=3)


@dataclass(frozen=True)
class Stats:
    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Stats:
        p10, median, p90 = np.percentile(list(values), (10, 50, 90))
        return cls(float(median), float(p10), float(p90))


@dataclass(frozen=True)
class L2Plan:
    """How the wanted L2 state is reached: inputs in `copies` rotated copies, or a flush before every call."""

    label: str
    copies: int = 1
    flush: bool = False


def plan_l2(wanted: str, footprint: int | None, l2_bytes: int) -> L2Plan:
    """Choose copies or flush; `footprint` is the bytes that one call touches, None when unknown.

    The label is what is really measured: repeated calls on inputs larger than L2 are not warm.
    """
    if wanted == "warm":
        if footprint is None or footprint <= l2_bytes:
            return L2Plan("warm")
        return L2Plan("cold" if footprint > 2 * l2_bytes else "mixed")
    copies = 2 * l2_bytes // footprint + 1 if footprint else MAX_COPIES + 1
    if copies > MAX_COPIES:
        return L2Plan("cold flush", flush=True)
    return L2Plan("cold" if copies == 1 else f"cold x{copies}", copies)


def calls_per_launch(call_us: float, copies: int) -> int:
    """Calls that last REPLAY_US or more together, in whole rotations so that every copy counts alike."""
    return copies * math.ceil(REPLAY_US / (max(call_us, EVENT_US) * copies))


@dataclass(frozen=True)
class Timed:
    """What is put between two events: the next of `launches`, worth `calls` calls and about `launch_us`."""

    mode: str  # "graph"; "single": one long call; "eager": short calls that could not be captured
    launches: Iterator[Call]
    calls: int
    launch_us: float
    note: str = ""


def prepare(device: Device, calls: Sequence[Call], plan: L2Plan) -> Timed:
    """Decide how to time `calls` (one per copy of the inputs, each called at least once before)."""
    before = device.flush if plan.flush else None
    call_us = min(device.time_us([calls[0]] * 3, before))
    if call_us >= LONG_US:
        return Timed("single", itertools.cycle(calls), 1, call_us)
    try:
        # Eager times of short calls are mostly launch cost; only a graph tells how many calls a graph needs.
        replay = device.capture(calls)
        num_calls, replay_us = len(calls), min(device.time_us([replay] * 3, before))
        if not plan.flush:
            num_calls = calls_per_launch(replay_us / len(calls), len(calls))
            replay_us *= num_calls / len(calls)
            replay = device.capture(list(calls) * (num_calls // len(calls)))
        return Timed("graph", itertools.repeat(replay), num_calls, replay_us)
    except CaptureError as error:
        num_calls = 1 if plan.flush else calls_per_launch(call_us, len(calls))
        batch = list(calls) * (num_calls // len(calls))
        launch = calls[0] if plan.flush else lambda: [call() for call in batch]
        return Timed("eager", itertools.repeat(launch), num_calls, call_us * num_calls, str(error))


def sample(device: Device, timed: Timed, seconds: float, plan: L2Plan) -> list[float]:
    """Times of one call in µs, from bursts of launches over about `seconds`, at least one burst."""
    before = device.flush if plan.flush else None
    burst = min(MAX_BURST, max(1, round(BURST_US / max(timed.launch_us, EVENT_US))))
    # After a synchronisation the GPU waits for the first launch, and L2 holds what ran before: drop it.
    lead = 0 if timed.launch_us >= LONG_US else 1
    times: list[float] = []
    end = device.now() + seconds
    while not times or device.now() < end:
        launches = list(itertools.islice(timed.launches, burst + lead))
        times += [us / timed.calls for us in device.time_us(launches, before)[lead:]]
    return times


def alternate(
    device: Device, timed: dict[str, Timed], plan: L2Plan, durations: Durations
) -> dict[str, list[list[float]]]:
    """Times of each contestant, one list per round; the contestants take turns within every round."""
    for contestant in timed.values():
        sample(device, contestant, durations.warmup_s, plan)
    times: dict[str, list[list[float]]] = {name: [] for name in timed}
    for _ in range(durations.rounds):
        for name, contestant in timed.items():
            times[name].append(sample(device, contestant, durations.repeat_s / durations.rounds, plan))
    return times


def flat(rounds: list[list[float]]) -> Stats:
    return Stats.of(itertools.chain.from_iterable(rounds))


def ratio(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, float]:
    """Median time over median time, and its smallest and largest value in a round."""
    per_round = [Stats.of(a).median / Stats.of(b).median for a, b in zip(ours, theirs, strict=True)]
    return {"median": flat(ours).median / flat(theirs).median, "min": min(per_round), "max": max(per_round)}


def host_us(device: Device, eager: Call, gpu_us: float, seconds: float) -> float:
    """Host time of one eager call: mean over a batch issued without synchronising, median over batches."""
    # Long calls: queue no more than 50 ms of them.
    batch = min(HOST_BATCH, max(1, int(5 * BURST_US / max(gpu_us, EVENT_US))))
    eager()
    device.synchronize()
    means: list[float] = []
    end = device.now() + seconds
    while not means or device.now() < end:
        start = device.now()
        for _ in range(batch):
            eager()
        means.append((device.now() - start) / batch * 1e6)
        device.synchronize()
    return Stats.of(means).median


def ceilings(device: Device, with_matmul: bool, durations: Durations) -> dict[str, float | None]:
    """What this card gives now: a copy of 1 GiB (bytes read and written) and a bf16 matrix product."""

    def median_us(call: Call) -> float:
        call()
        plan = L2Plan("cold")
        return flat(alternate(device, {"": prepare(device, [call], plan)}, plan, durations)[""]).median

    num_bytes, n = 1 << 30, 8192
    copy_us = median_us(device.copy_call(num_bytes))
    matmul = device.matmul_call(n) if with_matmul else None
    return {
        "copy_gb_per_s": 2 * num_bytes / copy_us * 1e-3,
        "matmul_tflop_per_s": None if matmul is None else 2 * n**3 / median_us(matmul) * 1e-6,
    }
