"""Checks of the merges: a call becomes `MergeDims`, or an exception."""

from __future__ import annotations

import functools
import math

import numpy as np

from cuattn import _check
from cuattn._call import ArraySpec, Call, remembered
from cuattn._check import FLOAT32, FLOATS
from cuattn._dims import MAX_ROW_AXES, MergeDims, Strides, collapse, pad_front

Names = tuple[str, str]  # of the `out` and the `lse` of a state, for messages
State = tuple[ArraySpec, ...]  # the specs of both
_RESULT = ("out", "lse")


def pair(call: Call, names_a: Names, names_b: Names) -> MergeDims:
    """Two states into one; `mask` has one entry per row, or per row without its last axis (the heads)."""
    dims = _pair(call, names_a, names_b)
    _check.outputs(call, {"out": (names_a[0], names_b[0]), "lse": (names_a[1], names_b[1])})
    return dims


def listed(call: Call, states: int) -> MergeDims:
    """A list of states, each with strides of its own."""
    dims, names = _listed(call, states), list_names(states)
    _check.outputs(call, {"out": names[:states], "lse": names[states:]})
    return dims


@functools.cache
def list_names(states: int) -> tuple[str, ...]:
    """Of the outs, then of the lses."""
    return tuple(f"{name}[{n}]" for name in ("outs", "lses") for n in range(states))


def stack(call: Call) -> MergeDims:
    """States along axis 0."""
    dims = _stack(call, False)
    _check.outputs(call, {"out": ("outs",), "lse": ("lses",)})
    return dims


def ragged(call: Call, values: bool) -> MergeDims:
    """States along axis 0 in segments, whose offsets are `indptr`; they are looked at if `values`."""
    dims = _stack(call, True)
    if values:
        where = f"{call.function}: indptr"
        _check.ascending_offsets(where, call.to_host("indptr"), dims.states, "outs.shape[0]")
    _check.outputs(call, {"out": (), "lse": ()})
    return dims


@remembered
def _pair(call: Call, names_a: Names, names_b: Names) -> MergeDims:
    where, a, b = f"{call.function}: ", call.required(*names_a), call.required(*names_b)
    mask = call.specs["mask"]
    _state(where, names_a, a)
    _state(where, names_b, b)
    _check.shape(where + names_b[0], b[0], a[0].shape, f"{names_a[0]}.shape")
    dtypes = (a[0].dtype, b[0].dtype)
    if len(set(dtypes)) == 2 and FLOAT32 not in dtypes:
        raise TypeError(f"{where}{names_b[0]} must be {dtypes[0].name} or float32; got {dtypes[1].name}")
    result = _result(call, a[0].shape, dtypes)
    rows = a[0].shape[:-1]
    mask_strides = (0,) * len(rows)
    if mask is not None:
        _check.dtype(where + "mask", mask, [np.dtype(bool)])
        if mask.shape not in (rows, rows[:-1]):
            raise ValueError(f"{where}mask.shape must equal {rows[:-1]} or {rows}; got {mask.shape}")
        mask_strides = mask.strides + (0,) * (len(rows) - len(mask.shape))
    strides = [*_strides(where, names_a, a), *_strides(where, names_b, b), mask_strides]
    sizes, kept = _collapse(where, rows, strides + _strides(where, _RESULT, result), MAX_ROW_AXES)
    return _dims("pair", sizes, 2, kept, (), (a[0], b[0], result[0]), result[0].shape)


@remembered
def _listed(call: Call, number: int) -> MergeDims:
    where = f"{call.function}: "
    states = [call.required(f"outs[{n}]", f"lses[{n}]") for n in range(number)]
    first = states[0][0]
    for n, state in enumerate(states):
        _state(where, (f"outs[{n}]", f"lses[{n}]"), state)
        _check.shape(f"{where}outs[{n}]", state[0], first.shape, "outs[0].shape")
        _check.dtype(f"{where}outs[{n}]", state[0], [first.dtype])
    result = _result(call, first.shape, (first.dtype,))
    strides = _strides(where, _RESULT, result)
    for n, state in enumerate(states):
        strides += _strides(where, (f"outs[{n}]", f"lses[{n}]"), state)
    sizes, kept = _collapse(where, first.shape[:-1], strides, MAX_ROW_AXES)
    worst = min((state[0] for state in states), key=_row_alignment)
    return _dims("list", sizes, len(states), kept, (), (worst, worst, result[0]), first.shape)


