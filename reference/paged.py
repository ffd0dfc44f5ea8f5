"""Pages: where the keys and values of many growing sequences lie, and how tokens get in and out.

1. Two arrays hold the keys and values of a layer, ``k_pages (num_pages, page_size, num_kv_heads, head_dim)``
   and ``v_pages (num_pages, page_size, num_kv_heads, head_dim_v)``. A page belongs to one sequence, or is
   shared; those of a sequence lie anywhere, in any order. Row b of ``block_table`` lists them: token p of
   sequence b is row ``p % page_size`` of page ``block_table[b, p // page_size]``.

2. A *slot* is the place of a token, ``slot = page * page_size + offset``. Negative slots and page ids mean
   "nothing here": a write skips them, a read gives zeros or refuses. Ids past the last page are errors.

3. Narrow pages hold ``k / k_scale``, one scale for all or one per kv head; attention multiplies it back. What
   is stored is the quotient rounded to float32, then to the pages' dtype: bit for bit what float32 arithmetic
   gives for k of at most 32 bits and a float32 scale. One-byte floats saturate at their largest finite value
   (448 for float8_e4m3fn), infinity too; NaN stays NaN. Wider floats overflow to infinity. Scales belong to
   the arrays and not to a page: whoever copies pages to another cache takes the scales along.

4. What no slot or length names (page tails, free pages, unused table entries) is never read. Shapes that
   disagree and ids out of range raise ValueError, indices that are no integers TypeError; nothing is written.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LARGEST = np.iinfo(np.int64).max


def append_kv(
    k: ArrayLike,
    v: ArrayLike,
    k_pages: NDArray,
    v_pages: NDArray,
    slot_mapping: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> None:
    """Write tokens into pages, in place.

    Of several tokens for one slot the last is kept here. Kernels keep any of them: do not rely on it.

    Parameters
    ----------
    k : (num_tokens, num_kv_heads, head_dim), any float dtype
        Keys.
    v : (num_tokens, num_kv_heads, head_dim_v), any float dtype
        Values.
    k_pages, v_pages : (num_pages, page_size, num_kv_heads, head_dim or head_dim_v), any float dtype
        Written to; any strides. Without a scale, tokens of the pages' own dtype are stored bit for bit.
    slot_mapping : (num_tokens,), any integer dtype
        Slot of each token. Negative: the token is skipped.
    k_scale, v_scale : scalar or (num_kv_heads,), optional
        What is stored is k / k_scale and v / v_scale, rounded as in section 3.
    """
    _check_pages("append_kv", k_pages, v_pages)
    k, v, slot = np.asarray(k), np.asarray(v), _integers("append_kv", "slot_mapping", slot_mapping, 1)
    for x, name, pages in ((k, "k", k_pages), (v, "v", v_pages)):
        if x.shape != (expected := (len(slot), *pages.shape[2:])):
            raise ValueError(f"reference.append_kv: {name}.shape must be {expected}; got {x.shape}")
    here, page, offset = _places("append_kv", slot, k_pages)
    k_stored = _quantise(k[here], _spread("append_kv", "k_scale", k_scale, k_pages), k_pages.dtype)
    v_stored = _quantise(v[here], _spread("append_kv", "v_scale", v_scale, v_pages), v_pages.dtype)
    k_pages[page, offset], v_pages[page, offset] = k_stored, v_stored


def gather_kv(
    k_pages: NDArray,
    v_pages: NDArray,
    slot_mapping: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> tuple[NDArray, NDArray]:
    """Read tokens out of pages.

    Parameters
    ----------
    k_pages, v_pages : (num_pages, page_size, num_kv_heads, head_dim or head_dim_v), any float dtype
        The pages.
    slot_mapping : (num_tokens,), any integer dtype
        Slots in the order wanted, repeated or not. A negative slot gives a row of zeros.
    k_scale, v_scale : scalar or (num_kv_heads,), optional
        Factors on k and v.

    Returns
    -------
    k : (num_tokens, num_kv_heads, head_dim)
        Without k_scale as stored, in the dtype of k_pages; with k_scale multiplied by it, float64.
    v : (num_tokens, num_kv_heads, head_dim_v)
        The same, by v_scale alone.
    """
    _check_pages("gather_kv", k_pages, v_pages)
    slot = _integers("gather_kv", "slot_mapping", slot_mapping, 1)
    here, page, offset = _places("gather_kv", slot, k_pages)
    tokens = []
    for pages, name, scale in ((k_pages, "k_scale", k_scale), (v_pages, "v_scale", v_scale)):
        factor = _spread("gather_kv", name, scale, pages)
        x = np.zeros((len(slot), *pages.shape[2:]), pages.dtype)
        x[here] = pages[page, offset]
        tokens.append(x if factor is None else x.astype(np.float64) * factor)
    return tokens[0], tokens[1]


def gather_sequence(pages: NDArray, block_table_row: ArrayLike, length: int) -> NDArray:
    """Return the first tokens of one sequence in order, ``(length, num_kv_heads, head_dim)``, as stored.

    Parameters
    ----------
    pages : (num_pages, page_size, num_kv_heads, head_dim), any dtype
        Keys or values.
    block_table_row : (max_pages_per_seq,), any integer dtype
        Page ids. Negative ones are refused within the length; past it nothing is looked at.
    length : int
        Number of tokens.
    """
    _check_pages("gather_sequence", pages, pages, ("pages", "pages"))
    row, page_size = _integers("gather_sequence", "block_table_row", block_table_row, 1), pages.shape[1]
    if not 0 <= length <= len(row) * page_size:
        room = len(row) * page_size
        raise ValueError(f"reference.gather_sequence: length must be within 0 and {room}; got {length}")
    row = row[: -(-length // page_size)]
    for j in np.flatnonzero((row < 0) | (row >= len(pages)))[:1]:
        name, limit = f"block_table_row[{j}]", len(pages)
        raise ValueError(f"reference.gather_sequence: {name} must be within 0 and {limit - 1}; got {row[j]}")
    return pages[row].reshape(len(row) * page_size, *pages.shape[2:])[:length]


def _tokens_between(pages: NDArray, row: NDArray, first: int, past: int) -> NDArray:
    """Tokens first .. past - 1 of a sequence; ids of pages that hold none of them are not looked at."""
    skip, start = divmod(int(first), pages.shape[1])  # whole pages, then tokens
    return gather_sequence(pages, row[skip:], int(past) - skip * pages.shape[1])[start:]


def copy_pages(k_pages: NDArray, v_pages: NDArray, source: ArrayLike, target: ArrayLike) -> None:
    """Copy pages within a cache: `copy_pages_between` it and itself."""
    copy_pages_between(k_pages, v_pages, k_pages, v_pages, source, target)


def copy_pages_between(
    src_k: NDArray, src_v: NDArray, dst_k: NDArray, dst_v: NDArray, source: ArrayLike, target: ArrayLike
) -> None:
    """Copy pages of one cache to pages of another, ``dst[target[i]] = src[source[i]]``, bit for bit.

    All are read before any is written: ``source=[0, 1], target=[1, 0]`` within a cache exchanges two pages.
    Of several pairs with one target the last counts here, any of them in kernels.

    Parameters
    ----------
    src_k, src_v, dst_k, dst_v : (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)
        Two caches of equal page shapes and dtypes; their numbers of pages may differ.
    source, target : (num_pairs,), any integer dtype
        Page ids. A pair with a negative id is skipped.
    """
    function = "copy_pages_between"
    _check_pages(function, src_k, src_v, ("src_k", "src_v"))
    _check_pages(function, dst_k, dst_v, ("dst_k", "dst_v"))
    ids = _integers(function, "source", source, 1), _integers(function, "target", target, 1)
    for argument, rule, got, expected in (
        ("dst_k.shape[1:]", "src_k.shape[1:]", dst_k.shape[1:], src_k.shape[1:]),
        ("dst_v.shape[1:]", "src_v.shape[1:]", dst_v.shape[1:], src_v.shape[1:]),
        ("dst_k.dtype", "src_k.dtype", dst_k.dtype, src_k.dtype),
        ("dst_v.dtype", "src_v.dtype", dst_v.dtype, src_v.dtype),
        ("target.shape", "source.shape", ids[1].shape, ids[0].shape),
    ):
        if got != expected:
            raise ValueError(f"reference.{function}: {argument} must equal {rule} {expected}; got {got}")
    read, written = (x[(ids[0] >= 0) & (ids[1] >= 0)] for x in ids)
    _check_below(function, "source", read, "num_pages of src_k", len(src_k))
    _check_below(function, "target", written, "num_pages of dst_k", len(dst_k))
    dst_k[written], dst_v[written] = src_k[read], src_v[read]  # both copies are made first


def slots(block_table: ArrayLike, cache_seqlens: ArrayLike, num_new: int, page_size: int) -> NDArray:
    """Return the slots of the next num_new tokens of each sequence, ``(batch, num_new)`` int64.

    A slot is -1 where the table has a negative entry or none.

    Parameters
    ----------
    block_table : (batch, max_pages_per_seq), any integer dtype
        Page ids. Only the entries of the new tokens are looked at.
    cache_seqlens : (batch,), any integer dtype
        Tokens in the cache: new token i of sequence b is token ``cache_seqlens[b] + i``.
    num_new, page_size : int
        New tokens per sequence, tokens per page.
    """
    table = _integers("slots", "block_table", block_table, 2)
    first = _integers("slots", "cache_seqlens", cache_seqlens, 1)
    if first.shape != table.shape[:1]:
        raise ValueError(f"reference.slots: cache_seqlens.shape must be {table.shape[:1]}; got {first.shape}")
    for name, value, least in (("page_size", page_size, 1), ("cache_seqlens", first.min(initial=0), 0)):
        if value < least:
            raise ValueError(f"reference.slots: {name} must be at least {least}; got {value}")
    first = np.minimum(first, table.shape[1] * page_size)[:, None]
    column, offset = np.divmod(first + np.arange(num_new), page_size)
    b, i = np.nonzero(column < table.shape[1])
    page = np.full(column.shape, -1)
    page[b, i] = np.minimum(table[b, column[b, i]], _LARGEST // page_size - 1)  # a wrong id must not wrap
    return np.where(page < 0, -1, page * page_size + offset)


def _quantise(x: NDArray, scale: NDArray | None, dtype: np.dtype) -> NDArray:
    """Return x as pages of dtype hold it: section 3 above."""
    if scale is None and x.dtype == dtype:
        return x
    x = x.astype(np.float64) if scale is None else x.astype(np.float64) / scale
    with np.errstate(over="ignore"):
        x = x.astype(np.float32) if dtype.itemsize < 4 else x
        if dtype.itemsize == 1:
            every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
            largest = every[np.isfinite(every)].max()
            x = np.clip(x, -largest, largest)
        return x.astype(dtype)


def _places(function: str, slot: NDArray, pages: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return which slots are not negative, and the pages and offsets of those."""
    num_pages, page_size = pages.shape[:2]
    _check_below(function, "slot_mapping", slot, "num_pages * page_size", num_pages * page_size)
    return slot >= 0, *np.divmod(slot[slot >= 0], page_size)


