"""Pages and decode where only a device can show it: streams, graphs, caches past 2^31 elements. Collected on GPUs."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuattn
from cuattn.decode import decode, plan_decode
from cuattn.paged import append_kv, copy_pages, gather_kv
from cuattn.paged_cache import PagedKVCache
from cuattn.testing import assert_same_bits
from tests.backends import moved
from tests.decode_cases import DecodeCase
from tests.gpu_tools import GPU, busy, captured, random
from tests.paged_places import Place
from tests.test_paged_cache_machine import PagedCacheMachine, settled

pytestmark = pytest.mark.gpu

# The cache on a device


class GpuCacheMachine(PagedCacheMachine):
    @staticmethod
    def place_of(seed):
        return Place(GPU)


TestPagedCacheOnGpu = settled(GpuCacheMachine, 15, 30)


@pytest.mark.parametrize("aside", [False, True])
def test_swaps_overtake_nothing_and_hold_up_no_host(aside):
    """vLLM #45704, TensorRT-LLM #8813: pages were copied before they were written, or written before they were copied."""
    cache = PagedKVCache(64, 16, 8, 128, num_layers=3, dtype=np.float16, xp=cupy, num_host_pages=64, poison=True)
    main, side = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    mine, others = random((2, 1000, 8, 128)), random((2, 1024, 8, 128), seed=1)
    cupy.cuda.Device().synchronize()
    for _ in range(3):  # at first kernels are loaded and buffers allocated, which takes as long as the work
        with main, cuattn.checking("arguments"):
            busy()
            cache.add_sequence("a")
            cache.extend("a", 1000)
            slots = cache.slot_mapping(["a"], 1000)
            for number in range(3):
                append_kv(*mine, **cache.layer(number), slot_mapping=slots)
            out = cache.swap_out("a", stream=side if aside else None)
            early = out.done
            cache.swap_done(out)
            cache.add_sequence("b")
            cache.extend("b", 1024)  # all pages
            slots = cache.slot_mapping(["b"], 1024)
            for number in range(3):
                append_kv(*others, **cache.layer(number), slot_mapping=slots)
            cache.free("b")
            cache.swap_done(cache.swap_in("a", stream=side if aside else None))
            slots = cache.slot_mapping(["a"], 1000)
            read = [gather_kv(**cache.layer(number), slot_mapping=slots) for number in range(3)]
            cache.free("a")
            waited = main.done
        main.synchronize()
        for k, v in read:
            assert_same_bits(k, mine[0])
            assert_same_bits(v, mine[1])
    assert not early and not waited
    cache.check()


# Past 2^31 elements


@pytest.fixture(autouse=True)
def memory_is_given_back():
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def large_cache() -> PagedKVCache:
    """Two arrays of 2^31 + 2^21 elements, all of them NaN: 8.6 GB."""
    cache = PagedKVCache(8200, 256, 8, 128, dtype=bfloat16, xp=cupy, poison=True)
    assert cache.k_pages[0].size > 2**31
    return cache


def test_tokens_past_2_31_elements(much_memory):
    """vLLM #1486, #50427, tokenspeed PR #501: offsets in 32 bits reached other pages, or no memory at all."""
    pages, homes = np.array([0, 4096, 8191, 8192, 8199]), {0: 8198, 8199: 8194}  # 8192 pages have 2^31 elements
    slots, copied = ((ids[:, None] * 256 + [0, 1, 255]).reshape(-1) for ids in (pages, np.array([homes.get(p, p) for p in pages])))
    k, v = random((2, len(slots), 8, 128), bfloat16)
    layer = large_cache().layer(0)
    append_kv(k, v, **layer, slot_mapping=cupy.asarray(slots))
    copy_pages(layer["k_pages"], layer["v_pages"], cupy.asarray([*homes]), cupy.asarray([*homes.values()]))
    for where in (slots, copied.astype(np.int32)):
        for got, want in zip(gather_kv(**layer, slot_mapping=cupy.asarray(where)), (k, v)):
            assert_same_bits(got, want)
    untouched = cupy.asarray((np.array([[2], [6], [7]]) * 256 + np.arange(256)).reshape(-1))  # 8194, 8198, 8199 in 31 bits
    for got in gather_kv(**layer, slot_mapping=untouched):
        assert bool((got.view(np.uint16) == 0xFFFF).all())


