"""Attention states: partial results over disjoint sets of keys, and the operator that merges them.

A state is ``(out, lse)``: `out` the softmax-weighted mean of the values over some keys, `lse` the natural logarithm of
the sum of exponentials of their scores. States over disjoint sets of keys merge to the state over the union, in any
order and grouping; the state of no keys, ``(0, -inf)``, is the identity. The mathematics is in `cuattn.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuattn import _check, _check_state, reference
from cuattn._call import Call, rounded
from cuattn._dims import MergeDims
from cuattn._plan_state import LIST, layout, list_layout, plan_merge


class AttentionState(NamedTuple):
    """Attention over a set of keys; ``a | b`` is the state over the union of two disjoint sets.

    Attributes
    ----------
    out : array, (..., head_dim), float16, bfloat16 or float32
        Softmax-weighted mean of the values; 0 where there was no key.
    lse : array, (...), float32
        Natural logarithm of the sum of the exponentials of the scaled and masked scores; -inf where there was no key.
    """

    out: Any
    lse: Any

    def __or__(self, other: tuple[Any, Any]) -> AttentionState:
        if not isinstance(other, tuple) or len(other) != 2:
            return NotImplemented
        return merge_state(*self, *other)

    @staticmethod
    def empty_like(q: Any, dtype: Any = None) -> AttentionState:
        """The state of no keys, shaped for the queries `q`: the identity of merging.

        Parameters
        ----------
        q : array, (..., head_dim), float16, bfloat16 or float32
            Gives shape and place, and the dtype if none is given.
        dtype : optional
            Such as ``"float32"``, to accumulate 16-bit states without rounding in between.

        Returns
        -------
        AttentionState
            `out` 0, shaped like `q`; `lse` -inf.
        """
        call = Call("AttentionState.empty_like", {"q": q})
        (spec,) = call.required("q")
        try:
            wanted = _check.fresh(spec.shape, spec.dtype if dtype is None else np.dtype(dtype))
        except TypeError as error:
            raise TypeError(f"AttentionState.empty_like: dtype must name a dtype; got {dtype!r}") from error
        _check.axes("AttentionState.empty_like: q", spec, ("...", "head_dim"))
        _check.dtype("AttentionState.empty_like: dtype", wanted, _check.FLOATS)
        state = AttentionState(call.empty(wanted.shape, wanted.dtype), call.empty(wanted.shape[:-1], _check.FLOAT32))
        with call.on_device():
            state.out.fill(0)
            state.lse.fill(-np.inf)
        return state


def merge_state(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> AttentionState:
    """Merge two states over disjoint sets of keys.

    Parameters
    ----------
    out_a : array, (..., head_dim), float16, bfloat16 or float32
        head_dim 1 to 512, contiguous along it, other strides at will.
    lse_a : array, (...), float32
        Natural logarithm; -inf marks an empty state, whose `out` is not looked at.
    out_b : array, shaped like `out_a`
        Of its dtype, or one of the two float32.
    lse_b : array, (...), float32
        As `lse_a`.
    out, lse : array, optional
        Where to put the result; may be the arrays of `a` or `b`. `out` may be float32 (or, from float32 states, any
        of the dtypes).

    Returns
    -------
    AttentionState
        In the common dtype of the states, float32 if they differ. Merging commutes bit for bit.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit, or the result overlaps an input in another way.

    See Also
    --------
    merge_states : any number of states at once.
    cuattn.reference.merge_state : the definition.

    Examples
    --------
    >>> a, b = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    >>> cuattn.merge_state(a, np.log(np.float32([1])), b, np.log(np.float32([3]))).out
    array([[0.75, 0.75, 0.75, 0.75]], dtype=float32)
    """
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, "out": out, "lse": lse}
    return _pair(Call("merge_state", arrays), ("out_a", "lse_a"), ("out_b", "lse_b"))


def merge_state_in_place(out: Any, lse: Any, other_out: Any, other_lse: Any, mask: Any = None) -> AttentionState:
    """Merge another state into ``(out, lse)``.

    Parameters
    ----------
    out, lse : array, (..., head_dim) and (...)
        The state to be updated; a float32 `out` accumulates 16-bit states without rounding in between.
    other_out, other_lse : array, (..., head_dim) and (...)
        The state to be added, over other keys.
    mask : array, (...) or (...) without the last axis, bool, optional
        Rows (or, without the heads, tokens) where it is False stay as they are.

    Returns
    -------
    AttentionState
        The arrays `out` and `lse`.

    Raises
    ------
    TypeError, ValueError
        As `merge_state`; nothing is changed then.
    """
    arrays = {"out": out, "lse": lse, "other_out": other_out, "other_lse": other_lse, "mask": mask}
    return _pair(Call("merge_state_in_place", arrays), ("out", "lse"), ("other_out", "other_lse"))


def merge_states(outs: Any, lses: Any, *, out: Any = None, lse: Any = None) -> AttentionState:
    """Merge any number of states over disjoint sets of keys.

    Parameters
    ----------
    outs : array, (states, ..., head_dim), or a list of arrays, (..., head_dim) each
        float16, bfloat16 or float32; head_dim 1 to 512, contiguous along it, other strides at will.
    lses : array, (states, ...), or a list of arrays, (...) each, float32
        Natural logarithms; -inf marks an empty state, whose `out` is not looked at.
    out, lse : array, optional
        Where to put the result, as in `merge_state`; may be one of the states.

    Returns
    -------
    AttentionState
        In the dtype of the states. The bits depend on a row's own states only, and are those of `merge_state` for two.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit.

    Notes
    -----
    Reads every state once: ``rows * (states + 1) * (head_dim * itemsize + 4)`` bytes in all. A list of more than 32
    states takes several launches and allocates a float32 scratch array, so it can't be captured in a graph.
    """
    if isinstance(outs, (list, tuple)) or isinstance(lses, (list, tuple)):
        return _list(outs, lses, out, lse)
    call = Call("merge_states", {"outs": outs, "lses": lses, "out": out, "lse": lse})
    return _stack(call, _check_state.stack(call))


def merge_states_varlen(outs: Any, lses: Any, indptr: Any, *, out: Any = None, lse: Any = None) -> AttentionState:
    """Merge segments of different lengths: row i merges the states ``indptr[i]`` to ``indptr[i + 1] - 1``.

    Parameters
    ----------
    outs : array, (total_states, ..., head_dim), float16, bfloat16 or float32
        Contiguous along head_dim (1 to 512), other strides at will.
    lses : array, (total_states, ...), float32
        Natural logarithms; -inf marks an empty state.
    indptr : array, (segments + 1,), int32 or int64
        Ascending offsets into axis 0. A segment without states gives ``(0, -inf)``. On a device they are read there:
        what reaches outside of axis 0 is cut off, and refused only under ``checking("values")``.
    out, lse : array, optional
        Where to put the result, (segments, ..., head_dim) and (segments, ...); apart from the inputs.

    Returns
    -------
    AttentionState

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit.
    """
    call = Call("merge_states_varlen", {"outs": outs, "lses": lses, "indptr": indptr, "out": out, "lse": lse})
    return _stack(call, _check_state.ragged(call, call.checks_values()))


def _pair(call: Call, a: tuple[str, str], b: tuple[str, str]) -> AttentionState:
    dims = _check_state.pair(call, a, b)
    state = _allocate(call, dims)
    mask = call.arrays.get("mask")
    arrays = [call.arrays[name] for name in (*a, *b)]
    if call.engine is None:
        return _store(state, reference.merge_state(*arrays), ... if mask is None else mask)
    if dims.num_rows:
        call.launch(plan_merge(dims, call.info()), [*arrays, mask, *state, layout(dims)])
    return state


def _stack(call: Call, dims: MergeDims) -> AttentionState:
    state = _allocate(call, dims)
    outs, lses = call.arrays["outs"], call.arrays["lses"]
    indptr: Any = call.arrays.get("indptr")
    if call.engine is None and indptr is None:
        return _store(state, reference.merge_states(outs, lses))
    if call.engine is None:
        return _store(state, reference.merge_states_varlen(outs, lses, indptr))
    if dims.num_rows:
        call.launch(plan_merge(dims, call.info()), [outs, lses, indptr, *state, layout(dims)])
    return state


def _list(outs: Sequence[Any], lses: Sequence[Any], out: Any, lse: Any) -> AttentionState:
    function = "merge_states"
    if not (isinstance(outs, (list, tuple)) and isinstance(lses, (list, tuple)) and len(outs) == len(lses) > 0):
        kinds = [f"{len(x)} in a list" if isinstance(x, (list, tuple)) else type(x).__name__ for x in (outs, lses)]
        rule = "outs and lses must be two lists of one length, at least 1, or two arrays"
        raise ValueError(f"{function}: {rule}; got {' and '.join(kinds)}")
    names = _check_state.list_names(len(outs))
    call = Call(function, dict(zip(names, (*outs, *lses))) | {"out": out, "lse": lse})
    dims = _check_state.listed(call, len(outs))
    taken = list(call.arrays.values())
    outs, lses = taken[: len(outs)], taken[len(outs) : 2 * len(outs)]
    if len(outs) > LIST and call.capturing():
        rule = f"a list to be captured in a graph must have at most {LIST} states"
        raise ValueError(f"{function}: {rule}; got {len(outs)}")
    state = _allocate(call, dims)
    if call.engine is None:
        return _store(state, reference.merge_states(outs, lses))
    if len(outs) > LIST:  # merge pieces of the list into a stack of float32 states, and then that
        pieces = [slice(n, n + LIST) for n in range(0, len(outs), LIST)]
        scratch = call.empty((len(pieces), *dims.shape), _check.FLOAT32)
        scratch_lse = call.empty(scratch.shape[:-1], _check.FLOAT32)
        for n, piece in enumerate(pieces):
            _list(outs[piece], lses[piece], scratch[n], scratch_lse[n])
        return merge_states(scratch, scratch_lse, out=state.out, lse=state.lse)
    if dims.num_rows:
        addresses = [call.places[name][1] for name in names]
        call.launch(plan_merge(dims, call.info()), [*state, list_layout(dims, addresses)])
    return state


def _allocate(call: Call, dims: MergeDims) -> AttentionState:
    out, lse = call.arrays["out"], call.arrays["lse"]
    return AttentionState(
        call.empty(dims.shape, dims.dtypes[2]) if out is None else out,
        call.empty(dims.shape[:-1], _check.FLOAT32) if lse is None else lse,
    )


def _store(state: AttentionState, merged: tuple[np.ndarray, np.ndarray], mask: Any = ...) -> AttentionState:
    """Round the float64 result of the reference into the arrays of `state`, in the rows of `mask`."""
    state.out[mask] = rounded(merged[0][mask], state.out.dtype)
    state.lse[mask] = rounded(merged[1][mask], state.lse.dtype)
    return state
