"""Reuse of prefixes: finding pages by the names of their contents, and giving pages their names."""

from __future__ import annotations

import threading
from array import array
from collections import Counter, deque
from collections.abc import Hashable, Sequence

import numpy as np

from cuattn import _prefix_hash
from cuattn._page_pool import PageEvent, PagePool
from cuattn._paged_record import MAX_COUNT, Record, UnknownSequence, count, locked, token_ids
from cuattn._prefix_hash import Salt


class Prefixes:
    """The part of `PagedKVCache` that knows which pages hold which tokens."""

    def __init__(self, num_pages: int, page_size: int, num_host_pages: int, max_events: int) -> None:
        count("PagedKVCache: max_events", max_events, 0, MAX_COUNT)
        self.page_size = page_size
        self._lock = threading.RLock()
        self._events: deque[PageEvent] = deque(maxlen=max_events)
        self._pool = PagePool(num_pages, self._events.append)
        self._host_pool = PagePool(num_host_pages)
        self._sequences: dict[Hashable, Record] = {}
        self._counts: Counter[str] = Counter()  # what stats() reports besides the sizes

    @locked
    def match_prefix(self, tokens: Sequence[int] | np.ndarray, salt: Salt = None) -> int:
        """How many leading tokens of a prompt are in published pages.

        Parameters
        ----------
        tokens : sequence of int or NumPy array, (num_tokens,)
            The prompt.
        salt : None, bool, int, str, bytes or a tuple of these
            What else keys and values depend on, such as ``("lora", "X")``; only equal salts match.

        Returns
        -------
        int
            A multiple of the page size, less than the number of tokens: the last token is always left to be
            computed, since its query is needed. The search ends at the first page that is missing.

        Notes
        -----
        Holds nothing: the pages may be evicted before the next call. `add_sequence` searches again, holds
        what it finds and returns the number that counts.
        """
        ids = token_ids("PagedKVCache.match_prefix: tokens", tokens)
        return len(self._match(ids, salt)[0]) * self.page_size

    @locked
    def publish(self, seq_id: Hashable, computed_length: int) -> int:
        """Let later sequences find the full pages of this one.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        computed_length : int
            Tokens from the start whose keys and values are in their pages, or will be before anything that is
            queued from now on. Drafts that may yet be rejected don't belong to them.

        Returns
        -------
        int
            Pages that can be found from now on and could not before. A page whose contents can be found in
            another page already stays as it is, and the other one is kept.

        Raises
        ------
        UnknownSequence, ValueError
            If the sequence is unknown or not on the device, or is shorter.

        Notes
        -----
        Only tokens whose ids are known (`add_sequence`, `append`) without a gap from the first one on can be
        found.
        """
        seq = self._resident("publish", seq_id)
        computed = count("PagedKVCache.publish: computed_length", computed_length, 0, seq.length)
        full = min(computed, len(seq.tokens)) // self.page_size
        while len(seq.digests) < full:
            parent = seq.digests[-1] if seq.digests else _prefix_hash.root(seq.salt, self.page_size)
            seq.digests.append(
                _prefix_hash.extend(parent, self._page_of_tokens(seq.tokens, len(seq.digests)))
            )
        before = len(self._pool.page_of)
        for index in range(seq.settled, full):
            if self._pool.publish(seq.table[index], seq.digests[index]) and index == seq.settled:
                seq.settled += 1
        return len(self._pool.page_of) - before

    def _match(self, ids: array[int], salt: Salt) -> tuple[list[int], list[bytes]]:
        """The published pages with the longest prefix of `ids`, and their names."""
        pages: list[int] = []
        digests: list[bytes] = []
        parent = _prefix_hash.root(salt, self.page_size)
        for index in range(self._most_hits(ids)):
            parent = _prefix_hash.extend(parent, self._page_of_tokens(ids, index))
            page = self._pool.page_of.get(parent)
            if page is None:
                break
            pages.append(page)
            digests.append(parent)
        return pages, digests

    def _most_hits(self, ids: array[int]) -> int:
        """Full pages of a prompt, its last token left out."""
        return max(len(ids) - 1, 0) // self.page_size

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _page_of_tokens(self, ids: array[int], index: int) -> array[int]:
        return ids[index * self.page_size : (index + 1) * self.page_size]

    def _known(self, method: str, seq_id: Hashable) -> Record:
        seq = self._find(method, seq_id)
        if seq is None:
            raise UnknownSequence(f"PagedKVCache.{method}: seq_id must be a known sequence; got {seq_id!r}")
        return seq

    def _resident(self, method: str, seq_id: Hashable) -> Record:
        seq = self._known(method, seq_id)
        if seq.place != "on the device":
            raise ValueError(
                f"PagedKVCache.{method}: seq_id must be on the device; {seq_id!r} is {seq.place}"
            )
        return seq

    def _new(self, method: str, name: str, seq_id: Hashable) -> None:
        if self._find(method, seq_id, name) is not None:
            raise ValueError(f"PagedKVCache.{method}: {name} must be new; {seq_id!r} is in use")

    def _find(self, method: str, seq_id: Hashable, name: str = "seq_id") -> Record | None:
        try:
            return self._sequences.get(seq_id)
        except TypeError:
            got = type(seq_id).__name__
            raise TypeError(f"PagedKVCache.{method}: {name} must be hashable; got {got}") from None
