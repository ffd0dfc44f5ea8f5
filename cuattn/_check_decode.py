"""Checks of decode: a call becomes `DecodeDims`, or an exception."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import numpy as np

from cuattn import _check
from cuattn._call import ArraySpec, Call
from cuattn._check import FLOAT8, FLOAT32, FLOATS
from cuattn._dims_decode import UNBOUNDED, DecodeDims, IndexDims

_MAX_TOKENS = 2**31 - 2**16  # of a sequence: the kernel counts them in 32 bits, some steps beyond the end
_MAX_ROWS = 2**17  # seqlen_q * num_heads: what a grid reaches
MaybeSpec = ArraySpec | None


class Options(NamedTuple):
    """What is no array, as the kernel takes it; scales that are arrays count 1 here."""

    sm_scale: np.float32
    softcap: np.float32
    k_scale: np.float32
    v_scale: np.float32


def decode(call: Call, causal: bool, window: tuple[int, int], values: bool) -> DecodeDims:
    """Table, lengths, padding and batch indices are looked at if `values`."""
    q, k, v, table, lengths = call.required("q", "k_pages", "v_pages", "block_table", "cache_seqlens")
    optional = [call.specs[n] for n in ("cache_batch_idx", "cache_leftpad", "alibi_slopes", "sinks")]
    scales = call.specs["k_scale"], call.specs["v_scale"]
    results = call.specs["out"], call.specs["lse"]
    sides = _window(call.function, causal, window)
    dims = _decode(call.function, q, (k, v), (table, lengths), *optional, scales, results, sides)
    _check.outputs(call, {"out": (), "lse": (), "workspace": ()})
    if values:
        _values(call, dims)
    return dims


def options(function: str, head_dim: int, sm_scale: Any, softcap: Any, k_scale: Any, v_scale: Any) -> Options:
    """Numbers in float32."""
    for name, given in (("sm_scale", sm_scale), ("softcap", softcap)):
        if not is_number(given) and (given is not None or name == "softcap"):
            raise TypeError(f"{function}: {name} must be a number; got {type(given).__name__}")
    k_scale, v_scale = (given if is_number(given) else 1.0 for given in (k_scale, v_scale))
    return _options(function, head_dim**-0.5 if sm_scale is None else sm_scale, softcap, k_scale, v_scale)


def is_number(given: Any) -> bool:
    """A scale that is passed by value, not as an array."""
    return isinstance(given, (int, float, np.number))


def workspace(call: Call, least: int) -> None:
    """Scratch memory of at least that many float32."""
    spec, where = call.specs["workspace"], f"{call.function}: workspace"
    if spec is None:
        return
    _check.dtype(where, spec, [FLOAT32])
    _check.axes(where, spec, ("num_floats",))
    if spec.shape[0] > 1 and spec.strides[0] != FLOAT32.itemsize:
        raise ValueError(f"{where} must be contiguous; got a stride of {spec.strides[0]} bytes")
    _check.strides_in_elements(where, spec)
    if spec.shape[0] < least:
        raise ValueError(f"{where}.shape[0] must be at least {least} (decode_workspace_size / 4); got {spec.shape[0]}")


@functools.lru_cache(4096)
def _options(function: str, *numbers: float) -> Options:
    with np.errstate(over="ignore"):
        options = Options(*map(np.float32, numbers))
    for name, given, value in zip(Options._fields, numbers, options):
        if not np.isfinite(value):
            raise ValueError(f"{function}: {name} must be finite in float32; got {given}")
    if options.softcap < 0 or (numbers[1] > 0 and options.softcap < np.finfo(np.float32).tiny):
        raise ValueError(f"{function}: softcap must be 0 (off) or above 0 in float32; got {numbers[1]}")
    return options


def _window(function: str, causal: bool, window: Any) -> tuple[int, int]:
    try:
        left, right = (operator.index(side) for side in window)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function}: window must be two integers (left, right); got {window!r}") from error
    if min(left, right) < -1:
        raise ValueError(f"{function}: window must be (left, right), each -1 (unbounded) or more; got {window}")
    left, right = (UNBOUNDED if side == -1 else min(side, UNBOUNDED) for side in (left, right))
    return left, 0 if causal else right


@functools.lru_cache(4096)
def _decode(
    function: str, q: ArraySpec, pages: tuple[ArraySpec, ArraySpec], index: tuple[ArraySpec, ArraySpec],
    batch_idx: MaybeSpec, leftpad: MaybeSpec, slopes: MaybeSpec, sinks: MaybeSpec,
    scales: tuple[MaybeSpec, MaybeSpec], results: tuple[MaybeSpec, MaybeSpec], window: tuple[int, int],
) -> DecodeDims:  # fmt: skip
    where = f"{function}: "
    (k, v), (table, lengths) = pages, index
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
    out, lse = _results(where, q, head_dim_v, results)
    return DecodeDims(
        batch, seqlen_q, num_heads, num_kv_heads, head_dim, head_dim_v, num_pages, page_size, num_sequences,
        table.shape[1], q.dtype, k.dtype, window,
        _index(where + "block_table", table), _check.strides_in_elements(where + "block_table", table)[0],
        _index(where + "cache_seqlens", lengths), _index(where + "cache_batch_idx", batch_idx),
        _index(where + "cache_leftpad", leftpad),
        _leading(where + "q", q), _leading(where + "out", out), _leading(where + "lse", lse),
        _leading(where + "k_pages", k), _leading(where + "v_pages", v),
        _by_head(where + "alibi_slopes", slopes, [(num_heads,), (batch, num_heads)]),
        _by_head(where + "sinks", sinks, [(num_heads,)])[1],
        _scale(where + "k_scale", scales[0], num_kv_heads), _scale(where + "v_scale", scales[1], num_kv_heads),
        math.gcd(_check.alignment(k, range(3)), _check.alignment(v, range(3))),
    )  # fmt: skip


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
    _check.shape(where + "cache_seqlens", lengths, table.shape[:1], "block_table.shape[:1]")
    for name, array in (("cache_batch_idx", batch_idx), ("cache_leftpad", leftpad)):
        if array is not None:
            _check.shape(where + name, array, (batch,), "q.shape[:1]")
    return table.shape[0]


def _results(
    where: str, q: ArraySpec, head_dim_v: int, results: tuple[MaybeSpec, MaybeSpec]
) -> tuple[ArraySpec, ArraySpec]:
    rows = q.shape[:3]
    out, lse = results
    out = _check.fresh((*rows, head_dim_v), q.dtype) if out is None else out
    lse = _check.fresh(rows, FLOAT32) if lse is None else lse
    _check.dtype(where + "out", out, [q.dtype])
    _check.dtype(where + "lse", lse, [FLOAT32])
    _check.shape(where + "out", out, (*rows, head_dim_v), "the result's shape")
    _check.shape(where + "lse", lse, rows, "the result's shape")
    _check.head_dim(where + "out", out)
    _check.distinct_elements(where + "out", out)
    _check.distinct_elements(where + "lse", lse)
    return out, lse


def _index(where: str, index: MaybeSpec) -> IndexDims:
    if index is None:
        return IndexDims(0, 0)
    return IndexDims(index.dtype.itemsize, _check.strides_in_elements(where, index)[-1])


def _leading(where: str, array: ArraySpec) -> tuple[int, int, int]:
    """Strides along the first three axes."""
    a, b, c = _check.strides_in_elements(where, array)[:3]
    return a, b, c


def _by_head(where: str, array: MaybeSpec, shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Strides along batch and heads."""
    if array is None:
        return 0, 0
    _check.dtype(where, array, [FLOAT32])
    if array.shape not in shapes:
        raise ValueError(f"{where}.shape must be {' or '.join(map(str, shapes))}; got {array.shape}")
    strides = _check.strides_in_elements(where, array)
    return (0, strides[0]) if len(strides) == 1 else (strides[0], strides[1])


