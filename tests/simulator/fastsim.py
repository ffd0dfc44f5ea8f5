"""Numba's CUDA simulator, made fast and given warps.

Numba's simulator runs every CUDA thread as an OS thread, which makes a barrier cost about a millisecond per
thread, and it has no warp operations. `install` replaces parts of it, in this process only:

``simulator.kernel.BlockManager.run``
    runs the threads of a block as greenlets, one after the other, each up to its next barrier. A barrier
    then costs microseconds, and threads that wait for each other are reported at once instead of hanging.
``simulator.kernelapi.threading``
    answers ``current_thread()``, by which ``cuda.threadIdx`` and the like are found, with the running thread.
``simulator.kernelapi.FakeCUDAModule``
    gains syncwarp, shfl_sync, shfl_up_sync, shfl_down_sync, shfl_xor_sync, ballot_sync, all_sync, any_sync
    and eq_sync.
``simulator.kernel.swapped_cuda_module``
    which gives ``cuda`` its meaning inside a kernel, keeps it until the last thread has left a function.
    Numba's own takes it away with the first, also from those that still wait at a barrier in there.

These are private names of Numba. They exist in numba 0.61 to 0.68, and in numba-cuda 0.30.

Threads run in the order of their indices, or in that of `thread_order`. A missing barrier shows as a
difference between the orders; other races don't show.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import greenlet
import numpy as np
from numba import cuda
from numba.cuda.simulator import kernel, kernelapi

WARP = 32
FULL_MASK = 0xFFFFFFFF

_running: Thread | None = None  # the CUDA thread whose code is executing
_reversed = False


class Deadlock(RuntimeError):
    """Threads of a block wait for threads that will never come."""


class Meeting(NamedTuple):
    """Where a thread waits: threads meet if all of this is equal."""

    operation: str
    warp: int | None = None  # None: the whole block
    mask: int = FULL_MASK

    def __str__(self) -> str:
        warp = "" if self.warp is None else f" of warp {self.warp}, mask {self.mask:#x}"
        return self.operation + warp

    def expects(self, thread: Thread) -> bool:
        """Whether a thread that has not ended must come. Lanes of the mask that never existed need not."""
        return self.warp is None or (thread.warp == self.warp and bool(self.mask >> thread.lane & 1))


class Thread(greenlet.greenlet):
    """A CUDA thread; also what Numba's simulator asks for indices and block-wide barriers."""

    def __init__(
        self, body: Callable[[], None], block: Sequence[int], point: Sequence[int], block_dim: Sequence[int]
    ) -> None:
        super().__init__(body)
        self.gr_context = contextvars.copy_context()  # so that numpy.errstate around a launch holds inside
        self.blockIdx = kernelapi.Dim3(*block)
        self.threadIdx = kernelapi.Dim3(*point)
        x, y, z = point
        self.thread_id = x + block_dim[0] * (y + block_dim[1] * z)
        self.warp, self.lane = divmod(self.thread_id, WARP)
        self.waits_at: Meeting | None = None
        self.brings: Any = None  # to the meeting
        self.gets: dict[int, Any] = {}  # from the meeting: what each thread_id brought

    def meet(self, meeting: Meeting, value: Any = None) -> dict[int, Any]:
        """Wait for everybody whom the meeting expects; returns what each of them brought, by thread_id."""
        self.waits_at, self.brings = meeting, value
        self.parent.switch()
        return self.gets

    def syncthreads(self) -> None:
        self.meet(Meeting("syncthreads"))

    def syncthreads_count(self, value: Any) -> int:
        return sum(map(bool, self.meet(Meeting("syncthreads_count"), value).values()))

    def syncthreads_and(self, value: Any) -> int:
        return int(all(self.meet(Meeting("syncthreads_and"), value).values()))

    def syncthreads_or(self, value: Any) -> int:
        return int(any(self.meet(Meeting("syncthreads_or"), value).values()))

    def meet_warp(self, operation: str, mask: int, value: Any = None) -> dict[int, Any]:
        """Wait for the lanes of `mask`; returns what each of them brought, by lane."""
        mask = int(mask) & FULL_MASK
        if not mask >> self.lane & 1:
            raise ValueError(f"{operation}: mask {mask:#x} must name the calling lane {self.lane}")
        return {n % WARP: v for n, v in self.meet(Meeting(operation, self.warp, mask), value).items()}


def install() -> None:
    """Replace the parts of the simulator that the module's docstring lists.

    Raises
    ------
    RuntimeError
        If Numba was imported without its simulator.
    """
    if not cuda.config.ENABLE_CUDASIM:
        raise RuntimeError("fastsim.install: NUMBA_ENABLE_CUDASIM=1 must be set before numba is imported")
    kernel.BlockManager.run = _run_block
    kernel.swapped_cuda_module = _swapped_cuda_module
    kernelapi.threading = _Threading()
    for name, operation in WARP_OPERATIONS.items():
        setattr(kernelapi.FakeCUDAModule, name, operation)


@contextlib.contextmanager
def thread_order(order: str) -> Iterator[None]:
    """Within the block, run the threads of a block ``"forward"`` or ``"reverse"``."""
    global _reversed
    before, _reversed = _reversed, {"forward": False, "reverse": True}[order]
    try:
        yield
    finally:
        _reversed = before


