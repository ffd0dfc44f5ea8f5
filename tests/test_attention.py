"""Attention, dense, packed and over pages, on every backend: against the definition and by its laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuattn
from cuattn import plan_attention, plan_attention_varlen
from cuattn.testing import assert_same_bits, assert_state, check_guard, merge_bound
from tests.attention_cases import CONTROLS, KINDS, LAYOUTS, AttentionCase, bounds, expected_of, run
from tests.backends import moved
from tests.decode_cases import NOTHING


def check(backend, case: AttentionCase, **more):
    given = case.arrays()
    expected = expected_of(given)
    state = run(backend, given, **more)
    assert_state(state, expected, bounds(given, expected, case.dtype), dtype=case.dtype, case=case)
    return state


PAIRS = st.tuples(st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 130])), st.one_of(st.integers(0, 70), st.just(129)))
CASES = st.builds(
    AttentionCase,
    lengths=st.lists(PAIRS, max_size=3).map(tuple),
    kind=st.sampled_from(KINDS),
    heads=st.sampled_from([(1, 1), (3, 1), (5, 1), (6, 2), (7, 1), (12, 1), (4, 4)]),
    head_dims=st.sampled_from([(1, 1), (40, 40), (64, 64), (80, 24), (64, 128), (17, 33), (256, 256), (16, 512)]),
    page_size=st.sampled_from([1, 5, 16, 17, 64]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    float8=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    index=st.sampled_from(["int32", "int64"]),
    control=st.integers(0, len(CONTROLS) - 1),
    used=st.booleans(),
    padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)


@settings(max_examples=60)
@given(case=CASES)
@example(case=AttentionCase())
@example(case=AttentionCase((), "dense"))
@example(case=AttentionCase(((0, 5),), "dense"))
@example(case=AttentionCase(((5, 0),), "dense", control=8))
@example(case=AttentionCase(((7, 3), (2, 0)), "pages", control=2))  # more queries than keys
@example(case=AttentionCase(((40, 70),), "pages", (2, 1), (512, 512), float8=True))
def test_attention_is_the_definition(backend, case):
    check(backend, case)


def test_the_example_of_continuous_batching(backend):
    """Query lengths 10, 3, 1 and key lengths 0, 1, 7: rows without keys give 0 and -inf."""
    given = AttentionCase(((10, 0), (3, 1), (1, 7)), heads=(8, 2), control=1).arrays()
    assert given["cu_seqlens_q"].tolist() == [0, 10, 13, 14]
    assert given["cu_seqlens_k"].tolist() == [0, 0, 1, 8]
    expected = expected_of(given)
    state = run(backend, given)
    assert_state(state, expected, bounds(given, expected, "float16"), dtype="float16")
    out, lse = (backend.host(x) for x in state)
    assert not out[:12].any() and np.isneginf(lse[:12]).all()  # of 3 queries on one key only the last sees it
    assert np.isfinite(lse[12:]).all()


@pytest.mark.parametrize("control", range(len(CONTROLS)), ids=lambda n: str(CONTROLS[n]))
@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_masks(backend, kind, control):
    check(backend, AttentionCase(((70, 130), (3, 2), (33, 0)), kind, (6, 2), (64, 32), control=control, seed=control))


@pytest.mark.parametrize("rows", [1, 20, 21, 22, 63, 64, 65, 128])
@pytest.mark.parametrize("keys", [31, 32, 33, 64, 65])
def test_lengths_around_tiles(backend, rows, keys):
    check(backend, AttentionCase(((rows, keys), (1, 1)), "packed", (3, 1), (8, 8), control=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shift", [30, 31, 32, 62, 63, 64, 126, 127, 128])
def test_ends_of_windows_at_ends_of_tiles(backend, dtype, shift):
    """Of some tile one row sees only the last key, or all but the first or the last: where a window begins and ends."""
    given = AttentionCase(((70, 70 + shift),), "dense", (1, 1), (64, 64), dtype=dtype).arrays()
    last_row, first_row = ({row + shift - n for n in (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)} for row in (69, 0))
    for window in ((-1, 0), *((left, -1) for left in sorted(last_row | first_row) if left >= 0)):
        case = given | {"window": window}
        expected = expected_of(case)
        assert_state(run(backend, case), expected, bounds(case, expected, dtype), dtype=dtype, case=window)


@pytest.mark.parametrize("page_size", [1, 5, 16, 17, 64, 256, 1024])
def test_lengths_around_pages(backend, page_size):
    ends = (page_size - 1, page_size, page_size + 1, 1, min(3, page_size))
    check(backend, AttentionCase(tuple((min(n, 3), n) for n in ends), "pages", (3, 1), (40, 40), page_size, layout="interleaved"))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 1), (7, 1), (12, 1), (32, 1), (6, 6), (128, 8)])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (72, 512)])
def test_groups_and_head_dims(backend, heads, head_dims):
    check(backend, AttentionCase(((9, 20), (2, 3)), "packed", heads, head_dims, control=1))


@pytest.mark.parametrize("control", [0, 1, 2, 3, 8])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 128), ("bfloat16", 80), ("float16", 192), ("float16", 256)])
@pytest.mark.parametrize(("kind", "page_size"), [("packed", 1), ("pages", 16)])
def test_many_tiles(backend, dtype, head_dim, control, kind, page_size):
    """More tiles of keys than are under way at a time, whole ones and parts, and several tiles of rows."""
    lengths = (390, 1000), (130, 129), (1, 640)
    check(backend, AttentionCase(lengths, kind, (2, 1), (head_dim, head_dim), page_size, dtype=dtype, control=control))


# Laws

LAW = AttentionCase(((70, 100), (1, 37), (0, 5), (5, 0), (90, 90)), "packed", (6, 2), control=8)


@pytest.mark.parametrize("control", [1, 2, 3, 7])
def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(backend, control):
    case = replace(LAW, control=control)
    given, ends = case.arrays(), np.cumsum([0, *(n for n, _ in case.lengths)])
    whole = run(backend, given)
    keys = np.cumsum([0, *(n for _, n in case.lengths)])
    for b in range(len(case.lengths)):
        rows, own = slice(ends[b], ends[b + 1]), slice(keys[b], keys[b + 1])
        parts = {"q": given["q"][rows], "k": given["k"][own], "v": given["v"][own]}
        parts |= {"cu_seqlens_q": ends[[0, b + 1]] - [0, ends[b]], "cu_seqlens_k": keys[[0, b + 1]] - [0, keys[b]]}
        slopes = given.get("alibi_slopes")
        if slopes is not None and slopes.ndim == 2:
            parts["alibi_slopes"] = slopes[b : b + 1]
        state = run(backend, given | parts)
        assert_same_bits(state.out, backend.host(whole.out)[rows])
        assert_same_bits(state.lse, backend.host(whole.lse)[rows])


@pytest.mark.parametrize(("dtype", "control"), [("float32", 2), ("bfloat16", 5)])
def test_dense_packed_and_paged_have_the_same_bits(kernels, dtype, control):
    """In one variant: what has softcap is not for Hopper's kernel, nor are pages of 20 tokens."""
    case = AttentionCase(((70, 100),) * 2, "dense", (6, 2), dtype=dtype, control=control)
    given = case.arrays()
    dense = run(kernels, given)
    rest = {n: x for n, x in given.items() if n not in "qkv"}
    flat = {n: given[n].reshape(-1, *given[n].shape[2:]) for n in "qkv"}
    offsets = {"cu_seqlens_q": np.array([0, 70, 140]), "cu_seqlens_k": np.array([0, 100, 200])}
    table = np.array([[3, 0, 2, 6, 5], [1, 4, 9, 8, 7]])
    pages = {n: flat[n].reshape(10, 20, *flat[n].shape[1:])[np.argsort(table.ravel())] for n in "kv"}
    for other in (flat, {**flat, **pages, "block_table": table}):
        state = run(kernels, {**rest, **offsets, **other})
        assert_same_bits(state.out, kernels.host(dense.out).reshape(140, 6, 64))
        assert_same_bits(state.lse, kernels.host(dense.lse).reshape(140, 6))


