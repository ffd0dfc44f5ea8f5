"""Merges of states on every backend: against the definition, by their laws, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuattn
from cuattn import reference
from cuattn.testing import (
    MergeLaws,
    StateCase,
    assert_close,
    assert_same_bits,
    assert_state,
    check_guard,
    merge_bound,
    state_cases,
)
from cuattn.testing.cases import LAYOUTS
from cuattn.testing.strategies import indptrs

# Below, at and above a chunk (8 states), a list in one launch (32) and a block's share of a split row.
COUNTS = [0, 1, 2, 7, 8, 9, 16, 17, 31, 32]


def merged(backend, case: StateCase, form: str, **out):
    """The case merged in one of the three forms that take any number of states."""
    outs, lses = case.outs(), case.lses()
    if form == "stack":
        return cuattn.merge_states(backend.array(outs), backend.array(lses), **out)
    if form == "list":
        parts = [[backend.array(x) for x in part] for part in zip(outs, lses)]
        return cuattn.merge_states([p[0] for p in parts], [p[1] for p in parts], **out)
    indptr = backend.array(np.array([0, case.num_states], np.int64))
    state = cuattn.merge_states_varlen(backend.array(outs), backend.array(lses), indptr, **out)
    return cuattn.AttentionState(state.out[0], state.lse[0])


# Against the definition


@given(case=state_cases(max_states=12))
@example(case=StateCase((3,), 0, 64))
@example(case=StateCase((2, 3), 40, 128, "bfloat16"))
@example(case=StateCase((1, 2), 300, 512, "float16"))
@example(case=StateCase((2, 1, 3), 9, 1, "float32", "some empty", "interleaved"))
@pytest.mark.parametrize("form", ["stack", "list", "segment"])
def test_merge_states_is_the_definition(backend, form, case):
    if form == "list" and not 1 <= case.num_states <= 32:
        case = StateCase(case.rows, 32, case.head_dim, case.dtype, case.profile, case.layout, case.seed)
    bound = merge_bound(case.outs(), case.lses(), case.dtype)
    assert_state(merged(backend, case, form), case.expected(), bound, dtype=case.dtype, case=case)


@given(case=state_cases(min_states=2, max_states=2))
def test_merge_state_is_the_definition(backend, case):
    (out_a, lse_a), (out_b, lse_b) = ([backend.array(x) for x in part] for part in case.parts())
    bound = merge_bound(case.outs(), case.lses(), case.dtype)
    assert_state(cuattn.merge_state(out_a, lse_a, out_b, lse_b), case.expected(), bound, dtype=case.dtype, case=case)


@given(data=st.data(), case=state_cases(max_states=1, max_rows=12))
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_segments_of_any_length(backend, index, case, data):
    indptr = np.asarray(data.draw(indptrs(max_segments=5, max_length=40)), index)
    case = StateCase(case.rows, int(indptr[-1]), case.head_dim, case.dtype, case.profile, case.layout, case.seed)
    strided = np.repeat(indptr, 2)[::2]
    outs, lses = backend.array(case.outs()), backend.array(case.lses())
    state = cuattn.merge_states_varlen(outs, lses, backend.array(strided))
    for i, (begin, end) in enumerate(zip(indptr[:-1], indptr[1:])):
        part = case.outs()[begin:end], case.lses()[begin:end]
        bound = merge_bound(*part, case.dtype)
        assert_state((state.out[i], state.lse[i]), reference.merge_states(*part), bound, dtype=case.dtype, case=case)


@given(case=state_cases(min_states=2, max_states=2, max_rows=20), keep=st.randoms(use_true_random=False))
@pytest.mark.parametrize("per", ["token", "head"])
def test_in_place_touches_only_rows_of_the_mask(backend, per, case, keep):
    (out_a, lse_a), (out_b, lse_b) = case.parts()
    shape = lse_a.shape if per == "head" else lse_a.shape[:-1]
    mask = np.array([keep.random() < 0.5 for _ in range(int(np.prod(shape)))], bool).reshape(shape)
    out, lse = backend.array(out_a.copy()), backend.array(lse_a.copy())
    state = cuattn.merge_state_in_place(out, lse, backend.array(out_b), backend.array(lse_b), backend.array(mask))
    assert state.out is out and state.lse is lse
    expected, bounds = case.expected(), merge_bound(case.outs(), case.lses(), case.dtype)
    got = [backend.host(x) for x in state]
    assert_state([x[mask] for x in got], [x[mask] for x in expected], [x[mask] for x in bounds], dtype=case.dtype, case=case)
    assert_same_bits(got[0][~mask], out_a[~mask], case=case)
    assert_same_bits(got[1][~mask], lse_a[~mask], case=case)


@given(case=state_cases(min_states=2, max_states=2, max_rows=20, dtypes=["float16", "bfloat16"]))
def test_float32_accumulates_16_bit_states(backend, case):
    (out_a, lse_a), (out_b, lse_b) = case.parts()
    wide = out_a.astype(np.float32)
    arrays = [backend.array(x) for x in (wide, lse_a, out_b, lse_b)]
    expected = reference.merge_state(wide, lse_a, out_b, lse_b)
    bound = merge_bound(np.stack([wide, out_b.astype(np.float32)]), case.lses(), "float32")
    assert_state(cuattn.merge_state(*arrays), expected, bound, dtype="float32", case=case)
    assert_state(cuattn.merge_state(*arrays[2:], *arrays[:2]), expected, bound, dtype="float32", case=case)
    assert_state(cuattn.merge_state_in_place(*arrays), expected, bound, dtype="float32", case=case)


@given(case=state_cases(min_states=1, max_states=20, max_rows=20, dtypes=["float32"], profiles=["normal", "some empty"]))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_last_merge_rounds_to_16_bits(backend, dtype, case):
    buffer, out = backend.guarded(case.expected()[0].shape, dtype, "row slice")
    state = merged(backend, case, "stack", out=out)
    assert state.out is out
    assert_state(state, case.expected(), merge_bound(case.outs(), case.lses(), dtype), dtype=dtype, case=case)
    check_guard(buffer, out)


# Laws


@pytest.mark.parametrize("law", MergeLaws.names())
def test_law(backend, law):
    MergeLaws(cuattn.merge_state, xp=backend.xp, bitwise_commutative=True).check(law)


@given(case=state_cases(max_states=12, max_rows=20))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_go_to_any_strides_and_nowhere_else(backend, layout, case):
    shape = case.expected()[0].shape
    guard_out, out = backend.guarded(shape, case.dtype, layout)
    guard_lse, lse = backend.guarded((*shape[:-1], 1), "float32", layout)
    state = merged(backend, case, "stack", out=out, lse=lse[..., 0])
    assert_same_bits(state.out, merged(backend, case, "stack").out, case=case)
    check_guard(guard_out, out)
    check_guard(guard_lse, lse)


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_pair_list_stack_and_segment_give_the_same_bits(kernels, dtype, count):
    case = StateCase((3, 2), count, 40, dtype, "some empty", seed=count)
    stack = merged(kernels, case, "stack")
    for form in ("list", "segment"):
        other = merged(kernels, case, form)
        assert_same_bits(other.out, stack.out, case=case)
        assert_same_bits(other.lse, stack.lse, case=case)
    if count == 2:
        pair = cuattn.merge_state(*(kernels.array(x) for part in case.parts() for x in part))
        assert_same_bits(pair.out, stack.out, case=case)


@given(case=state_cases(min_states=1, max_states=30, max_rows=6), copies=st.integers(2, 200))
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kernels, case, copies):
    """Also across the plan's choice to share the states of few rows out over a block."""
    alone = merged(kernels, case, "stack")
    outs, lses = (np.repeat(x[:, None], copies, axis=1) for x in (case.outs(), case.lses()))
    batch = cuattn.merge_states(kernels.array(outs), kernels.array(lses))
    for i in (0, copies - 1):
        assert_same_bits(batch.out[i], alone.out, case=case)
        assert_same_bits(batch.lse[i], alone.lse, case=case)


