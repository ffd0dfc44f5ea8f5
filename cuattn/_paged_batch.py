"""Index arrays of a batch for kernels: where its pages are, how long its sequences are, where new tokens go."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from cuattn import _paged_index
from cuattn._paged_record import Record, count, locked
from cuattn._paged_swap import Swaps


class Batches(Swaps):
    """The part of `PagedKVCache` that speaks to kernels."""

    _send: Callable[[np.ndarray], Any]  # from the host to where the pages are

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

    def _batch(self, method: str, seq_ids: Sequence[Hashable]) -> list[Record]:
        if isinstance(seq_ids, (str, bytes)):
            raise TypeError(f"PagedKVCache.{method}: seq_ids must be a sequence of ids; got {seq_ids!r}, which is one")
        return [self._resident(method, seq_id) for seq_id in seq_ids]
