"""The memory of a paged cache: pages of every layer on the device and on the host, and the scales of what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cuattn import _check
from cuattn._paged_record import MAX_COUNT, Pairs, count
from cuattn.paged import copy_pages, swap_pages

DTYPES = (*_check.FLOATS, np.dtype(ml_dtypes.float8_e4m3fn))


class Storage:
    """Pages of keys and values in every layer; the parameters are those of `PagedKVCache`.

    Page p of layer l is row ``l * num_pages + p`` of one array of keys and one of values, so that one call copies or
    swaps a page in all layers. The memory is allocated as bytes, since CuPy doesn't allocate float8.
    """

    def __init__(
        self, rows: tuple[int, int, int], dims: tuple[int, int], num_layers: int, num_host_pages: int, dtype: Any,
        xp: Any, poison: bool,
    ) -> None:  # fmt: skip
        for name, size in zip(("num_pages", "page_size", "num_kv_heads", "num_layers"), (*rows, num_layers)):
            count(f"PagedKVCache: {name}", size, 1, MAX_COUNT)
        count("PagedKVCache: num_host_pages", num_host_pages, 0, MAX_COUNT)
        for name, size in zip(("head_dim", "head_dim_v"), dims):
            count(f"PagedKVCache: {name}", size, 1, _check.MAX_HEAD_DIM)
        kind = np.dtype(dtype)
        _check.dtype("PagedKVCache: dtype", _check.fresh((), kind), DTYPES)
        if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
            raise TypeError(f"PagedKVCache: xp must be the module numpy or cupy; got {xp!r}")
        self._xp, self._layers, self._sizes = xp, num_layers, (rows[0], num_host_pages)
        self._device = -1 if xp is np else xp.cuda.runtime.getDevice()
        here, there = (
            [(num_layers * pages, *rows[1:], dim * kind.itemsize) for dim in dims] for pages in self._sizes
        )
        memory = [*(xp.empty(shape, np.uint8) for shape in here), *(_host_memory(xp, shape) for shape in there)]
        if poison:
            for part in memory:
                part.fill(0xFF)  # all bits set: NaN in every floating dtype
        views = [part.view(kind) for part in memory]
        self._here, self._there = views[:2], views[2:]  # keys and values
        starts = range(0, num_layers * rows[0], rows[0])
        self.k_pages, self.v_pages = ([pages[at : at + rows[0]] for at in starts] for pages in self._here)

    def copy(self, pairs: Pairs, send: Callable[[np.ndarray], Any]) -> None:
        """Copy whole pages in all layers, on the current stream. No target is a source or named twice."""
        source, target = send(np.stack([self._rows(pairs, side, self._sizes[0]) for side in (0, 1)]))
        k_pages, v_pages = self._here
        copy_pages(k_pages, v_pages, source, target)

    def swap(self, pairs: Pairs, to_host: bool, stream: Any) -> Any:
        """Copy whole pages in all layers to or from the host on a stream, without waiting for them.

        They are behind what is queued on the current stream now.

        Returns
        -------
        event or None
            What to `wait` for; None if the pages have arrived.
        """
        if not pairs:
            return None
        sides = (0, 1) if to_host else (1, 0)
        here, there = (self._rows(pairs, side, size).tolist() for side, size in zip(sides, self._sizes))
        move = (*self._here, *self._there, here, there)
        if self._xp is np:
            swap_pages(*move, to_host=to_host)
            return None
        with self._xp.cuda.Device(self._device):
            current = self._xp.cuda.get_current_stream()
            if stream is None:
                stream = current
            else:
                stream.wait_event(current.record(self._event()))
            try:
                swap_pages(*move, to_host=to_host, stream=stream)
                return stream.record(self._event())
            except BaseException:
                stream.synchronize()  # the pages are about to be given back: no copy may be on its way to them
                raise

    def wait(self, event: Any) -> None:
        """Let what is queued on the current stream from now on run after an event; the host goes on."""
        if event is not None and not event.done:
            with self._xp.cuda.Device(self._device):
                self._xp.cuda.get_current_stream().wait_event(event)

    def _rows(self, pairs: Pairs, side: int, num_pages: int) -> np.ndarray:
        """One side of the pairs as rows of the arrays that hold all layers."""
        ids = np.array([pair[side] for pair in pairs], np.int64)
        return (ids + num_pages * np.arange(self._layers)[:, None]).reshape(-1)

    def _event(self) -> Any:
        return self._xp.cuda.Event(disable_timing=True)


def _host_memory(xp: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes that a device copies to and from without holding up the host: pinned, as by ``cupyx.empty_pinned``."""
    if xp is np or not math.prod(shape):
        return np.empty(shape, np.uint8)
    return np.ndarray(shape, np.uint8, xp.cuda.alloc_pinned_memory(math.prod(shape)))


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
