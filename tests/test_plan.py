"""Plans of the merges: what any call launches is among the kernels that tests/test_compile.py compiles, and starts."""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn import _launch, _plan_state
from cuattn._compile import Kernel, build
from cuattn._launch import DeviceInfo
from tests.engine import EmulatorEngine
from tests.test_compile import DTYPES, KERNELS, empty_cache, types_of

__all__ = ["empty_cache"]  # a fixture


def state(dtype: str, *rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((*rows, 8), DTYPES[dtype]), np.zeros(rows, np.float32)


@pytest.mark.parametrize(("a", "b", "out"), [*itertools.product(DTYPES, repeat=3)])
def test_merges_admit_the_types_that_are_compiled(a, b, out):
    """What the checks let through has a kernel, and what they refuse has none."""
    result = {"out": state(out, 3)[0]}
    calls = {
        "pair": lambda: cuattn.merge_state(*state(a, 3), *state(b, 3), **result),
        "list": lambda: cuattn.merge_states(*zip(state(a, 3), state(b, 3)), **result),
    }
    if a == b:  # a stack has one dtype
        calls["stack"] = lambda: cuattn.merge_states(*state(a, 2, 3), **result)
    for form, call in calls.items():
        compiled = {types_of(k) for k in _plan_state.kernels() if k.entry == f"cuattn_merge_{form}"}
        if (a, b, out) in compiled:
            call()
        else:
            with pytest.raises(TypeError, match="must be"):
                call()


class Ghost:
    """An array that is nowhere: a plan looks at shape, strides, dtype and address only."""

    places = itertools.count(1)

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, offset: int) -> None:
        at = {"data": ((next(self.places) << 40) + offset, False), "typestr": f"|V{itemsize}"}
        self.__array_interface__ = {"shape": shape, "strides": strides, "version": 3, **at}


def ghost(shape: tuple[int, ...], dtype, pitch: int = 0, offset: int = 0) -> np.ndarray:
    """Rows `pitch` elements further apart than they must be, the first `offset` elements behind an aligned address."""
    item, strides, step = np.dtype(dtype).itemsize, [], 1
    for axis, size in reversed(list(enumerate(shape))):
        strides.append(step * item)
        step = step * size + (pitch if axis == len(shape) - 1 else 0)
    return np.asarray(Ghost(shape, tuple(reversed(strides)), item, offset * item)).view(dtype)


class Planner(EmulatorEngine):
    """Takes any call, runs nothing, and keeps what would have been launched."""

    def __init__(self, num_sms: int) -> None:
        super().__init__()
        self.num_sms = num_sms
        self.launches: list[tuple] = []

    def info(self, device: int) -> DeviceInfo:
        return DeviceInfo((9, 0), self.num_sms)

    def empty(self, shape: tuple[int, ...], dtype, device: int) -> np.ndarray:
        return ghost(shape, dtype)

    def launch(self, kernel, grid, block, shared_bytes, args, device) -> None:
        self.launches.append((kernel, grid, block, shared_bytes))


def launches(form: str, rows: tuple[int, ...], states: int, head_dim: int, types, places, num_sms: int) -> list:
    """What a merge launches; `places` are pitch and offset of the first state, the others, the result."""
    (a, at_a), (b, at_b), (o, at_o) = ((DTYPES[t], place) for t, place in zip(types, places))
    engine, f32 = Planner(num_sms), np.float32
    segments = np.linspace(0, states, rows[0] + 1).astype(np.int32) if form == "ragged" else None
    inner = rows[1:] if form == "ragged" else rows
    result = {"out": ghost((*rows, head_dim), o, *at_o)}
    with _launch.emulated(engine):
        if form == "pair":
            first, second = ghost((*rows, head_dim), a, *at_a), ghost((*rows, head_dim), b, *at_b)
            cuattn.merge_state(first, ghost(rows, f32), second, ghost(rows, f32), **result)
        elif form == "list":
            listed = [ghost((*rows, head_dim), a, *(at_a if n else at_b)) for n in range(states)]
            cuattn.merge_states(listed, [ghost(rows, f32) for _ in listed], **result)
        elif form == "stack":
            cuattn.merge_states(ghost((states, *rows, head_dim), a, *at_a), ghost((states, *rows), f32), **result)
        else:
            outs, lses = ghost((states, *inner, head_dim), a, *at_a), ghost((states, *inner), f32)
            cuattn.merge_states_varlen(outs, lses, segments, **result)
    return engine.launches


