"""Rotary embedding: positions as rotations of the features of queries and keys."""

from __future__ import annotations

from typing import Any

from cuattn import _check_rotary, reference
from cuattn._call import Call, rounded
from cuattn._plan_rotary import layout, plan_rotary


def apply_rotary(
    x: Any, cos: Any, sin: Any, positions: Any, *, interleaved: bool = False, out: Any = None
) -> Any:
    """Rotate every head of every token by the angles of the token's position.

    Parameters
    ----------
    x : array, (..., num_heads, head_dim), float16, bfloat16 or float32
        Queries or keys; head_dim 1 to 512, contiguous along it, other strides at will.
    cos, sin : array, (max_positions, rotary_dim / 2), float32 or of the dtype of `x`
        Cosines and sines of the angles, a row for each position. Features from rotary_dim on stay as they are.
    positions : array, (...), int32 or int64
        Position of each token. On a device a token whose position has no row in the tables is not rotated; that is
        refused only under ``checking("values")``.
    interleaved : bool
        Whether the features 2d and 2d + 1 make a pair, or (the default) d and d + rotary_dim / 2.
    out : array, like `x`, optional
        Where to put the result: `x` itself, or apart from all other arrays.

    Returns
    -------
    array, (..., num_heads, head_dim)
        In the dtype of `x`. On a device two products and their sum, each rounded to float32, then to the dtype: what
        `append_kv` stores for the same key.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit, or arrays overlap; nothing is written then.

    See Also
    --------
    cuattn.append_kv, cuattn.decode : which rotate on the way.
    cuattn.reference.apply_rotary : the definition, which NumPy arrays get.

    Notes
    -----
    Moves ``2 * tokens * num_heads * head_dim * itemsize`` bytes, in place only those of the rotated features.

    Examples
    --------
    >>> angles = np.float32([[0.0], [np.pi / 2]])
    >>> x = np.float32([[[1, 0]], [[1, 0]]])
    >>> apply_rotary(x, np.cos(angles), np.sin(angles), np.array([0, 1])).round(6)[:, 0]
    array([[ 1.,  0.],
           [-0.,  1.]], dtype=float32)
    """
    call = Call("apply_rotary", {"x": x, "cos": cos, "sin": sin, "positions": positions, "out": out})
    dims = _check_rotary.apply(call, interleaved, call.checks_values())
    given = [call.arrays[name] for name in ("x", "cos", "sin", "positions")]
    out = call.empty(dims.shape, dims.dtype) if out is None else call.arrays["out"]
    if call.engine is None:
        out[...] = rounded(reference.apply_rotary(*given, interleaved=interleaved), dims.dtype)
    elif dims.num_rows:
        call.launch(plan_rotary(dims, call.info()), [*given, out, layout(dims)])
    return out
