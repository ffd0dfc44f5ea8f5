"""Plans of decode: which kernels, how many lanes share a key, how much scratch memory. Pure Python, no arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cuattn import _check, _launch, _plan_decode_mma
from cuattn._compile import Kernel
from cuattn._dims_decode import DecodeDims
from cuattn._plan_decode_mma import Launch
from cuattn._settings import debug

_BLOCK = 128, 1, 1  # threads, as in decode.cu
_SPLIT_LEAST = 256  # tokens of a split, as in decode.cuh
_ROWS = {8: 4, 16: 2}  # query rows of a block by the features of a lane: what registers hold


@dataclass(frozen=True)
class DecodePlan:
    """How a decode runs, for arrays of certain shapes, strides and dtypes and any lengths and tables.

    `plan_decode` makes it, `decode` takes it; it holds no arrays, can't be changed, and serves any number of calls.

    Attributes
    ----------
    split : Launch
        The kernel that attends to one split of a sequence: its ``kernel``, ``grid`` (blocks), ``block`` (threads) and
        ``shared_bytes`` (dynamic shared memory of a block).
    merge : Launch or None
        The kernel that merges splits; None if no sequence can have two of them, or there is no query.
    num_splits : int
        Splits of the longest sequence that the table can hold; on tensor cores leaves, see `decode`.
    mma : bool
        Whether tensor cores do it.
    lanes : int
        Threads that share a key; 0 on tensor cores.
    workspace_bytes : int
        Scratch memory of a call, in bytes; 0 if it takes none.
    device : DeviceInfo
        The kind of device that it is for: ``capability`` (major, minor) and ``num_sms``, its multiprocessors.
    dims : DecodeDims
        Sizes and strides (in elements) of the arrays that it is for.
    layout : numpy.void
        The same as the kernels read it: DecodeLayout of decode.cuh, or MmaLayout of decode_mma.cuh.

    See Also
    --------
    cuattn.plan_decode : makes one.
    cuattn.decode_workspace_size : scratch memory that is enough, without a plan.
    """

    split: Launch
    merge: Launch | None
    num_splits: int
    mma: bool
    lanes: int
    workspace_bytes: int
    device: _launch.DeviceInfo
    dims: DecodeDims = field(repr=False)
    layout: np.void = field(repr=False)


def most_splits(num_kv_heads: int) -> int:
    """How many splits a sequence can have: enough to fill a device, fewer where many kv heads do that already."""
    return min(max(384 // max(num_kv_heads, 1), 16), 128)


def splits_within(max_tokens: int, num_kv_heads: int) -> int:
    """How many splits the longest of all sequences up to max_tokens has, 1 at least."""
    return max(1, min(most_splits(num_kv_heads), -(-max_tokens // _SPLIT_LEAST)))


def workspace_bytes(num_rows: int, head_dim_v: int, num_splits: int) -> int:
    """Float32 states of every split of every row; nothing if there is one split."""
    return num_rows * num_splits * (head_dim_v + 1) * 4 if num_splits > 1 else 0


@functools.lru_cache(4096)
def plan_decode(dims: DecodeDims, device: _launch.DeviceInfo) -> DecodePlan:
    """Choose tile and grid. The grid follows from the table's width; each length says on the device what is used of it.

    Raises
    ------
    ValueError
        If the grid would exceed what a device can start.
    """
    splits, most = splits_within(dims.max_tokens, dims.num_kv_heads), most_splits(dims.num_kv_heads)
    mma = _plan_decode_mma.tile(dims, device)
    if mma is not None:
        numbers = _layout(dims, most, splits, mma.row_groups, 0)
        layout = _launch.by_value(*numbers, *mma.work)
        plan = DecodePlan(mma.split, mma.merge, mma.num_leaves, True, 0, mma.workspace_bytes, device, dims, layout)
        debug(1, plan)
        return plan
    widest = max(dims.head_dim, dims.head_dim_v)
    vec, features = _tile(dims, widest)
    vectors = -(-widest // vec)
    # Of lone elements, neighbouring lanes load neighbours; vectors of 16 bytes take as few lanes as can be.
    lanes = _plan_decode_mma.power_of_two(min(vectors, 32) if vec == 1 else -(-vectors // (features // vec)))
    rows = _ROWS[features]
    row_groups = max(-(-dims.seqlen_q * dims.group // rows), 1)  # new tokens are written without queries too
    grid = (dims.batch * splits, dims.num_kv_heads * row_groups, 1)
    if grid[0] >= 2**31 or grid[1] >= 2**16:
        rule = "batch * splits must be less than 2**31, num_kv_heads * groups of query rows less than 2**16"
        raise ValueError(f"decode: {rule}; got {grid[0]} and {grid[1]}")
    merge = None
    if splits > 1 and dims.num_rows:
        merge = Launch(_kernel("merge", dims.dtype, dims.dtype, 1, 16), (dims.num_rows, 1, 1), _BLOCK)
    plan = DecodePlan(
        Launch(_kernel("split", dims.dtype, dims.cache_dtype, vec, features), grid, _BLOCK), merge, splits, False,
        lanes, workspace_bytes(dims.num_rows, dims.head_dim_v, splits), device, dims,
        _launch.by_value(*_layout(dims, most, splits, row_groups, lanes)),
    )  # fmt: skip
    debug(1, plan)
    return plan


def _tile(dims: DecodeDims, widest: int) -> tuple[int, int]:
    """Elements of a load and features of a lane."""
    vec = 16 // dims.cache_dtype.itemsize
    if dims.head_dim % vec or dims.head_dim_v % vec or dims.alignment < 16:
        return 1, 16
    return vec, 8 if vec <= 8 and widest <= 8 * 32 else 16


def _kernel(step: str, dtype: np.dtype, cache_dtype: np.dtype, vec: int, features: int) -> Kernel:
    types = {"T": _check.CUDA_TYPES[dtype], "C": _check.CUDA_TYPES[cache_dtype]}
    defines: dict[str, str | int] = {**types, "VEC": vec, "FEATURES": features}
    return Kernel("decode.cu", f"cuattn_decode_{step}", tuple(defines.items()))


def kernels() -> Iterator[Kernel]:
    """Every kernel that `plan_decode` can choose, once each, but for those of `_plan_decode_mma`; all are compiled."""
    for dtype in _check.FLOATS:
        for cache_dtype in (dtype, _check.FLOAT8):
            vec = 16 // cache_dtype.itemsize
            yield from (_kernel("split", dtype, cache_dtype, vec, f) for f in (8, 16) if f >= vec)
            yield _kernel("split", dtype, cache_dtype, 1, 16)
        yield _kernel("merge", dtype, dtype, 1, 16)


def _layout(dims: DecodeDims, most: int, splits: int, row_groups: int, lanes: int) -> tuple[int, ...]:
    """DecodeLayout of decode.cuh."""
    new, rotary = dims.new, dims.new.rotary
    room, turn = dims.max_tokens, (0,) * 6
    if rotary is not None:  # a token without a row of cosines has no place
        room = min(room, rotary.max_positions)
        turn = (rotary.half, rotary.interleaved, rotary.float_tables, rotary.max_positions, *rotary.steps)
    return (
        dims.seqlen_q, dims.num_heads, dims.group, dims.head_dim, dims.head_dim_v,
        dims.num_sequences, dims.num_pages, dims.page_size, dims.max_tokens,
        most, splits, row_groups, lanes, *dims.window,
        *dims.table, dims.table_row, *dims.lengths, *dims.batch_idx, *dims.leftpad,
        *dims.q, *dims.out, *dims.lse, *dims.k, *dims.v, *dims.slopes, dims.sinks, dims.k_scale, dims.v_scale,
        new.seqlen, room, *new.k, *new.v, *turn, new.queries_turn,
    )  # fmt: skip
