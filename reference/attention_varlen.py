"""Attention of several sequences of their own lengths, packed without padding, or with keys in pages.

The definition is one sentence: cut the packed arrays into sequences and call `attention` on each. What
flash_attn_varlen_func does in one kernel:

1. Sequence b has the query rows from ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``, and so on for keys::

       lengths 2, 0, 3    ->    cu_seqlens = [0, 2, 2, 5]

   Rows before the first and behind the last entry belong to no sequence. They are not read, and in the result
   they are what a row without keys is.

2. ``seqused_k`` says how many keys of each sequence are there; the rest of its rows are not read. It counts in
   the positions: query i of a sequence stands at ``i + seqused_k - seqlen_q``.

3. With ``block_table`` keys and values lie in pages, see ``paged.py``, and `cu_seqlens_k` only says how long
   each sequence is; where ``seqused_k`` says it, it may be None. Chunked prefill, prefix reuse and speculative
   tokens are all this: the newest tokens of a sequence against all of it, which has been stored before.

4. Entries of the block table are looked at only for keys that some query sees, as in ``decode.py``.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .attention import _first_seen, attention
from .paged import _check_pages, _integers, _named, _tokens_between
from .state import State, empty_state


def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None,
    *,
    block_table: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> State:
    """Attention of every sequence of a packed batch over its own keys, as a state.

    Parameters
    ----------
    q : (total_q, num_heads, head_dim), any float dtype
        Query rows of all sequences, each the last positions of its sequence.
    k : (total_k, num_kv_heads, head_dim), any float dtype
        Keys; with block_table (num_pages, page_size, num_kv_heads, head_dim).
    v : (total_k, num_kv_heads, head_dim_v), any float dtype
        Values; with block_table pages too.
    cu_seqlens_q : (batch + 1,), any integer dtype
        Where the query rows of each sequence begin; ascending, within 0 and total_q.
    cu_seqlens_k : (batch + 1,), any integer dtype, or None
        The same for keys, within 0 and total_k. Over pages only differences count, and None leaves it to seqused_k.
    block_table : (batch, max_pages_per_seq), any integer dtype, optional
        Page ids of each sequence.
    seqused_k : (batch,), any integer dtype, optional
        Keys of each sequence that are there, at most as many as it has rows. Default all.
    causal, sm_scale, window, softcap, sinks, k_scale, v_scale
        As in `attention`.
    alibi_slopes : (num_heads,) or (batch, num_heads), optional
        As in `attention`.

    Returns
    -------
    out : (total_q, num_heads, head_dim_v), float64
        0 where a row sees no key or belongs to no sequence.
    lse : (total_q, num_heads), float64
        -inf where a row belongs to no sequence, or sees no key and there is no sink.

    Raises
    ------
    ValueError
        If shapes disagree, an option is out of range, offsets descend or leave their array, or an id that is
        looked at is not that of a page.
    TypeError
        If an index array does not hold integers.
    """
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    paged = block_table is not None
    for name, x, ndim in (("q", q, 3), ("k", k, 4 if paged else 3), ("v", v, 4 if paged else 3)):
        if x.ndim != ndim:
            raise ValueError(f"reference.attention_varlen: {name} must have {ndim} dimensions; got {x.ndim}")
    if not paged and len(v) != len(k):
        raise ValueError(f"reference.attention_varlen: v.shape[0] must equal total_k of k ({len(k)}); got {len(v)}")
    starts_q = _offsets("cu_seqlens_q", cu_seqlens_q, len(q), "total_q")
    batch = len(starts_q) - 1
    lengths, starts_k = _keys(cu_seqlens_k, seqused_k, batch, None if paged else len(k))
    table = None if block_table is None else _table(k, v, block_table, lengths)
    slopes = None if alibi_slopes is None else np.asarray(alibi_slopes)
    num_heads = q.shape[1]
    if slopes is not None and slopes.shape not in ((num_heads,), (batch, num_heads)):
        allowed = f"({num_heads},) or ({batch}, {num_heads})"
        raise ValueError(f"reference.attention_varlen: alibi_slopes.shape must be {allowed}; got {slopes.shape}")
    slopes = np.broadcast_to(0.0 if slopes is None else slopes, (batch, num_heads))
    options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap}
    options |= {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}

    packed = "q" if paged else "qkv"  # those with an axis less than attention has
    with _named("attention_varlen", (rf"\b([{packed}])[.]shape\[(\d)\]", _one_axis_less)):
        no_k, no_v = (np.zeros((1, 0, *x.shape[-2:]), x.dtype) for x in (k, v))
        attention(q[None, :0], no_k, no_v, **options)  # refuses what no sequence can have
        out, lse = empty_state(len(q), num_heads, v.shape[-1])
        for b in range(batch):
            rows = slice(starts_q[b], starts_q[b + 1])
            if table is None:
                keys, values = (x[starts_k[b] : starts_k[b] + lengths[b]] for x in (k, v))
            else:
                first = int(_first_seen(starts_q[b + 1] - starts_q[b], lengths[b], window))
                keys, values = (_in_pages(x, table[b], b, first, lengths[b]) for x in (k, v))
            state = attention(q[None, rows], keys[None], values[None], alibi_slopes=slopes[b], **options)
            out[rows], lse[rows] = state[0][0], state[1][0]
    return out, lse


def _offsets(name: str, values: ArrayLike, total: int | None, rule: str) -> NDArray:
    """Return ascending offsets, all within 0 and total."""
    offsets = _integers("attention_varlen", name, values, 1)
    if len(offsets) == 0:
        raise ValueError(f"reference.attention_varlen: {name}.shape must be (batch + 1,); got (0,)")
    ends = [0, *offsets.tolist(), *([] if total is None else [total])]
    if ends != sorted(ends):
        most = "" if total is None else f" and {rule} ({total})"
        raise ValueError(
            f"reference.attention_varlen: {name} must ascend {'from' if total is None else 'within'} 0{most};"
            f" got {offsets.tolist()}"
        )
    return offsets


def _keys(
    cu_seqlens_k: ArrayLike | None, seqused_k: ArrayLike | None, batch: int, total: int | None
) -> tuple[NDArray, NDArray]:
    """Return how many keys each sequence has, and its first row; `total` None: they lie in pages."""
    if cu_seqlens_k is None and (total is not None or seqused_k is None):
        raise ValueError("reference.attention_varlen: cu_seqlens_k may be None only with block_table and seqused_k")
    starts = np.zeros(batch + 1, np.int64)
    if cu_seqlens_k is not None:
        starts = _offsets("cu_seqlens_k", cu_seqlens_k, total, "total_k")
    if starts.shape != (batch + 1,):
        raise ValueError(f"reference.attention_varlen: cu_seqlens_k.shape must be ({batch + 1},); got {starts.shape}")
    lengths = np.diff(starts)
    if seqused_k is not None:
        used = _integers("attention_varlen", "seqused_k", seqused_k, 1)
        if used.shape != (batch,):
            raise ValueError(f"reference.attention_varlen: seqused_k.shape must be ({batch},); got {used.shape}")
        for b, (n, most) in enumerate(zip(used, lengths)):
            if n < 0 or (cu_seqlens_k is not None and n > most):
                rule = f"within 0 and {most}" if cu_seqlens_k is not None else "at least 0"
                raise ValueError(f"reference.attention_varlen: seqused_k[{b}] must be {rule}; got {n}")
        lengths = used
    return lengths, starts


def _table(k: NDArray, v: NDArray, block_table: ArrayLike, lengths: NDArray) -> NDArray:
    """Return the block table, or refuse one that the lengths do not fit."""
    _check_pages("attention_varlen", k, v, ("k", "v"))
    table = _integers("attention_varlen", "block_table", block_table, 2)
    if len(table) != len(lengths):
        rule = f"block_table.shape[0] must be batch ({len(lengths)})"
        raise ValueError(f"reference.attention_varlen: {rule}; got {len(table)}")
    room = table.shape[1] * k.shape[1]
    for b in np.flatnonzero(lengths > room)[:1]:
        rule = f"sequence {b} must fit its row of block_table ({room} tokens)"
        raise ValueError(f"reference.attention_varlen: {rule}; got {lengths[b]}")
    return table


def _in_pages(pages: NDArray, row: NDArray, b: int, first: int, past: int) -> NDArray:
    """Return tokens first .. past - 1 of sequence b, whose page ids are `row`."""
    if first >= past:
        return pages[:0, 0]
    for j in range(first // pages.shape[1], -(-int(past) // pages.shape[1])):
        if not 0 <= row[j] < len(pages):
            rule = f"block_table[{b}, {j}] must be within 0 and {len(pages) - 1}"
            raise ValueError(f"reference.attention_varlen: {rule}; got {row[j]}")
    return _tokens_between(pages, row, first, past)


def _one_axis_less(match: re.Match[str]) -> str:
    return f"{match[1]}.shape[{int(match[2]) - 1}]"
