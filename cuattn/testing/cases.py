"""Merge problems as values: structure and a seed, with a one-line ``repr`` that rebuilds them.

The convention of cuattn: a state is ``(out, lse)``, ``out (..., head_dim)`` and ``lse (...)`` float32,
natural log; the empty state is ``(0, -inf)``, and a state whose lse is -inf is the identity whatever its
``out`` holds.

A *layout* says where the elements lie in memory. Whatever lies between and around them is poison (NaN), so a
merge that assumes strides instead of reading them gives wrong numbers here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn.testing.profiles import DTYPES, PROFILES, as_dtype, lse_values, out_values

LAYOUTS = (
    "contiguous",
    "row slice",          # a slice of a buffer that is wider in every axis but the last
    "head major",         # memory is (states, heads, tokens, head_dim)
    "odd offset",         # starts one element late: the 16-byte alignment is lost
    "interleaved",        # the states lie side by side: memory is (tokens, heads, states, head_dim)
    "padded head_dim",    # the last axis is a slice of a longer one
)

GUARD_BYTE = 0xFF         # a NaN in every floating dtype, and not the NaN that surrounds inputs
_GUARD_ELEMENTS = 64      # before and behind a guarded view; keeps 16-byte alignment
_PAD = 8                  # elements by which "padded head_dim" lengthens the last axis


@dataclass(frozen=True)
class StateCase:
    """States over disjoint key sets, to be merged.

    Parameters
    ----------
    rows : tuple of int
        Leading dimensions of one state, such as ``(tokens, heads)``; zeros are allowed.
    num_states : int
        How many states, 0 or more.
    head_dim : int
        Length of the last axis of ``out``, 1 to 512.
    dtype : str
        Of ``out``: one of ``cuattn.testing.DTYPES``. ``lse`` is float32.
    profile, layout : str
        One of ``cuattn.testing.PROFILES`` and ``cuattn.testing.LAYOUTS``. The layout of ``lse`` is drawn from
        the seed, so the two arrays are strided differently; "contiguous" makes both contiguous.
    seed : int
        Fills the values.

    Raises
    ------
    ValueError
        If a field is out of its range.

    Examples
    --------
    >>> case = StateCase(rows=(5, 3), num_states=2, head_dim=64, dtype="float16", layout="head major")
    >>> case.outs().shape, case.lses().shape, eval(repr(case)) == case
    ((2, 5, 3, 64), (2, 5, 3), True)

    """

    rows: tuple[int, ...] = (5, 3)
    num_states: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    profile: str = "normal"
    layout: str = "contiguous"
    seed: int = 0

    def __post_init__(self) -> None:
        for field, allowed in (("dtype", DTYPES), ("profile", PROFILES), ("layout", LAYOUTS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"StateCase: {field} must be one of {allowed}; got {getattr(self, field)!r}")
        if not 1 <= self.head_dim <= 512:
            raise ValueError(f"StateCase: head_dim must be 1 to 512; got {self.head_dim}")
        if self.num_states < 0 or min(self.rows, default=0) < 0:
            raise ValueError(f"StateCase: sizes must be 0 or more; got {self.num_states}, {self.rows}")

    def _values(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        lse = lse_values(self.profile, rng, (self.num_states, *self.rows))
        return out_values(self.profile, rng, lse, self.head_dim, self.dtype), lse

    def outs(self) -> np.ndarray:
        """Return the outputs, ``(num_states, *rows, head_dim)`` of ``dtype``, in the layout of the case."""
        return place(self._values()[0], self.layout)

    def lses(self) -> np.ndarray:
        """Return the log-sum-exps, ``(num_states, *rows)`` float32, in a layout of their own."""
        strided = LAYOUTS[1 + np.random.default_rng([self.seed, 1]).integers(len(LAYOUTS) - 1)]
        layout = "contiguous" if self.layout == "contiguous" else strided
        return place(self._values()[1][..., None], layout)[..., 0]

    def parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the parts, views of `outs` and `lses`: ``out (*rows, head_dim)``, ``lse (*rows)``."""
        outs, lses = self.outs(), self.lses()
        return [(outs[s, ...], lses[s, ...]) for s in range(self.num_states)]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the merged state by definition, float64: ``cuattn.reference.merge_states``."""
        from cuattn.reference import merge_states
        return merge_states(self.outs(), self.lses())


def place(values: np.ndarray, layout: str) -> np.ndarray:
    """Copy `values` into memory laid out as `layout` says, with NaN around and between.

    Parameters
    ----------
    values : numpy.ndarray, (num_states, *rows, n)
        Any floating dtype.
    layout : str
        One of `LAYOUTS`.

    Returns
    -------
    numpy.ndarray
        Equal to `values`; a view of a larger one-dimensional buffer. The last axis is contiguous.

    """
    strides, offset, span = _plan(values.shape, layout)
    buffer = np.full(offset + span, np.nan, values.dtype)
    view = _view(buffer, values.shape, strides, offset)
    view[...] = values
    return view


def guarded(shape: tuple[int, ...], dtype: Any, layout: str = "contiguous", xp: Any = np) -> tuple[Any, Any]:
    """Make an output array surrounded by guard bytes, which also fill its gaps and itself.

    Parameters
    ----------
    shape : tuple of int
        Of the output, ``(*rows, head_dim)`` or ``(*rows,)``.
    dtype : dtype or str
        Any floating dtype.
    layout : str
        One of `LAYOUTS`; the view is one state of a stack of two, so "interleaved" has gaps.
    xp : module
        ``numpy`` or ``cupy``: where the arrays live.

    Returns
    -------
    buffer : array, (n,) of `dtype`
        The whole memory, for `check_guard`.
    view : array, `shape` of `dtype`
        The output to hand to the function under test. It holds NaN, so an unwritten element shows.

    """
    strides, offset, span = _plan((2, *shape), layout)
    offset += _GUARD_ELEMENTS
    dtype = as_dtype(dtype)
    buffer = np.full((offset + span + _GUARD_ELEMENTS) * dtype.itemsize, GUARD_BYTE, np.uint8).view(dtype)
    view = _view(buffer, (2, *shape), strides, offset)[0, ...]
    if xp is np:
        return buffer, view
    device = to_device(buffer, xp)
    return device, _device_view(device, view, _byte_offset(buffer, view), xp)


def check_guard(buffer: Any, view: Any) -> None:
    """Assert that no byte of `buffer` outside `view` was written.

    Parameters
    ----------
    buffer, view : array
        From `guarded`, NumPy or CuPy.

    Raises
    ------
    AssertionError
        With the number of overwritten elements and the place of the first, relative to the view's first
        element.

    """
    offset = _byte_offset(buffer, view) // buffer.dtype.itemsize
    host = buffer.get() if hasattr(buffer, "get") else buffer
    covered = np.zeros(host.shape, bool)
    steps = tuple(s // buffer.dtype.itemsize for s in view.strides)
    if view.size:
        _view(covered, view.shape, steps, offset)[...] = True
    intact = (host.view(np.uint8).reshape(-1, host.dtype.itemsize) == GUARD_BYTE).all(axis=1)
    bad = np.flatnonzero(~intact & ~covered)
    if bad.size:
        raise AssertionError(
            f"check_guard: {bad.size} elements outside the output were written, the first at "
            f"{bad[0] - offset:+d} elements from its start "
            f"(shape {view.shape}, strides {steps} elements): {host[bad[0]]!r}")


def to_device(array: np.ndarray, xp: Any) -> Any:
    """Move a NumPy array with its exact strides and its offset into its buffer.

    Parameters
    ----------
    array : numpy.ndarray
        A view or not. For CuPy the whole memory it is a view of is copied, so its surroundings travel along.
    xp : module
        ``numpy`` (returned as it is), ``cupy``, or any module with ``asarray`` (strides are then that
        library's).

    Returns
    -------
    array of `xp`
        Equal to `array`; for CuPy also with equal strides and byte offset.

    Raises
    ------
    ValueError
        If the memory that `array` is a view of is not one contiguous array.

    """
    if xp is np:
        return array
    if xp.__name__.partition(".")[0] != "cupy":
        return xp.asarray(array)
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    root = root if root.flags.c_contiguous else root.T
    if not root.flags.c_contiguous:
        raise ValueError(f"to_device: array must be a view of contiguous memory; got strides {root.strides}")
    flat = xp.asarray(root.reshape(-1).view(np.uint8))
    return _device_view(flat, array, _byte_offset(root, array), xp)


def _device_view(buffer: Any, like: np.ndarray, offset: int, xp: Any) -> Any:
    """Return the CuPy view of `buffer`, `offset` bytes behind its start, shaped and strided as `like`."""
    if like.size == 0:                                         # no element, so no address either
        return xp.ndarray(like.shape, like.dtype, memptr=buffer.data)
    return xp.ndarray(like.shape, like.dtype, memptr=buffer.data + offset, strides=like.strides)


def _byte_offset(buffer: Any, view: Any) -> int:
    """Return how many bytes behind the start of `buffer` the view starts; 0 for a view without elements."""
    if view.size == 0:
        return 0
    if hasattr(buffer, "get"):
        return view.data.ptr - buffer.data.ptr
    return view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]


def _view(buffer: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> np.ndarray:
    """Return a view of a one-dimensional buffer; strides and offset in elements."""
    size = buffer.dtype.itemsize
    return np.ndarray(shape, buffer.dtype, buffer, offset * size, tuple(s * size for s in strides))


def _plan(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int, int]:
    """Return strides, offset and span (elements from the offset to the end) of an array in a layout."""
    axes = len(shape)
    order = list(range(axes))                         # axes, from the outermost in memory to the innermost
    sizes = list(shape)
    start = [0] * axes
    if layout == "row slice":
        sizes[:-1] = [n + 2 for n in sizes[:-1]]
        start[:-1] = [1] * (axes - 1)
    elif layout == "head major":
        order[1:-1] = reversed(order[1:-1])
    elif layout == "interleaved":
        order = [*order[1:-1], 0, *order[-1:]] if axes > 1 else order
    elif layout == "padded head_dim":
        sizes[-1] += _PAD
    elif layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}; got {layout!r}")
    strides, step = [0] * axes, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(sizes[axis], 1)
    offset = sum(i * s for i, s in zip(start, strides, strict=True)) + (layout == "odd offset")
    return tuple(strides), offset, math.prod(max(n, 1) for n in sizes)
