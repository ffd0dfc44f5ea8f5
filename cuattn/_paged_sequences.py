"""Sequences over pages: they begin, share their pages, are cut off and end."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np

from cuattn._paged_growth import Growth
from cuattn._paged_record import RELEASED, Record, count, locked, token_ids
from cuattn._prefix_hash import Salt


class Sequences(Growth):
    """The part of `PagedKVCache` that begins and ends sequences."""

    @locked
    def add_sequence(
        self, seq_id: Hashable, tokens: Sequence[int] | np.ndarray | None = None, *, salt: Salt = None
    ) -> int:
        """Begin a sequence, with the pages for its prompt.

        Parameters
        ----------
        seq_id : hashable
            A new name.
        tokens : sequence of int or NumPy array, (num_tokens,), optional
            The prompt, or the first part of it that is to be computed; `append` adds the others. Without it
            the sequence is empty.
        salt : None, bool, int, str, bytes or a tuple of these
            What else keys and values depend on, such as ``("lora", "X")``.

        Returns
        -------
        int
            Leading tokens that are in the cache already, found as by `match_prefix`; the others are to be
            computed and written: ``slot_mapping([seq_id], len(tokens) - result)``.

        Raises
        ------
        OutOfPages
            If the pages don't suffice; nothing has changed then.
        TypeError, ValueError
            If the name is not new, or tokens or salt are of another type.
        """
        self._new("add_sequence", "seq_id", seq_id)
        ids = token_ids("PagedKVCache.add_sequence: tokens", () if tokens is None else tokens)
        hits, digests = self._match(ids, salt)
        fresh = self._pool.acquire("PagedKVCache.add_sequence", hits, self._pages(len(ids)) - len(hits))
        self._sequences[seq_id] = Record(salt, len(ids), array("i", hits + fresh), ids, digests, len(hits))
        self._counts["hits"] += len(hits)
        self._counts["misses"] += self._most_hits(ids) - len(hits)
        return len(hits) * self.page_size

    @locked
    def fork(self, seq_id: Hashable, new_id: Hashable) -> None:
        """Begin a sequence as a copy of another; they share all pages until one writes into the last one.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        new_id : hashable
            A new name.

        Raises
        ------
        UnknownSequence, TypeError, ValueError
            If the sequence is unknown or not on the device, or the name is not new.
        """
        seq = self._resident("fork", seq_id)
        self._new("fork", "new_id", new_id)
        self._pool.share(seq.held())
        self._sequences[new_id] = seq.copy()
        self._counts["forks"] += 1

    @locked
    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Cut a sequence off, such as drafts that were rejected, and release the pages after its new end.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        length : int
            Tokens to keep. What others share or can find stays as it is: growing again copies the last page
            first if it is shared.

        Raises
        ------
        UnknownSequence, TypeError, ValueError
            If the sequence is unknown, not on the device or shorter, or if a released page would come into
            the window again.
        """
        seq = self._resident("truncate", seq_id)
        length = count("PagedKVCache.truncate: length", length, 0, seq.length)
        if length < seq.shortest:
            rule = f"at least {seq.shortest}, or pages that are released would come into the window again"
            raise ValueError(f"PagedKVCache.truncate: length must be {rule}; got {length}")
        self._pool.release(seq.table[self._pages(length) :][::-1])
        seq.cut(length, self.page_size)

    @locked
    def free(self, seq_id: Hashable) -> None:
        """End a sequence and release its pages, on the device or on the host.

        Parameters
        ----------
        seq_id : hashable
            The sequence. Its name can be used again at once; pages that are on their way are released by
            `swap_done`.

        Raises
        ------
        UnknownSequence
            If it is unknown, such as freed already.

        Notes
        -----
        Kernels that were queued before may still read the pages: what is queued on the same stream afterwards
        can't overtake them. Work on other streams has to wait for an event first.
        """
        seq = self._known("free", seq_id)
        if seq.place != "on its way":
            (self._pool if seq.place == "on the device" else self._host_pool).release(seq.held())
        del self._sequences[seq_id]

    @locked
    def release_outside_window(
        self, seq_id: Hashable, window_left: int, *, computed_length: int | None = None
    ) -> int:
        """Release the pages that no later query sees; their table entries become -1.

        Parameters
        ----------
        seq_id : hashable
            The sequence. Its length stays as it is.
        window_left : int
            The query at position i sees keys from ``i - window_left`` on; -1 is unbounded.
        computed_length : int, optional
            Later queries are at positions from here on. Default: the length, for tokens that have all been
            computed.

        Returns
        -------
        int
            Pages released by this call.

        Raises
        ------
        UnknownSequence, TypeError, ValueError
            If the sequence is unknown or not on the device, or a number is out of range.
        """
        seq = self._resident("release_outside_window", seq_id)
        where = "PagedKVCache.release_outside_window"
        window = count(f"{where}: window_left", window_left, -1)
        given = seq.length if computed_length is None else computed_length
        computed = count(f"{where}: computed_length", given, 0, seq.length)
        behind = max(computed - window, 0) // self.page_size
        number = behind - seq.released
        if window == -1 or number <= 0:
            return 0
        self._pool.release(seq.table[seq.released : behind][::-1])
        seq.table[seq.released : behind] = array("i", [RELEASED]) * number
        seq.released, seq.settled = behind, max(seq.settled, behind)
        seq.shortest = max(seq.shortest, behind * self.page_size + window)
        return number