@given(case=state_cases(min_states=2, max_states=20, max_rows=20))
def test_the_result_may_lie_on_an_input(kernels, case):
    expected = merged(kernels, case, "stack")
    for member in (0, case.num_states - 1):
        outs, lses = kernels.array(case.outs()), kernels.array(case.lses())
        state = cuattn.merge_states(outs, lses, out=outs[member], lse=lses[member])
        assert_same_bits(state.out, expected.out, case=case)
        assert_same_bits(state.lse, expected.lse, case=case)


@pytest.mark.parametrize("count", [33, 64, 65, 100])
def test_long_lists_merge_by_pieces(backend, count):
    case = StateCase((2, 3), count, 64, "bfloat16", "some empty", seed=count)
    outs, lses = case.outs(), case.lses()
    pieces = [slice(n, n + 32) for n in range(0, count, 32)]
    parts = [reference.merge_states(outs[p], lses[p]) for p in pieces]
    bounds = [merge_bound(outs[p], lses[p], "float32") for p in pieces]
    wide, wide_lse = (np.stack([part[k] for part in parts]) for k in (0, 1))
    errors = (np.stack([bound[k] for bound in bounds]) for k in (0, 1))
    bound = merge_bound(wide.astype(np.float32), wide_lse, case.dtype, out_errors=next(errors), lse_errors=next(errors))
    assert_state(merged(backend, case, "list"), case.expected(), bound, dtype=case.dtype, case=case)


