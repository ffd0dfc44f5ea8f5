"""Sizes and strides of an attention call under names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cuattn._dims import IndexDims

ABSENT = IndexDims(0, 0)


class MaskDims(NamedTuple):
    """Which keys a mask keeps; strides are in bytes, 0 along axes of which there is one."""

    bits: bool = False  # eight keys a byte
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)  # batch, head, query, key or byte of keys
    given: bool = False


@dataclass(frozen=True, eq=False)  # equal calls share one object, see _check_attention: hashing it must be cheap
class AttentionDims:
    """An attention call; strides are in elements, those of absent arrays 0."""

    batch: int
    seqlen_q: int  # packed: rows of all sequences, with padding
    seqlen_k: int  # packed: the same of keys; pages: tokens that a row of the table holds
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    num_pages: int
    page_size: int  # 0: keys don't lie in pages
    dtype: np.dtype  # of q and out
    kv_dtype: np.dtype
    window: tuple[int, int]  # keys seen before and after the position, UNBOUNDED at most; causal: none after it
    cu_q: IndexDims
    cu_k: IndexDims
    used_k: IndexDims
    table: IndexDims
    table_row: int
    q: tuple[int, int, int]  # batch (packed: 0), seqlen_q, head
    out: tuple[int, int, int]
    lse: tuple[int, int, int]
    k: tuple[int, int, int]  # batch (packed: 0; pages: page), seqlen_k (pages: offset), kv head
    v: tuple[int, int, int]
    slopes: tuple[int, int]  # batch, head
    sinks: int
    k_scale: int
    v_scale: int
    alignment: int  # bytes that divide the address of every row of q, k and v
    plain: bool  # no softcap, slopes or mask
    mask: MaskDims

    @property
    def packed(self) -> bool:
        """Whether queries of all sequences lie behind each other."""
        return self.cu_q.bytes > 0

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads
