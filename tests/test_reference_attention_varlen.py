"""Laws of packed and paged attention in the float64 reference: what a sequence alone would give, and nothing else."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import reference
from tests.reference_laws import assert_same_bits, assert_state, bounds, floating_point_errors_raise, laws, seeds
from tests.test_reference_attention import CASE, naive_attention, problem

__all__ = ["floating_point_errors_raise"]  # for every test here

BATCH = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=4)  # queries and keys of each sequence
OPTIONS = {n: CASE[n] for n in ("heads_kv", "group", "head_dim", "head_dim_v", "causal", "sm_scale", "window", "softcap")}
OPTIONS |= {"sinks": st.booleans(), "scales": CASE["scales"], "dtype": CASE["dtype"], "alibi": CASE["alibi"]}


def packed(lengths, seed, alibi, **case):
    """Arguments of attention_varlen with NaN in rows of no sequence, its options, and what `attention` gets of each sequence."""
    rng = np.random.default_rng(seed)
    case |= {"batch": 1, "mask_axes": None, "profile": "normal", "alibi": None}
    *each, (_, options, _) = (
        problem(**case, seqlen_q=m, seqlen_k=n, seed=int(rng.integers(2**32))) for m, n in [*lengths, (0, 0)]
    )
    if alibi:
        heads = case["heads_kv"] * case["group"]
        options["alibi_slopes"] = rng.uniform(0.1, 2, heads if alibi == "per head" else (len(lengths), heads))
    around, arrays, offsets = rng.integers(3, size=(2, 2)), [], []  # rows before and behind; of q, of k and v
    for n, name in enumerate("qkv"):
        none = problem(**case, seqlen_q=0, seqlen_k=0, seed=seed)[0][n][0]
        rows = [none, *(x[0][n][0] for x in each)]
        before, behind = (np.full((m, *none.shape[1:]), np.nan).astype(none.dtype) for m in around[int(name != "q")])
        arrays.append(np.concatenate([before, *rows, behind]))
        offsets.append(len(before) + np.cumsum([len(x) for x in rows]))
    alone = [(x[0], options | slopes_of(options, b), x[2]) for b, x in enumerate(each)]
    return (*arrays, offsets[0], offsets[1]), options, alone


def slopes_of(options, b):
    slopes = options.get("alibi_slopes")
    return {} if slopes is None else {"alibi_slopes": slopes if slopes.ndim == 1 else slopes[b : b + 1]}


def in_pages(args, lengths, page_size, seed, behind=0):
    """Keys and values of the same sequences in pages of random order, NaN elsewhere; the block table, -1 behind the end."""
    _, k, v, _, starts = args
    used = [-(-n // page_size) for _, n in lengths]
    order = np.random.default_rng(seed).permutation(sum(used) + 2)
    table, n = np.full((len(lengths), max(used, default=0) + behind), -1), 0
    pages = [np.full((len(order), page_size, *x.shape[1:]), np.nan).astype(x.dtype) for x in (k, v)]
    for b, count in enumerate(used):
        table[b, :count], n = order[n : n + count], n + count
        for j in range(lengths[b][1]):
            for side, x in zip(pages, (k, v), strict=True):
                side[table[b, j // page_size], j % page_size] = x[starts[b] + j]
    return *pages, table


@laws
@given(lengths=BATCH, seed=seeds, case=st.fixed_dictionaries(OPTIONS))
def test_packed_attention_is_the_naive_definition_of_each_sequence(lengths, seed, case):
    args, options, alone = packed(lengths, seed, **case)
    out, lse = reference.attention_varlen(*args, **options)
    belongs = np.zeros(len(out), bool)
    for (arrays, o, visible), first, past in zip(alone, args[3][:-1], args[3][1:], strict=True):
        eta, _, value = bounds(arrays, o)
        expected = (x[0] for x in naive_attention(arrays, o, visible))
        assert_state((out[first:past], lse[first:past]), expected, 2 * eta * value, eta)
        belongs[first:past] = True
    assert not out[~belongs].any()
    assert np.isneginf(lse[~belongs]).all()


@laws
@given(lengths=BATCH, seed=seeds, case=st.fixed_dictionaries(OPTIONS))
def test_a_sequence_alone_has_the_same_bits(lengths, seed, case):
    args, options, alone = packed(lengths, seed, **case)
    out, lse = reference.attention_varlen(*args, **options)
    for (arrays, o, _), first, past in zip(alone, args[3][:-1], args[3][1:], strict=True):
        assert_same_bits((out[None, first:past], lse[None, first:past]), reference.attention(*arrays, **o))


@laws
@given(lengths=BATCH, seed=seeds, case=st.fixed_dictionaries(OPTIONS), page_size=st.integers(1, 5), used=st.booleans())
def test_keys_in_pages_are_the_same_keys(lengths, seed, case, page_size, used):
    args, options, _ = packed(lengths, seed, **case)
    k_pages, v_pages, table = in_pages(args, lengths, page_size, seed, behind=1)
    left, forward = options["window"][0], [max(n - m - options["window"][0], 0) for m, n in lengths]
    for b, (m, n) in enumerate(lengths):  # pages behind the window, or of no query, are not looked at
        table[b, : (min(forward[b], n) if left >= 0 and m else 0 if m else n) // page_size] = -7
    lengths_k = {"seqused_k": np.array([n for _, n in lengths], int)} if used else {}
    state = reference.attention_varlen(
        args[0], k_pages, v_pages, args[3], None if used else args[4], block_table=table, **lengths_k, **options
    )
    assert_same_bits(state, reference.attention_varlen(*args, **options))


@laws
@given(lengths=BATCH, seed=seeds, case=st.fixed_dictionaries(OPTIONS))
def test_keys_that_are_not_used_do_not_exist(lengths, seed, case):
    args, options, _ = packed(lengths, seed, **case)
    rng = np.random.default_rng(seed)
    used = np.array([rng.integers(n + 1) for _, n in lengths], int)
    cut, starts = [x.copy() for x in args[1:3]], args[4]
    keep = np.zeros(len(cut[0]), bool)
    for first, n in zip(starts, used):
        keep[first : first + n] = True
    for x in cut:
        x[~keep] = math.nan
    state = reference.attention_varlen(args[0], *cut, args[3], starts, seqused_k=used, **options)
    fewer = np.cumsum([0, *used])
    expected = reference.attention_varlen(args[0], *(x[keep] for x in cut), args[3], fewer, **options)
    assert_same_bits(state, expected)


def test_the_hugging_face_page_as_printed():
    """Queries [10, 3, 1] on keys [0, 1, 7], causal: rows without a key are 0 and -inf."""
    q, k = np.ones((14, 2, 8)), np.ones((8, 2, 8))
    out, lse = reference.attention_varlen(q, k, k, [0, 10, 13, 14], [0, 0, 1, 8], causal=True)
    empty = np.arange(14) < 12
    assert (out[empty] == 0).all()
    assert (lse[empty] == -np.inf).all()
    assert (out[~empty] == 1).all()
    assert np.isfinite(lse[~empty]).all()


Q, K, V, PAGES = np.zeros((5, 4, 64)), np.zeros((6, 2, 64)), np.zeros((6, 2, 8)), np.zeros((3, 4, 2, 64))
STARTS_Q, STARTS_K, TABLE = [0, 2, 5], [0, 6, 6], [[0, 1], [2, -1]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Q[0]}, "q must have 3 dimensions; got 2"),
        ({"k": PAGES}, "k must have 3 dimensions; got 4"),
        ({"block_table": TABLE}, "k must have 4 dimensions; got 3"),
        ({"v": V[:5]}, "v.shape[0] must equal total_k of k (6); got 5"),
        ({"k": K[..., :8]}, "k.shape[2] must equal head_dim of q (64); got 8"),
        ({"v": V[:, :1]}, "v.shape[1] must equal num_kv_heads of k (2); got 1"),
        ({"q": Q[:, :3]}, "q.shape[1] must be a multiple of num_kv_heads of k (2); got 3"),
        ({"cu_seqlens_q": [0, 2, 6]}, "cu_seqlens_q must ascend within 0 and total_q (5); got [0, 2, 6]"),
        ({"cu_seqlens_q": [0, 3, 2]}, "cu_seqlens_q must ascend within 0 and total_q (5); got [0, 3, 2]"),
        ({"cu_seqlens_q": [-1, 2, 5]}, "cu_seqlens_q must ascend within 0 and total_q (5); got [-1, 2, 5]"),
        ({"cu_seqlens_q": []}, "cu_seqlens_q must hold integers; got float64"),
        ({"cu_seqlens_q": np.zeros(0, int)}, "cu_seqlens_q.shape must be (batch + 1,); got (0,)"),
        ({"cu_seqlens_k": [0, 7, 7]}, "cu_seqlens_k must ascend within 0 and total_k (6); got [0, 7, 7]"),
        ({"cu_seqlens_k": [0, 6]}, "cu_seqlens_k.shape must be (3,); got (2,)"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k may be None only with block_table and seqused_k"),
        ({"seqused_k": [7, 0]}, "seqused_k[0] must be within 0 and 6; got 7"),
        ({"seqused_k": [6]}, "seqused_k.shape must be (2,); got (1,)"),
        ({"alibi_slopes": [1, 1]}, "alibi_slopes.shape must be (4,) or (2, 4); got (2,)"),
        ({"window": (-2, 0)}, "window must be (left, right), each -1 or more; got (-2, 0)"),
        ({"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_k": [0, 9, 9]},
         "sequence 0 must fit its row of block_table (8 tokens); got 9"),
        ({"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_k": [0, 3, 9]},
         "block_table[1, 1] must be within 0 and 2; got -1"),
        ({"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_k": [3, 2, 9]}, "cu_seqlens_k must ascend from 0; got [3, 2, 9]"),
        ({"k": PAGES, "v": PAGES, "block_table": TABLE[:1]}, "block_table.shape[0] must be batch (2); got 1"),
        ({"k": PAGES, "v": PAGES[:2], "block_table": TABLE}, "v.shape[:3] must be (3, 4, 2); got (2, 4, 2)"),
        ({"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_k": None, "seqused_k": [-1, 0]},
         "seqused_k[0] must be at least 0; got -1"),
    ],
)  # fmt: skip
def test_attention_varlen_refuses(changed, message):
    given = {"q": Q, "k": K, "v": V, "cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K} | changed
    error = TypeError if "integers" in message else ValueError
    with pytest.raises(error, match=f"^{re.escape('reference.attention_varlen: ' + message)}$"):
        reference.attention_varlen(**given)