@pytest.mark.parametrize("stride", [2**31, 2**32 + 8])
def test_offsets_past_2_31_and_2_32_elements(backend, wide_memory, stride):
    """Reported of others: 32-bit products of index and stride (FlashInfer #3130, vLLM #50427)."""
    case = StateCase((3, 2), 2, 64, "float16", seed=stride % 97)
    outs = wide_memory((2, 3, 2, 64), np.float16, (stride * 2, stride // 32 * 8 * 2, 64 * 2, 2))
    outs[...] = case.outs()
    outs = wide_memory.move(outs)
    state = cuattn.merge_states(outs, backend.array(case.lses()))
    assert_state(state, case.expected(), merge_bound(case.outs(), case.lses(), "float16"), dtype="float16", case=case)


def test_operator_and_identity(backend):
    case = StateCase((4, 2), 2, 64, "bfloat16")
    a, b = (cuattn.AttentionState(*(backend.array(x) for x in part)) for part in case.parts())
    empty = cuattn.AttentionState.empty_like(a.out)
    assert isinstance(a | b, cuattn.AttentionState)
    for state in (a | empty, empty | a):
        assert_same_bits(state.out, a.out)
        assert_same_bits(state.lse, a.lse)
    wide = cuattn.AttentionState.empty_like(a.out, dtype="float32")
    assert wide.out.dtype == (wide | a).out.dtype == np.float32
    assert wide.out.shape == a.out.shape and backend.host(wide.lse).tolist() == [[-np.inf] * 2] * 4


def test_no_states_no_rows_no_axes(backend):
    for dtype in (np.float16, bfloat16, np.float32):
        none = cuattn.merge_states(*(backend.array(np.empty(s, d)) for s, d in (((0, 3, 8), dtype), ((0, 3), np.float32))))
        assert not backend.host(none.out).any() and np.isneginf(backend.host(none.lse)).all()
        rows = cuattn.merge_states(*(backend.array(np.empty(s, d)) for s, d in (((5, 0, 8), dtype), ((5, 0), np.float32))))
        assert rows.out.shape == (0, 8) and rows.lse.shape == (0,)
        row = cuattn.merge_state(*(backend.array(x) for x in (np.ones(8, dtype), np.float32([0])[0:1].reshape(())) * 2))
        assert row.out.shape == (8,) and row.lse.shape == ()


@given(case=state_cases(min_states=1, max_states=1))
def test_base_2(backend, case):
    lse = backend.array(case.lses())
    base2 = cuattn.lse_to_base2(lse)
    exact = case.lses().astype(np.float64)
    # The constant and the product are rounded: two roundings of 2^-24, and a half subnormal.
    bound = 2.0**-23 * abs(exact / np.log(2)) + 2.0**-150
    assert_close(base2, exact / np.log(2), bound, dtype=np.float32, case=case)
    bound = 2.0**-22 * abs(exact) + 2.0**-149
    assert_close(cuattn.lse_from_base2(base2), exact, bound, dtype=np.float32, case=case)
    assert cuattn.lse_from_base2(base2, out=base2) is base2
