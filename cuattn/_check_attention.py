"""Checks of attention: a call becomes `AttentionDims`, or an exception."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cuattn import _check, _check_scale, _check_scores
from cuattn._call import ArraySpec, Call, remembered
from cuattn._check import FLOAT8, FLOATS
from cuattn._check_attention_values import attention_values
from cuattn._dims import IndexDims
from cuattn._dims_attention import ABSENT, AttentionDims, MaskDims

_MOST = 2**31 - 2**16  # keys of a sequence, rows of a kv head: kernels count them in 32 bits, some steps beyond the end
_RESULTS: dict[str, tuple[str, ...]] = {"out": (), "lse": ()}
_BITS = np.dtype(np.uint8)
MaybeSpec = ArraySpec | None

_shared_dims = functools.lru_cache(4096)(AttentionDims)  # so that a plan fits by identity


def attention(call: Call, causal: bool, window: Any, softcap: Any) -> AttentionDims:
    """Dense arrays."""
    dims = _dense(call, _check_scores.window(call.function, causal, window)[0], _is_on(softcap))
    _check.outputs(call, _RESULTS)
    if call.checks_values():
        _check_scale.positive(call)
    return dims


def attention_varlen(call: Call, causal: bool, window: Any, softcap: Any) -> AttentionDims:
    """Packed arrays, or pages. Offsets, lengths and the table are looked at under value checking."""
    dims = _varlen(call, _check_scores.window(call.function, causal, window)[0], _is_on(softcap))
    _check.outputs(call, _RESULTS)
    if call.checks_values():
        attention_values(call, dims)
    return dims


def _is_on(softcap: Any) -> bool:
    return _check_scale.is_number(softcap) and softcap != 0  # what is no number is refused with the other options


@remembered
def _dense(call: Call, window: tuple[int, int], capped: bool) -> AttentionDims:
    where = f"{call.function}: "
    q, k, v = call.required("q", "k", "v")
    _check.axes(where + "q", q, ("batch", "seqlen_q", "num_heads", "head_dim"))
    for name, array in (("k", k), ("v", v)):
        _check.axes(where + name, array, ("batch", "seqlen_k", "num_kv_heads", "head_dim"))
        if array.shape[0] != q.shape[0]:
            raise ValueError(f"{where}{name}.shape[0] must equal batch of q ({q.shape[0]}); got {array.shape[0]}")
    mask = _mask(where + "mask", call.specs["mask"], (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    return _shared(call, window, capped, q.shape[0], q.shape[1], k.shape[1], 0, 0, (ABSENT,) * 4, 0, mask)


@remembered
def _varlen(call: Call, window: tuple[int, int], capped: bool) -> AttentionDims:
    where, specs = f"{call.function}: ", call.specs
    q, k, v, cu_q = call.required("q", "k", "v", "cu_seqlens_q")
    cu_k, used, table = (specs[n] for n in ("cu_seqlens_k", "seqused_k", "block_table"))
    _check.axes(where + "q", q, ("total_q", "num_heads", "head_dim"))
    axes = ("num_pages", "page_size") if table is not None else ("total_k",)
    for name, array in (("k", k), ("v", v)):
        _check.axes(where + name, array, (*axes, "num_kv_heads", "head_dim"))
    if cu_k is None and (table is None or used is None):
        raise TypeError(f"{where}cu_seqlens_k may be None only with block_table and seqused_k")
    _check.axes(where + "cu_seqlens_q", cu_q, ("batch + 1",))
    batch = cu_q.shape[0] - 1
    if batch < 0:
        raise ValueError(f"{where}cu_seqlens_q.shape must be (batch + 1,); got (0,)")
    for name, index, size in (("cu_seqlens_k", cu_k, batch + 1), ("seqused_k", used, batch)):
        if index is not None:
            _check.shape(where + name, index, (size,), f"({'batch + 1' if size > batch else 'batch'},)")
    if table is not None:
        _check.axes(where + "block_table", table, ("batch", "max_pages_per_seq"))
        if table.shape[0] != batch:
            rule = f"block_table.shape[0] must equal batch of cu_seqlens_q ({batch})"
            raise ValueError(f"{where}{rule}; got {table.shape[0]}")
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"
    indices = tuple(_check.index(where + name, specs[name]) for name in names)
    num_pages, page_size, seqlen_k, row = 0, 0, k.shape[0], 0
    if table is not None:
        num_pages, page_size = k.shape[:2]
        if not page_size:
            raise ValueError(f"{where}k.shape[1] (page_size) must be at least 1; got 0")
        seqlen_k = table.shape[1] * page_size
        row = _check.strides_in_elements(where + "block_table", table)[0]
    return _shared(call, window, capped, batch, q.shape[0], seqlen_k, num_pages, page_size, indices, row, MaskDims())


def _shared(
    call: Call, window: tuple[int, int], capped: bool, batch: int, seqlen_q: int, seqlen_k: int, num_pages: int,
    page_size: int, indices: tuple[IndexDims, ...], table_row: int, mask: MaskDims,
) -> AttentionDims:  # fmt: skip
    """What dense and packed calls have in common; axes are counted from the last one."""
    where, specs = f"{call.function}: ", call.specs
    q, k, v = call.required("q", "k", "v")
    _check.dtype(where + "q", q, FLOATS)
    _check.head_dim(where + "q", q)
    for name, array in (("k", k), ("v", v)):
        _check.dtype(where + name, array, dict.fromkeys([q.dtype, FLOAT8]))
        _check.head_dim(where + name, array)
    _check.dtype(where + "v", v, [k.dtype])
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{where}v.shape[:-1] must equal k.shape[:-1] {k.shape[:-1]}; got {v.shape[:-1]}")
    num_heads, head_dim, num_kv_heads, head_dim_v = *q.shape[-2:], *v.shape[-2:]
    if k.shape[-1] != head_dim:
        raise ValueError(f"{where}k.shape[-1] must equal head_dim of q ({head_dim}); got {k.shape[-1]}")
    if not num_kv_heads or num_heads % num_kv_heads:
        rule = f"q.shape[-2] (num_heads) must be a multiple of num_kv_heads of k ({num_kv_heads})"
        raise ValueError(f"{where}{rule}; got {num_heads}")
    group = num_heads // num_kv_heads
    for name, size in (("seqlen_k", seqlen_k), ("seqlen_q * heads of a kv head", seqlen_q * group)):
        if size > _MOST:
            raise ValueError(f"{where}{name} must be at most {_MOST}; got {size}")
    out, lse = _check.results(where, q, head_dim_v, specs["out"], specs["lse"])
    slopes = [(num_heads,), (batch, num_heads)]
    return _shared_dims(
        batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim, head_dim_v, num_pages, page_size,
        q.dtype, k.dtype, window, *indices, table_row,
        _leading(where + "q", q, 1), _leading(where + "out", out, 1), _leading(where + "lse", lse, 0),
        _leading(where + "k", k, 1), _leading(where + "v", v, 1),
        _check_scores.by_head(where + "alibi_slopes", specs["alibi_slopes"], slopes),
        _check_scores.by_head(where + "sinks", specs["sinks"], [(num_heads,)])[1],
        _check_scale.step(where + "k_scale", specs["k_scale"], num_kv_heads),
        _check_scale.step(where + "v_scale", specs["v_scale"], num_kv_heads),
        math.gcd(*(_check.alignment(x, range(len(x.shape) - 1)) for x in (q, k, v))),
        not (capped or specs["alibi_slopes"] or mask.given), mask,
    )  # fmt: skip


def _mask(where: str, mask: MaybeSpec, shape: tuple[int, int, int, int]) -> MaskDims:
    """`shape`: batch, heads, queries, keys. Axes that the mask lacks or has one of are the same for all."""
    if mask is None:
        return MaskDims()
    _check.dtype(where, mask, [np.dtype(bool), _BITS])
    bits = mask.dtype == _BITS
    wanted = (*shape[:3], -(-shape[3] // 8)) if bits else shape
    missing = 4 - len(mask.shape)
    if missing < 0 or (bits and missing == 4) or any(n not in (1, m) for n, m in zip(mask.shape, wanted[missing:])):
        axes = "(batch, num_heads, seqlen_q, ceil(seqlen_k / 8))" if bits else "(batch, num_heads, seqlen_q, seqlen_k)"
        raise ValueError(f"{where}.shape must broadcast to {axes} {wanted}; got {mask.shape}")
    strides = [s if n > 1 else 0 for n, s in zip(mask.shape, mask.strides)]
    b, h, i, j = [0] * missing + strides
    return MaskDims(bits, (b, h, i, j), True)


def _leading(where: str, array: ArraySpec, features: int) -> tuple[int, int, int]:
    """Strides along batch, sequence and heads; `features`: axes behind them. Of packed arrays batch has none."""
    strides = _check.strides_in_elements(where, array)
    a, b, c = (0, 0, *strides[: len(strides) - features])[-3:]
    return a, b, c
