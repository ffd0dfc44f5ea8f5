"""Decode with new tokens, on every backend: what is written, what is then attended to, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuattn import reference
from cuattn.decode import decode, plan_decode
from cuattn.paged import append_kv
from cuattn.rotary import apply_rotary
from cuattn.testing import assert_close, assert_same_bits, assert_state, check_guard
from cuattn.testing.tolerance import U, half_subnormal, unit_roundoff
from tests.backends import moved
from tests.decode_cases import (
    CONTROLS,
    LAYOUTS,
    PAGES,
    DecodeCase,
    alone,
    decode_bounds,
    rotated_size,
    run_and_pages,
    slots_of,
    turned,
    without_new,
)
from tests.paged_cases import host

ROTARY = [f"{style} {sevenths} {table}" for style in ("halves", "interleaved") for sevenths in (0, 3, 7) for table in ("wide", "narrow")]


def check(backend, case: DecodeCase):
    """Pages and state against the definition."""
    given, defined = case.arrays(), case.arrays()
    reference.decode(**defined)
    state, pages = run_and_pages(backend, given)
    given, expected = case.arrays(), [defined[name] for name in PAGES]
    if case.rotary:
        check_turned_keys(given, pages[0], expected[0], case)
    for name, mine, want in zip(PAGES, pages, expected):
        assert_same_bits(mine, want, name=name, case=case)
    q, error = turned(given, case.local())
    rest = without_new(given, pages, q)
    expected = reference.decode(**rest)
    assert_state(state, expected, decode_bounds(rest, expected, case.dtype, error), dtype=case.dtype, case=case)
    return state, pages


def check_turned_keys(given: dict, pages: np.ndarray, expected: np.ndarray, case: DecodeCase) -> None:
    """New keys within rounding; they then replace those of the definition, so that the rest can be compared bit for bit."""
    at = np.divmod(slots_of(given), case.page_size)
    where = given["cache_seqlens"][:, None] + np.arange(case.new)
    tables, style = (given["rotary_cos"], given["rotary_sin"]), {"interleaved": given["rotary_interleaved"]}
    exact = reference.apply_rotary(given["k"], *tables, where, **style)
    scale = np.asarray(given.get("k_scale", 1.0), np.float32).astype(float).reshape(-1, 1)
    error = 4 * U * rotated_size(given["k"].astype(float), *tables, where, style) / scale  # and the quotient
    exact, rounding, top = exact / scale, unit_roundoff(pages.dtype), 448 if case.float8 else np.inf
    bound = error * (1 + 2 * rounding) + rounding * abs(exact) + half_subnormal(pages.dtype)
    assert_close(pages[at].astype(float), np.clip(exact, -top, top), bound, name="new keys", case=case)
    stays = 2 * tables[0].shape[1]
    assert_same_bits(pages[at][..., stays:], expected[at][..., stays:], name="features that stay", case=case)
    expected[at] = pages[at]


CASES = st.builds(
    DecodeCase,
    lengths=st.lists(st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 250, 255, 256, 500])), max_size=3).map(tuple),
    seqlen_q=st.integers(0, 4),
    heads=st.sampled_from([(1, 1), (6, 2), (5, 1), (4, 4)]),
    head_dims=st.sampled_from([(2, 1), (64, 64), (80, 24), (64, 128), (17, 33), (256, 256), (16, 512)]),
    page_size=st.sampled_from([1, 5, 16, 64]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    float8=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    index=st.sampled_from(["int32", "int64"]),
    control=st.integers(0, len(CONTROLS) - 1),
    seed=st.integers(0, 99),
    new=st.sampled_from([0, 1, 1, 2, 5, 30]),
    rotary=st.sampled_from(["", *ROTARY]),
)
NEW = DecodeCase((300, 0, 37, 254), 2, (6, 2), (64, 40), new=3, rotary="halves 7 wide")  # new tokens across splits and pages


@settings(max_examples=60)
@given(case=CASES)
@example(case=NEW)
@example(case=replace(NEW, float8=True, seed=1, rotary="interleaved 3 narrow"))
@example(case=replace(NEW, dtype="float32", head_dims=(512, 512), control=1))  # every query at one position
@example(case=replace(NEW, seqlen_q=0))
@example(case=replace(NEW, new=300, seqlen_q=1, control=10))  # written although no query sees them, some whole splits
@example(case=replace(NEW, lengths=(5,), new=2, seqlen_q=4))  # more queries than tokens that are new
def test_decode_with_new_tokens_is_the_definition(backend, case):
    check(backend, case)


@pytest.mark.parametrize("length", [8187, 8189, 8192])
def test_new_tokens_lengthen_the_splits(backend, length):
    """8 kv heads have 32 splits of 256 tokens; from 8193 tokens on splits are longer."""
    check(backend, DecodeCase((length, 3), 1, (8, 8), (8, 8), 64, new=5))


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("control", [0, 1, 3])
def test_rotations(backend, dtype, rotary, control):
    check(backend, DecodeCase((20, 0, 7), 3, (4, 2), (28, 8), 5, dtype, new=2, rotary=rotary, control=control))


def test_the_example_of_hugging_face_as_printed(backend):
    """Blocks of 32 tokens, lengths before the new token; its block 1 is there for token 32 of the second sequence."""
    rng, f16 = np.random.default_rng(0), np.float16
    table = np.array([[2, -1, -1, -1], [0, 1, -1, -1], [3, 5, 6, -1]], np.int32)
    lengths = np.array([30, 32, 70], np.int32)
    shapes = {"q": (3, 1, 8, 64), "k": (3, 1, 2, 64), "v": (3, 1, 2, 64), "k_pages": (7, 32, 2, 64), "v_pages": (7, 32, 2, 64)}
    given = {name: rng.standard_normal(shape).astype(f16) for name, shape in shapes.items()}
    given |= {"block_table": table, "cache_seqlens": lengths}
    before = [given[name].copy() for name in PAGES]
    state, pages = run_and_pages(backend, {name: x.copy() for name, x in given.items()})
    for mine, old, token in zip(pages, before, (given["k"], given["v"])):
        for b, place in enumerate([(2, 30), (1, 0), (6, 6)]):
            old[place] = token[b, 0]
        assert_same_bits(mine, old)
    rest = without_new(given, pages, given["q"])
    expected = reference.decode(**rest)
    assert_state(state, expected, decode_bounds(rest, expected, "float16"), dtype="float16")


# Laws


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("rotary", ["", "halves 3 wide", "interleaved 7 narrow"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_call_has_the_bits_of_rotating_appending_and_attending(backend, dtype, rotary, float8):
    case = replace(NEW, head_dims=(64, 64), dtype=dtype, rotary=rotary, float8=float8, seed=3)
    state, pages = run_and_pages(backend, case.arrays())
    given = case.arrays()
    q, by_hand, tables = backend.array(given["q"]), moved(backend, given), {}
    if rotary:
        at = given["cache_seqlens"][:, None] + np.arange(max(case.new, case.seqlen_q))
        tables = {"interleaved": given["rotary_interleaved"]}
        cos, sin = by_hand["rotary_cos"], by_hand["rotary_sin"]
        q = apply_rotary(q, cos, sin, backend.array(at[:, : case.seqlen_q]), **tables)
        tables = {"rotary_cos": cos, "rotary_sin": sin, "positions": backend.array(at[:, : case.new].ravel())}
        tables["rotary_interleaved"] = given["rotary_interleaved"]
    new = [backend.array(given[name].reshape(-1, *given[name].shape[2:])) for name in "kv"]
    scales = {name: by_hand[name] for name in ("k_scale", "v_scale") if float8}
    append_kv(*new, *(by_hand[n] for n in PAGES), backend.array(slots_of(given).ravel()), **scales, **tables)
    for name, mine in zip(PAGES, pages):
        assert_same_bits(mine, host(backend, by_hand[name]), name=name)
    if backend.name == "numpy" and rotary:
        return  # the reference does not round what it rotates
    lengths = backend.array(given["cache_seqlens"] + np.int32(case.new))
    rest = without_new(by_hand | {"cache_seqlens": given["cache_seqlens"]}, [by_hand[n] for n in PAGES], q)
    again = decode(**rest | {"cache_seqlens": lengths}, return_state=True)
    assert_same_bits(again.out, state.out)
    assert_same_bits(again.lse, state.lse)


def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(backend):
    whole, pages = run_and_pages(backend, NEW.arrays())
    for b, length in enumerate(NEW.lengths):
        for width in (None, -(-(length + NEW.new) // NEW.page_size)):  # no wider than needed
            given = alone(NEW.arrays(), b)
            state, written = run_and_pages(backend, {**given, "block_table": given["block_table"][:, :width]})
            assert_same_bits(state.out[0], whole.out[b])
            assert_same_bits(state.lse[0], whole.lse[b])
            at = np.divmod(slots_of(given), NEW.page_size)
            for one, all_ in zip(written, pages):
                assert_same_bits(one[at], all_[at])


def test_cache_batch_idx_chooses_the_cache_and_nothing_else(backend):
    whole, pages = run_and_pages(backend, NEW.arrays())
    given, order = NEW.arrays(), np.array([2, 4, 0, 1])
    elsewhere = np.full((5, given["block_table"].shape[1]), -1, np.int32)
    elsewhere[order] = given["block_table"]
    state, moved_pages = run_and_pages(backend, {**given, "block_table": elsewhere, "cache_batch_idx": order})
    for a, b in zip((*state, *moved_pages), (*whole, *pages)):
        assert_same_bits(a, b)


def test_padding_on_the_left_counts_for_the_rotation(backend):
    """Queries and keys stand where they lie, and what is in the padding is not looked at."""
    given, pads = NEW.arrays(), np.array([290, 0, 37, 100], np.int64)
    whole, pages = run_and_pages(backend, given | {"cache_leftpad": pads})
    given = NEW.arrays() | {"cache_leftpad": pads}
    q, error = turned(given, True)
    rest = without_new(given, pages, q)
    expected = reference.decode(**rest)
    assert_state(whole, expected, decode_bounds(rest, expected, "float16", error), dtype="float16")
    assert_same_bits(pages[0], run_and_pages(backend, NEW.arrays())[1][0])


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("head_major", [False, True])
def test_pages_interleaved_in_one_buffer(backend, head_major, float8):
    """FlashInfer's layouts; K and V are views that lie across each other without an element in common."""
    case = replace(NEW, head_dims=(64, 64), float8=float8)
    expected, pages = run_and_pages(backend, case.arrays())
    given = case.arrays()
    both = np.stack([given[name] for name in PAGES], 1)
    if head_major:
        both = np.ascontiguousarray(both.swapaxes(2, 3)).swapaxes(2, 3)
    buffer, there = backend.array(both), moved(backend, {n: x for n, x in given.items() if n not in PAGES})
    state = decode(**there, k_pages=buffer[:, 0], v_pages=buffer[:, 1], return_state=True)
    for a, b in zip((*state, *(host(backend, buffer[:, n]) for n in (0, 1))), (*expected, *pages)):
        assert_same_bits(a, b)


