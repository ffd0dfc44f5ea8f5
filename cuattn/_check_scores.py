"""What changes scores and says which keys are seen, as every kind of attention takes it."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from cuattn import _check, _check_scale
from cuattn._call import ArraySpec
from cuattn._check import FLOAT32
from cuattn._check_scale import Factors
from cuattn._dims import UNBOUNDED


class Options(NamedTuple):
    """What is no array, as the kernel takes it; scales that are arrays count 1 here."""

    sm_scale: np.float32
    softcap: np.float32
    k_scale: np.float32
    v_scale: np.float32


def options(function: str, head_dim: int, sm_scale: Any, softcap: Any, factors: Factors) -> Options:
    """Numbers in float32."""
    if sm_scale is None:
        sm_scale = head_dim**-0.5
    for name, given in (("sm_scale", sm_scale), ("softcap", softcap)):
        if not _check_scale.is_number(given):
            raise TypeError(f"{function}: {name} must be a number; got {type(given).__name__}")
    return _options(function, sm_scale, softcap, *factors)


@functools.lru_cache(4096)
def _options(function: str, *numbers: float) -> Options:
    with np.errstate(over="ignore"):
        options = Options(*map(_float32, numbers))
    for name, given, value in zip(Options._fields, numbers, options):
        if not np.isfinite(value):
            raise ValueError(f"{function}: {name} must be finite in float32; got {given}")
    if options.softcap < 0 or (numbers[1] > 0 and options.softcap < np.finfo(np.float32).tiny):
        raise ValueError(f"{function}: softcap must be 0 (off) or above 0 in float32; got {numbers[1]}")
    return options


def _float32(number: float) -> np.float32:
    try:
        return np.float32(number)
    except OverflowError:  # an int beyond float64
        return np.float32(np.inf)


def window(function: str, causal: bool, limits: Any) -> tuple[tuple[int, int], bool]:
    """Keys seen before and after the position of a query, and whether any limit was asked for."""
    try:
        left, right = limits
        left, right = operator.index(left), operator.index(right)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function}: window must be two integers (left, right); got {limits!r}") from error
    if left < -1 or right < -1:
        raise ValueError(f"{function}: window must be (left, right), each -1 (unbounded) or more; got {limits}")
    local = bool(causal) or (left, right) != (-1, -1)
    left = UNBOUNDED if left == -1 else min(left, UNBOUNDED)
    right = 0 if causal else UNBOUNDED if right == -1 else min(right, UNBOUNDED)
    return (left, right), local


def by_head(where: str, array: ArraySpec | None, shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Strides along batch and heads of slopes or sinks."""
    if array is None:
        return 0, 0
    _check.dtype(where, array, [FLOAT32])
    if array.shape not in shapes:
        raise ValueError(f"{where}.shape must be {' or '.join(map(str, shapes))}; got {array.shape}")
    strides = _check.strides_in_elements(where, array)
    return (0, strides[0]) if len(strides) == 1 else (strides[0], strides[1])
