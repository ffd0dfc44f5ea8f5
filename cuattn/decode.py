"""Decoding: one or a few query tokens of each sequence attend to its tokens in a paged cache."""

from __future__ import annotations

import operator
from typing import Any

from cuattn import _check, _check_decode, _check_scale, _check_scores, _plan_decode, _plan_decode_mma, reference
from cuattn._call import Call, rounded
from cuattn._check_scale import Factors
from cuattn._dims import UNBOUNDED
from cuattn._plan_decode import DecodePlan
from cuattn.state import AttentionState

_SPLIT_INPUTS = operator.itemgetter(
    "q", "k_pages", "v_pages", "block_table", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "k", "v",
    "rotary_cos", "rotary_sin", "alibi_slopes", "sinks", "k_scale", "v_scale",
)  # fmt: skip
_MERGE_INPUTS = operator.itemgetter("cache_seqlens", "cache_batch_idx", "sinks")
_MMA_MERGE_INPUTS = operator.itemgetter("sinks", "v_scale")


def decode(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, cache_seqlens: Any, *, k: Any = None, v: Any = None,
    rotary_cos: Any = None, rotary_sin: Any = None, rotary_interleaved: bool = False, sm_scale: float | None = None,
    causal: bool = True, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    sinks: Any = None, k_scale: Any = None, v_scale: Any = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, return_state: bool = False, out: Any = None, lse: Any = None, workspace: Any = None,
    plan: DecodePlan | None = None,
) -> Any:  # fmt: skip
    """Attention of the newest query tokens of each sequence over its pages, split along the keys.

    With `k` and `v`, the tokens of this step are written to the pages before, in the same launch, and attended to.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32
        The last seqlen_q positions of each sequence. head_dim 1 to 512, contiguous along it, other strides at will.
    k_pages, v_pages : array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v), q's dtype or float8_e4m3fn
        The cache; num_heads is a multiple of num_kv_heads. Strides as for q, each its own. Only tokens that some query
        sees are read. Written to, in place, if `k` and `v` are given.
    block_table : array, (batch, max_pages_per_seq), int32 or int64
        Page ids of each sequence; (num_sequences, max_pages_per_seq) with `cache_batch_idx`.
    cache_seqlens : array, (batch,), int32 or int64
        Tokens of each sequence in the cache, without the new ones (`PagedKVCache.cache_seqlens` with ``num_new``); read
        on the device.
    k : array, (batch, seqlen_new, num_kv_heads, head_dim), of q's dtype, optional
        Keys of new tokens: token i becomes token ``cache_seqlens + i``. seqlen_new may differ from seqlen_q. Stored
        bit for bit as `append_kv` stores them: ``k / k_scale`` in float8 pages.
    v : array, (batch, seqlen_new, num_kv_heads, head_dim_v), of q's dtype, optional
        Values of new tokens; only together with `k`.
    rotary_cos, rotary_sin : array, (max_positions, rotary_dim / 2), float32 or q's dtype, optional
        Rotate `k` before it is stored, and `q`, as `apply_rotary`; only together with `k` and `v`. New token i stands
        at position ``cache_seqlens + i``, and so does query i if `causal` or `window` is in force, else every query at
        ``cache_seqlens``. With `cache_leftpad` too these are places in the cache.
    rotary_interleaved : bool
        Whether the features 2d and 2d + 1 make a pair, or (the default) d and d + rotary_dim / 2.
    sm_scale : float, optional
        Factor on q.k. Default ``head_dim ** -0.5``.
    causal : bool
        Query i sees key j only if ``j <= i + length - seqlen_q``, where length counts the new tokens too.
    window : (left, right)
        Keys seen before and after the position of the query, both ends included; -1 is unbounded.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``, before ALiBi. 0 is off.
    alibi_slopes : array, (num_heads,) or (batch, num_heads), float32, optional
        Scores lose ``slope * |i + length - seqlen_q - j|``.
    sinks : array, (num_heads,), float32, optional
        One extra score per head whose value row is 0; part of lse.
    k_scale, v_scale : float, or array, () or (1,) or (num_kv_heads,), float32, optional
        Factors on the cached keys and values.
    cache_batch_idx : array, (batch,), int32 or int64, optional
        The row of block_table that each sequence has its cache in; all else is in the order of q.
    cache_leftpad : array, (batch,), int32 or int64, optional
        The first token of each sequence that is there, at most `cache_seqlens`.
    return_state : bool
        Return lse too.
    out, lse : array, optional
        Where to put the result; apart from all other arrays.
    workspace : array, (n,), float32, optional
        Scratch memory of `decode_workspace_size` bytes or more, beginning at a multiple of 16 bytes; allocated if it is
        None, but not while a CUDA graph is captured, whose replays would use memory that others have got.
        NumPy arrays need none.
    plan : DecodePlan, optional
        From `plan_decode`, for arrays of these shapes, strides, dtypes and alignments.

    Returns
    -------
    array or AttentionState
        `out` (batch, seqlen_q, num_heads, head_dim_v) in q's dtype, 0 where a row sees no key; with `return_state` also
        `lse` (batch, seqlen_q, num_heads) float32, natural logarithm, -inf where there is no key and no sink.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides, devices or options don't fit, or arrays overlap; nothing is written then. Page ids
        that are read, lengths and batch indices out of range are refused for NumPy arrays, and on a device only under
        ``checking("values")``; otherwise such a page has no keys and takes none, and neither has a sequence whose
        length is negative or whose batch index is wrong. New tokens beyond the row of the table or beyond the rows of
        rotary_cos are left out, and longer sequences are cut. A query beyond the rows of rotary_cos is not rotated. A
        place that two new tokens have holds either.

    See Also
    --------
    cuattn.reference.decode : the definition, which NumPy arrays get.
    cuattn.paged.append_kv, cuattn.rotary.apply_rotary : what happens to new tokens, as calls of their own.

    Notes
    -----
    A sequence is cut into splits, a function of its own length: its bits don't depend on the batch, on the width of the
    table or on the order of pages. On tensor cores (float16 and bfloat16 queries, head_dim and head_dim_v multiples of
    16 up to 256, rows of pages at multiples of 16 bytes) they are leaves of 64 or 128 tokens, twice that beyond 1024
    leaves and so on, merged in a fixed tree; how many of them are computed in one go follows from the work of the batch
    and changes no bit. Else there are at most ``min(max(384 // num_kv_heads, 16), 128)`` of at least 256 tokens. Reads
    ``sum(cache_seqlens) * num_kv_heads * (head_dim + head_dim_v) * itemsize`` bytes.
    """
    call, factors, scaled = _call("decode", {
        "q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table, "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "k": k, "v": v, "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin, "alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
        "out": out, "lse": lse, "workspace": workspace,
    })  # fmt: skip
    dims = _check_decode.decode(call, causal, window, rotary_interleaved, scaled, call.checks_values())
    options = _check_scores.options("decode", dims.head_dim, sm_scale, softcap, factors)
    if call.engine is not None:
        plan = _fitting(plan, call, dims)
    rows = (dims.batch, dims.seqlen_q, dims.num_heads)
    out = call.empty((*rows, dims.head_dim_v), dims.dtype) if out is None else call.arrays["out"]
    lse = call.empty(rows, _check.FLOAT32) if lse is None and return_state else call.arrays["lse"]
    if call.engine is None:
        window = min(window[0], UNBOUNDED), min(window[1], UNBOUNDED)
        given = {"sm_scale": sm_scale, "causal": causal, "window": window, "softcap": softcap}
        given["rotary_interleaved"] = rotary_interleaved
        _by_definition(call, factors, given, out, lse)
    elif (dims.num_rows or dims.num_new) and plan is not None:
        _run(call, plan, options, out, lse)
    return AttentionState(out, lse) if return_state else out


