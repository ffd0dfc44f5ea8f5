"""The memory of a paged cache: arrays of pages, and the scales of what is stored in them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cuattn import _check
from cuattn._paged_record import MAX_COUNT, count

DTYPES = (*_check.FLOATS, np.dtype(ml_dtypes.float8_e4m3fn))


class Storage:
    """Pages of keys and values in every layer; the parameters are those of `PagedKVCache`.

    The memory is allocated as bytes, of which `k_pages` and `v_pages` are views, since CuPy neither allocates
    nor copies float8.
    """

    def __init__(
        self,
        rows: tuple[int, int, int],
        dims: tuple[int, int],
        num_layers: int,
        dtype: Any,
        xp: Any,
        poison: bool,
    ) -> None:
        for name, size in zip(("num_pages", "page_size", "num_kv_heads", "num_layers"), (*rows, num_layers)):
            count(f"PagedKVCache: {name}", size, 1, MAX_COUNT)
        for name, size in zip(("head_dim", "head_dim_v"), dims):
            count(f"PagedKVCache: {name}", size, 1, _check.MAX_HEAD_DIM)
        kind = np.dtype(dtype)
        _check.dtype("PagedKVCache: dtype", _check.fresh((), kind), DTYPES)
        shapes = [(*rows, dim * kind.itemsize) for dim in dims for _ in range(num_layers)]
        self._bytes = [xp.empty(shape, np.uint8) for shape in shapes]
        if poison:
            for memory in self._bytes:
                memory.fill(0xFF)  # all bits set: NaN in every floating dtype
        views = [memory.view(kind) for memory in self._bytes]
        self.k_pages, self.v_pages = views[:num_layers], views[num_layers:]

    def copy(self, source: Any, target: Any) -> None:
        """Copy whole pages in all layers; the right side is read as a whole before anything is written."""
        for pages in self._bytes:
            pages[target] = pages[source]


def scale(xp: Any, name: str, given: Any, shape: tuple[int, int]) -> Any:
    """A scale as an array of its own that can't be changed from outside.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    name : str
        The argument.
    given : array or None
        Broadcastable to `shape`, on the host.
    shape : tuple of int
        (num_layers, num_kv_heads).

    Returns
    -------
    array, (num_layers, num_kv_heads), float32, or None
    """
    if given is None:
        return None
    values = np.asarray(given, np.float32)
    try:
        own = np.array(np.broadcast_to(values, shape))
    except ValueError:
        rule = f"must be broadcastable to (num_layers, num_kv_heads) {shape}"
        raise ValueError(f"PagedKVCache: {name} {rule}; got shape {values.shape}") from None
    if not (np.isfinite(own) & (own > 0)).all():
        raise ValueError(f"PagedKVCache: {name} must be finite and above 0; got {values}")
    own.flags.writeable = False
    return own if xp is np else xp.asarray(own)
