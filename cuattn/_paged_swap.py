"""Swapping: sequences that wait on the host, and pages that are on their way."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from cuattn._page_pool import PagePool
from cuattn._paged_record import Pairs, Record, locked
from cuattn._paged_sequences import Sequences
from cuattn._paged_storage import Storage


@dataclass(frozen=True, eq=False)
class Swap:
    """Pages of one sequence on their way; both sides stay reserved until `PagedKVCache.swap_done`.

    `PagedKVCache.swap_out` and `swap_in` return it. Each is equal to itself only.

    Attributes
    ----------
    seq_id : hashable
        The sequence.
    to_host : bool
        Whether they go from the device to the host; else back.
    pairs : list of (int, int)
        What is copied: (page, slot of the host pool), or (slot, page) on the way back.
    event : cupy.cuda.Event or None
        Behind the copies on their stream; None where they have been made.
    """

    seq_id: Hashable
    to_host: bool
    pairs: Pairs
    event: Any = None

    @property
    def done(self) -> bool:
        """Whether the pages have arrived; asks the device and does not wait.

        Returns
        -------
        bool
        """
        return self.event is None or self.event.done


class Swaps(Sequences):
    """The part of `PagedKVCache` that moves sequences between the device and a pool of pages on the host."""

    def __init__(
        self, storage: Storage, num_pages: int, page_size: int, num_host_pages: int, max_events: int
    ) -> None:
        super().__init__(num_pages, page_size, num_host_pages, max_events)
        self._storage = storage
        self._swaps: dict[Swap, Record] = {}  # on their way

    @locked
    def swap_out(self, seq_id: Hashable, *, stream: Any = None) -> Swap:
        """Begin to move a sequence to the host.

        Parameters
        ----------
        seq_id : hashable
            The sequence; it can't be used until it is back, only freed.
        stream : cupy.cuda.Stream, optional
            The copies are queued here, behind what is queued on the current stream now. Default: the current stream.

        Returns
        -------
        Swap
            To be passed to `swap_done`. Pages that are shared are copied too; on the host and after the way back
            the sequence shares with nobody.

        Raises
        ------
        OutOfPages
            If the host pool has too few slots; nothing has changed then.
        UnknownSequence, ValueError
            If the sequence is unknown or not on the device.
        """
        seq = self._resident("swap_out", seq_id)
        return self._begin("swap_out", seq_id, seq, True, stream)

    @locked
    def swap_in(self, seq_id: Hashable, *, stream: Any = None) -> Swap:
        """Begin to move a sequence back to the device.

        Parameters
        ----------
        seq_id : hashable
            A sequence on the host.
        stream : cupy.cuda.Stream, optional
            As for `swap_out`.

        Returns
        -------
        Swap
            To be passed to `swap_done`; the sequence can be used from then on.

        Raises
        ------
        OutOfPages
            If there are too few pages; nothing has changed then.
        UnknownSequence, ValueError
            If the sequence is unknown or not on the host.
        """
        seq = self._known("swap_in", seq_id)
        if seq.place != "on the host":
            raise ValueError(f"PagedKVCache.swap_in: seq_id must be on the host; {seq_id!r} is {seq.place}")
        return self._begin("swap_in", seq_id, seq, False, stream)

    @locked
    def swap_done(self, swap: Swap, *, moved: bool = True) -> None:
        """End a swap: from now on the pages that it comes from can be used for something else.

        Parameters
        ----------
        swap : Swap
            Each one once. If it is not ``swap.done`` yet, what is queued on the current stream from now on waits for
            it, on the device; the host does not.
        moved : bool
            False to give it up: the sequence stays where it was.

        Raises
        ------
        ValueError
            If the swap is not on its way.

        Notes
        -----
        A sequence that was freed meanwhile stays freed; its pages on both sides are released here.
        """
        seq = self._swaps.get(swap)
        if seq is None:
            raise ValueError(
                "PagedKVCache.swap_done: swap must be on its way; got one that is done, or not of this cache"
            )
        self._storage.wait(swap.event)
        del self._swaps[swap]
        sources, targets = ([pair[side] for pair in reversed(swap.pairs)] for side in (0, 1))
        source_pool, target_pool = self._pools(swap.to_host)
        alive = self._sequences.get(swap.seq_id) is seq
        if moved or not alive:
            source_pool.release(sources)
        if not moved or not alive:
            target_pool.release(targets)
        if moved:
            seq.table[seq.released :] = array("i", reversed(targets))
            seq.settled = seq.released
        seq.place = "on the host" if swap.to_host == moved else "on the device"

    def _begin(self, method: str, seq_id: Hashable, seq: Record, to_host: bool, stream: Any) -> Swap:
        sources = seq.table[seq.released :]
        pool = self._pools(to_host)[1]
        where = f"PagedKVCache.{method} (to the {'host' if to_host else 'device'})"
        targets = pool.acquire(where, (), len(sources))
        pairs = list(zip(sources, targets))
        try:
            event = self._storage.swap(pairs, to_host, stream)
        except BaseException:
            pool.release(targets)
            raise
        swap = Swap(seq_id, to_host, pairs, event)
        self._swaps[swap] = seq
        seq.place = "on its way"
        return swap

    def _pools(self, to_host: bool) -> tuple[PagePool, PagePool]:
        """Where pages come from and where they go."""
        return (self._pool, self._host_pool) if to_host else (self._host_pool, self._pool)
