"""Value profiles: what the numbers of a test case look like.

A profile names a situation in which merges have gone wrong (one state dominates, everything is below a finite
sentinel, an empty state holds NaN, ...). It is filled from a seeded generator, so that a case is rebuilt
exactly.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = ("float16", "bfloat16", "float32")

PROFILES = (
    "normal",
    "one state dominates",
    "all equal",
    "huge",
    "below sentinels",
    "some empty",
    "all empty",
    "empty holds poison",
    "first only",
    "near overflow",
    "tiny",
)

HAS_EMPTY = ("some empty", "all empty", "empty holds poison", "first only")

_POISON = (np.nan, np.inf, -np.inf)


def as_dtype(dtype: Any) -> np.dtype:
    """Return the NumPy dtype of a name or dtype; ``"bfloat16"`` is that of ``ml_dtypes``."""
    return np.dtype(ml_dtypes.bfloat16) if str(dtype) == "bfloat16" else np.dtype(dtype)


def finfo(dtype: Any) -> Any:
    """Return ``finfo`` of any floating dtype, bfloat16 included."""
    return ml_dtypes.finfo(as_dtype(dtype))


def lse_values(profile: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Fill the log-sum-exps of a stack of states.

    Parameters
    ----------
    profile : str
        One of `PROFILES`.
    rng : numpy.random.Generator
        Advanced by the call.
    shape : tuple of int
        ``(num_states, *rows)``.

    Returns
    -------
    numpy.ndarray, (num_states, *rows) float32
        Natural log; -inf marks an empty state.

    """
    num_states, rows = shape[0], shape[1:]
    lse = 4.0 * rng.standard_normal(shape)
    states = np.arange(num_states).reshape((num_states,) + (1,) * len(rows))
    if profile == "one state dominates":
        lse += np.where(states == rng.integers(0, max(num_states, 1), rows), 1e4, 0.0)
    elif profile == "all equal":
        lse = np.broadcast_to(4.0 * rng.standard_normal(rows), shape)
    elif profile == "huge":
        lse += rng.choice([-5e5, 5e5], rows)
    elif profile == "below sentinels":     # at -1e30 two states are equal; no lse can hold the sum of three
        near = (states == rng.integers(0, max(num_states, 1), rows)) | (states == 0)
        lse = rng.choice([-5.5e4, -1e5, -1e30], rows) * np.where(near, 1.0, 2.0) - np.abs(lse)
    elif profile in ("some empty", "empty holds poison"):
        lse = np.where(rng.random(shape) < 0.4, -np.inf, lse)
    elif profile == "all empty":
        lse = np.full(shape, -np.inf)
    elif profile == "first only":
        lse = np.where(states > 0, -np.inf, lse)
    return lse.astype(np.float32)


def out_values(profile: str, rng: np.random.Generator, lse: np.ndarray, head_dim: int,
               dtype: Any) -> np.ndarray:
    """Fill the outputs that belong to `lse`.

    Empty states hold zeros, or NaN and infinities under "empty holds poison". Negative zeros do not occur:
    ``0 + (-0.0)`` is ``+0.0``, so a merge need not keep their sign. "near overflow" stays below the largest
    finite number divided by the number of states when the dtype has the exponents of float32, in which
    merges accumulate, and reaches the largest finite number in float16.

    Parameters
    ----------
    profile : str
        One of `PROFILES`.
    rng : numpy.random.Generator
        Advanced by the call.
    lse : numpy.ndarray, (num_states, *rows) float32
        From `lse_values`.
    head_dim : int
        Length of the last axis.
    dtype : dtype or str
        One of `DTYPES`.

    Returns
    -------
    numpy.ndarray, (num_states, *rows, head_dim) of `dtype`

    """
    dtype, info = as_dtype(dtype), finfo(dtype)
    shape = (*lse.shape, head_dim)
    empty = np.broadcast_to(np.isneginf(lse)[..., None], shape)
    if profile == "near overflow":
        top = float(info.max)
        top = top if dtype == np.float16 else 0.9 * top / (lse.shape[0] + 1)
        values = top * rng.uniform(0.95, 1.0, shape) * rng.choice([-1.0, 1.0], shape)
    elif profile == "tiny":
        scale = rng.choice([float(info.smallest_subnormal), float(info.smallest_normal) / 4], shape)
        values = scale * rng.integers(-8, 9, shape)
    else:
        values = rng.standard_normal(shape)
    values = np.where(empty, 0.0, values) + 0.0              # + 0.0 turns -0.0 into 0.0
    if profile == "empty holds poison":
        values = np.where(empty, rng.choice(_POISON, shape), values)
    return values.astype(dtype)
