"""Inputs of the benches: random arrays on the device, and what CuPy can't do with float8."""

from __future__ import annotations

import ml_dtypes
import numpy as np

try:
    import cupy
except ImportError:  # cases can be listed all the same; `harness.main` says what to install for the rest
    cupy = None


def dtype_named(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def normal(shape: tuple[int, ...], dtype: np.dtype, rng: cupy.random.Generator) -> cupy.ndarray:
    """Normally distributed; float8: even bytes, of which none is NaN, for CuPy doesn't convert to it."""
    if dtype.itemsize == 1:
        return (rng.integers(0, 128, shape).astype(cupy.uint8) * 2).view(dtype)
    out = cupy.empty(shape, dtype)
    for some in cupy.array_split(out, min(len(out), 16)):  # piece by piece: float32 numbers take twice the memory
        some[...] = rng.standard_normal(some.shape, dtype=cupy.float32)
    return out


def as_bits(array: cupy.ndarray) -> cupy.ndarray:
    """CuPy indexes integers of any size, but no float8."""
    return array.view(f"u{array.dtype.itemsize}")
