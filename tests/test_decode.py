"""Decode on every backend: against the definition and by its laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuattn
from cuattn import reference
from cuattn._call import Call
from cuattn._plan_decode import splits_within
from cuattn.decode import decode, decode_workspace_size, plan_decode
from cuattn.testing import assert_same_bits, assert_state, check_guard, merge_bound
from tests.backends import moved
from tests.decode_cases import CONTROLS, LAYOUTS, NOTHING, DecodeCase
from tests.decode_cases import decode_bounds as bounds


def run(backend, given: dict, **more):
    return decode(**moved(backend, given), return_state=True, **more)


def check(backend, case: DecodeCase, **more):
    given = case.arrays()
    expected = reference.decode(**given)
    state = run(backend, given, **more)
    assert_state(state, expected, bounds(given, expected, case.dtype), dtype=case.dtype, case=case)
    return state


CASES = st.builds(
    DecodeCase,
    lengths=st.lists(st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 600])), max_size=3).map(tuple),
    seqlen_q=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (3, 1), (5, 1), (6, 2), (7, 1), (12, 1), (4, 4)]),
    head_dims=st.sampled_from([(1, 1), (40, 40), (64, 64), (80, 24), (64, 128), (17, 33), (256, 256), (16, 512)]),
    page_size=st.sampled_from([1, 5, 16, 17, 64, 256]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    float8=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    index=st.sampled_from(["int32", "int64"]),
    control=st.integers(0, len(CONTROLS) - 1),
    seed=st.integers(0, 99),
)


@settings(max_examples=80)
@given(case=CASES)
@example(case=DecodeCase())
@example(case=DecodeCase((), 1))
@example(case=DecodeCase((3, 0), 5, control=8))  # more queries than tokens
@example(case=DecodeCase((70,), 1, (2, 1), (512, 512), float8=True))
@example(case=DecodeCase((300, 70), 2, (12, 1), (128, 128), 17, "bfloat16", control=10))
def test_decode_is_the_definition(backend, case):
    check(backend, case)


@pytest.mark.parametrize("control", range(len(CONTROLS)), ids=lambda n: str(CONTROLS[n]))
@pytest.mark.parametrize("float8", [False, True])
def test_scores_and_masks(backend, float8, control):
    check(backend, DecodeCase((0, 2, 130, 400), 3, (6, 2), (64, 32), float8=float8, control=control, seed=control))


# Below, at and above a split; a multiple of the step of 64; more than 32 splits of 256, so that splits grow.
@pytest.mark.parametrize("length", [1, 255, 256, 257, 511, 512, 513, 704, 8191, 8192, 8193, 8300])
def test_lengths_around_splits(backend, length):
    check(backend, DecodeCase((length, 3), 1, (8, 8), (8, 8), 64))


@pytest.mark.parametrize("page_size", [1, 5, 16, 17, 64, 256, 1024])
def test_lengths_around_pages(backend, page_size):
    """Reported of others: one page too many at its edge (pegainfer #291), the second of two short sequences wrong (FlashInfer #725)."""
    lengths = (page_size - 1, page_size, page_size + 1, 1, min(3, page_size), 2 * page_size)
    check(backend, DecodeCase(lengths, 2, (3, 1), (40, 40), page_size, layout="interleaved"))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 1), (7, 1), (12, 1), (32, 1), (6, 6), (128, 8)])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (72, 512)])
def test_groups_and_head_dims(backend, heads, head_dims):
    check(backend, DecodeCase((20, 3), 1 + heads[0] % 2, heads, head_dims))


def test_the_split_rule():
    for kv_heads, most in ((1, 128), (2, 128), (4, 96), (8, 48), (64, 16)):
        assert splits_within(10**6, kv_heads) == most
        assert [splits_within(n, kv_heads) for n in (0, 1, 256, 257, 512, 513)] == [1, 1, 1, 2, 2, 3]


# Laws

LAW = DecodeCase((300, 1, 0, 37, 700), 2, (6, 2), (64, 64), control=9)