@pytest.mark.parametrize("rotary", ["", "halves 3 wide"])
def test_every_bit_of_a_value_survives(backend, rotary):
    """Signs of zeros, payloads of NaN, infinities: without a rotation and a scale, storing is copying."""
    case = DecodeCase((4,), 1, (1, 1), (8, 8), new=1, rotary=rotary)
    given = case.arrays()
    odd = np.array([0x8000, 0x7E01, 0xFC00, 0x0001], np.uint16).view(np.float16)
    given["v"][0, 0, 0, :4] = odd
    if not rotary:
        given["k"][0, 0, 0, 4:] = odd
    k, v = given["k"].copy(), given["v"].copy()
    page = given["block_table"][0, 0]
    _, pages = run_and_pages(backend, given)
    assert_same_bits(pages[1][page, 4], v[0, 0])
    if not rotary:
        assert_same_bits(pages[0][page, 4], k[0, 0])


@pytest.mark.parametrize("heads", [(6, 2), (0, 2)])
@pytest.mark.parametrize("length", [20, 700])
def test_without_queries_tokens_are_written_all_the_same(backend, length, heads):
    case = DecodeCase((length, 3), 0 if heads[0] else 1, heads, (16, 8), new=3, rotary="interleaved 7 wide")
    state, pages = run_and_pages(backend, case.arrays())
    assert state.out.shape == (2, case.seqlen_q, heads[0], 8)
    _, expected = run_and_pages(backend, replace(case, seqlen_q=1, heads=(2, 2)).arrays() | {"q": np.ones((2, 1, 2, 16), np.float16)})
    for mine, want in zip(pages, expected):
        assert_same_bits(mine, want)


