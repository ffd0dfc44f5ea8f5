"""What only the tensor-core variant of decode could get wrong: pieces, tiles that are partly filled, weights in 16 bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from cuattn import _plan_decode, _plan_decode_mma, reference
from cuattn.decode import decode, plan_decode
from cuattn.testing import assert_same_bits, assert_state
from tests.backends import moved
from tests.decode_cases import FLOAT8, DecodeCase, decode_bounds

LONG = DecodeCase((2600, 5, 0, 1100, 256), 1, (8, 2), (128, 128), dtype="bfloat16")


def run(backend, given: dict):
    return decode(**moved(backend, given), return_state=True)


FEW, SOME, MANY = 4, 16, 2048  # warps: pieces of LONG are groups, splits or leaves


@pytest.fixture
def most_warps(monkeypatch):
    """How many warps share the work at most, and so how large their pieces are; blocks and items of the merge."""

    def choose(warps: int, merge: str = "as planned", per_set: int = 2) -> None:
        monkeypatch.setattr(_plan_decode_mma, "_MOST_WARPS", warps)
        monkeypatch.setattr(_plan_decode_mma, "_FEW", 10**6 if merge == "together" else 0)
        monkeypatch.setattr(_plan_decode_mma, "_LONG", 0 if merge == "both" else 10**6)
        monkeypatch.setattr(_plan_decode_mma, "_WAVE", 10**6 if per_set == 1 else 0)
        _plan_decode.plan_decode.cache_clear()

    yield choose
    _plan_decode.plan_decode.cache_clear()


@pytest.mark.parametrize(
    "case",
    [
        LONG, replace(LONG, head_dims=(64, 48), page_size=17, dtype="float16", float8=True),
        replace(LONG, control=2, heads=(6, 2)), replace(LONG, heads=(16, 1)), replace(LONG, head_dims=(256, 256)),
    ],
    ids=["whole pages", "odd pages", "window", "16 rows", "256 features"],
)
def test_the_size_of_a_piece_changes_no_bit(kernels, most_warps, case):
    given, states = case.arrays(), []
    for warps, merge, per_set in itertools.product((FEW, SOME, MANY), ("alone", "together", "both"), (1, 2)):
        most_warps(warps, merge, per_set)
        assert plan_decode(**{n: x for n, x in moved(kernels, given).items() if n not in ("sm_scale", "softcap")}).mma
        states.append(run(kernels, given))
    expected = reference.decode(**given)
    assert_state(states[0], expected, decode_bounds(given, expected, case.dtype), dtype=case.dtype, case=case)
    for other in states[1:]:
        assert_same_bits(states[0].out, other.out)
        assert_same_bits(states[0].lse, other.lse)


def slots_of(lengths: list[int], first_leaves: list[int], teams: int, leaf: int, most: int, groups: int) -> list[int]:
    """Of all pieces, as SequenceCut, PieceSizes and ToMerge of decode_work.cuh give them."""
    shifts = [max((max(n, 1) - 1).bit_length() - 10, leaf.bit_length() - 1) for n in lengths]
    origins = [(f // most * most) << s for f, s in zip(first_leaves, shifts)]
    weights = [max(n - o, 16) for n, o in zip(lengths, origins)]
    limit = min(sum(weights) // teams, 1 << 26) * 4 // 7
    slot_shift = max(limit // 4, leaf).bit_length() - 1
    slots, begin = [], 0
    for b, (n, f, s, origin, weight) in enumerate(zip(lengths, first_leaves, shifts, origins, weights)):
        whole = most << s <= limit or weight <= limit
        piece = (most if whole else 4 if most > 4 and 4 << s <= limit else 1) << s
        numbers = range((f << s) // piece, max(n - 1, 0) // piece + 1)
        on_line = (len(lengths) * groups + b + (begin - origin + p * piece >> slot_shift) for p in numbers)
        if len(numbers) > 1:
            slots += [b * groups + p for p in numbers] if whole else on_line
        begin += weight
    return slots


@hypothesis.given(
    st.lists(st.integers(0, 40000) | st.integers(0, 2**23), min_size=1, max_size=20), st.integers(1, 2048),
    st.sampled_from([(64, 16), (128, 4)]), st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_no_two_partial_states_have_a_place_in_common(lengths, teams, sizes, window, random):
    leaves = [max(n - 1, 0) >> max((max(n, 1) - 1).bit_length() - 10, sizes[0].bit_length() - 1) for n in lengths]
    firsts = [random.randint(0, n) if window else 0 for n in leaves]
    most, groups = _plan_decode_mma.num_slots(teams, len(lengths), max(lengths), *sizes)
    slots = slots_of(lengths, firsts, teams, *sizes, groups)
    assert len(set(slots)) == len(slots)
    assert max(slots, default=0) < most


def test_a_row_group_knows_nothing_of_its_neighbours(kernels):
    """Heads of one kv head share tiles; whether the largest score of one grows must not touch another's bits."""
    given = replace(LONG, heads=(8, 1), dtype="float16").arrays()
    whole = run(kernels, given)
    some = run(kernels, given | {"q": given["q"][:, :, 3:5]})
    assert_same_bits(whole.out[:, :, 3:5], some.out)
    assert_same_bits(whole.lse[:, :, 3:5], some.lse)


