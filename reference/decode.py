"""Decoding: the newest tokens of each sequence attend to all of it, read through a table of pages.

The definition is one sentence: put the new tokens into their pages, gather each sequence into an array of its
own, and call `attention` on it. What flash_attn_with_kvcache does in one kernel, in its order:

1. ``cache_seqlens`` counts the tokens in the cache before the call; new token i becomes token
   ``cache_seqlens + i``. Its key is rotated for that position, and key and value are stored, rounded to the
   pages' dtype. From there they are read back like all others.

2. Query i is rotated for position ``cache_seqlens + i`` if causal or a window is in force, else every query
   for position ``cache_seqlens``. In the masks it stands at ``i + total - seqlen_q``, where total counts the
   new tokens: the same position if there are as many queries as new tokens.

3. With ``cache_leftpad`` a sequence begins at that token of its cache. Tokens before it are not there, but
   they count: rotary positions are places in the cache, padding included. (As in flash-attn, whose length
   in the cache is without the padding: FA2 and FA3 add it back to find the row of cosines and sines.) Causal,
   window and ALiBi see distances, which do not depend on where counting begins.

4. Entries of the block table are looked at only for keys that some query sees, and for new tokens. Those past
   the end, in the left padding or behind the window may be -1 or garbage: their pages may be free already.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .attention import _first_seen, attention
from .paged import _check_pages, _integers, _named, _tokens_between, append_kv, slots
from .rotary import apply_rotary
from .state import State


def decode(
    q: ArrayLike,
    k_pages: NDArray,
    v_pages: NDArray,
    block_table: ArrayLike,
    cache_seqlens: ArrayLike,
    *,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    rotary_interleaved: bool = False,
    causal: bool = True,
    sm_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cache_leftpad: ArrayLike | None = None,
) -> State:
    """Attention of a few query tokens per sequence over pages of keys and values, as a state.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads, head_dim), any float dtype
        The last seqlen_q positions of each sequence.
    k_pages, v_pages : (num_pages, page_size, num_kv_heads, head_dim or head_dim_v), any float dtype
        The cache: see ``paged.py``. Written to, in place, if k and v are given.
    block_table : (num_sequences, max_pages_per_seq), any integer dtype
        Page ids of each sequence. num_sequences is batch without cache_batch_idx.
    cache_seqlens : (batch,), any integer dtype
        Tokens of each sequence in the cache, without the new ones. In the order of the queries.
    k : (batch, seqlen_new, num_kv_heads, head_dim), any float dtype, optional
        Keys of new tokens, not rotated.
    v : (batch, seqlen_new, num_kv_heads, head_dim_v), any float dtype, optional
        Values of new tokens.
    rotary_cos, rotary_sin : (max_positions, rotary_dim / 2), optional
        Rotate q and k, as in `apply_rotary`; only together with k and v.
    rotary_interleaved : bool
        Which features make a pair. flash-attn's default is True.
    causal, sm_scale, window, softcap, alibi_slopes, sinks
        As in `attention`; causal is flash-attn's option too, but there its default is False.
    k_scale, v_scale : scalar or (num_kv_heads,), optional
        The cache holds k / k_scale and v / v_scale.
    cache_batch_idx : (batch,), any integer dtype, optional
        The cache that sequence b has: a row of block_table, and of nothing else. (As in flash-attn.) Two may
        have the same one. If both write a token to one place the last is stored here, any in kernels.
    cache_leftpad : (batch,), any integer dtype, optional
        First token of the cache that is there, at most cache_seqlens. In the order of the queries.

    Returns
    -------
    out : (batch, seqlen_q, num_heads, head_dim_v), float64
        0 where a row sees no key.
    lse : (batch, seqlen_q, num_heads), float64
        -inf where a row sees no key and there is no sink.

    Raises
    ------
    ValueError
        If shapes disagree, an option is out of range, a sequence does not fit its row of the table, or an id
        that is looked at is not that of a page. Nothing is written then.
    TypeError
        If an index array does not hold integers.
    """
    q = np.asarray(q)
    if q.ndim != 4:
        raise ValueError(f"reference.decode: q must have 4 dimensions; got {q.ndim}")
    _check_pages("decode", k_pages, v_pages)
    (batch, seqlen_q, _, head_dim), (_, page_size, num_kv_heads, head_dim_v) = q.shape, v_pages.shape
    table = _integers("decode", "block_table", block_table, 2)
    row = _index("cache_batch_idx", cache_batch_idx, np.arange(batch))
    leftpad = _index("cache_leftpad", cache_leftpad, np.zeros(batch, np.int64))
    lengths = _integers("decode", "cache_seqlens", cache_seqlens, 1)
    if (k is None) != (v is None):
        raise ValueError("reference.decode: k and v must be given together; got one")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("reference.decode: rotary_cos and rotary_sin must be given together; got one")
    if k is None and rotary_cos is not None:
        raise ValueError("reference.decode: rotary_cos must come with new k and v; got none")
    k = np.zeros((batch, 0, *k_pages.shape[2:]), k_pages.dtype) if k is None else np.asarray(k)
    v = np.zeros((batch, 0, *v_pages.shape[2:]), v_pages.dtype) if v is None else np.asarray(v)
    seqlen_new = k.shape[1] if k.ndim == 4 else 0
    num_sequences = batch if cache_batch_idx is None else len(table)
    for argument, got, expected in (
        ("k_pages.shape[3]", k_pages.shape[3], head_dim),
        ("block_table.shape[0]", table.shape[0], num_sequences),
        ("cache_seqlens.shape[0]", lengths.shape[0], batch),
        ("k.shape", k.shape, (batch, seqlen_new, num_kv_heads, head_dim)),
        ("v.shape", v.shape, (batch, seqlen_new, num_kv_heads, head_dim_v)),
    ):
        if got != expected:
            raise ValueError(f"reference.decode: {argument} must be {expected}; got {got}")

    _within("cache_batch_idx", row, len(table) - 1, "num_sequences - 1")
    table = table[row]
    room = table.shape[1] * page_size - seqlen_new
    _within("cache_seqlens", lengths, room, "max_pages_per_seq * page_size - seqlen_new")
    _within("cache_leftpad", leftpad, lengths, "cache_seqlens")

    slopes = None if alibi_slopes is None else np.asarray(alibi_slopes)
    options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap}
    options |= {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    with _named("decode", (r"\b(cos|sin)\b", r"rotary_\1")):
        out, lse = attention(q, k[:, :0], v[:, :0], alibi_slopes=slopes, **options)  # over no keys
        if rotary_cos is not None and rotary_sin is not None:
            moving = causal or tuple(window) != (-1, -1)
            q_at, k_at = np.arange(seqlen_q) * moving, np.arange(seqlen_new)
            q, k = (
                apply_rotary(x, rotary_cos, rotary_sin, lengths[:, None] + i, interleaved=rotary_interleaved)
                for x, i in ((q, q_at), (k, k_at))
            )

    total = lengths + seqlen_new
    first = _first_seen(seqlen_q, total, window, leftpad)
    oldest = np.minimum(first, lengths) if seqlen_new else first  # of the tokens whose pages are looked up
    for b in np.flatnonzero(oldest < total):
        for j in range(oldest[b] // page_size, -(-total[b] // page_size)):
            _within(f"block_table[{row[b]}, {j}]", table[b, j], len(k_pages) - 1, "num_pages - 1")

    slot_mapping = slots(table, lengths, seqlen_new, page_size).ravel()
    k, v = (x.reshape(len(slot_mapping), *x.shape[2:]) for x in (k, v))
    append_kv(k, v, k_pages, v_pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    for b in np.flatnonzero(first < total):
        keys, values = (_tokens_between(pages, table[b], first[b], total[b]) for pages in (k_pages, v_pages))
        slopes_b = slopes[b : b + 1] if slopes is not None and slopes.ndim == 2 else slopes
        state = attention(q[b : b + 1], keys[None], values[None], alibi_slopes=slopes_b, **options)
        out[b], lse[b] = state[0][0], state[1][0]
    return out, lse


def _index(name: str, values: ArrayLike | None, default: NDArray) -> NDArray:
    """Return one integer per query row."""
    if values is None:
        return default
    values = _integers("decode", name, values, 1)
    if values.shape != default.shape:
        raise ValueError(f"reference.decode: {name}.shape must be {default.shape}; got {values.shape}")
    return values


def _within(name: str, values: NDArray, most: NDArray | int, rule: str) -> None:
    values, most = np.broadcast_arrays(values, most)
    for value, limit in zip(values.ravel(), most.ravel()):
        if not 0 <= value <= limit:
            raise ValueError(f"reference.decode: {name} must be within 0 and {rule} ({limit}); got {value}")
