"""Attention of many queries: dense arrays, packed sequences, or keys in pages."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from cuattn import _check, _check_attention, _check_scale, _check_scores, _plan_attention, _tensor_map, reference
from cuattn._call import Call, rounded
from cuattn._dims import UNBOUNDED
from cuattn._dims_attention import AttentionDims
from cuattn._plan_attention import AttentionPlan
from cuattn.state import AttentionState

_INPUTS = operator.itemgetter(
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "mask", "alibi_slopes", "sinks",
    "k_scale", "v_scale",
)  # fmt: skip

_SM90_INPUTS = operator.itemgetter(
    "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks", "k_scale", "v_scale"
)
_MAYBE_ABSENT = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "mask", "k_scale", "v_scale")


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, sm_scale: float | None = None, window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, sinks: Any = None, mask: Any = None, k_scale: Any = None,
    v_scale: Any = None, return_state: bool = False, out: Any = None, lse: Any = None,
    plan: AttentionPlan | None = None,
) -> Any:  # fmt: skip
    """Softmax attention of every query over the keys that it sees.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32
        Queries: the last seqlen_q positions of each sequence, so query i stands at ``i + seqlen_k - seqlen_q``.
    k : array, (batch, seqlen_k, num_kv_heads, head_dim), dtype of q or float8_e4m3fn
        Keys. num_heads is a multiple of num_kv_heads; query head h reads kv head ``h // (num_heads // num_kv_heads)``.
    v : array, (batch, seqlen_k, num_kv_heads, head_dim_v), dtype of k
        Values.
    causal : bool, optional
        A query sees no key behind its position.
    sm_scale : float, optional
        Factor on q.k. Default ``head_dim ** -0.5``.
    window : (left, right), optional
        Keys seen before and after the position of a query, both ends included; -1 is unbounded.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``; 0 is off.
    alibi_slopes : array, (num_heads,) or (batch, num_heads), float32, optional
        Scores lose ``slope * distance``, after softcap.
    sinks : array, (num_heads,), float32, optional
        One more score for each head, whose value is 0.
    mask : array, bool or uint8, optional
        True keeps a key; causal and window must keep it too. bool broadcasts to (batch, num_heads, seqlen_q, seqlen_k);
        uint8, eight keys a byte as of ``numpy.packbits(mask, axis=-1, bitorder="little")``, to (batch, num_heads,
        seqlen_q, ceil(seqlen_k / 8)).
    k_scale, v_scale : float or array, () or (1,) or (num_kv_heads,), float32, optional
        Factors on k and v.
    return_state : bool, optional
        Whether to return the state and not only its `out`.
    out : array, (batch, seqlen_q, num_heads, head_dim_v), dtype of q, optional
        Where the result goes.
    lse : array, (batch, seqlen_q, num_heads), float32, optional
        Where the natural logarithm of the sum of exp(score) goes.
    plan : AttentionPlan, optional
        From `plan_attention` with arrays like these; saves the time of choosing it.

    Returns
    -------
    array or AttentionState
        `out`, 0 where a query sees no key; with `return_state` also `lse`, -inf there if there is no sink.

    Raises
    ------
    TypeError, ValueError
        If types, shapes, strides, devices or options don't fit, or arrays overlap; nothing is written then.

    See Also
    --------
    cuattn.reference.attention : the definition, which NumPy arrays get.

    Notes
    -----
    Arrays may have any strides, but for the last axis of q, k, v and out, which is contiguous. What a query does not
    see never reaches its result, whatever it holds. The bits of a row depend on its own sequence and on the kernel, not
    on its neighbours; a printed plan says which kernel, and why. An infinite value that a query sees gives infinity, or
    NaN where its weight is 0. Names are those of flash_attn_func. In a CUDA graph work is dealt better after one call.
    """
    call, factors = _call("attention", {
        "q": q, "k": k, "v": v, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale,
        "v_scale": v_scale, "out": out, "lse": lse,
    })  # fmt: skip
    dims = _check_attention.attention(call, causal, window, softcap)
    given = {"causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap}
    return _run(call, dims, given, factors, plan, return_state)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, block_table: Any = None, seqused_k: Any = None,
    causal: bool = False, sm_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, sinks: Any = None, k_scale: Any = None, v_scale: Any = None, return_state: bool = False,
    out: Any = None, lse: Any = None, plan: AttentionPlan | None = None,
) -> Any:  # fmt: skip
    """Attention of several sequences of their own lengths, packed without padding, or with keys in pages.

    Parameters
    ----------
    q : array, (total_q, num_heads, head_dim), float16, bfloat16 or float32
        Queries of all sequences, each the last positions of its sequence.
    k : array, (total_k, num_kv_heads, head_dim), dtype of q or float8_e4m3fn
        Keys of all sequences; with block_table (num_pages, page_size, num_kv_heads, head_dim).
    v : array, (total_k, num_kv_heads, head_dim_v), dtype of k
        Values; with block_table (num_pages, page_size, num_kv_heads, head_dim_v).
    cu_seqlens_q : array, (batch + 1,), int32 or int64
        Sequence b has the rows from ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` of q.
    cu_seqlens_k : array, (batch + 1,), int32 or int64, or None
        The same of k and v. Over pages only differences count; None leaves the lengths to seqused_k.
    block_table : array, (batch, max_pages_per_seq), int32 or int64, optional
        Page ids of each sequence. Only those of keys that are seen are used; the others may be anything.
    seqused_k : array, (batch,), int32 or int64, optional
        Keys of each sequence that are there. Default all.
    causal, sm_scale, window, softcap, alibi_slopes, sinks, k_scale, v_scale : optional
        As for `attention`.
    return_state : bool, optional
        Whether to return the state and not only its `out`.
    out : array, (total_q, num_heads, head_dim_v), dtype of q, optional
        Where the result goes. Rows that belong to no sequence stay as they are; in a new array they are 0.
    lse : array, (total_q, num_heads), float32, optional
        The same for the natural logarithm of the sum of exp(score); in a new array those rows are -inf.
    plan : AttentionPlan, optional
        From `plan_attention_varlen` with arrays like these; saves the time of choosing it.

    Returns
    -------
    array or AttentionState
        `out`, 0 where a query sees no key; with `return_state` also `lse`, -inf there if there is no sink.

    Raises
    ------
    TypeError, ValueError
        If types, shapes, strides, devices or options don't fit, or arrays overlap; nothing is written then. Offsets
        that descend or leave their array, lengths beyond the keys that there are and ids of no page are refused for
        NumPy arrays, and on a device under ``checking("values")``; otherwise sequences are cut to what there is, and
        such a page has no keys.

    See Also
    --------
    cuattn.reference.attention_varlen : the definition, which NumPy arrays get.
    cuattn.decode : one or a few queries each against long sequences in pages, split along the keys.

    Notes
    -----
    Chunked prefill, prefix reuse and speculative tokens are all this call: the newest tokens of each sequence against
    all of it, stored before. Bits of a row as for `attention`. The names are those of flash_attn_varlen_func, which
    also takes the largest lengths; here the device finds them.
    """
    call, factors = _call("attention_varlen", {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_table": block_table,
        "seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
        "out": out, "lse": lse,
    })  # fmt: skip
    dims = _check_attention.attention_varlen(call, causal, window, softcap)
    given = {"causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap}
    return _run(call, dims, given, factors, plan, return_state)


def plan_attention(q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int, int] = (-1, -1),
                   softcap: float = 0.0, **arrays: Any) -> AttentionPlan:  # fmt: skip
    """The plan of a call of `attention` with device arrays like these; what they hold is not looked at.

    Parameters
    ----------
    q, k, v, causal, window, softcap : array, bool, tuple, float
        As for `attention`.
    **arrays : array, optional
        Other arrays of the call: alibi_slopes, sinks, mask, k_scale, v_scale, out, lse.

    Returns
    -------
    AttentionPlan
        Printed, it says which variant and tile runs, and why.

    Raises
    ------
    TypeError, ValueError
        As `attention`; also if the arrays are on the host, where nothing is planned.
    """
    call, _ = _call("plan_attention", {"q": q, "k": k, "v": v, **arrays})
    return _planned(call, _check_attention.attention(call, causal, window, softcap))


def plan_attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, causal: bool = False,
                          window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                          **arrays: Any) -> AttentionPlan:  # fmt: skip
    """The plan of a call of `attention_varlen` with device arrays like these.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, softcap : array, bool, tuple, float
        As for `attention_varlen`.
    **arrays : array, optional
        Other arrays of the call: block_table, seqused_k, alibi_slopes, sinks, k_scale, v_scale, out, lse.

    Returns
    -------
    AttentionPlan
        Printed, it says which variant and tile runs, and why.

    Raises
    ------
    TypeError, ValueError
        As `attention_varlen`; also if the arrays are on the host.
    """
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **arrays}
    call, _ = _call("plan_attention_varlen", given)
    return _planned(call, _check_attention.attention_varlen(call, causal, window, softcap))


def _planned(call: Call, dims: AttentionDims) -> AttentionPlan:
    if call.engine is not None:
        return _plan_attention.plan_attention(dims, call.info())
    raise ValueError(f"{call.function}: arrays must be on a device; got NumPy arrays, which need no plan")


def _call(function: str, arrays: dict[str, Any]) -> tuple[Call, _check_scale.Factors]:
    """The call, and the scales that are numbers."""
    arrays = dict.fromkeys(_MAYBE_ABSENT) | arrays
    factors = _check_scale.by_value(function, arrays)
    return Call(function, arrays), factors


def _run(
    call: Call, dims: AttentionDims, given: dict[str, Any], factors: _check_scale.Factors, plan: AttentionPlan | None,
    return_state: bool,
) -> Any:  # fmt: skip
    arrays = call.arrays
    options = _check_scores.options(call.function, dims.head_dim, given["sm_scale"], given["softcap"], factors)
    if plan is not None and call.engine is not None:
        _check.plan_fits(call, plan, dims)
    elif call.engine is not None:
        plan = _plan_attention.plan_attention(dims, call.info())
    rows = (dims.seqlen_q,) if dims.packed else (dims.batch, dims.seqlen_q)
    out, lse = arrays["out"], arrays["lse"]
    if out is None:
        out = _new(call, dims, (*rows, dims.num_heads, dims.head_dim_v), dims.dtype, 0)
    if lse is None and return_state:
        lse = _new(call, dims, (*rows, dims.num_heads), _check.FLOAT32, -np.inf)
    if call.engine is None:
        _by_definition(call, dims, factors, given, out, lse)
    elif plan is not None and dims.seqlen_q and dims.batch and dims.num_heads:
        inputs = _INPUTS(arrays)
        if plan.variant == "sm90":
            counter = call.counter() if plan.grid[0] >= plan.device.num_sms else None  # else each block has one item
            inputs = [*_maps(call, dims), counter, *_SM90_INPUTS(arrays)]
        call.launch(plan, [*inputs, *options, out, lse, plan.layout])
    return AttentionState(out, lse) if return_state else out


def _maps(call: Call, dims: AttentionDims) -> list[np.void]:
    axes = _plan_attention.tensor_axes
    return [_tensor_map.tensor_map(call.places[n][1], dims.dtype, *axes(dims, n)) for n in "qkv"]


def _new(call: Call, dims: AttentionDims, shape: tuple[int, ...], dtype: np.dtype, fill: float) -> Any:
    """A result; rows that belong to no sequence are not written, so packed ones are filled."""
    result = call.empty(shape, dtype)
    if dims.packed:
        with call.on_device():
            result[...] = fill
    return result


def _by_definition(
    call: Call, dims: AttentionDims, factors: _check_scale.Factors, given: dict[str, Any], out: Any, lse: Any
) -> None:
    arrays = call.arrays
    options = given | {"window": tuple(min(n, UNBOUNDED) for n in given["window"])}
    options |= {name: arrays[name] for name in ("alibi_slopes", "sinks")}
    for name, factor in zip(("k_scale", "v_scale"), factors):
        options[name] = _check_scale.as_defined(arrays[name], factor)
    belong: Any = ...
    if dims.packed:
        offsets = arrays["cu_seqlens_q"]
        belong = slice(int(offsets[0]), int(offsets[-1]))
        options |= {name: arrays[name] for name in ("block_table", "seqused_k")}
        packed = (arrays[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
        state = reference.attention_varlen(*packed, **options)
    else:
        mask = arrays["mask"]
        if dims.mask.bits:
            mask = np.broadcast_to(mask, (*mask.shape[:-1], -(-dims.seqlen_k // 8)))
            mask = np.unpackbits(mask, axis=-1, bitorder="little", count=dims.seqlen_k).astype(bool)
        state = reference.attention(arrays["q"], arrays["k"], arrays["v"], mask=mask, **options)
    out[belong] = rounded(state[0][belong], out.dtype)
    if lse is not None:
        lse[belong] = rounded(state[1][belong], lse.dtype)
