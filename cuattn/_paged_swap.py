"""Swapping: sequences that wait on the host, and pages that are on their way."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass

from cuattn._page_pool import PagePool
from cuattn._paged_growth import Pairs
from cuattn._paged_record import Record, locked
from cuattn._paged_sequences import Sequences


@dataclass(frozen=True, eq=False)
class Swap:
    """Pages of one sequence on their way; both sides stay reserved until `PagedKVCache.swap_done`.

    Attributes
    ----------
    seq_id : hashable
        The sequence.
    to_host : bool
        From the device to the host, or back.
    pairs : list of (int, int)
        What is to be copied: (page, slot of the host pool), or (slot, page) on the way back.
    """

    seq_id: Hashable
    to_host: bool
    pairs: Pairs


class Swaps(Sequences):
    """The part of `PagedKVCache` that moves sequences between the device and a pool of pages on the host."""

    def __init__(self, num_pages: int, page_size: int, num_host_pages: int, max_events: int) -> None:
        super().__init__(num_pages, page_size, num_host_pages, max_events)
        self._swaps: dict[Swap, Record] = {}  # on their way

    @locked
    def swap_out(self, seq_id: Hashable) -> Swap:
        """Begin to move a sequence to the host.

        Parameters
        ----------
        seq_id : hashable
            The sequence; it can't be used until it is back, only freed.

        Returns
        -------
        Swap
            Copy its `pairs`, then pass it to `swap_done`. Pages that are shared are copied too; on the host
            and after the way back the sequence shares with nobody.

        Raises
        ------
        OutOfPages
            If the host pool has too few slots; nothing has changed then.
        UnknownSequence, ValueError
            If the sequence is unknown or not on the device.
        """
        seq = self._resident("swap_out", seq_id)
        return self._begin("swap_out", seq_id, seq, to_host=True)

    @locked
    def swap_in(self, seq_id: Hashable) -> Swap:
        """Begin to move a sequence back to the device.

        Parameters
        ----------
        seq_id : hashable
            A sequence on the host.

        Returns
        -------
        Swap
            Copy its `pairs`, then pass it to `swap_done`.

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
        return self._begin("swap_in", seq_id, seq, to_host=False)

    @locked
    def swap_done(self, swap: Swap, *, moved: bool = True) -> None:
        """Say that the pages of a swap have arrived; only now the pages they come from can be used again.

        Parameters
        ----------
        swap : Swap
            Each one once. It may also be passed as soon as its copies are queued on the stream on which all
            later work on these pages is queued.
        moved : bool
            False if the copying failed: the sequence stays where it was.

        Raises
        ------
        ValueError
            If the swap is not on its way.

        Notes
        -----
        A sequence that was freed meanwhile stays freed; its pages on both sides are released here.
        """
        seq = self._swaps.pop(swap, None)
        if seq is None:
            raise ValueError(
                "PagedKVCache.swap_done: swap must be on its way; got one that is done, or not of this cache"
            )
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

    def _begin(self, method: str, seq_id: Hashable, seq: Record, *, to_host: bool) -> Swap:
        sources = seq.table[seq.released :]
        where = f"PagedKVCache.{method} (to the {'host' if to_host else 'device'})"
        targets = self._pools(to_host)[1].acquire(where, (), len(sources))
        swap = Swap(seq_id, to_host, list(zip(sources, targets)))
        self._swaps[swap] = seq
        seq.place = "on its way"
        return swap

    def _pools(self, to_host: bool) -> tuple[PagePool, PagePool]:
        """Where pages come from and where they go."""
        return (self._pool, self._host_pool) if to_host else (self._host_pool, self._pool)