@pytest.mark.parametrize(("dtype", "float8"), [("float16", False), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize(
    ("sm_scale", "size"),
    [(np.log(2), 2.0**24), (np.log(2), 2.0**25), (np.log(2), 2.0**26), (1.0, 1.0e8), (1.0, 1.1e8), (1.0, 1.2e8), (1.0, -1.2e8)],
)
def test_the_mean_of_equal_values_is_that_value_for_any_finite_scores(backend, dtype, float8, sm_scale, size):
    """Base-2 scores of a size at which float32 counts in ones to sixteens, later ones 8 larger: weights stay within half."""
    given = DecodeCase((90,), 1, (4, 2), (64, 64), dtype=dtype, float8=float8).arrays()
    first, large = given["block_table"][0, 0], 256.0 if float8 else 4096.0
    for side in ("k_pages", "v_pages", "q"):
        given[side][...] = np.zeros((), given[side].dtype)
    given["k_pages"][..., 0], given["k_pages"][..., 1] = large, 8.0
    given["k_pages"][first, ..., 1] = 0.0
    given["v_pages"][...] = 1.75
    given["q"][..., 0], given["q"][..., 1] = size / large, 1.0
    given |= {"sm_scale": float(sm_scale)} | ({"k_scale": 1.0, "v_scale": 1.0} if float8 else {})
    out = backend.host(run(backend, given).out).astype(np.float64)
    np.testing.assert_allclose(out, 1.75, rtol=2.0**-7, atol=0)  # the weights and the result, rounded to bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_near_the_largest_float_stay_finite(backend, dtype):
    """A weight above 1, where a later key scores a little higher, would overflow sums that are finite themselves."""
    given = DecodeCase((17,), 1, (1, 1), (64, 64), dtype=dtype).arrays()
    for side in ("k_pages", "v_pages", "q"):
        given[side][...] = np.zeros((), given[side].dtype)
    page = given["block_table"][0, 1]
    given["q"][..., 0], given["k_pages"][page, 0, 0, 0], given["v_pages"][page, 0] = 1, 4.5, 1e37
    out = backend.host(run(backend, given | {"sm_scale": 1.0}).out).astype(np.float64)
    np.testing.assert_allclose(out, reference.decode(**given, sm_scale=1.0)[0], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("control", [0, 1, 5, 6, 9])
def test_the_short_code_has_the_bits_of_the_long(kernels, control):
    """A table of int64 is not for the short one; both must round alike, with softcap and ALiBi too."""
    given = replace(LONG, control=control).arrays()
    a, b = run(kernels, given), run(kernels, given | {"block_table": given["block_table"].astype(np.int64)})
    assert_same_bits(a.out, b.out)
    assert_same_bits(a.lse, b.lse)


@pytest.mark.parametrize("warps", [FEW, MANY])
def test_nan_that_is_seen_shows(kernels, most_warps, warps):
    """A leaf whose scores are all NaN has no largest one, and yet it is not empty."""
    most_warps(warps)
    given = DecodeCase((1100, 40), 1, (4, 2), (64, 64)).arrays()
    for page in given["block_table"][0, :4]:
        given["k_pages"][page, :, 0] = np.nan
    given["q"][1, 0, 3, 5] = np.nan
    expected, state = reference.decode(**given), run(kernels, given)
    assert np.isnan(expected[1]).sum() == 3
    np.testing.assert_array_equal(np.isnan(kernels.host(state.lse)), np.isnan(expected[1]))
    np.testing.assert_array_equal(np.isnan(kernels.host(state.out)), np.isnan(expected[0]))


@pytest.mark.parametrize(("heads", "head_dims"), [((4, 2), (144, 256)), ((12, 1), (80, 128))])
def test_what_a_row_lacks_of_its_last_line_is_no_other_line(backend, heads, head_dims):
    """The queries are 0 there, and 0 times an infinite feature of another line would be NaN."""
    given = DecodeCase((40,), 1, heads, head_dims, dtype="float16").arrays()
    given["q"][..., 40] = 1
    page = given["block_table"][0, 0]
    given["k_pages"][page, 3, :, 40] = -np.inf
    expected = reference.decode(**given)
    assert np.isfinite(expected[0]).all()
    finite = {**given, "k_pages": np.where(np.isinf(given["k_pages"]), 0, given["k_pages"]).astype(np.float16)}
    bounds = decode_bounds(finite, expected, "float16")
    assert_state(run(backend, given), expected, bounds, dtype="float16")


@pytest.mark.parametrize("head_dims", [(64, 64), (16, 48), (128, 128)])
@pytest.mark.parametrize("float8", [False, True])
def test_nothing_is_read_behind_the_pages(backend, head_dims, float8):
    """NaN lies around the pages; rows of 64 bytes fill half a line."""
    given = DecodeCase((32,), 1, (2, 1), head_dims, 16, "bfloat16", float8).arrays()
    ids = given["block_table"][0, :2].copy()
    for side in ("k_pages", "v_pages"):
        pages = given[side][ids]
        around = np.full(pages.size + 2048, np.nan, pages.dtype)
        given[side] = around[1024:][: pages.size].reshape(pages.shape)
        given[side][...] = pages
    given["block_table"][0, :2] = [0, 1]
    expected = reference.decode(**given)
    state = run(backend, given)
    assert_state(state, expected, decode_bounds(given, expected, "bfloat16"), dtype="bfloat16")
    assert not float8 or given["k_pages"].dtype == FLOAT8
