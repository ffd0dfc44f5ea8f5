"""Slots and tables in Numba's simulator, against the definition and against the bookkeeping of `PagedKVCache`."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numba import cuda

import cuattn
from cuattn import reference
from cuattn.numba import advance, locate, sequence_of, slot_mapping, slot_mapping_varlen, slot_of, update_block_table
from cuattn.paged_cache import PagedKVCache

INDEX = st.sampled_from([np.int32, np.int64])
GUARD = 77


def strided(values, dtype=np.int64):
    """A copy whose elements lie apart in every axis, with a guard between."""
    values = np.asarray(values)
    wide = np.full([2 * n + 1 for n in values.shape], GUARD, dtype)
    view = wide[tuple(slice(1, None, 2) for _ in values.shape)]
    view[...] = values
    return view


def intact(view):
    """Nothing was written between its elements."""
    between = np.ones(view.base.shape, bool)
    between[tuple(slice(1, None, 2) for _ in view.shape)] = False
    return bool((view.base[between] == GUARD).all())


@st.composite
def batches(draw):
    """A block table of shuffled pages with unused entries of any kind, the lengths before, and what comes."""
    page_size, batch = draw(st.sampled_from([1, 2, 5, 16])), draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))
    new = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    used = [-(-(a + b) // page_size) for a, b in zip(lengths, new)]
    table = np.full((batch, max(used, default=0)), draw(st.sampled_from([-1, -7, 2**31 - 1])))
    pages = np.array(draw(st.permutations(range(sum(used)))), int)
    for row, count, end in zip(table, used, accumulate(used)):
        row[:count] = pages[end - count : end]
    index = draw(INDEX)
    return strided(table, index), strided(lengths, draw(INDEX)), new, page_size, index


# Slots


@given(batch=batches(), num_new=st.integers(0, 9), given_out=st.booleans())
def test_slots_are_the_definition(batch, num_new, given_out):
    table, lengths, _, page_size, _ = batch
    expected = reference.slots(table, lengths, num_new, page_size).reshape(-1)
    out = strided(np.zeros(len(expected))) if given_out else None
    slots = slot_mapping(table, lengths, page_size=page_size, num_new=num_new, out=out)
    assert slots.dtype == np.int64 and slots.tolist() == expected.tolist()
    assert out is None or (slots is out and intact(out))


@given(batch=batches(), more=st.integers(0, 200), given_out=st.booleans())
def test_packed_slots_are_the_definition(batch, more, given_out):
    table, lengths, new, page_size, index = batch
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(int)
    expected = [
        slot
        for b, count in enumerate(new)
        for slot in reference.slots(table[b : b + 1], lengths[b : b + 1], count, page_size)[0]
    ] + [-1] * more
    out = strided(np.zeros(len(expected))) if given_out else None
    size = {"out": out} if given_out else {"num_tokens": len(expected)}
    slots = slot_mapping_varlen(table, lengths, strided(offsets, index), page_size=page_size, **size)
    assert slots.dtype == np.int64 and slots.tolist() == expected
    assert out is None or (slots is out and intact(out))


def test_rows_before_the_first_sequence_get_nothing():
    table, lengths = np.array([[3], [5]], np.int32), np.zeros(2, np.int32)
    slots = slot_mapping_varlen(table, lengths, np.array([2, 3, 5]), page_size=4, num_tokens=6)
    assert slots.tolist() == [-1, -1, 12, 20, 21, -1]


@given(
    pages=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 6), min_size=3, max_size=3),
    length=st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 15),
    page_size=st.sampled_from([1, 4, 5, 2**31 - 1]),
)
@example(pages=[2**62, 2**62 + 1, 2**63 - 1], length=0, page_size=4)  # times 4 they would be pages 0, 1 and -1
@example(pages=[0, 1, 2], length=-1, page_size=4)
@example(pages=[0, 1, 2], length=2**63 - 1, page_size=4)
def test_no_id_and_no_length_becomes_another(pages, length, page_size):
    """vLLM #1486, FlashInfer #3130: ids times sizes that wrapped around, and wrote into other pages."""
    table, lengths = np.array([pages]), np.array([length])
    expected = [
        None if length < 0 or p // page_size >= 3 or pages[p // page_size] < 0 else pages[p // page_size] * page_size + p % page_size
        for p in range(length, length + 3)
    ]
    offsets = np.array([0, 3])
    with cuattn.checking("arguments"), np.errstate(over="raise"):
        slots = slot_mapping(table, lengths, page_size=page_size, num_new=3)
        assert slots.tolist() == slot_mapping_varlen(table, lengths, offsets, page_size=page_size, num_tokens=3).tolist()
    for slot, want in zip(slots.tolist(), expected):
        if want is None:
            assert slot == -1
        elif want < 2**63:
            assert slot == want or (want > 2**62 and slot > 2**62)
        else:
            assert slot > 2**62  # past the last page of every cache