def test_nothing_else_is_written(backend):
    given = NEW.arrays()
    guards = []
    for name in PAGES:
        guard, pages = backend.guarded(given[name].shape, given[name].dtype, "odd offset")
        pages[...] = backend.array(np.ascontiguousarray(given[name]))
        guards.append((guard, pages))
    others = {name: backend.array(x.copy()) if isinstance(x, np.ndarray) else x for name, x in given.items() if name not in PAGES}
    decode(**others, k_pages=guards[0][1], v_pages=guards[1][1])
    for guard, pages in guards:
        check_guard(guard, pages)
    for name, x in others.items():
        if isinstance(given[name], np.ndarray):
            assert_same_bits(x, given[name], name=name)


def test_a_plan_serves_other_lengths_and_twenty_runs_are_equal(kernels):
    plan = plan_decode(**moved(kernels, NEW.arrays()))
    for lengths in ((254, 37, 0, 300), (300, 0, 37, 254)):
        given = replace(NEW, lengths=lengths).arrays()
        tables = NEW.arrays()
        given |= {name: tables[name] for name in ("rotary_cos", "rotary_sin")}
        first, pages = run_and_pages(kernels, given, plan=plan)
        for _ in range(3 if kernels.name != "gpu" else 20):
            again = replace(NEW, lengths=lengths).arrays() | {name: tables[name] for name in ("rotary_cos", "rotary_sin")}
            state, written = run_and_pages(kernels, again)
            for a, b in zip((*state, *written), (*first, *pages)):
                assert_same_bits(a, b)
