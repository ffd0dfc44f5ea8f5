"""Sequences that wait on the host: what is copied, what stays reserved meanwhile, and what goes wrong on the way."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuattn import reference
from cuattn.paged import append_kv, gather_kv
from cuattn.paged_cache import OutOfPages, PagedKVCache, UnknownSequence
from cuattn.testing import assert_same_bits, to_host
from tests.paged_contents import (
    A,
    B,
    computed,
    load,
    read,
    slots_of,
    small_cache,
    store,
    table,
    unchanged,
    values,
    write,
)
from tests.paged_places import LateStreams


def test_there_and_back(backend):
    """vLLM #546, TensorRT-LLM #11879: engines stalled or miscounted after a few swaps. Hugging Face's copied nothing."""
    cache = small_cache(num_pages=4, num_host_pages=3, xp=backend.xp)
    computed(cache, 0, A[:10])
    for _ in range(3):
        cache.swap_done(cache.swap_out(0))
        assert (cache.stats()["in_use"], cache.stats()["host_free"], cache.stats()["tokens"]) == (0, 0, 10)
        cache.add_sequence(1, B[:16])  # takes all pages
        write(cache, 1, values(B[:16]))
        rule = r"swap_in \(to the device\) needs 3 more pages; 0 are free"
        unchanged(cache, OutOfPages, lambda: cache.swap_in(0), rule)
        cache.free(1)
        cache.swap_done(cache.swap_in(0))
        assert read(cache, 0) == values(A[:10]) and cache.stats()["host_free"] == 3
        cache.check()
    assert cache.publish(0, 10) == 2 and cache.append(0, A[10:12]) == []


def test_a_page_in_the_middle_of_both_pools(backend):
    cache = small_cache(num_pages=6, num_host_pages=4, num_layers=3, xp=backend.xp)
    for seq_id, tokens in enumerate((A[:3], B[:5], A[:7])):
        computed(cache, seq_id, tokens, publish=False)
    first, second = cache.swap_out(1), cache.swap_out(2)
    assert (first.pairs, second.pairs, first.to_host) == ([(1, 0), (2, 1)], [(3, 2), (4, 3)], True)
    cache.swap_done(second)
    cache.swap_done(first)
    computed(cache, 3, A[8:11], publish=False)
    swaps = cache.swap_in(2), cache.swap_in(1)
    assert [[slot for slot, _ in swap.pairs] for swap in swaps] == [[2, 3], [0, 1]] and not swaps[0].to_host
    for swap in swaps:
        cache.swap_done(swap)
    for seq_id, tokens in enumerate((A[:3], B[:5], A[:7], A[8:11])):
        assert read(cache, seq_id) == values(tokens)


def test_scales_stay_right(backend):
    """sglang PR #24198, kekzl/imp PR #1189: scales that did not travel with the pages they belong to."""
    scales = {"k_scale": np.float32([[0.5, 2.0], [0.25, 1.0]]), "v_scale": np.float32([[4.0], [3.0]])}
    options = {"num_layers": 2, "dtype": ml_dtypes.float8_e4m3fn, "num_host_pages": 2, "xp": backend.xp, **scales}
    cache = PagedKVCache(6, 4, 2, 8, **options)
    cache.add_sequence("a", A[:6])
    tokens = np.random.default_rng(0).standard_normal((2, 2, 6, 2, 8)).astype(np.float16)  # layer, K and V
    slots = cache.slot_mapping(["a"], 6)
    for number, (k, v) in enumerate(tokens):
        append_kv(backend.array(k), backend.array(v), slot_mapping=slots, **cache.layer(number))
    cache.fork("a", "b")
    cache.append("b", [7])  # copies a page
    cache.swap_done(cache.swap_out("a"))
    cache.add_sequence("c", B[:9])  # others write where it was
    cache.free("c")
    cache.swap_done(cache.swap_in("a"))
    for number, (k, v) in enumerate(tokens):
        pages = [np.zeros((2, 4, 2, 8), ml_dtypes.float8_e4m3fn) for _ in "kv"]
        own = {name: np.broadcast_to(scale, (2, 2))[number] for name, scale in scales.items()}
        reference.append_kv(k, v, *pages, np.arange(6), **own)
        expected = [x.astype(np.float16) for x in reference.gather_kv(*pages, np.arange(6), **own)]
        for seq_id in "ab":
            where = cache._send(slots_of(cache, seq_id)[:6])
            got = gather_kv(slot_mapping=where, dtype=np.float16, **cache.layer(number))
            for mine, want in zip(got, expected):
                assert_same_bits(to_host(mine), want)


# What is on its way


def test_pages_on_their_way_are_not_used_for_anything_else():
    """vLLM #45704, TensorRT-LLM #8813: pages were reused while they were still copied."""
    cache = small_cache(num_pages=4, num_host_pages=3)
    computed(cache, 0, A[:10])
    swap = cache.swap_out(0)
    assert cache.num_free() == 1 and cache.stats()["host_free"] == 0
    unchanged(cache, OutOfPages, lambda: cache.add_sequence(1, B[:5]))
    cache.swap_done(swap)
    swap = cache.swap_in(0)
    assert cache.num_free() == 1 and cache.stats()["host_free"] == 0 and cache.stats()["swaps"] == 1
    cache.swap_done(swap)
    assert cache.stats()["host_free"] == 3


