"""Laws of pages, rotary embedding and decode in the float64 reference.

`problem` writes down what decode means a second time, token by token, and poisons the rest: every byte of the
pages that no query sees holds NaN, every entry of the table that names no page in use is garbage.
Tolerances of states are those derived in ``test_reference.py``. A rotation rounds two products and a sum, and
cos and sin err by 4 u at most: each feature of a pair (a, b) by 7 u (|a| + |b|), a vector x by 14 u |x|.
"""

import math
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuattn import reference
from tests.test_reference import U, assert_same_bits, assert_state, bounds, floating_point_errors_raise, seeds

__all__ = ["floating_point_errors_raise"]  # for every test here

laws = settings(max_examples=400, deadline=None)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
GRID = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float64)  # every number that has 8 bits
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
    "dtype": st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"]),
    "seed": seeds,
}


def cases(**changed):
    return st.fixed_dictionaries(CASE | changed)


def nearest8(x):
    """The nearest 8-bit float, of two the one whose last bit is 0, and never beyond the largest."""
    order = np.array(sorted(np.flatnonzero(np.isfinite(GRID[:128])), key=lambda bits: bits % 2), np.uint8)
    bits = order[np.abs(GRID[order] - np.minimum(np.abs(x), 448)[..., None]).argmin(axis=-1)]
    return (bits + np.signbit(x) * np.uint8(128)).view(FP8)


def narrow(x, dtype):
    if dtype.itemsize == 1:
        return nearest8(x.astype(np.float32))
    return (x.astype(np.float32) if dtype.itemsize == 2 else x).astype(dtype)


def angles(rows, half, seed):
    """Exact products of positions and frequencies."""
    return np.arange(rows)[:, None] * (np.random.default_rng(seed).integers(1, 2**20, half) / 2**20)


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
@given(case=cases(seqlen_new=st.none(), alibi=st.sampled_from([None, "per head"])), rows=st.integers(0, 5))
def test_cache_batch_idx_chooses_rows_of_block_table_and_cache_seqlens(case, rows):
    (q, k_pages, v_pages, table, lengths), options, _, _ = problem(**case)
    rng = np.random.default_rng(case["seed"])
    chosen = rng.integers(0, len(lengths), rows if len(lengths) else 0)
    q = rng.standard_normal((len(chosen), *q.shape[1:]))
    options |= {"cache_leftpad": options["cache_leftpad"][chosen]} if case["leftpad"] else {}
    state = reference.decode(q, k_pages, v_pages, table, lengths, cache_batch_idx=chosen, **options)
    assert_same_bits(state, reference.decode(q, k_pages, v_pages, table[chosen], lengths[chosen], **options))


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


