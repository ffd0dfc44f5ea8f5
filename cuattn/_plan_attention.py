"""Plans of attention: which kernel, and how many blocks. Pure Python, no arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cuattn import _check, _launch
from cuattn._compile import Kernel
from cuattn._dims import UNBOUNDED
from cuattn._dims_attention import AttentionDims
from cuattn._settings import debug

_THREADS, _KEYS, _CHUNK = 256, 32, 64  # as in attention.cu
_DIMS = (128, 512)  # head_dim and head_dim_v at most
# As in attention_sm90.cu, CONSUMERS and KEYS by DIM: what registers and shared memory hold. Of calls without causal and
# window, where no tile straddles a diagonal, a larger KEYS is faster at 128.
_SM90_TILES, _SM90_WIDE = {64: (3, 128), 96: (2, 128), 128: (2, 128), 192: (2, 112), 256: (2, 80)}, {128: (2, 160)}
_SM90_L2 = 16 << 20  # bytes of keys and values that stay there
_MMA_THREADS = 128  # as in attention_mma.cu
_MMA_TILES = {64: (2, 64), 128: (2, 32), 256: (1, 32)}  # ATOMS and KEYS by DIM: what registers hold


@dataclass(frozen=True)
class AttentionPlan:
    """How an attention call runs, for arrays of certain shapes, strides and dtypes and any lengths and tables.

    `plan_attention` and `plan_attention_varlen` make it; it holds no arrays, can't be changed, and serves any number of
    calls.

    Attributes
    ----------
    variant : str
        ``"simt"``, the complete kernel; ``"mma"``, tensor cores; ``"sm90"``, those of Hopper.
    why : str
        What the choice rests on.
    kernel : Kernel
        Source file, entry and tile.
    grid, block : tuple of int
        Blocks and threads.
    shared_bytes : int
        Dynamic shared memory of a block.
    rows : int
        Query rows of a tile: pairs of a token and a head.
    device : DeviceInfo
        The kind of device that it is for: ``capability`` (major, minor) and ``num_sms``, its multiprocessors.
    dims : AttentionDims
        Sizes and strides (in elements) of the arrays that it is for.
    layout : numpy.void
        The same as the kernel reads it: AttentionLayout of attention.cuh.
    """

    variant: str
    why: str
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    rows: int
    device: _launch.DeviceInfo
    dims: AttentionDims = field(repr=False)
    layout: np.void = field(repr=False)


@functools.lru_cache(4096)
def plan_attention(dims: AttentionDims, device: _launch.DeviceInfo) -> AttentionPlan:
    """Choose tile and grid.

    Raises
    ------
    ValueError
        If the grid would exceed what a device can start.
    """
    widest, lacks = max(dims.head_dim, dims.head_dim_v), _lacks(dims, device)
    lacks_sm90 = lacks or _lacks_sm90(dims, device)
    if not lacks_sm90:
        tile = _sm90_tile(dims)
        dim, consumers, _ = tile
        variant, rows, group = "sm90", 64 * consumers, 1
        threads = 2 * rows + 128
        kernel, shared = _sm90_kernel(dims.dtype, *tile), _sm90_shared_bytes(*tile)
        why = "Hopper, 16-bit arrays"
    elif not lacks:
        dim = next(d for d in _MMA_TILES if widest <= d)
        variant, rows, group, threads = "mma", 64 * _MMA_TILES[dim][0], max(dims.group, 1), _MMA_THREADS
        kernel, shared = _mma_kernel(dims.dtype, dim, dims.plain), _mma_shared_bytes(dim)
        why = f"16-bit arrays, but not for Hopper's kernel: {lacks_sm90}"
    else:
        dim = next(d for d in _DIMS if widest <= d)
        variant, rows, group, threads = "simt", 8192 // dim, max(dims.group, 1), _THREADS
        kernel, shared = _kernel(dims.dtype, dims.kv_dtype, dim), _shared_bytes(dim)
        why = f"no tensor cores: {lacks}"
    tiles = -(-dims.seqlen_q * group // rows) * dims.batch
    if dims.packed:
        tiles = dims.seqlen_q * group // rows + dims.batch
    heads = dims.num_heads // group
    if tiles >= 2**31 or (heads >= 2**16 and variant != "sm90"):
        rule = "a grid takes fewer than 2**31 tiles of query rows and 2**16 heads"
        raise ValueError(f"{'attention_varlen' if dims.packed else 'attention'}: {rule}; got {tiles} and {heads}")
    why = f"{why}; {rows} rows, since head_dim is up to {dim}"
    grid, layout = (tiles, heads, 1), _layout(dims, 0, 0, 0, 0)
    if variant == "sm90":
        bytes_of_head = dims.seqlen_k * (dims.head_dim + dims.head_dim_v) * 2 * (1 if dims.packed else dims.batch)
        section = dims.group * max(_SM90_L2 // max(bytes_of_head, 1), 1)
        grid = (min(tiles * heads, device.num_sms), 1, 1)
        layout = _layout(dims, tiles, heads, min(section, heads), _sm90_box(dims).bit_length() - 1)
    plan = AttentionPlan(variant, why, kernel, grid, (threads, 1, 1), shared, rows, device, dims, layout)
    debug(1, plan)
    return plan


def _lacks(dims: AttentionDims, device: _launch.DeviceInfo) -> str:
    """What a call lacks for tensor cores, see the shapes in attention_mma.cu; nothing if they take it."""
    if device.capability < (8, 0):
        return "compute capability below 8.0"
    if dims.dtype == _check.FLOAT32 or dims.kv_dtype != dims.dtype:
        return "float32 or float8_e4m3fn"
    if dims.head_dim % 8 or dims.head_dim_v % 8 or max(dims.head_dim, dims.head_dim_v) > max(_MMA_TILES):
        return "head_dim or head_dim_v is no multiple of 8 or above 256"
    return "rows of q, k or v at no multiples of 16 bytes" if dims.alignment < 16 else ""


def _lacks_sm90(dims: AttentionDims, device: _launch.DeviceInfo) -> str:
    """What a call that tensor cores take lacks for attention_sm90.cu; nothing if it takes it."""
    if device.capability != (9, 0):
        return "compute capability is not 9.0"
    if not dims.plain:
        return "softcap, slopes or a mask"
    if dims.page_size and _sm90_box(dims) < 8:
        return "pages of a size that is no multiple of 8"
    # A tensor map has no axis of size 0 and no stride that is negative or 2^40 bytes.
    for sizes, strides, _ in (tensor_axes(dims, name) for name in "qkv"):
        if not all(sizes) or not all(0 < s < 2**40 for s in strides):
            return "no keys, or strides that a tensor map has not"
    tiles = dims.seqlen_q // 64 + dims.batch if dims.packed else (dims.seqlen_q // 64 + 1) * dims.batch
    if tiles * dims.num_heads >= 2**31 or dims.num_pages >= 2**31:
        return "2**31 tiles of rows or pages"
    return ""


@functools.lru_cache(4096)  # asked for in every call
def tensor_axes(dims: AttentionDims, name: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Of q, k or v: sizes and strides for `tensor_map`, and the rows of a box."""
    steps, is_query = getattr(dims, name), name == "q"
    batch, length = 1 if dims.packed else dims.batch, dims.seqlen_q if is_query else dims.seqlen_k
    if dims.page_size and not is_query:
        batch, length = dims.num_pages, dims.page_size
    heads = dims.num_heads if is_query else dims.num_kv_heads
    features = dims.head_dim_v if name == "v" else dims.head_dim
    sizes = features, length, heads, batch
    strides = tuple(2 * s if n > 1 else 16 for n, s in zip(sizes[1:], (steps[1], steps[2], steps[0])))
    _, consumers, keys = _sm90_tile(dims)
    return sizes, strides, 64 * consumers if is_query else _sm90_box(dims) if dims.page_size else keys


