"""Attention states and their merge: the operator of section 3 of ``attention.py``.

A state is a pair ``out (..., head_dim)``, ``lse (...)``: the attention output over some set of keys and
the natural logarithm of the sum of ``exp(score)`` over that set. Any number of leading axes, none included;
each leading index is a state of its own. Everything here is computed and returned in float64.

* ``lse == -inf`` marks the empty state. It is the identity whatever its ``out`` holds, NaN and inf included.
* A NaN in ``lse`` spreads to what it is merged with, and to no other row.
* ``lse == +inf`` is not a state: no set of finite scores has it. The result may be NaN.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

State = tuple[NDArray[np.float64], NDArray[np.float64]]


def merge_state(out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike) -> State:
    """Merge the states of two disjoint sets of keys.

    Commutes bit for bit; merging with an empty state returns the other one bit for bit.

    Parameters
    ----------
    out_a, out_b : (..., head_dim), any float dtype
        Attention outputs.
    lse_a, lse_b : (...), any float dtype
        Their natural log-sum-exp.

    Returns
    -------
    out : (..., head_dim), float64
    lse : (...), float64

    Raises
    ------
    ValueError
        If shapes disagree.
    """
    out_a, lse_a = _state("merge_state", "out_a", out_a, "lse_a", lse_a)
    out_b, lse_b = _state("merge_state", "out_b", out_b, "lse_b", lse_b)
    if out_b.shape != out_a.shape:
        raise ValueError(
            f"reference.merge_state: out_b.shape must equal out_a.shape {out_a.shape}; got {out_b.shape}"
        )
    return _merge(np.stack([out_a, out_b]), np.stack([lse_a, lse_b]))


def merge_states(outs: ArrayLike | Sequence[ArrayLike], lses: ArrayLike | Sequence[ArrayLike]) -> State:
    """Merge any number of states at once.

    Parameters
    ----------
    outs : (num_states, ..., head_dim), any float dtype, or a sequence of arrays (..., head_dim)
        Attention outputs over disjoint sets of keys. A stacked array may hold no state at all.
    lses : (num_states, ...), any float dtype, or a sequence of arrays (...)
        Their natural log-sum-exp.

    Returns
    -------
    out : (..., head_dim), float64
    lse : (...), float64

    Raises
    ------
    ValueError
        If shapes or counts disagree, or a sequence is empty (no array tells the shape of the result).
    """
    outs, lses = _state("merge_states", "outs", _stack("outs", outs), "lses", _stack("lses", lses))
    if lses.ndim == 0:
        raise ValueError("reference.merge_states: lses must have at least 1 dimension; got 0")
    return _merge(outs, lses)


def merge_states_varlen(outs: ArrayLike, lses: ArrayLike, indptr: ArrayLike) -> State:
    """Merge runs of states: row ``i`` of the result merges states ``indptr[i]`` to ``indptr[i + 1] - 1``.

    Parameters
    ----------
    outs : (nnz, ..., head_dim), any float dtype
        Attention outputs, the states of one row after those of the row before.
    lses : (nnz, ...), any float dtype
        Their natural log-sum-exp.
    indptr : (num_rows + 1,), any integer dtype
        Ascending, within 0 and nnz. Two equal neighbours make an empty row.

    Returns
    -------
    out : (num_rows, ..., head_dim), float64
    lse : (num_rows, ...), float64

    Raises
    ------
    ValueError
        If shapes disagree or ``indptr`` breaks its rule.
    TypeError
        If ``indptr`` does not hold integers.
    """
    outs, lses = _state("merge_states_varlen", "outs", outs, "lses", lses)
    indptr = np.asarray(indptr)
    if lses.ndim == 0:
        raise ValueError("reference.merge_states_varlen: lses must have at least 1 dimension; got 0")
    if not np.issubdtype(indptr.dtype, np.integer):
        raise TypeError(f"reference.merge_states_varlen: indptr must hold integers; got {indptr.dtype}")
    if indptr.ndim != 1 or indptr.size == 0:
        raise ValueError(
            f"reference.merge_states_varlen: indptr.shape must be (num_rows + 1,); got {indptr.shape}"
        )
    ends = [0, *indptr.tolist(), len(lses)]
    if ends != sorted(ends):
        raise ValueError(
            f"reference.merge_states_varlen: indptr must ascend within 0 and nnz ({len(lses)});"
            f" got {ends[1:-1]}"
        )
    out, lse = empty_state(len(indptr) - 1, *outs.shape[1:])
    for i, (first, last) in enumerate(pairwise(indptr.tolist())):
        out[i], lse[i] = merge_states(outs[first:last], lses[first:last])
    return out, lse


def empty_state(*shape: int) -> State:
    """The state of no keys at all, the identity of the merge: ``out`` 0, ``lse`` -inf.

    Parameters
    ----------
    *shape : int
        Shape of ``out``: any leading axes, then head_dim.

    Returns
    -------
    out : (..., head_dim), float64
    lse : (...), float64
    """
    if not shape:
        raise ValueError("reference.empty_state: shape must end in head_dim; got ()")
    return np.zeros(shape), np.full(shape[:-1], -np.inf)


def lse_to_base2(lse: ArrayLike) -> NDArray[np.float64]:
    """Natural log-sum-exp to the logarithm to base 2 of the same sum, which some libraries return."""
    return np.asarray(lse).astype(np.float64) / np.log(2.0)


def lse_from_base2(lse: ArrayLike) -> NDArray[np.float64]:
    """Base-2 log-sum-exp to the natural one used here; inverse of `lse_to_base2`."""
    return np.asarray(lse).astype(np.float64) * np.log(2.0)


def _merge(outs: NDArray, lses: NDArray) -> State:
    """Merge along axis 0. The weights are exp(lse - largest), so at least one is 1 and none overflows."""
    empty = np.isneginf(lses)
    none = np.asarray(empty.all(axis=0))
    shift = np.where(none, 0.0, lses.max(axis=0, initial=-np.inf))  # -inf - -inf would be NaN
    # -0 + x is x for every x, so an empty state changes no bit. One state after the other: `sum` may pair them up
    # differently for one row and for many.
    out, total = np.full(outs.shape[1:], -0.0), np.zeros(lses.shape[1:])
    with np.errstate(invalid="ignore"):  # inf - inf, where lse is no state
        for out_s, lse_s, empty_s in zip(outs, lses, empty, strict=True):
            weight = np.exp(lse_s - shift)
            total = total + weight
            out = out + weight[..., None] * np.where(empty_s[..., None], -0.0, out_s)  # selected: 0 * NaN would be NaN
    total = np.where(none, 1.0, total)
    lse = np.where(total == 1, shift, shift + np.log(total))  # -0 + log(1) would be +0
    return np.where(none[..., None], 0.0, out / total[..., None]), np.where(none, -np.inf, lse)


def _state(function: str, out_name: str, out: ArrayLike, lse_name: str, lse: ArrayLike) -> State:
    """Return out and lse in float64, or refuse a pair whose shapes do not belong together."""
    out, lse = np.asarray(out), np.asarray(lse)
    if out.ndim == 0:
        raise ValueError(f"reference.{function}: {out_name} must have at least 1 dimension; got 0")
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"reference.{function}: {lse_name}.shape must equal {out_name}.shape[:-1] {out.shape[:-1]};"
            f" got {lse.shape}"
        )
    return out.astype(np.float64), lse.astype(np.float64)


def _stack(name: str, arrays: ArrayLike | Sequence[ArrayLike]) -> NDArray:
    """Stack a list or tuple of equally shaped arrays on a new axis 0; anything else is stacked already."""
    if not isinstance(arrays, list | tuple):
        return np.asarray(arrays)
    arrays = [np.asarray(x).astype(np.float64) for x in arrays]
    if not arrays:
        raise ValueError(f"reference.merge_states: {name} must hold at least one array, or be stacked; got 0")
    for s, x in enumerate(arrays):
        if x.shape != arrays[0].shape:
            raise ValueError(
                f"reference.merge_states: {name}[{s}].shape must equal {name}[0].shape {arrays[0].shape};"
                f" got {x.shape}"
            )
    return np.stack(arrays)
