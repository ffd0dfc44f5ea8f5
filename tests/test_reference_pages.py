"""Laws of pages and of rotary embedding in the float64 reference.

A rotation rounds two products and a sum, and cos and sin err by 4 u at most: each feature of a pair (a, b) by
7 u (|a| + |b|), a vector x by 14 u |x|.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import reference
from tests.reference_laws import (
    FP8,
    U,
    angles,
    assert_same_bits,
    dtypes,
    floating_point_errors_raise,
    laws,
    nearest8,
    seeds,
)

__all__ = ["floating_point_errors_raise"]  # for every test here


@laws
@given(st.sampled_from([1, 5, 16]), st.lists(st.integers(-3, 79)), dtypes, seeds)
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
