"""Base-2 logarithms, for states of libraries whose kernels return them; here `lse` is always natural."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn import _check
from cuattn._call import Call

_LOG2_E = np.float32(1 / np.log(2.0))
_LN_2 = np.float32(np.log(2.0))


def lse_to_base2(lse: Any, *, out: Any = None) -> Any:
    """Convert natural logarithms to base-2 ones, as FlashInfer's kernels return them.

    Parameters
    ----------
    lse : array, any shape, float32
        Natural logarithms; -inf stays -inf.
    out : array, optional
        Where to put the result; may be `lse`.

    Returns
    -------
    array, like `lse`
        ``lse * log2(e)``, rounded twice; on a device subnormal results become 0.
    """
    return _scaled("lse_to_base2", lse, _LOG2_E, out)


def lse_from_base2(lse: Any, *, out: Any = None) -> Any:
    """Convert base-2 logarithms, as FlashInfer's kernels return them, to natural ones.

    Parameters
    ----------
    lse : array, any shape, float32
        Base-2 logarithms; -inf stays -inf.
    out : array, optional
        Where to put the result; may be `lse`.

    Returns
    -------
    array, like `lse`
        ``lse * ln(2)``, rounded twice; on a device subnormal results become 0.
    """
    return _scaled("lse_from_base2", lse, _LN_2, out)


def _scaled(function: str, lse: Any, factor: np.float32, out: Any) -> Any:
    """`lse` times a constant, in float32; without an allocation if there is an `out`."""
    call = Call(function, {"lse": lse, "out": out})
    (spec,) = call.required("lse")
    _check.dtype(f"{function}: lse", spec, [_check.FLOAT32])
    if out is None:
        out = call.empty(spec.shape, _check.FLOAT32)
    else:
        (out_spec,) = call.required("out")
        _check.dtype(f"{function}: out", out_spec, [_check.FLOAT32])
        _check.shape(f"{function}: out", out_spec, spec.shape, "lse.shape")
        _check.distinct_elements(f"{function}: out", out_spec)
        _check.outputs(call, {"out": ("lse",)})
        out = call.arrays["out"]
    with call.on_device():
        np.multiply(call.arrays["lse"], factor, out=out)  # CuPy's for CuPy arrays
    return out
