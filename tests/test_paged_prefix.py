"""Reuse of prefixes: what is found, for how long, and by whom."""

from __future__ import annotations

from tests.paged_contents import A, B, computed, read, small_cache, table, unchanged, values, write


def test_a_full_hit_leaves_the_last_token_to_compute():
    """vLLM and nano-vllm PR #199: without it there is no query, and its page must not be a shared one."""
    cache = small_cache()
    computed(cache, 0, A[:8])
    assert cache.match_prefix(A[:8]) == 4 and cache.match_prefix(A[:9]) == 8
    assert computed(cache, 1, A[:8]) == 4
    assert table(cache, 0)[0] == table(cache, 1)[0] and table(cache, 0)[1] != table(cache, 1)[1]
    assert [cache.match_prefix(A[:n]) for n in (0, 1, 4, 5)] == [0, 0, 0, 4]


def test_published_pages_are_not_written_again():
    """nano-vllm PR #199: computing a whole prompt again must not touch what others read."""
    cache = small_cache()
    computed(cache, 0, A[:9])
    cache.add_sequence(1, A[:9])
    assert cache.slot_mapping([1], 9).tolist()[:8] == [-1] * 8
    write(cache, 1, [-5.0] * 9)
    assert read(cache, 0) == values(A[:9])


def test_only_full_and_computed_pages_are_published():
    """vLLM: drafts and pages still to be written were found by others (delay_cache_blocks)."""
    cache = small_cache()
    cache.add_sequence(0, A[:11])
    assert [cache.publish(0, n) for n in (0, 3, 4, 7, 11, 11)] == [0, 0, 1, 0, 1, 0]
    assert cache.match_prefix(A) == 8
    unchanged(
        cache, ValueError, lambda: cache.publish(0, 12), "publish: computed_length must be 0 to 11; got 12"
    )


def test_tokens_without_ids_end_what_can_be_found():
    cache = small_cache()
    computed(cache, 0, A[:6])
    cache.extend(0, 1)
    cache.append(0, A[7:10])  # after a gap
    cache.publish(0, 10)
    assert cache.match_prefix(A) == cache.match_prefix([*A[:6], *A[7:10]]) == 4
    cache.truncate(0, 6)
    cache.append(0, A[6:10])  # without one
    cache.publish(0, 10)
    assert cache.match_prefix(A) == 8


def test_the_search_ends_at_the_first_miss():
    """llm-d-inference-sim #705: hits after a gap were counted."""
    cache = small_cache()
    computed(cache, 0, A[:12])
    cache.truncate(0, 7)
    cache.append(0, B[:1])  # the second page is gone, the third was cached
    assert cache.stats()["cached"] == 1 and cache.match_prefix(A) == 4


def test_identical_pages_stay_where_they_are():
    """vLLM: tables only grow, so a duplicate is kept by its sequence and not found."""
    cache = small_cache()
    computed(cache, 0, A[:8], publish=False)
    computed(cache, 1, A[:8], publish=False)
    before = table(cache, 1)
    assert cache.publish(0, 8) == 2 and cache.publish(1, 8) == 0 and table(cache, 1) == before
    cache.free(1)
    assert cache.stats()["cached"] == 0 and cache.match_prefix(A) == 8
    computed(cache, 2, A[:8], publish=False)
    cache.free(0)
    cache.add_sequence(3, B[:14])
    cache.add_sequence(4, B[:8])  # evicts the second page of 0, the first is held by 2
    assert cache.match_prefix(A) == 4
    assert cache.publish(2, 8) == 1 and cache.match_prefix(A) == 8


def test_a_page_after_a_duplicate_is_published():
    cache = small_cache()
    computed(cache, 0, A[:8])
    computed(cache, 1, A[:4], publish=False)
    cache.append(1, A[4:12])
    assert cache.publish(1, 12) == 1 and cache.match_prefix(A) == 12
    cache.check()


def test_forks_are_published_under_ids_of_their_own():
    cache = small_cache()
    computed(cache, 0, A[:6])
    cache.fork(0, 1)
    cache.append_many({0: [7, 7], 1: [8, 8]})
    assert cache.publish(0, 8) == cache.publish(1, 8) == 1
    for end in (7, 8):
        assert cache.match_prefix([*A[:6], end, end, 0]) == 8


SALTS = [None, ("lora", "X"), ("cache_salt", "X"), ("lora", "Y"), (("lora", "X"), ("cache_salt", "X"))]


def test_equal_prompts_with_different_salts_share_nothing():
    """vLLM #44701, #30931: an adapter X and a cache_salt X, or two adapters, read each other's pages."""
    cache = small_cache(num_pages=2 * len(SALTS))
    for seq_id, salt in enumerate(SALTS):
        assert computed(cache, seq_id, A[:7], salt) == 0
        cache.fork(seq_id, -seq_id - 1)
        cache.truncate(-seq_id - 1, 4)
    for seq_id, salt in enumerate(SALTS):
        assert read(cache, seq_id) == values(A[:7], salt) and cache.match_prefix(A, salt) == 4


def test_a_fork_keeps_its_salt():
    cache = small_cache()
    computed(cache, 0, A[:3], ("lora", "X"))
    cache.fork(0, 1)
    cache.append(1, A[3:5])
    cache.publish(1, 5)
    assert cache.match_prefix(A) == 0 and cache.match_prefix(A, ("lora", "X")) == 4


def test_what_match_prefix_promised_may_be_gone():
    """vLLM #39702: "Expected N hit tokens, got 0"; the number that counts is that of add_sequence."""
    cache = small_cache(num_pages=4)
    computed(cache, 0, A[:9])
    cache.free(0)
    assert cache.match_prefix(A[:9]) == 8
    cache.add_sequence(1, B[:12])
    assert computed(cache, 2, A[:3]) == 0 and cache.match_prefix(A[:9]) == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    cache = small_cache(num_pages=4)
    computed(cache, 0, A[:16])
    cache.free(0)
    for pages in (1, 2, 3):
        cache.add_sequence(1, B[: 4 * pages])
        assert cache.match_prefix([*A, 0]) == 16 - 4 * pages
        cache.free(1)


def test_a_shared_page_outlives_eviction():
    cache = small_cache(num_pages=4)
    computed(cache, 0, A[:8])
    cache.free(0)
    assert computed(cache, 1, [*A[:4], *B[:4]]) == 4
    computed(cache, 2, B[:8], publish=False)  # evicts what 1 does not hold
    assert read(cache, 1) == values([*A[:4], *B[:4]]) and cache.match_prefix(A) == 4
    assert cache.stats()["evictions"] == 1


def test_preempted_sequences_resume():
    """nano-vllm PR #211: a preempted sequence found its own prefix again, with lengths of before."""
    cache = small_cache(num_pages=5)
    computed(cache, 0, A[:10])
    cache.free(0)
    computed(cache, 1, B[:5])
    assert computed(cache, 0, A[:11]) == 8
    assert read(cache, 0) == values(A[:11]) and cache.cache_seqlens([0]) == 11


def test_hits_and_misses_are_pages_of_prompts():
    cache = small_cache()
    computed(cache, 0, A[:9])
    cache.match_prefix(A)
    computed(cache, 1, [*A[:8], *B[:5]])
    assert (cache.stats()["hits"], cache.stats()["misses"]) == (2, 3)
