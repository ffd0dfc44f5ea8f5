"""Checks of the operations on pages: a call becomes `PagedDims`, or an exception."""

from __future__ import annotations

import math

import numpy as np

from cuattn import _check, _check_rotary, _check_scale
from cuattn._call import ArraySpec, Call, remembered
from cuattn._check import FLOAT8, FLOATS
from cuattn._dims import PagedDims, PagedSide, RotaryDims

CACHE_DTYPES = (*FLOATS, FLOAT8)
_TOKEN = ("num_tokens", "num_kv_heads", "head_dim")
_PAGES = ("num_pages", "page_size", "num_kv_heads", "head_dim")
_TABLES = ("rotary_cos", "rotary_sin", "positions")
_MAX_ROW = 2**22  # elements of one token: what a grid reaches
_MAX_TOKENS = 2**31

_WRITTEN_BY_APPEND: dict[str, tuple[str, ...]] = {"k_pages": (), "v_pages": ()}
_WRITTEN_BY_GATHER: dict[str, tuple[str, ...]] = {"k": (), "v": ()}

Pair = tuple[ArraySpec, ...]  # of K and V


def append(call: Call, interleaved: bool, scaled: bool, values: bool) -> PagedDims:
    """Tokens into slots; `scaled`: a scale is given; slots, positions and scales are looked at if `values`."""
    dims = _append(call, bool(interleaved), scaled)
    _check.outputs(call, _WRITTEN_BY_APPEND)
    if values:
        used = _slots(call, dims)
        _distinct(f"{call.function}: slot_mapping", call.to_host("slot_mapping"), used)
        if dims.rotary is not None:
            positions, most = call.to_host("positions"), dims.rotary.max_positions
            wrong, rule = used & ((positions < 0) | (positions >= most)), "0 or more and below rotary_cos.shape[0]"
            _refuse(f"{call.function}: positions", positions, wrong, f"{rule} ({most})")
        _check_scale.positive(call)
    return dims


def gather(call: Call, dtype: np.dtype | None, scaled: bool, values: bool) -> PagedDims:
    """Slots into tokens of `dtype` (None: that of `k`, else of the pages); `scaled`: a scale is given."""
    dims = _gather(call, dtype, scaled)
    _check.outputs(call, _WRITTEN_BY_GATHER)
    if values:
        _slots(call, dims)
        _check_scale.positive(call)
    return dims


def copy(call: Call, values: bool) -> PagedDims:
    """Pages into pages, of the same cache if no target arrays are given."""
    dims = _copy(call)
    names = _targets(call)
    _check.outputs(call, dict(zip(names, (("k_pages",), ("v_pages",)))))
    if values:
        source, target = (call.to_host(n) for n in ("source", "target"))
        used = (source >= 0) & (target >= 0)
        for name, ids, most in zip(("source", "target"), (source, target), dims.num_pages):
            _refuse(f"{call.function}: {name}", ids, used & (ids >= most), f"below num_pages ({most})")
        _distinct(f"{call.function}: target", target, used)
        if call.places[names[0]][1] == call.places["k_pages"][1]:  # within one cache
            moved = used & (source != target)
            wrong = moved & np.isin(target, source[moved])
            _refuse(f"{call.function}: target", target, wrong, "no source of another pair within one cache")
    return dims


def named_dtype(function: str, given: object) -> np.dtype | None:
    """The dtype that an argument `dtype` names, or None."""
    try:
        return None if given is None else np.dtype(given)  # type: ignore[call-overload]
    except TypeError as error:
        raise TypeError(f"{function}: dtype must name a dtype; got {given!r}") from error


@remembered
def _append(call: Call, interleaved: bool, scaled: bool) -> PagedDims:
    where = f"{call.function}: "
    missing = [name for name in _TABLES if call.specs[name] is None]
    if 0 < len(missing) < len(_TABLES):
        rule = f"{', '.join(_TABLES)} must be given together"
        raise TypeError(f"{where}{rule}; got no {' and no '.join(missing)}")
    k, v, k_pages, v_pages, slots = call.required("k", "v", "k_pages", "v_pages", "slot_mapping")
    tokens, pages = (k, v), (k_pages, v_pages)
    cache(where, ("k_pages", "v_pages"), pages)
    _tokens(where, tokens, pages, slots)
    _check.dtype(where + "k", tokens[0], FLOATS)
    _check.dtype(where + "v", tokens[1], [tokens[0].dtype])
    _check.dtype(where + "k_pages", pages[0], [tokens[0].dtype, FLOAT8])
    if scaled and pages[0].dtype != FLOAT8:
        raise ValueError(f"{where}k_scale and v_scale need float8_e4m3fn pages; got {pages[0].dtype}")
    for name, array in zip(("k_pages", "v_pages"), pages):
        _check.distinct_elements(where + name, array)
    steps = _scales(call, k_pages.shape[2])
    rotary = None if missing else _rotary(call, k, interleaved)
    return _dims(where, "append", tokens, pages, steps, slots, rotary)


