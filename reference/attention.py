"""Attention over a set of keys, and why it may be cut into pieces: the definition of what cuattn computes.

1. Scores. A query row ``q[i]`` is compared with every key row ``k[j]``; both have head_dim features::

       s[i,j] = sm_scale * sum_d q[i,d] k[j,d]           sm_scale = 1 / sqrt(head_dim) unless given
       s[i,j] = softcap * tanh(s[i,j] / softcap)         only if softcap > 0: bounds |s| by softcap
       s[i,j] = s[i,j] - slope * |pos(i) - j|            only with ALiBi: each head prefers near keys

   The queries are the *last* seqlen_q tokens of a sequence of seqlen_k tokens: query i stands at position
   ``pos(i) = i + seqlen_k - seqlen_q``. The keys it sees are a set ``J(i)``, those that pass every rule::

       causal                  j <= pos(i)
       window (left, right)    pos(i) - left <= j <= pos(i) + right      both ends included, -1 = no bound
       mask                    mask[i,j] is True

       seqlen_q=2, seqlen_k=5, causal      the same, window=(1, 0)      seqlen_q=3, seqlen_k=1, causal
           i=0, pos 3    1 1 1 1 .             . . 1 1 .                    i=0, pos -2    .
           i=1, pos 4    1 1 1 1 1             . . . 1 1                    i=1, pos -1    .
                                                                            i=2, pos  0    1

   Keys outside ``J(i)`` do not exist for row i. They are left out, not added with a very small weight: what
   they hold (NaN, infinity) cannot matter, and no score is so low that it is mistaken for a masked one.

2. State. For one query row and a set of keys J the result is a pair, the *state* of J::

       lse(J) = log sum_{j in J} exp(s[j])               natural logarithm of the total weight
       out(J) = sum_{j in J} exp(s[j] - lse(J)) v[j]     mean of the value rows; the weights sum to 1

   The empty set has total weight 0: its state is ``out = 0, lse = -inf``. A row that sees no key returns it.
   Adding a constant c to all scores adds c to lse and leaves out alone. So floating point is kept in range by
   taking exp of ``s[j] - m``, m the largest score, and adding m back to the logarithm.

3. Merge. If A and B are disjoint sets of keys, the state of their union follows from their states alone::

       lse(A u B) = log(exp(lse(A)) + exp(lse(B)))
       out(A u B) = exp(lse(A) - lse(A u B)) out(A) + exp(lse(B) - lse(A u B)) out(B)

   To see why, write a state as total weight and weighted sum, ``W = exp(lse)`` and ``N = exp(lse) out``. The
   two lines then say only ``W(A u B) = W(A) + W(B)`` and ``N(A u B) = N(A) + N(B)``. So the merge has the
   laws of addition: it is associative and commutative, and its identity is the empty state, where W = N = 0.

4. Partition invariance. Cut the keys into disjoint pieces in any way, compute the state of each, merge them
   in any order and grouping: the result is the state of the whole, as a sum may be taken in any order.
   Pieces may be empty. Splits of one long sequence, a shared prefix and its suffixes, the parts of a sparse
   pattern and the shards on several GPUs are all such partitions. Two conditions: no key is in two pieces;
   and causal, window and ALiBi count positions in the whole sequence, not in the piece. With rounding the law
   holds to a few units in the last place; only identity and commutativity are exact.

5. Sinks. A sink is one extra score per head with the value row 0: some weight that goes nowhere. It is one
   more piece, the state ``(0, sink)``, merged in. It is part of lse: a row that sees no key has lse = sink.

6. Heads and scales. All this happens in each head by itself. With fewer kv heads than query heads, groups of
   neighbouring query heads share one: query head h reads kv head ``h // (num_heads // num_kv_heads)``. Caches
   in 8-bit floats store k and v divided by a factor; k_scale and v_scale multiply it back.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .state import State, merge_state

_SMALL = 1 << 18  # scores of a head


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> State:
    """Softmax attention of every query row over the keys it sees, as a state.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads, head_dim), any float dtype
        Query rows, the last seqlen_q positions of each sequence.
    k : (batch, seqlen_k, num_kv_heads, head_dim), any float dtype
        Keys. num_heads is a multiple of num_kv_heads.
    v : (batch, seqlen_k, num_kv_heads, head_dim_v), any float dtype
        Values. Keys and values that no query row sees are never read.
    causal : bool
        Query i sees key j only if ``j <= i + seqlen_k - seqlen_q``.
    sm_scale : float, optional
        Factor on q.k. Default ``head_dim ** -0.5``.
    window : (left, right)
        Keys seen before and after the position of the query, both ends included; -1 is unbounded.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``, before ALiBi. 0 is off.
    alibi_slopes : (num_heads,) or (batch, num_heads), optional
        Scores lose ``slope * |i + seqlen_k - seqlen_q - j|``.
    sinks : (num_heads,), optional
        One extra score per head whose value row is 0.
    mask : broadcastable to (batch, num_heads, seqlen_q, seqlen_k), bool, optional
        True keeps a key, False removes it. Combined with causal and window: all must keep.
    k_scale, v_scale : scalar or (num_kv_heads,), optional
        Factors on k and v.

    Returns
    -------
    out : (batch, seqlen_q, num_heads, head_dim_v), float64
        0 where a row sees no key.
    lse : (batch, seqlen_q, num_heads), float64
        Natural logarithm of the sum of exp(score); -inf where a row sees no key.

    Raises
    ------
    ValueError
        If shapes disagree, or window or softcap is out of range.
    TypeError
        If mask is not bool.
    """
    q, k, v = _check_qkv(np.asarray(q), np.asarray(k), np.asarray(v))
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads, head_dim_v = v.shape[1:]
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"reference.attention: window must be (left, right), each -1 or more; got {window}")
    if softcap < 0:
        raise ValueError(f"reference.attention: softcap must be 0 (off) or more; got {softcap}")
    sm_scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    slopes = _spread("alibi_slopes", alibi_slopes, 0.0, [(num_heads,), (batch, num_heads)])
    k_scale = _spread("k_scale", k_scale, 1.0, [(), (num_kv_heads,)])
    v_scale = _spread("v_scale", v_scale, 1.0, [(), (num_kv_heads,)])
    mask = _check_mask(mask, (batch, num_heads, seqlen_q, seqlen_k))

    position = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    ahead = np.arange(seqlen_k) - position  # (seqlen_q, seqlen_k): how far key j lies ahead of query i
    reach = _within(ahead, causal, window)
    out = np.zeros((batch, seqlen_q, num_heads, head_dim_v))
    lse = np.full((batch, seqlen_q, num_heads), -np.inf)
    group = num_heads // num_kv_heads
    together = group if seqlen_q * seqlen_k <= _SMALL else 1  # heads that share keys, while their scores are few
    for b, first in np.ndindex(batch, num_heads // max(together, 1)):
        heads, g = slice(first * together, (first + 1) * together), first * together // group
        visible = reach & mask[b, heads]
        seen = np.flatnonzero(visible.any(axis=(0, 1)))  # a key that no row sees is never read
        if len(seen) == 0:  # the state of no keys stands
            continue
        state = _attend(
            sm_scale * q[b, :, heads].swapaxes(0, 1),
            k_scale[g] * k[b, seen, g],
            v_scale[g] * v[b, seen, g],
            visible[..., seen],
            slopes[b, heads, None, None] * np.abs(ahead[:, seen]),
            softcap,
        )
        out[b, :, heads], lse[b, :, heads] = state[0].swapaxes(0, 1), state[1].T
    if sinks is not None:
        sinks = _spread("sinks", sinks, 0.0, [(num_heads,)])
        out, lse = merge_state(out, lse, np.zeros_like(out), np.broadcast_to(sinks, lse.shape))
    return out, lse


def _attend(q: NDArray, k: NDArray, v: NDArray, visible: NDArray, bias: NDArray, softcap: float) -> State:
    """Heads of one sequence that share keys, all in float64: section 2 above for every row of ``visible`` at once."""
    s = q @ k.T
    if softcap > 0:
        s = softcap * np.tanh(s / softcap)
    s = np.where(visible, s - bias, -np.inf)
    largest = s.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isneginf(largest), 0.0, largest)  # -inf - -inf would be NaN
    weight = np.exp(s - shift[..., None])
    total = weight.sum(axis=-1)
    some = total != 0
    lse = shift + np.log(total, where=some, out=np.full_like(total, -np.inf))
    p = weight / np.where(some, total, 1.0)[..., None]

    # p @ v, except that 0 * NaN is NaN: a value row that is not finite reaches only rows that see its key.
    finite = np.isfinite(v).all(axis=1)
    out = p[..., finite] @ v[finite]
    for j in np.flatnonzero(~finite):
        i = visible[..., j]
        out[i] += p[i, j, None] * v[j]
    return out, lse


def _within(ahead: NDArray, causal: bool, window: tuple[int, int]) -> NDArray[np.bool_]:
    """Which keys causal and window let each query see, (seqlen_q, seqlen_k)."""
    left, right = window
    reach = np.ones(ahead.shape, dtype=bool)
    if causal:
        reach &= ahead <= 0
    if left >= 0:
        reach &= ahead >= -left
    if right >= 0:
        reach &= ahead <= right
    return reach


def _first_seen(seqlen_q: ArrayLike, seqlen_k: ArrayLike, window: tuple[int, int], least: ArrayLike = 0) -> NDArray:
    """The first key of a sequence that a query sees, at least `least`; seqlen_k if there is no query."""
    first = np.asarray(least) if window[0] < 0 else np.maximum(least, np.subtract(seqlen_k, seqlen_q) - window[0])
    return np.where(np.asarray(seqlen_q) > 0, first, seqlen_k)


def _check_qkv(q: NDArray, k: NDArray, v: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return q, k, v in float64, or refuse shapes that do not belong together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"reference.attention: {name} must have 4 dimensions; got {x.ndim}")
    for argument, got, rule, expected in (
        ("k.shape[0]", k.shape[0], "batch of q", q.shape[0]),
        ("k.shape[3]", k.shape[3], "head_dim of q", q.shape[3]),
        ("v.shape[0]", v.shape[0], "batch of q", q.shape[0]),
        ("v.shape[1]", v.shape[1], "seqlen_k of k", k.shape[1]),
        ("v.shape[2]", v.shape[2], "num_kv_heads of k", k.shape[2]),
    ):
        if got != expected:
            raise ValueError(f"reference.attention: {argument} must equal {rule} ({expected}); got {got}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"reference.attention: q.shape[2] must be a multiple of num_kv_heads of k ({k.shape[2]});"
            f" got {q.shape[2]}"
        )
    if q.shape[3] == 0:
        raise ValueError("reference.attention: q.shape[3] must be at least 1; got 0")
    return q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)


def _spread(name: str, values: ArrayLike | None, default: float, shapes: list[tuple[int, ...]]) -> NDArray:
    """Return values in float64, broadcast to the last of the shapes they may have."""
    if values is None:
        return np.full(shapes[-1], default)
    values = np.asarray(values).astype(np.float64)
    if values.shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"reference.attention: {name}.shape must be {allowed}; got {values.shape}")
    return np.broadcast_to(values, shapes[-1])


def _check_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return mask broadcast to (batch, num_heads, seqlen_q, seqlen_k); no mask keeps every key."""
    mask = np.asarray(True if mask is None else mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"reference.attention: mask must be bool; got {mask.dtype}")
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(
            f"reference.attention: mask.shape must broadcast to {shape}; got {mask.shape}"
        ) from None