@pytest.mark.parametrize("offsets", [[0, -5, 9], [9, 0, 0], [-(2**62), 2, 4], [0, 2**63 - 1, 1], [3, 1, 2]])
def test_offsets_of_any_kind_stay_within_the_arrays(offsets):
    table, lengths = np.array([[3, 4], [5, 6]], np.int64), np.array([1, 0], np.int64)
    with cuattn.checking("arguments"):
        slots = slot_mapping_varlen(table, lengths, np.array(offsets), page_size=4, num_tokens=7)
    assert all(slot == -1 or 12 <= slot < 28 for slot in slots.tolist())


# Tables


@given(data=st.data())
def test_a_table_follows_the_manager(data):
    """Rows and lengths on the device, changed by what is new in each step, are those of the bookkeeping on the host."""
    cache = PagedKVCache(40, data.draw(st.sampled_from([1, 3, 4])), 1, 1, dtype=np.float32)
    width, seq_ids = 24, list(range(data.draw(st.integers(1, 4))))
    index = data.draw(INDEX)
    table, lengths = strided(np.full((len(seq_ids), width), -1), index), strided(np.zeros(len(seq_ids)), index)
    for seq_id in seq_ids:
        cache.add_sequence(seq_id)
    for _ in range(3):
        new = data.draw(st.lists(st.integers(0, 7), min_size=len(seq_ids), max_size=len(seq_ids)))
        if sum(new) > cache.num_free():
            return
        cache.extend_many(dict(zip(seq_ids, new)))
        wanted = cache.block_table(seq_ids, width)
        rows, columns = np.nonzero(table != wanted)
        update_block_table(table, strided(rows), strided(columns, np.int32), strided(wanted[rows, columns], index))
        slots = slot_mapping_varlen(
            table, lengths, np.concatenate([[0], np.cumsum(new)]), page_size=cache.page_size, num_tokens=sum(new)
        )
        assert slots.tolist() == cache.slot_mapping(seq_ids, new).tolist()
        advance(lengths, np.arange(len(seq_ids)), np.array(new, index))
        assert table.tolist() == wanted.tolist() and lengths.tolist() == cache.cache_seqlens(seq_ids).tolist()
        assert intact(table) and intact(lengths)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_entries_that_are_not_there_are_left_out(dtype):
    table = strided(np.arange(6).reshape(2, 3), dtype)
    rows, columns = [0, -1, 2, 1, 1, 2**40, -(2**40)], [1, 0, 0, 3, -1, 0, 1]
    with cuattn.checking("arguments"):
        update_block_table(table, np.array(rows), np.array(columns), np.full(7, 9))
    assert table.tolist() == [[0, 9, 2], [3, 4, 5]] and intact(table)


@pytest.mark.parametrize(("page", "expected"), [(2**32 + 3, -1), (2**31, -1), (2**31 - 1, 2**31 - 1), (-7, -1), (-(2**40), -1)])
def test_a_page_that_a_table_can_not_hold_becomes_none(page, expected):
    table, wide = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int64)
    with cuattn.checking("arguments"):
        for array in (table, wide):
            update_block_table(array, np.array([0]), np.array([0]), np.array([page]))
    assert (table[0, 0], wide[0, 0]) == (expected, max(page, -1))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("each", [False, True])