def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(backend):
    given = LAW.arrays()
    whole = run(backend, given)
    for b in range(len(LAW.lengths)):
        alone = {n: given[n][b : b + 1] if n in ("q", "block_table", "cache_seqlens") else x for n, x in given.items()}
        for width in (None, -(-LAW.lengths[b] // 16)):  # no wider than needed: one kernel where there were two
            state = run(backend, {**alone, "block_table": alone["block_table"][:, :width]})
            assert_same_bits(state.out[0], whole.out[b])
            assert_same_bits(state.lse[0], whole.lse[b])


def test_order_of_pages_type_of_index_and_batch_index_change_no_bit(backend):
    given = LAW.arrays()
    whole = run(backend, given)
    order = np.random.default_rng(1).permutation(len(given["k_pages"]))
    table = given["block_table"].astype(np.int64)
    inside = table != NOTHING
    table[inside] = np.argsort(order)[table[inside]]
    shuffled = {"k_pages": given["k_pages"][order], "v_pages": given["v_pages"][order], "block_table": table}
    rows = np.array([4, 2, 2, 0, 1], np.int64)
    for changed, expected in (
        (shuffled, lambda x: x),
        ({"cache_seqlens": given["cache_seqlens"].astype(np.int64)}, lambda x: x),
        ({"cache_batch_idx": rows, "q": given["q"][rows], "cache_seqlens": given["cache_seqlens"][rows]}, lambda x: x[rows]),
    ):
        state = run(backend, {**given, **changed})
        assert_same_bits(state.out, expected(backend.host(whole.out)))
        assert_same_bits(state.lse, expected(backend.host(whole.lse)))


def test_groups_are_repeated_heads(backend):
    given = replace(LAW, heads=(6, 2)).arrays()
    repeated = {n: np.repeat(given[n], 3, axis=2) for n in ("k_pages", "v_pages")}
    a, b = run(backend, given), run(backend, {**given, **repeated})
    assert_same_bits(a.out, b.out)
    assert_same_bits(a.lse, b.lse)


@pytest.mark.parametrize("layout", LAYOUTS[1:3])
def test_strides_change_no_bit(backend, layout):
    a, b = (run(backend, replace(LAW, layout=which).arrays()) for which in ("separate", layout))
    assert_same_bits(a.out, b.out)
    assert_same_bits(a.lse, b.lse)


@pytest.mark.parametrize("cut", [0, 1, 256, 300, 511, 650])
def test_a_prefix_and_the_rest_merge_to_the_whole(backend, cut):
    case = DecodeCase((650, 651), 1, (4, 2), dtype="float32", control=1)
    given = case.arrays()
    parts = [{"cache_seqlens": np.full(2, cut, np.int32)}, {"cache_leftpad": np.full(2, cut, np.int32)}]
    states, exact, errors = [], [], []
    for part in parts:
        states.append(run(backend, {**given, **part}))
        exact.append(reference.decode(**{**given, **part}))
        errors.append(bounds({**given, "cache_seqlens": given["cache_seqlens"]}, exact[-1], "float32"))
        assert_state(states[-1], exact[-1], errors[-1], dtype="float32", case=case)
    (outs, lses), (out_errors, lse_errors) = ((np.stack(x) for x in zip(*pairs)) for pairs in (exact, errors))
    bound = merge_bound(outs.astype(np.float32), lses, "float32", out_errors=out_errors, lse_errors=lse_errors)
    slack = 2.0**-23 * abs(outs).max()  # the parts were rounded to float32 for the bound
    assert_state(states[0] | states[1], reference.decode(**given), (bound[0] + slack, bound[1] + 2.0**-20), dtype="float32")


def test_what_no_row_sees_is_not_read(backend):
    """Entries in the padding and behind the window may be anything; keys that only other rows see may be NaN."""
    case = DecodeCase((70, 70), 2, (2, 1), (64, 64), page_size=16)
    given = case.arrays() | {"cache_leftpad": np.array([33, 69], np.int64), "window": (30, 0)}
    given["block_table"][:, :2] = NOTHING
    last = given["block_table"][0, 4], 69 % 16
    for pages in ("k_pages", "v_pages"):
        given[pages][last] = np.nan
    expected = reference.decode(**given)
    state = run(backend, given)
    assert np.isnan(backend.host(state.lse)[0, 1]).all() and np.isnan(expected[1][0, 1]).all()
    seen = [(slice(0, 1), slice(0, 1)), (slice(1, 2), slice(None))]
    for at in seen:
        kept, limit = [x[at] for x in expected], bounds(given, expected, "float16")
        assert_state([x[at] for x in state], kept, [x[at] for x in limit], dtype="float16")


@pytest.mark.parametrize("length", [200, 700])
def test_results_and_workspace_are_written_where_they_are_and_nowhere_else(backend, length):
    case = DecodeCase((length, 0, 5), 2, (4, 2), (64, 40), dtype="bfloat16")
    shape, given = (3, 2, 4), case.arrays()
    tokens = given["block_table"].shape[1] * case.page_size
    size = decode_workspace_size(3, 2, 4, 2, 64, tokens)
    assert (size > 0) == (tokens > 64)
    guard_out, out = backend.guarded((*shape, 40), "bfloat16", "odd offset")
    guard_lse, lse = backend.guarded((*shape, 1), "float32", "row slice")
    guard_work, work = backend.guarded((size // 4,), "float32", "contiguous")
    state = check(backend, case, out=out, lse=lse[..., 0], workspace=work)
    assert state.out is out
    for guard, view in ((guard_out, out), (guard_lse, lse), (guard_work, work)):
        check_guard(guard, view)
    alone = decode(**moved(backend, given))  # no lse is asked for
    assert_same_bits(alone, state.out)


def test_a_plan_serves_other_lengths_and_tables(kernels):
    given = DecodeCase((700, 30), 1).arrays()
    arrays = moved(kernels, given)
    plan = plan_decode(**arrays)
    assert plan.workspace_bytes > 0 and "mma=True" in repr(plan)
    shorter = {**given, "cache_seqlens": np.repeat(np.array([30, 700], np.int32), 2)[::2], "block_table": given["block_table"][::-1]}
    for case in (given, {**shorter, "block_table": np.repeat(shorter["block_table"], 2, axis=1)[:, ::2]}):
        expected = reference.decode(**case)
        assert_state(run(kernels, case, plan=plan), expected, bounds(case, expected, "float16"), dtype="float16")


@pytest.mark.parametrize("stride", [2**31, 2**32 + 8])
def test_pages_past_2_31_and_2_32_elements(backend, wide_memory, stride):
    """Reported of others: 32-bit products of page and stride (FlashInfer #3130, tokenspeed #501)."""
    given = DecodeCase((40,), 1, (2, 2), (64, 64), page_size=16).arrays()
    pages = given["k_pages"]
    wide = wide_memory(pages.shape, np.float16, (stride * 2, *pages.strides[1:]))
    wide[...] = pages
    expected = reference.decode(**given)
    state = decode(**{**moved(backend, given), "k_pages": wide_memory.move(wide)}, return_state=True)
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
    given = DecodeCase((5,), 1, (1, 1), (8, 8), dtype="float32", control=1).arrays()
    q, page = given["q"], given["block_table"][0, 0]
    q[...], given["k_pages"][page, :5], given["sm_scale"] = 0, 0, 1.0
    q[..., 0] = 1
    for scores in ([-1e30] * 5, [0, 0, 1e4, 0, 0], [5e5, -5e5, 5e5, 0, 1], [-3e38, 0, -3e38, 0, 0]):
        given["k_pages"][page, :5, 0, 0] = scores
        expected = reference.decode(**given)
        assert_state(run(backend, given), expected, bounds(given, expected, "float32"), dtype="float32", case=scores)


def test_the_state_of_nothing_is_the_identity(backend):
    state = run(backend, DecodeCase((0, 0), 2).arrays())
    assert isinstance(state, cuattn.AttentionState)
    assert not backend.host(state.out).any() and np.isneginf(backend.host(state.lse)).all()


def test_scratch_memory_is_not_allocated_for_a_graph(kernels, monkeypatch):
    """Its replays would write to what the pool has given to others since."""
    given = moved(kernels, DecodeCase((700,), 1).arrays())
    monkeypatch.setattr(Call, "capturing", lambda self: True)
    with pytest.raises(ValueError, match="decode: workspace must be given while a CUDA graph is captured.*; got None"):
        decode(**given)
    space = kernels.array(np.zeros(plan_decode(**given).workspace_bytes // 4, np.float32))
    decode(**given, workspace=space)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"batch": -1}, ValueError, "batch must be at least 0; got -1"),
        ({"num_kv_heads": 0}, ValueError, r"num_heads must be a multiple of num_kv_heads \(0\); got 8"),
        ({"num_heads": 7}, ValueError, r"num_heads must be a multiple of num_kv_heads \(2\); got 7"),
        ({"head_dim": 513}, ValueError, "head_dim must be 1 to 512; got 513"),
        ({"max_tokens": 1000.5}, TypeError, "max_tokens must be an integer; got float"),
    ],
)
def test_sizes_of_scratch_memory_are_checked(changed, error, text):
    sizes = {"batch": 2, "seqlen_q": 1, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "max_tokens": 1000}
    assert decode_workspace_size(**sizes) > 0
    with pytest.raises(error, match="decode_workspace_size: " + text):
        decode_workspace_size(**sizes | changed)
