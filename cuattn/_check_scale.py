"""Scales of a float8 cache: numbers, passed by value, or arrays of one for all heads or one for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn import _check
from cuattn._call import ArraySpec, Call

Factors = tuple[np.float32, np.float32]  # scales of K and V that are numbers, 1 where there is none
_ONE = np.float32(1)
_SMALLEST, _LARGEST = 2.0**-149, float(np.finfo(np.float32).max)


def is_number(given: Any) -> bool:
    """Whether a scale is passed by value, not as an array."""
    return isinstance(given, (float, int, np.floating, np.integer))


def number(function: str, name: str, given: Any) -> float | None:
    """A scale that is a number; None if it is an array or there is none."""
    if given is None or not is_number(given):
        return None
    if not _SMALLEST <= given <= _LARGEST:
        raise ValueError(f"{function}: {name} must be above 0 and finite in float32; got {given}")
    return float(given)


def by_value(function: str, arrays: dict[str, Any]) -> Factors:
    """Take the scales that are numbers out of the arguments of a call: what kernels get by value."""
    return _by_value(function, "k_scale", arrays), _by_value(function, "v_scale", arrays)


def _by_value(function: str, name: str, arrays: dict[str, Any]) -> np.float32:
    value = number(function, name, arrays[name])
    if value is None:
        return _ONE
    arrays[name] = None
    return np.float32(value)


def step(where: str, array: ArraySpec | None, heads: int) -> int:
    """Elements between the scales of neighbouring heads; 0 if there is one for all, or none."""
    if array is None:
        return 0
    _check.dtype(where, array, [_check.FLOAT32])
    if array.shape not in ((), (1,), (heads,)):
        raise ValueError(f"{where}.shape must be (), (1,) or (num_kv_heads,) ({heads},); got {array.shape}")
    strides = _check.strides_in_elements(where, array)
    return strides[0] if array.shape == (heads,) and heads > 1 else 0


def positive(call: Call) -> None:
    """No array of scales holds 0, a negative number, an infinity or NaN. For CUATTN_CHECK=values."""
    for name in ("k_scale", "v_scale"):
        if call.specs[name] is not None:
            values = call.to_host(name)
            if not ((values > 0) & np.isfinite(values)).all():
                raise ValueError(f"{call.function}: {name} must be above 0 and finite; got {values}")


def as_defined(array: Any, number: Any) -> Any:
    """A scale as the reference takes it: () or (num_kv_heads,) float32, or None for 1."""
    if array is None:
        return None if number is None or number == 1 else np.float32(number)
    return array.reshape(()) if array.size == 1 else array
