"""The Numba kernels of slots and tables on a device, and a step of decoding with them in a graph. Collected on GPUs."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
from numba import cuda

import cuattn
from cuattn.decode import decode, decode_workspace_size
from cuattn.numba import advance, locate, sequence_of, slot_mapping, slot_mapping_varlen, slot_of, update_block_table
from cuattn.paged import append_kv
from cuattn.paged_cache import PagedKVCache
from cuattn.testing import assert_same_bits
from tests.gpu_tools import captured, random

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_numba_follows_the_manager(index):
    """Tables, lengths and slots changed on the device by what is new, against the bookkeeping on the host."""
    rng = np.random.default_rng(0)
    cache = PagedKVCache(600, 5, 1, 1, dtype=np.float32)
    seq_ids, rows = list(range(9)), cupy.arange(9)[::-1]
    table = cupy.full((9, 120), -1, index)[:, ::2]
    lengths = cupy.zeros(18, index)[1::2]
    for seq_id in seq_ids:
        cache.add_sequence(seq_id)
    for step in range(12):
        new = np.full(9, 3) if step % 3 == 0 else rng.integers(0, 20, 9)
        cache.extend_many(dict(zip(seq_ids, new.tolist())))
        wanted = cache.block_table(seq_ids, 60)
        changed = np.nonzero(table.get() != wanted)
        update_block_table(table, *map(cupy.asarray, (*changed, wanted[changed])))
        offsets, total = cupy.asarray(np.concatenate([[0], np.cumsum(new)]).astype(index)), int(new.sum())
        slots = slot_mapping_varlen(table, lengths, offsets, page_size=5, num_tokens=total + 7)
        assert slots.tolist() == [*cache.slot_mapping(seq_ids, new.tolist()).tolist(), *[-1] * 7]
        if step % 3 == 0:
            out = cupy.empty(54, np.int64)[::2]
            assert slot_mapping(table, lengths, page_size=5, num_new=3, out=out) is out
            assert out.tolist() == slots[:total].tolist()
            advance(lengths, rows, 3)
        else:
            advance(lengths, rows, cupy.asarray(new)[::-1])
        assert table.tolist() == wanted.tolist() and lengths.tolist() == cache.cache_seqlens(seq_ids).tolist()


def test_numba_leaves_out_what_is_not_there():
    table, lengths = cupy.zeros((2, 3), np.int32), cupy.asarray(np.int32([-1, 2**31 - 1]))
    rows, columns = cupy.asarray([0, -1, 2, 1, 1, 2**40]), cupy.asarray([1, 0, 0, 3, 2, 0])
    with cuattn.checking("arguments"):
        update_block_table(table, rows, columns, cupy.asarray([9, 9, 9, 9, 2**32 + 3, 9]))
        advance(lengths, cupy.asarray([0, 1, 2, -1]), 5)
        wild = cupy.asarray([[2**62, -3], [2**63 - 1, 1]])
        slots = slot_mapping(wild, cupy.asarray([0, 5]), page_size=4, num_new=5).tolist()
    assert table.tolist() == [[0, 9, 0], [0, 0, -1]] and lengths.tolist() == [-1, 2**31 - 1]
    assert min(slots[:4]) > 2**60 and slots[4:] == [-1, 5, 6, 7, -1, -1]


def test_numba_device_functions_in_a_kernel_of_your_own():
    @cuda.jit
    def store(x, pages, block_table, lengths, cu_seqlens):
        i = cuda.grid(1)
        if i < x.shape[0]:
            b = sequence_of(i, cu_seqlens)
            if b >= 0:
                slot = slot_of(lengths[b] + i - cu_seqlens[b], block_table[b], pages.shape[1])
                page, offset = locate(slot, pages.shape[0], pages.shape[1])
                if page >= 0:
                    pages[page, offset] = x[i]

    table, lengths = cupy.asarray(np.int32([[3, 1], [2, -1]])), cupy.asarray(np.int32([2, 3]))
    pages, x, offsets = cupy.full((4, 4), -1.0), cupy.arange(8.0), cupy.asarray([1, 4, 7])
    store[1, 32](x, pages, table, lengths, offsets)
    assert pages.tolist() == [[-1] * 4, [3, -1, -1, -1], [-1, -1, -1, 4], [-1, -1, 1, 2]]


def test_a_step_of_decoding_in_a_graph():
    """New tokens are written and attended to, lengths grow; the host sends the pages that are new, every 16 steps."""
    cache = PagedKVCache(16, 16, 2, 64, dtype=np.float16, xp=cupy, poison=True)
    for seq_id, length in enumerate([14, 30]):
        cache.add_sequence(seq_id)
        cache.extend(seq_id, length)
        append_kv(*random((2, length, 2, 64), seed=seq_id), **cache.layer(0), slot_mapping=cache.slot_mapping([seq_id], length))
    twin = [pages.copy() for pages in (cache.k_pages[0], cache.v_pages[0])]
    table, lengths = cache.block_table([0, 1], width=6), cache.cache_seqlens([0, 1])
    q, k, v = (cupy.zeros((2, 1, heads, 64), np.float16) for heads in (8, 2, 2))
    out, rows = cupy.empty_like(q), cupy.arange(2)
    space = cupy.empty(decode_workspace_size(2, 1, 8, 2, 64, 6 * 16) // 4, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def step():
        decode(q, **cache.layer(0), block_table=table, cache_seqlens=lengths, k=k, v=v, out=out, workspace=space)
        advance(lengths, rows, 1)

    with cuattn.checking("arguments"), stream:
        graph = captured(stream, step)
        for pages, own in zip(twin, (cache.k_pages[0], cache.v_pages[0])):
            own[...] = pages  # what the step wrote when it was tried
        lengths.set(np.int32([14, 30]))
        for turn in range(20):
            before = cache.block_table([0, 1], width=6).get()
            cache.extend_many({0: 1, 1: 1})
            now = cache.block_table([0, 1], width=6)
            changed = np.nonzero(now.get() != before)
            update_block_table(table, *map(cupy.asarray, (*changed, now.get()[changed])))
            for x, given in zip((q, k, v), (random(x.shape, seed=100 * turn + n) for n, x in enumerate((q, k, v)))):
                x[...] = given
            graph.launch(stream)
            eager = decode(q, *twin, now, cache.cache_seqlens([0, 1], num_new=1), k=k, v=v)
            assert_same_bits(out, eager)
        assert lengths.tolist() == [34, 50]
