"""Plans of the merges: which kernel, which vector width, how the rows are cut up. Pure Python, no arrays."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cuattn import _check, _launch
from cuattn._compile import Kernel
from cuattn._dims import MAX_ROW_AXES, MergeDims
from cuattn._settings import debug

LIST = 32  # states that one launch of a list takes, as in state.cu
_CHUNK = 8  # states that one thread has in flight, as in state.cu
_THREADS, _SPLIT_THREADS = 128, 512
_ENTRIES = {"pair": "pair", "list": "list", "stack": "stack", "ragged": "stack"}
_VECTORS = (8, 4, 1)  # features of one thread, best first: 16 bytes or one


@dataclass(frozen=True)
class MergePlan:
    """How a merge runs: which kernel, cut up how."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]  # threads along (features, rows, states)
    shared_bytes: int


@functools.lru_cache(4096)
def plan_merge(dims: MergeDims, device: _launch.DeviceInfo) -> MergePlan:
    """Choose vector width, block and grid; the result's bits don't depend on the choice.

    One thread per vector of a row and 128 threads a block keep enough loads in flight (bench/LOG.md). With few rows
    and many states that leaves the device idle, and a block works on a single row, its threads sharing the states.
    """
    vec = next(v for v in _VECTORS if dims.head_dim % v == 0 and _aligned(dims, v))
    features = dims.head_dim // vec
    segments = dims.rows[dims.steps[-1]] if dims.form == "ragged" else 1
    per_row = dims.states // max(segments, 1)  # the mean, if ragged
    groups = min(_SPLIT_THREADS // features, 64, -(-per_row // _CHUNK))
    split = dims.form != "pair" and groups > 1 and dims.num_rows * features < device.num_sms * 256
    rows = 1 if split else min(max(_THREADS // features, 1), dims.num_rows)
    block = (features, rows, groups if split else 1)
    shared = groups * features * (1 + vec) * 4 if split else 0
    plan = MergePlan(_kernel(dims.form, dims.dtypes, vec, split), (-(-dims.num_rows // rows), 1, 1), block, shared)
    debug(1, plan)
    return plan


def _aligned(dims: MergeDims, vec: int) -> bool:
    return _fits(vec, dims.dtypes[0]) and all(
        bytes_ >= min(16, vec * dtype.itemsize) for bytes_, dtype in zip(dims.alignment, dims.dtypes)
    )


def _fits(vec: int, dtype: np.dtype) -> bool:
    return vec in (16 // dtype.itemsize, 1)


def _kernel(form: str, dtypes: Sequence[np.dtype], vec: int, split: bool) -> Kernel:
    types = [_check.CUDA_TYPES[d] for d in dtypes]
    defines: dict[str, str | int] = {"TA": types[0], "TB": types[1], "TO": types[2], "VEC": vec, "SPLIT": int(split)}
    return Kernel("state.cu", "cuattn_merge_" + _ENTRIES[form], tuple(defines.items()))


def kernels() -> Iterator[Kernel]:
    """Every kernel that `plan_merge` can choose, once each; the tests compile them all."""
    for form in ("pair", "list", "stack"):
        for dtypes in itertools.product(_check.FLOATS, repeat=3):
            if _admitted(form, *dtypes):
                vectors = [v for v in _VECTORS if _fits(v, dtypes[0])]
                splits = [False] if form == "pair" else [False, True]
                for vec, split in itertools.product(vectors, splits):
                    yield _kernel(form, dtypes, vec, split)


def _admitted(form: str, a: np.dtype, b: np.dtype, out: np.dtype) -> bool:
    # The rule of `_check_state`, which gives the messages.
    if a != b and (form != "pair" or _check.FLOAT32 not in (a, b)):
        return False
    return out in (a, b, _check.FLOAT32) or {a, b} == {_check.FLOAT32}


@functools.lru_cache(4096)
def layout(dims: MergeDims) -> np.void:
    """PairLayout or StackLayout of state.cu."""
    stack = (dims.states, *dims.steps) if dims.form != "pair" else ()
    return _launch.by_value(dims.num_rows, *dims.rows[1:], *itertools.chain.from_iterable(dims.strides), *stack)


def list_layout(dims: MergeDims, addresses: Sequence[int]) -> np.void:
    """ListLayout of state.cu; addresses of every state's out, then of every lse."""
    out_at, lse_at, *states = dims.strides
    fields = [dims.num_rows, *dims.rows[1:], *out_at, *lse_at, dims.states]
    size = len(fields) + LIST * 2 * (1 + MAX_ROW_AXES)  # a ListState is two addresses and two times the strides
    for out_address, lse_address, out_at, lse_at in zip(addresses, addresses[dims.states :], states[::2], states[1::2]):
        fields += (out_address, lse_address, *out_at, *lse_at)
    return _launch.by_value(*fields, size=size)
