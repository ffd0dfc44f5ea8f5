"""What the operations on pages refuse, what they launch, and that what they can't refuse is harmless; swapping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16, float8_e4m3fn

import cuattn
from cuattn import _launch, _plan_paged
from cuattn.paged import append_kv, copy_pages, gather_kv, swap_pages
from cuattn.testing import assert_same_bits, check_guard
from cuattn.testing.profiles import as_dtype
from tests.backends import moved
from tests.paged_cases import DTYPES, PagedCase, cases, full, guarded_pages, host
from tests.test_compile import KERNELS
from tests.test_plan import Planner

f16, f32, f8 = np.float16, np.float32, float8_e4m3fn


def zeros(*shape, dtype=f16):
    return np.zeros(shape, dtype)


def arguments(backend, function, **changed) -> dict:
    """Valid arguments in the place of the backend, some of them changed."""
    pages = {"k_pages": zeros(4, 5, 2, 8), "v_pages": zeros(4, 5, 2, 16)}
    valid = {
        append_kv: {"k": zeros(3, 2, 8), "v": zeros(3, 2, 16), **pages, "slot_mapping": np.arange(3)},
        gather_kv: {**pages, "slot_mapping": np.arange(3)},
        copy_pages: {**pages, "source": np.array([0, 1]), "target": np.array([2, 3])},
        swap_pages: {**pages, "host_k": zeros(2, 5, 2, 8), "host_v": zeros(2, 5, 2, 16), "device_pages": [1], "host_pages": [0], "to_host": True},
    }[function]
    stays = ("host_k", "host_v")
    return {k: v if k in stays else backend.array(v) if isinstance(v, np.ndarray) else v for k, v in {**valid, **changed}.items()}


def rotary(cos=None, sin=None, positions=None) -> dict:
    cos = zeros(9, 4, dtype=f32) if cos is None else cos
    positions = np.arange(3) if positions is None else positions
    return {"rotary_cos": cos, "rotary_sin": cos if sin is None else sin, "positions": positions}


QUANTISED = {"k_pages": zeros(4, 5, 2, 8, dtype=f8), "v_pages": zeros(4, 5, 2, 16, dtype=f8)}
APPEND = [  # changed arguments, error, text
    ({"k": None}, TypeError, "append_kv: k must be an array; got None"),
    ({"slot_mapping": [1, 2, 3]}, TypeError, "slot_mapping must be a NumPy array or an array on a CUDA device; got list"),
    ({"k": zeros(3, 2, 8, dtype=np.float64)}, TypeError, "append_kv: k must be float16, bfloat16 or float32; got float64"),
    ({"k": zeros(3, 2, 8, dtype=f8)}, TypeError, "k must be float16, bfloat16 or float32; got float8_e4m3fn"),
    ({"v": zeros(3, 2, 16, dtype=f32)}, TypeError, "append_kv: v must be float16; got float32"),
    ({"k_pages": zeros(4, 5, 2, 8, dtype=bfloat16), "v_pages": zeros(4, 5, 2, 16, dtype=bfloat16)}, TypeError, "k_pages must be float16 or float8_e4m3fn; got bfloat16"),
    ({"v_pages": zeros(4, 5, 2, 16, dtype=f8)}, TypeError, "v_pages must be float16; got float8_e4m3fn"),
    ({"k_pages": zeros(4, 5, 8)}, ValueError, r"k_pages must have the axes \(num_pages, page_size, num_kv_heads, head_dim\); got shape \(4, 5, 8\)"),
    ({"k": zeros(3, 2, 12)}, ValueError, r"k.shape must equal that of slot_mapping and k_pages \(3, 2, 8\); got \(3, 2, 12\)"),
    ({"v": zeros(3, 1, 16)}, ValueError, r"v.shape must equal that of slot_mapping and v_pages \(3, 2, 16\)"),
    ({"slot_mapping": np.arange(4)}, ValueError, r"k.shape must equal .* \(4, 2, 8\); got \(3, 2, 8\)"),
    ({"v_pages": zeros(4, 6, 2, 16)}, ValueError, r"v_pages.shape\[:3\] must equal k_pages.shape\[:3\] \(4, 5, 2\); got \(4, 6, 2\)"),
    ({"slot_mapping": np.arange(3.0)}, TypeError, "slot_mapping must be int32 or int64; got float64"),
    ({"slot_mapping": np.zeros((3, 1), int)}, ValueError, r"slot_mapping must have the axes \(num_tokens\)"),
    ({"k_pages": zeros(4, 5, 2, 16)[..., ::2]}, ValueError, "k_pages must be contiguous along its last axis"),
    ({"k": zeros(3, 8, 2).swapaxes(1, 2)}, ValueError, "k must be contiguous along its last axis"),
    ({"k_pages": zeros(4, 0, 2, 8), "v_pages": zeros(4, 0, 2, 16)}, ValueError, r"k_pages.shape\[1\] \(page_size\) must be at least 1; got 0"),
    ({"k_pages": zeros(4, 5, 2, 513), "k": zeros(3, 2, 513)}, ValueError, r"k_pages.shape\[-1\] \(head_dim\) must be 1 to 512; got 513"),
    ({"k_pages": np.broadcast_to(zeros(5, 2, 8), (4, 5, 2, 8))}, ValueError, "k_pages must not overlap itself"),
    ({"k_scale": 2.0}, ValueError, "k_scale and v_scale need float8_e4m3fn pages; got float16"),
    ({**QUANTISED, "k_scale": 0.0}, ValueError, "k_scale must be above 0 and finite in float32; got 0.0"),
    ({**QUANTISED, "v_scale": float("nan")}, ValueError, "v_scale must be above 0 and finite in float32; got nan"),
    ({**QUANTISED, "v_scale": 1e300}, ValueError, r"v_scale must be above 0 and finite in float32; got 1e\+300"),
    ({**QUANTISED, "k_scale": zeros(2, dtype=f32)}, ValueError, "k_scale must be above 0 and finite; got"),
    ({**QUANTISED, "k_scale": zeros(2)}, TypeError, "k_scale must be float32; got float16"),
    ({**QUANTISED, "k_scale": zeros(3, dtype=f32)}, ValueError, r"k_scale.shape must be \(\), \(1,\) or \(num_kv_heads,\) \(2,\); got \(3,\)"),
    ({**rotary(), "positions": None}, TypeError, "rotary_cos, rotary_sin, positions must be given together; got no positions"),
    (rotary(cos=zeros(9, 4, dtype=bfloat16)), TypeError, "rotary_cos must be float16 or float32; got bfloat16"),
    (rotary(sin=zeros(9, 4)), TypeError, "rotary_sin must be float32; got float16"),
    (rotary(sin=zeros(8, 4, dtype=f32)), ValueError, r"rotary_sin.shape must equal rotary_cos.shape \(9, 4\)"),
    (rotary(cos=zeros(9, 5, dtype=f32)), ValueError, r"rotary_cos.shape\[1\] \(rotary_dim / 2\) must be 1 to head_dim / 2 \(4\); got 5"),
    (rotary(positions=np.arange(4)), ValueError, r"positions.shape must equal \(num_tokens,\) \(3,\); got \(4,\)"),
    (rotary(positions=np.array([0, 1, 9])), ValueError, r"positions\[2\] must be 0 or more and below rotary_cos.shape\[0\] \(9\); got 9"),
    ({"slot_mapping": np.array([0, 20, 1])}, ValueError, r"slot_mapping\[1\] must be below num_pages \* page_size \(20\); got 20"),
    ({"slot_mapping": np.array([4, -1, 4])}, ValueError, "slot_mapping must name each at most once; got 4 2 times"),
]  # fmt: skip
GATHER = [
    ({"dtype": f32}, TypeError, "gather_kv: dtype must be float16; got float32"),
    ({**QUANTISED, "dtype": np.int8}, TypeError, "dtype must be float16, bfloat16, float32 or float8_e4m3fn; got int8"),
    ({"dtype": "no dtype"}, TypeError, "gather_kv: dtype must name a dtype; got 'no dtype'"),
    ({**QUANTISED, "k_scale": 2.0}, ValueError, "need float8_e4m3fn pages gathered as .* got float8_e4m3fn as float8_e4m3fn"),
    ({"v_scale": 2.0}, ValueError, "need float8_e4m3fn pages gathered as .* got float16 as float16"),
    ({"k": zeros(3, 2, 9)}, ValueError, r"k.shape must equal .* \(3, 2, 8\); got \(3, 2, 9\)"),
    ({"v": zeros(3, 2, 16, dtype=f32)}, TypeError, "dtype must be float16; got float32"),
    ({**QUANTISED, "k": zeros(3, 2, 8), "v": zeros(3, 2, 16, dtype=f32)}, TypeError, "gather_kv: v must be float16; got float32"),
    ({"k": np.broadcast_to(zeros(8), (3, 2, 8))}, ValueError, "k must not overlap itself"),
    ({"slot_mapping": np.array([0, 1, 20])}, ValueError, r"slot_mapping\[2\] must be below num_pages \* page_size \(20\); got 20"),
]
COPY = [
    ({"source": np.array([0, 1, 2])}, ValueError, r"target.shape must equal source.shape \(3,\); got \(2,\)"),
    ({"target": np.float32([2, 3])}, TypeError, "target must be int32 or int64; got float32"),
    ({"source": np.array([4, -1])}, ValueError, r"source\[0\] must be below num_pages \(4\); got 4"),
    ({"target": np.array([-1, 7])}, ValueError, r"target\[1\] must be below num_pages \(4\); got 7"),
    ({"target": np.array([2, 2])}, ValueError, "target must name each at most once; got 2 2 times"),
    ({"target": np.array([1, 2])}, ValueError, r"target\[0\] must be no source of another pair within one cache; got 1"),
    ({"target_k_pages": zeros(2, 5, 2, 8)}, TypeError, "target_k_pages and target_v_pages must be given together"),
    ({"target_k_pages": zeros(9, 4, 2, 8), "target_v_pages": zeros(9, 4, 2, 16)}, ValueError, r"target_k_pages.shape\[1:\] must equal k_pages.shape\[1:\] \(5, 2, 8\)"),
    ({"target_k_pages": zeros(9, 5, 2, 8, dtype=f32), "target_v_pages": zeros(9, 5, 2, 16, dtype=f32)}, TypeError, "target_k_pages must be float16; got float32"),
]  # fmt: skip
SWAP = [
    ({"host_k": None}, TypeError, "swap_pages: host_k must be a NumPy array; got NoneType"),
    ({"host_v": zeros(2, 5, 2, 8)}, ValueError, r"host_v.shape\[1:\] must equal v_pages.shape\[1:\] \(5, 2, 16\); got \(5, 2, 8\)"),
    ({"host_k": zeros(2, 5, 2, 8, dtype=f32), "host_v": zeros(2, 5, 2, 16, dtype=f32)}, TypeError, "host_k must be float16; got float32"),
    ({"host_k": zeros(2, 2, 5, 8).swapaxes(1, 2)}, ValueError, r"host_k.strides\[1:\] must equal k_pages.strides\[1:\]"),
    ({"k_pages": zeros(4, 5, 2, 16)[..., :8], "host_k": zeros(2, 5, 2, 16)[..., :8]}, ValueError, "a page of k_pages must be 160 contiguous bytes"),
    ({"device_pages": [4]}, ValueError, r"device_pages\[0\] must be below the number of pages \(4\); got 4"),
    ({"host_pages": [2]}, ValueError, r"host_pages\[0\] must be below the number of pages \(2\); got 2"),
    ({"device_pages": [1, 2]}, ValueError, r"host_pages must have as many ids as device_pages \(2\); got 1"),
    ({"device_pages": [1, 2], "host_pages": [1, 1]}, ValueError, "host_pages must name each at most once; got 1 2 times"),
    ({"device_pages": [1.5]}, TypeError, r"device_pages must be a sequence of integers on the host; got \[1.5\]"),
]
ALL = [(f, *row) for f, rows in ((append_kv, APPEND), (gather_kv, GATHER), (copy_pages, COPY), (swap_pages, SWAP)) for row in rows]


@pytest.mark.parametrize(("function", "changed", "error", "text"), ALL, ids=[f"{r[0].__name__}-{r[3][:50]}" for r in ALL])
def test_refuses(backend, function, changed, error, text):
    given = arguments(backend, function, **changed)
    before = {k: host(backend, v).copy() for k, v in given.items() if hasattr(v, "shape") and not isinstance(v, type)}
    with pytest.raises(error, match=text):
        function(**given)
    for name, copy in before.items():
        assert_same_bits(host(backend, given[name]), copy, name=name)


def test_overlaps_are_refused(backend):
    pages = backend.array(zeros(9, 5, 2, 16))
    valid = arguments(backend, append_kv)
    with pytest.raises(ValueError, match="append_kv: k_pages must be apart from v_pages; got arrays that overlap"):
        append_kv(**{**valid, "k_pages": pages[..., :8], "v_pages": pages})
    with pytest.raises(ValueError, match="append_kv: v_pages must be apart from v"):
        append_kv(**{**valid, "v_pages": pages[:4], "v": pages[3, :3]})
    with pytest.raises(ValueError, match="gather_kv: v must be apart from v_pages"):
        gather_kv(valid["k_pages"], pages[:4], valid["slot_mapping"], v=pages[3, :3])
    ids = backend.array(np.array([0])), backend.array(np.array([1]))
    with pytest.raises(ValueError, match="copy_pages: target_v_pages must be exactly v_pages or apart from it"):
        copy_pages(valid["k_pages"], pages[:4], *ids, target_k_pages=backend.array(zeros(4, 5, 2, 8)), target_v_pages=pages[1:5])
    copy_pages(valid["k_pages"], pages[:4], *ids, target_k_pages=valid["k_pages"], target_v_pages=pages[:4])


def test_read_only_pages_are_refused(backend):
    if backend.xp is not np:
        return  # CuPy arrays are always writeable
    pages = zeros(4, 5, 2, 8)
    pages.flags.writeable = False
    with pytest.raises(ValueError, match="append_kv: k_pages must be writeable; got a read-only array"):
        append_kv(**arguments(backend, append_kv, k_pages=pages))


def test_nothing_to_do(backend):
    case = PagedCase(num_tokens=0)
    pages, none = [backend.array(x) for x in case.pages()], backend.array(np.zeros(0, np.int32))
    append_kv(*map(backend.array, case.tokens()), *pages, none)
    copy_pages(*pages, none, none)
    assert [x.shape for x in gather_kv(*pages, none)] == [(0, 2, 8)] * 2
    empty = [backend.array(np.zeros((0, 5, 2, 8), np.float16))] * 2  # no pages: every slot is wrong or negative
    assert not any(backend.host(x).any() for x in gather_kv(*empty, backend.array(np.int32([-1, -5]))))


# Plans


def launches(case: PagedCase, rotary: bool = False, raw: bool = False) -> list[tuple]:
    """What an append, a gather and a copy launch: kernel, grid, block, shared bytes."""
    planner, pages, slots = Planner(132), case.pages(), case.slots()
    half = case.widths[0] // 2
    turn = {"rotary_cos": zeros(9, half, dtype=f32), "rotary_sin": zeros(9, half, dtype=f32), "positions": zeros(case.num_tokens, dtype=np.int32)}
    with _launch.emulated(planner), cuattn.checking("arguments"):
        append_kv(*case.tokens(), *pages, slots, **(turn if rotary else {}))
        gather_kv(*pages, slots, **({"dtype": as_dtype(case.dtype)} if case.float8 and not raw else {}))
        copy_pages(*pages, slots[:1] * 0, slots[:1] * 0 + 1)
    return planner.launches


@given(case=cases(), rotary=st.booleans(), raw=st.booleans())
def test_plans_choose_compiled_kernels(case, rotary, raw):
    case = replace(case, num_tokens=case.num_tokens + 1, widths=(max(case.widths[0], 2), case.widths[1]))
    found = launches(case, rotary, raw)
    assert [launch[0].entry for launch in found] == ["cuattn_append_kv", "cuattn_gather_kv", "cuattn_copy_pages"]
    for kernel, grid, block, shared in found:
        assert kernel in KERNELS
        columns, tokens, _ = block
        moved_at_once = case.page_size if kernel.entry == "cuattn_copy_pages" else case.num_tokens
        assert columns * tokens <= 128 and shared == 0
        assert grid[0] * tokens >= moved_at_once > (grid[0] - 1) * tokens  # every token, no empty block
        define = dict(kernel.defines)
        item = case.stored if kernel.entry == "cuattn_copy_pages" or (raw and kernel.entry != "cuattn_append_kv") else as_dtype(case.dtype)
        each = {"uint4": 16, "uint1": 4, "ushort1": 2, "uchar1": 1}.get(define["T"], define["VEC"] * item.itemsize)
        vectors = case.heads * max(case.widths) * item.itemsize // each
        assert grid[1] * columns >= vectors > (grid[1] - 1) * columns  # and every vector


def test_compiled_kernels_are_chosen():
    """Nothing is compiled and measured that no call can reach."""
    found = set()
    for dtype in DTYPES:
        for widths in ((64, 64), (10, 10), (12, 12), (5, 5)):
            for float8, rotary, raw in ((False, False, False), (False, True, False), (True, False, False), (True, False, True)):
                found |= {launch[0] for launch in launches(PagedCase(dtype, float8, widths=widths), rotary, raw)}
    assert found == set(_plan_paged.kernels())


# What the host can't see


WRONG = [-(2**63), -(2**32), -1, 10, 11, 2**31 - 1, 2**31, 2**32 + 3, 2**60, 2**63 - 1]


@pytest.mark.parametrize("float8", [False, True])
def test_wrong_slots_touch_nothing_and_read_zeros(kernels, float8):
    """No id may alias another page: FlashInfer's append writes a random page for the padding of its own helper."""
    case = PagedCase("float16", float8, 2, 5, 2, (8, 24), len(WRONG), "row slice")
    guards, tokens, slots = guarded_pages(kernels, case), case.tokens(), kernels.array(np.array(WRONG, np.int64))
    with cuattn.checking("arguments"):
        append_kv(*map(kernels.array, tokens), *(view for _, view in guards), slots)
        copy_pages(*(view for _, view in guards), slots, kernels.array(np.zeros(len(WRONG), np.int32)))
        copy_pages(*(view for _, view in guards), kernels.array(np.zeros(len(WRONG), np.int32)), slots)
        read = gather_kv(*(kernels.array(x) for x in case.pages()), slots, **({"dtype": np.float32, "k_scale": 2.0} if float8 else {}))
    for (guard, view), untouched in zip(guards, full(case)):
        check_guard(guard, view)
        assert_same_bits(host(kernels, view), untouched)
    assert not any(host(kernels, x).any() for x in read)
    with pytest.raises(ValueError, match=r"append_kv: slot_mapping\[3\] must be below num_pages \* page_size \(10\); got 10"):
        append_kv(*map(kernels.array, tokens), *(view for _, view in guards), slots)


