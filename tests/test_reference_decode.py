"""Laws of decode from pages in the float64 reference.

`problem` writes down what decode means a second time, token by token, and poisons the rest: every byte of the
pages that no query sees holds NaN, every entry of the table that names no page in use is garbage.
Tolerances are derived in ``reference_laws.py``.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import reference
from tests.reference_laws import (
    U,
    angles,
    assert_same_bits,
    assert_state,
    bounds,
    dtypes,
    floating_point_errors_raise,
    laws,
    nearest8,
    seeds,
)

__all__ = ["floating_point_errors_raise"]  # for every test here

WRONG = [-1, -(2**31), 2**31 - 1, 2**62]  # no page
CASE = {
    "page_size": st.sampled_from([1, 5, 16, 17, 64]),
    "lengths": st.lists(st.integers(0, 70) | st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65]), max_size=3),
    "seqlen_q": st.integers(0, 3),
    "seqlen_new": st.none() | st.integers(0, 3),
    "shape": st.sampled_from([(1, 1, 8, 3), (2, 3, 6, 6), (2, 1, 16, 8)]),  # kv heads, group, head_dim, ..._v
    "causal": st.booleans(),
    "window": st.sampled_from([(-1, -1), (-1, -1), (3, -1), (-1, 1), (20, 0), (0, 0)]),
    "softcap": st.sampled_from([0.0, 0.7]),
    "alibi": st.sampled_from([None, "per head", "per sequence"]),
    "sinks": st.booleans(),
    "scales": st.sampled_from([None, "scalar", "per head"]),
    "leftpad": st.booleans(),
    "rotary": st.sampled_from([None, "halves", "interleaved"]),
    "dtype": dtypes,
    "seed": seeds,
}


def cases(**changed):
    return st.fixed_dictionaries(CASE | changed)


def narrow(x, dtype):
    if dtype.itemsize == 1:
        return nearest8(x.astype(np.float32))
    return (x.astype(np.float32) if dtype.itemsize == 2 else x).astype(dtype)


def problem(layout=0, *, page_size, lengths, seqlen_q, seqlen_new, shape, causal, window, softcap, alibi, sinks,
            scales, leftpad, rotary, dtype, seed):  # fmt: skip
    """Return arguments and options of decode, dense arguments of attention per sequence, pages afterwards."""
    rng, lay = np.random.default_rng(seed), np.random.default_rng([seed, layout])
    heads_kv, group, *dims = shape
    batch, heads, dtype, new = len(lengths), heads_kv * group, np.dtype(getattr(ml_dtypes, dtype, dtype)), 0
    q = rng.standard_normal((batch, seqlen_q, heads, dims[0]))
    turned, pads = q, [0] * batch
    options = {"causal": causal, "sm_scale": rng.choice([None, 0.3]), "window": window, "softcap": softcap}
    options |= {"sinks": rng.standard_normal(heads)} if sinks else {}
    factor = [np.ones(()), np.ones(())]
    if scales:
        size = heads_kv if scales == "per head" else ()
        factor = [rng.uniform(0.5, 2, size).astype(np.float32) for _ in "kv"]
        options |= {"k_scale": factor[0], "v_scale": factor[1]}
    dense_options, extra = options.copy(), {}
    if leftpad:
        extra["cache_leftpad"] = pads = rng.integers(0, np.array(lengths, int) + 1)
    slopes = rng.uniform(0.1, 2, heads if alibi == "per head" else (batch, heads))
    extra |= {"alibi_slopes": slopes} if alibi else {}
    past = [[narrow(rng.standard_normal((n, heads_kv, d)), dtype) for d in dims] for n in lengths]
    fresh = [np.zeros((batch, 0, heads_kv, d)) for d in dims]
    if seqlen_new is not None:
        new, fresh = seqlen_new, [rng.standard_normal((batch, seqlen_new, heads_kv, d)) for d in dims]
        extra |= {"k": fresh[0], "v": fresh[1]}
        if rotary:
            table = angles(74, int(rng.integers(0, dims[0] // 2 + 1)), seed)
            extra |= {"rotary_cos": np.cos(table), "rotary_sin": np.sin(table)}
            extra["rotary_interleaved"] = rotary == "interleaved"
            at = np.array(lengths, int)[:, None]
            still = not causal and window == (-1, -1)
            turn = [extra["rotary_cos"], extra["rotary_sin"]]
            style = {"interleaved": rotary == "interleaved"}
            turned = reference.apply_rotary(q, *turn, at + (0 if still else 1) * np.arange(seqlen_q), **style)
            fresh[0] = reference.apply_rotary(fresh[0], *turn, at + np.arange(new), **style)
    stored = [narrow(x / f.astype(np.float64)[..., None], dtype) for x, f in zip(fresh, factor)]

    used = [-(-(n + new) // page_size) for n in lengths]
    block_table = lay.choice(WRONG, (batch, max(used, default=0) + int(lay.integers(0, 3))))
    free = iter(lay.permutation(sum(used) + 2))
    before = [np.full((sum(used) + 2, page_size, heads_kv, d), np.nan, dtype) for d in dims]
    after, dense = [x.copy() for x in before], []
    for b, n in enumerate(lengths):
        total, left, right = n + new, *(math.inf if w == -1 else w for w in window)
        places = [i + total - seqlen_q for i in range(seqlen_q)]
        for j in range(total):
            seen = any(p - left <= j <= p + right and (j <= p or not causal) for p in places)
            if (seen and j >= pads[b]) or j >= n:
                if block_table[b, j // page_size] in WRONG:
                    block_table[b, j // page_size] = next(free)
                at = block_table[b, j // page_size], j % page_size
                for side in (0, 1):
                    after[side][at] = past[b][side][j] if j < n else stored[side][b, j - n]
                    before[side][at] = after[side][at] if j < n else np.nan
        whole = (np.concatenate([past[b][side], stored[side][b]])[None, pads[b] :] for side in (0, 1))
        slope = {"alibi_slopes": slopes[b : b + 1] if slopes.ndim == 2 else slopes} if alibi else {}
        dense.append(((turned[b : b + 1], *whole), dense_options | slope))
    return [q, *before, block_table, np.array(lengths, int)], options | extra, dense, after


@laws
@given(case=cases())
def test_decode_is_attention_over_the_gathered_keys_and_reads_nothing_else(case):
    arguments, options, dense, after = problem(**case)
    if case["causal"]:
        del options["causal"]  # the default
    out, lse = reference.decode(*arguments, **options)
    for b, (arrays, dense_options) in enumerate(dense):
        eta, _, value = bounds(arrays, dense_options)
        expected = reference.attention(*arrays, **dense_options)
        assert_state((out[b : b + 1], lse[b : b + 1]), expected, 2 * eta * value, eta)
    assert_same_bits(arguments[1:3], after)


@laws
@given(case=cases(), data=st.data())
def test_no_bit_depends_on_the_pages_or_on_the_other_sequences(case, data):
    arguments, options, _, _ = problem(**case)
    out, lse = reference.decode(*arguments, **options)
    elsewhere, same, _, _ = problem(layout=1, **case)
    assert_same_bits(reference.decode(*elsewhere, **same), (out, lse))
    arguments, options, _, _ = problem(**case)  # again: new tokens were written
    few = data.draw(st.permutations(range(len(case["lengths"]))))[:2]
    per_row = {"k", "v", "cache_leftpad"} | ({"alibi_slopes"} if case["alibi"] == "per sequence" else set())
    q, k_pages, v_pages, *tables = arguments
    alone = {name: x[few] if name in per_row else x for name, x in options.items()}
    state = reference.decode(q[few], k_pages, v_pages, *(x[few] for x in tables), **alone)
    assert_same_bits(state, (out[few], lse[few]))


@laws
@given(case=cases(alibi=st.sampled_from([None, "per head"])), data=st.data())
def test_cache_batch_idx_chooses_rows_of_block_table_and_nothing_else(case, data):
    (*arguments, table, lengths), options, _, after = problem(**case)
    state = reference.decode(*arguments, table, lengths, **options)
    order = np.array(data.draw(st.permutations(range(len(lengths)))), int)  # where the caches lie
    (*arguments, table, _), options, _, _ = problem(**case)  # again: new tokens were written
    elsewhere = np.full((len(lengths) + 1, table.shape[1]), -1)
    elsewhere[order] = table
    again = reference.decode(*arguments, elsewhere, lengths, cache_batch_idx=order, **options)
    assert_same_bits(again, state)
    assert_same_bits(arguments[1:], after)


def test_two_rows_may_share_a_cache():
    case = dict(page_size=5, lengths=[13, 7], seqlen_q=2, seqlen_new=None, shape=(2, 1, 8, 8), causal=True, window=(-1, -1), softcap=0.0)
    rest = dict(alibi=None, sinks=False, scales=None, leftpad=False, rotary=None, dtype="float64", seed=0)
    (q, *pages, table, _), options, _, _ = problem(**case, **rest)
    lengths, rows = np.array([13, 6]), [0, 0]  # and see as much of it as their own lengths say
    state = reference.decode(q, *pages, table, lengths, cache_batch_idx=rows, **options)
    assert_same_bits(state, reference.decode(q, *pages, table[rows], lengths, **options))


whole_cache = cases(seqlen_new=st.none(), alibi=st.none(), window=st.just((-1, -1)), leftpad=st.just(False))


@laws
@given(case=whole_cache, cut=st.floats(0, 1))
def test_a_prefix_and_the_rest_merge_to_the_whole(case, cut):
    (*arguments, table, lengths), options, dense, _ = problem(**case)
    whole = reference.decode(*arguments, table, lengths, **options)
    cuts = np.rint(cut * np.maximum(lengths - case["seqlen_q"], 0)).astype(int)  # all queries see all before
    rest = reference.decode(*arguments, table, lengths, cache_leftpad=cuts, **options)
    options |= {"causal": False, "sinks": None}
    prefix = reference.decode(*arguments, table, cuts, **options)
    merged = reference.merge_state(*prefix, *rest)
    for b, (arrays, dense_options) in enumerate(dense):
        eta, size, value = bounds(arrays, dense_options)
        rho = 2 * (4 * size + 16) * U
        got, expected = ((x[0][b], x[1][b]) for x in (merged, whole))
        assert_state(got, expected, (6 * eta + 8 * rho) * value, 2 * eta + rho)


def test_decode_of_the_hugging_face_page():  # block size 32; FA2 refuses it: multiples of 256 only
    rng = np.random.default_rng(0)
    table, lengths = np.array([[2, -1, -1, -1], [0, 1, -1, -1], [3, 5, 6, -1]]), np.array([30, 32, 70])
    tokens = [rng.standard_normal((2, 71, 2, 8)) for _ in lengths]
    pages = np.full((2, 8, 32, 2, 8), np.nan)
    for row, length, token in zip(table, lengths, tokens):
        for j in range(length):
            pages[:, row[j // 32], j % 32] = token[:, j]
    q = rng.standard_normal((3, 1, 4, 8))
    k, v = (np.stack([token[side, n] for token, n in zip(tokens, lengths)])[:, None] for side in (0, 1))
    before, short = pages.copy(), np.where(table == 1, -1, table)
    with pytest.raises(
        ValueError, match=r"block_table\[1, 1\] must be within 0 and num_pages - 1 \(7\); got -1"
    ):
        reference.decode(q, *pages, short, lengths, k=k, v=v)  # no page yet for token 32 of sequence 1
    assert_same_bits(pages, before)
    out, lse = reference.decode(q, *pages, table, lengths, k=k, v=v)
    for b, (page, offset) in enumerate([(2, 30), (1, 0), (6, 6)]):
        arrays = q[b : b + 1], *tokens[b][:, None, : lengths[b] + 1]
        eta, _, value = bounds(arrays, {"sm_scale": None})
        expected = reference.attention(*arrays, causal=True)
        assert_state((out[b : b + 1], lse[b : b + 1]), expected, 2 * eta * value, eta)
        before[:, page, offset] = tokens[b][:, lengths[b]]
    assert_same_bits(pages, before)


@pytest.mark.parametrize(("batch", "seqlen_q", "width"), [(0, 1, 2), (2, 0, 2), (2, 1, 0), (2, 1, 2)])
def test_nothing_to_attend_to(batch, seqlen_q, width):
    q, pages, table = (
        np.ones((batch, seqlen_q, 4, 8)),
        np.full((3, 4, 2, 8), np.nan),
        np.full((batch, width), -1),
    )
    lengths = np.zeros(batch, int)
    expected = reference.empty_state(batch, seqlen_q, 4, 8)
    assert_same_bits(reference.decode(q, pages, pages, table, lengths), expected)
    assert_same_bits(reference.decode(q, pages[:0], pages[:0], table, lengths, window=(2, 0)), expected)
    assert (reference.decode(q, pages, pages, table, lengths, sinks=np.arange(4))[1] == np.arange(4)).all()
