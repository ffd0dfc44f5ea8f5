"""Contents for the pages of a cache, in which every aliasing shows, and pictures of a cache's state."""

from __future__ import annotations

import copy
from zlib import crc32

import numpy as np
import pytest

from cuattn.paged_cache import PagedKVCache

A, B = list(range(100, 116)), list(range(200, 216))  # two prompts of four pages


def small_cache(num_pages=8, page_size=4, **options) -> PagedKVCache:
    options = {"num_layers": 2, "head_dim_v": 3, "dtype": np.float32, "poison": True, **options}
    return PagedKVCache(num_pages, page_size, 1, 2, **options)


def value(salt, tokens) -> float:
    """What the last of `tokens` leaves in its page: as with real keys, all before it and the salt count."""
    return float(crc32(repr((salt, list(tokens))).encode()) & 0xFFFFF)


def values(tokens, salt=None) -> list[float]:
    return [value(salt, tokens[: i + 1]) for i in range(len(tokens))]


def arrays(cache) -> list[np.ndarray]:
    return [*cache.k_pages, *cache.v_pages]


def write(cache, seq_id, contents, num_new=None) -> np.ndarray:
    """Put `contents` where the first of the last `num_new` tokens belong; returns all their slots."""
    slots = cache.slot_mapping([seq_id], len(contents) if num_new is None else num_new)
    chosen = slots[: len(contents)]
    for sign, pages in enumerate(arrays(cache)):
        rows = pages.reshape(-1, pages.shape[-1])
        rows[chosen[chosen >= 0]] = np.asarray(contents)[chosen >= 0, None] + sign
    return slots


def read(cache, seq_id) -> list[float]:
    """What is in the pages of a sequence, NaN where released; all arrays must tell the same."""
    size = cache.page_size
    (table,), (length,) = cache.block_table([seq_id]), cache.cache_seqlens([seq_id])
    found = []
    for sign, pages in enumerate(arrays(cache)):
        rows = pages[table].reshape(len(table) * size, pages.shape[-1])[:length] - np.float32(sign)
        rows[np.repeat(table < 0, size)[:length]] = np.nan
        assert np.array_equal(rows, np.broadcast_to(rows[:, :1], rows.shape), equal_nan=True)
        found.append(rows[:, 0])
    assert all(np.array_equal(found[0], other, equal_nan=True) for other in found)
    return found[0].tolist()


def state(cache) -> dict:
    """Everything that a failed call must leave as it was."""
    pools = {
        name: {k: v for k, v in vars(getattr(cache, name)).items() if k != "_emit"}
        for name in ("_pool", "_host_pool")
    }
    swaps = [(id(swap), seq) for swap, seq in cache._swaps.items()]
    now = copy.deepcopy((pools, cache._sequences, cache._counts, list(cache._events), swaps))
    return {"bookkeeping": now, "pages": [pages.tobytes() for pages in arrays(cache)]}


def computed(cache, seq_id, tokens, salt=None, publish=True):
    """Add a sequence, write what is missing and publish it; returns the number of tokens that were there."""
    hits = cache.add_sequence(seq_id, tokens, salt=salt)
    write(cache, seq_id, values(tokens, salt)[hits:])
    if publish:
        cache.publish(seq_id, len(tokens))
    return hits


def table(cache, seq_id):
    return cache.block_table([seq_id])[0].tolist()


def unchanged(cache, error, call, match=None):
    """A call that fails and leaves everything as it was."""
    before = state(cache)
    with pytest.raises(error, match=match) as raised:
        call()
    assert state(cache) == before
    cache.check()
    return raised.value