@laws
@given(st.sampled_from([1, 5, 16]), st.lists(st.integers(-3, 79)), CASE["dtype"], seeds)
def test_gather_returns_what_append_wrote(page_size, slot_mapping, dtype, seed):
    rng, dtype = np.random.default_rng(seed), np.dtype(getattr(ml_dtypes, dtype, dtype))
    slot_mapping = np.minimum(slot_mapping, 5 * page_size - 1).astype(rng.choice(["int32", "int64"]))
    k, v = (rng.standard_normal((len(slot_mapping), 2, d)).astype(dtype) for d in (3, 4))
    k[rng.random(k.shape) < 0.1] = np.nan
    if dtype.itemsize == 2:
        k.view(np.uint16)[np.isnan(k)] = 0x7FF3  # a NaN like no other
    heads_first = np.full((2, 5, 2, page_size, 4), np.nan, dtype)  # K and V in one array, heads before tokens
    k_pages, v_pages = heads_first.transpose(0, 1, 3, 2, 4)
    k_pages, held = k_pages[..., :3], {}
    reference.append_kv(k, v, k_pages, v_pages, slot_mapping)
    for i, slot in enumerate(slot_mapping):
        held[slot] = i  # the last one wins
    expected = np.full_like(heads_first, np.nan)
    for slot, i in held.items():
        if slot >= 0:
            expected[0, slot // page_size, :, slot % page_size, :3] = k[i]
            expected[1, slot // page_size, :, slot % page_size] = v[i]
    assert_same_bits([heads_first], [expected])
    last, here = [held[slot] for slot in slot_mapping], (slot_mapping >= 0)[:, None, None]
    wanted = [np.where(here, x[last], np.zeros((), dtype)) for x in (k, v)]
    assert_same_bits(reference.gather_kv(k_pages, v_pages, slot_mapping), wanted)
    got_k, got_v = reference.gather_kv(k_pages, v_pages, slot_mapping, k_scale=[0.5, 3.0])
    assert_same_bits([got_k, got_v], [wanted[0].astype(np.float64) * [[0.5], [3.0]], wanted[1]])


@laws
@given(seeds, st.integers(0, 5))
def test_pages_are_copied_as_if_at_once_and_negative_pairs_skipped(seed, num_pairs):
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 2**16, (2, 6, 3, 1, 4), np.uint16).view(np.float16)
    source, target = rng.integers(-1, 6, num_pairs), rng.permutation(6)[:num_pairs]
    target = np.where(rng.random(num_pairs) < 0.2, -7, target)
    expected, other = pages.copy(), pages[:, ::-1].copy()
    between = other.copy()
    for i, j in zip(source, target):
        if min(i, j) >= 0:
            expected[:, j], between[:, j] = pages[:, i], pages[:, i]
    reference.copy_pages_between(*pages, *other, source, target)
    reference.copy_pages(*pages, source, target)
    assert_same_bits([pages, other], [expected, between])


@laws
@given(st.floats(-600, 600, width=32) | st.sampled_from([np.inf, 2**-10, 3 * 2**-10, -0.0, 464, -1e30]))
def test_eight_bit_pages_hold_the_nearest_number(x):
    for scale in np.float32([1, 0.3, 7]):
        pages = np.zeros((1, 1, 1, 1), FP8)
        reference.append_kv([[[x]]], [[[x]]], pages, pages, [0], k_scale=scale, v_scale=scale)
        quotient = np.float32(x) / scale  # in float32, like a kernel
        assert pages.ravel().view(np.uint8) == nearest8(np.array([quotient])).view(np.uint8)
        if abs(quotient) <= 448:
            assert pages.ravel().view(np.uint8) == np.array([quotient]).astype(FP8).view(np.uint8)
        got = reference.gather_kv(pages, pages, [0], k_scale=scale)
        assert (got[0].dtype, got[1].dtype) == (np.float64, FP8)
        assert got[0].item() == float(pages.item()) * float(scale)


@pytest.mark.parametrize(
    ("dtype", "x", "held"),
    [
        ("float8_e4m3fn", [448, 465, -1e30, np.inf], [448, 448, -448, 448]),
        ("float8_e5m2", [57344, 61440, -1e30, np.inf], [57344, 57344, -57344, 57344]),
        ("float16", [65504, 65520, -1e30, np.inf], [65504, np.inf, -np.inf, np.inf]),
        ("bfloat16", [1 + 2**-8, 1 + 3 * 2**-8, -1e39, np.inf], [1, 1 + 2**-6, -np.inf, np.inf]),
    ],
)
def test_what_saturates_and_what_overflows(dtype, x, held):
    pages = np.zeros((1, 6, 1, 1), getattr(ml_dtypes, dtype, dtype))
    x = np.array([*x, -np.inf, np.nan])[:, None, None]
    reference.append_kv(x, x, pages, pages, np.arange(6))
    np.testing.assert_array_equal(pages.ravel().astype(np.float64), [*held, -held[3], np.nan])


@laws
@given(st.sampled_from([1, 5, 16]), st.lists(st.integers(0, 90), max_size=3), st.integers(0, 4), seeds)
def test_slots_of_the_next_tokens(page_size, lengths, num_new, seed):
    table = np.random.default_rng(seed).choice([0, 3, 8, -1, -9], (len(lengths), 4))
    got = reference.slots(table, np.array(lengths, int), num_new, page_size)
    assert (got.dtype, got.shape) == (np.int64, (len(lengths), num_new))
    for b, i in np.ndindex(got.shape):
        column, offset = divmod(lengths[b] + i, page_size)
        there = column < 4 and table[b, column] >= 0
        assert got[b, i] == (table[b, column] * page_size + offset if there else -1)


@pytest.mark.parametrize("page", [2**59, 2**60 + 1, 2**62, 2**63 - 1])  # times 16 two of them wrap to 16, 0
def test_ids_far_too_large_never_become_other_ids(page):
    pages, table, one = np.zeros((4, 16, 1, 1)), np.array([[page]]), np.ones((1, 1, 1))
    slot_mapping = reference.slots(table, [0], 1, 16)
    assert slot_mapping.item() >= 2**59
    assert (reference.slots(table, [2**63 - 1], 2, 16) == -1).all()
    for wrong in slot_mapping[0], np.array([2**64 - 1], np.uint64), np.array([64], np.uint8):
        with pytest.raises(ValueError, match="slot_mapping must be below"):
            reference.append_kv(one, one, pages, pages, wrong)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] must be within"):
        reference.decode(one[None], pages, pages, table.astype(np.uint64) + 2**63, [1])
    assert not pages.any()


