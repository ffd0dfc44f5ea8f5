"""Error bounds of merges and of attention in float32, each derived in its docstring.

Everywhere u = 2^-24 is the unit roundoff of float32, in which scores, weights and sums are computed, and u_T
that of the storage dtype T (2^-11 float16, 2^-8 bfloat16). A bound is computed in float64 from the actual
case. None is tuned: a kernel that needs a larger constant must say here which operation it adds.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuattn.testing.profiles import as_dtype, finfo

U = 2.0**-24              # unit roundoff of float32
EXP = 4.0                 # expf: 2 ulp, each at most 2u relative (CUDA documents 1, glibc less)
EXPONENT = 3.0            # exponent: one rounding of lse_s - m; base 2 adds a rounded log2(e) and a product
LOG = 4.0                 # log(sum): logf within 1 ulp = 2u; log2f times a rounded ln 2 adds two roundings
QUOTIENT = 5.0            # acc * (1 / sum): a fast division within 2 ulp = 4u (CUDA's __fdividef), and a product
TAU = 2.0**-150           # absolute error of an operation whose result is subnormal
FLUSHED = 2.0**-126       # the same where subnormals become zero


def unit_roundoff(dtype: Any) -> float:
    """Return the largest relative error of rounding to a floating dtype: 2^-11, 2^-8 or 2^-24."""
    return float(finfo(dtype).eps) / 2


def half_subnormal(dtype: Any) -> float:
    """Return the largest absolute error of rounding a subnormal: half the smallest subnormal of the dtype."""
    return float(finfo(dtype).smallest_subnormal) / 2


def merge_bound(outs: Any, lses: Any, out_dtype: Any, *, out_errors: Any = 0.0, lse_errors: Any = 0.0,
                flush_subnormals: bool = False) -> tuple[np.ndarray, np.ndarray]:
    r"""Bound the error of one merge of S states computed in float32.

    Parameters
    ----------
    outs : array_like, (num_states, *rows, head_dim)
        As given to the merge.
    lses : array_like, (num_states, *rows)
        As given to the merge; -inf is empty.
    out_dtype : dtype or str
        In which the merged ``out`` is stored.
    out_errors, lse_errors : array_like, optional
        Errors that the inputs already carry, absolute, like `outs` and `lses`: see `fold_bound`.
    flush_subnormals : bool, optional
        Whether the arithmetic replaces subnormals by zero (``-ftz=true``, XLA).

    Returns
    -------
    bound_out : numpy.ndarray, (*rows, head_dim) float64
    bound_lse : numpy.ndarray, (*rows) float64
        Absolute. 0 where the result must be exact: no state, or all empty, or one that is not. Also 0 where
        it is not finite, as only the places of inf and NaN can then be compared.

    Notes
    -----
    With m = max lse, x_s = lse_s - m <= 0, w_s = exp(x_s), Z = sum w_s in [1, n], p_s = w_s / Z
    the exact result is out = sum p_s v_s and lse = m + log Z; n counts the states that are not empty. All
    sums over s below are over them.

    *Weights.* The exponent has a relative error of 3u (`EXPONENT`), so exp moves by 3u |x_s|. Walked online,
    in chunks or in a tree, a weight is a product of exponentials whose exponents are negative and sum to x_s:
    their errors still sum to 3u |x_s|. Each factor other than exp(0) = 1, which is exact, moves the maximum
    to a strictly larger one, so there are at most k_s, where k_s is the number of distinct lse larger than
    lse_s, *in any order*. Each costs 4u (`EXP`): the weight has the relative error  theta_s = (3 |x_s| + 4
    k_s) u, none for the largest state.

    *Sums.* Each term of the numerator is rounded once by its product with v, once by each of at most k_s
    rescalings and by at most n - 1 additions, fused or not, in any order:  nu_s = (n + k_s) u. Those of Z
    have one less, counted alike. The quotient adds 5u |out| (`QUOTIENT`). The numerator and Z need not use
    the same computed weights (Z may come from an online pass, the numerator from a second one), so their
    errors are added:

        |out^ - out| <= sum_s p_s (theta_s + nu_s) (|v_s| + |out|) + 5u |out|            =: a

    *lse.* log Z moves by the relative error of Z; logf and the last addition round (`LOG`):

        |lse^ - lse| <= sum_s p_s (theta_s + nu_s) + 4u log Z + u |lse|

    *Subnormals* have absolute errors instead: tau = 2^-150 for each product, 4 tau (2 ulp) for each factor of
    a weight. Per element at most 4n + 2 operations count (n inputs, n products, n rescalings, n additions,
    the quotient); what is scaled later only shrinks, and Z >= 1. With `flush_subnormals` tau is 2^-126.

    *Storage* rounds the computed value once, nothing for float32:  u_T (|out| + a) + tiny_T, half the
    smallest subnormal. No saturation is allowed for: the bound is about finite values.

    *Inherited errors* o_s of v_s and e_s of lse_s move the result by sum p_s o_s + sum p_s e_s |v_s - out|,
    and lse by sum p_s e_s; v_s may be larger by o_s, |x_s| by 2 max e, and the order of the lse may change,
    so that k_s = n - 1.

    *Second order.* All sums above are averages with the computed weights p^_s. They sum to 1 and are at most
    p_s exp(2 max e) (1 + 4 r), r = (3 * 104 + 10 n) u being more than any relative error above (weights with
    |x_s| > 104 vanish in float32 and are covered by tau). An average is also at most the largest term, and
    large e cannot move a weight by more than its own size:  |p^_s - p_s| <= p^_s min(2 max e, 1), after a
    common shift.

    A merge that first rounds the merged lse and then takes exp(lse_s - lse) errs by u |lse| in each weight, 3
    percent at lse = 5e5, and is refused by this bound on purpose: softmax is shift invariant.

    """
    in_dtype = np.asarray(outs).dtype
    v, lse = (np.asarray(x).astype(np.float64) for x in (outs, lses))
    o = np.broadcast_to(np.asarray(out_errors, np.float64), v.shape)
    e = np.broadcast_to(np.asarray(lse_errors, np.float64), lse.shape)
    return _merge_bound(v, lse, o, e, in_dtype, as_dtype(out_dtype), FLUSHED if flush_subnormals else TAU)


def _merge_bound(v: np.ndarray, lse: np.ndarray, o: np.ndarray, e: np.ndarray, in_dtype: np.dtype,
                 out_dtype: np.dtype, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate the formulas of `merge_bound` in its letters; all arrays float64."""
    full = lse > -np.inf
    n = full.sum(axis=0)
    if not n.any():
        return np.zeros(v.shape[1:]), np.zeros(lse.shape[1:])
    v, o = (np.where(full[..., None], y, 0.0) for y in (v, o))
    e = np.where(full, e, 0.0)
    worst = e.max(axis=0)
    several = n > 1                                                     # a state alone is handed on exactly
    with np.errstate(invalid="ignore", over="ignore"):          # rows with NaN or inf: zeroed at the end
        m = np.where(n > 0, lse.max(axis=0, where=full, initial=-np.inf), 0.0)
        x = np.where(full, lse - m, -np.inf)
        z = np.maximum(np.exp(x).sum(axis=0), 1.0)
        log_z = np.log(z)
        out, total = _sum(np.exp(x) / z, v), m + log_z
        second = 1 + 4 * (EXPONENT * 104 + 10 * n) * U
        more = second * np.exp(np.minimum(x - log_z + 2 * worst, 700.0))                # at least p^_s

        k = np.where(worst > 0, n - 1, _larger(lse, full))              # errors of lse may change their order
        theta = (EXPONENT * (np.where(full, -x, 0.0) + 2 * worst) + EXP * k) * U
        rounding = np.where(full & several, theta + (n + k) * U, 0.0)[..., None]        # theta_s + nu_s
        size = np.abs(v) + o + np.abs(out)
        far = np.where(full[..., None], np.abs(v - out), 0.0)
        a = _average(more, rounding * size) + (several * second)[..., None] * QUOTIENT * U * np.abs(out)
        a += _average(more, o) + np.minimum(
            _sum(more, e[..., None] * far), _sum(np.minimum(more, second) * np.minimum(2 * worst, 1), far))
        if tau > TAU or several.any():
            below = 4 * tau * np.where(full[..., None], k[..., None] * size, 0.0).sum(axis=0)
            a += (several | (tau > TAU))[..., None] * (below + (4 * n[..., None] + 2) * tau)
        if out_dtype != np.float32:
            rounds = (several | ((n > 0) & (in_dtype != out_dtype)))[..., None]
            a += rounds * (unit_roundoff(out_dtype) * (np.abs(out) + a) + half_subnormal(out_dtype))
        inherited = _average(more, e[..., None])[..., 0]
        b = _average(more, rounding)[..., 0] + LOG * U * (log_z + 2 * worst) + U * (np.abs(total) + inherited)
        b = inherited + np.where(several, b + 4 * tau * n * n, 0.0)
    some = (n > 0) & np.isfinite(total) & ~np.isnan(lse).any(axis=0)
    return np.where(some[..., None] & np.isfinite(out), a, 0.0), np.where(some, b, 0.0)