@pytest.mark.parametrize("aside", [False, True])
def test_the_host_waits_for_nothing(aside):
    """The device has done nothing yet when all calls have returned; it does all in the right order afterwards."""
    place, looks = LateStreams(0), []
    with place.use():
        cache = small_cache(num_pages=4, num_host_pages=3, xp=place.xp)
        cache.add_sequence(0, A[:10])
        place.queue(lambda: store(cache, values(A[:10]), np.arange(10)))
        side = place.side if aside else None
        swap = cache.swap_out(0, stream=side)
        assert not swap.done
        cache.swap_done(swap)
        cache.add_sequence(1, B[:16])
        place.queue(lambda: store(cache, values(B[:16]), np.arange(16)))
        cache.free(1)
        swap = cache.swap_in(0, stream=side)
        cache.swap_done(swap)
        slots = slots_of(cache, 0)
        place.queue(lambda: looks.append(load(cache, slots).tolist()))
        assert not swap.done and not looks
        place.finish()
        assert swap.done and looks == [values(A[:10])]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_a_sequence_freed_on_its_way_leaks_nothing_and_frees_nothing_early(back, moved):
    """vLLM #46283, #32255: an abort during a load leaked its pages, or freed them while they were written."""
    cache = small_cache(num_pages=4, num_host_pages=3)
    computed(cache, 0, A[:10], publish=False)
    swap = cache.swap_out(0)
    if back:
        cache.swap_done(swap)
        swap = cache.swap_in(0)
    cache.free(0)
    assert cache.num_free() == 1 and cache.stats()["host_free"] == 0
    computed(cache, 0, B[:3])  # the name is free at once
    cache.check()
    cache.swap_done(swap, moved=moved)
    cache.check()
    assert cache.num_free() == 3 and cache.stats()["host_free"] == 3 and read(cache, 0) == values(B[:3])
    rule = "swap_done: swap must be on its way; got one that is done"
    unchanged(cache, ValueError, lambda: cache.swap_done(swap), rule)


def test_a_swap_that_is_given_up_leaves_the_sequence_where_it_was():
    cache = small_cache(num_pages=4, num_host_pages=3)
    computed(cache, 0, A[:10])
    cache.swap_done(cache.swap_out(0), moved=False)
    assert read(cache, 0) == values(A[:10]) and cache.stats()["host_free"] == 3
    cache.swap_done(cache.swap_out(0))
    cache.swap_done(cache.swap_in(0), moved=False)
    assert cache.num_free() == 4 and cache.stats()["host_free"] == 0
    cache.check()
    cache.free(0)
    assert cache.stats()["host_free"] == 3
    cache.check()


@pytest.mark.parametrize("back", [False, True])
def test_a_swap_that_can_not_be_queued_takes_no_page(monkeypatch, back):
    cache = small_cache(num_pages=4, num_host_pages=3)
    computed(cache, 0, A[:10], publish=False)
    if back:
        cache.swap_done(cache.swap_out(0))

    def fail(*given):
        raise RuntimeError("no such stream")

    monkeypatch.setattr(cache._storage, "swap", fail)
    before, place = cache.stats(), cache._sequences[0].place
    with pytest.raises(RuntimeError, match="no such stream"):
        (cache.swap_in if back else cache.swap_out)(0)
    assert (cache.stats(), cache._sequences[0].place) == (before, place)
    cache.check()
    monkeypatch.undo()
    cache.swap_done((cache.swap_in if back else cache.swap_out)(0))


# Which pages


def test_sharers_of_swapped_pages_stay():
    cache = small_cache(num_pages=3, num_host_pages=3)
    computed(cache, 0, A[:10])
    cache.fork(0, 1)
    cache.swap_done(cache.swap_out(0))
    assert read(cache, 1) == values(A[:10]) and cache.num_free() == 0
    rule = r"swap_out \(to the host\) needs 3 more pages; 0 are free"
    unchanged(cache, OutOfPages, lambda: cache.swap_out(1), rule)


def test_a_page_that_is_copied_to_the_host_is_not_written_by_its_sharer():
    cache = small_cache(num_pages=4, num_host_pages=3)
    computed(cache, 0, A[:10], publish=False)
    cache.fork(0, 1)
    swap = cache.swap_out(0)
    assert cache.append(1, B[:1]) == [(2, 3)]  # the swap still reads page 2
    cache.swap_done(swap)
    assert cache.append(1, B[:1]) == [] and cache.num_free() == 1


def test_swaps_skip_released_pages():
    cache = small_cache(num_pages=4, num_host_pages=1)
    computed(cache, 0, A[:10])
    cache.release_outside_window(0, 1)
    swap = cache.swap_out(0)
    assert len(swap.pairs) == 1
    cache.swap_done(swap)
    cache.swap_done(cache.swap_in(0))
    assert table(cache, 0)[:2] == [-1, -1] and table(cache, 0)[2] >= 0
    cache.check()


def test_empty_sequences_swap_too():
    cache = small_cache()
    cache.add_sequence(0)
    swap = cache.swap_out(0)
    assert swap.pairs == [] and swap.done
    cache.swap_done(swap)
    unchanged(cache, ValueError, lambda: cache.append(0, A), "append: seq_id must be on the device; 0 is on the host")
    cache.swap_done(cache.swap_in(0))
    assert cache.append(0, A[:3]) == []
    unchanged(cache, UnknownSequence, lambda: cache.swap_out(1))
