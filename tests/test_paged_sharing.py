"""Pages that several sequences hold, pages behind a window, and sequences on the host.

Contents are written through the index arrays and read back: two sequences in one page show as wrong contents.
"""

from __future__ import annotations

import numpy as np
import pytest

from cuattn.paged_cache import OutOfPages, Swap, UnknownSequence
from tests.paged_contents import A, B, arrays, computed, read, small_cache, table, unchanged, values, write

# Sharing and copying on write


def test_fork_then_write():
    cache = small_cache()
    computed(cache, "a", A[:6], publish=False)
    cache.fork("a", "b")
    assert table(cache, "a") == table(cache, "b") and cache.stats()["in_use"] == 2
    pairs = cache.append("b", B[:1])
    assert (
        pairs == [(table(cache, "a")[1], table(cache, "b")[1])]
        and table(cache, "a")[0] == table(cache, "b")[0]
    )
    write(cache, "b", values([*A[:6], B[0]])[6:])
    assert cache.append("a", A[6:7]) == []  # alone with its page now
    write(cache, "a", values(A[:7])[6:])
    assert read(cache, "a") == values(A[:7]) and read(cache, "b") == values([*A[:6], B[0]])
    assert {name: cache.stats()[name] for name in ("forks", "copies", "in_use")} == {
        "forks": 1,
        "copies": 1,
        "in_use": 3,
    }


def test_a_fork_at_a_page_edge_copies_nothing():
    cache = small_cache()
    computed(cache, "a", A[:8])
    cache.fork("a", "b")
    assert cache.extend_many({"a": 1, "b": 1}) == [] and table(cache, "a")[:2] == table(cache, "b")[:2]
    assert table(cache, "a")[2] != table(cache, "b")[2]


def test_copies_are_made_before_the_last_holder_writes():
    cache = small_cache()
    computed(cache, 0, A[:6], publish=False)
    cache.fork(0, 1)
    cache.fork(0, 2)
    pairs = cache.append_many({0: [7], 1: [8], 2: [9]})
    assert len(pairs) == 2 and len({source for source, _ in pairs}) == 1
    for seq_id in range(3):
        write(cache, seq_id, values([*A[:6], 7 + seq_id])[6:])
    for seq_id in range(3):
        assert read(cache, seq_id) == values([*A[:6], 7 + seq_id])


def test_a_shared_page_that_is_cut_off_in_the_middle_is_copied_before_it_is_written():
    cache = small_cache()
    computed(cache, 0, A[:8])
    cache.fork(0, 1)
    cache.truncate(1, 6)
    assert table(cache, 0) == table(cache, 1)
    assert len(cache.append(1, B[:3])) == 1
    write(cache, 1, values([*A[:6], *B[:3]])[6:])
    assert read(cache, 0) == values(A[:8]) and read(cache, 1) == values([*A[:6], *B[:3]])
    assert cache.match_prefix(A) == 8


def test_a_published_page_that_is_written_again_is_not_found_any_more():
    """nano-vllm #163: a name that outlived its contents."""
    cache = small_cache()
    computed(cache, 0, A[:8])
    cache.truncate(0, 6)
    assert cache.match_prefix(A) == 8  # still there
    assert cache.append(0, B[:2]) == [] and cache.match_prefix(A) == 4
    write(cache, 0, values([*A[:6], *B[:2]])[6:])
    cache.publish(0, 8)
    assert cache.match_prefix(A) == 4 and cache.match_prefix([*A[:6], *B[:3]]) == 8


def test_freeing_a_parent_leaves_its_fork_alone():
    cache = small_cache(num_pages=2)
    computed(cache, 0, A[:8])
    cache.fork(0, 1)
    cache.free(0)
    unchanged(cache, OutOfPages, lambda: cache.add_sequence(2, B[:1]))
    assert read(cache, 1) == values(A[:8])


def test_a_sequence_is_freed_once():
    """vLLM #42571, sglang #12224: two paths freed the same request."""
    cache = small_cache()
    computed(cache, 0, A[:5])
    cache.free(0)
    unchanged(cache, UnknownSequence, lambda: cache.free(0), "free: seq_id must be a known sequence; got 0")
    assert cache.num_free() == 8


def test_rejected_drafts_give_their_pages_back():
    cache = small_cache()
    computed(cache, 0, A[:7])
    cache.append(0, B[:6])
    cache.truncate(0, 8)
    assert len(table(cache, 0)) == 2 and cache.stats()["in_use"] == 2
    cache.truncate(0, 8)
    cache.truncate(0, 0)
    assert table(cache, 0) == [] and cache.num_free() == 8
    unchanged(cache, ValueError, lambda: cache.truncate(0, 1), "truncate: length must be 0 to 0; got 1")


