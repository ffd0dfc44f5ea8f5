"""Counters of persistent kernels: whose they are. With a CuPy that only records; no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cuattn import _counters
from cuattn._counters import Counters


class Memory:
    """An array of the recording CuPy: a view knows what it is a view of."""

    def __init__(self, cupy: Cupy, shape: tuple[int, ...], values: np.ndarray | None = None) -> None:
        self.cupy, self.values = cupy, np.full(shape, 7, np.uint32) if values is None else values
        self.data = SimpleNamespace(memset_async=self.set)

    def __getitem__(self, part: slice) -> Memory:
        return Memory(self.cupy, (), self.values[part])

    def set(self, value: int, size: int) -> None:
        assert size == self.values.nbytes == 4
        self.values[...] = value

    @property
    def place(self) -> int:
        assert self.values.tolist() == [0]
        return self.values.__array_interface__["data"][0]


class Cupy:
    """As much of CuPy as counters need; nothing can be allocated while a graph is captured."""

    def __init__(self) -> None:
        self.capturing, self.allocated = False, 0
        self.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: self.capturing))

    def ndarray(self, shape: tuple[int, ...], dtype: str) -> Memory:
        assert not self.capturing and dtype == "uint32"
        self.allocated += 1
        return Memory(self, shape)


@pytest.fixture
def cupy():
    return Cupy()


def test_launches_get_them_in_turn(cupy, monkeypatch):
    monkeypatch.setattr(_counters, "_IN_TURN", 3)
    counters = Counters(cupy)
    places = [counters.zeroed(0).place for _ in range(7)]
    assert len(set(places)) == 3 and places[:4] == places[3:]
    assert counters.zeroed(1).place not in places
    assert cupy.allocated == 2  # once a device


def test_what_is_captured_keeps_its_own_until_they_are_used_up(cupy, monkeypatch):
    monkeypatch.setattr(_counters, "_FOR_GRAPHS", 3)
    counters, cupy.capturing = Counters(cupy), True
    assert counters.zeroed(0) is None  # nothing can be allocated now
    cupy.capturing = False
    eager = {counters.zeroed(0).place for _ in range(9)}
    cupy.capturing = True
    kept = {counters.zeroed(0).place for _ in range(3)}
    assert len(kept) == 3 and len(eager) == 9 and not kept & eager
    assert counters.zeroed(0) is None and counters.zeroed(1) is None
    cupy.capturing = False
    assert counters.zeroed(0).place not in kept
