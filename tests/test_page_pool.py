"""The pool of pages: one place for each page, counts of holders, names, and who is evicted."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuattn._page_pool import OutOfPages, PageEvent, PagePool


def state(pool):
    return copy.deepcopy({name: value for name, value in vars(pool).items() if name != "_emit"})


def published(pool, *names):
    """One cached page for each name, released in this order."""
    pages = pool.acquire("test", (), len(names))
    for page, name in zip(pages, names):
        assert pool.publish(page, name)
    pool.release(pages)
    return pages


def test_every_page_once_and_then_none():
    pool = PagePool(3)
    assert sorted(pool.acquire("test", (), 3)) == [0, 1, 2]
    assert pool.available() == 0 and pool.acquire("test", (), 0) == []


def test_too_few_pages_change_nothing_and_say_what_is_missing():
    pool = PagePool(3)
    pool.acquire("test", (), 1)
    before = state(pool)
    with pytest.raises(OutOfPages, match="^test needs 3 more pages; 2 are free or can be evicted$") as raised:
        pool.acquire("test", (), 3)
    assert (raised.value.needed, raised.value.free) == (3, 2) and isinstance(raised.value, RuntimeError)
    assert state(pool) == before
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.needed, again.free) == (str(raised.value), 3, 2)


def test_double_free_raises():
    """vLLM #42571, sglang #12224: a page freed twice was handed out twice."""
    pool = PagePool(2)
    (page,) = pool.acquire("test", (), 1)
    pool.release([page])
    before = state(pool)
    with pytest.raises(
        ValueError, match=f"page {page} must be held 1 times to be shared or released; held 0"
    ):
        pool.release([page])
    assert state(pool) == before


def test_a_page_twice_in_one_release():
    """vLLM #42571: the count went down twice, the number of free pages was too high."""
    pool = PagePool(3)
    one, two = pool.acquire("test", (), 2)
    before = state(pool)
    with pytest.raises(ValueError, match="held 2 times"):
        pool.release([one, two, one])
    assert state(pool) == before
    pool.share([one])
    pool.release([one, two, one])  # held twice, so this is right
    assert pool.available() == 3


def test_pages_that_do_not_exist():
    pool = PagePool(3)
    pool.acquire("test", (), 3)
    for page in (-1, 3):
        for method in (pool.release, pool.share):
            with pytest.raises(ValueError, match=rf"page must be 0 to 2; got {page}"):
                method([0, page])
    assert pool.refs == [1, 1, 1]


def test_only_held_pages_are_shared_and_published():
    pool = PagePool(1)
    for call in (lambda: pool.share([0]), lambda: pool.publish(0, b"a")):
        with pytest.raises(ValueError, match="must be held 1 times"):
            call()


def test_shared_pages_are_not_evicted():
    """Avarok/atlas PR #373: eviction set the count to 0, and a page in use was handed out."""
    pool = PagePool(2)
    one, two = published(pool, b"a", b"b")
    pool.acquire("test", [one], 0)
    pool.share([one])
    pool.release([one])
    assert pool.acquire("test", (), 1) == [two]
    with pytest.raises(OutOfPages):
        pool.acquire("test", (), 1)
    assert pool.page_of == {b"a": one} and pool.refs[one] == 1


def test_hits_are_held_before_anything_is_evicted():
    """vLLM PR #10507: the pages just matched were evicted to make room for the same prompt."""
    pool = PagePool(3)
    pages = published(pool, b"a", b"b", b"c")
    assert pool.acquire("test", pages[:2], 1) == [pages[2]]
    assert pool.refs == [1, 1, 1] and set(pool.page_of) == {b"a", b"b"}


@pytest.mark.parametrize("fresh", [1, 2])
def test_cached_hits_count_against_what_is_free_once(fresh):
    """vLLM #11562, PR #11565: touching first leaked counts on failure, checking first admitted too much."""
    pool = PagePool(3)
    pages = published(pool, b"a", b"b")
    before = state(pool)
    if fresh == 2:
        with pytest.raises(OutOfPages) as raised:
            pool.acquire("test", pages, fresh)
        assert (raised.value.needed, raised.value.free) == (2, 1) and state(pool) == before
    else:
        assert len(pool.acquire("test", pages, fresh)) == 1 and pool.available() == 0


def test_hits_that_are_in_use_cost_nothing():
    pool = PagePool(2)
    (page,) = pool.acquire("test", (), 1)
    pool.publish(page, b"a")
    assert len(pool.acquire("test", [page], 1)) == 1 and pool.refs[page] == 2