def test_lengths_stay_lengths(dtype, each):
    most = int(np.iinfo(dtype).max)
    lengths = strided([5, 5, 0, -1, most - 1, most, 3], dtype)
    for row, number, expected in [(0, 2, 7), (1, -5, 0), (1, 4, 4), (2, -1, 0), (3, 9, -1), (4, 5, most), (5, 1, most), (6, -(2**63), 0)]:
        advance(lengths, np.array([row]), np.array([number]) if each else number)
        assert int(lengths[row]) == expected, (row, number)
    with cuattn.checking("arguments"):
        advance(lengths, np.array([7, -1, 2**40, 0]), np.full(4, 10) if each else 10)
    assert lengths.tolist() == [17, 4, 0, -1, most, most, 0] and intact(lengths)


# Device functions


@pytest.mark.parametrize(("token", "slot"), [(-(2**63), -1), (-1, -1), (0, 28), (3, 31), (4, 8), (7, 11), (8, -1), (11, -1), (12, -1)])
def test_slots_of_tokens(token, slot):
    assert slot_of(token, np.int32([7, 2, -3]), 4) == slot


@given(batch=batches())
def test_writing_and_reading_in_a_kernel_of_your_own(batch):
    @cuda.jit
    def store(x, pages, block_table, lengths, cu_seqlens):
        i = cuda.grid(1)
        if i < x.shape[0]:
            b = sequence_of(i, cu_seqlens)
            if b >= 0:
                slot = slot_of(lengths[b] + i - cu_seqlens[b], block_table[b], pages.shape[1])
                page, offset = locate(slot, pages.shape[0], pages.shape[1])
                if page >= 0:
                    pages[page, offset] = x[i]

    table, lengths, new, page_size, _ = batch
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(int)
    pages, x = np.full((sum(new) + 5, page_size), -1.0), np.arange(offsets[-1], dtype=float)
    expected = pages.copy()
    if len(x):
        with cuattn.checking("arguments"):
            slots = slot_mapping_varlen(table, lengths, offsets, page_size=page_size, num_tokens=len(x))
        here = (slots >= 0) & (slots < pages.size)
        expected.reshape(-1)[slots[here]] = x[here]
        store[-(-len(x) // 32), 32](x, pages, table.copy(), lengths.copy(), offsets)  # the simulator takes no gaps
    assert pages.tolist() == expected.tolist()


@pytest.mark.parametrize("slot", [-(2**63), -1, 0, 3, 4, 19, 20, 2**62, 2**63 - 1])
def test_places(slot):
    place = locate(np.int64(slot), 5, 4)
    assert place == (divmod(slot, 4) if 0 <= slot < 20 else (-1, 0))


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 3))
def test_rows_belong_to_the_sequence_that_has_them(counts, first):
    offsets = np.cumsum([first, *counts])
    expected = [-1] * first + [b for b, count in enumerate(counts) for _ in range(count)] + [-1]
    assert [sequence_of(i, offsets) for i in range(len(expected))] == expected


# What is refused

