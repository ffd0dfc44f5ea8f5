"""The Numba merges in the simulator, against the definition: ``reference.merge_states``.

`merge_bound` holds for them as it stands. A stack is summed as the bound assumes. For two states a and b, a
the larger, the weights p are divided by their sum before the products: one rounding more for each. The
bound counts no more than a product and an addition for a, but u p_a |v_a| <= u (|out| + p_b |v_b|), and
there is room for both: 3u |out| are for a quotient that is not there, and 2u p_b |v_b| are left because exp
is good to 1 ulp, where the bound allows 2.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import cuda

import cuattn
import cuattn.numba
from cuattn import reference
from cuattn.numba import merge, merge_state, merge_states, merge_states_varlen, state
from cuattn.testing import (
    DTYPES,
    LAYOUTS,
    PROFILES,
    MergeLaws,
    StateCase,
    assert_close,
    assert_same_bits,
    assert_state,
    check_guard,
    guarded,
    merge_bound,
)
from cuattn.testing.profiles import as_dtype
from tests.simulator.fastsim import thread_order

# A thread of the simulator takes some ten microseconds, so rows and features are few; states may be more.
HEAD_DIMS = (1, 2, 7)
CASES = st.builds(
    StateCase,
    rows=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    num_states=st.integers(0, 9),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    profile=st.sampled_from(PROFILES),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**32 - 1),
)


def check(merged, outs, lses, dtype, case=None):
    expected, bound = reference.merge_states(outs, lses), merge_bound(outs, lses, dtype)
    assert_state(merged, expected, bound, dtype=dtype, case=case)


# Against the definition


@given(case=CASES)
@example(case=StateCase((2, 3), 0, 7))
@example(case=StateCase((1, 2), 70, 2, "bfloat16", "one state dominates"))
@example(case=StateCase((2, 1), 9, 7, "float16", "empty holds poison", "head major"))
def test_a_stack_is_the_definition(case):
    outs, lses = case.outs(), case.lses()
    check(merge_states(outs, lses), outs, lses, case.dtype, case)


@pytest.mark.parametrize("index", [np.int32, np.int64])
@given(case=CASES, cuts=st.lists(st.integers(0, 9), max_size=4))
def test_segments_of_any_length(index, case, cuts):
    case = dataclasses.replace(case, rows=case.rows[1:])
    ends = np.sort(np.minimum([0, *cuts, case.num_states], case.num_states))
    outs, lses = case.outs(), case.lses()
    merged = merge_states_varlen(outs, lses, np.repeat(ends.astype(index), 2)[::2])  # strided
    for i, (begin, end) in enumerate(pairwise(ends)):
        check((merged.out[i], merged.lse[i]), outs[begin:end], lses[begin:end], case.dtype, case)


def packed(out_a, lse_a, out_b, lse_b):
    """The laws are about any number of leading axes; here there are two."""
    if lse_a.ndim == 1:
        merged = packed(out_a[:, None], lse_a[:, None], out_b[:, None], lse_b[:, None])
        return merged[0][:, 0], merged[1][:, 0]
    if lse_a.ndim == 3:
        result = np.empty(out_a.shape, out_a.dtype), np.empty(lse_a.shape, np.float32)
        for b, parts in enumerate(zip(out_a, lse_a, out_b, lse_b)):
            result[0][b], result[1][b] = merge_state(*parts)
        return result
    return merge_state(out_a, lse_a, out_b, lse_b)


@pytest.mark.parametrize("law", MergeLaws.names())
def test_laws_of_two_states(law):
    options = settings(max_examples=40, deadline=None, database=None)
    MergeLaws(packed, layouts=LAYOUTS, head_dims=HEAD_DIMS, max_rows=6, settings=options).check(law)


@pytest.mark.parametrize(
    ("dtype_a", "dtype_b"), [("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("dtype", ["float32", None])
def test_mixed_dtypes(dtype_a, dtype_b, dtype):
    (out_a, lse_a), (out_b, lse_b) = StateCase((2, 3), 2, 7, seed=1).parts()
    out_a, out_b = out_a.astype(as_dtype(dtype_a)), out_b.astype(as_dtype(dtype_b))
    out = None if dtype is None else np.empty(out_a.shape, dtype)
    merged = merge_state(out_a, lse_a, out_b, lse_b, out=out)
    assert out is None or merged.out is out
    expected = dtype or (dtype_a if dtype_a == dtype_b else "float32")
    outs = np.stack([out_a.astype(np.float32), out_b.astype(np.float32)])
    check(merged, outs, np.stack([lse_a, lse_b]), expected)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 2.0])
def test_nan_spreads_in_its_row_only(value):
    outs, lses = np.ones((3, 1, 2, 1), np.float32), np.zeros((3, 1, 2), np.float32)
    lses[1, 0, 0], lses[2, 0, 0] = np.nan, value
    for merged in (merge_states(outs, lses), merge_state(outs[1], lses[1], outs[2], lses[2])):
        assert np.isnan(merged.lse[0, 0])
        assert np.isnan(merged.out[0, 0])
        assert np.isfinite(merged.lse[0, 1])
        assert merged.out[0, 1] == 1


# Where results go


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["stack", "pair", "segments"])
def test_results_go_into_given_arrays_and_nowhere_else(form, dtype, layout):
    case = StateCase((2, 3), 3, 7, dtype)
    outs, lses = case.outs(), case.lses()
    buffer, out = guarded((2, 3, 7), dtype, layout)
    lse_buffer, lse = guarded((2, 3, 1), "float32", layout)
    result = {"out": out, "lse": lse[..., 0]}
    if form == "stack":
        merged = merge_states(outs, lses, **result)
        check(merged, outs, lses, dtype)
    elif form == "pair":
        merged = merge_state(outs[0], lses[0], outs[1], lses[1], **result)
        check(merged, outs[:2], lses[:2], dtype)
    else:
        merged = merge_states_varlen(outs[:, 0], lses[:, 0], np.array([0, 1, 3], np.int32), **result)
        check((merged.out[1], merged.lse[1]), outs[1:3, 0], lses[1:3, 0], dtype)
    assert merged.out is out
    assert merged.lse is result["lse"]
    check_guard(buffer, out)
    check_guard(lse_buffer, lse)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_a_state_may_be_overwritten(order, target):
    case = StateCase((2, 3), 3, 7, "bfloat16", seed=2)
    outs, lses = case.outs(), case.lses()
    with thread_order(order):
        merge_states(outs, lses, out=outs[target], lse=lses[target])
        check((outs[target], lses[target]), case.outs(), case.lses(), "bfloat16")
        outs, lses = case.outs(), case.lses()
        a, b = (outs[target - 1], lses[target - 1]), (outs[target], lses[target])
        merge_state(*a, *b, out=b[0], lse=b[1])
    pair = [target - 1, target]
    check(b, case.outs()[pair], case.lses()[pair], "bfloat16")


@pytest.mark.parametrize("indptr", [[-3, 2, 9], [-9, -1, 2], [5, 7, 8], [3, 1, 2], [2**31 - 1, -(2**31), 0]])
def test_offsets_outside_the_stack_read_nothing_outside(indptr):
    case = StateCase((1, 2), 5, 3, layout="row slice")
    outs, lses = case.outs()[1:4, 0], case.lses()[1:4, 0]  # poison or other states on both sides
    with cuattn.checking("arguments"):
        merged = merge_states_varlen(outs, lses, np.array(indptr, np.int32))
    for i, (begin, end) in enumerate(zip(np.clip(indptr[:-1], 0, 3), np.clip(indptr[1:], 0, 3))):
        check((merged.out[i], merged.lse[i]), outs[begin:end], lses[begin:end], "float32")


def test_values_are_checked_on_request():
    out, lse = np.ones((3, 1, 2), np.float32), np.zeros((3, 1), np.float32)
    rule = r"numba.merge_states_varlen: indptr\[-1\] must be at most outs.shape\[0\] \(3\); got 4"
    with cuattn.checking("values"), pytest.raises(ValueError, match=rule):
        merge_states_varlen(out, lse, np.array([0, 4]))


# Device functions


def test_merge_in_a_kernel_of_your_own():
    @cuda.jit
    def accumulate(out, lse, new_out, new_lse):
        i = cuda.grid(1)
        if i < out.shape[0]:
            weight, new_weight, lse[i] = merge(lse[i], new_lse[i])
            out[i] = weight * out[i] + new_weight * new_out[i]

    case = StateCase((5,), 2, 1, seed=3)
    (out, lse), (new_out, new_lse) = case.parts()
    accumulate[2, 4](out[:, 0], lse, new_out[:, 0], new_lse)
    check((out, lse), case.outs(), case.lses(), "float32")


@pytest.mark.parametrize(
    ("lses", "expected"),
    [
        ((-np.inf, -np.inf), (0, 0, -np.inf)),
        ((-3, -np.inf), (1, 0, -3)),
        ((-np.inf, 1e30), (0, 1, 1e30)),
        ((0, 0), (0.5, 0.5, np.log(2))),
        ((-1e30, 1e30), (0, 1, 1e30)),
        ((np.nan, 0), (np.nan,) * 3),
        ((-np.inf, np.nan), (np.nan,) * 3),
    ],
)
def test_weights(lses, expected):
    merged = merge(*map(np.float32, lses))
    np.testing.assert_array_equal(merged, np.float32(expected))
    assert {type(x) for x in merged} == {np.float32}


def test_every_bfloat16_is_read_exactly():
    bits = np.arange(2**16).astype(np.uint16)
    read = np.array([state.from_bfloat16(b) for b in bits])
    assert_same_bits(read, bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_bfloat16_is_rounded_to_nearest_even():
    rng = np.random.default_rng(0)
    upper = rng.integers(0, 2**16, 4000, dtype=np.uint32) << 16
    lower = rng.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 4000)  # around ties
    edges = [0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x00000001, 0x80008000, 0x007FFFFF]
    edges += [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]  # NaN that rounding would turn into 0 or infinity
    values = np.concatenate([upper | lower, np.array(edges, np.uint32)]).view(np.float32)
    rounded = np.array([state.to_bfloat16(x) for x in values]).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # NaN among them
        expected = values.astype(ml_dtypes.bfloat16)
    assert_close(rounded, expected, 0)
    nan = np.isnan(values)
    assert_same_bits(rounded[~nan], expected[~nan])


# What is refused


@pytest.mark.parametrize(
    ("function", "shapes", "error", "rule"),
    [
        (merge_state, [(3, 4), (3,), (3, 4), (3,)], ValueError,
         r"numba.merge_state: the result must be \(tokens, heads, head_dim\); got shape \(3, 4\)"),
        (merge_states, [(2, 3, 4), (2, 3)], ValueError,
         r"numba.merge_states: the result must be \(tokens, heads, head_dim\); got shape \(3, 4\)"),
        (merge_states, [(2, 0, 65536, 1), (2, 0, 65536)], ValueError,
         r"numba.merge_states: heads must be at most 65535; got 65536"),
        (merge_state, [(1, 2, 3), (1, 2), (1, 2, 4), (1, 2)], ValueError,
         r"numba.merge_state: out_b.shape must equal out_a.shape \(1, 2, 3\); got \(1, 2, 4\)"),
        (merge_states_varlen, [(2, 1, 3), (2, 1), (3,)], TypeError,
         r"numba.merge_states_varlen: indptr must be int32 or int64; got float32"),
        (merge_states_varlen, [(2, 1, 3), (2, 1), None], TypeError,
         r"numba.merge_states_varlen: indptr must be an array; got None"),
    ],
)  # fmt: skip
def test_refusals(function, shapes, error, rule):
    with pytest.raises(error, match=rule):
        function(*(None if shape is None else np.zeros(shape, np.float32) for shape in shapes))