def test_a_mask_of_bits_is_a_mask_of_bool(kernels):
    case = AttentionCase(((20, 43),) * 2, "dense", control=10)
    given = case.arrays()
    a = run(kernels, given)
    b = run(kernels, given | {"mask": np.packbits(given["mask"], axis=-1, bitorder="little")})
    assert_same_bits(a.out, b.out)
    assert_same_bits(a.lse, b.lse)


@pytest.mark.parametrize(("dtype", "shape"), [("bool", (1,)), ("bool", ()), ("uint8", (1,)), ("uint8", (4, 1, 1)), ("bool", (2, 1, 20, 1))])
def test_masks_broadcast(backend, dtype, shape):
    given = AttentionCase(((20, 43),) * 2, "dense", dtype="float32").arrays()
    given["mask"] = np.full(shape, 0b01010111, np.uint8) if dtype == "uint8" else np.full(shape, True)
    expected = expected_of(given)
    assert_state(run(backend, given), expected, bounds(given, expected, "float32"), dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_negative_strides(backend, kind, dtype):
    check(backend, AttentionCase(((70, 130), (3, 40)), kind, (6, 2), layout="flipped", dtype=dtype, control=1))


def test_no_heads(backend):
    given = {"q": np.zeros((2, 3, 0, 16), np.float16), "k": np.zeros((2, 5, 1, 16), np.float16), "v": np.zeros((2, 5, 1, 8), np.float16)}
    out, lse = cuattn.attention(**moved(backend, given), return_state=True)
    assert out.shape == (2, 3, 0, 8) and lse.shape == (2, 3, 0)


def test_causal_as_a_mask_has_the_same_bits(kernels):
    given = AttentionCase(((50, 77),), "dense", control=5).arrays()
    seen = np.arange(77) <= np.arange(50)[:, None] + 27
    a, b = run(kernels, given), run(kernels, given | {"causal": False, "mask": seen})
    assert_same_bits(a.out, b.out)
    assert_same_bits(a.lse, b.lse)


@pytest.mark.parametrize("layout", ["interleaved", "head major"])
@pytest.mark.parametrize("kind", KINDS)
def test_strides_change_no_bit(backend, kind, layout):
    a, b = (run(backend, replace(LAW, kind=kind, layout=which).arrays()) for which in ("separate", layout))
    assert_same_bits(a.out, b.out)
    assert_same_bits(a.lse, b.lse)


@pytest.mark.parametrize("cut", [0, 1, 32, 50, 99, 100])
def test_parts_of_the_keys_merge_to_the_whole(backend, cut):
    case = AttentionCase(((40, 100),) * 2, "dense", dtype="float32")
    given = case.arrays()
    parts = [{n: given[n][:, own] for n in "kv"} for own in (slice(cut), slice(cut, None))]
    states, exact, errors = [], [], []
    for part in parts:
        states.append(run(backend, given | part))
        exact.append(expected_of(given | part))
        errors.append(bounds(given, exact[-1], "float32"))
    (outs, lses), (out_errors, lse_errors) = ((np.stack(x) for x in zip(*pairs)) for pairs in (exact, errors))
    bound = merge_bound(outs.astype(np.float32), lses, "float32", out_errors=out_errors, lse_errors=lse_errors)
    slack = 2.0**-23 * abs(outs).max()  # the parts were rounded to float32 for the bound
    assert_state(states[0] | states[1], expected_of(given), (bound[0] + slack, bound[1] + 2.0**-20), dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["packed", "pages"])
def test_values_that_only_some_rows_see_may_be_anything(backend, dtype, head_dim, odd, kind):
    """0 times NaN is NaN: a kernel that multiplies tiles must not let the rows before see it."""
    given = AttentionCase(((200, 300), (3, 130)), kind, (2, 2), (head_dim, head_dim), 16, dtype=dtype, control=1).arrays()

    def at(b, token):
        return (given["block_table"][b, token // 16], token % 16) if kind == "pages" else (token + 300 * b,)

    for b, token, head, d, value in ((0, 150, 0, 5, odd), (0, 299, 0, 5, odd), (0, 299, 0, 6, -odd), (1, 128, 1, 7, odd)):
        given["v"][(*at(b, token), head, d)] = value
    given["k"][(*at(0, 299), 1)] = np.nan
    expected = expected_of(given)
    assert np.isfinite(expected[0][:, 0]).all(-1).sum() == 50 + 3 and np.isnan(expected[1]).sum() == 1
    out, lse = (backend.host(x) for x in run(backend, given))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(expected[1]))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected[0]))
    np.testing.assert_array_equal(np.isposinf(out), np.isposinf(expected[0]))
    np.testing.assert_allclose(out, expected[0], rtol=0.02, atol=0.02)