ONE, TABLE = np.array([0]), np.zeros((2, 3), np.int32)
LENGTHS = np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("call", "error", "rule"),
    [
        (lambda: slot_mapping(TABLE[0], LENGTHS, page_size=4), ValueError,
         r"numba.slot_mapping: block_table must have the axes \(batch, max_pages_per_seq\); got shape \(3,\)"),
        (lambda: slot_mapping(TABLE, LENGTHS[:1], page_size=4), ValueError,
         r"numba.slot_mapping: cache_seqlens.shape must equal \(batch,\) \(2,\); got \(1,\)"),
        (lambda: slot_mapping(TABLE, LENGTHS + 0.5, page_size=4), TypeError,
         "numba.slot_mapping: cache_seqlens must be int32 or int64; got float64"),
        (lambda: slot_mapping(None, LENGTHS, page_size=4), TypeError,
         "numba.slot_mapping: block_table must be an array; got None"),
        (lambda: slot_mapping(TABLE, LENGTHS, page_size=0), ValueError,
         "numba.slot_mapping: page_size must be 1 to 2147483647; got 0"),
        (lambda: slot_mapping(TABLE, LENGTHS, page_size=4, num_new=-1), ValueError,
         "numba.slot_mapping: num_new must be 0 to 2147483647; got -1"),
        (lambda: slot_mapping(TABLE, LENGTHS, page_size=4, out=np.zeros(2, np.int32)), TypeError,
         "numba.slot_mapping: out must be int64; got int32"),
        (lambda: slot_mapping(TABLE, LENGTHS, page_size=4, out=np.zeros(3, int)), ValueError,
         r"numba.slot_mapping: out.shape must equal \(num_tokens,\) \(2,\); got \(3,\)"),
        (lambda: slot_mapping(TABLE, LENGTHS - 1, page_size=4), ValueError,
         r"numba.slot_mapping: cache_seqlens\[0\] must be at least 0; got -1"),
        (lambda: slot_mapping_varlen(TABLE, LENGTHS, np.arange(2), page_size=4, num_tokens=1), ValueError,
         r"numba.slot_mapping_varlen: cu_seqlens.shape must equal \(batch \+ 1,\) \(3,\); got \(2,\)"),
        (lambda: slot_mapping_varlen(TABLE, LENGTHS, np.arange(3), page_size=4), TypeError,
         "numba.slot_mapping_varlen: num_tokens must be given if out is not; got None"),
        (lambda: slot_mapping_varlen(TABLE, LENGTHS, np.arange(3), page_size=4, num_tokens=1), ValueError,
         r"numba.slot_mapping_varlen: cu_seqlens\[-1\] must be at most num_tokens \(1\); got 2"),
        (lambda: slot_mapping_varlen(TABLE, LENGTHS, np.array([0, 2, 1]), page_size=4, num_tokens=2), ValueError,
         "numba.slot_mapping_varlen: cu_seqlens must be ascending; got 2 before 1 at index 2"),
        (lambda: update_block_table(TABLE, ONE, ONE, np.zeros(2, int)), ValueError,
         r"numba.update_block_table: pages.shape must equal rows.shape \(1,\); got \(2,\)"),
        (lambda: update_block_table(TABLE, ONE + 2, ONE, ONE), ValueError,
         r"numba.update_block_table: rows\[0\] must be below 2; got 2"),
        (lambda: update_block_table(TABLE, ONE, ONE, ONE + 2**31), ValueError,
         r"numba.update_block_table: pages\[0\] must be below 2147483648; got 2147483648"),
        (lambda: update_block_table(TABLE, *np.zeros((3, 2), int)), ValueError,
         r"numba.update_block_table: rows and columns must name each at most once; got \(0, 0\) 2 times"),
        (lambda: update_block_table(_overlapping(), ONE, ONE, ONE),
         ValueError, "numba.update_block_table: block_table must not overlap itself"),
        (lambda: update_block_table(TABLE.view(), TABLE[0], ONE.repeat(3), ONE.repeat(3)), ValueError,
         "numba.update_block_table: block_table must be apart from rows; got arrays that overlap"),
        (lambda: advance(LENGTHS, ONE, ONE[:0]), ValueError,
         r"numba.advance: num_new.shape must equal rows.shape \(1,\); got \(0,\)"),
        (lambda: advance(LENGTHS, ONE, 2**63), ValueError, "numba.advance: num_new must be an int64; got 9223372036854775808"),
        (lambda: advance(LENGTHS, ONE.repeat(2), 1), ValueError,
         "numba.advance: rows must name each at most once; got 0 2 times"),
        (lambda: advance(np.zeros(9, np.uint8)[1:].view(np.int32), ONE, 1), ValueError,
         "numba.advance: cache_seqlens must begin at a multiple of 4 bytes; got one of 1"),
        (lambda: advance(LENGTHS, ONE + 2, 1), ValueError, r"numba.advance: rows\[0\] must be below 2; got 2"),
        (lambda: advance(LENGTHS, ONE, None), TypeError, "numba.advance: num_new must be an array; got None"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(call, error, rule):
    with cuattn.checking("values"), pytest.raises(error, match=f"^{rule}"):
        call()
    assert not TABLE.any() and not LENGTHS.any()


def _overlapping():
    return np.lib.stride_tricks.as_strided(np.zeros(4, np.int32), (2, 3), (4, 4))
