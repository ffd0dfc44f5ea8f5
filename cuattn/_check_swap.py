"""Checks of swap_pages, and which pages can be copied together."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn import _check, _check_paged
from cuattn._call import ArraySpec, Call

_FUNCTION = "swap_pages"


@dataclass(frozen=True)
class SwapDims:
    """Pages to be copied; sizes and strides in bytes, K and V."""

    pairs: tuple[tuple[int, int], ...]  # page on the device, page on the host
    page_bytes: tuple[int, int]
    strides: tuple[tuple[int, int], tuple[int, int]]  # from page to page, on the device and on the host

    def runs(self, side: int, device: int, host: int) -> Iterator[tuple[int, int, int]]:
        """Address on the device, address on the host and bytes of what is one piece on both sides."""
        size, (device_step, host_step) = self.page_bytes[side], self.strides[side]
        joined = size == device_step == host_step
        first = 0
        for n in range(1, len(self.pairs) + 1):
            if n < len(self.pairs) and joined and self.pairs[n] == (self.pairs[n - 1][0] + 1, self.pairs[n - 1][1] + 1):
                continue
            ours, theirs = self.pairs[first]
            yield device + ours * device_step, host + theirs * host_step, (n - first) * size
            first = n


def swap(
    k_pages: Any, v_pages: Any, host_k: Any, host_v: Any, device_pages: Sequence[int], host_pages: Sequence[int],
    to_host: bool,
) -> tuple[Call, Call, SwapDims]:  # fmt: skip
    """The arrays of the device and those of the host (one call if all are NumPy's), and what is to be copied."""
    ours, theirs = {"k_pages": k_pages, "v_pages": v_pages}, {"host_k": host_k, "host_v": host_v}
    for name, array in theirs.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{_FUNCTION}: {name} must be a NumPy array; got {type(array).__name__}")
    on_host = isinstance(k_pages, np.ndarray)
    call = Call(_FUNCTION, {**ours, **theirs} if on_host else ours)
    host = call if on_host else Call(_FUNCTION, theirs)
    (k, v), (hk, hv) = call.required(*ours), host.required(*theirs)
    _check_paged.cache(f"{_FUNCTION}: ", ("k_pages", "v_pages"), (k, v))
    _check_paged.cache(f"{_FUNCTION}: ", ("host_k", "host_v"), (hk, hv))
    for name, own, other_name, other in (("k_pages", k, "host_k", hk), ("v_pages", v, "host_v", hv)):
        _alike(name, own, other_name, other)
    _check.outputs(host if to_host else call, dict.fromkeys(theirs if to_host else ours, ()))
    for name, spec in zip((*ours, *theirs)[2 * to_host :], (k, v, hk, hv)[2 * to_host :]):
        _check.distinct_elements(f"{_FUNCTION}: {name}", spec)
    pairs = _pairs(device_pages, host_pages, k.shape[0], hk.shape[0], to_host)
    sizes = [math.prod(spec.shape[1:]) * spec.dtype.itemsize for spec in (k, v)]
    strides = (k.strides[0], hk.strides[0]), (v.strides[0], hv.strides[0])
    return call, host, SwapDims(pairs, (sizes[0], sizes[1]), strides)


def _alike(name: str, spec: ArraySpec, other_name: str, other: ArraySpec) -> None:
    """A page is one piece of memory, in the same order on both sides."""
    _check.dtype(f"{_FUNCTION}: {other_name}", other, [spec.dtype])
    if other.shape[1:] != spec.shape[1:]:
        rule = f"{other_name}.shape[1:] must equal {name}.shape[1:] {spec.shape[1:]}"
        raise ValueError(f"{_FUNCTION}: {rule}; got {other.shape[1:]}")
    page, page_there = ([s for n, s in zip(x.shape[1:], x.strides[1:]) if n > 1] for x in (spec, other))
    if page != page_there:
        rule = f"{other_name}.strides[1:] must equal {name}.strides[1:] {spec.strides[1:]}"
        raise ValueError(f"{_FUNCTION}: {rule}; got {other.strides[1:]}")
    one = ArraySpec(spec.shape[1:], spec.strides[1:], spec.dtype, spec.alignment)
    _check.distinct_elements(f"{_FUNCTION}: a page of {name}", one)
    size = math.prod(one.shape) * one.dtype.itemsize
    if one.extent != (0, size):
        raise ValueError(f"{_FUNCTION}: a page of {name} must be {size} contiguous bytes; got strides {spec.strides}")


def _pairs(
    device_pages: Sequence[int], host_pages: Sequence[int], num_pages: int, num_host_pages: int, to_host: bool
) -> tuple[tuple[int, int], ...]:
    ids = []
    for name, given, count in (
        ("device_pages", device_pages, num_pages), ("host_pages", host_pages, num_host_pages)
    ):  # fmt: skip
        try:
            ids.append([operator.index(page) for page in given])
        except TypeError:
            raise TypeError(f"{_FUNCTION}: {name} must be a sequence of integers on the host; got {given!r}") from None
        for n, page in enumerate(ids[-1]):
            if page >= count:
                raise ValueError(f"{_FUNCTION}: {name}[{n}] must be below the number of pages ({count}); got {page}")
    if len(ids[0]) != len(ids[1]):
        rule = f"host_pages must have as many ids as device_pages ({len(ids[0])})"
        raise ValueError(f"{_FUNCTION}: {rule}; got {len(ids[1])}")
    pairs = tuple(pair for pair in zip(*ids) if min(pair) >= 0)
    written = [pair[to_host] for pair in pairs]
    if len(set(written)) != len(written):
        twice = next(page for page in written if written.count(page) > 1)
        name = "host_pages" if to_host else "device_pages"
        raise ValueError(f"{_FUNCTION}: {name} must name each at most once; got {twice} {written.count(twice)} times")
    return pairs
