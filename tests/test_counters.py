"""Counters of persistent kernels: whose they are. With a CuPy that only records; no GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cuattn import _counters
from cuattn._counters import Counters


class Streams:
    """As much of CuPy as counters need."""

    def __init__(self) -> None:
        self.ptr, self.capturing, self.allocated, self.waited = 0, False, 0, 0
        self.cuda = SimpleNamespace(get_current_stream=lambda: self)

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        assert not self.capturing
        self.waited += 1

    def zeros(self, count: int, dtype: str) -> np.ndarray:
        assert not self.capturing
        self.allocated += 1
        return np.zeros(count, dtype)


@pytest.fixture
def streams():
    return Streams()


def place(array: np.ndarray) -> int:
    assert array.shape == (1,) and array.dtype == np.uint32
    return array.__array_interface__["data"][0]


def test_a_stream_keeps_its_counter(streams):
    counters, found = Counters(streams), {}
    for _ in range(2):
        for device in (0, 1):
            for streams.ptr in (0, 1, 77):
                found.setdefault((device, streams.ptr), set()).add(place(counters.of_current_stream(device)))
    assert all(len(places) == 1 for places in found.values())
    assert len(set.union(*found.values())) == 6
    assert streams.allocated == streams.waited == 2  # one block a device; others may use it at once


def test_default_streams_of_threads_are_not_one(streams):
    counters, streams.ptr = Counters(streams), _counters._PER_THREAD
    found = [place(counters.of_current_stream(0))]
    thread = threading.Thread(target=lambda: found.append(place(counters.of_current_stream(0))))
    thread.start()
    thread.join()
    assert found[0] != found[1] and place(counters.of_current_stream(0)) == found[0]


def test_what_is_captured_gets_one_of_its_own_without_allocation(streams, monkeypatch):
    monkeypatch.setattr(_counters, "_AT_ONCE", 3)
    counters, streams.capturing = Counters(streams), True
    with pytest.raises(RuntimeError, match="while a graph is captured: call attention on this device before"):
        counters.of_current_stream(0)
    streams.capturing = False
    eager = place(counters.of_current_stream(0))
    streams.capturing = True
    assert len({eager, *(place(counters.of_current_stream(0)) for _ in range(2))}) == 3
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        counters.of_current_stream(0)
    streams.capturing, streams.ptr = False, 5
    assert place(counters.of_current_stream(0)) and streams.allocated == 2