def _sum(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return sum_s p_s y_s; p ``(num_states, *rows)``, y ``(num_states, *rows, n)``."""
    return np.einsum("s...,s...d->...d", p, y)


def _average(more: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Bound the average of y >= 0 with weights that are at most `more`."""
    return np.minimum(_sum(more, y), 1.01 * y.max(axis=0))


def _larger(lse: np.ndarray, full: np.ndarray) -> np.ndarray:
    """Count for each state the distinct values of lse that are larger, along axis 0."""
    order = np.argsort(np.where(full, -lse, np.inf), axis=0, kind="stable")       # largest first
    down = np.take_along_axis(np.where(full, lse, -np.inf), order, axis=0)
    steps = np.concatenate([np.zeros_like(down[:1]), np.cumsum(down[1:] != down[:-1], axis=0)])
    count = np.empty_like(steps)
    np.put_along_axis(count, order, steps, axis=0)
    return count


def fold_bound(outs: Any, lses: Any, out_dtype: Any, tree: Any = None, *,
               flush_subnormals: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Bound the error of merging S states two at a time, each result rounded to `out_dtype` and float32.

    Parameters
    ----------
    outs, lses, out_dtype, flush_subnormals
        As in `merge_bound`.
    tree : nested tuple of int, optional
        The order: ``((0, 1), 2)`` merges 0 and 1, then 2. Default: from the first to the last.

    Returns
    -------
    bound_out, bound_lse : numpy.ndarray
        As in `merge_bound`.

    Notes
    -----
    The tree is walked with exact states and the errors they carry; each node is a `merge_bound`
    with the children's bounds as inherited errors. An inner lse is rounded by u |lse|, which the next merge
    sees as a relative error of a weight: near lse = 5e5 that is 3 percent of |v_s - out| per step, a loss of
    the format and not of the merge.

    """
    in_dtype, tau = np.asarray(outs).dtype, FLUSHED if flush_subnormals else TAU
    v, lse = (np.asarray(x).astype(np.float64) for x in (outs, lses))
    if not len(lse):
        return np.zeros(v.shape[1:]), np.zeros(lse.shape[1:])
    v = np.where(np.isneginf(lse)[..., None], 0.0, v)

    def walk(node: Any) -> tuple[np.ndarray, ...]:             # exact out and lse, and the bounds of both
        if not isinstance(node, tuple):
            return v[node], lse[node], np.zeros(v.shape[1:]), np.zeros(lse.shape[1:])
        pair = [np.stack(both) for both in zip(walk(node[0]), walk(node[1]), strict=True)]
        total = np.logaddexp(*pair[1])
        with np.errstate(invalid="ignore"):
            p = np.where(np.isneginf(pair[1]), 0.0, np.exp(pair[1] - total))
        return _sum(p, pair[0]), total, *_merge_bound(*pair, in_dtype, as_dtype(out_dtype), tau)

    if tree is None:
        tree = functools.reduce(lambda done, s: (done, s), range(len(lse)))
    return walk(tree)[2:]


def attention_bound(out: Any, lse: Any, *, head_dim: int, num_keys: int, tile: int, sm_scale: float,
                    qk: Any, v: Any, dtype: Any, p_dtype: Any = None,
                    num_splits: int = 1) -> tuple[np.ndarray, np.ndarray]:
    r"""Bound the error of attention by tiles of keys with an online softmax in float32.

    Parameters
    ----------
    out : array_like, (..., head_dim_v)
        Reference, float64.
    lse : array_like, (...)
        Reference, float64, natural log.
    head_dim, num_keys, tile : int
        D, n (the largest number of keys of a row) and the number of keys of a tile.
    sm_scale : float
        Factor on q.k.
    qk : array_like, (...) or scalar
        max_j sum_d |q_d k_jd| over the keys of a row, before the scale.
    v : array_like, (...) or scalar
        max |v| over the keys of a row.
    dtype : dtype or str
        In which ``out`` is stored.
    p_dtype : dtype or str, optional
        In which the weights enter the product with v, if not in float32.
    num_splits : int, optional
        Parts of the keys whose float32 states are merged.

    Returns
    -------
    bound_out : numpy.ndarray, like `out`, float64
    bound_lse : numpy.ndarray, like `lse`, float64
        0 for rows without keys, which must be exact.

    Notes
    -----
    A = |sm_scale| qk, V = v, t = ceil(n / tile). First order, each count rounded up to cover the second.

    *Score.* A product and D additions in any order, and the scale (a rounded constant, which may hold
    log2(e), and its product):  delta = (D + 3) u A.

    *Weight.* exp(S - m): both scores err by delta, but with the same error on both sides of a tile's
    rescaling; the difference, at most 2A, rounds; expf has 4u; each of t rescalings is an expf (2u for 1 ulp)
    with its exponent's share of 2A already counted and a product, 4u in all; base 2 and the last product are
    the other 4: eta = 2 delta + (2A + 4t + 8) u.

    *lse.* The maximum errs by delta and the sum by eta, delta more for the exponents; n additions and 2t
    rescalings round the sum; log and the last addition round relative to the result: 2 delta + eta + (n + 2t
    + 8) u + 4u |lse|.

    *out* = sum w v / sum w, |v| <= V: weights and sums count twice, above and below; P in T rounds the
    weights above: V (2 eta + 2 (n + 2t + 2) u + [P stored in T] u_T) + u_T |out|, + 2^-24 in half for its
    subnormals.

    *Splits* merge num_splits float32 states: (num_splits + 4) u V more.

    """
    out, lse = (np.asarray(x, np.float64) for x in (out, lse))
    a, top = abs(sm_scale) * np.asarray(qk, np.float64), np.asarray(v, np.float64)
    t = -(-num_keys // tile)
    delta = (head_dim + 3) * U * a
    eta = 2 * delta + (2 * a + 4 * t + 8) * U
    some = np.isfinite(lse)
    bound_lse = 2 * delta + eta + (num_keys + 2 * t + 8) * U + 4 * U * np.abs(np.where(some, lse, 0.0))
    stored = 0.0 if p_dtype is None or as_dtype(p_dtype) == np.float32 else unit_roundoff(p_dtype)
    splits = (num_splits + 4) * U if num_splits > 1 else 0.0
    per_row = top * (2 * eta + 2 * (num_keys + 2 * t + 2) * U + stored + splits)
    bound_out = np.broadcast_to(per_row, lse.shape)[..., None] + unit_roundoff(dtype) * np.abs(out)
    bound_out = bound_out + (2.0**-24 if as_dtype(dtype) == np.float16 else 0.0)
    return np.where(some[..., None], bound_out, 0.0), np.where(some, bound_lse, 0.0)
