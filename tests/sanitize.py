"""Small cases of every kernel, to be run under compute-sanitizer: `python -m tests.sanitize state`."""

from __future__ import annotations

import sys
from dataclasses import replace

import cupy
import numpy as np

import cuattn
from cuattn.decode import decode as split_kv_decode
from cuattn.paged import append_kv, copy_pages, gather_kv
from cuattn.rotary import apply_rotary
from cuattn.testing import StateCase, guarded, place, to_device
from cuattn.testing.profiles import as_dtype
from tests.attention_cases import KINDS, AttentionCase
from tests.backends import Gpu, moved
from tests.decode_cases import CONTROLS, DecodeCase
from tests.paged_cases import PagedCase

GPU = Gpu()
ROTARY = ("halves 7 wide", "interleaved 3 narrow")
PLANTED = r"""
extern "C" __global__ void memcheck(float* x) { x[threadIdx.x + 1000000000] = 1; }
extern "C" __global__ void racecheck(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
"""


def state() -> None:
    """Every entry, vector width, and the split over a block; the memory around the arrays is their own buffer's."""
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim in (5, 12, 64, 128):
            for states in (2, 9, 40):
                case = StateCase((3, 2), states, head_dim, dtype, "some empty", "row slice")
                outs, lses = (to_device(x, cupy) for x in (case.outs(), case.lses()))
                cuattn.merge_states(outs, lses)
                cuattn.merge_states(list(outs), list(lses))
                cuattn.merge_states(outs, lses, out=outs[0], lse=lses[0])
                cuattn.merge_states_varlen(outs, lses, cupy.asarray(np.int32([0, 1, 1, states])))
                mask = cupy.asarray(np.array([True, False, True]))
                cuattn.merge_state_in_place(outs[0], lses[0], outs[1], lses[1], mask)
    cupy.cuda.Device().synchronize()


