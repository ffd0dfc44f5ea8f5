"""Slots in Numba: where the next tokens of sequences go; kernels to read and change, device functions to embed.

Row b of a block table lists the pages of sequence b: its token p lies in page ``row[p // page_size]``, at offset
``p % page_size``. The slot of a token is the number of its place among all, ``page * page_size + offset``::

    block_table[b]   7  2  9 -1       page_size 4, cache_seqlens[b] = 6: the next token is the third of page 2,
    tokens of b     0-3 4-7 8-11      its slot is 2 * 4 + 2 = 10

In every kernel a thread owns one slot of the result. Whatever the index arrays hold, no thread leaves them, and
no wrong id becomes that of another page: what is negative or too large names nothing. All arithmetic is 64-bit.

The oracles are `cuattn.reference.slots` and the bookkeeping of `PagedKVCache` on the host, ``_paged_index.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from cuattn import _check
from cuattn._call import Call
from cuattn._paged_record import MAX_COUNT, count
from cuattn._settings import checks_values
from cuattn.numba import _run

NOTHING = np.int64(-1)  # the slot of a token that has no place
ZERO = np.int64(0)
LARGEST = np.int64(2**63 - 1)

# Device functions, for kernels of your own


@cuda.jit(device=True)
def slot_of(token, table_row, page_size):
    """The slot of a token.

    Parameters
    ----------
    token : int
        Its position in the sequence.
    table_row : array, (max_pages_per_seq,), int32 or int64
        The sequence's row of the block table.
    page_size : int
        Tokens in a page.

    Returns
    -------
    int64
        ``page * page_size + offset``, or -1 where the row has no page, or a negative one.

    Examples
    --------
    >>> @cuda.jit
    ... def store(x, pages, block_table, b, first):  # one feature of the tokens from `first` on
    ...     i = cuda.grid(1)
    ...     if i < x.shape[0]:
    ...         slot = slot_of(first + i, block_table[b], pages.shape[1])
    ...         page, offset = locate(slot, pages.shape[0], pages.shape[1])
    ...         if page >= 0:
    ...             pages[page, offset] = x[i]
    """
    size = np.int64(page_size)
    position = np.int64(token)
    if position < ZERO or position // size >= table_row.shape[0]:
        return NOTHING
    page = np.int64(table_row[position // size])
    if page < ZERO:
        return NOTHING
    return min(page, LARGEST // size - 1) * size + position % size  # a wrong id must not wrap around


@cuda.jit(device=True)
def locate(slot, num_pages, page_size):
    """The place of a slot.

    Parameters
    ----------
    slot : int
        ``page * page_size + offset``.
    num_pages, page_size : int
        Of the cache.

    Returns
    -------
    page, offset : int64
        Page -1 if there is no such slot.
    """
    size, place = np.int64(page_size), np.int64(slot)
    if place < ZERO or place // size >= num_pages:
        return NOTHING, ZERO
    return place // size, place % size


@cuda.jit(device=True)
def sequence_of(token, cu_seqlens):
    """The sequence that a row of a packed array belongs to.

    Parameters
    ----------
    token : int
        The row.
    cu_seqlens : array, (batch + 1,), int32 or int64
        Ascending offsets: the rows of sequence b are ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.

    Returns
    -------
    int64
        -1 if it belongs to none.
    """
    low, high = ZERO, np.int64(cu_seqlens.shape[0] - 1)
    if high < 1 or token < cu_seqlens[0] or token >= cu_seqlens[high]:
        return NOTHING
    while high - low > 1:  # cu_seqlens[low] <= token < cu_seqlens[high]
        middle = (low + high) // 2
        if cu_seqlens[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@cuda.jit(device=True)
def next_slot(block_table, cache_seqlens, b, i, page_size):
    """The slot of new token i of sequence b, which has `cache_seqlens[b]` tokens already."""
    length = np.int64(cache_seqlens[b])
    if length < ZERO:
        return NOTHING
    room = block_table.shape[1] * np.int64(page_size)
    return slot_of(min(length, room) + i, block_table[b], page_size)  # so that the sum can't wrap around


# Kernels


@cuda.jit
def uniform_slots(block_table, cache_seqlens, page_size, num_new, slots):
    """Thread i: new token ``i % num_new`` of sequence ``i // num_new``."""
    i = np.int64(cuda.grid(1))
    if i < slots.shape[0]:
        slots[i] = next_slot(block_table, cache_seqlens, i // num_new, i % num_new, page_size)


@cuda.jit
def packed_slots(block_table, cache_seqlens, cu_seqlens, page_size, slots):
    """Thread i: row i of the packed new tokens."""
    i = np.int64(cuda.grid(1))
    if i < slots.shape[0]:
        b = sequence_of(i, cu_seqlens)
        slot = NOTHING
        if b >= ZERO:
            slot = next_slot(block_table, cache_seqlens, b, i - cu_seqlens[b], page_size)
        slots[i] = slot


# Calls


def slot_mapping(block_table: Any, cache_seqlens: Any, *, page_size: int, num_new: int = 1, out: Any = None) -> Any:
    """Where the next tokens of each sequence go, equally many of each.

    Parameters
    ----------
    block_table : array, (batch, max_pages_per_seq), int32 or int64
        Page ids of each sequence; strides at will, as for all arrays here.
    cache_seqlens : array, (batch,), int32 or int64
        Tokens of each sequence before the new ones.
    page_size, num_new : int
        Tokens in a page, and new tokens of each sequence.
    out : array, (batch * num_new,), int64, optional
        Where to put the result.

    Returns
    -------
    array, (batch * num_new,), int64
        For `cuattn.append_kv`: sequence after sequence; -1 where the table has no page, or a negative one.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit, and for NumPy arrays outside the simulator. A negative
        length, whose tokens get -1, is refused only under ``checking("values")``.

    See Also
    --------
    cuattn.reference.slots : the definition.
    cuattn.PagedKVCache.slot_mapping : the same on the host.
    """
    call = _call("numba.slot_mapping", block_table=block_table, cache_seqlens=cache_seqlens, out=out)
    size = count("numba.slot_mapping: page_size", page_size, 1, MAX_COUNT)
    each = count("numba.slot_mapping: num_new", num_new, 0, MAX_COUNT)
    table, lengths = call.arrays["block_table"], call.arrays["cache_seqlens"]
    return _slots(call, uniform_slots, table.shape[0] * each, table, lengths, size, each)


def slot_mapping_varlen(
    block_table: Any, cache_seqlens: Any, cu_seqlens: Any, *, page_size: int, num_tokens: int | None = None,
    out: Any = None,
) -> Any:  # fmt: skip
    """Where the next tokens of each sequence go, any number of each.

    Parameters
    ----------
    block_table, cache_seqlens
        As for `slot_mapping`.
    cu_seqlens : array, (batch + 1,), int32 or int64
        Ascending offsets: the new tokens of sequence b are rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.
    page_size : int
        Tokens in a page.
    num_tokens : int, optional
        Length of the result, if `out` is not given: ``cu_seqlens[-1]`` or more, which the host need not know.
    out : array, (num_tokens,), int64, optional
        Where to put the result.

    Returns
    -------
    array, (num_tokens,), int64
        As `slot_mapping`; also -1 for rows that belong to no sequence.

    Raises
    ------
    TypeError, ValueError
        As `slot_mapping`.
    """
    given = {"block_table": block_table, "cache_seqlens": cache_seqlens, "cu_seqlens": cu_seqlens, "out": out}
    call = _call("numba.slot_mapping_varlen", **given)
    where = call.function
    size = count(f"{where}: page_size", page_size, 1, MAX_COUNT)
    table, lengths, offsets, out = call.arrays.values()
    _check.shape(f"{where}: cu_seqlens", call.required("cu_seqlens")[0], (table.shape[0] + 1,), "(batch + 1,)")
    if num_tokens is None and out is None:
        raise TypeError(f"{where}: num_tokens must be given if out is not; got None")
    tokens = out.shape[0] if num_tokens is None else count(f"{where}: num_tokens", num_tokens, 0, MAX_COUNT)
    if checks_values():
        _check.ascending_offsets(f"{where}: cu_seqlens", call.to_host("cu_seqlens"), tokens, "num_tokens")
    return _slots(call, packed_slots, tokens, table, lengths, offsets, size)


def _call(function: str, **arrays: Any) -> Call:
    axes = {"block_table": ("batch", "max_pages_per_seq"), "cu_seqlens": ("batch + 1",), "out": ("num_tokens",)}
    call = _run.indices(function, arrays, axes, optional=("out",))
    table, lengths = call.required("block_table", "cache_seqlens")
    _check.shape(f"{function}: cache_seqlens", lengths, table.shape[:1], "(batch,)")
    if checks_values():
        values = call.to_host("cache_seqlens")
        _run.refuse(call, "cache_seqlens", values, values < 0, "at least 0")
    return call


def _slots(call: Call, kernel: Any, num_tokens: int, *args: Any) -> Any:
    out = call.arrays["out"]
    if out is None:
        out = call.empty((num_tokens,), np.dtype(np.int64))
    else:
        (spec,) = call.required("out")
        _check.dtype(f"{call.function}: out", spec, [np.dtype(np.int64)])
        _check.shape(f"{call.function}: out", spec, (num_tokens,), "(num_tokens,)")
        _run.written(call, "out")
    _run.launch(call, kernel, num_tokens, [*args, out])
    return out
