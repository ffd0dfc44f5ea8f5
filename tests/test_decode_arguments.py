"""What decode refuses: the named error, before anything is launched or changed; what it takes without harm; its plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

import cuattn
from cuattn import _launch, _plan_decode, _plan_decode_mma, reference
from cuattn.decode import decode, decode_workspace_size, plan_decode
from cuattn.testing import assert_same_bits, assert_state
from tests.backends import moved
from tests.decode_cases import DecodeCase, absent_keys_left_out, decode_bounds
from tests.engine import EmulatorEngine
from tests.test_compile import DTYPES, types_of

f16, f32, i32, i64 = np.float16, np.float32, np.int32, np.int64
CASE = DecodeCase((5, 40), 2, (4, 2), (16, 8), 16)
FULL = DecodeCase((16, 48), 2, (4, 2), (16, 8), 16)  # whole pages, five columns


def zeros(*shape, dtype=f16):
    return np.zeros(shape, dtype)


def aligned(n):
    """Float32 that begin at a multiple of 16 bytes."""
    memory = zeros(n + 4, dtype=f32)
    return memory[-memory.ctypes.data // 4 % 4 :][:n]


WIDE = np.ndarray((2, 2**27), i32, zeros(2, 1, dtype=i32), strides=(4, 0))
PAGES = (6, 16, 2)
MANY = np.broadcast_to(zeros(16), (2, 2**22, 2, 16))
REFUSED = [  # changed arguments, error, text
    ({"q": None}, TypeError, "decode: q must be an array; got None"),
    ({"block_table": [[1]]}, TypeError, "decode: block_table must be a NumPy array or an array on a CUDA device; got list"),
    ({"sinks": 3.0}, TypeError, "decode: sinks must be .* got float"),
    ({"q": zeros(2, 2, 4, 16, dtype=np.float64)}, TypeError, "decode: q must be float16, bfloat16 or float32; got float64"),
    ({"k_pages": zeros(*PAGES, 16, dtype=f32)}, TypeError, "decode: k_pages must be float16 or float8_e4m3fn; got float32"),
    ({"v_pages": zeros(*PAGES, 8, dtype=float8_e4m3fn)}, TypeError, "decode: v_pages must be float16; got float8_e4m3fn"),
    ({"block_table": zeros(2, 3)}, TypeError, "decode: block_table must be int32 or int64; got float16"),
    ({"cache_seqlens": zeros(2, dtype=np.uint32)}, TypeError, "decode: cache_seqlens must be int32 or int64; got uint32"),
    ({"cache_batch_idx": zeros(2, dtype=np.int8)}, TypeError, "decode: cache_batch_idx must be int32 or int64; got int8"),
    ({"cache_leftpad": zeros(2, dtype=f32)}, TypeError, "decode: cache_leftpad must be int32 or int64; got float32"),
    ({"q": zeros(2, 4, 16)}, ValueError, r"decode: q must have the axes \(batch, seqlen_q, num_heads, head_dim\); got shape \(2, 4, 16\)"),
    ({"k_pages": zeros(7, 16, 16)}, ValueError, r"decode: k_pages must have the axes \(num_pages, page_size, num_kv_heads, head_dim\)"),
    ({"k_pages": zeros(*PAGES, 12)}, ValueError, r"decode: k_pages.shape\[3\] must equal head_dim of q \(16\); got 12"),
    ({"v_pages": zeros(6, 8, 2, 8)}, ValueError, r"decode: v_pages.shape\[:3\] must equal k_pages.shape\[:3\] \(6, 16, 2\); got \(6, 8, 2\)"),
    ({"v_pages": zeros(*PAGES, 513)}, ValueError, r"decode: v_pages.shape\[-1\] \(head_dim\) must be 1 to 512; got 513"),
    ({"k_pages": zeros(7, 0, 2, 16), "v_pages": zeros(7, 0, 2, 8)}, ValueError, r"decode: k_pages.shape\[1\] \(page_size\) must be at least 1; got 0"),
    ({"k_pages": zeros(7, 16, 0, 16), "v_pages": zeros(7, 16, 0, 8)}, ValueError, r"decode: k_pages.shape\[2\] \(num_kv_heads\) must be at least 1; got 0"),
    ({"q": zeros(2, 2, 5, 16)}, ValueError, r"decode: q.shape\[2\] \(num_heads\) must be a multiple of num_kv_heads of k_pages \(2\); got 5"),
    ({"q": zeros(2, 2, 4, 32)[..., ::2]}, ValueError, "decode: q must be contiguous along its last axis"),
    ({"k_pages": zeros(7, 16, 16, 2).swapaxes(2, 3)}, ValueError, "decode: k_pages must be contiguous along its last axis"),
    ({"q": np.broadcast_to(zeros(16), (2, 2**16, 4, 16))}, ValueError, r"decode: seqlen_q \* num_heads must be less than 131072; got 262144"),
    ({"block_table": zeros(3, 3, dtype=i32)}, ValueError, r"decode: block_table.shape\[0\] must equal batch of q \(2\); got 3"),
    ({"block_table": zeros(2, dtype=i32)}, ValueError, r"decode: block_table must have the axes \(num_sequences, max_pages_per_seq\)"),
    ({"block_table": WIDE}, ValueError, r"decode: block_table.shape\[1\] \* page_size must be at most 2147418112; got 2147483648"),
    ({"cache_seqlens": zeros(3, dtype=i32)}, ValueError, r"decode: cache_seqlens.shape must equal q.shape\[:1\] \(2,\); got \(3,\)"),
    ({"cache_batch_idx": zeros(3, dtype=i32)}, ValueError, r"decode: cache_batch_idx.shape must equal q.shape\[:1\] \(2,\); got \(3,\)"),
    ({"cache_leftpad": zeros(1, dtype=i32)}, ValueError, r"decode: cache_leftpad.shape must equal q.shape\[:1\] \(2,\); got \(1,\)"),
    ({"alibi_slopes": zeros(4)}, TypeError, "decode: alibi_slopes must be float32; got float16"),
    ({"alibi_slopes": zeros(2, dtype=f32)}, ValueError, r"decode: alibi_slopes.shape must be \(4,\) or \(2, 4\); got \(2,\)"),
    ({"sinks": zeros(2, 4, dtype=f32)}, ValueError, r"decode: sinks.shape must be \(4,\); got \(2, 4\)"),
    ({"k_scale": zeros(4, dtype=f32)}, ValueError, r"decode: k_scale.shape must be \(\), \(1,\) or \(num_kv_heads,\) \(2,\); got \(4,\)"),
    ({"v_scale": zeros(2)}, TypeError, "decode: v_scale must be float32; got float16"),
    ({"v_scale": 1e39}, ValueError, r"decode: v_scale must be above 0 and finite in float32; got 1e\+39"),
    ({"k_scale": 0}, ValueError, "decode: k_scale must be above 0 and finite in float32; got 0"),
    ({"k_scale": np.float32(-1)}, ValueError, "decode: k_scale must be above 0 and finite in float32; got -1.0"),
    ({"v_scale": np.array([1, 0], f32)}, ValueError, r"decode: v_scale must be above 0 and finite; got \[1. 0.\]"),
    ({"v_scale": 1j}, TypeError, "decode: v_scale must be a NumPy array or .* got complex"),
    ({"sm_scale": float("nan")}, ValueError, "decode: sm_scale must be finite in float32; got nan"),
    ({"sm_scale": 10**400}, ValueError, "decode: sm_scale must be finite in float32; got 1000"),
    ({"sm_scale": "1"}, TypeError, "decode: sm_scale must be a number; got str"),
    ({"softcap": -1.0}, ValueError, r"decode: softcap must be 0 \(off\) or above 0 in float32; got -1.0"),
    ({"window": (-2, 0)}, ValueError, r"decode: window must be \(left, right\), each -1 \(unbounded\) or more; got \(-2, 0\)"),
    ({"window": 5}, TypeError, r"decode: window must be two integers \(left, right\); got 5"),
    ({"window": (1.5, 0)}, TypeError, r"decode: window must be two integers \(left, right\); got \(1.5, 0\)"),
    ({"out": zeros(2, 2, 4, 16)}, ValueError, r"decode: out.shape must equal the result's shape \(2, 2, 4, 8\); got \(2, 2, 4, 16\)"),
    ({"out": zeros(2, 2, 4, 8, dtype=bfloat16)}, TypeError, "decode: out must be float16; got bfloat16"),
    ({"lse": zeros(2, 2, 4)}, TypeError, "decode: lse must be float32; got float16"),
    ({"lse": zeros(2, 4, 2, dtype=f32)}, ValueError, r"decode: lse.shape must equal the result's shape \(2, 2, 4\); got \(2, 4, 2\)"),
    ({"out": np.broadcast_to(zeros(8), (2, 2, 4, 8))}, ValueError, "decode: out must not overlap itself"),
]
NEW = replace(CASE, new=3, rotary="halves 3 wide")
ANGLES = zeros(43, 3, dtype=f32)
REFUSED_NEW = [  # the same of new tokens
    ({"v": None}, TypeError, "decode: k and v must be given together; got no v"),
    ({"k": None, "rotary_cos": None, "rotary_sin": None}, TypeError, "decode: k and v must be given together; got no k"),
    ({"rotary_sin": None}, TypeError, "decode: rotary_cos and rotary_sin must be given together; got no rotary_sin"),
    ({"k": None, "v": None}, TypeError, "decode: rotary_cos and rotary_sin need new k and v; got none"),
    ({"k": zeros(2, 3, 2, 16, dtype=f32)}, TypeError, "decode: k must be float16; got float32"),
    ({"v": zeros(2, 3, 2, 8, dtype=bfloat16)}, TypeError, "decode: v must be float16; got bfloat16"),
    ({"k": zeros(2, 2, 16)}, ValueError, r"decode: k must have the axes \(batch, seqlen_new, num_kv_heads, head_dim\); got shape \(2, 2, 16\)"),
    ({"k": zeros(1, 3, 2, 16)}, ValueError, r"decode: k.shape must equal that of q, k and k_pages \(2, 3, 2, 16\); got \(1, 3, 2, 16\)"),
    ({"v": zeros(2, 2, 2, 8)}, ValueError, r"decode: v.shape must equal that of q, k and v_pages \(2, 3, 2, 8\); got \(2, 2, 2, 8\)"),
    ({"v": zeros(2, 3, 2, 16)}, ValueError, r"decode: v.shape must equal that of q, k and v_pages \(2, 3, 2, 8\)"),
    ({"k": zeros(2, 3, 2, 32)[..., ::2]}, ValueError, "decode: k must be contiguous along its last axis"),
    ({"k": MANY, "v": MANY[..., :8]}, ValueError, r"decode: k.shape\[1\] \(seqlen_new\) must be less than 4194304; got 4194304"),
    ({"k_scale": 2.0}, ValueError, "decode: with new k and v, k_scale and v_scale need float8_e4m3fn pages; got float16"),
    ({"v_scale": zeros(2, dtype=f32) + 1}, ValueError, "decode: with new k and v, k_scale and v_scale need float8_e4m3fn pages; got float16"),
    ({"rotary_cos": ANGLES.astype(bfloat16)}, TypeError, "decode: rotary_cos must be float16 or float32; got bfloat16"),
    ({"rotary_sin": ANGLES.astype(f16)}, TypeError, "decode: rotary_sin must be float32; got float16"),
    ({"rotary_sin": ANGLES[:, :2]}, ValueError, r"decode: rotary_sin.shape must equal rotary_cos.shape \(43, 3\); got \(43, 2\)"),
    ({"rotary_cos": ANGLES[0]}, ValueError, r"decode: rotary_cos must have the axes \(max_positions, rotary_dim / 2\); got shape \(3,\)"),
    ({"rotary_cos": zeros(43, 9), "rotary_sin": zeros(43, 9)}, ValueError, r"decode: rotary_cos.shape\[1\] \(rotary_dim / 2\) must be 1 to head_dim / 2 \(8\); got 9"),
    ({"k_pages": np.broadcast_to(zeros(16), (6, 16, 2, 16))}, ValueError, "decode: k_pages must not overlap itself"),
]
VALUES = [  # metadata that is wrong, and what the check of values says
    ({"cache_seqlens": [81, 48]}, r"cache_seqlens\[0\] must be within 0 and max_pages_per_seq \* page_size \(80\); got 81"),
    ({"cache_seqlens": [16, 2**31 - 1]}, r"cache_seqlens\[1\] must be within 0 and .* got 2147483647"),
    ({"cache_seqlens": [-1, 48]}, r"cache_seqlens\[0\] must be within 0 and .* got -1"),
    ({"cache_batch_idx": [0, 2]}, r"cache_batch_idx\[1\] must be within 0 and num_sequences - 1 \(1\); got 2"),
    ({"cache_batch_idx": [-1, 1]}, r"cache_batch_idx\[0\] must be within 0 and .* got -1"),
    ({"cache_leftpad": [0, 49]}, r"cache_leftpad\[1\] must be within 0 and cache_seqlens \(48\); got 49"),
    ({"cache_leftpad": [-7, 0]}, r"cache_leftpad\[0\] must be within 0 and .* got -7"),
]


@pytest.mark.parametrize(("changed", "error", "text"), REFUSED + REFUSED_NEW, ids=[t[2][:70] for t in REFUSED + REFUSED_NEW])
def test_decode_refuses(backend, changed, error, text):
    case = NEW if any(changed is row[0] for row in REFUSED_NEW) else CASE
    given = moved(backend, {**case.arrays(), **changed})
    before = {k: backend.host(v).copy() for k, v in given.items() if hasattr(v, "nbytes") and v.nbytes < 1e6}
    with pytest.raises(error, match=text):
        decode(**given)
    for name, copy in before.items():
        assert_same_bits(backend.host(given[name]), copy, name=name)


@pytest.mark.parametrize(("changed", "text"), VALUES, ids=[t[1][:40] for t in VALUES])
@pytest.mark.parametrize("index", [i32, i64])
def test_wrong_metadata_is_refused_under_value_checks_and_harmless_without(backend, index, changed, text):
    given = FULL.arrays() | {name: np.array(x, index) for name, x in changed.items()}
    for name in ("block_table", "cache_seqlens"):  # before and behind them lie other sequences, which are not ours
        given[name] = np.concatenate([given[name][::-1], given[name], given[name]])[2:4]
    with pytest.raises(ValueError, match=text):
        decode(**moved(backend, given))
    if backend.name == "numpy":
        return  # on the host it is checked always
    with cuattn.checking("arguments"):
        state = decode(**moved(backend, given), return_state=True)
    right = FULL.arrays()
    if "cache_batch_idx" in changed:  # no such sequence: no keys
        expected = reference.decode(**right)
        for b in (b for b in range(2) if given["cache_batch_idx"][b] not in (0, 1)):
            expected[0][b], expected[1][b] = 0, -np.inf
    elif "cache_leftpad" in changed:
        expected = reference.decode(**right, cache_leftpad=np.clip(given["cache_leftpad"], 0, [16, 48]))
    else:  # cut: pages past what was filled don't exist
        expected = absent_keys_left_out({**right, "cache_seqlens": np.clip(given["cache_seqlens"], 0, 80)})
    assert_state(state, expected, decode_bounds(right, expected, "float16"), dtype="float16", case=changed)


WRONG = [(w, i) for i in (i32, i64) for w in (-1, -(2**31), 2**31 - 1, "num_pages")] + [(w, i64) for w in (2**32, 2**40 + 1, -(2**63))]


@pytest.mark.parametrize(("wrong", "index"), WRONG)
def test_wrong_page_ids_are_refused_under_value_checks_and_name_no_keys_without(backend, wrong, index):
    """Reported of others: a bad id read foreign memory (flash-attention #2709) or another page."""
    given = DecodeCase((40, 300, 20), 2, (4, 2), (64, 64), 16, index=np.dtype(index).name).arrays()
    wrong = len(given["k_pages"]) if wrong == "num_pages" else wrong
    given["block_table"][1, 3], given["block_table"][2] = wrong, wrong
    with pytest.raises(ValueError, match=rf"decode: block_table\[1, 3\] must be within 0 and num_pages - 1 \({len(given['k_pages']) - 1}\); got {wrong}"):
        decode(**moved(backend, given))
    if backend.name == "numpy":
        return
    with cuattn.checking("arguments"):
        state = decode(**moved(backend, given), return_state=True)
    expected = absent_keys_left_out(given)
    assert np.isneginf(expected[1][2]).all()
    assert_state(state, expected, decode_bounds(given, expected, "float16"), dtype="float16")


def test_results_across_inputs_are_refused(backend):
    given = moved(backend, DecodeCase((5, 40), 2, (4, 2), (16, 16), 16).arrays())
    with pytest.raises(ValueError, match="decode: out must be apart from q; got arrays that overlap"):
        decode(**given, out=given["q"])
    memory = backend.array(zeros(2 * 2 * 4, dtype=f32))
    with pytest.raises(ValueError, match="decode: lse must be apart from workspace"):
        decode(**given, lse=memory.reshape(2, 2, 4), workspace=memory)


def test_pages_are_results_where_tokens_are_written(backend):
    case = DecodeCase((5, 40), 2, (4, 2), (16, 16), 16, new=3)
    given = moved(backend, case.arrays())
    pages = given["k_pages"]
    del given["k_pages"], given["v_pages"]
    with pytest.raises(ValueError, match="decode: k_pages must be apart from v_pages; got arrays that overlap"):
        decode(**given, k_pages=pages, v_pages=pages)
    inside = {**given, "k": pages[:2, :3]}
    with pytest.raises(ValueError, match="decode: k_pages must be apart from k; got arrays that overlap"):
        decode(**inside, k_pages=pages, v_pages=backend.array(zeros(*pages.shape)))
    decode(**{name: x for name, x in given.items() if name not in "kv"}, k_pages=pages, v_pages=pages)  # read, they may be one
    if backend.xp is np:
        given = case.arrays()
        given["v_pages"].flags.writeable = False
        with pytest.raises(ValueError, match="decode: v_pages must be writeable; got a read-only array"):
            decode(**given)


def test_workspaces_and_plans_that_do_not_fit_are_refused(kernels):
    given = moved(kernels, DecodeCase((700,), 1, (4, 2), (64, 64)).arrays())
    plan = plan_decode(**given)
    need = plan.workspace_bytes // 4
    slots, _ = _plan_decode_mma.num_slots(teams(plan), 1, 704, 64, 16)
    assert need == 4 + 2 * slots * (4 * 8 + 1) * 4  # a header; float4 of outputs and weights
    assert 4 * need <= decode_workspace_size(1, 1, 4, 2, 64, 46 * 16)
    for space, error, text in (
        (zeros(need - 1, dtype=f32), ValueError, rf"decode: workspace.shape\[0\] must be at least {need} \(decode_workspace_size / 4\); got {need - 1}"),
        (zeros(need), TypeError, "decode: workspace must be float32; got float16"),
        (zeros(need, 1, dtype=f32), ValueError, r"decode: workspace must have the axes \(num_floats\)"),
        (zeros(2 * need, dtype=f32)[::2], ValueError, "decode: workspace must be contiguous; got a stride of 8 bytes"),
        (aligned(need + 4)[1:], ValueError, "decode: workspace must begin at a multiple of 16 bytes; got one of 4"),
    ):
        with pytest.raises(error, match=text):
            decode(**given, workspace=kernels.array(space))
    with pytest.raises(ValueError, match="decode: plan must be for a call like this one; got one with other window"):
        decode(**given, plan=plan, window=(3, 0))
    other = moved(kernels, DecodeCase((700, 3), 1, (4, 2), (64, 64)).arrays())
    with pytest.raises(ValueError, match="decode: plan must be for a call like this one; got one with other batch"):
        decode(**other, plan=plan)
    other = moved(kernels, DecodeCase((700,), 1, (4, 2), (64, 64), new=1).arrays())
    with pytest.raises(ValueError, match="decode: plan must be for a call like this one; got one with other new"):
        decode(**other, plan=plan)


def test_a_plan_is_for_one_kind_of_device(kernels):
    given = moved(kernels, DecodeCase((40,), 1, (4, 2), (64, 64)).arrays())
    plan = replace(plan_decode(**given), device=_launch.DeviceInfo((7, 5), 40))
    with pytest.raises(ValueError, match=r"decode: plan must be for a device like this one .* got one for DeviceInfo\(capability=\(7, 5\)"):
        decode(**given, plan=plan)


def test_sizes_that_no_int64_holds_and_no_heads():
    given = CASE.arrays()
    assert_same_bits(decode(**given, window=(2**70, 0)), decode(**given))
    assert decode_workspace_size(1, 1, 0, 0, 64, 700) == 0


def test_host_arrays_have_no_plan():
    with pytest.raises(ValueError, match="plan_decode: arrays must be on a device; got NumPy arrays, which need no plan"):
        plan_decode(**CASE.arrays())


# Plans


def teams(plan) -> int:
    """Work.teams of a plan for tensor cores."""
    work = np.frombuffer(plan.layout.tobytes(), np.int64)
    return int(work[-(15 + 4 * 3 + 4) :][2])


def planned(case: DecodeCase):
    control = {n: x for n, x in case.arrays().items() if n not in ("softcap", "sm_scale")}
    with _launch.emulated(EmulatorEngine()):
        return plan_decode(**control)


@pytest.mark.parametrize("kernel", [*_plan_decode.kernels(), *_plan_decode_mma.kernels()], ids=str)
def test_compiled_kernels_are_chosen(kernel, monkeypatch):
    """Nothing is compiled and measured that no call can reach."""
    tile, (first, second) = dict(kernel.defines), types_of(kernel)
    monkeypatch.setattr(_plan_decode_mma, "_WAVE", 10**6 if tile.get("SET") == 1 else 0)
    _plan_decode.plan_decode.cache_clear()
    dtype, heads = np.dtype(DTYPES[first]).name, (4, 2)
    if kernel.file in ("decode_mma.cu", "decode_merge_mma.cu"):
        widths, heads = (tile["DIM"], 16), (2 * tile["ROWS"], 2)
    elif tile["VEC"] == 1:
        widths = (5, 3)
    else:  # what tensor cores don't take
        widths = (512, 16) if tile["FEATURES"] == 16 else (128, 64) if dtype == "float32" else (72, 40)
    control = 0 if tile.get("PLAIN", True) else 2
    plan = planned(DecodeCase((700,), 1, heads, head_dims=widths, dtype=dtype, float8=first != second, control=control))
    assert kernel in (plan.split.kernel, plan.merge.kernel)


def test_plans_choose_compiled_kernels_and_cover_everything():
    compiled = {*_plan_decode.kernels(), *_plan_decode_mma.kernels()}
    for n, widths in enumerate([(1, 1), (8, 8), (40, 72), (256, 264), (512, 1), (100, 100), (48, 48)]):
        for layout in ("separate", "odd offset", "head major"):
            for dtype in ("float16", "float32"):
                case = DecodeCase((20, 0), n, (6, 2), widths, dtype=dtype, float8=n % 2 == 0, layout=layout)
                plan = planned(case)
                tile = dict(plan.split.kernel.defines)
                assert plan.merge is None and plan.workspace_bytes == 0 and plan.split.kernel in compiled
                assert plan.mma == (dtype == "float16" and widths == (48, 48) and layout != "odd offset")
                if plan.mma:
                    assert tile["DIM"] == 64 and plan.split.grid == (max(2 * n * 2 // 4, 1), 1, 1)
                    continue
                assert plan.lanes in (1, 2, 4, 8, 16, 32) and plan.lanes * tile["FEATURES"] >= max(widths)
                assert plan.split.grid[1] * (4 if tile["FEATURES"] == 8 else 2) >= 6 * n
                assert tile["VEC"] == 1 or layout != "odd offset"
