"""Pages of keys and values: writing tokens to them, reading tokens back, copying and swapping pages.

A cache of a layer is two arrays, ``k_pages (num_pages, page_size, num_kv_heads, head_dim)`` and `v_pages` alike, each
with strides of its own: interleaved and head-major caches are views. A slot is the place of a token, ``page * page_size
+ offset``. Negative slots and page ids mean "nothing here". The definitions are in `cuattn.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuattn import _check, _check_paged, _check_scale, reference
from cuattn._call import Call, rounded
from cuattn._check_scale import Factors
from cuattn._check_swap import swap
from cuattn._dims import PagedDims
from cuattn._plan_paged import layout, plan_paged


def append_kv(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    positions: Any = None,
    rotary_interleaved: bool = False,
) -> None:
    """Write tokens into pages, in place.

    Parameters
    ----------
    k : array, (num_tokens, num_kv_heads, head_dim), float16, bfloat16 or float32
        Keys; head_dim 1 to 512, contiguous along it, other strides at will, as for all arrays here.
    v : array, (num_tokens, num_kv_heads, head_dim_v), of the dtype of `k`
        Values.
    k_pages, v_pages : array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)
        Written to. Of the dtype of `k`, or float8_e4m3fn.
    slot_mapping : array, (num_tokens,), int32 or int64
        Slot of each token, ``page * page_size + offset``, each at most once; negative: the token is skipped. On a
        device a slot past the last page is skipped too, and refused only under ``checking("values")``.
    k_scale, v_scale : float, or array, (), (1,) or (num_kv_heads,), float32, optional
        For float8 pages: what is stored is ``k / k_scale``, rounded to float32, then to float8, saturated to +-448.
    rotary_cos, rotary_sin : array, (max_positions, rotary_dim / 2), float32 or of the dtype of `k`, optional
        Rotate `k` before it is stored, by row ``positions[i]`` of these tables. Features from rotary_dim on stay.
    positions : array, (num_tokens,), int32 or int64, optional
        Position of each token. On a device a token whose position has no row in the tables is skipped.
    rotary_interleaved : bool
        Whether the features 2d and 2d + 1 make a pair, or (the default) d and d + rotary_dim / 2.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit, or arrays overlap; nothing is written then.

    See Also
    --------
    gather_kv : the way back.
    cuattn.reference.append_kv : the definition.

    Notes
    -----
    Moves ``2 * num_tokens * num_kv_heads * (head_dim + head_dim_v) * itemsize`` bytes, in one launch.

    Examples
    --------
    >>> k_pages, v_pages = np.zeros((2, 3, 4, 1, 2), np.float32)
    >>> append_kv(np.ones((1, 1, 2), "f4"), np.ones((1, 1, 2), "f4"), k_pages, v_pages, np.array([6]))
    >>> k_pages[1, 2, 0]
    array([1., 1.], dtype=float32)
    """
    arrays = {  # as the kernel takes them
        "k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "slot_mapping": slot_mapping, "k_scale": k_scale,
        "v_scale": v_scale, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "positions": positions,
    }  # fmt: skip
    scaled = k_scale is not None or v_scale is not None
    factors = _check_scale.by_value("append_kv", arrays)
    call = Call("append_kv", arrays)
    dims = _check_paged.append(call, rotary_interleaved, scaled, call.checks_values())
    if call.engine is None:
        _append_on_host(call, dims, factors)
    elif dims.num_tokens:
        given = [*call.arrays.values()]
        call.launch(plan_paged(dims, call.info()), [*given[:7], *factors, *given[7:], layout(dims)])


def gather_kv(
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    dtype: Any = None,
    k: Any = None,
    v: Any = None,
) -> tuple[Any, Any]:
    """Read tokens out of pages.

    Parameters
    ----------
    k_pages, v_pages : array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)
        float16, bfloat16, float32 or float8_e4m3fn; contiguous along the last axis, other strides at will.
    slot_mapping : array, (num_tokens,), int32 or int64
        Slots in the order wanted, repeated or not. A negative one gives zeros. On a device so does one past the last
        page, and it is refused only under ``checking("values")``.
    k_scale, v_scale : float, or array, (), (1,) or (num_kv_heads,), float32, optional
        Factors on what is read from float8 pages.
    dtype : optional
        float16, bfloat16 or float32, for float8 pages. Default: that of `k`, else of the pages: stored bits.
    k, v : array, (num_tokens, num_kv_heads, head_dim or head_dim_v), optional
        Where to put the result; apart from the pages.

    Returns
    -------
    k, v : array, (num_tokens, num_kv_heads, head_dim or head_dim_v)

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit, or arrays overlap.

    See Also
    --------
    append_kv : the way in.
    cuattn.reference.gather_kv : the definition.
    """
    arrays = {"k_pages": k_pages, "v_pages": v_pages, "slot_mapping": slot_mapping}
    arrays |= {"k_scale": k_scale, "v_scale": v_scale, "k": k, "v": v}
    scaled = k_scale is not None or v_scale is not None
    factors = _check_scale.by_value("gather_kv", arrays)
    call = Call("gather_kv", arrays)
    wanted = _check_paged.named_dtype(call.function, dtype)
    dims = _check_paged.gather(call, wanted, scaled, call.checks_values())
    given = call.arrays
    tokens = [_empty(call, dims, n) if given[name] is None else given[name] for n, name in enumerate("kv")]
    if call.engine is None:
        _gather_on_host(call, dims, factors, tokens)
    elif dims.num_tokens:
        scales = [given["k_scale"], given["v_scale"], *factors]
        args = [given["k_pages"], given["v_pages"], *tokens, given["slot_mapping"], *scales, layout(dims)]
        call.launch(plan_paged(dims, call.info()), args)
    return tokens[0], tokens[1]


def copy_pages(
    k_pages: Any,
    v_pages: Any,
    source: Any,
    target: Any,
    *,
    target_k_pages: Any = None,
    target_v_pages: Any = None,
) -> None:
    """Copy pages bit for bit, within a cache or from one to another: ``target_pages[target[i]] = pages[source[i]]``.

    Parameters
    ----------
    k_pages, v_pages : array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)
        float16, bfloat16, float32 or float8_e4m3fn. Scales belong to the arrays, so both caches must have the same.
    source, target : array, (num_pairs,), int32 or int64
        Page ids. A pair with a negative one is skipped. On a device so is one with an id past the last page; that is
        refused only under ``checking("values")``. No target may be named twice. Within one cache no target may be the
        source of another pair: on a device pages are written while others are read, so such a page holds either.
    target_k_pages, target_v_pages : array, optional
        The cache that is written, alike but for the number of pages and the strides. Default: `k_pages`, `v_pages`.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or devices don't fit, or arrays overlap; nothing is written then.

    See Also
    --------
    swap_pages : to the host and back.
    cuattn.reference.copy_pages : the definition.
    """
    arrays = {"k_pages": k_pages, "v_pages": v_pages, "source": source, "target": target}
    arrays |= {"target_k_pages": target_k_pages, "target_v_pages": target_v_pages}
    call = Call("copy_pages", arrays)
    dims = _check_paged.copy(call, call.checks_values())
    given = call.arrays
    read = [given["k_pages"], given["v_pages"]]
    written = read if target_k_pages is None else [given["target_k_pages"], given["target_v_pages"]]
    pairs = [given["source"], given["target"]]
    if call.engine is None:
        reference.copy_pages_between(*read, *written, *pairs)
    elif dims.num_tokens:
        call.launch(plan_paged(dims, call.info()), [*read, *written, *pairs, layout(dims)])


def swap_pages(
    k_pages: Any,
    v_pages: Any,
    host_k: np.ndarray,
    host_v: np.ndarray,
    device_pages: Sequence[int],
    host_pages: Sequence[int],
    *,
    to_host: bool,
    stream: Any = None,
) -> None:
    """Copy pages between a device and host memory, without waiting for them.

    Parameters
    ----------
    k_pages, v_pages : array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)
        float16, bfloat16, float32 or float8_e4m3fn. The elements of a page must be contiguous, in any order of its
        axes; pages may be apart, as in an interleaved cache. NumPy arrays are copied at once.
    host_k, host_v : numpy.ndarray, alike but for the number of pages and the stride between them
        From ``cupyx.empty_pinned``: with other host memory the call waits for the copies.
    device_pages, host_pages : sequence of int
        Page ids on both sides, pair by pair, on the host. A pair with a negative one is skipped. No page that is
        written may be named twice.
    to_host : bool
        From the device to the host, or back.
    stream : cupy.cuda.Stream, optional
        Default: CuPy's current stream. Until it has arrived here, neither side may be used on another stream or freed.

    Raises
    ------
    TypeError, ValueError
        If dtypes, shapes, strides or ids don't fit; nothing is copied then.

    Notes
    -----
    One copy for each run of pages that are neighbours on both sides, for K and for V.
    """
    call, host, dims = swap(k_pages, v_pages, host_k, host_v, device_pages, host_pages, to_host)
    for n, (pages, stored) in enumerate((("k_pages", "host_k"), ("v_pages", "host_v"))):
        ours, theirs = call.arrays[pages], host.arrays[stored]
        if isinstance(ours, np.ndarray):
            ids = [np.array([pair[side] for pair in dims.pairs], int) for side in (0, 1)]
            if to_host:
                theirs[ids[1]] = ours[ids[0]]
            else:
                ours[ids[0]] = theirs[ids[1]]
        else:
            call.copy_async(dims.runs(n, call.places[pages][1], host.places[stored][1]), to_host, stream)


def _empty(call: Call, dims: PagedDims, side: int) -> Any:
    shape, dtype = (dims.num_tokens, dims.num_heads, dims.sides[side].head_dim), dims.dtypes[0]
    if dtype == _check.FLOAT8:  # CuPy doesn't allocate it
        return call.empty(shape, np.dtype(np.uint8)).view(dtype)
    return call.empty(shape, dtype)


def _host_scales(call: Call, factors: Factors) -> list[Any]:
    return [_check_scale.as_defined(call.arrays[name], factor) for name, factor in zip(("k_scale", "v_scale"), factors)]


def _append_on_host(call: Call, dims: PagedDims, factors: Factors) -> None:
    given, scales = call.arrays, _host_scales(call, factors)
    k, slots = given["k"], given["slot_mapping"]
    if dims.rotary is not None:
        here = slots >= 0  # the others may have any position
        tables = given["rotary_cos"], given["rotary_sin"], given["positions"][here]
        k = np.zeros(k.shape)
        k[here] = reference.apply_rotary(given["k"][here], *tables, interleaved=dims.rotary.interleaved)
    pages = given["k_pages"], given["v_pages"]
    reference.append_kv(k, given["v"], *pages, slots, k_scale=scales[0], v_scale=scales[1])


def _gather_on_host(call: Call, dims: PagedDims, factors: Factors, tokens: list[np.ndarray]) -> None:
    given, scales = call.arrays, _host_scales(call, factors)
    if dims.dtypes[0] != dims.dtypes[1]:
        scales = [1.0 if s is None else s for s in scales]
    pages = given["k_pages"], given["v_pages"]
    read = reference.gather_kv(*pages, given["slot_mapping"], k_scale=scales[0], v_scale=scales[1])
    for out, found in zip(tokens, read):
        out[...] = found if found.dtype == out.dtype else rounded(rounded(found, _check.FLOAT32), out.dtype)
