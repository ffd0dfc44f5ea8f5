"""Operations on pages on every backend: against the definition, bit for bit, and by their laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuattn import reference
from cuattn.paged import append_kv, copy_pages, gather_kv
from cuattn.testing import assert_close, assert_same_bits, check_guard, place
from cuattn.testing.profiles import as_dtype
from cuattn.testing.tolerance import U, half_subnormal, unit_roundoff
from tests.backends import moved
from tests.paged_cases import DTYPES, FLOAT8, PagedCase, cases, full, guarded_pages, host


def append_as_defined(case: PagedCase, tokens, pages, slots) -> None:
    scales = {n: np.float32(s).reshape(-1 if np.size(s) > 1 else ()) for n, s in case.scales().items()}
    reference.append_kv(*tokens, *pages, slots, **scales)


# Against the definition


@given(case=cases())
@example(case=PagedCase("bfloat16", False, 6, 256, 8, (128, 128), 40, "head major"))
@example(case=PagedCase("float32", True, 6, 16, 8, (128, 128), 40, seed=3))
@example(case=PagedCase("float16", True, 3, 17, 3, (5, 5), 20, "odd offset", seed=3))
@example(case=PagedCase("float16", False, 3, 16, 40, (512, 512), 3))
def test_append_is_the_definition_bit_for_bit(backend, case):
    (guard_k, k_pages), (guard_v, v_pages) = guarded_pages(backend, case)
    tokens, slots, expected = case.tokens(), case.slots(), full(case)
    append_as_defined(case, tokens, expected, slots)
    result = append_kv(*map(backend.array, tokens), k_pages, v_pages, backend.array(slots), **moved(backend, case.scales()))
    assert result is None
    assert_same_bits(host(backend, k_pages), expected[0], case=case)
    assert_same_bits(host(backend, v_pages), expected[1], case=case)
    check_guard(guard_k, k_pages)
    check_guard(guard_v, v_pages)


@given(case=cases(), raw=st.booleans(), given_out=st.booleans())
@example(case=PagedCase("float16", True, 6, 16, 8, (128, 128), 40, seed=3), raw=False, given_out=False)
@example(case=PagedCase("float32", True, 6, 16, 3, (5, 5), 40, "row slice", seed=1), raw=False, given_out=True)
def test_gather_is_the_definition_bit_for_bit(backend, case, raw, given_out):
    pages, slots = case.pages(), np.abs(case.slots().astype(np.int64)) - 1  # -1 and, read from twice, others
    slots = case.strided(np.where(slots < case.num_pages * case.page_size, slots, 0))
    dtype = case.stored if raw or not case.float8 else as_dtype(case.dtype)
    scales = {} if dtype == case.stored else case.scales()
    factors = [np.float32(scales.get(n, 1)).reshape(-1)[:, None] for n in ("k_scale", "v_scale")]
    expected = reference.gather_kv(*pages, slots)
    if dtype != case.stored:  # a product rounded to float32, then to the dtype
        expected = [(x.astype(np.float32) * f).astype(dtype) for x, f in zip(expected, factors)]
    guards, out = [], {}
    if given_out:
        for name, want in zip("kv", expected):
            guard, out[name] = backend.guarded(want.shape, dtype, case.layout)
            guards.append((guard, out[name]))
    arguments = moved(backend, scales)
    if not given_out and dtype != case.stored:
        arguments["dtype"] = dtype
    got = gather_kv(*map(backend.array, pages), backend.array(slots), **arguments, **out)
    for name, mine, want in zip("kv", got, expected):
        assert_same_bits(host(backend, mine), want, name=name, case=case)
        assert not given_out or mine is out[name]
    for guard, view in guards:
        check_guard(guard, view)


@given(case=cases(), between=st.booleans(), data=st.data())
def test_copy_is_the_definition_bit_for_bit(backend, case, between, data):
    ids = data.draw(st.permutations(range(case.num_pages)))
    cut = data.draw(st.integers(0, case.num_pages))
    if between:
        source, target = np.array(data.draw(st.lists(st.sampled_from(ids), min_size=cut, max_size=cut)), int), np.array(ids[:cut], int)
    else:  # no target is a source
        target = np.array(ids[:cut], int)
        source = np.array([ids[cut + n % (case.num_pages - cut)] if cut < case.num_pages else ids[n] for n in range(cut)], int)
    source[:1] -= case.num_pages * (case.seed % 2)  # a negative id: the pair is skipped
    pages = case.pages()
    own = [backend.array(x) for x in pages]
    guards = guarded_pages(backend, case) if between else []
    written = [view for _, view in guards] or own
    expected = full(case) if between else [x.copy() for x in pages]
    reference.copy_pages_between(*pages, *expected, source, target)
    other = {"target_k_pages": written[0], "target_v_pages": written[1]} if between else {}
    copy_pages(*own, backend.array(case.strided(source)), backend.array(case.strided(target)), **other)
    for mine, want in zip(written, expected):
        assert_same_bits(host(backend, mine), want, case=case)
    for guard, view in guards:
        check_guard(guard, view)


@given(case=cases(), half=st.integers(1, 64), wide=st.booleans(), interleaved=st.booleans())
@example(case=PagedCase("bfloat16", False, 3, 16, 8, (128, 128), 20), half=64, wide=True, interleaved=False)
@example(case=PagedCase("float16", True, 3, 16, 2, (80, 112), 20, seed=3), half=16, wide=False, interleaved=True)
def test_rotary_is_the_definition_within_rounding(backend, case, half, wide, interleaved):
    """Two products and a sum in float32, then what is stored; V and the features behind rotary_dim are exact."""
    width = case.widths[0]
    if width < 2:
        return
    half = min(half, width // 2)
    angles = case.rng(7).uniform(0, 7, (50, half))
    dtype = np.dtype(np.float32) if wide else as_dtype(case.dtype)
    cos, sin = (place(f(angles).astype(dtype), "row slice") for f in (np.cos, np.sin))
    positions, tokens, slots = case.strided(case.rng(8).integers(0, 50, case.num_tokens)), case.tokens(), case.slots()
    positions[slots < 0] = -7  # nobody looks at them
    here, scales = slots >= 0, case.scales()
    pages = [backend.array(x) for x in case.pages()]
    tables = moved(backend, {"rotary_cos": cos, "rotary_sin": sin, "positions": positions})
    append_kv(*map(backend.array, tokens), *pages, backend.array(slots), **moved(backend, scales), **tables, rotary_interleaved=interleaved)
    at = np.divmod(slots[here], case.page_size)
    got_k, got_v = (host(backend, x)[at].astype(np.float64) for x in pages)
    k, turn = tokens[0][here].astype(np.float64), {"interleaved": interleaved}
    exact = reference.apply_rotary(k, cos, sin, positions[here], **turn)
    size = np.maximum(*(reference.apply_rotary(abs(k), abs(cos), s, positions[here], **turn) for s in (abs(sin), -abs(sin))))
    scale = np.float32(scales.get("k_scale", 1)).astype(np.float64).reshape(-1)[:, None]
    rounding, top = unit_roundoff(case.stored), 448 if case.float8 else np.inf
    exact, error = exact / scale, 3 * U * size / scale  # a product and the sum, u each, and the quotient
    bound = error * (1 + 2 * rounding) + rounding * abs(exact) + half_subnormal(case.stored)
    assert_close(got_k, np.clip(exact, -top, top), bound, name="k", case=case)
    plain = case.pages()
    append_as_defined(case, tokens, plain, slots)
    assert_same_bits(got_v, plain[1][at].astype(np.float64), name="v", case=case)
    assert_same_bits(got_k[..., 2 * half :], plain[0][at].astype(np.float64)[..., 2 * half :], name="rest of k", case=case)


# Laws


@given(case=cases(float8=False))
def test_append_then_gather_gives_the_tokens_back(backend, case):
    """Every bit of them: payloads of NaN too."""
    tokens, slots = case.tokens(), case.slots()
    for x in tokens:
        x[..., 0] = np.array([-0.0, np.nan]).astype(x.dtype)[case.seed % 2]
    pages = [backend.array(x) for x in case.pages()]
    append_kv(*map(backend.array, tokens), *pages, backend.array(slots))
    for mine, given_token in zip(gather_kv(*pages, backend.array(slots)), tokens):
        assert_same_bits(host(backend, mine), np.where((slots >= 0)[:, None, None], given_token, 0).astype(mine.dtype), case=case)


@given(case=cases(), seed=st.integers(0, 99))
def test_permuting_pages_changes_nothing(backend, case, seed):
    order = np.random.default_rng(seed).permutation(case.num_pages)
    slots = case.slots()
    page, offset = np.divmod(np.maximum(slots, 0), case.page_size)
    elsewhere = case.strided(np.where(slots >= 0, np.argsort(order)[page] * case.page_size + offset, -1))
    pages, tokens = case.pages(), [backend.array(x) for x in case.tokens()]
    here, there = [backend.array(x) for x in pages], [backend.array(place(x[order], case.layout)) for x in pages]
    append_kv(*tokens, *here, backend.array(slots), **moved(backend, case.scales()))
    append_kv(*tokens, *there, backend.array(elsewhere), **moved(backend, case.scales()))
    for a, b in zip(here, there):
        assert_same_bits(host(backend, a)[order], host(backend, b), case=case)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("layout", ["pages, 2, page, heads, dim", "pages, 2, heads, page, dim", "packed tokens"])
def test_views_of_one_buffer(backend, layout, float8):
    """FlashInfer's caches, K and V interleaved, and packed QKV: stride faults reported there (FlashInfer PR 527)."""
    case = PagedCase("bfloat16", float8, 4, 16, 3, (64, 64), 20, seed=4)
    pages, tokens, slots = case.pages(), case.tokens(), case.slots()
    both = np.stack(pages, 1)
    if layout == "pages, 2, heads, page, dim":
        both = np.ascontiguousarray(both.swapaxes(2, 3)).swapaxes(2, 3)
    if layout == "packed tokens":
        tokens = list(np.stack([tokens[0], *tokens], 1).swapaxes(0, 1))[1:]
    views = [backend.array(both[:, n]) for n in (0, 1)]
    if backend.xp is not np:  # both in one buffer there too
        whole = backend.array(both)
        views = [whole[:, 0], whole[:, 1]]
    append_kv(*map(backend.array, tokens), *views, backend.array(slots))
    append_as_defined(case, tokens, pages, slots)
    copy_pages(*views, backend.array(np.int32([3])), backend.array(np.int32([0])))
    for mine, want in zip(views, pages):
        want[0] = want[3]
        assert_same_bits(host(backend, mine), want)
    for mine, want in zip(gather_kv(*views, backend.array(slots)), reference.gather_kv(*pages, slots)):
        assert_same_bits(host(backend, mine), want)


