"""The tensor-core tile of a decode, if it covers the call: decode_mma.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cuattn import _check, _launch
from cuattn._compile import Kernel
from cuattn._dims import UNBOUNDED
from cuattn._dims_decode import DecodeDims

_DIMS = (64, 128, 256)
# As in decode_work.cuh and decode_mma.cu:
_TILE = 16  # tokens
_SHARED, _QUERY_PAD, _TICKETS = 1056, 8, 6 * 16  # bytes of a block; elements behind a row of queries; bytes of a warp
_MOST_STAGES = 6
_MERGE_WARPS, _MERGE_SHARED = 8, {1: 64 * 576, 2: 32 * 1088}  # of a merge: at most; bytes if they work together, by SET
_MOST_WARPS = 2048  # of a grid, so that `most_workspace_bytes` holds for any device
# What createpolicy gives on sm_90 and newer: lines of L2 like any other, that go first, that go last.
_POLICIES = 0x16F0 << 48, 0, 0x12F0 << 48, 0, 0x14F0 << 48, 0  # words, and the nothing of L2Policy in mma.cuh
_FEW = 8  # warps of a multiprocessor that merge: fewer than that work together
_LONG = 256  # leaves: longer sequences have a merge of their own
_WAVE = 1  # blocks of a merge that a multiprocessor runs at a time, of one item a warp
# Blocks of four warps on a multiprocessor by DIM, ROWS and the bytes of an element, as many as registers allow.
_BLOCKS = {
    (64, 8, 2): 2, (128, 8, 2): 2, (128, 16, 2): 2, (256, 8, 2): 1,
    (64, 8, 1): 2, (128, 8, 1): 2, (256, 8, 1): 1,  # 16 rows would spill
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel, cut up how."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


class Tile(NamedTuple):
    """How decode_mma.cu is compiled and started."""

    split: Launch
    merge: Launch | None  # None: no sequence can have two pieces
    num_leaves: int  # of the longest sequence that the table can hold
    row_groups: int  # of a kv head: queries, and heads of them
    workspace_bytes: int
    work: tuple[int, ...]  # Work of decode_work.cuh


def tile(dims: DecodeDims, device: _launch.DeviceInfo) -> Tile | None:
    """None where the complete variant has to do it: see the shapes in decode_mma.cu."""
    widest, group, itemsize = max(dims.head_dim, dims.head_dim_v), dims.group, dims.cache_dtype.itemsize
    fits = dims.head_dim % 16 == 0 and dims.head_dim_v % 16 == 0 and widest <= _DIMS[-1] and dims.alignment >= 16
    if device.capability < (8, 0) or dims.dtype == _check.FLOAT32 or not fits or not dims.num_rows:
        return None
    if dims.num_pages >= 2**31 or dims.max_tokens > 2**29:
        return None
    dim = next(d for d in _DIMS if widest <= d)
    rows = _tile_rows(dim, group, itemsize)
    groups_of_query = -(-group // rows)
    row_groups = dims.seqlen_q * groups_of_query
    shares = dims.num_kv_heads * row_groups
    leaf, most = leaves(dim, rows)
    warps, stages, blocks = _in_shared_memory(dim, rows, itemsize, device.capability)
    longer = power_of_two(-(-dims.max_tokens // (1024 * leaf)))  # than 1024 leaves: then they are longer too
    num_leaves = max(-(-dims.max_tokens // (leaf * longer)), 1)
    useful = shares * dims.batch * num_leaves  # warps, if every leaf had one
    resident = min(device.num_sms * blocks * warps, _MOST_WARPS)
    grid = -(-max(min(resident, useful), shares) // warps)
    teams = grid * warps // shares
    slots, groups = num_slots(teams, dims.batch, dims.max_tokens, leaf, most)
    plain, several = _is_plain(dims), dims.max_tokens > leaf
    kernel = _kernel(dims.dtype, dims.cache_dtype, dim, rows, plain)
    shared = _SHARED + warps * (_private_bytes(dim, rows) + stages * _tile_bytes(dim, itemsize))
    alone, merge = _merge(dims, shares, dim, rows, device.num_sms)
    full = dims.head_dim == dims.head_dim_v == dim
    divisors = shares, dims.num_kv_heads, dims.page_size, groups_of_query
    strides = (n * itemsize for n in (*dims.k[:2], *dims.v[:2]))
    return Tile(
        Launch(kernel, (grid, 1, 1), (32 * warps, 1, 1), shared), merge if several else None,
        num_leaves, row_groups, workspace_bytes(shares, slots, dims.batch, group, dim, rows) if several else 0,
        (dims.batch, -(-dims.batch // (32 * warps)), teams, slots, groups, stages, dims.page_size % _TILE == 0, full,
         alone, *_POLICIES, *(n for d in divisors for n in _divider(d)), *strides),
    )  # fmt: skip


def _is_plain(dims: DecodeDims) -> bool:
    """PLAIN of decode_mma.cu: see decode_work.cuh."""
    special = dims.leftpad.bytes or dims.batch_idx.bytes or dims.num_new or dims.new.rotary is not None
    sees_all = dims.seqlen_q == 1 and dims.window[0] == UNBOUNDED
    return not special and sees_all and dims.page_size % _TILE == 0 and dims.table.bytes == 4


def _merge(dims: DecodeDims, shares: int, dim: int, rows: int, num_sms: int) -> tuple[int, Launch]:
    """merge_alone of Work, and the merge.

    With few shares all warps of a block take the groups of a set of items. With many each warp has a set to itself, and
    what is long has blocks of the other kind besides.
    """
    columns, items = dims.batch * shares, rows // 8 * dim // 16
    per_set = 1 if columns * items <= _WAVE * num_sms else 2
    sets, shared = items // per_set, _MERGE_SHARED[per_set]
    few = columns * sets < _FEW * num_sms
    together = sets if few or dims.max_tokens > _LONG * leaves(dim, rows)[0] else 0
    warps = _MERGE_WARPS if few else min(sets, _MERGE_WARPS)
    alone = 0 if few else sets // warps
    kernel = _merge_kernel(dims.dtype, dims.cache_dtype, dim, rows, per_set)
    return alone, Launch(kernel, (columns, alone + together, 1), (32 * warps, 1, 1), shared if together else 0)


def _tile_rows(dim: int, group: int, itemsize: int) -> int:
    """ROWS of decode_mma.cu: 16 for more than 8 heads of a kv head, where registers hold them."""
    return 16 if group > 8 and (dim, 16, itemsize) in _BLOCKS else 8


def leaves(dim: int, rows: int) -> tuple[int, int]:
    """LEAF and MOST of decode_mma.cu: tokens of a leaf, leaves of a group."""
    return (128, 4) if dim * rows > 1024 else (64, 16)


def _tile_bytes(dim: int, itemsize: int) -> int:
    return 2 * _TILE * dim * itemsize


def _private_bytes(dim: int, rows: int) -> int:
    """What a warp has in shared memory besides its tiles."""
    return rows * (dim + _QUERY_PAD) * 2 + _TICKETS


def _in_shared_memory(dim: int, rows: int, itemsize: int, capability: tuple[int, int]) -> tuple[int, int, int]:
    """Warps of a block, tiles of a warp, blocks of a multiprocessor: a ring of some 24 KB a warp, 16 at least."""
    kilobytes = 227 if capability[0] in (9, 10) else 163 if capability in ((8, 0), (8, 7)) else 99
    size, most = _tile_bytes(dim, itemsize), _BLOCKS[dim, rows, itemsize]
    for blocks, warps in ((most, 4), (1, 4), (1, 2)):
        room = (kilobytes * 1024 // blocks - 1024 - _SHARED) // warps - _private_bytes(dim, rows)
        for stages in (_MOST_STAGES, 3, 2):  # those that decode_mma.cu can wait for
            if min(16384, _MOST_STAGES * size) <= stages * size <= min(room, max(24576, 3 * size)):
                return warps, stages, blocks
    raise AssertionError("two warps with two tiles each fit a multiprocessor since sm_80")


def num_slots(teams: int, batch: int, max_tokens: int, leaf: int, most: int) -> tuple[int, int]:
    """Places of partial states, and groups that a sequence can have; PieceSizes of decode_work.cuh gives none twice."""
    groups = max(min(-(-max_tokens // (leaf * most)), 1024 // most), 1)
    line = batch * max(max_tokens, _TILE)
    return batch * (groups + 1) + min(14 * teams, line // leaf) + 1, groups


def workspace_bytes(shares: int, slots: int, batch: int, group: int, dim: int, rows: int) -> int:
    """Workspace of decode_work.cuh; `shares`: row groups of all kv heads of a sequence."""
    columns, pairs = rows // 8, -(-min(group, 8) // 2)
    return batch * 16 + shares * slots * columns * pairs * (dim // 16 * 8 + 1) * 16


def most_workspace_bytes(
    batch: int, seqlen_q: int, num_kv_heads: int, group: int, max_tokens: int, head_dim: int
) -> int:
    """Of the tile for such heads, whatever the device and the cache's dtype."""
    if not num_kv_heads * group or head_dim > _DIMS[-1]:
        return 0
    found, dim = [0], next(d for d in _DIMS if head_dim <= d)
    for rows in {_tile_rows(dim, group, itemsize) for itemsize in (1, 2)}:
        leaf, most = leaves(dim, rows)
        shares = max(num_kv_heads * seqlen_q * -(-group // rows), 1)
        teams = (max(_MOST_WARPS, shares) + 3) // shares  # a grid has whole blocks, of four warps at most
        slots, _ = num_slots(teams, batch, max_tokens, leaf, most)
        if max_tokens > leaf:
            found.append(workspace_bytes(shares, slots, batch, group, dim, rows))
    return max(found)


def power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def _divider(d: int) -> tuple[int, int, int]:
    """Divider of decode_work.cuh."""
    shift = (d - 1).bit_length()
    return d, -(-(2 ** (31 + shift)) // d), shift


def _kernel(dtype: np.dtype, cache_dtype: np.dtype, dim: int, rows: int, plain: bool) -> Kernel:
    numbers = {"DIM": dim, "ROWS": rows, "PLAIN": int(plain), "BLOCKS": _BLOCKS[dim, rows, cache_dtype.itemsize]}
    numbers |= {"SHARED": _SHARED, "PRIVATE": _private_bytes(dim, rows), "TILE": _tile_bytes(dim, cache_dtype.itemsize)}
    return Kernel("decode_mma.cu", "cuattn_decode_mma", (*_types(dtype, cache_dtype), *numbers.items()))


def _merge_kernel(dtype: np.dtype, cache_dtype: np.dtype, dim: int, rows: int, per_set: int) -> Kernel:
    numbers = {"DIM": dim, "ROWS": rows, "SET": per_set, "SHARED": _MERGE_SHARED[per_set]}
    return Kernel("decode_merge_mma.cu", "cuattn_decode_merge_mma", (*_types(dtype, cache_dtype), *numbers.items()))


def _types(dtype: np.dtype, cache_dtype: np.dtype) -> tuple[tuple[str, str], ...]:
    return ("T", _check.CUDA_TYPES[dtype]), ("C", _check.CUDA_TYPES[cache_dtype])


def kernels() -> Iterator[Kernel]:
    """Every kernel that `tile` can choose, once each."""
    for dtype in (_check.FLOAT16, _check.BFLOAT16):
        for cache_dtype in (dtype, _check.FLOAT8):
            for dim, rows, itemsize in _BLOCKS:
                if itemsize == cache_dtype.itemsize:
                    yield from (_kernel(dtype, cache_dtype, dim, rows, plain) for plain in (True, False))
                    yield from (_merge_kernel(dtype, cache_dtype, dim, rows, per_set) for per_set in _MERGE_SHARED)
