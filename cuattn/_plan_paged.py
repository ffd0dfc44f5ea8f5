"""Plans of the operations on pages: which kernel, which words, how tokens are cut up. Pure Python, no arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuattn import _check, _launch
from cuattn._compile import Kernel
from cuattn._dims import PagedDims, PagedSide
from cuattn._settings import debug

_THREADS = 128
_WORDS = {16: "uint4", 4: "uint1", 2: "ushort1", 1: "uchar1"}  # what a copy moves, best first
_ENTRIES = {"append": "cuattn_append_kv", "gather": "cuattn_gather_kv", "copy": "cuattn_copy_pages"}


@dataclass(frozen=True)
class PagedPlan:
    """How an operation on pages runs: which kernel, cut up how."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]  # threads along (vectors of a token, tokens)
    shared_bytes: int = 0


@dataclass(frozen=True)
class _Tile:
    """A thread's share: VEC elements of T. Without conversion T is a word, and head_dim and strides count words."""

    type: str
    vec: int
    convert: bool
    bytes: tuple[int, int]  # of an element among the tokens, among the pages


@functools.lru_cache(4096)
def plan_paged(dims: PagedDims, device: _launch.DeviceInfo) -> PagedPlan:
    """Choose words or vectors, block and grid; the result's bits don't depend on the choice.

    A thread moves one vector of K and one of V, so that both loads are under way at once.
    """
    tile = _tile(dims)
    vectors = max(_row(dims, tile, n)[0] for n in (0, 1))
    pieces = -(-vectors // _THREADS)
    columns = max(-(-vectors // pieces), 1)
    tokens = max(min(_THREADS // columns, dims.num_tokens), 1)
    grid = (-(-dims.num_tokens // tokens), pieces, 1)
    plan = PagedPlan(_kernel(dims.operation, tile.type, tile.vec, tile.convert), grid, (columns, tokens, 1))
    debug(1, plan)
    return plan


def kernels() -> Iterator[Kernel]:
    """Every kernel that `plan_paged` can choose, once each; the tests compile them all."""
    for operation in _ENTRIES:
        for size, word in _WORDS.items():
            if operation != "append" or size > 1:  # tokens have 16 bits at least
                yield _kernel(operation, word, 1, False)
    for operation in ("append", "gather"):
        for dtype in _check.FLOATS:
            for vec in (16 // dtype.itemsize, 1):
                yield _kernel(operation, _check.CUDA_TYPES[dtype], vec, True)


def _kernel(operation: str, type_: str, vec: int, convert: bool) -> Kernel:
    return Kernel("paged.cu", _ENTRIES[operation], (("T", type_), ("VEC", vec), ("CONVERT", int(convert))))


@functools.lru_cache(4096)
def _tile(dims: PagedDims) -> _Tile:
    tokens, pages = (dtype.itemsize for dtype in dims.dtypes)
    if dims.rotary is None and tokens == pages:
        divides = math.gcd(*dims.alignment, *(side.head_dim * tokens for side in dims.sides))
        word = next(w for w in _WORDS if divides % w == 0)
        return _Tile(_WORDS[word], 1, False, (word, word))
    vec = 16 // tokens
    return _Tile(_check.CUDA_TYPES[dims.dtypes[0]], vec if _fits(dims, vec) else 1, True, (tokens, pages))


def _fits(dims: PagedDims, vec: int) -> bool:
    if any(side.head_dim % vec for side in dims.sides):
        return False
    if any(has % (vec * dtype.itemsize) for has, dtype in zip(dims.alignment, dims.dtypes)):
        return False
    rotary = dims.rotary
    if rotary is None:
        return True
    table_bytes = 4 if rotary.float_tables else dims.dtypes[0].itemsize
    pairs = 2 * rotary.half if rotary.interleaved else rotary.half  # no vector lies on both sides of a border
    return pairs % vec == 0 and rotary.alignment % min(16, vec * table_bytes) == 0


def _row(dims: PagedDims, tile: _Tile, number: int) -> tuple[int, int]:
    """Vectors of a token, and how many of them lie one behind another on both sides: a head's, or all."""
    side = dims.sides[number]
    row_bytes = side.head_dim * dims.dtypes[0].itemsize
    head = row_bytes // (tile.bytes[0] * tile.vec)
    steps = side.tokens[-1], side.pages[-1]
    joined = steps == (row_bytes, side.head_dim * dims.dtypes[1].itemsize)
    turns = number == 0 and dims.rotary is not None  # the kernel must know where in its head a vector is
    return dims.num_heads * head, dims.num_heads * head if joined and not turns and not side.scale_step else head


@functools.lru_cache(4096)
def layout(dims: PagedDims) -> np.void:
    """AppendLayout, GatherLayout or CopyLayout of paged.cu."""
    tile = _tile(dims)
    sides = [_side_fields(dims, tile, n, side) for n, side in enumerate(dims.sides)]
    indices = [number for index in dims.indices for number in index]
    if dims.operation == "copy":
        return _launch.by_value(dims.num_tokens, *dims.num_pages, dims.page_size, *indices, *sides[0], *sides[1])
    sizes = (dims.num_pages[0], dims.page_size, dims.num_pages[0] * dims.page_size)
    fields = [dims.num_tokens, *sizes, *indices, *sides[0], *sides[1]]
    if dims.operation == "append":
        fields.append(int(dims.dtypes[0] != dims.dtypes[1]))
        rotary = dims.rotary
        fields += [0] * 8 if rotary is None else [
            rotary.half, int(rotary.interleaved), int(rotary.float_tables),
            rotary.max_positions, *rotary.steps, *rotary.positions,
        ]  # fmt: skip
    return _launch.by_value(*fields)


def _side_fields(dims: PagedDims, tile: _Tile, number: int, side: PagedSide) -> list[int]:
    tokens = [step // tile.bytes[0] for step in side.tokens]
    pages = [step // tile.bytes[1] for step in side.pages]
    scale = [] if dims.operation == "copy" else [side.scale_step]
    return [*_row(dims, tile, number), *tokens, *pages, *scale]