PAIRS = sorted({types_of(k) for k in _plan_state.kernels()})
UNIFORM = [t for t in PAIRS if t[0] == t[1]]
PLACES = st.tuples(*[st.tuples(st.sampled_from([0, 0, 1, 2, 4, 8]), st.sampled_from([0, 0, 1, 2, 4]))] * 3)


@pytest.mark.compile
@settings(max_examples=500)
@given(
    form_and_types=st.one_of(
        st.tuples(st.just("pair"), st.sampled_from(PAIRS)),
        st.tuples(st.sampled_from(["list", "stack", "ragged"]), st.sampled_from(UNIFORM)),
    ),
    rows=st.tuples(st.integers(1, 300), st.integers(1, 50), st.integers(1, 50)),
    states=st.one_of(st.integers(1, 70), st.integers(100, 5000)),
    head_dim=st.one_of(st.integers(1, 512), st.sampled_from([64, 80, 96, 128, 256, 512])),
    places=PLACES,
    num_sms=st.sampled_from([1, 4, 30, 132, 160]),
)
def test_plans_choose_compiled_kernels(form_and_types, rows, states, head_dim, places, num_sms):
    form, types = form_and_types
    states = states % 70 + 1 if form == "list" else states
    found = launches(form, rows, states, head_dim, types, places, num_sms)
    assert len(found) == (1 if form != "list" or states <= _plan_state.LIST else -(-states // _plan_state.LIST) + 1)
    for kernel, grid, block, shared in found:
        assert kernel in KERNELS
        features, row, groups = block
        assert features * dict(kernel.defines)["VEC"] == head_dim  # every feature once
        assert grid[0] * row >= np.prod(rows) > (grid[0] - 1) * row  # every row, no empty block
        assert features * row * groups <= most_threads(same_bound(kernel))
        assert groups <= 64  # the most a block may have along z
        assert groups == 1 or row == 1
        assert dict(kernel.defines)["SPLIT"] == (groups > 1)
        assert shared + 2048 <= 48 << 10  # what every GPU grants without being asked, our static part included


@functools.cache
def most_threads(kernel: Kernel) -> int:
    """For which a kernel is compiled: a larger block does not start."""
    code = build(kernel, "compute_90").code.decode()
    return int(re.findall(rf"\.entry {kernel.entry}\(.*?\.maxntid (\d+)", code, re.DOTALL)[0])


def same_bound(kernel: Kernel) -> Kernel:
    """The first kernel with this tile: types don't matter to the bound, so they need not all be compiled once more."""
    return next(k for k in KERNELS if k.entry == kernel.entry and k.defines[3:] == kernel.defines[3:])


@pytest.mark.parametrize("kernel", [*_plan_state.kernels()], ids=str)
def test_compiled_kernels_are_chosen(kernel):
    """Nothing is compiled and measured that no call can reach."""
    tile = dict(kernel.defines)
    form = kernel.entry.removeprefix("cuattn_merge_")
    rows = (2,) if tile["SPLIT"] else (10**6,)
    # A head_dim that no wider vector divides: 8, 12 or 3 elements.
    head_dim = {8: 8, 4: 12, 1: 3}[tile["VEC"]]
    found = launches(form, rows, 32, head_dim, types_of(kernel), [(0, 0)] * 3, 132)
    assert [launch[0] for launch in found] == [kernel]