def test_a_cached_hit_keeps_its_name():
    """ROCm/ATOM PR #902: a hit on a free page was reset and its hash dropped."""
    pool = PagePool(1)
    (page,) = published(pool, b"a")
    pool.acquire("test", [page], 0)
    assert pool.page_of == {b"a": page} and page not in pool.cached and page not in pool.free
    pool.release([page])
    assert list(pool.cached) == [page]


def test_an_evicted_page_is_not_found_any_more():
    """nano-vllm #163, vLLM PR #4761: the hash of a page that was reused still led to it."""
    pool = PagePool(1)
    (page,) = published(pool, b"a")
    assert pool.acquire("test", (), 1) == [page]
    assert pool.page_of == {} == pool.digest_of and pool.evictions == 1
    pool.release([page])
    assert list(pool.free) == [page] and not pool.cached


def test_the_page_without_a_holder_for_longest_is_evicted_first():
    """Hugging Face evicts the most recent one (popitem)."""
    pool = PagePool(3)
    a, b, c = published(pool, b"a", b"b", b"c")
    pool.acquire("test", [a], 0)
    pool.release([a])  # now the most recently used
    assert [pool.acquire("test", (), 1)[0] for _ in range(3)] == [b, c, a]


def test_free_pages_are_taken_before_cached_ones():
    pool = PagePool(4)
    published(pool, b"a", b"b")
    assert set(pool.acquire("test", (), 2)) == {2, 3} and pool.evictions == 0


def test_of_two_pages_with_one_name_the_first_is_kept():
    """vLLM keeps duplicates, since tables only grow; the second neither takes nor loses the name."""
    pool = PagePool(2)
    first, second = pool.acquire("test", (), 2)
    assert pool.publish(first, b"a") and not pool.publish(second, b"a") and pool.publish(first, b"a")
    pool.unpublish(second)
    pool.release([second])
    assert pool.page_of == {b"a": first} and list(pool.free) == [second] and pool.evictions == 0


def test_a_page_has_one_name():
    pool = PagePool(1)
    pool.acquire("test", (), 1)
    pool.publish(0, b"a")
    before = state(pool)
    with pytest.raises(ValueError, match="page 0 must be published under one name"):
        pool.publish(0, b"b")
    assert state(pool) == before


def test_events_tell_what_happened():
    events = []
    pool = PagePool(1, events.append)
    pool.acquire("test", (), 1)
    pool.publish(0, b"a")
    pool.publish(0, b"a")
    pool.release([0])
    pool.acquire("test", [0], 0)
    pool.share([0])
    pool.release([0, 0])
    pool.acquire("test", (), 1)
    assert events == [
        PageEvent("allocated", 0),
        PageEvent("published", 0, b"a"),
        PageEvent("freed", 0),
        PageEvent("allocated", 0, b"a"),
        PageEvent("freed", 0),
        PageEvent("evicted", 0, b"a"),
        PageEvent("allocated", 0),
    ]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["acquire", "share", "release", "publish", "unpublish"]), st.integers(0, 63))
)


@given(OPERATIONS)
@settings(max_examples=100)
def test_pages_are_in_one_place_after_any_operations(operations):
    pool, held, names = PagePool(5), [], 0
    for name, number in operations:
        if name == "acquire":
            hits = [page for page in pool.digest_of if number >> page & 1]
            if number % 4 <= len(pool.free) + len(set(pool.cached) - set(hits)):
                held += hits + pool.acquire("test", hits, number % 4)
            else:
                with pytest.raises(OutOfPages):
                    pool.acquire("test", hits, number % 4)
        elif name == "share" and held:
            pool.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif name == "release" and held:
            pool.release([held.pop(number % len(held))])
        elif name == "publish" and held:
            page = held[number % len(held)]
            names += 1
            pool.publish(page, pool.digest_of.get(page, str(names % 7).encode()))
        elif name == "unpublish" and held and pool.refs[held[number % len(held)]] == 1:
            pool.unpublish(held[number % len(held)])
        places = [*pool.free, *pool.cached, *set(held)]
        assert sorted(places) == list(range(5))
        assert pool.refs == [held.count(page) for page in range(5)]
        assert {page: digest for digest, page in pool.page_of.items()} == pool.digest_of
        assert set(pool.cached) <= set(pool.digest_of) and not set(pool.free) & set(pool.digest_of)