def paged() -> None:
    """Every entry, word and vector, with ids that name nothing, on pages inside guards."""
    slots = np.array([3, -1, 9, 0, 10, 2**40, 4, 6])
    for dtype, float8 in (("float16", False), ("bfloat16", True), ("float32", True), ("float32", False)):
        for widths in ((5, 3), (12, 12), (64, 128)):
            for layout in ("row slice", "odd offset", "contiguous"):
                case = PagedCase(dtype, float8, 2, 5, 2, widths, len(slots), layout)
                tokens = [to_device(x, cupy) for x in case.tokens()]
                pages = [guarded(shape, case.stored, layout, cupy)[1] for shape in case.page_shapes()]
                index, ids = cupy.asarray(slots), cupy.asarray(np.int32([0, -1, 5]))
                tables = cupy.ones((7, widths[0] // 2), cupy.float32)
                turn = {"rotary_cos": tables, "rotary_sin": tables, "positions": cupy.arange(len(slots))}
                with cuattn.checking("arguments"):
                    append_kv(*tokens, *pages, index)
                    for interleaved in (False, True):
                        append_kv(*tokens, *pages, index, **turn, rotary_interleaved=interleaved)
                    gather_kv(*pages, index)
                    gather_kv(*pages, index, dtype=tokens[0].dtype)
                    copy_pages(*pages, ids, cupy.asarray(np.int32([1, 1, 1])))
    cupy.cuda.Device().synchronize()


def decode() -> None:
    """Every tile, one split and several, with pages, lengths and batch indices that name nothing; results inside guards."""
    turn = 0
    for dtype, float8 in (("float16", False), ("bfloat16", True), ("float32", False)):
        for widths in ((5, 3), (64, 64), (128, 16), (512, 40), (48, 256)):
            for layout in ("separate", "interleaved", "odd offset"):
                case = DecodeCase((700, 0, 37) if turn % 3 else (90, 0, 37), 2, (6, 2), widths, 17, dtype, float8, layout)
                given = replace(case, control=turn % len(CONTROLS)).arrays()
                given["block_table"][0, 2], given["block_table"][2, 1] = -1, 2**30
                wrong = {"cache_seqlens": np.array([10**6, -5, 30]), "cache_batch_idx": np.array([0, 2, 3])}
                out, lse = (guarded((3, 2, 6, n), d, "row slice", cupy)[1] for n, d in ((widths[1], dtype), (1, "float32")))
                with cuattn.checking("arguments"):
                    for changed in ({}, wrong, {"cache_leftpad": np.array([600, 9, 36])}):
                        arrays = {n: to_device(x, cupy) if isinstance(x, np.ndarray) else x for n, x in {**given, **changed}.items()}
                        split_kv_decode(**arrays, out=out, lse=lse[..., 0])
                    split_kv_decode(**new_tokens(replace(case, new=3, rotary=ROTARY[turn % 2])), out=out, lse=lse[..., 0])
                turn += 1
        for lengths in ((600, 0, 37), (16, 1, 48)):  # what the short code of tensor cores takes, whole tiles and parts
            case = DecodeCase(lengths, 1, (6, 2), (64, 64), 16, dtype, float8)
            arrays = {n: to_device(x, cupy) if isinstance(x, np.ndarray) else x for n, x in case.arrays().items()}
            out, lse = (guarded((3, 1, 6, n), d, "row slice", cupy)[1] for n, d in ((64, dtype), (1, "float32")))
            split_kv_decode(**arrays, out=out, lse=lse[..., 0])
    cupy.cuda.Device().synchronize()


def attention() -> None:
    """Every tile of the complete variant and of tensor cores, with offsets, lengths and pages that name nothing; results inside guards."""
    turn = 0
    for dtype, float8 in (("float16", False), ("bfloat16", True), ("float32", False)):
        for widths in ((5, 3), (64, 64), (128, 16), (256, 48), (512, 40)):
            for kind in KINDS:
                control = (1, 6, 10)[turn % 3] if kind == "dense" else (1, 6, 7)[turn % 3]
                case = AttentionCase(((70, 90), (3, 0), (0, 5)), kind, (6, 2), widths, 17, dtype, float8, control=control)
                _attend(case, dtype)
                turn += 1
    cupy.cuda.Device().synchronize()


def attention_sm90() -> None:
    """Hopper's kernel: several tiles of rows and keys, with values that only some rows may see."""
    for dtype in ("float16", "bfloat16"):
        for widths in ((64, 64), (128, 16), (80, 96), (136, 192), (256, 256)):
            for control, kind in enumerate(KINDS):
                for which in (1, (control, 3)[dtype == "float16"]):
                    _attend(AttentionCase(((200, 300), (3, 0), (0, 5)), kind, (4, 2), widths, 16, dtype, control=which), dtype)
    cupy.cuda.Device().synchronize()


def _attend(case: AttentionCase, dtype: str) -> None:
    given = case.arrays()
    wild = {n: np.array([10**6, -5, 3, 2**31 - 1], given[n].dtype) for n in ("cu_seqlens_q", "cu_seqlens_k") if n in given}
    rows = given["q"].shape[:-1]
    out, lse = (guarded((*rows, n), d, "row slice", cupy)[1] for n, d in ((case.head_dims[1], dtype), (1, "float32")))
    function = cuattn.attention_varlen if wild else cuattn.attention
    if "block_table" in given:
        given["block_table"][0, :2] = -1, 2**30
    with cuattn.checking("arguments"):
        for changed in ({}, wild):
            function(**moved(GPU, given | changed), out=out, lse=lse[..., 0], return_state=True)


def new_tokens(case: DecodeCase) -> dict:
    """New tokens into pages inside guards, some of whose ids name nothing, and beyond the tables of page ids and angles."""
    given = case.arrays()
    given["block_table"][0, case.lengths[0] // case.page_size], given["block_table"][2, 1] = -1, 2**30
    given["block_table"] = given["block_table"][:, : -(-case.lengths[0] // case.page_size)]
    given |= {name: given[name][: case.lengths[0] + 1] for name in ("rotary_cos", "rotary_sin")}
    arrays = {n: to_device(x, cupy) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    for name in ("k_pages", "v_pages"):
        _, pages = guarded(given[name].shape, given[name].dtype, "row slice", cupy)
        arrays[name] = pages
    return arrays


def rotary() -> None:
    """Every vector, style and table, in place and not, with positions that have no row."""
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim, half in ((64, 32), (128, 16), (17, 3)):
            for layout in ("contiguous", "row slice", "odd offset"):
                x = place(np.ones((5, 3, head_dim), as_dtype(dtype)), layout)
                tables = np.ones((2, 7, half), np.float32 if layout == "row slice" else x.dtype)
                given = [to_device(y, cupy) for y in (x, tables[0], tables[1], np.array([0, 6, 7, -1, 2**40]))]
                _, out = guarded(x.shape, x.dtype, layout, cupy)
                with cuattn.checking("arguments"):
                    for interleaved in (False, True):
                        apply_rotary(*given, interleaved=interleaved, out=out)
                        apply_rotary(*given, interleaved=interleaved, out=given[0])
    cupy.cuda.Device().synchronize()


CASES = {"state": state, "paged": paged, "decode": decode, "rotary": rotary, "attention": attention, "attention_sm90": attention_sm90}

if __name__ == "__main__":
    if sys.argv[1].startswith("planted-"):
        kernel = cupy.RawKernel(PLANTED, sys.argv[1].removeprefix("planted-"))
        kernel((1,), (64,), (cupy.zeros(64, np.float32),))
        cupy.cuda.Device().synchronize()
    else:
        CASES[sys.argv[1]]()