def _run_block(self: Any, grid_point: Sequence[int], *args: Any) -> None:
    """Run one block: `self` is Numba's BlockManager."""
    global _running

    def body() -> None:
        if self._debug:  # as Numba's simulator does
            np.seterr(divide="raise")
        self._f(*args)

    threads = [Thread(body, grid_point, point, self._block_dim) for point in np.ndindex(*self._block_dim)]
    live = threads[::-1] if _reversed else threads
    try:
        while live:
            for thread in live:
                if thread.waits_at is None:
                    _running = thread
                    _resume(thread)
            live = [thread for thread in live if not thread.dead]
            _release(live)
    finally:
        for thread in threads:
            thread.throw()  # ends what an exception left waiting; nothing happens to the dead
        _running = None


def _resume(thread: Thread) -> None:
    """Run a thread to its next barrier or its end; an exception is told whose it is, in Numba's format."""
    try:
        thread.switch()
    except Exception as error:
        where = f"tid={list(thread.threadIdx)} ctaid={list(thread.blockIdx)}"
        message = f"{where}: {error}" if str(error) else where
        raise type(error)(message).with_traceback(error.__traceback__) from None


def _release(live: Sequence[Thread]) -> None:
    """Let the threads go on whose meeting is complete; every thread in `live` waits at one."""
    meetings: dict[Meeting, list[Thread]] = {}
    for thread in live:
        assert thread.waits_at is not None
        meetings.setdefault(thread.waits_at, []).append(thread)
    complete = [m for m, present in meetings.items() if len(present) == sum(map(m.expects, live))]
    for meeting in complete:
        brought = {thread.thread_id: thread.brings for thread in meetings[meeting]}
        for thread in meetings[meeting]:
            thread.waits_at, thread.gets = None, brought
    if live and not complete:
        waiting = "; ".join(
            f"{len(present)} in {meeting}, the first tid={list(present[0].threadIdx)}"
            for meeting, present in meetings.items()
        )
        block = f"block ctaid={list(live[0].blockIdx)}"
        raise Deadlock(f"deadlock in {block}: threads wait for each other: {waiting}")


class _Threading:
    """Stands in for the module `threading` where the simulator looks for the current CUDA thread."""

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    @staticmethod
    def current_thread() -> Any:
        return _running or threading.current_thread()


_inside: Counter[int] = Counter()  # threads inside functions of a module, by the id of its globals
_swapped: dict[int, list[str]] = {}  # the names that mean `cuda` there


@contextlib.contextmanager
def _swapped_cuda_module(function: Any, stand_in: Any) -> Iterator[None]:
    names = function.__globals__
    key = id(names)
    if not _inside[key]:
        _swapped[key] = [name for name, value in names.items() if value is cuda]
        names.update(dict.fromkeys(_swapped[key], stand_in))
    _inside[key] += 1
    try:
        yield
    finally:
        _inside[key] -= 1
        if not _inside[key]:
            names.update(dict.fromkeys(_swapped.pop(key), cuda))


def _thread() -> Thread:
    assert _running is not None, "a warp operation outside a kernel"
    return _running


def _shuffle(operation: str, source: Callable[[int, int], int]) -> Callable[..., Any]:
    """A shuffle: lane l reads from lane ``source(l, operand)``, its own value if that is outside the warp."""

    def shuffle(self: Any, mask: int, value: Any, operand: int) -> Any:
        values = _thread().meet_warp(operation, mask, value)
        lane = source(_thread().lane, int(operand) % WARP)
        return values.get(lane, _undefined(value)) if 0 <= lane < WARP else value

    return shuffle


def _undefined(like: Any) -> Any:
    """What a shuffle reads from a lane that takes no part: NaN, or a number that nobody expects."""
    dtype = np.asarray(like).dtype
    return dtype.type(np.nan) if dtype.kind in "fV" else np.frombuffer(b"\xa5" * dtype.itemsize, dtype)[0]


def _vote(operation: str, decide: Callable[[dict[int, Any]], Any]) -> Callable[..., Any]:
    """A vote: every lane gets the same function of all values."""
    return lambda self, mask, value: decide(_thread().meet_warp(operation, mask, value))


def _syncwarp(self: Any, mask: int = FULL_MASK) -> None:
    _thread().meet_warp("syncwarp", mask)


WARP_OPERATIONS: dict[str, Callable[..., Any]] = {
    "syncwarp": _syncwarp,
    "shfl_sync": _shuffle("shfl_sync", lambda lane, source: source),
    "shfl_up_sync": _shuffle("shfl_up_sync", lambda lane, delta: lane - delta),
    "shfl_down_sync": _shuffle("shfl_down_sync", lambda lane, delta: lane + delta),
    "shfl_xor_sync": _shuffle("shfl_xor_sync", lambda lane, bits: lane ^ bits),
    "ballot_sync": _vote("ballot_sync", lambda values: sum(1 << lane for lane, v in values.items() if v)),
    "all_sync": _vote("all_sync", lambda values: all(values.values())),
    "any_sync": _vote("any_sync", lambda values: any(values.values())),
    "eq_sync": _vote("eq_sync", lambda values: len(set(map(bool, values.values()))) == 1),
}