def _spread(function: str, name: str, scale: ArrayLike | None, pages: NDArray) -> NDArray | None:
    """Return the scale of each kv head, float64 and broadcastable to tokens, or None."""
    if scale is None:
        return None
    scale, heads = np.asarray(scale).astype(np.float64), pages.shape[2]
    if scale.shape not in ((), (heads,)):
        raise ValueError(f"reference.{function}: {name}.shape must be () or ({heads},); got {scale.shape}")
    return scale[..., None]


def _integers(function: str, name: str, values: ArrayLike, ndim: int) -> NDArray:
    """Return values in int64: ids past the largest int64 become that, which is as wrong, and not negative."""
    values = np.asarray(values)
    if not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"reference.{function}: {name} must hold integers; got {values.dtype}")
    if values.ndim != ndim:
        raise ValueError(f"reference.{function}: {name} must have {ndim} dimensions; got {values.ndim}")
    return np.minimum(values, min(_LARGEST, np.iinfo(values.dtype).max)).astype(np.int64)


@contextmanager
def _named(function: str, *renamed: tuple[str, Any]) -> Iterator[None]:
    """Let what is refused inside carry the name of `function`, and of its arguments: (pattern, replacement) each."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for pattern, replacement in ((r"^reference[.]\w+", f"reference.{function}"), *renamed):
            text = re.sub(pattern, replacement, text)
        raise ValueError(text) from None


def _check_pages(
    function: str, k: NDArray, v: NDArray, names: tuple[str, str] = ("k_pages", "v_pages")
) -> None:
    for name, pages in zip(names, (k, v)):
        if pages.ndim != 4:
            raise ValueError(f"reference.{function}: {name} must have 4 dimensions; got {pages.ndim}")
        if (got := pages.shape[:3]) != k.shape[:3]:
            raise ValueError(f"reference.{function}: {name}.shape[:3] must be {k.shape[:3]}; got {got}")
        if got[1] == 0:
            raise ValueError(f"reference.{function}: {name}.shape[1] must be at least 1; got 0")


def _check_below(function: str, name: str, ids: NDArray, rule: str, limit: int) -> None:
    if ids.max(initial=-1) >= limit:
        raise ValueError(f"reference.{function}: {name} must be below {rule} ({limit}); got {ids.max()}")