@remembered
def _stack(call: Call, ragged: bool) -> MergeDims:
    where, (outs, lses) = f"{call.function}: ", call.required("outs", "lses")
    index = call.required("indptr")[0] if ragged else None
    _check.axes(where + "outs", outs, ("states", "...", "head_dim"))
    _state(where, ("outs", "lses"), (outs, lses))
    if outs.shape[0] >= 2**31 - 2**16:  # the kernel counts states in 32 bits, in steps of up to 512
        raise ValueError(f"{where}outs.shape[0] must be less than 2**31 - 2**16; got {outs.shape[0]}")
    strides = _strides(where, ("outs", "lses"), (outs, lses))
    steps = tuple(s[0] for s in strides)
    inner = [s[1:] for s in strides]
    if index is None:
        result = _result(call, outs.shape[1:], (outs.dtype,))
        sizes, kept = _collapse(where, outs.shape[1:-1], inner + _strides(where, _RESULT, result), MAX_ROW_AXES)
        steps += (0, 0, 0)
    else:
        _check.dtype(where + "indptr", index, _check.INDICES)
        _check.axes(where + "indptr", index, ("segments + 1",))
        if not index.shape[0]:
            raise ValueError(f"{where}indptr.shape[0] must be at least 1; got 0")
        result = _result(call, (index.shape[0] - 1, *outs.shape[1:]), (outs.dtype,))
        by_segment = _strides(where, _RESULT, result)
        inner += [s[1:] for s in by_segment]
        sizes, kept = _collapse(where, outs.shape[1:-1], inner, MAX_ROW_AXES - 1)
        # The segments are the axis before those that are left; the stack has stride 0 there, offsets take its place.
        axis = MAX_ROW_AXES - 1 - sum(size != 1 for size in sizes)
        segment_strides = (0, 0, by_segment[0][0], by_segment[1][0])
        sizes = (*sizes[:axis], result[0].shape[0], *sizes[axis + 1 :])
        kept = tuple((*s[:axis], own, *s[axis + 1 :]) for s, own in zip(kept, segment_strides))
        if math.prod(sizes) >= 2**31:
            raise ValueError(f"{where}indptr must give fewer than 2**31 rows; got {math.prod(sizes)}")
        steps += (index.dtype.itemsize, _check.strides_in_elements(where + "indptr", index)[0], axis)
    form = "stack" if index is None else "ragged"
    return _dims(form, sizes, outs.shape[0], kept, steps, (outs, outs, result[0]), result[0].shape)


def _state(where: str, names: Names, state: State) -> None:
    out, lse = state
    _check.dtype(where + names[0], out, FLOATS)
    _check.dtype(where + names[1], lse, [FLOAT32])
    _check.axes(where + names[0], out, ("...", "head_dim"))
    _check.head_dim(where + names[0], out)
    _check.shape(where + names[1], lse, out.shape[:-1], f"{names[0]}.shape[:-1]")


def _result(call: Call, shape: tuple[int, ...], inputs: tuple[np.dtype, ...]) -> State:
    where, out, lse = f"{call.function}: ", call.specs["out"], call.specs["lse"]
    if out is None:
        out = _check.fresh(shape, inputs[0] if len(set(inputs)) == 1 else FLOAT32)
    if lse is None:
        lse = _check.fresh(shape[:-1], FLOAT32)
    # The last merge of float32 partial results rounds to 16 bits; 16-bit states may widen, but not change their kind.
    allowed = FLOATS if set(inputs) == {FLOAT32} else [d for d in FLOATS if d in inputs or d == FLOAT32]
    _check.dtype(where + "out", out, allowed)
    _check.dtype(where + "lse", lse, [FLOAT32])
    _check.shape(where + "out", out, shape, "the result's shape")
    _check.shape(where + "lse", lse, shape[:-1], "the result's shape")
    _check.head_dim(where + "out", out)
    _check.distinct_elements(where + "out", out)
    _check.distinct_elements(where + "lse", lse)
    return out, lse


def _strides(where: str, names: Names, state: State) -> list[tuple[int, ...]]:
    out, lse = (_check.strides_in_elements(where + name, array) for name, array in zip(names, state))
    return [out[:-1], lse]  # the rows of `out` are all its axes but the last


def _collapse(
    where: str, shape: tuple[int, ...], strides: list[tuple[int, ...]], most: int
) -> tuple[tuple[int, ...], tuple[Strides, ...]]:
    if 0 in shape:
        return pad_front((0,), MAX_ROW_AXES, 1), ((0,) * MAX_ROW_AXES,) * len(strides)
    sizes, kept = collapse(shape, strides)
    if len(sizes) > most:
        raise ValueError(f"{where}at most {most} row axes may have unrelated strides; got {len(sizes)} in {shape}")
    if len(sizes) > 1 and math.prod(sizes) >= 2**31:
        rule = "row axes with unrelated strides must have fewer than 2**31 rows"
        raise ValueError(f"{where}{rule}; got {math.prod(sizes)}")
    return pad_front(sizes, MAX_ROW_AXES, 1), tuple(pad_front(k, MAX_ROW_AXES, 0) for k in kept)


def _dims(
    form: str, rows: tuple[int, ...], states: int, strides: tuple[Strides, ...], steps: tuple[int, ...],
    kinds: tuple[ArraySpec, ...], shape: tuple[int, ...],
) -> MergeDims:  # fmt: skip
    dtypes = tuple(k.dtype for k in kinds)
    return MergeDims(form, shape, rows, states, dtypes, strides, steps, tuple(_row_alignment(k) for k in kinds))


def _row_alignment(out: ArraySpec) -> int:
    return _check.alignment(out, range(len(out.shape) - 1))
