"""Sizes and strides of a decode call under names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cuattn._dims import IndexDims, RotaryDims


class NewDims(NamedTuple):
    """Tokens that a call adds to its cache, and the rotation of keys and queries; strides are in elements."""

    seqlen: int = 0
    k: tuple[int, int, int] = (0, 0, 0)  # batch, seqlen_new, kv head
    v: tuple[int, int, int] = (0, 0, 0)
    rotary: RotaryDims | None = None
    queries_turn: bool = False  # each by its own position; else all by that of the first new token


@dataclass(frozen=True, eq=False)  # equal calls share one object, see _check_decode: hashing it must be cheap
class DecodeDims:
    """A decode call; strides are in elements, those of absent arrays 0."""

    batch: int
    seqlen_q: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    num_pages: int
    page_size: int
    num_sequences: int  # rows of block_table
    max_pages: int  # columns of block_table
    dtype: np.dtype  # of q and out
    cache_dtype: np.dtype
    window: tuple[int, int]  # keys seen before and after the position, UNBOUNDED at most; causal: none after it
    table: IndexDims
    table_row: int
    lengths: IndexDims
    batch_idx: IndexDims
    leftpad: IndexDims
    q: tuple[int, int, int]  # batch, seqlen_q, num_heads
    out: tuple[int, int, int]
    lse: tuple[int, int, int]
    k: tuple[int, int, int]  # page, offset, kv head
    v: tuple[int, int, int]
    slopes: tuple[int, int]  # batch, head
    sinks: int
    k_scale: int
    v_scale: int
    alignment: int  # bytes that divide the address of every row of k_pages and v_pages
    new: NewDims

    @property
    def num_rows(self) -> int:
        """Query rows: pairs of a token and a head."""
        return self.batch * self.seqlen_q * self.num_heads

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the table can hold."""
        return self.max_pages * self.page_size

    @property
    def num_new(self) -> int:
        """New tokens of all sequences."""
        return self.batch * self.new.seqlen
