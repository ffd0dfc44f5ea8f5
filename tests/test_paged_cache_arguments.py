"""What a paged cache refuses: each message by its text, and nothing is changed."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn.paged_cache import PagedKVCache, UnknownSequence
from tests.paged_contents import A, computed, small_cache, unchanged

REFUSALS = [
    (
        lambda c: c.extend(7, 1),
        UnknownSequence,
        r"^PagedKVCache.extend: seq_id must be a known sequence; got 7$",
    ),
    (lambda c: c.free("0"), KeyError, r"free: seq_id must be a known sequence; got '0'"),
    (lambda c: c.extend([], 1), TypeError, "extend: seq_id must be hashable; got list"),
    (lambda c: c.add_sequence(0), ValueError, "add_sequence: seq_id must be new; 0 is in use"),
    (lambda c: c.fork(0, 0), ValueError, "fork: new_id must be new; 0 is in use"),
    (lambda c: c.fork(9, 3), UnknownSequence, "fork: seq_id must be a known sequence; got 9"),
    (lambda c: c.extend(0, -1), ValueError, "extend: num_tokens must be at least 0; got -1"),
    (lambda c: c.extend(0, 1.0), TypeError, "extend: num_tokens must be an integer; got float"),
    (
        lambda c: c.append(0, [1.5]),
        TypeError,
        r"append: tokens must be a sequence of integers; got shape \(1,\), dtype",
    ),
    (lambda c: c.append(0, 3), TypeError, r"append: tokens must be a sequence of integers; got shape \(\)"),
    (
        lambda c: c.append(0, [[1]]),
        TypeError,
        r"append: tokens must be a sequence of integers; got shape \(1, 1\)",
    ),
    (
        lambda c: c.append_many([[1], [2]]),
        TypeError,
        "^PagedKVCache.append_many: tokens must be a mapping of sequence ids; got list$",
    ),
    (
        lambda c: c.extend_many(2),
        TypeError,
        "^PagedKVCache.extend_many: num_tokens must be a mapping of sequence ids; got int$",
    ),
    (
        lambda c: c.append(0, [2**63]),
        ValueError,
        r"append: tokens must be less than 2\*\*63; got 9223372036854775808",
    ),
    (
        lambda c: c.add_sequence(3, A, salt=["x"]),
        TypeError,
        "salt must be None, bool, int, str, bytes or a tuple",
    ),
    (lambda c: c.truncate(0, 7), ValueError, "truncate: length must be 0 to 6; got 7"),
    (lambda c: c.truncate(0, -1), ValueError, "truncate: length must be 0 to 6; got -1"),
    (lambda c: c.publish(0, -1), ValueError, "publish: computed_length must be 0 to 6; got -1"),
    (lambda c: c.release_outside_window(0, -2), ValueError, "window_left must be at least -1; got -2"),
    (
        lambda c: c.release_outside_window(0, 1, computed_length=7),
        ValueError,
        "release_outside_window: computed_length must be 0 to 6; got 7",
    ),
    (lambda c: c.block_table([0], width=1), ValueError, "block_table: width must be at least 2; got 1"),
    (lambda c: c.block_table([0, 5]), UnknownSequence, "block_table: seq_id must be a known sequence; got 5"),
    (lambda c: c.block_table("ab"), TypeError, "block_table: seq_ids must be a sequence of ids; got 'ab', which is one"),
    (lambda c: c.slot_mapping([0], 7), ValueError, r"slot_mapping: num_new\[0\] must be 0 to 6; got 7"),
    (
        lambda c: c.slot_mapping([0], [1, 2]),
        ValueError,
        "num_new must have one number for each of 1 sequences; got 2",
    ),
    (lambda c: c.slot_mapping([0], 1.5), TypeError, "num_new must be an integer or a sequence; got float"),
    (lambda c: c.cache_seqlens([0], -1), ValueError, r"cache_seqlens: num_new\[0\] must be 0 to 6; got -1"),
    (lambda c: c.swap_out(1), ValueError, "swap_out: seq_id must be on the device; 1 is on the host"),
    (lambda c: c.extend(1, 1), ValueError, "extend: seq_id must be on the device; 1 is on the host"),
    (lambda c: c.block_table([2]), ValueError, "block_table: seq_id must be on the device; 2 is on its way"),
    (lambda c: c.swap_in(0), ValueError, "swap_in: seq_id must be on the host; 0 is on the device"),
    (lambda c: c.swap_in(2), ValueError, "swap_in: seq_id must be on the host; 2 is on its way"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_refusals_change_nothing(call, error, message):
    cache = small_cache(num_host_pages=4)
    for seq_id in range(3):
        computed(cache, seq_id, A[:6])
    cache.swap_done(cache.swap_out(1))
    cache.swap_out(2)
    unchanged(cache, error, lambda: call(cache), message)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_pages": 0}, ValueError, "PagedKVCache: num_pages must be 1 to 2147483647; got 0"),
        ({"page_size": 0}, ValueError, "PagedKVCache: page_size must be 1 to 2147483647; got 0"),
        ({"page_size": 1.0}, TypeError, "PagedKVCache: page_size must be an integer; got float"),
        ({"num_kv_heads": 0}, ValueError, "PagedKVCache: num_kv_heads must be 1 to"),
        ({"num_layers": 0}, ValueError, "PagedKVCache: num_layers must be 1 to"),
        ({"head_dim": 513}, ValueError, "PagedKVCache: head_dim must be 1 to 512; got 513"),
        ({"head_dim_v": 0}, ValueError, "PagedKVCache: head_dim_v must be 1 to 512; got 0"),
        (
            {"dtype": np.float64},
            TypeError,
            "PagedKVCache: dtype must be float16, bfloat16, float32 or float8_e4m3fn; got",
        ),
        ({"xp": "cupy"}, TypeError, "^PagedKVCache: xp must be the module numpy or cupy; got 'cupy'$"),
        ({"xp": np.ndarray}, TypeError, "^PagedKVCache: xp must be the module numpy or cupy; got <class 'numpy.ndarray'>$"),
        ({"num_host_pages": -1}, ValueError, "PagedKVCache: num_host_pages must be 0 to"),
        ({"max_events": -1}, ValueError, "PagedKVCache: max_events must be 0 to"),
        (
            {"k_scale": [1, 2, 3], "dtype": "float8_e4m3fn"},
            ValueError,
            r"k_scale must be broadcastable to \(num_layers, num_kv_heads\) \(1, 2\); got",
        ),
        ({"v_scale": 0.0, "dtype": "float8_e4m3fn"}, ValueError, "PagedKVCache: v_scale must be finite and above 0; got 0.0"),
    ],
)
def test_caches_that_can_not_be(change, error, message):
    sizes = {"num_pages": 2, "page_size": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": np.float16}
    with pytest.raises(error, match=message):
        PagedKVCache(**{**sizes, **change})
