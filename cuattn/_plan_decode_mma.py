"""The tensor-core tile of a decode, if it covers the call: decode_mma.cu."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cuattn import _check, _launch
from cuattn._compile import Kernel
from cuattn._dims_decode import UNBOUNDED, DecodeDims

_WARPS = 4
_PIECE_BYTES = 96  # Piece of decode_work.cuh and a float
FOLD = 4  # as in decode_work.cuh
FOLD_FROM = 8  # splits for each block that a device can hold
_DIMS = (64, 128, 256)
# Blocks on a multiprocessor by DIM, ROWS and the bytes of an element, as many as registers allow.
_BLOCKS = {
    (64, 8, 2): 4, (128, 8, 2): 3, (128, 16, 2): 2, (256, 8, 2): 2,
    (64, 8, 1): 3, (128, 8, 1): 3, (128, 16, 1): 2, (256, 8, 1): 2,
}  # fmt: skip


class Tile(NamedTuple):
    """How decode_mma.cu is compiled and started."""

    kernel: Kernel
    merge: Kernel | None  # None: no sequence can have two pieces
    grid: tuple[int, int, int]
    merge_grid: tuple[int, int, int]
    threads: int
    merge_threads: int
    shared_bytes: int
    row_groups: int  # of a kv head: queries, and heads of them
    workspace_bytes: int
    work: tuple[int, ...]  # Work of decode_work.cuh


def tile(dims: DecodeDims, device: _launch.DeviceInfo, splits: int, most: int) -> Tile | None:
    """None where the complete variant has to do it: see the shapes in decode_mma.cu."""
    widest, group, itemsize = max(dims.head_dim, dims.head_dim_v), dims.group, dims.cache_dtype.itemsize
    fits = dims.head_dim % 16 == 0 and dims.head_dim_v % 16 == 0 and widest <= _DIMS[-1] and dims.alignment >= 16
    if device.capability < (8, 0) or dims.dtype == _check.FLOAT32 or not fits or not dims.num_rows:
        return None
    dim = next(d for d in _DIMS if widest <= d)
    tile_rows = _tile_rows(dim, group, itemsize)
    groups_of_query = -(-group // tile_rows)
    row_groups = dims.seqlen_q * groups_of_query
    of_sequence = dims.num_kv_heads * row_groups
    shares = dims.batch * of_sequence
    if dims.num_pages >= 2**31 or dims.max_tokens > 2**29:
        return None
    # A table that could hold many splits for each block: then a block takes FOLD of them.
    folded = FOLD if shares * splits > FOLD_FROM * device.num_sms * _BLOCKS[dim, tile_rows, itemsize] else 1
    pieces = -(-splits // folded)
    items = tile_rows // 8 * steps(dim, itemsize)
    special = dims.leftpad.bytes or dims.batch_idx.bytes or dims.num_new or dims.window[0] != UNBOUNDED
    full = dims.head_dim == dims.head_dim_v == dim >= 128 // itemsize
    divisors = of_sequence, dims.num_kv_heads, dims.page_size, most, groups_of_query
    strides = (n * itemsize for n in (*dims.k[:2], *dims.v[:2]))
    return Tile(
        _kernel("", dims.dtype, dims.cache_dtype, dim, tile_rows),
        _kernel("_merge", dims.dtype, dims.cache_dtype, dim, tile_rows) if pieces > 1 else None,
        (shares, pieces, 1), (shares, 1, 1), 32 * _WARPS, items * 32, shared_bytes(dim, tile_rows, itemsize),
        row_groups, workspace_bytes(shares, splits, group, dim, itemsize) if pieces > 1 else 0,
        (dims.batch, dims.seqlen_q == 1 and not special, dims.page_size % 16 == 0, folded, full,
         dims.k[:2] == dims.v[:2], *(n for d in divisors for n in _divider(d)), *strides),
    )  # fmt: skip


def _tile_rows(dim: int, group: int, itemsize: int) -> int:
    """ROWS of decode_mma.cu: 16 for more than 8 heads of a kv head, where registers hold them."""
    return 16 if group > 8 and (dim, 16, itemsize) in _BLOCKS else 8


def steps(dim: int, itemsize: int) -> int:
    """Tiles of 16 features: rows are read in lines of 128 bytes."""
    return max(dim * itemsize // 128, 1) * 8 // itemsize


def workspace_bytes(shares: int, splits: int, group: int, dim: int, itemsize: int) -> int:
    """Workspace of decode_work.cuh; `shares`: row groups of all kv heads and sequences."""
    columns, pairs = _tile_rows(dim, group, itemsize) // 8, -(-min(group, 8) // 2)
    return shares * splits * columns * pairs * (steps(dim, itemsize) * 8 + 1) * 16


def most_workspace_bytes(tokens: int, num_kv_heads: int, group: int, splits: int, head_dim: int) -> int:
    """Of whatever tile runs; `tokens`: queries of all sequences."""
    tiles = [(dim, itemsize) for dim in _DIMS for itemsize in (1, 2) if splits > 1 and head_dim <= dim]
    shares = tokens * num_kv_heads
    return max((workspace_bytes(shares * -(-group // 8), splits, group, *tile) for tile in tiles), default=0)


def _divider(d: int) -> tuple[int, int, int]:
    """Divider of decode_work.cuh."""
    shift = (d - 1).bit_length()
    return d, -(-(2 ** (31 + shift)) // d), shift


def shared_bytes(dim: int, rows: int, itemsize: int) -> int:
    """Shared of decode_mma.cu."""
    columns = rows // 8
    return _PIECE_BYTES + columns * steps(dim, itemsize) * 32 * (8 + _WARPS * 16 + 32) + _WARPS * columns * 64


def _kernel(step: str, dtype: np.dtype, cache_dtype: np.dtype, dim: int, rows: int) -> Kernel:
    types = {"T": _check.CUDA_TYPES[dtype], "C": _check.CUDA_TYPES[cache_dtype]}
    numbers = {"DIM": dim, "ROWS": rows, "BLOCKS": _BLOCKS[dim, rows, cache_dtype.itemsize]}
    numbers["SHARED"] = shared_bytes(dim, rows, cache_dtype.itemsize)
    return Kernel("decode_mma.cu", f"cuattn_decode_mma{step}", (*types.items(), *numbers.items()))


def kernels() -> Iterator[Kernel]:
    """Every kernel that `tile` can choose, once each."""
    for dtype in (_check.FLOAT16, _check.BFLOAT16):
        for cache_dtype in (dtype, _check.FLOAT8):
            for dim, rows, itemsize in _BLOCKS:
                if itemsize == cache_dtype.itemsize:
                    yield from (_kernel(step, dtype, cache_dtype, dim, rows) for step in ("", "_merge"))
