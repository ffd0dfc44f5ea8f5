"""Tables in Numba: the block table and the lengths of a batch, changed on the device where they are.

A batch keeps its ``block_table (batch, max_pages_per_seq)`` and ``cache_seqlens (batch,)`` on the device, where a
CUDA graph that was captured with them finds them; each step sends only what is new: which row got which page at
which column, and how far which rows went on. In every kernel a thread owns one of these changes. A row or column
that is not there is skipped, and a page id that the table can't hold becomes -1: none turns into another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from cuattn._settings import checks_values
from cuattn.numba import _run

NOTHING = np.int64(-1)
ZERO = np.int64(0)


@cuda.jit(device=True)
def grown(length, number, most):
    """A length, and `number` more or less: 0 to `most`. A negative length is none and remains."""
    if length < ZERO:
        return length
    if number > most - length:
        return most
    return max(length + number, ZERO) if number > -most else ZERO


@cuda.jit
def set_entries(block_table, rows, columns, pages, most):
    """Thread i: entry ``[rows[i], columns[i]]``."""
    i = np.int64(cuda.grid(1))
    if i < rows.shape[0]:
        row, column, page = np.int64(rows[i]), np.int64(columns[i]), np.int64(pages[i])
        if ZERO <= row < block_table.shape[0] and ZERO <= column < block_table.shape[1]:
            block_table[row, column] = page if ZERO <= page <= most else NOTHING


@cuda.jit
def add_to_each(cache_seqlens, rows, number, most):
    """Thread i: length ``rows[i]``, and one number for all."""
    i = np.int64(cuda.grid(1))
    if i < rows.shape[0]:
        row = np.int64(rows[i])
        if ZERO <= row < cache_seqlens.shape[0]:
            cache_seqlens[row] = grown(np.int64(cache_seqlens[row]), np.int64(number), np.int64(most))


@cuda.jit
def add_numbers(cache_seqlens, rows, numbers, most):
    """Thread i: length ``rows[i]``, and ``numbers[i]``."""
    i = np.int64(cuda.grid(1))
    if i < rows.shape[0]:
        row = np.int64(rows[i])
        if ZERO <= row < cache_seqlens.shape[0]:
            cache_seqlens[row] = grown(np.int64(cache_seqlens[row]), np.int64(numbers[i]), np.int64(most))


def update_block_table(block_table: Any, rows: Any, columns: Any, pages: Any) -> None:
    """Set entries of a block table in place: ``block_table[rows[i], columns[i]] = pages[i]``.

    Parameters
    ----------
    block_table : array, (batch, max_pages_per_seq), int32 or int64
        Written to.
    rows, columns, pages : array, (n,), int32 or int64
        Where, and which page; a negative page, or one that the table can't hold, becomes -1. An entry with a row
        or column that is negative, or on a device too large, is skipped. Each entry at most once.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit, and for NumPy arrays outside the simulator. What is too
        large, and entries named twice, are refused only under ``checking("values")``.
    """
    arrays = {"block_table": block_table, "rows": rows, "columns": columns, "pages": pages}
    call = _run.indices("numba.update_block_table", arrays, {"block_table": ("batch", "max_pages_per_seq")})
    count = _run.same_length(call, "rows", "columns", "pages")
    _run.written(call, "block_table")
    (table,) = call.required("block_table")
    most = int(np.iinfo(table.dtype).max)
    if checks_values():
        limits = {"rows": table.shape[0], "columns": table.shape[1], "pages": most + 1}
        values = {name: call.to_host(name) for name in limits}
        for name, limit in limits.items():
            _run.refuse(call, name, values[name], values[name] >= limit, f"below {limit}")
        used = (values["rows"] >= 0) & (values["columns"] >= 0)
        _run.once(call, "rows and columns", zip(*(values[name][used].tolist() for name in ("rows", "columns"))))
    _run.launch(call, set_entries, count, [*call.arrays.values(), most])


def advance(cache_seqlens: Any, rows: Any, num_new: Any) -> None:
    """Add to lengths in place: ``cache_seqlens[rows[i]] += num_new[i]``.

    Parameters
    ----------
    cache_seqlens : array, (batch,), int32 or int64
        Written to. Lengths remain within 0 and the largest of the dtype; a negative one is none and stays.
    rows : array, (n,), int32 or int64
        Which lengths, each at most once. One that is negative, or on a device too large, is skipped.
    num_new : int, or array, (n,), int32 or int64
        New tokens, the same number for all rows or one for each. Negative: tokens that were rejected.

    Raises
    ------
    TypeError, ValueError
        As `update_block_table`.
    """
    one = isinstance(num_new, (int, np.integer))
    if one and not -(2**63) <= int(num_new) < 2**63:
        raise ValueError(f"numba.advance: num_new must be an int64; got {num_new}")
    arrays = {"cache_seqlens": cache_seqlens, "rows": rows} | ({} if one else {"num_new": num_new})
    call = _run.indices("numba.advance", arrays)
    count = _run.same_length(call, *list(arrays)[1:])
    _run.written(call, "cache_seqlens")
    (lengths,) = call.required("cache_seqlens")
    if checks_values():
        values = call.to_host("rows")
        _run.refuse(call, "rows", values, values >= lengths.shape[0], f"below {lengths.shape[0]}")
        _run.once(call, "rows", values[values >= 0].tolist())
    args = [*call.arrays.values(), *([int(num_new)] if one else []), int(np.iinfo(lengths.dtype).max)]
    _run.launch(call, add_to_each if one else add_numbers, count, args)
