"""Growth: every sequence of a batch gets the pages it needs, or none does; shared pages are copied first."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from cuattn._page_pool import PageEvent
from cuattn._paged_prefix import Prefixes
from cuattn._paged_record import Pairs, Record, by_sequence, count, locked, token_ids


class Growth(Prefixes):
    """The part of `PagedKVCache` that makes room for new tokens."""

    @locked
    def extend(self, seq_id: Hashable, num_tokens: int) -> Pairs:
        """Make room for tokens whose ids don't matter; pages from here on can't be published.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        num_tokens : int
            Tokens to add; 0 does nothing.

        Returns
        -------
        list of (int, int)
            Copy on write: where the last, partly filled page was shared, its (page, new page). `copies` has queued
            the copying on the current stream.

        Raises
        ------
        OutOfPages
            If the pages don't suffice; nothing has changed then.
        UnknownSequence, TypeError, ValueError
            If the sequence is unknown or not on the device, or the number is negative.
        """
        return self._grow("extend", [(seq_id, num_tokens, None)])

    @locked
    def extend_many(self, num_tokens: Mapping[Hashable, int]) -> Pairs:
        """As `extend`, for several sequences: all of them or none.

        Parameters
        ----------
        num_tokens : mapping of hashable to int
            Tokens to add to each sequence.

        Returns
        -------
        list of (int, int)
            As `extend`.
        """
        numbers = by_sequence("PagedKVCache.extend_many: num_tokens", num_tokens)
        return self._grow("extend_many", [(seq_id, number, None) for seq_id, number in numbers])

    @locked
    def append(self, seq_id: Hashable, tokens: Sequence[int] | np.ndarray) -> Pairs:
        """As `extend`, with token ids, so that full pages can be published.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        tokens : sequence of int or NumPy array, (num_tokens,)
            The ids. After tokens without ids (`extend`) they are not kept.

        Returns
        -------
        list of (int, int)
            As `extend`.
        """
        ids = token_ids("PagedKVCache.append: tokens", tokens)
        return self._grow("append", [(seq_id, len(ids), ids)])

    @locked
    def append_many(self, tokens: Mapping[Hashable, Sequence[int] | np.ndarray]) -> Pairs:
        """As `append`, for several sequences: all of them or none.

        Parameters
        ----------
        tokens : mapping of hashable to sequence of int or NumPy array
            Token ids to add to each sequence.

        Returns
        -------
        list of (int, int)
            As `extend`.
        """
        where = "PagedKVCache.append_many: tokens"
        ids = [(seq_id, token_ids(where, given)) for seq_id, given in by_sequence(where, tokens)]
        return self._grow("append_many", [(seq_id, len(given), given) for seq_id, given in ids])

    def copies(self, pairs: Pairs) -> None:
        """Copy pages; here the keys and values come in."""
        raise NotImplementedError

    def _grow(self, method: str, wanted: Iterable[tuple[Hashable, int, array[int] | None]]) -> Pairs:
        """Count, take pages, copy the pages that others hold too, and then change the sequences."""
        growing: list[tuple[Record, int, array[int] | None]] = []
        for seq_id, given, tokens in wanted:
            seq = self._resident(method, seq_id)
            number = count(f"PagedKVCache.{method}: num_tokens", given)
            if number:
                growing.append((seq, number, tokens))
        copying = self._writing_into_shared([seq for seq, _, _ in growing])
        fresh = sum(self._pages(seq.length + number) - len(seq.table) for seq, number, _ in growing)
        taken = self._pool.acquire(f"PagedKVCache.{method}", (), len(copying) + fresh)
        pages = iter(taken)
        pairs = [(seq.table[-1], page) for seq, page in zip(copying, pages)]
        self._copy(pairs, taken)
        for seq, (source, target) in zip(copying, pairs):
            seq.table[-1] = target
            self._pool.release([source])
        for seq, number, tokens in growing:
            if seq.length % self.page_size:  # its own page by now; if it was full once, it may have a name
                self._pool.unpublish(seq.table[-1])
            seq.table.extend(islice(pages, self._pages(seq.length + number) - len(seq.table)))
            if tokens is not None and len(seq.tokens) == seq.length:
                seq.tokens.extend(tokens)
            seq.length += number
        return pairs

    def _writing_into_shared(self, growing: Sequence[Record]) -> list[Record]:
        """Those that need a copy of their last page; the last one that holds a page keeps it."""
        left: dict[int, int] = {}  # page -> how many hold it
        copying = []
        for seq in growing:
            if seq.length % self.page_size:
                page = seq.table[-1]
                left.setdefault(page, self._pool.refs[page])
                if left[page] > 1:
                    left[page] -= 1
                    copying.append(seq)
        return copying

    def _copy(self, pairs: Pairs, taken: list[int]) -> None:
        if not pairs:
            return
        try:
            self.copies(pairs)
        except BaseException:
            self._pool.release(taken)
            raise
        self._counts["copies"] += len(pairs)
        self._events.extend(PageEvent("copied", target, source=source) for source, target in pairs)
