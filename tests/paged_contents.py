"""Contents for the pages of a cache, in which every aliasing shows, and pictures of a cache's state."""

from __future__ import annotations

import copy
from zlib import crc32

import numpy as np
import pytest

from cuattn.paged import append_kv, gather_kv
from cuattn.paged_cache import PagedKVCache
from cuattn.testing import to_host

A, B = list(range(100, 116)), list(range(200, 216))  # two prompts of four pages


def small_cache(num_pages=8, page_size=4, **options) -> PagedKVCache:
    options = {"num_layers": 2, "head_dim_v": 3, "dtype": np.float32, "poison": True, **options}
    return PagedKVCache(num_pages, page_size, 1, 2, **options)


def value(salt, tokens) -> float:
    """What the last of `tokens` leaves in its page: as with real keys, all before it and the salt count."""
    return float(crc32(repr((salt, list(tokens))).encode()) & 0xFFFFF)


def values(tokens, salt=None) -> list[float]:
    return [value(salt, tokens[: i + 1]) for i in range(len(tokens))]


def arrays(cache) -> list:
    return [*cache.k_pages, *cache.v_pages]


def write(cache, seq_id, contents, num_new=None) -> np.ndarray:
    """Put `contents` where the first of the last `num_new` tokens belong; returns all their slots."""
    slots = to_host(cache.slot_mapping([seq_id], len(contents) if num_new is None else num_new))
    store(cache, contents, slots[: len(contents)])
    return slots


def store(cache, contents, slots) -> None:
    """Tokens into slots, in each array with another number added, so that none is taken for another."""
    rows = [
        cache._send(np.asarray(contents, np.float32).reshape(-1, 1, 1) + np.full((1, 1, pages.shape[-1]), sign, np.float32))
        for sign, pages in enumerate(arrays(cache))
    ]
    layers = len(cache.k_pages)
    for number in range(layers):
        append_kv(rows[number], rows[layers + number], **cache.layer(number), slot_mapping=cache._send(slots))


def load(cache, slots) -> np.ndarray:
    """What `store` put into slots, 0 for a negative one; all arrays must tell the same."""
    pairs = [gather_kv(**cache.layer(number), slot_mapping=cache._send(slots)) for number in range(len(cache.k_pages))]
    found = [to_host(tokens) for side in zip(*pairs) for tokens in side]
    rows = [np.where(slots[:, None] < 0, 0, x[:, 0] - np.float32(sign)) for sign, x in enumerate(found)]
    assert all(np.array_equal(x, np.broadcast_to(rows[0][:, :1], x.shape), equal_nan=True) for x in rows)
    return rows[0][:, 0]


def slots_of(cache, seq_id) -> np.ndarray:
    """The slots of all tokens of a sequence, -1 where released."""
    (table,), (length,) = to_host(cache.block_table([seq_id])), to_host(cache.cache_seqlens([seq_id]))
    slots = table[:, None].astype(np.int64) * cache.page_size + np.arange(cache.page_size)
    return np.where(table[:, None] < 0, -1, slots).reshape(-1)[:length]


def read(cache, seq_id) -> list[float]:
    """What is in the pages of a sequence, NaN where released."""
    slots = slots_of(cache, seq_id)
    return np.where(slots < 0, np.nan, load(cache, slots)).tolist()


def state(cache) -> dict:
    """Everything that a failed call must leave as it was."""
    pools = {
        name: {k: v for k, v in vars(getattr(cache, name)).items() if k != "_emit"}
        for name in ("_pool", "_host_pool")
    }
    swaps = [(id(swap), seq) for swap, seq in cache._swaps.items()]
    now = copy.deepcopy((pools, cache._sequences, cache._counts, list(cache._events), swaps))
    return {"bookkeeping": now, "pages": [to_host(pages).tobytes() for pages in arrays(cache)]}


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
