"""Checks of decode: a call becomes `DecodeDims`, or an exception."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cuattn import _check, _check_rotary, _check_scale, _check_scores
from cuattn._call import ArraySpec, Call, remembered
from cuattn._check import FLOAT8, FLOAT32, FLOATS
from cuattn._check_decode_values import decode_values
from cuattn._dims_decode import DecodeDims, NewDims

_MAX_TOKENS = 2**31 - 2**16  # of a sequence: the kernel counts them in 32 bits, some steps beyond the end
_MAX_ROWS = 2**17  # seqlen_q * num_heads: what a grid reaches
_MAX_NEW = 2**22  # the kernel counts the features of new tokens in 32 bits
_RESULTS: dict[str, tuple[str, ...]] = {"out": (), "lse": (), "workspace": ()}
_RESULTS_AND_PAGES: dict[str, tuple[str, ...]] = {**_RESULTS, "k_pages": (), "v_pages": ()}
MaybeSpec = ArraySpec | None

_shared_dims = functools.lru_cache(4096)(DecodeDims)  # so that a plan fits by identity, with a workspace and without


def decode(
    call: Call, causal: bool, window: tuple[int, int], interleaved: bool, scaled: bool, values: bool
) -> DecodeDims:
    """`scaled`: a scale is given. Table, lengths, padding and batch indices are looked at if `values`."""
    dims = _decode(call, *_check_scores.window(call.function, causal, window), bool(interleaved), scaled)
    _check.outputs(call, _RESULTS if call.specs["k"] is None else _RESULTS_AND_PAGES)
    if values:
        decode_values(call, dims)
    return dims


def sizes(function: str, given: dict[str, Any]) -> None:
    """Sizes of a call without its arrays."""
    for name, size in given.items():
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool):
            raise TypeError(f"{function}: {name} must be an integer; got {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{function}: {name} must be at least 0; got {size}")
    heads, kv_heads, head_dim = given["num_heads"], given["num_kv_heads"], given["head_dim"]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"{function}: num_heads must be a multiple of num_kv_heads ({kv_heads}); got {heads}")
    if not 1 <= head_dim <= _check.MAX_HEAD_DIM:
        raise ValueError(f"{function}: head_dim must be 1 to {_check.MAX_HEAD_DIM}; got {head_dim}")


@functools.lru_cache(4096)
def workspace(function: str, spec: ArraySpec, least: int) -> None:
    """Scratch memory of at least that many float32."""
    where = f"{function}: workspace"
    _check.dtype(where, spec, [FLOAT32])
    _check.axes(where, spec, ("num_floats",))
    if spec.shape[0] > 1 and spec.strides[0] != FLOAT32.itemsize:
        raise ValueError(f"{where} must be contiguous; got a stride of {spec.strides[0]} bytes")
    if spec.alignment < 16:
        raise ValueError(f"{where} must begin at a multiple of 16 bytes; got one of {spec.alignment}")
    if spec.shape[0] < least:
        raise ValueError(f"{where}.shape[0] must be at least {least} (decode_workspace_size / 4); got {spec.shape[0]}")


@remembered
def _decode(call: Call, window: tuple[int, int], local: bool, interleaved: bool, scaled: bool) -> DecodeDims:
    where, specs = f"{call.function}: ", call.specs
    q, k, v, table, lengths = call.required("q", "k_pages", "v_pages", "block_table", "cache_seqlens")
    batch_idx, leftpad, slopes, sinks = (
        specs[n] for n in ("cache_batch_idx", "cache_leftpad", "alibi_slopes", "sinks")
    )
    _check.axes(where + "q", q, ("batch", "seqlen_q", "num_heads", "head_dim"))
    _check.dtype(where + "q", q, FLOATS)
    _check.head_dim(where + "q", q)
    _pages(where, q, k, v)
    batch, seqlen_q, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, head_dim_v = v.shape
    if num_heads % num_kv_heads:
        rule = f"must be a multiple of num_kv_heads of k_pages ({num_kv_heads})"
        raise ValueError(f"{where}q.shape[2] (num_heads) {rule}; got {num_heads}")
    if seqlen_q * num_heads >= _MAX_ROWS:
        raise ValueError(f"{where}seqlen_q * num_heads must be less than {_MAX_ROWS}; got {seqlen_q * num_heads}")
    if batch * seqlen_q * num_heads >= 2**31:
        raise ValueError(f"{where}q must have fewer than 2**31 rows; got {batch * seqlen_q * num_heads}")
    num_sequences = _tables(where, batch, table, lengths, batch_idx, leftpad)
    if table.shape[1] * page_size > _MAX_TOKENS:
        rule = f"block_table.shape[1] * page_size must be at most {_MAX_TOKENS}"
        raise ValueError(f"{where}{rule}; got {table.shape[1] * page_size}")
    out, lse = _check.results(where, q, head_dim_v, specs["out"], specs["lse"])
    return _shared_dims(
        batch, seqlen_q, num_heads, num_kv_heads, head_dim, head_dim_v, num_pages, page_size, num_sequences,
        table.shape[1], q.dtype, k.dtype, window,
        _check.index(where + "block_table", table), _check.strides_in_elements(where + "block_table", table)[0],
        _check.index(where + "cache_seqlens", lengths), _check.index(where + "cache_batch_idx", batch_idx),
        _check.index(where + "cache_leftpad", leftpad),
        _leading(where + "q", q), _leading(where + "out", out), _leading(where + "lse", lse),
        _leading(where + "k_pages", k), _leading(where + "v_pages", v),
        _check_scores.by_head(where + "alibi_slopes", slopes, [(num_heads,), (batch, num_heads)]),
        _check_scores.by_head(where + "sinks", sinks, [(num_heads,)])[1],
        _check_scale.step(where + "k_scale", specs["k_scale"], num_kv_heads),
        _check_scale.step(where + "v_scale", specs["v_scale"], num_kv_heads),
        math.gcd(_check.alignment(k, range(3)), _check.alignment(v, range(3))),
        _new(call, local, interleaved, scaled),
    )  # fmt: skip


def _new(call: Call, local: bool, interleaved: bool, scaled: bool) -> NewDims:
    """Of a call whose other arrays are checked."""
    where, (q, *caches) = f"{call.function}: ", call.required("q", "k_pages", "v_pages")
    k, v, cos, sin = (call.specs[n] for n in ("k", "v", "rotary_cos", "rotary_sin"))
    for names, pair in ((("k", "v"), (k, v)), (("rotary_cos", "rotary_sin"), (cos, sin))):
        if pair.count(None) == 1:
            rule = f"{names[0]} and {names[1]} must be given together"
            raise TypeError(f"{where}{rule}; got no {names[pair.index(None)]}")
    if k is None or v is None:
        if cos is not None:
            raise TypeError(f"{where}rotary_cos and rotary_sin need new k and v; got none")
        return NewDims()
    for name, array, pages in zip("kv", (k, v), caches):
        _check.axes(where + name, array, ("batch", "seqlen_new", "num_kv_heads", "head_dim"))
        _check.dtype(where + name, array, [q.dtype])
        shape = q.shape[0], k.shape[1], *pages.shape[2:]
        _check.shape(where + name, array, shape, f"that of q, k and {name}_pages")
        _check.head_dim(where + name, array)
        _check.distinct_elements(f"{where}{name}_pages", pages)
    if k.shape[1] >= _MAX_NEW:
        raise ValueError(f"{where}k.shape[1] (seqlen_new) must be less than {_MAX_NEW}; got {k.shape[1]}")
    if scaled and caches[0].dtype != FLOAT8:
        rule = "with new k and v, k_scale and v_scale need float8_e4m3fn pages"
        raise ValueError(f"{where}{rule}; got {caches[0].dtype}")
    rotary = None
    if cos is not None and sin is not None:
        rotary = _check_rotary.tables(where, ("rotary_cos", "rotary_sin"), cos, sin, q, interleaved)
    steps = _leading(where + "k", k), _leading(where + "v", v)
    return NewDims(k.shape[1], *steps, rotary, rotary is not None and local)


def _pages(where: str, q: ArraySpec, k: ArraySpec, v: ArraySpec) -> None:
    for name, array in (("k_pages", k), ("v_pages", v)):
        _check.axes(where + name, array, ("num_pages", "page_size", "num_kv_heads", "head_dim"))
        _check.dtype(where + name, array, dict.fromkeys([q.dtype, FLOAT8]))
        _check.head_dim(where + name, array)
        for axis, size in ((1, "page_size"), (2, "num_kv_heads")):
            if not array.shape[axis]:
                raise ValueError(f"{where}{name}.shape[{axis}] ({size}) must be at least 1; got 0")
    _check.dtype(where + "v_pages", v, [k.dtype])
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"{where}k_pages.shape[3] must equal head_dim of q ({q.shape[3]}); got {k.shape[3]}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{where}v_pages.shape[:3] must equal k_pages.shape[:3] {k.shape[:3]}; got {v.shape[:3]}")


def _tables(
    where: str, batch: int, table: ArraySpec, lengths: ArraySpec, batch_idx: MaybeSpec, leftpad: MaybeSpec
) -> int:
    """Returns the number of sequences in the table."""
    _check.axes(where + "block_table", table, ("num_sequences", "max_pages_per_seq"))
    given = {"block_table": table, "cache_seqlens": lengths, "cache_batch_idx": batch_idx, "cache_leftpad": leftpad}
    for name, array in given.items():
        if array is not None:
            _check.dtype(where + name, array, _check.INDICES)
    if batch_idx is None and table.shape[0] != batch:
        raise ValueError(f"{where}block_table.shape[0] must equal batch of q ({batch}); got {table.shape[0]}")
    for name, array in given.items():
        if array is not None and name != "block_table":
            _check.shape(where + name, array, (batch,), "q.shape[:1]")
    return table.shape[0]


def _leading(where: str, array: ArraySpec) -> tuple[int, int, int]:
    """Strides along the first three axes."""
    a, b, c = _check.strides_in_elements(where, array)[:3]
    return a, b, c
