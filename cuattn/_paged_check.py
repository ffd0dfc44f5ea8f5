"""The invariants of a paged cache, each with a name; `PagedKVCache.check` asserts them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from cuattn import _prefix_hash
from cuattn._page_pool import PagePool
from cuattn._paged_record import RELEASED, Record
from cuattn._paged_swap import Swaps


def check(cache: Swaps) -> None:
    """Raise AssertionError with the name of the first invariant that doesn't hold."""
    held: Counter[int] = Counter()
    held_on_host: Counter[int] = Counter()
    moving = {id(seq) for seq in cache._swaps.values()}
    for seq in cache._sequences.values():
        _record(seq, cache.page_size)
        _holds(
            "a sequence is on its way iff a swap has it", (id(seq) in moving) == (seq.place == "on its way")
        )
        if seq.place == "on the device":
            held.update(seq.table[seq.released :])
            _names(seq, cache._pool, cache.page_size)
        elif seq.place == "on the host":
            held_on_host.update(seq.table[seq.released :])
    for swap in cache._swaps:
        sources, targets = ([pair[side] for pair in swap.pairs] for side in (0, 1))
        held.update(sources if swap.to_host else targets)
        held_on_host.update(targets if swap.to_host else sources)
    _pool(cache._pool, held, "")
    _pool(cache._host_pool, held_on_host, "host: ")
    _holds("host: a slot has one owner and no name", max(held_on_host.values(), default=1) == 1)
    _holds("host: a slot has one owner and no name", not cache._host_pool.page_of)


def _pool(pool: PagePool, held: Counter[int], which: str) -> None:
    free, cached = set(pool.free), set(pool.cached)
    in_use = {page for page, refs in enumerate(pool.refs) if refs > 0}
    _holds(f"{which}a page is in the free list once", len(free) == len(pool.free))
    _holds(
        f"{which}a page is in exactly one of free, cached and in use",
        not (free & cached or free & in_use or cached & in_use)
        and free | cached | in_use == set(range(pool.total)),
    )
    _holds(f"{which}free + cached + in use == total", len(free) + len(cached) + len(in_use) == pool.total)
    _holds(
        f"{which}reference counts equal the number of holders",
        {p: pool.refs[p] for p in in_use} == dict(held),
    )
    _holds(f"{which}no reference count is negative", min(pool.refs, default=0) >= 0)
    _holds(
        f"{which}names and pages are one to one", {p: d for d, p in pool.page_of.items()} == pool.digest_of
    )
    _holds(f"{which}names and pages are one to one", len(pool.page_of) == len(pool.digest_of))
    _holds(f"{which}a cached page has a name", cached <= pool.digest_of.keys())
    _holds(f"{which}a free page has no name", not free & pool.digest_of.keys())


def _record(seq: Record, page_size: int) -> None:
    held = seq.table[seq.released :]
    _holds("a table has one page per page of tokens begun", len(seq.table) == -(-seq.length // page_size))
    _holds("a table holds a page once", len(set(held)) == len(held))
    _holds("only the leading pages are released", RELEASED not in held)
    _holds("released entries are -1", all(page == RELEASED for page in seq.table[: seq.released]))
    _holds(
        "released tokens are before the end",
        seq.released * page_size <= seq.shortest <= seq.length or not seq.released,
    )
    _holds("ids are known for at most the length", len(seq.tokens) <= seq.length)
    _holds("only full pages of known ids have names", len(seq.digests) <= len(seq.tokens) // page_size)
    _holds("names are those of the ids", seq.digests == list(_chain(seq, page_size, len(seq.digests))))


def _names(seq: Record, pool: PagePool, page_size: int) -> None:
    """What can be found under a name is what the sequences that hold the page have there."""
    for index, digest in enumerate(_chain(seq, page_size, len(seq.tokens) // page_size)):
        page = seq.table[index]
        _holds(
            "a page's name is that of its contents",
            page == RELEASED or pool.digest_of.get(page, digest) == digest,
        )
    for page in seq.table[: seq.settled]:
        _holds("settled pages are published or released", page == RELEASED or page in pool.digest_of)


def _chain(seq: Record, page_size: int, pages: int) -> Iterable[bytes]:
    digest = _prefix_hash.root(seq.salt, page_size)
    for index in range(pages):
        tokens: array[int] = seq.tokens[index * page_size : (index + 1) * page_size]
        digest = _prefix_hash.extend(digest, tokens)
        yield digest


def _holds(name: str, true: bool) -> None:
    if not true:
        raise AssertionError(f"PagedKVCache.check: {name}")
