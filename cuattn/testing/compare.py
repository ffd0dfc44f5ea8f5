"""The comparison: type, dtype, shape, then the places of inf and NaN, then values against a bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn.testing.profiles import as_dtype


def to_host(array: Any, name: str = "array") -> np.ndarray:
    """Return an array of any library as a NumPy array.

    Parameters
    ----------
    array : array
        With ``shape`` and ``dtype``, and ``get()`` (CuPy) or ``__array__``.
    name : str
        For the message.

    Raises
    ------
    AssertionError
        If it is not an array: a list, a number, None.

    """
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise AssertionError(f"{name}: must be an array; got {type(array).__name__}")
    return np.asarray(array.get() if hasattr(array, "get") else array)


def assert_close(actual: Any, expected: Any, bound: Any, *, dtype: Any = None, name: str = "out",
                 case: Any = None) -> float:
    """Assert ``|actual - expected| <= bound`` in every element, and equal places of +inf, -inf and NaN.

    Parameters
    ----------
    actual : array
        Of any library.
    expected : array, like `actual`
        Usually float64.
    bound : array_like
        Absolute, broadcast to the shape. Not looked at where `expected` is not finite. A NaN allows nothing.
    dtype : dtype or str, optional
        That `actual` must have. Default: that of `expected`, unless it is float64 (a definition has no dtype
        to copy).
    name : str
        Of the quantity, for the message.
    case : object
        Its ``repr`` ends the message.

    Returns
    -------
    float
        The largest error / bound, 0 for an empty array: far below 1 everywhere, the bound is too loose.

    Raises
    ------
    AssertionError
        With the worst coordinate, both values, error, bound, their ratio, and how many elements fail.

    """
    got, want = to_host(actual, name), to_host(expected, f"{name} expected")
    tail = "" if case is None else f"\n  case: {case!r}"
    if dtype is None and want.dtype != np.float64:
        dtype = want.dtype
    if dtype is not None and got.dtype != as_dtype(dtype):
        raise AssertionError(f"{name}: dtype must be {as_dtype(dtype)}; got {got.dtype}{tail}")
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape must be {want.shape}; got {got.shape}{tail}")
    got, want = got.astype(np.float64), want.astype(np.float64)
    limit = np.broadcast_to(np.asarray(bound, np.float64), want.shape)

    for label, place in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = place(got) != place(want)
        if wrong.any():
            at = _first(wrong)
            raise AssertionError(f"{name}: places of {label} differ in {wrong.sum()} of {wrong.size} "
                                 f"elements; at {at}: got {got[at]!r}, expected {want[at]!r}{tail}")

    finite = np.isfinite(want)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(finite, np.abs(got - want), 0.0)
        ratio = np.where(error == 0, 0.0, error / limit)
    failed = finite & ~(error <= limit)
    if failed.any():
        score = np.where(failed, np.where(np.isnan(ratio) | (ratio < 0), np.inf, ratio), -1.0)
        at = tuple(int(i) for i in np.unravel_index(score.argmax(), score.shape))
        raise AssertionError(
            f"{name}: {failed.sum()} of {failed.size} elements exceed the bound; worst at {at}: "
            f"got {got[at]!r}, expected {want[at]!r}, error {error[at]:.3e}, bound {limit[at]:.3e}, "
            f"ratio {ratio[at]:.3g}{tail}")
    return float(ratio.max(initial=0.0))


def assert_same_bits(a: Any, b: Any, *, name: str = "array", case: Any = None) -> None:
    """Assert equality of every bit: payloads of NaN and signs of zeros count.

    Parameters
    ----------
    a, b : array
        Of any library; strides do not matter.
    name, case
        As in `assert_close`.

    Raises
    ------
    AssertionError
        If dtype, shape or bits differ; shows the place where they are farthest apart, in units in the last
        place.

    """
    a, b = to_host(a, name), to_host(b, name)
    tail = "" if case is None else f"\n  case: {case!r}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise AssertionError(f"{name}: dtype or shape differs: {a.dtype} {a.shape} {b.dtype} {b.shape}{tail}")
    bits_a, bits_b = _bits(a), _bits(b)
    differ = bits_a != bits_b
    if differ.any():
        distance = np.where(differ, np.abs(_ordered(bits_a) - _ordered(bits_b)), -1.0)
        at = tuple(int(i) for i in np.unravel_index(distance.argmax(), a.shape))
        digits = 2 * a.dtype.itemsize
        raise AssertionError(
            f"{name}: bits differ in {differ.sum()} of {differ.size} elements; worst at {at}: {a[at]!r} "
            f"(0x{int(bits_a[at]):0{digits}x}) and {b[at]!r} (0x{int(bits_b[at]):0{digits}x}), "
            f"{distance[at]:.0f} units in the last place{tail}")


def assert_state(actual: Any, expected: Any, bounds: Any, *, dtype: Any = None, name: str = "state",
                 case: Any = None) -> tuple[float, float]:
    """Assert that a state ``(out, lse)`` is within its bounds; ``lse`` must be float32.

    Parameters
    ----------
    actual, expected, bounds : pair of arrays
        ``out (*rows, head_dim)`` and ``lse (*rows)``; `bounds` as from `merge_bound`.
    dtype : dtype or str, optional
        Of ``out``; default as in `assert_close`.
    name, case
        As in `assert_close`.

    Returns
    -------
    ratio_out, ratio_lse : float
        As from `assert_close`.

    Raises
    ------
    AssertionError
        If `actual` is not a pair, or as in `assert_close`.

    """
    if not isinstance(actual, (tuple, list)) or len(actual) != 2:
        raise AssertionError(f"{name}: must be a pair (out, lse); got {type(actual).__name__}")
    lse = assert_close(actual[1], expected[1], bounds[1], dtype=np.float32, name=f"{name}.lse", case=case)
    out = assert_close(actual[0], expected[0], bounds[0], dtype=dtype, name=f"{name}.out", case=case)
    return out, lse


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(mask.argmax(), mask.shape))


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bits as unsigned integers."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Map the bits of floats to numbers in the order of the floats, one apart for neighbours."""
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    magnitude = (bits & bits.dtype.type(sign - 1)).astype(np.float64)
    return np.where(bits >= sign, -magnitude, magnitude)
