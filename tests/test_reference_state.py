"""Laws of merging states in the float64 reference: hypothesis draws structure, NumPy fills values from a seed.

Tolerances are derived in ``reference_laws.py``.
"""

import functools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import reference
from tests.reference_laws import (
    U,
    assert_same_bits,
    assert_state,
    floating_point_errors_raise,
    laws,
    naive_state,
    seeds,
)

__all__ = ["floating_point_errors_raise"]  # for every test here


def random_states(num_states, lead, seed, spread):
    """States with -0.0 here and there, and empty ones whose out holds NaN or inf."""
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((num_states, *lead, 3))
    lses = rng.standard_normal((num_states, *lead)) * spread
    outs[rng.random(outs.shape) < 0.2] = -0.0
    lses[rng.random(lses.shape) < 0.2] = -0.0
    empty = rng.random(lses.shape) < 0.4
    lses[empty] = -np.inf
    outs[empty] = rng.choice([np.nan, np.inf, -np.inf, 7.0], outs[empty].shape)
    return outs, lses


def states(least=0, most=6):
    lead, spread = st.sampled_from([(), (3,), (2, 3)]), st.sampled_from([1.0, 1e4, 5e5])
    return st.builds(random_states, st.integers(least, most), lead, seeds, spread)


@laws
@given(case=states(), cut=st.integers(0, 6))
def test_merge_is_the_naive_sum_in_any_order_and_grouping(case, cut):
    outs, lses = case
    out, lse = np.empty(outs.shape[1:]), np.empty(lses.shape[1:])
    for at in np.ndindex(lse.shape):
        kept = [s for s in range(len(lses)) if lses[s][at] > -np.inf]
        out[at], lse[at] = naive_state([lses[s][at] for s in kept], [outs[s][at] for s in kept], 3)
    held = np.isfinite(lses)
    size = np.max(np.abs(lses[held]), initial=0.0) + math.log(len(lses) + 1)
    tol_lse = 2 * len(lses) * (4 * size + 16) * U  # twice: the naive sum rounds too
    tol_out = 4 * len(lses) * tol_lse * np.max(np.abs(outs[held]), initial=0.0)
    merge = reference.merge_states
    in_two_parts = (*merge(outs[:cut], lses[:cut]), *merge(outs[cut:], lses[cut:]))
    pairs, empty = zip(outs, lses, strict=True), reference.empty_state(*out.shape)
    fold = functools.reduce(lambda a, b: reference.merge_state(*a, *b), pairs, empty)
    for got in merge(outs, lses), merge(outs[::-1], lses[::-1]), reference.merge_state(*in_two_parts), fold:
        assert_state(got, (out, lse), tol_out, tol_lse)
    if len(outs):
        assert_same_bits(merge(list(outs), list(lses)), merge(outs, lses))


@laws
@given(case=states(least=3, most=3))
def test_merge_commutes_and_has_an_identity_bit_for_bit(case):
    (out_a, out_b, poison), (lse_a, lse_b, _) = case
    merge, none = reference.merge_state, np.full_like(lse_a, -np.inf)
    a = np.where(lse_a[..., None] == -np.inf, 0.0, out_a), lse_a
    assert_same_bits(merge(out_a, lse_a, out_b, lse_b), merge(out_b, lse_b, out_a, lse_a))
    assert_same_bits(merge(out_a, lse_a, poison * np.nan, none), a)
    assert_same_bits(merge(np.full_like(out_a, np.inf), none, out_a, lse_a), a)
    assert_same_bits(merge(poison, none, out_b, none), reference.empty_state(*out_a.shape))


@laws
@given(states(), st.lists(st.integers(0, 6), min_size=1), st.sampled_from(["int32", "int64", "uint64"]))
def test_varlen_rows_are_the_merges_of_their_runs(case, ends, dtype):
    outs, lses = case
    indptr = np.sort(np.minimum(ends, len(outs))).astype(dtype)
    out, lse = reference.merge_states_varlen(outs, lses, indptr)
    assert out.shape == (len(ends) - 1, *outs.shape[1:])
    assert lse.shape == out.shape[:-1]
    for i, run in enumerate(map(slice, indptr[:-1], indptr[1:])):
        assert_same_bits((out[i], lse[i]), reference.merge_states(outs[run], lses[run]))


def test_nan_lse_stays_in_its_row():
    lses = np.array([[0.0, np.nan, 0.0], [1.0, 1.0, 1.0]])
    out, lse = reference.merge_states(np.ones((2, 3, 4)), lses)
    assert np.isnan(lse).tolist() == np.isnan(out).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(out[::2]).all()


def test_base_2_is_the_logarithm_of_the_same_sum():
    natural, base2 = np.log([8.0, 0.25, 1.0]), np.array([3.0, -2.0, 0.0])
    np.testing.assert_allclose(reference.lse_to_base2(natural), base2, rtol=4 * U)
    np.testing.assert_allclose(reference.lse_from_base2(base2), natural, rtol=4 * U)
    assert reference.lse_to_base2(-np.inf) == reference.lse_from_base2(-np.inf) == -np.inf


A, B, L = np.zeros((2, 8)), np.zeros((2, 4)), np.zeros(2)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("merge_state", (A, L, B, L), "out_b.shape must equal out_a.shape (2, 8); got (2, 4)"),
        ("merge_state", (A, L, A, A), "lse_b.shape must equal out_b.shape[:-1] (2,); got (2, 8)"),
        ("merge_state", (0.0, 0.0, A, L), "out_a must have at least 1 dimension; got 0"),
        ("merge_states", (L, L[0]), "lses must have at least 1 dimension; got 0"),
        ("merge_states", ([], []), "outs must hold at least one array, or be stacked; got 0"),
        ("merge_states", ([A, B], [L, L]), "outs[1].shape must equal outs[0].shape (2, 8); got (2, 4)"),
        ("merge_states", ([A, A], [L]), "lses.shape must equal outs.shape[:-1] (2, 2); got (1, 2)"),
        ("merge_states_varlen", (A, L, L), "indptr must hold integers; got float64"),
        ("merge_states_varlen", (L, L[0], [0]), "lses must have at least 1 dimension; got 0"),
        ("merge_states_varlen", (A, L, 0), "indptr.shape must be (num_rows + 1,); got ()"),
        ("merge_states_varlen", (A, L, [0, 3]), "indptr must ascend within 0 and nnz (2); got [0, 3]"),
        ("merge_states_varlen", (A, L, [0, 2, 1]), "indptr must ascend within 0 and nnz (2); got [0, 2, 1]"),
        ("merge_states_varlen", (A, L, [-1, 2]), "indptr must ascend within 0 and nnz (2); got [-1, 2]"),
        ("empty_state", (), "shape must end in head_dim; got ()"),
    ],
)
def test_merge_refuses(function, arguments, message):
    error = TypeError if "integers" in message else ValueError
    with pytest.raises(error, match=f"^{re.escape(f'reference.{function}: {message}')}$"):
        getattr(reference, function)(*arguments)