def test_a_token_without_a_position_is_skipped(kernels):
    case = PagedCase("float16", False, 2, 5, 2, (8, 8), len(WRONG))
    tables = {"rotary_cos": np.ones((10, 4), np.float32), "rotary_sin": np.zeros((10, 4), np.float32), "positions": np.array(WRONG)}
    pages = case.pages()
    mine = [kernels.array(x.copy()) for x in pages]
    with cuattn.checking("arguments"):
        append_kv(*map(kernels.array, case.tokens()), *mine, kernels.array(np.arange(10)), **moved(kernels, tables))
    for got, want in zip(mine, pages):
        assert_same_bits(host(kernels, got), want)
    with pytest.raises(ValueError, match=r"append_kv: positions\[0\] must be 0 or more and below rotary_cos.shape\[0\] \(10\)"):
        append_kv(*map(kernels.array, case.tokens()), *mine, kernels.array(np.arange(10)), **moved(kernels, tables))


# Swapping


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", np.dtype(f8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_swap_moves_pages_and_only_those(backend, interleaved, dtype, to_host):
    """Reported of others: a swap into a temporary that an index had made, so nothing moved."""
    rng = np.random.default_rng(0)
    ours, theirs = (rng.standard_normal((n, 2, 4, 3, 8)).astype(np.float32).astype(as_dtype(dtype)) for n in (7, 5))
    views = [x[:, n] if interleaved else np.ascontiguousarray(x[:, n]) for x in (ours, theirs) for n in (0, 1)]
    expected = [x.copy() for x in views]
    pairs = [(5, 0), (6, 1), (2, 2), (-1, 3), (0, 4)]
    for a, b in pairs:
        if a >= 0:
            for n in (0, 1):
                if to_host:
                    expected[2 + n][b] = expected[n][a]
                else:
                    expected[n][a] = expected[2 + n][b]
    device = [backend.array(x) for x in views[:2]]
    swap_pages(*device, *views[2:], *zip(*pairs), to_host=to_host)
    if backend.xp is not np:
        backend.xp.cuda.get_current_stream().synchronize()
    for got, want in zip([*(host(backend, x) for x in device), *views[2:]], expected):
        assert_same_bits(got, want)