@pytest.mark.parametrize("width", [64, 63])  # 63: words of one element, so that they too are counted past 2^32
@pytest.mark.parametrize("stride", [2**31, 2**32 + 8])
def test_offsets_past_2_31_and_2_32_elements(backend, wide_memory, stride, width):
    """Reported of others: page id times stride in 32 bits (vLLM 1486, FlashInfer 3130); strides reach there early."""
    case = PagedCase("float16", False, 2, 5, 2, (width, width), 7, seed=stride % 97)
    pages = wide_memory((2, 5, 2, width), np.float16, (stride * 2, stride // 64 * 8 * 2, 64 * 2, 2))
    pages[...] = np.nan
    pages = wide_memory.move(pages)
    tokens, slots = case.tokens(), backend.array(np.int32([3, 9, -1, 0, 5, 4, 8]))
    v_pages = backend.array(case.pages()[1])
    append_kv(*map(backend.array, tokens), pages, v_pages, slots)
    k, v = gather_kv(pages, v_pages, slots)
    for mine, want in zip((k, v), tokens):
        assert_same_bits(backend.host(mine), np.where((backend.host(slots) >= 0)[:, None, None], want, 0).astype(np.float16))
    copy_pages(pages, v_pages, backend.array(np.int64([1])), backend.array(np.int64([0])))
    assert_same_bits(backend.host(pages[0]), backend.host(pages[1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_rounds_to_nearest_and_saturates(backend, dtype):
    """Every 16-bit value (or float32s at and beside the ties), infinities and NaN, by scales of every size."""
    bits = np.arange(2**16, dtype=np.uint16)
    for scale in (1.0, 0.37, 3.0000002, 1e-6, 1e-30, 3e20, 1e-40):
        if dtype == "float32":
            grid = np.unique(np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float64))
            grid = grid[np.isfinite(grid)]
            ties = np.concatenate([(grid[1:] + grid[:-1]) / 2, grid, [448, 464, 480, 1e5]]) * np.float32(scale)
            beside = [np.nextafter(np.float32(ties), np.float32(t)) for t in (-np.inf, 0, np.inf)]
            x = np.concatenate([*beside, ties, [np.inf, -np.inf, np.nan, 0.0, -0.0]]).astype(np.float32)
            x = np.append(x, np.zeros(-len(x) % 64, np.float32))
        else:
            x = bits.view(as_dtype(dtype))
        tokens = x.reshape(-1, 1, 64)
        pages = [np.zeros((len(tokens), 1, 1, 64), FLOAT8) for _ in range(2)]
        mine = [backend.array(p.copy()) for p in pages]
        slots = np.arange(len(tokens))
        with np.errstate(all="ignore"):
            append_kv(*[backend.array(tokens)] * 2, *mine, backend.array(slots), k_scale=scale, v_scale=backend.array(np.float32([scale])))
            reference.append_kv(tokens, tokens, *pages, slots, k_scale=np.float32(scale), v_scale=np.float32(scale))
        for got, want in zip(mine, pages):
            got, nan = host(backend, got), np.isnan(want.astype(np.float32))
            assert (np.isnan(got.astype(np.float32)) == nan).all()
            assert_same_bits(np.where(nan, 0, got.view(np.uint8)), np.where(nan, 0, want.view(np.uint8)), name=f"scale {scale}")