def test_what_no_row_sees_is_not_read(backend):
    """Entries behind the window may be anything; keys that only other rows see may be NaN."""
    case = AttentionCase(((40, 70), (1, 70)), "pages", (2, 1), page_size=16)
    given = case.arrays() | {"window": (10, 0)}
    given["block_table"][1, :3] = NOTHING
    given["block_table"][0, :1] = NOTHING
    for pages in "kv":
        given[pages][given["block_table"][0, 4], 69 % 16] = np.nan
    expected = expected_of(given)
    state = run(backend, given)
    assert np.isnan(backend.host(state.lse)[39]).all() and np.isnan(expected[1][39]).all()
    limit, others = bounds(given, expected, "float16"), np.r_[0:39, 40]
    assert_state([x[others] for x in state], [x[others] for x in expected], [x[others] for x in limit], dtype="float16")


def test_rows_of_no_sequence_stay_as_they_are(backend):
    case = AttentionCase(((7, 9), (0, 3), (4, 4)), padding=2, dtype="bfloat16", head_dims=(64, 40))
    rows, given = 15, case.arrays()
    guard_out, out = backend.guarded((rows, 4, 40), "bfloat16", "odd offset")
    guard_lse, lse = backend.guarded((rows, 4, 1), "float32", "row slice")
    before = [backend.host(x).copy() for x in (out, lse)]
    state = run(backend, given, out=out, lse=lse[..., 0])
    assert state.out is out
    expected = expected_of(given)
    limit = bounds(given, expected, "bfloat16")
    inside = slice(2, 13)
    assert_state([x[inside] for x in state], [x[inside] for x in expected], [x[inside] for x in limit], dtype="bfloat16")
    for array, kept in zip((out, lse), before):
        array = backend.host(array)
        assert_same_bits(array[:2], kept[:2])
        assert_same_bits(array[13:], kept[13:])
    check_guard(guard_out, out)
    check_guard(guard_lse, lse)
    fresh = run(backend, given)
    assert not backend.host(fresh.out)[[0, 1, 13, 14]].any() and np.isneginf(backend.host(fresh.lse)[[0, 1, 13, 14]]).all()


