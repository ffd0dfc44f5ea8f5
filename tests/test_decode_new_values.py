"""New tokens of decode whose metadata is wrong: refused where values are checked, and harmless where they are not."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import reference
from cuattn.testing import assert_same_bits, assert_state
from tests.decode_cases import (
    PAGES,
    DecodeCase,
    absent_keys_left_out,
    alone,
    decode_bounds,
    run_and_pages,
    slots_of,
    turned,
    without_new,
)


@pytest.mark.parametrize("what", ["table", "rotation"])
def test_tokens_without_room_are_refused_under_value_checks_and_left_out_without(backend, what):
    """Reported of others: room for new keys that isn't there overwrote a neighbour (flash-attention #638)."""
    case = DecodeCase((14, 16, 3, 70), 2, (4, 2), (16, 8), 16, new=3, rotary="halves 7 wide")
    fits = [2, 0, 3, 0]

    def arrays():
        given = case.arrays()
        if what == "table":  # behind the row lie the pages that it had before
            return given | {"block_table": given["block_table"][:, :1]}
        return given | {name: given[name][:16] for name in ("rotary_cos", "rotary_sin")}

    rule = r"max_pages_per_seq \* page_size - seqlen_new" if what == "table" else r"rotary_cos.shape\[0\] - seqlen_new"
    with pytest.raises(ValueError, match=rf"decode: cache_seqlens\[0\] must be within 0 and {rule} \(13\); got 14"):
        run_and_pages(backend, arrays())
    if backend.name == "numpy":
        return
    with cuattn.checking("arguments"):
        state, pages = run_and_pages(backend, arrays())
    old = [arrays()[name] for name in PAGES]
    for b, fit in enumerate(fits):
        given = alone(arrays(), b)
        given |= {name: given[name][:, :fit] for name in "kv"}
        if what == "table":
            given["cache_seqlens"] = np.minimum(given["cache_seqlens"], 16)
        with cuattn.checking("arguments"):
            expected, written = run_and_pages(backend, given)
        assert_same_bits(state.out[b], expected.out[0])
        assert_same_bits(state.lse[b], expected.lse[0])
        at = np.divmod(slots_of(given), case.page_size)
        for before, one in zip(old, written):
            before[at] = one[at]
    for mine, before in zip(pages, old):
        assert_same_bits(mine, before)


def test_queries_without_a_row_of_cosines_are_refused_under_value_checks_and_not_rotated_without(backend):
    case = DecodeCase((14, 3), 5, (4, 2), (16, 8), 16, new=2, rotary="halves 7 wide")
    given = case.arrays()
    tables = {name: given[name][:16] for name in ("rotary_cos", "rotary_sin")}
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] must be within 0 and rotary_cos.shape\[0\] - seqlen_q \(11\); got 14"):
        run_and_pages(backend, given | tables)
    if backend.name == "numpy":
        return
    with cuattn.checking("arguments"):
        state, pages = run_and_pages(backend, case.arrays() | tables)
    given = case.arrays()
    q, error = turned(given, True)
    q[0, 2:], error[0, 2:] = given["q"][0, 2:], 0
    rest = without_new(given, pages, q)
    expected = reference.decode(**rest)
    assert_state(state, expected, decode_bounds(rest, expected, "float16", error), dtype="float16")


WRONG = [(w, i) for i in (np.int32, np.int64) for w in (-1, -(2**31), 2**31 - 1, "num_pages")] + [(2**32, np.int64), (-(2**63), np.int64)]


