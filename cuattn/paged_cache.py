"""Where keys and values live between calls: pages, and who holds which.

A `PagedKVCache` divides the memory for keys and values into pages of a few tokens and gives each sequence the
pages it needs, when it needs them. Sequences share pages that hold the same tokens. The manager decides, in
Python on the host; kernels read and write the pages through the index arrays that it hands out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from cuattn import _paged_check, _paged_index
from cuattn._check import FLOAT8
from cuattn._page_pool import OutOfPages, PageEvent
from cuattn._paged_batch import Batches
from cuattn._paged_record import Pairs, UnknownSequence, count, locked
from cuattn._paged_storage import Storage, scale
from cuattn._paged_swap import Swap

__all__ = ["OutOfPages", "PageEvent", "PagedKVCache", "Swap", "UnknownSequence"]


class PagedKVCache(Batches):
    """Pages of keys and values for many sequences, with one table for all layers.

    Parameters
    ----------
    num_pages, page_size : int
        Pages in each layer, and tokens in a page.
    num_kv_heads, head_dim : int
        Heads, and features of a key, 1 to 512.
    head_dim_v : int, optional
        Features of a value; default `head_dim`.
    num_layers : int
        Layers; a page id means the same tokens in all of them.
    dtype : dtype
        float16, bfloat16, float32 or float8_e4m3fn.
    xp : module
        numpy, or cupy for pages on the current device.
    k_scale, v_scale : array, broadcastable to (num_layers, num_kv_heads), optional
        For float8: what stored keys and values are to be multiplied by. They belong to the cache for its whole life, so
        they are right for every page, however it was shared, copied or swapped.
    num_host_pages : int
        Slots of the pool on the host that `swap_out` moves pages to; pinned memory if the pages are on a device.
    max_events : int
        How many events are kept until `take_events`; older ones are dropped.
    poison : bool
        Fill the pages with NaN, so that reading what was never written shows. For tests.

    Attributes
    ----------
    k_pages, v_pages : list of array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)
        One for each layer. They stay where they are.
    k_scale, v_scale : array, (num_layers, num_kv_heads), float32, or None
        As given; they can't be changed.

    Raises
    ------
    TypeError, ValueError
        If a size or dtype is none of these.

    Notes
    -----
    A call that raises has changed nothing, except that pages which were cached may have been evicted if the
    copying of pages itself failed. Every public method runs under one lock, so threads may share a cache;
    what several calls find out together needs a lock of the caller's.

    Pages are copied on CuPy's current stream, where kernels read and write them too, or on a stream given to
    `swap_out` and `swap_in`; the host waits for none of it. What uses the pages on yet another stream needs events
    of the caller's. Keep the cache until its swaps are done.

    A page is *in use*, *cached* (held by no sequence, but published: the next prompt with these tokens gets
    it) or *free*. When free pages run out, the cached page that has been without a holder for longest is
    evicted; of a sequence that ended, the last page goes first.

    Examples
    --------
    >>> cache = PagedKVCache(64, 16, num_kv_heads=8, head_dim=128, dtype=np.float16)
    >>> cache.add_sequence("a", range(40))
    0
    >>> cache.slot_mapping(["a"], 40)[-2:]  # where to write keys and values
    array([38, 39])
    >>> cache.publish("a", computed_length=40)
    2
    >>> cache.add_sequence("b", range(40))  # these are there already
    32
    >>> cache.block_table(["a", "b"])
    array([[0, 1, 2],
           [0, 1, 3]], dtype=int32)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        num_layers: int = 1,
        dtype: Any,
        xp: Any = np,
        k_scale: Any = None,
        v_scale: Any = None,
        num_host_pages: int = 0,
        max_events: int = 4096,
        poison: bool = False,
    ) -> None:
        rows = (num_pages, page_size, num_kv_heads)
        dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
        if (k_scale is not None or v_scale is not None) and np.dtype(dtype) != FLOAT8:
            raise ValueError(f"PagedKVCache: k_scale and v_scale need dtype float8_e4m3fn; got {np.dtype(dtype)}")
        storage = Storage(rows, dims, num_layers, num_host_pages, dtype, xp, poison)
        super().__init__(storage, num_pages, page_size, num_host_pages, max_events)
        self.k_pages, self.v_pages = storage.k_pages, storage.v_pages
        self._k_scale = scale(xp, "k_scale", k_scale, (num_layers, num_kv_heads))
        self._v_scale = scale(xp, "v_scale", v_scale, (num_layers, num_kv_heads))
        self._send = _paged_index.sender(xp)

    @property
    def k_scale(self) -> Any:
        """What stored keys are to be multiplied by.

        Returns
        -------
        array, (num_layers, num_kv_heads), float32, or None
        """
        return self._k_scale

    @property
    def v_scale(self) -> Any:
        """What stored values are to be multiplied by.

        Returns
        -------
        array, (num_layers, num_kv_heads), float32, or None
        """
        return self._v_scale

    @locked
    def layer(self, number: int) -> dict[str, Any]:
        """What `append_kv`, `gather_kv` and `decode` need to know of a layer: ``decode(q, **cache.layer(0), ...)``.

        Parameters
        ----------
        number : int
            The layer, from 0.

        Returns
        -------
        dict
            k_pages, v_pages (num_pages, page_size, num_kv_heads, head_dim or head_dim_v), and k_scale, v_scale
            (num_kv_heads,) float32 or None. To `gather_kv` a float8 cache with scales, give it a dtype or k and v too.
        """
        number = count("PagedKVCache.layer: number", number, 0, len(self.k_pages) - 1)
        k_scale, v_scale = (None if scale is None else scale[number] for scale in (self._k_scale, self._v_scale))
        pages = {"k_pages": self.k_pages[number], "v_pages": self.v_pages[number]}
        return {**pages, "k_scale": k_scale, "v_scale": v_scale}

    @locked
    def copies(self, pairs: Pairs) -> None:
        """Copy whole pages, in all layers; `extend` and `append` do it before a shared page is written into.

        Parameters
        ----------
        pairs : list of (int, int)
            (source page, target page). They are copied side by side: no target may be named twice or be a source,
            and none may be published.

        Raises
        ------
        ValueError
            If one is; nothing is copied then.
        """
        targets, sources = [target for _, target in pairs], {source for source, _ in pairs}
        total, names = self._pool.total, self._pool.digest_of
        for rule, wrong in (
            (f"have pages from 0 to {total - 1}", [page for pair in pairs for page in pair if not 0 <= page < total]),
            ("name each target once", [page for page, times in Counter(targets).items() if times > 1]),
            ("have no target that is a source", [page for page in targets if page in sources]),
            ("have no target that is published", [page for page in targets if page in names]),
        ):
            if wrong:
                raise ValueError(f"PagedKVCache.copies: pairs must {rule}; got {wrong[0]}")
        self._storage.copy(pairs, self._send)

    @locked
    def num_free(self) -> int:
        """Pages that an allocation could get.

        Returns
        -------
        int
            Free pages, and cached ones that it would evict.
        """
        return self._pool.available()

    @locked
    def stats(self) -> dict[str, int]:
        """Numbers for a log.

        Returns
        -------
        dict
            Pages: total, free, cached, in_use; host_total, host_free. Now: sequences, tokens (of all
            sequences), swaps (on their way). Since the beginning: hits and misses (full pages of prompts in
            `add_sequence`), evictions, forks, copies.
        """
        pool, host = self._pool, self._host_pool
        return {
            "total": pool.total,
            "free": len(pool.free),
            "cached": len(pool.cached),
            "in_use": pool.total - pool.available(),
            "host_total": host.total,
            "host_free": host.available(),
            "sequences": len(self._sequences),
            "tokens": sum(seq.length for seq in self._sequences.values()),
            "swaps": len(self._swaps),
            "evictions": pool.evictions,
            **{name: self._counts[name] for name in ("hits", "misses", "forks", "copies")},
        }

    @locked
    def take_events(self) -> list[PageEvent]:
        """What happened to pages since the last call.

        Returns
        -------
        list of PageEvent
            The last `max_events` of them, oldest first.
        """
        events = list(self._events)
        self._events.clear()
        return events

    @locked
    def check(self) -> None:
        """Raise AssertionError with the name of the first invariant that doesn't hold. Slow, for tests."""
        _paged_check.check(self)
