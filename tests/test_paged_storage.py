"""The memory of a paged cache: copies in every layer and dtype, and the scales of what is stored."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuattn.paged_cache import PagedKVCache
from tests.paged_cases import host
from tests.paged_contents import A, arrays, computed, small_cache, unchanged


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e4m3fn])
def test_copies_reach_every_layer_and_dtype(backend, dtype):
    cache = PagedKVCache(5, 2, 3, 8, head_dim_v=5, num_layers=2, dtype=dtype, poison=True, xp=backend.xp)
    assert [p.shape for p in arrays(cache)] == [(5, 2, 3, 8)] * 2 + [(5, 2, 3, 5)] * 2
    assert all(p.dtype == dtype and np.isnan(host(backend, p).astype(np.float32)).all() for p in arrays(cache))
    for number, pages in enumerate(arrays(cache)):
        bits = pages.view(f"u{pages.dtype.itemsize}")
        for page in range(5):
            bits[page] = page + 5 * number
    cache.copies([(0, 1), (0, 3), (2, 4)])
    for number, pages in enumerate(arrays(cache)):
        bits = host(backend, pages).view(f"u{pages.dtype.itemsize}")
        assert [set((page - 5 * number).ravel()) for page in bits] == [{0}, {0}, {2}, {0}, {2}]


def test_copies_in_any_order_are_the_same_or_refused():
    """The pairs of a batch are copied side by side, so a page that is read and written would hold either."""
    cache = small_cache()
    computed(cache, 0, A[:4])
    for pairs, rule in [
        ([(0, 1), (1, 2)], "have no target that is a source; got 1"),
        ([(1, 2), (2, 1)], "have no target that is a source; got 2"),
        ([(0, 0)], "have no target that is a source; got 0"),
        ([(0, 2), (1, 2)], "name each target once; got 2"),
        ([(1, 0)], "have no target that is published; got 0"),
        ([(0, -1)], "have pages from 0 to 7; got -1"),
        ([(8, 1)], "have pages from 0 to 7; got 8"),
    ]:
        unchanged(cache, ValueError, lambda pairs=pairs: cache.copies(pairs), f"^PagedKVCache.copies: pairs must {rule}$")
    cache.copies([])


def test_bookkeeping_does_not_touch_pages():
    cache = small_cache()
    before = [pages.tobytes() for pages in arrays(cache)]
    cache.add_sequence(0, A[:9])
    cache.publish(0, 9)
    cache.add_sequence(1, A[:9])
    cache.extend(1, 5)
    cache.truncate(1, 9)
    cache.free(0)
    assert [pages.tobytes() for pages in arrays(cache)] == before


def test_scales_belong_to_the_cache_for_good():
    """sglang #18904: one path missed them. Avarok/atlas #919: a changed scale reinterpreted old pages."""
    given = np.repeat(np.float32([[0.5], [2.0]]), 3, axis=1)
    cache = PagedKVCache(4, 2, 3, 8, num_layers=2, dtype=ml_dtypes.float8_e4m3fn, k_scale=given, v_scale=0.25)
    given[:] = 7
    assert cache.k_scale.tolist() == [[0.5] * 3, [2.0] * 3] and cache.k_scale.dtype == np.float32
    assert cache.v_scale.tolist() == [[0.25] * 3] * 2 and small_cache().k_scale is None
    with pytest.raises(AttributeError):
        cache.k_scale = 1.0
    with pytest.raises(ValueError, match="read-only"):
        cache.v_scale[0] = 1.0


def test_a_layer_is_what_operations_need_of_it():
    scale = np.float32([[1.0, 2.0], [3.0, 4.0]])
    cache = PagedKVCache(4, 2, 2, 8, num_layers=2, dtype=ml_dtypes.float8_e4m3fn, k_scale=scale)
    layer = cache.layer(1)
    assert list(layer) == ["k_pages", "v_pages", "k_scale", "v_scale"] and layer["v_scale"] is None
    assert layer["k_pages"] is cache.k_pages[1] and layer["v_pages"] is cache.v_pages[1]
    assert layer["k_scale"].tolist() == [3.0, 4.0]
    unchanged(cache, ValueError, lambda: cache.layer(2), "layer: number must be 0 to 1; got 2")
    unchanged(cache, ValueError, lambda: cache.layer(-1), "layer: number must be 0 to 1; got -1")


def test_scales_are_for_float8():
    with pytest.raises(ValueError, match="PagedKVCache: k_scale and v_scale need dtype float8_e4m3fn; got float16"):
        PagedKVCache(4, 2, 2, 8, dtype=np.float16, v_scale=2.0)