@pytest.mark.parametrize(("wrong", "index"), WRONG)
def test_pages_that_do_not_exist_are_refused_under_value_checks_and_take_no_tokens_without(backend, wrong, index):
    case = DecodeCase((38, 300, 20), 1, (4, 2), (64, 64), 16, new=15, index=np.dtype(index).name)
    given, old = case.arrays(), case.arrays()
    wrong = len(given["k_pages"]) if wrong == "num_pages" else wrong
    given["block_table"][0, 3], given["block_table"][1, 19] = wrong, wrong  # tokens 48 and 49 to 52; 304 to 314
    table = given["block_table"].copy()
    with pytest.raises(ValueError, match=rf"decode: block_table\[0, 3\] must be within 0 and num_pages - 1 .* got {wrong}"):
        run_and_pages(backend, {name: np.copy(x) for name, x in given.items()})
    if backend.name == "numpy":
        return
    with cuattn.checking("arguments"):
        state, pages = run_and_pages(backend, given)
    where = case.arrays()["cache_seqlens"][:, None] + np.arange(case.new)
    ids = np.take_along_axis(table.astype(np.int64), where // 16, 1)
    here = (ids >= 0) & (ids < len(pages[0]))
    assert 0 < here.sum() < here.size
    for name, token, mine in zip(PAGES, (old["k"], old["v"]), pages):
        old[name][ids[here], where[here] % 16] = token[here]
        assert_same_bits(mine, old[name])
    rest = without_new(old | {"block_table": table}, pages, old["q"])
    expected = absent_keys_left_out(rest)
    assert_state(state, expected, decode_bounds(rest, expected, "float16"), dtype="float16")


@pytest.mark.parametrize("changed", [{"cache_seqlens": [-1, 5]}, {"cache_seqlens": [-(2**31), 5]}, {"cache_batch_idx": [2, 1]}, {"cache_batch_idx": [-1, 1]}])
def test_no_sequence_takes_no_tokens(backend, changed):
    """Padding of a captured batch: a length of -1 is what others get who subtract the new token from nothing."""
    case = DecodeCase((40, 5), 2, (4, 2), (64, 8), 16, new=2)
    changed = {name: np.array(x, np.int32) for name, x in changed.items()}
    with pytest.raises(ValueError, match=rf"decode: {next(iter(changed))}\[0\] must be within 0 and"):
        run_and_pages(backend, case.arrays() | changed)
    if backend.name == "numpy":
        return
    with cuattn.checking("arguments"):
        state, pages = run_and_pages(backend, case.arrays() | changed)
        whole, _ = run_and_pages(backend, case.arrays())
    assert not backend.host(state.out[0]).any() and np.isneginf(backend.host(state.lse[0])).all()
    assert_same_bits(state.out[1], whole.out[1])
    given = case.arrays()
    at = np.divmod(slots_of(given)[1], 16)
    for name, mine, token in zip(PAGES, pages, (given["k"], given["v"])):
        given[name][at] = token[1]
        assert_same_bits(mine, given[name])


def test_pages_that_only_new_tokens_need_are_looked_at_under_value_checks(backend):
    """Tokens 5 and 6 are written although the window hides them."""
    given = DecodeCase((5, 0), 1, page_size=1, new=3).arrays()
    given["block_table"][0, 6] = -1
    with pytest.raises(ValueError, match=r"decode: block_table\[0, 6\] must be within 0 and num_pages - 1 .* got -1"):
        run_and_pages(backend, given | {"window": (0, 0)})


def test_padding_does_not_reach_into_new_tokens(kernels):
    case = DecodeCase((40, 5), 2, (4, 2), (64, 8), 16, new=2)
    with cuattn.checking("arguments"):
        far, near = (run_and_pages(kernels, case.arrays() | {"cache_leftpad": np.array([n, 0])})[0] for n in (41, 40))
    assert_same_bits(far.out, near.out)
    assert_same_bits(far.lse, near.lse)


def test_two_tokens_for_one_place_are_refused_under_value_checks(backend):
    given = DecodeCase((5, 9), 1, page_size=16, new=2).arrays()
    given["block_table"][1, 0] = given["block_table"][0, 0]
    given["cache_seqlens"][1] = 6  # 5 and 6, 6 and 7
    page = given["block_table"][0, 0]
    with pytest.raises(ValueError, match=rf"decode: block_table must give each new token a place of its own; got token 6 of page {page} twice"):
        run_and_pages(backend, given)
