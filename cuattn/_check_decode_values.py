"""What only the device knows of a decode call, for CUATTN_CHECK=values."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn import _check, _check_scale, reference
from cuattn._call import Call
from cuattn._dims_decode import DecodeDims


def decode_values(call: Call, dims: DecodeDims) -> None:
    """Table, lengths, padding and batch indices are in range, for all that is read and written."""
    _check_scale.positive(call)
    table, lengths = call.to_host("block_table"), call.to_host("cache_seqlens")
    rows, leftpad, new = np.arange(dims.batch), np.zeros(dims.batch, np.int64), dims.new.seqlen
    if dims.batch_idx.bytes:
        rows = call.to_host("cache_batch_idx")
        _within(call, "cache_batch_idx", rows, dims.num_sequences - 1, "num_sequences - 1")
    room = "max_pages_per_seq * page_size" + " - seqlen_new" * (new > 0)
    _within(call, "cache_seqlens", lengths, dims.max_tokens - new, room)
    lengths = lengths.astype(np.int64)
    if dims.leftpad.bytes:
        leftpad = call.to_host("cache_leftpad")
        _within(call, "cache_leftpad", leftpad, lengths, "cache_seqlens")
    _rotary(call, dims, lengths)
    for b, past in enumerate(lengths.tolist()):
        total = past + new
        first = max(int(leftpad[b]), total - dims.seqlen_q - dims.window[0]) if dims.seqlen_q else total
        first = min(first, past) if new else first  # tokens from here on are seen or written
        first_page, end = first // dims.page_size, -(-total // dims.page_size)
        pages = table[rows[b], first_page : end if first < total else first_page]
        _check.page_ids(call.function, rows[b], first_page, pages, dims.num_pages)
    slots, counts = np.unique(reference.slots(table[rows], lengths, new, dims.page_size), return_counts=True)
    for slot in slots[counts > 1][:1]:
        page, offset = divmod(int(slot), dims.page_size)
        rule = "block_table must give each new token a place of its own"
        raise ValueError(f"{call.function}: {rule}; got token {offset} of page {page} twice")


def _rotary(call: Call, dims: DecodeDims, lengths: np.ndarray) -> None:
    """Every new token and every query has a row of cosines and sines."""
    if dims.new.rotary is not None:
        turned = dims.seqlen_q if dims.new.queries_turn else min(dims.seqlen_q, 1)
        if reach := max(dims.new.seqlen, turned):
            rule = f"rotary_cos.shape[0] - {'seqlen_new' if reach == dims.new.seqlen else 'seqlen_q'}"
            _within(call, "cache_seqlens", lengths, dims.new.rotary.max_positions - reach, rule)


def _within(call: Call, name: str, values: np.ndarray, most: Any, rule: str) -> None:
    for b, (value, limit) in enumerate(np.broadcast(values, most)):
        if not 0 <= value <= limit:
            raise ValueError(f"{call.function}: {name}[{b}] must be within 0 and {rule} ({limit}); got {value}")
