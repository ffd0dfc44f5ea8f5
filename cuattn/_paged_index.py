"""Index arrays for kernels: built on the host, sent to the device without waiting for it."""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import numpy as np

from cuattn._paged_record import RELEASED, count


def block_table(tables: Sequence[array[int]], width: int) -> np.ndarray:
    """Tables as the rows of one array, padded with -1.

    Parameters
    ----------
    tables : sequence of array, (pages,) each
        None longer than `width`.
    width : int
        Columns of the result.

    Returns
    -------
    numpy.ndarray, (batch, width), int32
    """
    rows = np.full((len(tables), width), RELEASED, np.int32)
    for row, table in zip(rows, tables):
        row[: len(table)] = table
    return rows


def slot_mapping(
    tables: Sequence[array[int]],
    lengths: Sequence[int],
    num_new: Sequence[int],
    page_size: int,
    final: Container[int],
) -> np.ndarray:
    """Where the last tokens of each sequence are to be written.

    Parameters
    ----------
    tables : sequence of array, (pages,) each
        Pages of each sequence.
    lengths, num_new : sequence of int, (batch,)
        Tokens of each sequence, and how many of them are meant.
    page_size : int
        Tokens in a page.
    final : container of int
        Pages that must not be written any more.

    Returns
    -------
    numpy.ndarray, (sum of num_new,), int64
        ``page * page_size + offset``; -1 in pages that are released or final.
    """
    pages: list[int] = []  # those that are touched, sequence after sequence
    begins, bases = (
        [],
        [],
    )  # of each sequence: the first position, and what takes a page's index in the table to `pages`
    for table, length, new in zip(tables, lengths, num_new):
        first = (length - new) // page_size
        begins.append(length - new)
        bases.append(len(pages) - first)
        if new:
            pages.extend(RELEASED if page in final else page for page in table[first:])
    counts = np.asarray(num_new, np.int64)
    ends = np.cumsum(counts)
    positions = np.arange(counts.sum()) + np.repeat(np.asarray(begins, np.int64) - ends + counts, counts)
    index = positions // page_size + np.repeat(np.asarray(bases, np.int64), counts)
    found = np.asarray(pages, np.int64)[index]
    return np.where(found == RELEASED, -1, found * page_size + positions % page_size)


def new_tokens(where: str, lengths: Sequence[int], num_new: int | Sequence[int]) -> list[int]:
    """The argument `num_new` as one number for each sequence; `where` is "function: argument"."""
    try:
        given = [num_new] * len(lengths) if isinstance(num_new, (int, np.integer)) else list(num_new)
    except TypeError:
        raise TypeError(f"{where} must be an integer or a sequence; got {type(num_new).__name__}") from None
    if len(given) != len(lengths):
        raise ValueError(
            f"{where} must have one number for each of {len(lengths)} sequences; got {len(given)}"
        )
    return [count(f"{where}[{i}]", n, 0, length) for i, (n, length) in enumerate(zip(given, lengths))]


class Fence(Protocol):
    """A point in the work of a device; CuPy's events are such."""

    @property
    def done(self) -> bool: ...


class Device(Protocol):
    """What sending needs from a device."""

    def pinned(self, num_bytes: int) -> np.ndarray: ...
    def copy(self, buffer: np.ndarray, like: np.ndarray) -> tuple[Any, Fence]: ...


class Staging:
    """Sends small arrays through pinned buffers; never waits, and never overwrites what may yet be read.

    A copy from pinned memory is only queued when the call returns; it runs when the stream gets there. Until
    then its buffer must stay as it is. So each copy is followed by an event on its stream, and a buffer is
    used again only when that event has happened, which is asked (`cudaEventQuery`), not waited for. If all
    buffers are still to be read, there is one more: their number is that of the copies in flight, at most.

    Parameters
    ----------
    device : Device
        Gives pinned buffers and queues copies.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._idle: list[np.ndarray] = []
        self._sent: list[tuple[np.ndarray, Fence]] = []

    def __call__(self, values: np.ndarray) -> Any:
        """A copy of `values` on the device, complete for what is queued on the current stream from now on."""
        with self._lock:
            buffer = self._take(values.nbytes)
            buffer[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            result, fence = self._device.copy(buffer, values)
            self._sent.append((buffer, fence))
            return result

    def _take(self, num_bytes: int) -> np.ndarray:
        """The smallest idle buffer that is large enough, or a new one of a power of two bytes."""
        sent, self._sent = self._sent, []
        for buffer, fence in sent:
            if fence.done:
                self._idle.append(buffer)
            else:
                self._sent.append((buffer, fence))
        fitting = [i for i, buffer in enumerate(self._idle) if buffer.nbytes >= num_bytes]
        if fitting:
            return self._idle.pop(min(fitting, key=lambda i: self._idle[i].nbytes))
        return self._device.pinned(1 << max(num_bytes - 1, 255).bit_length())


class CupyDevice:
    """Pinned memory and queued copies by CuPy.

    Parameters
    ----------
    cupy : module
        CuPy.
    number : int
        The device.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy, self._number = cupy, number

    def pinned(self, num_bytes: int) -> np.ndarray:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)

    def copy(self, buffer: np.ndarray, like: np.ndarray) -> tuple[Any, Fence]:
        with self._cupy.cuda.Device(self._number):
            result = self._cupy.empty(like.shape, like.dtype)
            if like.nbytes:
                result.data.copy_from_host_async(buffer.ctypes.data, like.nbytes)
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record()
            return result, event


def sender(xp: Any) -> Callable[[np.ndarray], Any]:
    """How index arrays get to where arrays of `xp` are: not at all for NumPy, else to the current device."""
    return _as_it_is if xp is np else _staging(xp, xp.cuda.runtime.getDevice())


@functools.cache  # for the whole process: buffers must outlive a cache whose last copy is still queued
def _staging(cupy: Any, number: int) -> Staging:
    return Staging(CupyDevice(cupy, number))


def _as_it_is(values: np.ndarray) -> np.ndarray:
    return values
