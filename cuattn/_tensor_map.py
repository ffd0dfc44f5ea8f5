"""Tensor maps: how the copy engine of sm_90 sees an array. Made on the host, by the driver, for one address."""

from __future__ import annotations

import ctypes
import functools
import sys

import numpy as np

from cuattn import _check

_TYPES = {_check.FLOAT16: 6, _check.BFLOAT16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_128B, _OUTSIDE_IS_ZERO = 0, 3, 2, 0
_BYTES, _ALIGNMENT = 128, 64


@functools.lru_cache(4096)
def tensor_map(
    address: int, dtype: np.dtype, sizes: tuple[int, int, int, int], strides: tuple[int, int, int], rows: int
) -> np.void:
    """The map of an array (features, sequence, heads, batch), as a kernel takes it by value.

    A box is 64 features of `rows`. `sizes` are in elements, all 1 at least; `strides` along sequence, heads and batch
    in bytes, multiples of 16.

    Raises
    ------
    RuntimeError
        If the driver refuses it.
    """
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    place = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    longs, ints = ctypes.c_uint64, ctypes.c_uint32
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place), _TYPES[dtype], ints(4), ctypes.c_void_p(address), (longs * 4)(*sizes),
        (longs * 3)(*strides), (ints * 4)(64, rows, 1, 1), (ints * 4)(1, 1, 1, 1),
        _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_128B, _OUTSIDE_IS_ZERO,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled gives {status} for sizes {sizes} and strides {strides}")
    return np.frombuffer(ctypes.string_at(place, _BYTES), dtype=f"V{_BYTES}")[0]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
