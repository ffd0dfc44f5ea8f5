"""What attention refuses: the named error, before anything is launched or changed; what it takes without harm; its plans."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

import cuattn
from cuattn import _plan_attention, attention, attention_varlen, plan_attention, plan_attention_varlen
from cuattn._launch import DeviceInfo
from cuattn.testing import assert_same_bits
from tests.attention_cases import AttentionCase, run
from tests.backends import moved
from tests.test_compile import DTYPES, types_of

f16, f32, i32 = np.float16, np.float32, np.int32
DENSE = AttentionCase(((3, 5),) * 2, "dense", (4, 2), (16, 8))
PACKED = AttentionCase(((3, 5), (2, 7)), "packed", (4, 2), (16, 8))
PAGES = AttentionCase(((3, 5), (2, 20)), "pages", (4, 2), (16, 8), used=True)


def zeros(*shape, dtype=f16):
    return np.zeros(shape, dtype)


REFUSED = [  # changed arguments of the dense case, error, text
    ({"q": None}, TypeError, "attention: q must be an array; got None"),
    ({"k": [1.0]}, TypeError, "attention: k must be a NumPy array or an array on a CUDA device; got list"),
    ({"q": zeros(2, 3, 4, 16, dtype=np.float64)}, TypeError, "attention: q must be float16, bfloat16 or float32; got float64"),
    ({"k": zeros(2, 5, 2, 16, dtype=f32)}, TypeError, "attention: k must be float16 or float8_e4m3fn; got float32"),
    ({"v": zeros(2, 5, 2, 8, dtype=float8_e4m3fn)}, TypeError, "attention: v must be float16; got float8_e4m3fn"),
    ({"q": zeros(3, 4, 16)}, ValueError, r"attention: q must have the axes \(batch, seqlen_q, num_heads, head_dim\); got shape \(3, 4, 16\)"),
    ({"k": zeros(3, 5, 2, 16)}, ValueError, r"attention: k.shape\[0\] must equal batch of q \(2\); got 3"),
    ({"k": zeros(2, 5, 2, 12)}, ValueError, r"attention: k.shape\[-1\] must equal head_dim of q \(16\); got 12"),
    ({"v": zeros(2, 6, 2, 8)}, ValueError, r"attention: v.shape\[:-1\] must equal k.shape\[:-1\] \(2, 5, 2\); got \(2, 6, 2\)"),
    ({"v": zeros(2, 5, 2, 513)}, ValueError, r"attention: v.shape\[-1\] \(head_dim\) must be 1 to 512; got 513"),
    ({"q": zeros(2, 3, 5, 16)}, ValueError, r"attention: q.shape\[-2\] \(num_heads\) must be a multiple of num_kv_heads of k \(2\); got 5"),
    ({"k": zeros(2, 5, 0, 16), "v": zeros(2, 5, 0, 8)}, ValueError, r"attention: q.shape\[-2\] .* of num_kv_heads of k \(0\); got 4"),
    ({"q": zeros(2, 3, 4, 32)[..., ::2]}, ValueError, "attention: q must be contiguous along its last axis"),
    ({"k": np.broadcast_to(zeros(16), (2, 2**31, 2, 16)), "v": np.broadcast_to(zeros(8), (2, 2**31, 2, 8))}, ValueError,
     "attention: seqlen_k must be at most 2147418112; got 2147483648"),
    ({"q": np.broadcast_to(zeros(16), (2, 2**30, 4, 16))}, ValueError, "attention: seqlen_q .* at most 2147418112; got 2147483648"),
    ({"alibi_slopes": zeros(4)}, TypeError, "attention: alibi_slopes must be float32; got float16"),
    ({"alibi_slopes": zeros(3, 4, dtype=f32)}, ValueError, r"attention: alibi_slopes.shape must be \(4,\) or \(2, 4\); got \(3, 4\)"),
    ({"sinks": zeros(2, dtype=f32)}, ValueError, r"attention: sinks.shape must be \(4,\); got \(2,\)"),
    ({"mask": zeros(3, 5, dtype=i32)}, TypeError, "attention: mask must be bool or uint8; got int32"),
    ({"mask": zeros(3, 6, dtype=bool)}, ValueError, r"attention: mask.shape must broadcast to \(batch, num_heads, seqlen_q, seqlen_k\) \(2, 4, 3, 5\); got \(3, 6\)"),
    ({"mask": zeros(1, 2, 4, 3, 5, dtype=bool)}, ValueError, r"attention: mask.shape must broadcast to .* got \(1, 2, 4, 3, 5\)"),
    ({"mask": zeros(3, 5, dtype=np.uint8)}, ValueError, r"attention: mask.shape must broadcast to .*ceil\(seqlen_k / 8\)\) \(2, 4, 3, 1\); got \(3, 5\)"),
    ({"k_scale": zeros(4, dtype=f32)}, ValueError, r"attention: k_scale.shape must be \(\), \(1,\) or \(num_kv_heads,\) \(2,\); got \(4,\)"),
    ({"v_scale": 0}, ValueError, "attention: v_scale must be above 0 and finite in float32; got 0"),
    ({"v_scale": np.array([1, -1], f32)}, ValueError, r"attention: v_scale must be above 0 and finite; got \[ 1. -1.\]"),
    ({"sm_scale": float("inf")}, ValueError, "attention: sm_scale must be finite in float32; got inf"),
    ({"softcap": -1.0}, ValueError, r"attention: softcap must be 0 \(off\) or above 0 in float32; got -1.0"),
    ({"softcap": "1"}, TypeError, "attention: softcap must be a number; got str"),
    ({"window": (-2, 0)}, ValueError, r"attention: window must be \(left, right\), each -1 \(unbounded\) or more; got \(-2, 0\)"),
    ({"out": zeros(2, 3, 4, 16)}, ValueError, r"attention: out.shape must equal the result's shape \(2, 3, 4, 8\); got \(2, 3, 4, 16\)"),
    ({"out": zeros(2, 3, 4, 8, dtype=bfloat16)}, TypeError, "attention: out must be float16; got bfloat16"),
    ({"lse": zeros(2, 3, 4)}, TypeError, "attention: lse must be float32; got float16"),
    ({"out": np.broadcast_to(zeros(8), (2, 3, 4, 8))}, ValueError, "attention: out must not overlap itself"),
]  # fmt: skip
REFUSED_VARLEN = [  # the same of packed sequences
    ({"q": zeros(1, 5, 4, 16)}, ValueError, r"attention_varlen: q must have the axes \(total_q, num_heads, head_dim\)"),
    ({"k": zeros(12, 1, 2, 16)}, ValueError, r"attention_varlen: k must have the axes \(total_k, num_kv_heads, head_dim\)"),
    ({"cu_seqlens_q": None}, TypeError, "attention_varlen: cu_seqlens_q must be an array; got None"),
    ({"cu_seqlens_k": None}, TypeError, "attention_varlen: cu_seqlens_k may be None only with block_table and seqused_k"),
    ({"cu_seqlens_q": zeros(0, dtype=i32)}, ValueError, r"attention_varlen: cu_seqlens_q.shape must be \(batch \+ 1,\); got \(0,\)"),
    ({"cu_seqlens_k": zeros(4, dtype=i32)}, ValueError, r"attention_varlen: cu_seqlens_k.shape must equal \(batch \+ 1,\) \(3,\); got \(4,\)"),
    ({"cu_seqlens_q": zeros(3)}, TypeError, "attention_varlen: cu_seqlens_q must be int32 or int64; got float16"),
    ({"seqused_k": zeros(3, dtype=i32)}, ValueError, r"attention_varlen: seqused_k.shape must equal \(batch,\) \(2,\); got \(3,\)"),
    ({"alibi_slopes": zeros(3, 4, dtype=f32)}, ValueError, r"attention_varlen: alibi_slopes.shape must be \(4,\) or \(2, 4\)"),
]  # fmt: skip
REFUSED_PAGES = [
    ({"k": zeros(12, 2, 16)}, ValueError, r"attention_varlen: k must have the axes \(num_pages, page_size, num_kv_heads, head_dim\)"),
    ({"k": zeros(5, 0, 2, 16), "v": zeros(5, 0, 2, 8)}, ValueError, r"attention_varlen: k.shape\[1\] \(page_size\) must be at least 1; got 0"),
    ({"block_table": zeros(3, 3, dtype=i32)}, ValueError, r"attention_varlen: block_table.shape\[0\] must equal batch of cu_seqlens_q \(2\); got 3"),
    ({"block_table": zeros(2, dtype=i32)}, ValueError, r"attention_varlen: block_table must have the axes \(batch, max_pages_per_seq\)"),
]
VALUES = [  # case, metadata that is wrong, and what the check of values says
    (PACKED, {"cu_seqlens_q": [0, 4, 3]}, r"cu_seqlens_q must be ascending; got 4 before 3 at index 2"),
    (PACKED, {"cu_seqlens_q": [0, 3, 6]}, r"cu_seqlens_q\[-1\] must be at most total_q \(5\); got 6"),
    (PACKED, {"cu_seqlens_q": [-1, 3, 5]}, r"cu_seqlens_q\[0\] must be at least 0; got -1"),
    (PACKED, {"cu_seqlens_k": [0, 5, 13]}, r"cu_seqlens_k\[-1\] must be at most total_k \(12\); got 13"),
    (PACKED, {"seqused_k": [6, 7]}, r"seqused_k\[0\] must be within 0 and the keys that there are \(5\); got 6"),
    (PACKED, {"seqused_k": [5, -1]}, r"seqused_k\[1\] must be within 0 and the keys that there are \(7\); got -1"),
    (PAGES, {"block_table": [[0, -1, -1], [1, 99, -1]]}, r"block_table\[1, 1\] must be within 0 and num_pages - 1 \(4\); got 99"),
    (PAGES, {"block_table": [[-1, -1, -1], [1, 2, -1]]}, r"block_table\[0, 0\] must be within 0 and num_pages - 1 \(4\); got -1"),
    (PAGES, {"cu_seqlens_k": None, "seqused_k": [5, 65]}, r"seqused_k\[1\] must be within 0 and the keys that there are \(48\); got 65"),
    (PAGES, {"cu_seqlens_k": [0, 5, 70], "seqused_k": None}, r"sequence 1 must fit its row of block_table \(48 tokens\); got 65"),
]


def call(backend, case: AttentionCase, changed: dict):
    given = {**case.arrays(), **changed}
    function = attention_varlen if "cu_seqlens_q" in case.arrays() else attention
    return function(**moved(backend, given))


@pytest.mark.parametrize(("changed", "error", "text"), REFUSED, ids=lambda x: "" if isinstance(x, (dict, type)) else str(x)[:60])
def test_refused(backend, changed, error, text):
    with pytest.raises(error, match=text):
        call(backend, DENSE, changed)


@pytest.mark.parametrize(("changed", "error", "text"), REFUSED_VARLEN, ids=lambda x: "" if isinstance(x, (dict, type)) else str(x)[:60])
def test_refused_of_packed_sequences(backend, changed, error, text):
    with pytest.raises(error, match=text):
        call(backend, PACKED, changed)


@pytest.mark.parametrize(("changed", "error", "text"), REFUSED_PAGES, ids=lambda x: "" if isinstance(x, (dict, type)) else str(x)[:60])
def test_refused_of_pages(backend, changed, error, text):
    with pytest.raises(error, match=text):
        call(backend, PAGES, changed)


def as_indices(changed: dict) -> dict:
    return {name: None if x is None else np.array(x, i32) for name, x in changed.items()}


@pytest.mark.parametrize(("case", "changed", "text"), VALUES, ids=lambda x: str(x)[:60] if isinstance(x, str) else "")
def test_wrong_metadata_is_refused_under_value_checking(backend, case, changed, text):
    with pytest.raises(ValueError, match="attention_varlen: " + text):
        call(backend, case, as_indices(changed))


WILD = [2**31 - 1, -(2**31), -1, 1, 2, 10**6]
WIDE = [2**63 - 1, -(2**63), 2**32 + 1]


@pytest.mark.parametrize("case", [PACKED, PAGES], ids=lambda c: c.kind)
def test_wrong_metadata_without_checking_does_no_harm(kernels, case):
    """Sequences are cut to what there is; nothing outside the arrays is read or written (the sanitizers watch)."""
    given, rng = case.arrays(), np.random.default_rng(0)
    with cuattn.checking("arguments"):
        for turn in range(30):
            values, index = (WILD + WIDE, np.int64) if turn % 2 else (WILD, i32)
            names = [n for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table") if n in given]
            run(kernels, given | {n: rng.choice(np.array(values, np.int64), given[n].shape).astype(index) for n in names})
        for b in range(2):  # an absent page has no keys
            if case.kind == "pages":
                table = given["block_table"].copy()
                table[b] = -1
                state = run(kernels, given | {"block_table": table})
                rows = slice(*given["cu_seqlens_q"][b : b + 2])
                assert np.isneginf(kernels.host(state.lse)[rows]).all() and not kernels.host(state.out)[rows].any()


def test_arrays_on_the_host_need_no_plan():
    given = DENSE.arrays()
    with pytest.raises(ValueError, match="plan_attention: arrays must be on a device; got NumPy arrays, which need no plan"):
        plan_attention(given["q"], given["k"], given["v"])


@pytest.mark.parametrize("kernel", list(_plan_attention.kernels()), ids=str)
def test_compiled_kernels_are_chosen(kernel, kernels):
    """Nothing is compiled and measured that no call can reach."""
    tile, types = dict(kernel.defines), types_of(kernel)
    dtype = np.dtype(DTYPES[types[0]]).name
    size = tile["DIM"] - 3 * (kernel.file == "attention.cu")
    control = 6 if not tile.get("PLAIN", 1) else 0 if tile.get("KEYS") == 160 else 1
    case = AttentionCase(((3, 5),), "dense", (2, 1), (size, 8), dtype=dtype, float8=len(set(types)) > 1, control=control)
    given = moved(kernels, case.arrays())
    dims = plan_attention(**{n: x for n, x in given.items() if n not in ("k_scale", "v_scale")}).dims
    plan = _plan_attention.plan_attention(dims, DeviceInfo((9, 0) if kernel.suffix else (8, 0), 4))
    assert plan.kernel == kernel
    assert kernel.file == {"simt": "attention.cu"}.get(plan.variant, f"attention_{plan.variant}.cu")


def test_plans_say_why(kernels):
    given = moved(kernels, AttentionCase(((3, 5),), "dense", (2, 1), (64, 64), dtype="float32").arrays())
    assert plan_attention(**given).why == "no tensor cores: float32 or float8_e4m3fn; 64 rows, since head_dim is up to 128"
    given = moved(kernels, AttentionCase(((3, 5),), "packed", (2, 1), (100, 64)).arrays())
    assert "no multiple of 8" in plan_attention_varlen(**given).why
    given = moved(kernels, AttentionCase(((3, 5),), "packed", (2, 1), layout="odd offset").arrays())
    assert "no multiples of 16 bytes" in plan_attention_varlen(**given).why


def test_variants_agree_within_their_bounds(kernels):
    """The same call on tensor cores and without: strides decide, and both are tested against the definition elsewhere."""
    aligned, odd = (AttentionCase(((70, 90),), "dense", (6, 2), layout=which, control=1) for which in ("separate", "odd offset"))
    states = [run(kernels, case.arrays()) for case in (aligned, odd)]
    a, b = (kernels.host(x.out).astype(float) for x in states)
    assert abs(a - b).max() < 2.0**-7
    again = run(kernels, aligned.arrays())
    assert_same_bits(states[0].out, again.out)


# Hopper's kernel, as far as the host decides

H200 = DeviceInfo((9, 0), 132)


def on_hopper(kernels, given: dict):
    """The plan that such a call has on an H200."""
    function = plan_attention_varlen if "cu_seqlens_q" in given else plan_attention
    return _plan_attention.plan_attention(function(**moved(kernels, given)).dims, H200)


@pytest.mark.parametrize(
    ("case", "changed", "why"),
    [
        (AttentionCase(((3, 5),), "pages", page_size=20), {}, "pages of a size that is no multiple of 8"),
        (AttentionCase(((3, 5),), "dense"), {"softcap": 2.0}, "softcap, slopes or a mask"),
        (AttentionCase(((3, 5),), "dense", control=10), {}, "softcap, slopes or a mask"),
        (AttentionCase(((3, 5),) * 2, "dense", layout="flipped"), {}, "strides that a tensor map has not"),
        (AttentionCase(((3, 0),), "dense"), {}, "no keys"),
        (AttentionCase(((3, 5),), "packed"), {"k": np.broadcast_to(zeros(5, 1, 64), (5, 2, 64))}, "strides that a tensor map has not"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_for_hopper(kernels, case, changed, why):
    plan = on_hopper(kernels, {**case.arrays(), **changed})
    assert plan.variant == "mma" and why in plan.why


def test_tensor_maps(kernels):
    """Sizes are (features, sequence, heads, batch); strides skip the first axis and are in bytes."""
    dense = on_hopper(kernels, AttentionCase(((3, 5),) * 2, "dense", (4, 2), (64, 48)).arrays())
    assert dense.variant == "sm90"
    assert _plan_attention.tensor_axes(dense.dims, "q") == ((64, 3, 4, 2), (4 * 128, 128, 3 * 4 * 128), 192)
    assert _plan_attention.tensor_axes(dense.dims, "v") == ((48, 5, 2, 2), (2 * 96, 96, 5 * 2 * 96), 128)
    packed = on_hopper(kernels, AttentionCase(((3, 5), (2, 7)), "packed", (4, 1), (256, 256)).arrays())
    assert _plan_attention.tensor_axes(packed.dims, "q") == ((256, 5, 4, 1), (4 * 512, 512, 16), 128)
    assert _plan_attention.tensor_axes(packed.dims, "k") == ((256, 12, 1, 1), (512, 16, 16), 80)
    pages = on_hopper(kernels, AttentionCase(((3, 5),), "pages", (4, 2), (128, 128), 48, control=1).arrays())
    assert pages.dims.num_pages > 1
    expected = (128, 48, 2, pages.dims.num_pages), (2 * 256, 256, 48 * 2 * 256), 16
    assert _plan_attention.tensor_axes(pages.dims, "v") == expected


@pytest.mark.parametrize(("control", "page_size", "box"), [(1, 8, 8), (1, 24, 8), (1, 256, 128), (0, 64, 32), (1, 64, 64)])
def test_boxes_of_pages(kernels, control, page_size, box):
    """A power of two that divides pages and tiles of keys: 128, or 160 where all queries see all keys."""
    plan = on_hopper(kernels, AttentionCase(((3, 5),), "pages", (4, 2), (128, 128), page_size, control=control).arrays())
    assert plan.variant == "sm90" and _plan_attention.tensor_axes(plan.dims, "k")[2] == box


@pytest.mark.parametrize(("rows", "blocks"), [(20, 5), (4200, 5 * 22), (5000, 132)])
def test_blocks_take_work_until_none_is_left(kernels, rows, blocks):
    given = AttentionCase(((rows, 70),), "dense", (5, 1), (64, 64)).arrays()
    assert on_hopper(kernels, given).grid == (blocks, 1, 1)
