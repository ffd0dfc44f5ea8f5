"""What only the device knows of a packed attention call, for CUATTN_CHECK=values."""

from __future__ import annotations

import numpy as np

from cuattn import _check, _check_scale
from cuattn._call import Call
from cuattn._dims_attention import AttentionDims


def attention_values(call: Call, dims: AttentionDims) -> None:
    """Offsets ascend within their arrays, lengths are in range, and pages of keys that are seen exist."""
    _check_scale.positive(call)
    cu_q = call.to_host("cu_seqlens_q")
    _check.ascending_offsets(f"{call.function}: cu_seqlens_q", cu_q, dims.seqlen_q, "total_q")
    lengths_q, most = np.diff(cu_q.astype(np.int64)), np.full(dims.batch, dims.seqlen_k)
    lengths = most
    if dims.cu_k.bytes:
        cu_k, where = call.to_host("cu_seqlens_k"), f"{call.function}: cu_seqlens_k"
        total = np.iinfo(np.int64).max if dims.page_size else dims.seqlen_k
        _check.ascending_offsets(where, cu_k, total, "total_k")
        lengths = most = np.diff(cu_k.astype(np.int64))
    if dims.used_k.bytes:
        lengths = call.to_host("seqused_k").astype(np.int64)
        for b, (n, room) in enumerate(zip(lengths, most)):
            if not 0 <= n <= room:
                rule = f"seqused_k[{b}] must be within 0 and the keys that there are ({room})"
                raise ValueError(f"{call.function}: {rule}; got {n}")
    if dims.page_size:
        _pages(call, dims, lengths_q, lengths)


def _pages(call: Call, dims: AttentionDims, lengths_q: np.ndarray, lengths: np.ndarray) -> None:
    table = call.to_host("block_table")
    for b, (queries, length) in enumerate(zip(lengths_q.tolist(), lengths.tolist())):
        if length > dims.seqlen_k:
            rule = f"sequence {b} must fit its row of block_table ({dims.seqlen_k} tokens)"
            raise ValueError(f"{call.function}: {rule}; got {length}")
        first = max(length - queries - dims.window[0], 0)
        if not queries or first >= length:
            continue
        begin, end = first // dims.page_size, -(-length // dims.page_size)
        _check.page_ids(call.function, b, begin, table[b, begin:end], dims.num_pages)
