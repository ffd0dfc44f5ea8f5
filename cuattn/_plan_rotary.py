"""Plans of `apply_rotary`: which vector width, how rows are cut up. Pure Python, no arrays."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cuattn import _check, _launch
from cuattn._compile import Kernel
from cuattn._dims_rotary import RotationDims
from cuattn._settings import debug

_THREADS = 128


@dataclass(frozen=True)
class RotaryPlan:
    """How a rotation runs: which kernel, cut up how."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]  # threads along (vectors of a row, rows)
    shared_bytes: int = 0


@functools.lru_cache(4096)
def plan_rotary(dims: RotationDims, device: _launch.DeviceInfo) -> RotaryPlan:
    """Choose vector width, block and grid; the result's bits don't depend on the choice."""
    vec = _vector(dims)
    items = _items(dims, vec)
    pieces = -(-items // _THREADS)
    columns = -(-items // pieces)
    rows = max(min(_THREADS // columns, dims.num_rows), 1)
    plan = RotaryPlan(_kernel(dims.dtype, vec), (-(-dims.num_rows // rows), pieces, 1), (columns, rows, 1))
    debug(1, plan)
    return plan


def _vector(dims: RotationDims) -> int:
    """Elements of a load: 16 bytes if every row of x and out and the rotated features are made of such, else 1."""
    vec, rotary = 16 // dims.dtype.itemsize, dims.rotary
    table_bytes = 4 if rotary.float_tables else dims.dtype.itemsize
    whole = dims.head_dim % vec == 0 and rotary.half % vec == 0 and dims.alignment >= 16
    return vec if whole and rotary.alignment >= min(16, vec * table_bytes) else 1


def _items(dims: RotationDims, vec: int) -> int:
    """Vectors of pairs in a row, and vectors of features that stay."""
    return (dims.head_dim - dims.rotary.half) // vec


def _kernel(dtype: np.dtype, vec: int) -> Kernel:
    return Kernel("rotary.cu", "cuattn_apply_rotary", (("T", _check.CUDA_TYPES[dtype]), ("VEC", vec)))


def kernels() -> Iterator[Kernel]:
    """Every kernel that `plan_rotary` can choose, once each; the tests compile them all."""
    for dtype in _check.FLOATS:
        for vec in (16 // dtype.itemsize, 1):
            yield _kernel(dtype, vec)


@functools.lru_cache(4096)
def layout(dims: RotationDims) -> np.void:
    """RotationLayout of rotary.cu."""
    rotary = dims.rotary
    return _launch.by_value(
        dims.num_rows, *dims.rows[1:], *itertools.chain.from_iterable(dims.strides), _items(dims, _vector(dims)),
        dims.index_bytes, rotary.half, rotary.interleaved, rotary.float_tables, rotary.max_positions, *rotary.steps,
    )  # fmt: skip