def _sm90_tile(dims: AttentionDims) -> tuple[int, int, int]:
    """DIM, CONSUMERS and KEYS of attention_sm90.cu."""
    dim = next(d for d in _SM90_TILES if max(dims.head_dim, dims.head_dim_v) <= d)
    wide = dims.window == (UNBOUNDED, UNBOUNDED)
    return dim, *(_SM90_WIDE if wide and dim in _SM90_WIDE else _SM90_TILES)[dim]


def _sm90_box(dims: AttentionDims) -> int:
    """Keys of a page that are copied at once: the largest power of two of which page and tile are multiples."""
    whole = dims.page_size | _sm90_tile(dims)[2]
    return whole & -whole


def _sm90_shared_bytes(dim: int, consumers: int, keys: int) -> int:
    """Shared of attention_sm90.cu, and a little more."""
    return (4 * keys + 64 * consumers) * -(-dim // 64) * 128 + 1024


def _sm90_kernel(dtype: np.dtype, dim: int, consumers: int, keys: int) -> Kernel:
    shared = _sm90_shared_bytes(dim, consumers, keys)
    numbers = {"DIM": dim, "CONSUMERS": consumers, "KEYS": keys, "SHARED": shared}
    types = ("T", _check.CUDA_TYPES[dtype])
    return Kernel("attention_sm90.cu", "cuattn_attention_sm90", (types, *numbers.items()), "a")


def _shared_bytes(dim: int) -> int:
    """Shared of attention.cu."""
    rows = 8192 // dim + 4
    return dim * rows * 4 + _CHUNK * (_KEYS + 1) * 4 + _KEYS * rows * 4 + _KEYS * 24


def _kernel(dtype: np.dtype, kv_dtype: np.dtype, dim: int) -> Kernel:
    types = {"T": _check.CUDA_TYPES[dtype], "C": _check.CUDA_TYPES[kv_dtype]}
    defines: dict[str, str | int] = {**types, "DIM": dim, "SHARED": _shared_bytes(dim)}
    return Kernel("attention.cu", "cuattn_attention", tuple(defines.items()))


def _mma_shared_bytes(dim: int) -> int:
    """Shared of attention_mma.cu."""
    atoms, keys = _MMA_TILES[dim]
    return 64 * atoms * dim * 2 + 4 * keys * dim * 2 + 4 * keys * 8 + 32


def _mma_kernel(dtype: np.dtype, dim: int, plain: bool) -> Kernel:
    atoms, keys = _MMA_TILES[dim]
    numbers = {"DIM": dim, "ATOMS": atoms, "KEYS": keys, "PLAIN": int(plain), "SHARED": _mma_shared_bytes(dim)}
    return Kernel("attention_mma.cu", "cuattn_attention_mma", (("T", _check.CUDA_TYPES[dtype]), *numbers.items()))


def kernels() -> Iterator[Kernel]:
    """Every kernel that `plan_attention` can choose, once each; the tests compile them all."""
    for dtype in _check.FLOATS:
        for kv_dtype in (dtype, _check.FLOAT8):
            yield from (_kernel(dtype, kv_dtype, dim) for dim in _DIMS)
    for dtype in (_check.FLOAT16, _check.BFLOAT16):
        for dim in _MMA_TILES:
            yield from (_mma_kernel(dtype, dim, plain) for plain in (True, False))
        tiles = (*_SM90_TILES.items(), *_SM90_WIDE.items())
        yield from (_sm90_kernel(dtype, dim, *tile) for dim, tile in tiles)


def _layout(dims: AttentionDims, *work: int) -> np.void:
    """AttentionLayout of attention.cuh."""
    return _launch.by_value(
        dims.batch, dims.seqlen_q, dims.seqlen_k, dims.group, dims.head_dim, dims.head_dim_v,
        dims.num_pages, dims.page_size, *dims.window, *dims.cu_q, *dims.cu_k, *dims.used_k, *dims.table, dims.table_row,
        *dims.q, *dims.out, *dims.lse, *dims.k, *dims.v, *dims.slopes, dims.sinks, dims.k_scale, dims.v_scale,
        dims.mask.bits, *dims.mask.strides, *work,
    )  # fmt: skip