def _scale(where: str, array: MaybeSpec, heads: int) -> int:
    if array is None:
        return 0
    _check.dtype(where, array, [FLOAT32])
    if array.shape not in ((), (1,), (heads,)):
        raise ValueError(f"{where}.shape must be (), (1,) or (num_kv_heads,) ({heads},); got {array.shape}")
    strides = _check.strides_in_elements(where, array)
    return strides[0] if array.shape == (heads,) and heads > 1 else 0


# For CUATTN_CHECK=values


def _values(call: Call, dims: DecodeDims) -> None:
    table, lengths = call.to_host("block_table"), call.to_host("cache_seqlens")
    rows, leftpad = np.arange(dims.batch), np.zeros(dims.batch, np.int64)
    if dims.batch_idx.bytes:
        rows = call.to_host("cache_batch_idx")
        _within(call, "cache_batch_idx", rows, dims.num_sequences - 1, "num_sequences - 1")
    _within(call, "cache_seqlens", lengths, dims.max_tokens, "max_pages_per_seq * page_size", set(rows.tolist()))
    lengths = lengths[rows].astype(np.int64)
    if dims.leftpad.bytes:
        leftpad = call.to_host("cache_leftpad")
        _within(call, "cache_leftpad", leftpad, lengths, "cache_seqlens")
    for b in range(dims.batch if dims.seqlen_q else 0):
        first = max(int(leftpad[b]), int(lengths[b]) - dims.seqlen_q - dims.window[0])
        first_page, end = first // dims.page_size, -(-int(lengths[b]) // dims.page_size)
        pages = table[rows[b], first_page : end if first < lengths[b] else first_page]
        for j in np.flatnonzero((pages < 0) | (pages >= dims.num_pages))[:1]:
            name, rule = f"block_table[{rows[b]}, {first_page + j}]", f"num_pages - 1 ({dims.num_pages - 1})"
            raise ValueError(f"{call.function}: {name} must be within 0 and {rule}; got {pages[j]}")


def _within(call: Call, name: str, values: np.ndarray, most: Any, rule: str, used: set[int] | None = None) -> None:
    for b, (value, limit) in enumerate(np.broadcast(values, most)):
        if not 0 <= value <= limit and (used is None or b in used):
            raise ValueError(f"{call.function}: {name}[{b}] must be within 0 and {rule} ({limit}); got {value}")
