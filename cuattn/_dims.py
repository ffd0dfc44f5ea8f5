"""Sizes and strides of a call under names: the checks make them, and nothing after the checks looks at a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MAX_ROW_AXES = 4  # what rows.cuh walks
UNBOUNDED = 2**31 - 1  # of a window: no position is further away

Strides = tuple[int, ...]  # of MAX_ROW_AXES axes, if not said otherwise


@dataclass(frozen=True, eq=False)  # equal calls share one object, see _check_state: hashing it must be cheap
class MergeDims:
    """A merge of states. Rows are everything but the last axis; strides are in elements, unused leading axes are 0."""

    form: str  # "pair", "list", "stack" or "ragged"
    shape: tuple[int, ...]  # of the result, (..., head_dim)
    rows: tuple[int, ...]  # four sizes, after neighbouring axes were merged; ragged: rows[steps[-1]] segments
    states: int  # ragged: in the whole stack
    dtypes: tuple[np.dtype, ...]  # of the first state, of the others, of the result
    strides: tuple[Strides, ...]  # of each array, in the order of the kernel's layout struct
    steps: tuple[int, ...]  # stack: outs and lses from state to state; bytes, step of indptr, axis of segments (or 0)
    alignment: tuple[int, ...]  # bytes that divide every row address, for each of `dtypes`

    @property
    def head_dim(self) -> int:
        return self.shape[-1]

    @property
    def num_rows(self) -> int:
        return math.prod(self.rows)


class PagedSide(NamedTuple):
    """K or V of an operation on pages; strides are in bytes."""

    head_dim: int
    tokens: Strides  # from token to token, from head to head; copying: of the pages that are read, as `pages`
    pages: Strides  # from page to page, offset to offset, head to head
    scale_step: int  # elements from the scale of one head to that of the next; 0 if there is one for all, or none


class IndexDims(NamedTuple):
    """An array of indices; strides are in elements."""

    bytes: int  # 4 or 8 an entry; 0: the array is absent
    step: int  # along the last axis


class RotaryDims(NamedTuple):
    """A rotation of K while it is appended."""

    half: int  # rotary_dim / 2
    interleaved: bool
    float_tables: bool  # cos and sin are float32, not of K's dtype
    max_positions: int
    steps: tuple[int, int]  # of cos and sin from row to row, in elements
    positions: tuple[int, int]  # as `PagedDims.indices`
    alignment: int  # bytes that divide the address of every row of cos and sin


@dataclass(frozen=True, eq=False)  # as MergeDims
class PagedDims:
    """An operation on pages: tokens to slots ("append"), slots to tokens ("gather"), pages to pages ("copy")."""

    operation: str
    num_tokens: int  # copying: of all the pages that are copied
    num_heads: int
    num_pages: tuple[int, ...]  # copying: of the cache that is read, and of the one that is written
    page_size: int
    dtypes: tuple[np.dtype, np.dtype]  # of the tokens, of the pages
    sides: tuple[PagedSide, PagedSide]  # K, V
    alignment: tuple[int, int]  # bytes that divide the address of every row, for each of `dtypes`
    indices: tuple[tuple[int, int], ...]  # of each index array: bytes of an entry, entries from one to the next
    rotary: RotaryDims | None = None


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring axes that are contiguous in every array; axes of size 1 vanish.

    >>> collapse((2, 5, 3), [(15, 3, 1), (30, 6, 2)])
    ((30,), [(1,), (2,)])
    >>> collapse((2, 5, 3), [(15, 3, 1), (1, 2, 10)])
    ((2, 5, 3), [(15, 3, 1), (1, 2, 10)])
    """
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(k[-1] == s[axis] * size for k, s in zip(kept, strides)):
            sizes[-1] *= size
            for k, s in zip(kept, strides):
                k[-1] = s[axis]
        else:
            sizes.append(size)
            for k, s in zip(kept, strides):
                k.append(s[axis])
    return tuple(sizes), [tuple(k) for k in kept]


def pad_front(values: Sequence[int], length: int, fill: int) -> tuple[int, ...]:
    """`values` with `fill` before them up to `length`."""
    return (fill,) * (length - len(values)) + tuple(values)
