"""The merge of attention states in Numba: a second implementation, to read, to change and to embed.

A state over a set of keys is ``(out, lse)``: `out` the mean of the values, weighted by the softmax of the
scores, and `lse` the natural logarithm of the sum of the exponentials of the scores. States over disjoint
sets of keys merge::

    lse = log(sum_s exp(lse_s))
    out = sum_s exp(lse_s - lse) out_s

The largest lse is subtracted before every exponential, so that none overflows and the result does not
depend on where the zero of the scores lies. The state of no keys is ``(0, -inf)``. It is skipped by
selection and not multiplied by its weight 0, as its `out` may hold NaN.

Every kernel has the same shape: a block is one row, token i and head h, and thread d owns one feature of
it. The result may lie on an input of the same row, and all threads read the lse that one of them
overwrites; so the block meets at a barrier between its last read and its first write. All arithmetic is
float32.

The oracle is `cuattn.reference`; the same merges in CUDA C++ are in ``kernels_cu/state.cu``. Those don't
fuse multiplications with additions and commute bit for bit; here the compiler may, and they commute up to
rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from cuattn import _check, _check_state
from cuattn._call import Call
from cuattn._dims import MergeDims
from cuattn._settings import checks_values
from cuattn.state import AttentionState

EMPTY = np.float32(-np.inf)  # the lse of no keys
ZERO = np.float32(0)  # a Python 0.0 would be a float64, and pull the arithmetic up with it
MAX_HEADS = 65535  # the y axis of a grid


@cuda.jit(device=True)
def merge(lse_a, lse_b):
    """Merge two states: the weights of their outputs, and the merged lse. For kernels of your own.

    Parameters
    ----------
    lse_a, lse_b : float32
        Natural logarithms; -inf marks an empty state.

    Returns
    -------
    weight_a, weight_b : float32
        ``out = weight_a * out_a + weight_b * out_b``. They sum to 1, or to 0 if both states are empty. An
        empty state weighs 0; leave it out by selection where its `out` may hold NaN.
    lse : float32
        Of the union of the keys: -inf if both states are empty, NaN if one of `lse_a` and `lse_b` is.

    Examples
    --------
    >>> @cuda.jit
    ... def accumulate(out, lse, new_out, new_lse):  # one value per state
    ...     i = cuda.grid(1)
    ...     if i < out.shape[0]:
    ...         weight, new_weight, lse[i] = merge(lse[i], new_lse[i])
    ...         out[i] = weight * out[i] + new_weight * new_out[i]
    """
    largest = max(lse_a, lse_b)
    shift = ZERO if largest == EMPTY else largest  # -inf - -inf would be NaN
    weight_a = np.float32(math.exp(lse_a - shift))
    weight_b = np.float32(math.exp(lse_b - shift))
    total = weight_a + weight_b
    if total == ZERO:  # both empty: otherwise one weight is 1, or NaN
        return ZERO, ZERO, EMPTY
    return weight_a / total, weight_b / total, shift + np.float32(math.log(total))


@cuda.jit(device=True)
def from_bfloat16(bits):
    """The float32 whose upper half is `bits`, a bfloat16 as uint16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@cuda.jit(device=True)
def to_bfloat16(value):
    """A float32 rounded to the nearest bfloat16, ties to even, as uint16."""
    bits = np.float32(value).view(np.uint32)
    if math.isnan(value):
        return np.uint16(bits >> np.uint32(16) | np.uint32(0x0040))  # quiet: rounding could make it infinite
    tie_to_even = bits >> np.uint32(16) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + tie_to_even) >> np.uint32(16))


# Stored element to float32 and back. Not every Numba knows bfloat16, so its arrays travel as uint16.
READ = {_check.FLOAT16: np.float32, _check.BFLOAT16: from_bfloat16, _check.FLOAT32: np.float32}
WRITE = {_check.FLOAT16: np.float16, _check.BFLOAT16: to_bfloat16, _check.FLOAT32: np.float32}


class Kernels(NamedTuple):
    """The kernels for one choice of dtypes."""

    pair: Any
    stack: Any
    ragged: Any