# Windows


def test_pages_before_the_window_of_every_later_query_are_released():
    """vLLM remove_skipped_blocks. The query at 10 sees keys from 10 - window on."""
    for window, expected in ((-1, 0), (0, 2), (2, 2), (3, 1), (6, 1), (7, 0), (100, 0)):
        cache = small_cache()
        computed(cache, 0, A[:10])
        before = table(cache, 0)
        assert cache.release_outside_window(0, window) == expected
        assert table(cache, 0) == [-1] * expected + before[expected:] and cache.cache_seqlens([0]) == 10
        assert cache.release_outside_window(0, window) == 0
        assert cache.stats()["in_use"] == 3 - expected
        cache.check()


def test_pages_of_queries_that_are_still_to_come_are_kept():
    """vLLM PR #45357, vllm-ascend #13501: pages were freed by scheduled instead of processed tokens."""
    cache = small_cache()
    computed(cache, 0, A[:4])
    cache.append(0, A[4:12])
    assert cache.release_outside_window(0, 3, computed_length=4) == 0
    assert cache.release_outside_window(0, 3, computed_length=7) == 1
    assert cache.release_outside_window(0, 3) == 1


def test_released_pages_can_be_found_and_are_never_written():
    cache = small_cache(num_pages=3)
    computed(cache, 0, A[:10])
    cache.release_outside_window(0, 1)
    assert cache.stats()["cached"] == 2 and cache.slot_mapping([0], 10)[:8].tolist() == [-1] * 8
    cache.add_sequence(1, B[:8])  # takes the released ones
    write(cache, 1, values(B[:8]))
    assert np.isnan(read(cache, 0)[:8]).all() and read(cache, 0)[8:] == values(A[:10])[8:]
    cache.fork(0, 2)
    cache.free(0)
    assert cache.stats()["in_use"] == 3
    cache.free(2)
    cache.check()


def test_a_window_does_not_go_back_over_released_pages():
    cache = small_cache()
    computed(cache, 0, A[:12])
    cache.release_outside_window(0, 3)  # two pages; the query at 11 sees key 8
    unchanged(
        cache, ValueError, lambda: cache.truncate(0, 10), "truncate: length must be at least 11, or pages"
    )
    cache.truncate(0, 11)
    assert cache.append(0, B[:2]) == [] and len(table(cache, 0)) == 4


# Swapping


def swapped(cache, swap: Swap, host):
    """Copy the pages of a swap."""
    for source, target in swap.pairs:
        for pages, held in zip(arrays(cache), host):
            if swap.to_host:
                held[target] = pages[source]
            else:
                pages[target] = held[source]


def test_there_and_back():
    """vLLM #546, TensorRT-LLM #11879: engines stalled or miscounted after a few swaps."""
    cache = small_cache(num_pages=4, num_host_pages=3)
    host = [np.full((3, *pages.shape[1:]), np.nan, pages.dtype) for pages in arrays(cache)]
    computed(cache, 0, A[:10])
    for _ in range(5):
        swap = cache.swap_out(0)
        swapped(cache, swap, host)
        cache.swap_done(swap)
        assert (cache.stats()["in_use"], cache.stats()["host_free"], cache.stats()["tokens"]) == (0, 0, 10)
        cache.add_sequence(1, B[:16])  # takes all pages
        write(cache, 1, values(B[:16]))
        unchanged(
            cache,
            OutOfPages,
            lambda: cache.swap_in(0),
            r"swap_in \(to the device\) needs 3 more pages; 0 are free",
        )
        cache.free(1)
        swap = cache.swap_in(0)
        swapped(cache, swap, host)
        cache.swap_done(swap)
        assert read(cache, 0) == values(A[:10]) and cache.stats()["host_free"] == 3
        cache.check()
    assert cache.publish(0, 10) == 2 and cache.append(0, A[10:12]) == []


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
    unchanged(
        cache,
        ValueError,
        lambda: cache.swap_done(swap),
        "swap_done: swap must be on its way; got one that is done",
    )


def test_a_swap_that_failed_leaves_the_sequence_where_it_was():
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


def test_sharers_of_swapped_pages_stay():
    cache = small_cache(num_pages=3, num_host_pages=3)
    computed(cache, 0, A[:10])
    cache.fork(0, 1)
    swap = cache.swap_out(0)
    cache.swap_done(swap)
    assert read(cache, 1) == values(A[:10]) and cache.num_free() == 0
    unchanged(
        cache,
        OutOfPages,
        lambda: cache.swap_out(1),
        r"swap_out \(to the host\) needs 3 more pages; 0 are free",
    )


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