def test_decode_past_2_31_elements(much_memory):
    """FlashInfer #3130, ROCm/aiter #2517: pages far back were read elsewhere, or as zeros."""
    ids = np.array([8199, 8192, 3, 8191, 8197, 4096])
    far = large_cache().layer(0)
    slots = cupy.asarray((ids[:, None] * 256 + np.arange(256)).reshape(-1))
    append_kv(*random((2, len(slots), 8, 128), bfloat16), **far, slot_mapping=slots)
    near = {name: cupy.stack([far[name][i].view(np.uint16) for i in ids]).view(bfloat16) for name in ("k_pages", "v_pages")}
    q, lengths = random((2, 1, 32, 128), bfloat16, seed=2), cupy.asarray([256 * 4, 300])
    new = {"k": random((2, 1, 8, 128), bfloat16, seed=3), "v": random((2, 1, 8, 128), bfloat16, seed=4)}
    order = np.array([[0, 1, 2, 3, -1], [4, 5, -1, -1, -1]])
    table = np.where(order < 0, order, ids[order])
    for more in ({}, new):
        length = lengths - (1 if more else 0)
        states = [
            decode(q, **pages, block_table=cupy.asarray(rows), cache_seqlens=length, return_state=True, **more)
            for pages, rows in ((near, order), ({name: far[name] for name in near}, table))
        ]
        assert not bool(cupy.isnan(states[0].lse).any())
        assert_same_bits(states[1].out, states[0].out)
        assert_same_bits(states[1].lse, states[0].lse)


# Streams, graphs, repeated runs


def arrays_of(case: DecodeCase) -> dict:
    return moved(GPU, case.arrays())


LONG = DecodeCase((1900, 0, 700, 257), heads=(8, 2), head_dims=(128, 128), dtype="float16", seed=5)


@pytest.mark.parametrize("case", [LONG, DecodeCase((3000, 5), 2, (8, 1), (64, 64), 64, "bfloat16", float8=True, control=8)], ids=repr)
def test_twenty_runs_of_decode_give_the_same_bits(case):
    given = arrays_of(case)
    first = decode(**given, return_state=True)
    for _ in range(20):
        again = decode(**given, return_state=True)
        assert_same_bits(again.out, first.out)
        assert_same_bits(again.lse, first.lse)


def test_decode_goes_on_the_current_stream():
    """The cache is written on the same stream just before, behind work that takes a while."""
    given = arrays_of(LONG)
    expected = decode(**given)
    late = {name: cupy.zeros_like(x) if isinstance(x, cupy.ndarray) else x for name, x in given.items()}
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream, cuattn.checking("arguments"):
        for _ in range(3):
            busy()
            for name, x in late.items():
                if isinstance(x, cupy.ndarray):
                    x[...] = given[name]
            out = decode(**late)
            for x in late.values():
                if isinstance(x, cupy.ndarray):
                    x.fill(0)
            waited = stream.done
            stream.synchronize()
            assert_same_bits(out, expected)
    assert not waited


def test_a_captured_append_follows_other_slots():
    cache = PagedKVCache(8, 16, 2, 64, dtype=np.float16, xp=cupy, poison=True)
    layer, slots = cache.layer(0), cupy.full(5, -1)
    k, v = cupy.zeros((2, 5, 2, 64), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with cuattn.checking("arguments"), stream:
        graph = captured(stream, lambda: append_kv(k, v, **layer, slot_mapping=slots))
        for turn, chosen in enumerate(([3, 127, 16, 15, 64], [-1, 0, 128, 2**40, 9])):
            k[...], v[...] = random((2, 5, 2, 64), seed=turn)
            slots.set(np.array(chosen))
            graph.launch(stream)
            valid = np.array([i for i, slot in enumerate(chosen) if 0 <= slot < 128])
            read = gather_kv(**layer, slot_mapping=slots)
            for got, want in zip(read, (k, v)):
                assert_same_bits(got[valid], want[valid])
        stream.synchronize()
        untouched = gather_kv(**layer, slot_mapping=cupy.asarray([1, 2, 126, 63]))
        assert all(bool((got.view(np.uint16) == 0xFFFF).all()) for got in untouched)


def test_a_captured_decode_follows_other_lengths_and_tables():
    """Hugging Face PR #45323: a graph that kept the lengths it was captured with."""
    given = arrays_of(LONG)
    table, lengths = cupy.ascontiguousarray(given["block_table"]), cupy.ascontiguousarray(given["cache_seqlens"])
    given |= {"block_table": table, "cache_seqlens": lengths}
    out, lse = cupy.empty((4, 1, 8, 128), np.float16), cupy.empty((4, 1, 8), np.float32)
    plan = plan_decode(**given, out=out, lse=lse)
    results = {"out": out, "lse": lse, "workspace": cupy.empty(plan.workspace_bytes // 4, np.float32), "plan": plan}
    full = table.get()
    stream = cupy.cuda.Stream(non_blocking=True)
    with cuattn.checking("arguments"), stream:
        graph = captured(stream, lambda: decode(**given, return_state=True, **results))
        for order, new in (([0, 1, 2, 3], LONG.lengths), ([2, 0, 3, 1], [0, 1900, 1, 0]), ([3, 3, 0, 2], [16, 257, 255, 699])):
            table.set(full[order])
            lengths.set(np.array(new, lengths.dtype))
            out.fill(np.nan)
            lse.fill(np.nan)
            graph.launch(stream)
            eager = decode(**given, return_state=True)
            assert_same_bits(out, eager.out)
            assert_same_bits(lse, eager.lse)
