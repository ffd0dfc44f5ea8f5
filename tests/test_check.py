"""The checks that all operations share, and the collapsing of axes, against brute force over every address."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuattn
from cuattn import _check, _launch
from cuattn._call import ArraySpec
from cuattn._dims import collapse, pad_front
from tests.engine import EmulatorEngine

DTYPES = [np.dtype(t) for t in (np.uint8, np.float16, np.float32, np.int64)]
BYTES = 256  # of the buffer that views are drawn from


def offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Of every element, the last axis fastest."""
    return [sum(i * s for i, s in zip(index, strides)) for index in itertools.product(*map(range, shape))]


def addresses(view: np.ndarray) -> list[int]:
    """Of every byte of every element, as often as it is reached."""
    return [view.ctypes.data + at + b for at in offsets(view.shape, view.strides) for b in range(view.itemsize)]


def spec(array: np.ndarray) -> ArraySpec:
    address = array.ctypes.data
    return ArraySpec(array.shape, array.strides, array.dtype, min(16, address & -address))


@st.composite
def views(draw, buffer: np.ndarray) -> np.ndarray:
    """Any view: negative, zero and odd strides, axes of size 0 and 1, elements that overlap."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 5]), max_size=3)))
    unit = draw(st.sampled_from([1, dtype.itemsize, dtype.itemsize]))
    strides = tuple(draw(st.integers(-12, 12)) * unit for _ in shape)
    reached = offsets(shape, strides) or [0]
    room = BYTES - dtype.itemsize - max(reached) + min(reached)
    if room < 0:
        shape, strides, room, reached = (), (), BYTES - dtype.itemsize, [0]
    start = draw(st.integers(0, room)) - min(reached)
    return np.ndarray(shape, dtype, buffer, start, strides)


BUFFER = np.zeros(BYTES, np.uint8)


# Overlap


@settings(max_examples=1500)
@given(a=views(BUFFER), b=views(BUFFER))
@example(a=BUFFER[0:100:2], b=BUFFER[1:100:2])  # interleaved: extents overlap, the arrays don't
@example(a=BUFFER[10:0], b=BUFFER)  # nothing overlaps nothing
@example(a=BUFFER[:8][::-1], b=BUFFER[7:9])
def test_overlap_is_exact(a, b):
    shared = not set(addresses(a)).isdisjoint(addresses(b))
    assert shared == np.shares_memory(a, b)
    assert _check.overlap(spec(a), a.ctypes.data, spec(b), b.ctypes.data) == shared
    assert _check.overlap(spec(b), b.ctypes.data, spec(a), a.ctypes.data) == shared


def test_overlap_gives_up_on_the_safe_side():
    """Finding out whether two such grids meet is a hard problem: the answer is yes."""
    shape, dtype = (60,) * 6, np.dtype(np.uint8)
    primes = [(100003, 100019, 100043, 100049, 100057, 100069), (100103, 100109, 100129, 100151, 100153, 100169)]
    a, b = (ArraySpec(shape, strides, dtype, 1) for strides in primes)
    assert _check.overlap(a, 10**9, b, 10**9 + 12345) is True


@given(view=views(BUFFER))
def test_extent_is_where_an_array_lies(view):
    low, high = spec(view).extent
    reached = [at - view.ctypes.data for at in addresses(view)]
    assert (low, high) == ((min(reached), max(reached) + 1) if reached else (0, 0))


# Outputs without two elements in one place


@settings(max_examples=1500)
@given(view=views(BUFFER))
def test_distinct_elements_never_lets_an_overlap_through(view):
    reached = addresses(view)
    if len(set(reached)) < len(reached):
        with pytest.raises(ValueError, match="f: out must not overlap itself"):
            _check.distinct_elements("f: out", spec(view))


@settings(max_examples=300)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    gap=st.integers(0, 3),
    data=st.data(),
)
def test_distinct_elements_accepts_transposed_reversed_and_sliced_arrays(shape, order, gap, data):
    view = np.zeros([n + gap for n in shape], np.float32)[tuple(slice(0, n) for n in shape)]
    axes = list(range(view.ndim))
    order.shuffle(axes)
    view = view.transpose(axes)[tuple(slice(None, None, data.draw(st.sampled_from([1, -1]))) for _ in axes)]
    _check.distinct_elements("f: out", spec(view))


@pytest.mark.parametrize(
    "view",
    [
        np.broadcast_to(np.zeros(8, np.float32), (3, 8)),
        np.lib.stride_tricks.sliding_window_view(np.zeros(9, np.float32), 4),
        np.ndarray((4,), np.float32, np.zeros(16, np.uint8), 0, (3,)),  # half an element further
    ],
    ids=["broadcast", "sliding", "half an element"],
)
def test_distinct_elements_refuses(view):
    with pytest.raises(ValueError, match="f: out must not overlap itself; got shape"):
        _check.distinct_elements("f: out", spec(view))


# Alignment


@settings(max_examples=500)
@given(view=views(BUFFER), data=st.data())
def test_alignment_divides_every_row_and_no_more(view, data):
    axes = range(data.draw(st.integers(0, view.ndim)))
    rows = offsets(tuple(view.shape[a] for a in axes), tuple(view.strides[a] for a in axes))
    expected = math.gcd(16, *(view.ctypes.data + at for at in rows))
    found = _check.alignment(spec(view), axes)
    assert expected % found == 0
    if 0 not in view.shape:
        assert found == expected


class Recorder(EmulatorEngine):
    def launch(self, kernel, *_):
        self.launched.append(kernel)


ARGUMENTS = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_elements_across_word_boundaries_are_refused(name):
    """A GPU faults on them, and the process is lost; a view of bytes makes such arrays."""

    def odd(array: np.ndarray) -> np.ndarray:
        return np.ndarray(array.shape, array.dtype, np.zeros(array.nbytes + 2, np.uint8), 2)

    arrays = {n: np.zeros((3, 8) if n.startswith("out") else 3, np.float32) for n in ARGUMENTS}
    arrays[name] = odd(arrays[name])
    assert not arrays[name].flags.aligned
    engine = Recorder()
    with _launch.emulated(engine), pytest.raises(ValueError, match=rf"^merge_state: {name}\b.*"):
        cuattn.merge_state(**arrays)
    assert engine.launched == []


# Collapsed axes


@st.composite
def axes(draw) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A shape and strides of a few arrays, many of whose axes follow on each other."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 1, 2, 3, 4]), max_size=5)))
    arrays = []
    for _ in range(draw(st.integers(1, 3))):
        strides, step = [], draw(st.sampled_from([-1, 0, 1, 2]))
        for size in reversed(shape):
            step += draw(st.sampled_from([0, 0, 0, 0, 5]))
            strides.append(step)
            step *= size
        arrays.append(tuple(reversed(strides)))
    return shape, arrays


@settings(max_examples=800)
@given(axes=axes())
def test_collapse_visits_the_same_offsets_in_the_same_order(axes):
    shape, strides = axes
    sizes, kept = collapse(shape, strides)
    assert len(kept) == len(strides)
    for before, after in zip(strides, kept):
        assert offsets(sizes, after) == offsets(shape, before)
    assert 1 not in sizes
    for axis in range(len(sizes) - 1):  # and there is nothing left to merge
        assert any(k[axis] != k[axis + 1] * sizes[axis + 1] for k in kept)


@given(axes=axes())
def test_collapse_of_collapsed_changes_nothing(axes):
    assert collapse(*collapse(*axes)) == collapse(*axes)


def test_pad_front():
    assert pad_front((), 3, 1) == (1, 1, 1)
    assert pad_front((5, 6), 3, 0) == (0, 5, 6)
    assert pad_front([5, 6, 7], 3, 0) == (5, 6, 7)


# Messages: function, argument, rule, value

SPEC = ArraySpec((2, 3, 8), (96, 32, 4), np.dtype(np.float32), 16)
REFUSALS = [
    (lambda: _check.dtype("f: x", SPEC, [_check.FLOAT16]), TypeError, "f: x must be float16; got float32"),
    (lambda: _check.dtype("f: x", SPEC, _check.INDICES), TypeError, "f: x must be int32 or int64; got float32"),
    (lambda: _check.dtype("f: x", SPEC, [np.dtype(t) for t in (np.int8, ml_dtypes.bfloat16, np.float16)]), TypeError,
     "f: x must be int8, bfloat16 or float16; got float32"),
    (lambda: _check.shape("f: x", SPEC, (2, 3), "q.shape"), ValueError,
     "f: x.shape must equal q.shape (2, 3); got (2, 3, 8)"),
    (lambda: _check.axes("f: x", SPEC, ("a", "b")), ValueError, "f: x must have the axes (a, b); got shape (2, 3, 8)"),
    (lambda: _check.axes("f: x", SPEC, ("a", "b", "...", "c", "d")), ValueError,
     "f: x must have the axes (a, b, ..., c, d); got shape (2, 3, 8)"),
    (lambda: _check.head_dim("f: x", replace(SPEC, shape=(2, 513), strides=(4104, 8))), ValueError,
     "f: x.shape[-1] (head_dim) must be 1 to 512; got 513"),
    (lambda: _check.head_dim("f: x", replace(SPEC, strides=(96, 4, 12))), ValueError,
     "f: x must be contiguous along its last axis (stride 4 bytes); got 12"),
    (lambda: _check.strides_in_elements("f: x", replace(SPEC, strides=(96, 34, 4))), ValueError,
     "f: x.strides[1] must be a multiple of 4 bytes; got 34"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "error", "message"), REFUSALS, ids=[r[2] for r in REFUSALS])
def test_refusals_name_argument_rule_and_value(check, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check()


def test_what_fits_is_accepted():
    _check.dtype("f: x", SPEC, _check.FLOATS)
    for names in (("a", "b", "c"), ("...", "c"), ("a", "b", "...", "c")):
        _check.axes("f: x", SPEC, names)
    assert _check.head_dim("f: x", SPEC) == 8
    assert _check.head_dim("f: x", replace(SPEC, shape=(2, 1), strides=(4, 400))) == 1  # nothing to step over
    assert _check.strides_in_elements("f: x", replace(SPEC, strides=(-96, 0, 4))) == (-24, 0, 1)
    assert _check.fresh((2, 0, 3), np.dtype(np.float16)).alignment == 16


TOP = 2**31 - 1
OFFSETS = [
    ([-1, 2], "x[0] must be at least 0; got -1"),
    ([0, 3, 2, 1], "x must be ascending; got 3 before 2 at index 2"),
    ([0, 3, 9], "x[-1] must be at most total (8); got 9"),
    ([0, TOP, -TOP - 1], f"x must be ascending; got {TOP} before {-TOP - 1} at index 2"),  # a fall that wraps to a rise
]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("values", "message"), OFFSETS, ids=[message for _, message in OFFSETS])
def test_ascending_offsets_refuses(values, message, dtype):
    scale = 2**32 if dtype is np.int64 and TOP in values else 1  # the widest values of either dtype
    array = np.array(values, np.int64) * scale
    if scale > 1:
        message = f"x must be ascending; got {array[1]} before {array[2]} at index 2"
    with pytest.raises(ValueError, match=f"^f: {re.escape(message)}$"):
        _check.ascending_offsets("f: x", array.astype(dtype), 8, "total")


@pytest.mark.parametrize("values", [[], [0], [8], [0, 0, 8, 8], [3, 5]])
def test_ascending_offsets_accepts(values):
    _check.ascending_offsets("f: x", np.array(values, np.int32), 8, "total")
