"""The manager of pages: page edges, failures that change nothing, events and threads.

Each test is named for a fault that was reported somewhere.
"""

from __future__ import annotations

import inspect
import sys
import threading

import numpy as np
import pytest

from cuattn.paged_cache import OutOfPages, PagedKVCache, UnknownSequence
from tests.paged_contents import A, B, computed, read, small_cache, table, unchanged, values, write

# Page edges


@pytest.mark.parametrize("page_size", [1, 5, 16, 17, 64, 256, 1024])
def test_a_table_has_a_page_for_each_page_begun_and_none_more(page_size):
    """pegainfer #291: the next page was in the table already. Hugging Face: one too many at multiples."""
    cache = PagedKVCache(16, page_size, 1, 1, dtype=np.float16)
    for length in (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size):
        cache.add_sequence("added", range(length))
        cache.add_sequence("extended")
        cache.extend("extended", length)
        pages = -(-length // page_size)
        assert cache.block_table(["added", "extended"]).shape == (2, pages)
        assert cache.stats()["in_use"] == 2 * pages
        cache.free("added")
        cache.free("extended")


def test_a_prompt_of_exactly_one_page_grows():
    """nano-vllm PR #66: a prompt as long as a page tripped an assertion at the next token."""
    cache = small_cache()
    computed(cache, 0, A[:4])
    assert cache.append(0, A[4:5]) == []
    write(cache, 0, values(A[:5])[4:])
    assert len(table(cache, 0)) == 2 and read(cache, 0) == values(A[:5])


def test_growing_token_by_token_writes_every_position_once():
    """onnxruntime-genai PR #2354: the past length was one off, and one position never written."""
    cache = small_cache()
    cache.add_sequence(0)
    slots = []
    for i in range(13):
        cache.append(0, A[i : i + 1])
        assert cache.cache_seqlens([0], num_new=1) == i  # where decode writes
        slots += write(cache, 0, values(A[: i + 1])[i:]).tolist()
    assert len(set(slots)) == 13 and read(cache, 0) == values(A[:13])


def test_hugging_face_page_as_printed():
    """The second sequence, 32 long with pages of 32, gets a new page for its next token, and only it."""
    cache = PagedKVCache(8, 32, 1, 8, dtype=np.float16)
    for seq_id, length in enumerate([30, 32, 70]):
        cache.add_sequence(seq_id)
        cache.extend(seq_id, length)
    assert cache.block_table([0, 1, 2], width=4).tolist() == [[0, -1, -1, -1], [1, -1, -1, -1], [2, 3, 4, -1]]
    cache.extend_many({0: 1, 1: 1, 2: 1})
    assert cache.block_table([0, 1, 2], width=4).tolist() == [[0, -1, -1, -1], [1, 5, -1, -1], [2, 3, 4, -1]]
    assert cache.cache_seqlens([0, 1, 2], num_new=1).tolist() == [30, 32, 70]


# Failures leave everything as it was


def test_out_of_pages_says_what_is_missing():
    cache = small_cache(num_pages=3)
    computed(cache, 0, A[:5])
    error = unchanged(
        cache, OutOfPages, lambda: cache.extend(0, 8), "^PagedKVCache.extend needs 2 more pages; 1 are free"
    )
    assert (error.needed, error.free) == (2, 1)
    assert cache.extend(0, 7) == [] and cache.num_free() == 0


def test_a_failed_prompt_releases_what_it_found():
    """vLLM #11562, Avarok/atlas PR #373: a prompt that did not fit kept references to its prefix."""
    cache = small_cache(num_pages=4)
    computed(cache, 0, A[:8])
    cache.free(0)
    computed(cache, 1, B[:4])
    error = unchanged(
        cache, OutOfPages, lambda: cache.add_sequence(2, A)
    )  # 2 of 4 are there, and 1 more is left
    assert (error.needed, error.free) == (2, 1)
    assert cache.add_sequence(2, A[:12]) == 8  # counted once, so this fits


def test_a_batch_grows_as_a_whole_or_not_at_all():
    cache = small_cache(num_pages=4)
    for seq_id in range(3):
        cache.add_sequence(seq_id, A[:4])
    error = unchanged(cache, OutOfPages, lambda: cache.extend_many({0: 1, 1: 1}))
    assert (error.needed, error.free) == (2, 1)
    unchanged(cache, UnknownSequence, lambda: cache.extend_many({0: 1, 7: 1}))
    unchanged(cache, ValueError, lambda: cache.extend_many({0: 1, 1: -1}))
    unchanged(cache, OutOfPages, lambda: cache.append_many({0: [1], 1: [2, 3]}))
    assert cache.extend_many({}) == cache.extend_many({0: 0, 1: 0}) == []
    assert cache.append_many({0: [1], 1: []}) == [] and cache.cache_seqlens([0, 1, 2]).tolist() == [5, 4, 4]


def test_copies_count_as_pages_too():
    cache = small_cache(num_pages=2)
    computed(cache, 0, A[:3])
    cache.fork(0, 1)
    cache.fork(0, 2)
    error = unchanged(cache, OutOfPages, lambda: cache.extend_many({0: 1, 1: 1, 2: 1}))
    assert (error.needed, error.free) == (2, 1)  # the last one that holds the page keeps it
    cache.free(2)
    assert len(cache.extend_many({0: 1, 1: 1})) == 1 and cache.num_free() == 0


def test_a_copy_that_fails_takes_no_page(monkeypatch):
    cache = small_cache()
    computed(cache, 0, A[:6])
    cache.fork(0, 1)

    def fail(pairs):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(cache, "copies", fail)
    before = cache.stats(), table(cache, 0), table(cache, 1)
    with pytest.raises(RuntimeError, match="launch failed"):
        cache.extend(1, 3)
    assert (cache.stats(), table(cache, 0), table(cache, 1)) == before
    cache.check()


# Events, numbers, threads


def test_events_tell_who_holds_and_finds_what():
    cache = small_cache(num_pages=3, max_events=4)
    computed(cache, 0, A[:5])
    cache.fork(0, 1)
    cache.append(1, B[:1])
    kinds = [(event.kind, event.page, event.source) for event in cache.take_events()]
    assert kinds == [  # the first one is dropped
        ("allocated", 1, None),
        ("published", 0, None),
        ("allocated", 2, None),
        ("copied", 2, 1),
    ]
    assert cache.take_events() == []
    cache.free(0)
    cache.free(1)
    assert [event.kind for event in cache.take_events()] == ["freed"] * 3
    computed(cache, 2, B[:12], publish=False)
    assert [event.kind for event in cache.take_events()] == ["allocated", "allocated", "evicted", "allocated"]


def test_pages_add_up():
    """sglang #35270: shared pages were counted twice."""
    cache = small_cache(num_host_pages=2)
    computed(cache, 0, A[:9])
    cache.fork(0, 1)
    computed(cache, 2, A[:13])
    cache.free(0)
    cache.free(1)
    stats = cache.stats()
    assert stats["free"] + stats["cached"] + stats["in_use"] == stats["total"] == 8
    assert (stats["free"], stats["cached"], stats["in_use"], stats["sequences"], stats["tokens"]) == (
        4,
        0,
        4,
        1,
        13,
    )
    cache.free(2)
    assert cache.num_free() == 8 and cache.stats()["cached"] == 3 and cache.stats()["host_free"] == 2


METHODS = sorted(
    name for name, member in inspect.getmembers(PagedKVCache, inspect.isfunction) if not name.startswith("_")
)


def test_every_public_method_runs_under_the_lock():
    class Lock:
        taken = 0

        def __enter__(self):
            self.taken += 1

        def __exit__(self, *error):
            pass

    cache = small_cache()
    for name in METHODS:
        cache._lock = Lock()
        try:
            getattr(cache, name)()
        except TypeError:
            pass  # without its arguments; the lock comes first
        assert cache._lock.taken == 1, name


def test_threads_share_a_cache():
    cache = small_cache(num_pages=24, num_host_pages=8)
    failures, interval = [], sys.getswitchinterval()

    def work(number):
        random = np.random.default_rng(number)
        try:
            for step in range(60):
                seq_id, tokens = (number, step), A[: random.integers(1, 16)]
                try:
                    cache.add_sequence(seq_id, tokens)
                    cache.publish(seq_id, len(tokens))
                    cache.fork(seq_id, (seq_id, "fork"))
                    cache.append_many({seq_id: [step], (seq_id, "fork"): [-step, 0]})
                    cache.swap_done(cache.swap_out(seq_id))
                except OutOfPages:
                    pass
                cache.check()
                for known in (seq_id, (seq_id, "fork")):
                    try:
                        cache.free(known)
                    except UnknownSequence:
                        pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures and cache.num_free() == 24
    cache.check()
