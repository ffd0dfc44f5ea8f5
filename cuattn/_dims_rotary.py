"""Sizes and strides of a call of `apply_rotary` under names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cuattn._dims import RotaryDims, Strides


@dataclass(frozen=True, eq=False)  # equal calls share one object, see _check_rotary: hashing it must be cheap
class RotationDims:
    """A rotation. Rows are everything but the last axis; strides are in elements, unused leading axes are 0."""

    shape: tuple[int, ...]  # of x and of the result, (..., num_heads, head_dim)
    dtype: np.dtype
    rows: tuple[int, ...]  # four sizes, after neighbouring axes were merged
    strides: tuple[Strides, ...]  # of x, out and positions, from row to row
    alignment: int  # bytes that divide the address of every row of x and out
    rotary: RotaryDims
    index_bytes: int  # of a position

    @property
    def head_dim(self) -> int:
        return self.shape[-1]

    @property
    def num_rows(self) -> int:
        return math.prod(self.rows)