ROTATED = st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans(), seeds)  # half, rest, interleaved


@laws
@given(case=ROTATED)
def test_rotary_multiplies_pairs_as_complex_numbers(case):
    half, rest, interleaved, seed = case
    rng, angle = np.random.default_rng(seed), angles(50, half, seed)
    x, positions = rng.standard_normal((3, 2, 4, 2 * half + rest)), rng.integers(0, 50, (3, 2))
    got = reference.apply_rotary(x, np.cos(angle), np.sin(angle), positions, interleaved=interleaved)
    pairs = np.arange(2 * half).reshape((half, 2) if interleaved else (2, half))
    first, second = pairs.T if interleaved else pairs
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[positions][..., None, :]
    size = np.abs(x[..., first]) + np.abs(x[..., second])
    for features, expected in (first, turned.real), (second, turned.imag):
        assert (np.abs(got[..., features] - expected) <= 14 * U * size).all()  # both round
    assert_same_bits([got[..., 2 * half :]], [x[..., 2 * half :]])
    norm, norm_got = np.linalg.norm(x, axis=-1), np.linalg.norm(got, axis=-1)
    assert (np.abs(norm_got - norm) <= (18 + x.shape[-1]) * U * norm).all()
    order = np.concatenate([first, second, np.arange(2 * half, 2 * half + rest)])  # the pairs as halves
    same = reference.apply_rotary(x[..., order], np.cos(angle), np.sin(angle), positions)
    assert_same_bits([got], [same[..., np.argsort(order)]])


@laws
@given(case=ROTATED, i=st.integers(0, 49), j=st.integers(0, 49), shift=st.integers(0, 50))
def test_rotated_products_depend_on_the_distance(case, i, j, shift):
    half, rest, interleaved, seed = case
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, 2 * half + rest))
    table = angles(100, half, seed)

    def turn(x, p):
        options = {"positions": [p], "interleaved": interleaved}
        return reference.apply_rotary(x, np.cos(table), np.sin(table), **options).ravel()

    near, far = (turn(q, i + s) @ turn(k, j + s) for s in (0, shift))
    assert abs(near - far) <= 2 * (28 + 2 * half + rest) * U * np.linalg.norm(q) * np.linalg.norm(k)