def test_only_out_is_returned_unless_the_state_is_asked_for(backend):
    given = moved(backend, AttentionCase(((5, 9),) * 2, "dense").arrays())
    out = cuattn.attention(**given)
    assert_same_bits(out, cuattn.attention(**given, return_state=True).out)
    packed = moved(backend, AttentionCase().arrays())
    assert_same_bits(cuattn.attention_varlen(**packed), cuattn.attention_varlen(**packed, return_state=True).out)


def test_a_plan_serves_other_lengths_and_tables(kernels):
    given = AttentionCase(((30, 70), (2, 20)), "pages", control=1).arrays()
    plan = plan_attention_varlen(**moved(kernels, given))
    assert plan.variant in ("mma", "sm90") and "rows" in repr(plan)
    other = AttentionCase(((2, 20), (30, 70)), "pages", control=1).arrays()
    for case in (given, other):
        expected = expected_of(case)
        assert_state(run(kernels, case, plan=plan), expected, bounds(case, expected, "float16"), dtype="float16")
    dense = AttentionCase(((3, 4),), "dense").arrays()
    assert plan_attention(**moved(kernels, dense)).rows in (128, 192)
    longer, plan = AttentionCase(((4, 4),), "dense").arrays(), plan_attention(**moved(kernels, dense))
    with pytest.raises(ValueError, match="attention: plan must be for a call like this one; got one with other seqlen_q"):
        run(kernels, longer, plan=plan)


@pytest.mark.parametrize("stride", [2**31, 2**32 + 8])
@pytest.mark.parametrize("kind", ["dense", "pages"])
def test_keys_past_2_31_and_2_32_elements(backend, wide_memory, kind, stride):
    given = AttentionCase(((5, 40),) * (2 if kind == "dense" else 1), kind, (2, 2), page_size=64).arrays()
    keys = given["k"]  # two sequences, or one page and two free ones
    wide = wide_memory(keys.shape, np.float16, (stride * 2, *keys.strides[1:]))
    wide[...] = keys
    expected = expected_of(given)
    function = cuattn.attention if kind == "dense" else cuattn.attention_varlen
    state = function(**{**moved(backend, given), "k": wide_memory.move(wide)}, return_state=True)
    assert_state(state, expected, bounds(given, expected, "float16"), dtype="float16")


def test_twenty_runs_give_the_same_bits(kernels):
    given = LAW.arrays()
    first = run(kernels, given)
    for _ in range(3 if kernels.name != "gpu" else 20):
        again = run(kernels, given)
        assert_same_bits(again.out, first.out)
        assert_same_bits(again.lse, first.lse)


def test_numbers_of_infinite_and_extreme_scores(backend):
    """One key below every finite sentinel; one that dominates by 1e4; logits of 5e5."""
    given = AttentionCase(((1, 5),), "dense", (1, 1), (8, 8), dtype="float32").arrays()
    given["q"][...], given["k"][...], given["sm_scale"] = 0, 0, 1.0
    given["q"][..., 0] = 1
    for scores in ([-1e30] * 5, [0, 0, 1e4, 0, 0], [5e5, -5e5, 5e5, 0, 1], [-3e38, 0, -3e38, 0, 0]):
        given["k"][0, :, 0, 0] = scores
        expected = expected_of(given)
        assert_state(run(backend, given), expected, bounds(given, expected, "float32"), dtype="float32", case=scores)
