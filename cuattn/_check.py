"""The rules that all operations share, and the messages for breaking them: function, argument, rule, value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from cuattn._call import ArraySpec, Call, array_spec
from cuattn._dims import IndexDims

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOATS = (FLOAT16, BFLOAT16, FLOAT32)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)  # of K/V caches only
CUDA_TYPES = {FLOAT16: "__half", BFLOAT16: "__nv_bfloat16", FLOAT32: "float", FLOAT8: "__nv_fp8_e4m3"}
INDICES = (np.dtype(np.int32), np.dtype(np.int64))
MAX_HEAD_DIM = 512


def fresh(shape: tuple[int, ...], dtype: np.dtype) -> ArraySpec:
    """The spec of an array that is about to be allocated."""
    strides, step = [], dtype.itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return array_spec(shape, tuple(reversed(strides)), dtype, 16)


def dtype(where: str, spec: ArraySpec, allowed: Iterable[np.dtype]) -> None:
    """`where` is "function: argument"."""
    if spec.dtype not in (allowed := tuple(allowed)):
        names = [d.name for d in allowed]
        rule = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        raise TypeError(f"{where} must be {rule}; got {spec.dtype}")


def shape(where: str, spec: ArraySpec, expected: tuple[int, ...], rule: str) -> None:
    """`rule` says where the expected shape comes from."""
    if spec.shape != expected:
        raise ValueError(f"{where}.shape must equal {rule} {expected}; got {spec.shape}")


def axes(where: str, spec: ArraySpec, names: tuple[str, ...]) -> None:
    """Exactly the named axes; "..." among them stands for any number, none included."""
    number = len(spec.shape)
    if number < len(names) - 1 or ("..." not in names and number != len(names)):
        raise ValueError(f"{where} must have the axes ({', '.join(names)}); got shape {spec.shape}")


def head_dim(where: str, spec: ArraySpec) -> int:
    """The last axis: 1 to 512 elements, next to each other."""
    size = spec.shape[-1]
    if not 1 <= size <= MAX_HEAD_DIM:
        raise ValueError(f"{where}.shape[-1] (head_dim) must be 1 to {MAX_HEAD_DIM}; got {size}")
    if size > 1 and 0 not in spec.shape and spec.strides[-1] != spec.dtype.itemsize:
        raise ValueError(
            f"{where} must be contiguous along its last axis (stride {spec.dtype.itemsize} bytes); "
            f"got {spec.strides[-1]}"
        )
    return size


def strides_in_elements(where: str, spec: ArraySpec) -> tuple[int, ...]:
    """Strides as kernels count them."""
    if spec.alignment < min(spec.dtype.itemsize, 16):
        rule = f"must begin at a multiple of {spec.dtype.itemsize} bytes"
        raise ValueError(f"{where} {rule}; got one of {spec.alignment}")
    for axis, stride in enumerate(spec.strides):
        if stride % spec.dtype.itemsize:
            raise ValueError(f"{where}.strides[{axis}] must be a multiple of {spec.dtype.itemsize} bytes; got {stride}")
    return tuple(stride // spec.dtype.itemsize for stride in spec.strides)


def distinct_elements(where: str, spec: ArraySpec) -> None:
    """An array that is written must not hold two of its elements in one place (a broadcast or sliding view)."""
    if 0 in spec.shape:
        return
    reach = spec.dtype.itemsize
    for size, stride in sorted(zip(spec.shape, map(abs, spec.strides)), key=lambda axis: axis[1]):
        if size > 1:
            if stride < reach:
                raise ValueError(f"{where} must not overlap itself; got shape {spec.shape} with strides {spec.strides}")
            reach += (size - 1) * stride


class _Ghost:
    """An array's place in memory without the memory, for NumPy to reason about."""

    def __init__(self, spec: ArraySpec, address: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (*spec.shape, spec.dtype.itemsize),
            "strides": (*spec.strides, 1),
            "typestr": "|u1",
            "version": 3,
        }