@remembered
def _gather(call: Call, dtype: np.dtype | None, scaled: bool) -> PagedDims:
    where = f"{call.function}: "
    k_pages, v_pages, slots = call.required("k_pages", "v_pages", "slot_mapping")
    pages, given = (k_pages, v_pages), (call.specs["k"], call.specs["v"])
    if dtype is None:
        dtype = next((g.dtype for g in given if g is not None), k_pages.dtype)
    cache(where, ("k_pages", "v_pages"), pages)
    widened = pages[0].dtype == FLOAT8 and dtype != FLOAT8
    wanted = _check.fresh((), dtype)
    _check.dtype(where + "dtype", wanted, CACHE_DTYPES if widened else [pages[0].dtype])
    if scaled and not widened:
        rule = "k_scale and v_scale need float8_e4m3fn pages gathered as float16, bfloat16 or float32"
        raise ValueError(f"{where}{rule} (dtype=); got {pages[0].dtype} as {dtype}")
    _check.axes(where + "slot_mapping", slots, _TOKEN[:1])  # before its length is used
    tokens = tuple(
        _check.fresh((slots.shape[0], *array.shape[2:]), dtype) if own is None else own
        for own, array in zip(given, pages)
    )
    _tokens(where, (tokens[0], tokens[1]), pages, slots)
    for name, array in zip(("k", "v"), tokens):
        _check.dtype(where + name, array, [dtype])
        _check.distinct_elements(where + name, array)
    return _dims(where, "gather", (tokens[0], tokens[1]), pages, _scales(call, k_pages.shape[2]), slots, None)


def _targets(call: Call) -> tuple[str, str]:
    """The names of the pages that are written."""
    if call.specs["target_k_pages"] is None:
        return "k_pages", "v_pages"
    return "target_k_pages", "target_v_pages"


@remembered
def _copy(call: Call) -> PagedDims:
    where, names = f"{call.function}: ", _targets(call)
    read, (source, target) = call.required("k_pages", "v_pages"), call.required("source", "target")
    if (call.specs["target_k_pages"] is None) != (call.specs["target_v_pages"] is None):
        raise TypeError(f"{where}target_k_pages and target_v_pages must be given together; got one of them")
    written = call.required(*names)
    cache(where, ("k_pages", "v_pages"), read)
    cache(where, names, written)
    for name, array, like, other in zip(names, written, read, ("k_pages", "v_pages")):
        _check.dtype(where + name, array, [like.dtype])
        if array.shape[1:] != like.shape[1:]:
            rule = f"{name}.shape[1:] must equal {other}.shape[1:] {like.shape[1:]}"
            raise ValueError(f"{where}{rule}; got {array.shape[1:]}")
        _check.distinct_elements(where + name, array)
    for name, index in (("source", source), ("target", target)):
        _check.axes(where + name, index, ("num_pairs",))
        _check.dtype(where + name, index, _check.INDICES)
    _check.shape(where + "target", target, source.shape, "source.shape")
    (pages, page_size, heads), pairs = read[0].shape[:3], source.shape[0]
    sides = [_side(where, *side) for side in zip(("k_pages", "v_pages"), read, names, written)]
    indices = _index(where + "source", source), _index(where + "target", target)
    return PagedDims(
        "copy", _few(where, "source", pairs, page_size), heads, (pages, written[0].shape[0]), page_size,
        (read[0].dtype, read[0].dtype), (sides[0], sides[1]), (_alignment(read), _alignment(written)), indices,
    )  # fmt: skip