def plan_decode(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, cache_seqlens: Any, *, k: Any = None, v: Any = None,
    rotary_cos: Any = None, rotary_sin: Any = None, rotary_interleaved: bool = False, causal: bool = True,
    window: tuple[int, int] = (-1, -1), alibi_slopes: Any = None, sinks: Any = None, k_scale: Any = None,
    v_scale: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, out: Any = None, lse: Any = None,
) -> DecodePlan:  # fmt: skip
    """The plan of a call of `decode` with device arrays like these; what they hold is not looked at.

    Parameters
    ----------
    q, k_pages, v_pages, block_table, cache_seqlens : array
        As for `decode`.
    k, v, rotary_cos, rotary_sin, rotary_interleaved, causal, window, alibi_slopes, sinks : optional
        As for `decode`.
    k_scale, v_scale, cache_batch_idx, cache_leftpad, out, lse : optional
        As for `decode`.

    Returns
    -------
    DecodePlan
        `workspace_bytes` of it says how much scratch memory the call takes.

    Raises
    ------
    TypeError, ValueError
        As `decode`; also if the arrays are on the host, where nothing is planned.
    """
    call, _, scaled = _call("plan_decode", {
        "q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table, "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "k": k, "v": v, "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin, "alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
        "out": out, "lse": lse,
    })  # fmt: skip
    dims = _check_decode.decode(call, causal, window, rotary_interleaved, scaled, False)
    if call.engine is None:
        raise ValueError("plan_decode: arrays must be on a device; got NumPy arrays, which need no plan")
    return _plan_decode.plan_decode(dims, call.info())