def overlap(a: ArraySpec, address_a: int, b: ArraySpec, address_b: int) -> bool:
    """Whether two arrays share a byte; True also if finding out would take too long."""
    try:
        ghosts = np.asarray(_Ghost(a, address_a)), np.asarray(_Ghost(b, address_b))
        return np.shares_memory(*ghosts, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def outputs(call: Call, same: Mapping[str, tuple[str, ...]]) -> None:
    """The outputs in `same`, if given, can be written and overlap nothing but the inputs that it lists for them.

    Those they may lie on exactly; a stack of inputs may have the output as one of its members.
    """
    given = [name for name in same if name in call.places]
    if not given:
        return
    reach = {}  # first and past-the-last byte of every array
    for name, (spec, address) in call.places.items():
        low, high = spec.extent
        reach[name] = address + low, address + high
    for output in given:
        array = call.arrays[output]
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(f"{call.function}: {output} must be writeable; got a read-only array")
        low, high = reach[output]
        for name, (other_low, other_high) in reach.items():
            if low < other_high and other_low < high and name != output:
                _refuse_overlap(call, output, name, name in same[output])


def _refuse_overlap(call: Call, output: str, name: str, allowed: bool) -> None:
    places = *call.places[output], *call.places[name]
    if allowed and _lies_on(f"{call.function}: {name}, with {output} in it,", *places):
        return
    if overlap(*places):
        rule = f"exactly {name} or apart from it" if allowed else f"apart from {name}"
        raise ValueError(f"{call.function}: {output} must be {rule}; got arrays that overlap")


def _lies_on(where: str, spec: ArraySpec, address: int, other: ArraySpec, other_address: int) -> bool:
    if spec.dtype != other.dtype:
        return False
    if _same_axes(spec.shape, spec.strides, other.shape, other.strides):
        return address == other_address
    if _same_axes(spec.shape, spec.strides, other.shape[1:], other.strides[1:]) and other.strides[0]:
        distinct_elements(where, other)
        member, rest = divmod(address - other_address, other.strides[0])
        return rest == 0 and 0 <= member < other.shape[0]
    return False


def _same_axes(a: tuple[int, ...], strides_a: tuple[int, ...], b: tuple[int, ...], strides_b: tuple[int, ...]) -> bool:
    return a == b and all(s == t for n, s, t in zip(a, strides_a, strides_b) if n > 1)


def alignment(spec: ArraySpec, axes: Iterable[int]) -> int:
    """Bytes, a power of two up to 16, that divide the address of every row; `axes` are the row axes."""
    used = [spec.strides[a] for a in axes if spec.shape[a] > 1]
    return math.gcd(spec.alignment, 16, *used)


def ascending_offsets(where: str, values: np.ndarray, limit: int, limit_name: str) -> None:
    """Offsets such as cu_seqlens: from at least 0, ascending, to at most `limit`. For CUATTN_CHECK=values."""
    if len(values) and values[0] < 0:
        raise ValueError(f"{where}[0] must be at least 0; got {values[0]}")
    falls = np.flatnonzero(values[1:] < values[:-1])  # a difference could wrap around
    if len(falls):
        i = int(falls[0])
        raise ValueError(f"{where} must be ascending; got {values[i]} before {values[i + 1]} at index {i + 1}")
    if len(values) and values[-1] > limit:
        raise ValueError(f"{where}[-1] must be at most {limit_name} ({limit}); got {values[-1]}")


def results(
    where: str, q: ArraySpec, head_dim_v: int, out: ArraySpec | None, lse: ArraySpec | None
) -> tuple[ArraySpec, ArraySpec]:
    """Output and lse of attention, as given or as they will be allocated: the rows are those of q."""
    rows = q.shape[:-1]
    out = fresh((*rows, head_dim_v), q.dtype) if out is None else out
    lse = fresh(rows, FLOAT32) if lse is None else lse
    for name, array, kind, size in (("out", out, q.dtype, (*rows, head_dim_v)), ("lse", lse, FLOAT32, rows)):
        dtype(where + name, array, [kind])
        shape(where + name, array, size, "the result's shape")
        distinct_elements(where + name, array)
    head_dim(where + "out", out)
    return out, lse


def index(where: str, spec: ArraySpec | None) -> IndexDims:
    """Of an array of indices, which may be absent."""
    if spec is None:
        return IndexDims(0, 0)
    dtype(where, spec, INDICES)
    return IndexDims(spec.dtype.itemsize, strides_in_elements(where, spec)[-1])


def page_ids(function: str, row: int, first: int, ids: np.ndarray, num_pages: int) -> None:
    """Entries of a block table from column `first` on, all of which are read. For CUATTN_CHECK=values."""
    for j in np.flatnonzero((ids < 0) | (ids >= num_pages))[:1]:
        rule = f"block_table[{row}, {first + j}] must be within 0 and num_pages - 1 ({num_pages - 1})"
        raise ValueError(f"{function}: {rule}; got {ids[j]}")


def plan_fits(call: Call, plan: Any, dims: Any) -> None:
    """A plan that was passed in is for arrays like these on a device like this one."""
    if plan.dims is not dims and vars(plan.dims) != vars(dims):
        differ = [name for name, value in vars(dims).items() if getattr(plan.dims, name) != value]
        rule = "plan must be for a call like this one"
        raise ValueError(f"{call.function}: {rule}; got one with other {', '.join(differ)}")
    if plan.device != call.info():
        rule = f"plan must be for a device like this one {call.info()}"
        raise ValueError(f"{call.function}: {rule}; got one for {plan.device}")
