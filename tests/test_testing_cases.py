"""cuattn.testing: cases, layouts, guard bytes, strategies."""

import importlib
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from cuattn import testing
from cuattn.testing import StateCase, strategies
from cuattn.testing.profiles import HAS_EMPTY, as_dtype
from tests.imitations import F32, FEW


@pytest.mark.parametrize(("layout", "dtype"), list(itertools.product(testing.LAYOUTS, testing.DTYPES)))
def test_layouts_and_guards(layout, dtype):
    case = StateCase((4, 3), 2, 40, dtype, "normal", layout, seed=5)
    plain = StateCase((4, 3), 2, 40, dtype, "normal", "contiguous", seed=5)
    outs, lses = case.outs(), case.lses()
    testing.assert_same_bits(outs, plain.outs())
    testing.assert_same_bits(lses, plain.lses())
    assert outs.strides[-1] == outs.itemsize
    assert eval(repr(case)) == case
    assert "\n" not in repr(case)
    assert layout in ("contiguous", "odd offset") or not outs.flags.c_contiguous
    assert layout != "odd offset" or outs.ctypes.data % 16 == outs.itemsize
    for shape in ((4, 3, 40), (4, 3), (0, 3), ()):
        for xp in (np, fake_cupy()):
            buffer, view = testing.guarded(shape, dtype, layout, xp=xp)
            assert view.shape == shape
            assert np.isnan(testing.to_host(view).astype(F32)).all()
            memory = getattr(buffer, "host", buffer)
            getattr(view, "host", view)[...] = 1
            testing.check_guard(buffer, view)
            memory[len(memory) - 64] = 1                           # the first element behind everything
            with pytest.raises(AssertionError, match="1 elements outside the output"):
                testing.check_guard(buffer, view)


def fake_cupy():
    """As much of CuPy as to_device uses, on host memory."""
    class Array:
        def __init__(self, shape, dtype, memptr, strides=None):
            self.memory, offset = memptr
            self.host = np.ndarray(shape, dtype, self.memory, offset, strides)
            self.shape, self.dtype, self.strides, self.size = shape, self.host.dtype, self.host.strides, self.host.size
            self.data = Pointer((self.memory, offset))

        def get(self):
            return self.host.copy()

    class Pointer(tuple):
        ptr = property(lambda self: self[1])

        def __add__(self, offset):
            return Pointer((self[0], self[1] + offset))

    def asarray(flat):
        assert flat.dtype == np.uint8
        assert flat.ndim == 1
        return Array(flat.shape, np.uint8, Pointer((flat.copy(), 0)), (1,))

    def empty(shape, dtype):
        return Array(shape, dtype, Pointer((np.empty(0, np.uint8), 0)), np.empty(shape, dtype).strides)
    return SimpleNamespace(__name__="cupy", asarray=asarray, ndarray=Array, empty=empty)


@given(case=strategies.state_cases(max_rows=20))
@settings(max_examples=60, deadline=None, database=None)
def test_cases_are_what_they_say_and_move_with_their_strides(case):
    outs, lses, parts = case.outs(), case.lses(), case.parts()
    assert outs.shape == (case.num_states, *case.rows, case.head_dim)
    assert outs.dtype == as_dtype(case.dtype)
    assert lses.shape == outs.shape[:-1]
    assert lses.dtype == F32
    assert len(parts) == case.num_states
    assert not np.isposinf(lses).any()
    assert not np.isnan(lses).any()
    assert case.profile in HAS_EMPTY or not np.isneginf(lses).any()
    expected, total = case.expected()
    assert np.isfinite(expected).all()
    assert (total < np.inf).all()
    for array in (outs, lses, *(x for part in parts for x in part)):
        moved = testing.to_device(array, fake_cupy())
        testing.assert_same_bits(moved.get(), array)
        assert moved.strides == array.strides or array.size == 0


@pytest.mark.parametrize("wanted", [
    lambda c: c.num_states == 0, lambda c: 0 in c.rows,
    lambda c: c.head_dim == 1, lambda c: c.head_dim == 512,
    lambda c: c.rows[-1] == 128 and 0 not in c.rows, lambda c: c.head_dim % 2 == 1 and c.num_states > 4,
    lambda c: c.profile == "tiny" and c.dtype == "bfloat16" and c.layout == "interleaved"])
def test_edges_are_reachable(wanted):
    quick = settings(max_examples=3000, database=None, suppress_health_check=list(HealthCheck))
    find(strategies.state_cases(), wanted, settings=quick)


@given(data=st.data(), n=st.integers(0, 9))
@FEW
def test_partitions_and_indptrs(data, n):
    cuts = data.draw(strategies.partitions(n))
    assert cuts[0] == 0
    assert cuts[-1] == n
    assert list(cuts) == sorted(cuts)
    indptr = data.draw(strategies.indptrs())
    assert indptr[0] == 0
    assert (np.diff(indptr) >= 0).all()
    assert indptr.dtype in (np.int32, np.int64)
    assert 1 <= data.draw(strategies.head_dims()) <= 512
    assert data.draw(strategies.dtypes()) in testing.DTYPES


@pytest.mark.parametrize(("field", "value"), [
    ("dtype", "float64"), ("profile", "odd"), ("layout", "odd"), ("head_dim", 513), ("num_states", -1)])
def test_state_case_refuses(field, value):
    with pytest.raises(ValueError, match="StateCase: "):
        StateCase(**{field: value})


def test_without_hypothesis_the_message_names_the_extra(monkeypatch):
    for name in ("hypothesis", "hypothesis.strategies"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("strategies", "laws"):
        monkeypatch.delitem(sys.modules, f"cuattn.testing.{name}", raising=False)
    for name in ("cuattn.testing.strategies", "cuattn.testing.laws"):
        with pytest.raises(ImportError, match=r"cuattn\[test\]"):
            importlib.import_module(name)