@functools.cache
def kernels(dtype_a: np.dtype, dtype_b: np.dtype, dtype_out: np.dtype) -> Kernels:
    """The kernels for inputs of two dtypes (a stack has the first) and a result of a third."""
    read, read_b, write = READ[dtype_a], READ[dtype_b], WRITE[dtype_out]

    @cuda.jit
    def pair(out_a, lse_a, out_b, lse_b, out, lse):
        """Two states: out_a, out_b, out (tokens, heads, head_dim) and lse_a, lse_b, lse (tokens, heads)."""
        i, h, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        weight_a, weight_b, merged = merge(lse_a[i, h], lse_b[i, h])
        value = ZERO
        if lse_a[i, h] != EMPTY:
            value += weight_a * read(out_a[i, h, d])
        if lse_b[i, h] != EMPTY:
            value += weight_b * read_b(out_b[i, h, d])
        cuda.syncthreads()
        out[i, h, d] = write(value)
        if d == 0:
            lse[i, h] = merged

    @cuda.jit(device=True)
    def merge_all(outs, lses):
        """Any number of states, one feature of each: softmax(lses) · outs, and log(sum exp(lses))."""
        largest = EMPTY
        for s in range(lses.shape[0]):
            largest = max(largest, lses[s])
        total, value = ZERO, ZERO
        for s in range(lses.shape[0]):
            if lses[s] != EMPTY:
                weight = np.float32(math.exp(lses[s] - largest))
                total += weight
                value += weight * read(outs[s])
        if total == ZERO:  # no state, or all empty: otherwise one weight is 1, or NaN
            return ZERO, EMPTY
        return value / total, largest + np.float32(math.log(total))

    @cuda.jit
    def stack(outs, lses, out, lse):
        """All states of a stack: outs (states, tokens, heads, head_dim), lses (states, tokens, heads)."""
        i, h, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        value, merged = merge_all(outs[:, i, h, d], lses[:, i, h])
        cuda.syncthreads()
        out[i, h, d] = write(value)
        if d == 0:
            lse[i, h] = merged

    @cuda.jit
    def ragged(outs, lses, indptr, out, lse):
        """States indptr[i] to indptr[i + 1] - 1: outs (total_states, heads, head_dim), lses (..., heads)."""
        i, h, d = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        total_states = lses.shape[0]  # whatever indptr holds, nothing outside the stack is read
        begin = min(max(indptr[i], 0), total_states)
        end = min(max(indptr[i + 1], 0), total_states)
        value, merged = merge_all(outs[begin:end, h, d], lses[begin:end, h])
        cuda.syncthreads()
        out[i, h, d] = write(value)
        if d == 0:
            lse[i, h] = merged

    return Kernels(pair, stack, ragged)


def merge_state(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> AttentionState:
    """Merge two states over disjoint sets of keys, in the packed layout.

    Parameters
    ----------
    out_a, out_b : array, (tokens, heads, head_dim), float16, bfloat16 or float32
        head_dim 1 to 512, contiguous along it, other strides at will. Of one dtype, or one float32.
    lse_a, lse_b : array, (tokens, heads), float32
        Natural logarithms; -inf marks an empty state, whose `out` is not looked at.
    out, lse : array, optional
        Where to put the result, as in `cuattn.merge_state`; may be exactly the arrays of `a` or `b`.

    Returns
    -------
    AttentionState
        In the common dtype of the states, float32 if they differ.

    Raises
    ------
    TypeError, ValueError
        As `cuattn.merge_state`; also for more than 65535 heads, and for NumPy arrays outside the simulator.

    See Also
    --------
    cuattn.merge_state : the same in CUDA C++, for any number of axes, with a faster launch.
    """
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out, "lse": lse}
    call = Call("numba.merge_state", arrays)
    dims = _check_state.pair(call, ("out_a", "lse_a"), ("out_b", "lse_b"))
    return _run("pair", call, dims, ("out_a", "lse_a", "out_b", "lse_b"))


def merge_states(outs: Any, lses: Any, *, out: Any = None, lse: Any = None) -> AttentionState:
    """Merge a stack of states over disjoint sets of keys, in the packed layout.

    Parameters
    ----------
    outs : array, (states, tokens, heads, head_dim), float16, bfloat16 or float32
        head_dim 1 to 512, contiguous along it, other strides at will.
    lses : array, (states, tokens, heads), float32
        Natural logarithms; -inf marks an empty state.
    out, lse : array, optional
        Where to put the result; may be exactly one of the states.

    Returns
    -------
    AttentionState
        In the dtype of the states.

    Raises
    ------
    TypeError, ValueError
        As `cuattn.merge_states` and `merge_state`.
    """
    call = Call("numba.merge_states", {"outs": outs, "lses": lses, "out": out, "lse": lse})
    return _run("stack", call, _check_state.stack(call), ("outs", "lses"))