COPY, ROTATE, CHOSEN = "copy_pages_between", "apply_rotary", "cache_batch_idx"
T, P, K, V = np.zeros((3, 2, 8)), np.zeros((3, 2, 4)), np.zeros((6, 5, 2, 8)), np.zeros((6, 5, 2, 4))
Q, NEW, HALF, COS = np.zeros((2, 1, 4, 8)), np.zeros((2, 3, 2, 8)), K.astype(np.float16), np.zeros((9, 4))
TABLE, KV = np.array([[0, 1], [2, -1]]), {"k": NEW, "v": NEW[..., :4]}
CACHE, ANGLES = (K, V, TABLE, [7, 5]), {"rotary_cos": COS, "rotary_sin": COS}
REFUSED = [
    ("append_kv", (T, P, K[0], V, [0]), {}, "k_pages must have 4 dimensions; got 3"),
    ("append_kv", (T, P, K, V[:5], [0]), {}, "v_pages.shape[:3] must be (6, 5, 2); got (5, 5, 2)"),
    ("append_kv", (T, P, K[:, :0], V[:, :0], [0]), {}, "k_pages.shape[1] must be at least 1; got 0"),
    ("append_kv", (T, P, K, V, [0, 1]), {}, "k.shape must be (2, 2, 8); got (3, 2, 8)"),
    ("append_kv", (T, T, K, V, [0, 1, 2]), {}, "v.shape must be (3, 2, 4); got (3, 2, 8)"),
    ("append_kv", (T, P, K, V, [0, 30, -1]), {},
     "slot_mapping must be below num_pages * page_size (30); got 30"),
    ("append_kv", (T, P, K, V, [0.0, 1, 2]), {}, "slot_mapping must hold integers; got float64"),
    ("append_kv", (T, P, K, V, [[0, 1, 2]]), {}, "slot_mapping must have 1 dimensions; got 2"),
    ("append_kv", (T, P, K, V, [0, 1, 2]), {"v_scale": [1]}, "v_scale.shape must be () or (2,); got (1,)"),
    ("gather_kv", (K, V, [44]), {}, "slot_mapping must be below num_pages * page_size (30); got 44"),
    ("gather_kv", (K, V, [0]), {"k_scale": [1] * 3}, "k_scale.shape must be () or (2,); got (3,)"),
    ("gather_sequence", (K, [0, 1], 11), {}, "length must be within 0 and 10; got 11"),
    ("gather_sequence", (K, [0, 1], -1), {}, "length must be within 0 and 10; got -1"),
    ("gather_sequence", (K, [0, -1], 6), {}, "block_table_row[1] must be within 0 and 5; got -1"),
    ("gather_sequence", (K, [6], 1), {}, "block_table_row[0] must be within 0 and 5; got 6"),
    (COPY, (K, V, K, V, [0], [6]), {}, "target must be below num_pages of dst_k (6); got 6"),
    (COPY, (K, V, K[:1], V[:1], [9], [0]), {}, "source must be below num_pages of src_k (6); got 9"),
    (COPY, (K, V, V, V, [0], [0]), {}, "dst_k.shape[1:] must equal src_k.shape[1:] (5, 2, 8); got (5, 2, 4)"),
    (COPY, (K, V, K, K, [0], [0]), {}, "dst_v.shape[1:] must equal src_v.shape[1:] (5, 2, 4); got (5, 2, 8)"),
    (COPY, (K, V, HALF, V, [0], [0]), {}, "dst_k.dtype must equal src_k.dtype float64; got float16"),
    (COPY, (V, K, V, HALF, [0], [0]), {}, "dst_v.dtype must equal src_v.dtype float64; got float16"),
    (COPY, (K, V, K, V, [0, 1], [2]), {}, "target.shape must equal source.shape (2,); got (1,)"),
    ("slots", (TABLE, [0], 1, 5), {}, "cache_seqlens.shape must be (2,); got (1,)"),
    ("slots", (TABLE, [0, -1], 1, 5), {}, "cache_seqlens must be at least 0; got -1"),
    ("slots", (TABLE, [0, 1], 1, 0), {}, "page_size must be at least 1; got 0"),
    (ROTATE, (T[0, 0], COS, COS, 0), {}, "x must have at least 2 dimensions; got 1"),
    (ROTATE, (T, COS[0], COS, [0] * 3), {}, "cos must have 2 dimensions; got 1"),
    (ROTATE, (T, COS, COS[:5], [0] * 3), {}, "sin.shape must equal cos.shape (9, 4); got (5, 4)"),
    (ROTATE, (P, COS, COS, [0] * 3), {}, "cos.shape[1] must be at most half of head_dim (4); got 4"),
    (ROTATE, (T, COS, COS, [0.0] * 3), {}, "positions must hold integers; got float64"),
    (ROTATE, (T, COS, COS, [0]), {}, "positions.shape must equal x.shape[:-2] (3,); got (1,)"),
    (ROTATE, (T, COS, COS, [0, 9, 0]), {}, "positions must be 0 or more and below cos.shape[0] (9); got 9"),
    (ROTATE, (T, COS, COS, [0, -1, 0]), {}, "positions must be 0 or more and below cos.shape[0] (9); got -1"),
    ("decode", (Q[0], *CACHE), {}, "q must have 4 dimensions; got 3"),
    ("decode", (Q[..., :4], *CACHE), {}, "k_pages.shape[3] must be 4; got 8"),
    ("decode", (Q[:, :, :3], *CACHE), {}, "q.shape[2] must be a multiple of num_kv_heads of k (2); got 3"),
    ("decode", (Q, K, V, TABLE[:1], [7, 5]), {}, "block_table.shape[0] must be 2; got 1"),
    ("decode", (Q, K, V, TABLE / 1, [7, 5]), {}, "block_table must hold integers; got float64"),
    ("decode", (Q, K, V, TABLE, [7]), {}, "cache_seqlens.shape[0] must be 2; got 1"),
    ("decode", (Q, K, V, TABLE, [11, 5]), {},
     "cache_seqlens must be within 0 and max_pages_per_seq * page_size - seqlen_new (10); got 11"),
    ("decode", (Q, K, V, TABLE, [8, 5]), KV,
     "cache_seqlens must be within 0 and max_pages_per_seq * page_size - seqlen_new (7); got 8"),
    ("decode", (Q, K, V, TABLE, [-1, 5]), {},
     "cache_seqlens must be within 0 and max_pages_per_seq * page_size - seqlen_new (10); got -1"),
    ("decode", (Q, *CACHE), {"k": NEW}, "k and v must be given together; got one"),
    ("decode", (Q, *CACHE), KV | {"k": NEW[:1]}, "k.shape must be (2, 3, 2, 8); got (1, 3, 2, 8)"),
    ("decode", (Q, *CACHE), KV | {"v": NEW}, "v.shape must be (2, 3, 2, 4); got (2, 3, 2, 8)"),
    ("decode", (Q, *CACHE), KV, "block_table[1, 1] must be within 0 and num_pages - 1 (5); got -1"),
    ("decode", (Q, K[:1], V[:1], *CACHE[2:]), {},
     "block_table[0, 1] must be within 0 and num_pages - 1 (0); got 1"),
    ("decode", (Q, K, V, [[0, 1], [-1, 2]], [4, 4]), KV | {"window": (0, 0)},  # written, although unseen
     "block_table[1, 0] must be within 0 and num_pages - 1 (5); got -1"),
    ("decode", (Q, *CACHE), {"cache_leftpad": [0, 6]},
     "cache_leftpad must be within 0 and cache_seqlens (5); got 6"),
    ("decode", (Q, *CACHE), {"cache_leftpad": [0]}, "cache_leftpad.shape must be (2,); got (1,)"),
    ("decode", (Q, *CACHE), {CHOSEN: [0, 2]},
     "cache_batch_idx must be within 0 and num_sequences - 1 (1); got 2"),
    ("decode", (Q, *CACHE), {CHOSEN: [0, -1]},
     "cache_batch_idx must be within 0 and num_sequences - 1 (1); got -1"),
    ("decode", (Q, *CACHE), KV | {"rotary_cos": COS},
     "rotary_cos and rotary_sin must be given together; got one"),
    ("decode", (Q, *CACHE), ANGLES, "rotary_cos must come with new k and v; got none"),
    ("decode", (Q, *CACHE), KV | ANGLES,
     "positions must be 0 or more and below rotary_cos.shape[0] (9); got 9"),
    ("decode", (Q, *CACHE), KV | ANGLES | {"rotary_cos": COS[0]}, "rotary_cos must have 2 dimensions; got 1"),
    ("decode", (Q, *CACHE), {"window": (-2, 0)},
     "window must be (left, right), each -1 or more; got (-2, 0)"),
    ("decode", (Q, *CACHE), KV | {"v_scale": [1]}, "v_scale.shape must be () or (2,); got (1,)"),
    ("decode", (Q, *CACHE), {"alibi_slopes": [1, 1]}, "alibi_slopes.shape must be (4,) or (2, 4); got (2,)"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "options", "message"), REFUSED)
def test_refusals_name_the_value_and_change_nothing(function, arguments, options, message):
    arguments = [np.array(x) for x in arguments]
    pages = [x for x in arguments if x.ndim == 4]
    for x in pages:
        x.fill(np.nan)
    error = TypeError if "integers" in message else ValueError
    with pytest.raises(error, match=f"^{re.escape(f'reference.{function}: {message}')}$"):
        getattr(reference, function)(*arguments, **options)
    assert all(np.isnan(x).all() for x in pages)