def cache(where: str, names: tuple[str, str], arrays: Pair) -> None:
    """K and V of one cache, under the names that they have in the call."""
    k, v = arrays
    for name, array in zip(names, arrays):
        _check.axes(where + name, array, _PAGES)
        _check.dtype(where + name, array, CACHE_DTYPES)
        _check.head_dim(where + name, array)
        if array.shape[1] == 0:
            raise ValueError(f"{where}{name}.shape[1] (page_size) must be at least 1; got 0")
        if (row := array.shape[2] * array.shape[3]) >= _MAX_ROW:
            raise ValueError(f"{where}{name}.shape[2] * shape[3] must be less than {_MAX_ROW}; got {row}")
    _check.dtype(where + names[1], v, [k.dtype])
    if v.shape[:3] != k.shape[:3]:
        rule = f"{names[1]}.shape[:3] must equal {names[0]}.shape[:3] {k.shape[:3]}"
        raise ValueError(f"{where}{rule}; got {v.shape[:3]}")


def _tokens(where: str, tokens: Pair, pages: Pair, slots: ArraySpec) -> None:
    _check.axes(where + "slot_mapping", slots, _TOKEN[:1])
    _check.dtype(where + "slot_mapping", slots, _check.INDICES)
    for name, array, cache in zip(("k", "v"), tokens, pages):
        _check.axes(where + name, array, _TOKEN)
        _check.head_dim(where + name, array)
        _check.shape(where + name, array, (slots.shape[0], *cache.shape[2:]), f"that of slot_mapping and {name}_pages")


def _rotary(call: Call, k: ArraySpec, interleaved: bool) -> RotaryDims:
    where, (cos, sin, positions) = f"{call.function}: ", call.required(*_TABLES)
    rotary = _check_rotary.tables(where, ("rotary_cos", "rotary_sin"), cos, sin, k, interleaved)
    _check.dtype(where + "positions", positions, _check.INDICES)
    _check.shape(where + "positions", positions, (k.shape[0],), "(num_tokens,)")
    return rotary._replace(positions=_index(where + "positions", positions))


def _scales(call: Call, heads: int) -> tuple[int, int]:
    k, v = (_check_scale.step(f"{call.function}: {name}", call.specs[name], heads) for name in ("k_scale", "v_scale"))
    return k, v


def _dims(
    where: str, operation: str, tokens: Pair, pages: Pair, steps: tuple[int, int], slots: ArraySpec,
    rotary: RotaryDims | None,
) -> PagedDims:  # fmt: skip
    num_pages, page_size, heads = pages[0].shape[:3]
    sides = [_side(where, *side) for side in zip(("k", "v"), tokens, ("k_pages", "v_pages"), pages, steps)]
    return PagedDims(
        operation, _few(where, "slot_mapping", slots.shape[0], 1), heads, (num_pages,), page_size,
        (tokens[0].dtype, pages[0].dtype), (sides[0], sides[1]), (_alignment(tokens), _alignment(pages)),
        (_index(where + "slot_mapping", slots),), rotary,
    )  # fmt: skip


def _side(
    where: str, first_name: str, first: ArraySpec, second_name: str, second: ArraySpec, scale_step: int = 0
) -> PagedSide:
    _check.strides_in_elements(where + first_name, first)
    _check.strides_in_elements(where + second_name, second)
    return PagedSide(first.shape[-1], first.strides[:-1], second.strides[:-1], scale_step)


def _alignment(pair: Pair) -> int:
    return math.gcd(*(_check.alignment(array, range(len(array.shape) - 1)) for array in pair))


def _index(where: str, index: ArraySpec) -> tuple[int, int]:
    return index.dtype.itemsize, _check.strides_in_elements(where, index)[0]


def _few(where: str, name: str, count: int, each: int) -> int:
    if count * each >= _MAX_TOKENS:
        raise ValueError(f"{where}{name} must name fewer than 2**31 tokens; got {count * each}")
    return count * each


# For CUATTN_CHECK=values


def _slots(call: Call, dims: PagedDims) -> np.ndarray:
    """Which tokens have a slot."""
    slots, limit = call.to_host("slot_mapping"), dims.num_pages[0] * dims.page_size
    _refuse(f"{call.function}: slot_mapping", slots, slots >= limit, f"below num_pages * page_size ({limit})")
    return slots >= 0


def _refuse(where: str, ids: np.ndarray, wrong: np.ndarray, rule: str) -> None:
    for i in np.flatnonzero(wrong)[:1]:
        raise ValueError(f"{where}[{i}] must be {rule}; got {ids[i]}")


def _distinct(where: str, ids: np.ndarray, used: np.ndarray) -> None:
    values, counts = np.unique(ids[used], return_counts=True)
    for value in values[counts > 1][:1]:
        raise ValueError(f"{where} must name each at most once; got {value} {counts[values == value][0]} times")