def decode_workspace_size(
    batch: int, seqlen_q: int, num_heads: int, num_kv_heads: int, head_dim: int, max_tokens: int
) -> int:
    """Bytes of scratch memory that are enough for `decode`, whatever kernel runs; `plan_decode` knows the exact number.

    Parameters
    ----------
    batch, seqlen_q, num_heads, num_kv_heads : int
        Sizes of the call.
    head_dim : int
        The larger of head_dim and head_dim_v.
    max_tokens : int
        What a row of the table holds: ``block_table.shape[1] * page_size``.

    Returns
    -------
    int
        A multiple of 4; 0 up to 64 tokens. `plan_decode` asks for less on most devices.

    Raises
    ------
    TypeError, ValueError
        If a size is no integer, is negative, or is not what `decode` takes.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> size = cuattn.decode_workspace_size(2, 1, num_heads=8, num_kv_heads=2, head_dim=64, max_tokens=4096)
    >>> workspace = np.empty(size // 4, np.float32)                  # of cupy, for arrays on a device
    """
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    _check_decode.sizes("decode_workspace_size", {**sizes, "head_dim": head_dim, "max_tokens": max_tokens})
    splits = _plan_decode.splits_within(max_tokens, num_kv_heads)
    group = num_heads // max(num_kv_heads, 1)
    return max(
        _plan_decode.workspace_bytes(batch * seqlen_q * num_heads, head_dim, splits),
        _plan_decode_mma.most_workspace_bytes(batch, seqlen_q, num_kv_heads, group, max_tokens, head_dim),
    )


def _call(function: str, arrays: dict[str, Any]) -> tuple[Call, Factors, bool]:
    """The call, the scales that are numbers, and whether there is a scale."""
    scaled = arrays["k_scale"] is not None or arrays["v_scale"] is not None
    factors = _check_scale.by_value(function, arrays)
    return Call(function, arrays), factors, scaled


def _fitting(plan: DecodePlan | None, call: Call, dims: Any) -> DecodePlan:
    if plan is None:
        plan = _plan_decode.plan_decode(dims, call.info())
    else:
        _check.plan_fits(call, plan, dims)
    workspace = call.specs["workspace"]
    if workspace is not None:
        _check_decode.workspace(call.function, workspace, plan.workspace_bytes // 4)
    elif plan.workspace_bytes and call.capturing():
        rule = "workspace must be given while a CUDA graph is captured: replays would use what others get since"
        raise ValueError(f"decode: {rule}; got None")
    return plan


def _run(call: Call, plan: DecodePlan, options: _check_scores.Options, out: Any, lse: Any) -> None:
    arrays = call.arrays
    workspace = None
    if plan.workspace_bytes:
        workspace = arrays["workspace"]
        if workspace is None:
            workspace = call.empty((plan.workspace_bytes // 4,), _check.FLOAT32)
    call.launch(plan.split, [*_SPLIT_INPUTS(arrays), *options, out, lse, workspace, plan.layout])
    if plan.merge is not None:
        inputs = [*_MMA_MERGE_INPUTS(arrays), options.v_scale] if plan.mma else _MERGE_INPUTS(arrays)
        call.launch(plan.merge, [workspace, *inputs, out, lse, plan.layout])


def _by_definition(call: Call, factors: Factors, options: dict[str, Any], out: Any, lse: Any) -> None:
    arrays = call.arrays
    for name in ("k", "v", "rotary_cos", "rotary_sin", "alibi_slopes", "sinks", "cache_batch_idx", "cache_leftpad"):
        options[name] = arrays[name]
    for name, factor in zip(("k_scale", "v_scale"), factors):
        options[name] = _check_scale.as_defined(arrays[name], factor)
    state = reference.decode(
        arrays["q"], arrays["k_pages"], arrays["v_pages"], arrays["block_table"], arrays["cache_seqlens"], **options
    )
    out[...] = rounded(state[0], out.dtype)
    if lse is not None:
        lse[...] = rounded(state[1], lse.dtype)