def merge_states_varlen(
    outs: Any, lses: Any, indptr: Any, *, out: Any = None, lse: Any = None
) -> AttentionState:
    """Merge segments of different lengths: token i merges the states ``indptr[i]`` to ``indptr[i + 1] - 1``.

    Parameters
    ----------
    outs : array, (total_states, heads, head_dim), float16, bfloat16 or float32
        head_dim 1 to 512, contiguous along it, other strides at will.
    lses : array, (total_states, heads), float32
        Natural logarithms; -inf marks an empty state.
    indptr : array, (tokens + 1,), int32 or int64
        Ascending offsets into axis 0; values outside are cut off to it. A token without states gives
        ``(0, -inf)``.
    out, lse : array, optional
        Where to put the result, (tokens, heads, head_dim) and (tokens, heads); apart from the inputs.

    Returns
    -------
    AttentionState
        In the dtype of the states.

    Raises
    ------
    TypeError, ValueError
        As `cuattn.merge_states_varlen` and `merge_state`.
    """
    arrays = {"outs": outs, "lses": lses, "indptr": indptr, "out": out, "lse": lse}
    call = Call("numba.merge_states_varlen", arrays)
    return _run("ragged", call, _check_state.ragged(call, checks_values()), ("outs", "lses", "indptr"))


def _run(form: str, call: Call, dims: MergeDims, inputs: Sequence[str]) -> AttentionState:
    """Check what is particular to these kernels, allocate, launch."""
    if len(dims.shape) != 3:
        rule = "the result must be (tokens, heads, head_dim)"
        raise ValueError(f"{call.function}: {rule}; got shape {dims.shape}")
    tokens, heads, head_dim = dims.shape
    if heads > MAX_HEADS:
        raise ValueError(f"{call.function}: heads must be at most {MAX_HEADS}; got {heads}")
    arrays = [call.arrays[name] for name in inputs]
    simulated = bool(cuda.config.ENABLE_CUDASIM)
    if isinstance(arrays[0], np.ndarray) != simulated:
        rule = "NumPy arrays in" if simulated else "on a CUDA device outside"
        raise TypeError(f"{call.function}: arrays must be {rule} Numba's simulator (NUMBA_ENABLE_CUDASIM=1)")
    out, lse = call.arrays["out"], call.arrays["lse"]
    out = call.empty(dims.shape, dims.dtypes[2]) if out is None else out
    lse = call.empty(dims.shape[:-1], _check.FLOAT32) if lse is None else lse
    if dims.num_rows:
        kernel = getattr(kernels(*dims.dtypes), form)
        stored = [_storage(array) for array in (*arrays, out, lse)]
        if simulated:
            _simulate(kernel, (tokens, heads), head_dim, stored)
        else:
            _launch(kernel, (tokens, heads), head_dim, stored, call.device)
    return AttentionState(out, lse)


def _storage(array: Any) -> Any:
    """What `READ` and `WRITE` expect: the same memory, bfloat16 as uint16."""
    return array.view(np.uint16) if array.dtype == _check.BFLOAT16 else array


def _launch(kernel: Any, grid: tuple[int, int], block: int, arrays: Sequence[Any], device: int) -> None:
    """Run a kernel on CuPy's current stream of the arrays' device."""
    import cupy

    with cuda.gpus[device]:
        stream = cuda.external_stream(cupy.cuda.get_current_stream(device).ptr)
        # The arrays are used on the stream they were exported from: waiting for it would hold up the host.
        kernel[grid, block, stream](*(cuda.as_cuda_array(array, sync=False) for array in arrays))


def _simulate(kernel: Any, grid: tuple[int, int], block: int, arrays: Sequence[Any]) -> None:
    """Run a kernel in Numba's simulator. It would copy bare arrays, and refuse some strides."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    kernel[grid, block](*(FakeCUDAArray(array) for array in arrays))
