"""Decoding: one or a few query tokens of each sequence attend to its tokens in a paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn import _check, _check_decode, _plan_decode, reference
from cuattn._call import Call
from cuattn._plan_decode import DecodePlan
from cuattn._settings import checks_values
from cuattn.state import AttentionState


def decode(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, cache_seqlens: Any, *, sm_scale: float | None = None,
    causal: bool = True, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    sinks: Any = None, k_scale: Any = None, v_scale: Any = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, return_state: bool = False, out: Any = None, lse: Any = None, workspace: Any = None,
    plan: DecodePlan | None = None,
) -> Any:  # fmt: skip
    """Attention of the newest query tokens of each sequence over its pages, split along the keys.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32
        The last seqlen_q positions of each sequence. head_dim 1 to 512, contiguous along it, other strides at will.
    k_pages, v_pages : array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v), q's dtype or float8_e4m3fn
        The cache; num_heads is a multiple of num_kv_heads. Strides as for q, each its own. Only tokens that some query
        sees are read.
    block_table : array, (batch, max_pages_per_seq), int32 or int64
        Page ids of each sequence; (num_sequences, max_pages_per_seq) with `cache_batch_idx`.
    cache_seqlens : array, (batch,) or (num_sequences,), int32 or int64
        Tokens of each sequence, read on the device.
    sm_scale : float, optional
        Factor on q.k. Default ``head_dim ** -0.5``.
    causal : bool
        Query i sees key j only if ``j <= i + cache_seqlens - seqlen_q``.
    window : (left, right)
        Keys seen before and after the position of the query, both ends included; -1 is unbounded.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``, before ALiBi. 0 is off.
    alibi_slopes : array, (num_heads,) or (batch, num_heads), float32, optional
        Scores lose ``slope * |i + cache_seqlens - seqlen_q - j|``.
    sinks : array, (num_heads,), float32, optional
        One extra score per head whose value row is 0; part of lse.
    k_scale, v_scale : float, or array, () or (1,) or (num_kv_heads,), float32, optional
        Factors on the cached keys and values.
    cache_batch_idx : array, (batch,), int32 or int64, optional
        The row of block_table and cache_seqlens that belongs to each row of q.
    cache_leftpad : array, (batch,), int32 or int64, optional
        The first token of each sequence that is there.
    return_state : bool
        Return lse too.
    out, lse : array, optional
        Where to put the result; apart from all other arrays.
    workspace : array, (n,), float32, optional
        Scratch memory of `decode_workspace_size` bytes or more; allocated if it is needed and not given.
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
        If dtypes, shapes, strides, devices or options don't fit. Page ids, lengths and batch indices out of range are
        refused only under ``checking("values")``; otherwise such a page or sequence has no keys, and what is longer
        than the row of the table is cut.

    See Also
    --------
    cuattn.reference.decode : the definition, which NumPy arrays get.

    Notes
    -----
    A sequence is cut into at most ``min(max(256 // num_kv_heads, 32), 128)`` splits of at least 256 tokens, a function
    of its own length: its bits don't depend on the batch, on the width of the table or on the order of pages. Reads
    ``sum(cache_seqlens) * num_kv_heads * (head_dim + head_dim_v) * itemsize`` bytes.
    """
    call = _call("decode", q, k_pages, v_pages, block_table, cache_seqlens, alibi_slopes, sinks, k_scale, v_scale,
                 cache_batch_idx, cache_leftpad, out, lse, workspace)  # fmt: skip
    dims = _check_decode.decode(call, causal, window, checks_values() or call.engine is None)
    options = _check_decode.options("decode", dims.head_dim, sm_scale, softcap, k_scale, v_scale)
    if call.engine is not None:
        plan = _fitting(plan, call, dims)
    rows = (dims.batch, dims.seqlen_q, dims.num_heads)
    out = call.empty((*rows, dims.head_dim_v), dims.dtype) if out is None else call.arrays["out"]
    lse = call.empty(rows, _check.FLOAT32) if lse is None and return_state else call.arrays["lse"]
    if call.engine is None:
        given = {"sm_scale": sm_scale, "causal": causal, "window": window, "softcap": softcap}
        _by_definition(call, {"k_scale": k_scale, "v_scale": v_scale}, given, out, lse)
    elif dims.num_rows and plan is not None:
        _run(call, plan, options, out, lse)
    return AttentionState(out, lse) if return_state else out


def plan_decode(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, cache_seqlens: Any, *, causal: bool = True,
    window: tuple[int, int] = (-1, -1), alibi_slopes: Any = None, sinks: Any = None, k_scale: Any = None,
    v_scale: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, out: Any = None, lse: Any = None,
) -> DecodePlan:  # fmt: skip
    """The plan of a call of `decode` with device arrays like these; what they hold is not looked at.

    Parameters
    ----------
    q, k_pages, v_pages, block_table, cache_seqlens : array
        As for `decode`.
    causal, window, alibi_slopes, sinks, k_scale, v_scale, cache_batch_idx, cache_leftpad, out, lse : optional
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
    call = _call("plan_decode", q, k_pages, v_pages, block_table, cache_seqlens, alibi_slopes, sinks, k_scale, v_scale,
                 cache_batch_idx, cache_leftpad, out, lse, None)  # fmt: skip
    dims = _check_decode.decode(call, causal, window, False)
    if call.engine is None:
        raise ValueError("plan_decode: arrays must be on a device; got NumPy arrays, which need no plan")
    return _plan_decode.plan_decode(dims, call.info())


def decode_workspace_size(
    batch: int, seqlen_q: int, num_heads: int, num_kv_heads: int, head_dim_v: int, max_tokens: int
) -> int:
    """Bytes of scratch memory that `decode` takes.

    Parameters
    ----------
    batch, seqlen_q, num_heads, num_kv_heads, head_dim_v : int
        Sizes of the call.
    max_tokens : int
        What a row of the table holds: ``block_table.shape[1] * page_size``.

    Returns
    -------
    int
        A multiple of 4; 0 up to 256 tokens. It does not grow beyond that of 128 splits.
    """
    splits = _plan_decode.splits_within(max_tokens, num_kv_heads)
    return _plan_decode.workspace_bytes(batch * seqlen_q * num_heads, head_dim_v, splits)


def _call(
    function: str, q: Any, k_pages: Any, v_pages: Any, block_table: Any, cache_seqlens: Any, alibi_slopes: Any,
    sinks: Any, k_scale: Any, v_scale: Any, cache_batch_idx: Any, cache_leftpad: Any, out: Any, lse: Any,
    workspace: Any,
) -> Call:  # fmt: skip
    k_scale, v_scale = (None if _check_decode.is_number(s) else s for s in (k_scale, v_scale))
    arrays = {
        "q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": block_table, "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "alibi_slopes": alibi_slopes,
        "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "out": out, "lse": lse, "workspace": workspace,
    }  # fmt: skip
    return Call(function, arrays)


def _fitting(plan: DecodePlan | None, call: Call, dims: Any) -> DecodePlan:
    if plan is None:
        plan = _plan_decode.plan_decode(dims, call.info())
    elif plan.dims is not dims and vars(plan.dims) != vars(dims):
        differ = [name for name, value in vars(dims).items() if getattr(plan.dims, name) != value]
        raise ValueError(f"decode: plan must be for a call like this one; got one with other {', '.join(differ)}")
    _check_decode.workspace(call, plan.workspace_bytes // 4)
    return plan


def _run(call: Call, plan: DecodePlan, options: _check_decode.Options, out: Any, lse: Any) -> None:
    arrays = call.arrays
    workspace = None
    if plan.merge is not None:
        workspace = arrays["workspace"]
        if workspace is None:
            workspace = call.empty((plan.workspace_bytes // 4,), _check.FLOAT32)
    names = ("q", "k_pages", "v_pages", "block_table", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
             "alibi_slopes", "sinks", "k_scale", "v_scale")  # fmt: skip
    call.launch(plan.split, [*(arrays[n] for n in names), *options, out, lse, workspace, plan.layout])
    if plan.merge is not None:
        inputs = (arrays[n] for n in ("cache_seqlens", "cache_batch_idx", "sinks"))
        call.launch(plan.merge, [workspace, *inputs, out, lse, plan.layout])


def _by_definition(call: Call, scales: dict[str, Any], options: dict[str, Any], out: Any, lse: Any) -> None:
    arrays = call.arrays
    for name in ("alibi_slopes", "sinks", "cache_batch_idx", "cache_leftpad"):
        options[name] = arrays[name]
    for name, given in scales.items():
        options[name] = given.reshape(()) if isinstance(given, np.ndarray) and given.shape == (1,) else given
    state = reference.decode(
        arrays["q"], arrays["k_pages"], arrays["v_pages"], arrays["block_table"], arrays["cache_seqlens"], **options
    )
    with np.errstate(over="ignore"):  # beyond the dtype is inf, as on a device
        out[...] = state[0].astype(out.dtype)
        if lse is not None:
            lse[...] = state[1].astype(np.float32)
