"""Checks of rotary embedding: its tables, wherever they are given, and the call of `apply_rotary`."""

from __future__ import annotations

import math

import numpy as np

from cuattn import _check
from cuattn._call import ArraySpec, Call, remembered
from cuattn._check_state import _collapse
from cuattn._dims import MAX_ROW_AXES, RotaryDims
from cuattn._dims_rotary import RotationDims


def tables(
    where: str, names: tuple[str, str], cos: ArraySpec, sin: ArraySpec, x: ArraySpec, interleaved: bool
) -> RotaryDims:
    """Cosines and sines for rows like those of `x`, under the names that they have in the call; no positions yet."""
    _check.dtype(where + names[0], cos, dict.fromkeys([x.dtype, _check.FLOAT32]))
    _check.dtype(where + names[1], sin, [cos.dtype])
    _check.axes(where + names[0], cos, ("max_positions", "rotary_dim / 2"))
    _check.shape(where + names[1], sin, cos.shape, f"{names[0]}.shape")
    (rows, half), head_dim = cos.shape, x.shape[-1]
    if not 1 <= half <= head_dim // 2:
        rule = f"{names[0]}.shape[1] (rotary_dim / 2) must be 1 to head_dim / 2 ({head_dim // 2})"
        raise ValueError(f"{where}{rule}; got {half}")
    steps = []
    for name, table in zip(names, (cos, sin)):
        _check.head_dim(where + name, table)
        steps.append(_check.strides_in_elements(where + name, table)[0])
    alignment = math.gcd(*(_check.alignment(table, [0]) for table in (cos, sin)))
    wide = cos.dtype == _check.FLOAT32
    return RotaryDims(half, interleaved, wide, rows, (steps[0], steps[1]), (0, 0), alignment)


def apply(call: Call, interleaved: bool, values: bool) -> RotationDims:
    """A rotation of all heads of all tokens; positions are looked at if `values`."""
    dims = _apply(call, bool(interleaved))
    _check.outputs(call, {"out": ("x",)})
    if values:
        positions, most = call.to_host("positions"), dims.rotary.max_positions
        for at in np.argwhere((positions < 0) | (positions >= most))[:1]:
            name, got = f"positions[{', '.join(map(str, at))}]" if len(at) else "positions", positions[tuple(at)]
            raise ValueError(f"{call.function}: {name} must be 0 or more and below cos.shape[0] ({most}); got {got}")
    return dims


@remembered
def _apply(call: Call, interleaved: bool) -> RotationDims:
    where, (x, cos, sin, positions) = f"{call.function}: ", call.required("x", "cos", "sin", "positions")
    _check.dtype(where + "x", x, _check.FLOATS)
    _check.axes(where + "x", x, ("...", "num_heads", "head_dim"))
    _check.head_dim(where + "x", x)
    rotary = tables(where, ("cos", "sin"), cos, sin, x, interleaved)
    _check.dtype(where + "positions", positions, _check.INDICES)
    _check.shape(where + "positions", positions, x.shape[:-2], "x.shape[:-2]")
    given = call.specs["out"]
    out = _check.fresh(x.shape, x.dtype) if given is None else given
    _check.dtype(where + "out", out, [x.dtype])
    _check.shape(where + "out", out, x.shape, "x.shape")
    _check.head_dim(where + "out", out)
    _check.distinct_elements(where + "out", out)
    strides = [_check.strides_in_elements(where + name, array)[:-1] for name, array in (("x", x), ("out", out))]
    by_head = (*_check.strides_in_elements(where + "positions", positions), 0)  # one position for all heads
    sizes, kept = _collapse(where, x.shape[:-1], [*strides, by_head], MAX_ROW_AXES)
    alignment = math.gcd(*(_check.alignment(array, range(len(x.shape) - 1)) for array in (x, out)))
    return RotationDims(x.shape, x.dtype, sizes, kept, alignment, rotary, positions.dtype.itemsize)
