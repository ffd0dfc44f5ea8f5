"""Pages that several sequences hold, and pages behind a window.

Contents are written through the index arrays and read back: two sequences in one page show as wrong contents.
"""

from __future__ import annotations

import numpy as np

from cuattn.paged_cache import OutOfPages, UnknownSequence
from tests.paged_contents import A, B, computed, read, small_cache, table, unchanged, values, write

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
