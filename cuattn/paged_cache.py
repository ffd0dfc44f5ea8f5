"""Where keys and values live between calls: pages, and who holds which.

A `PagedKVCache` divides the memory for keys and values into pages of a few tokens and gives each sequence the
pages it needs, when it needs them. Sequences share pages that hold the same tokens. The manager decides, in
Python on the host; kernels read and write the pages through the index arrays that it hands out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from cuattn import _paged_check, _paged_index
from cuattn._page_pool import OutOfPages, PageEvent
from cuattn._paged_growth import Pairs
from cuattn._paged_record import Record, UnknownSequence, count, locked
from cuattn._paged_storage import Storage, scale
from cuattn._paged_swap import Swap, Swaps

__all__ = ["OutOfPages", "PageEvent", "PagedKVCache", "Swap", "UnknownSequence"]


class PagedKVCache(Swaps):
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
        What stored keys and values are to be multiplied by. They belong to the cache for its whole life, so
        they are right for every page, however it was shared, copied or swapped.
    num_host_pages : int
        Slots of the pool on the host that `swap_out` moves pages to.
    max_events : int
        How many events are kept until `take_events`; older ones are dropped.
    poison : bool
        Fill the pages with NaN, so that reading what was never written shows. For tests.

    Attributes
    ----------
    k_pages, v_pages : list of array, (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)
        One for each layer.
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
    what several calls find out together needs a lock of the caller's. Work on the pages is ordered by the
    stream: use one, or events.

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
        self._storage = Storage(rows, dims, num_layers, dtype, xp, poison)
        super().__init__(num_pages, page_size, num_host_pages, max_events)
        self.k_pages, self.v_pages = self._storage.k_pages, self._storage.v_pages
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
    def block_table(self, seq_ids: Sequence[Hashable], width: int | None = None) -> Any:
        """The pages of each sequence, for kernels.

        Parameters
        ----------
        seq_ids : sequence of hashable
            The batch.
        width : int, optional
            Columns. Default: those of the longest sequence.

        Returns
        -------
        array, (batch, width), int32
            -1 after the last page, and where pages were released.

        Raises
        ------
        UnknownSequence, ValueError
            If a sequence is unknown or not on the device, or has more pages than columns.

        Notes
        -----
        On a device, the copy is queued on the current stream and not waited for; don't call it inside a graph
        capture.
        """
        tables = [seq.table for seq in self._batch("block_table", seq_ids)]
        most = max(map(len, tables), default=0)
        columns = most if width is None else count("PagedKVCache.block_table: width", width, most)
        return self._send(_paged_index.block_table(tables, columns))

    @locked
    def cache_seqlens(self, seq_ids: Sequence[Hashable], num_new: int | Sequence[int] = 0) -> Any:
        """The lengths of sequences, for kernels.

        Parameters
        ----------
        seq_ids : sequence of hashable
            The batch.
        num_new : int or sequence of int, (batch,)
            Tokens at the end of each sequence that are not counted: `decode` wants the lengths before the new
            tokens.

        Returns
        -------
        array, (batch,), int32
            Sent as `block_table`.

        Raises
        ------
        UnknownSequence, TypeError, ValueError
            If a sequence is unknown, not on the device or shorter than `num_new`.
        """
        batch = self._batch("cache_seqlens", seq_ids)
        lengths = [seq.length for seq in batch]
        new = _paged_index.new_tokens("PagedKVCache.cache_seqlens: num_new", lengths, num_new)
        return self._send(np.array([length - n for length, n in zip(lengths, new)], np.int32))

    @locked
    def slot_mapping(self, seq_ids: Sequence[Hashable], num_new: int | Sequence[int]) -> Any:
        """Where to write the keys and values of the last tokens of each sequence.

        Parameters
        ----------
        seq_ids : sequence of hashable
            The batch.
        num_new : int or sequence of int, (batch,)
            Tokens at the end of each sequence.

        Returns
        -------
        array, (sum of num_new,), int64
            ``page * page_size + offset``, sequence after sequence; -1 where nothing is to be written: in
            released pages, and in published ones, whose contents others rely on. Sent as `block_table`.

        Raises
        ------
        UnknownSequence, TypeError, ValueError
            If a sequence is unknown, not on the device or shorter than `num_new`.
        """
        batch = self._batch("slot_mapping", seq_ids)
        tables, lengths = [seq.table for seq in batch], [seq.length for seq in batch]
        new = _paged_index.new_tokens("PagedKVCache.slot_mapping: num_new", lengths, num_new)
        return self._send(
            _paged_index.slot_mapping(tables, lengths, new, self.page_size, self._pool.digest_of)
        )

    @locked
    def copies(self, pairs: Pairs) -> None:
        """Copy whole pages, in all layers; `extend` and `append` do it before a shared page is written into.

        Parameters
        ----------
        pairs : list of (int, int)
            (source page, target page). All sources are read before any target is written.
        """
        source, target = self._send(np.array(pairs, np.int64).reshape(-1, 2).T)
        self._storage.copy(source, target)

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

    def _batch(self, method: str, seq_ids: Sequence[Hashable]) -> list[Record]:
        return [self._resident(method, seq_id) for seq_id in seq_ids]
