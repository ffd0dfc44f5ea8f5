"""Where the pages of a cache are in a test, and when what is queued there runs: at once, or as late as streams may be."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cuattn import _paged_index, _paged_storage
from cuattn.paged import copy_pages, swap_pages
from tests.backends import Backend


class Place:
    """Where a backend computes."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend or Backend()
        self.xp = self.backend.xp
        self.side = None if self.xp is np else self.xp.cuda.Stream(non_blocking=True)  # to swap on

    def use(self) -> contextlib.AbstractContextManager[Any]:
        return self.backend.use()

    def queue(self, work: Callable[[], object]) -> None:
        """Put work on the current stream."""
        work()

    def go_on(self) -> None:
        """Let the device do some of what is queued."""

    def finish(self) -> None:
        """Let it do all of it."""
        if self.side is not None:
            self.xp.cuda.Device().synchronize()


class Event:
    done = False


class Stream:
    """Work in the order in which it was queued; an event that it waits for holds it up."""

    def __init__(self) -> None:
        self.queued: deque[Callable[[], object] | Event] = deque()

    def record(self, event: Event) -> Event:
        self.queued.append(lambda: setattr(event, "done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queued.append(event)

    @property
    def ready(self) -> bool:
        return bool(self.queued) and getattr(self.queued[0], "done", True)

    def step(self) -> None:
        first = self.queued.popleft()
        if not isinstance(first, Event):
            first()


class LateStreams(Place):
    """A device of two streams that are behind, each by as much as it likes: order is what events make of it.

    The memory is NumPy's. What has to be read is read by work on the stream; `go_on` picks whose turn it is.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.main, self.side = random.Random(seed), Stream(), Stream()
        self.most = self.random.choice([1, 3, 9])  # with 1 everything waits for the end
        device = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: 0),
            Device=lambda number: contextlib.nullcontext(),
            Event=lambda disable_timing: Event(),
            get_current_stream=lambda: self.main,
        )
        self.xp = SimpleNamespace(__name__="cupy", empty=np.empty, cuda=device, asarray=np.asarray)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        own = {"copy_pages": self._copy, "swap_pages": self._swap, "_host_memory": lambda xp, shape: np.empty(shape, np.uint8)}
        with mock.patch.multiple(_paged_storage, **own), mock.patch.object(_paged_index, "sender", return_value=np.copy):
            yield

    def queue(self, work: Callable[[], object]) -> None:
        self.main.queued.append(work)

    def go_on(self) -> None:
        for _ in range(self.random.randrange(self.most)):
            self._step()

    def finish(self) -> None:
        while self._step():
            pass
        assert not (self.main.queued or self.side.queued), "streams wait for each other"

    def _step(self) -> bool:
        ready = [stream for stream in (self.main, self.side) if stream.ready]
        if ready:
            self.random.choice(ready).step()
        return bool(ready)

    def _copy(self, *arrays: np.ndarray) -> None:
        self.queue(functools.partial(copy_pages, *arrays))

    def _swap(self, *given: Any, to_host: bool, stream: Stream) -> None:
        stream.queued.append(functools.partial(swap_pages, *given, to_host=to_host))
