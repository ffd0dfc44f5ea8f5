"""Merges of states: FlashInfer's cases of peers.md, the other forms, and few rows with many states."""

from __future__ import annotations

import numpy as np

import cuattn
from bench import harness
from bench.inputs import cupy, dtype_named, normal
from cuattn import reference
from cuattn.testing import assert_state, merge_bound

BASE = {"rows": 4096, "states": 8, "heads": 32, "head_dim": 128, "dtype": "bfloat16"}
CASES = [
    {"op": "merge_state", **BASE, "rows": 65536, "states": 2},
    {"op": "merge_state_in_place", **BASE, "rows": 65536, "states": 2},
    {"op": "merge_states", **BASE},
    {"op": "merge_states_list", **BASE},
    {"op": "merge_states_varlen", **BASE},
    {"op": "merge_states_strided", **BASE},  # FlashInfer's layout: states between tokens and heads
    {"op": "merge_states", **BASE, "dtype": "float32"},
    {"op": "merge_states", **BASE, "head_dim": 64},
    {"op": "merge_states", **BASE, "head_dim": 80},
    {"op": "merge_states", **BASE, "rows": 256, "states": 16},
    {"op": "merge_states", **BASE, "rows": 1, "states": 64},
    {"op": "merge_states", **BASE, "rows": 1, "states": 512},
    {"op": "merge_states", **BASE, "rows": 1, "states": 512, "dtype": "float32"},
]


def bytes_moved(case: harness.Case) -> int:
    itemsize = 4 if case["dtype"] == "float32" else 2
    row = case["head_dim"] * itemsize + 4  # out and lse of one state, one head
    return case["rows"] * case["heads"] * (case["states"] + 1) * row


def inputs(case: harness.Case, seed: int) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Outs (states, rows, heads, head_dim) and lses (states, rows, heads), normally distributed."""
    rng = cupy.random.default_rng(seed)
    shape = (case["states"], case["rows"], case["heads"])
    outs = normal((*shape, case["head_dim"]), dtype_named(case["dtype"]), rng)
    return outs, rng.standard_normal(shape, dtype=cupy.float32)


def setup(case: harness.Case, seed: int) -> harness.Run:
    outs, lses = inputs(case, seed)
    out, lse = cupy.empty_like(outs[0]), cupy.empty_like(lses[0])
    a, b = (outs[0], lses[0]), (outs[-1], lses[-1])
    op, into = case["op"], {"out": out, "lse": lse}
    if op == "merge_state":
        call, eager = lambda: cuattn.merge_state(*a, *b, **into), lambda: cuattn.merge_state(*a, *b)
    elif op == "merge_state_in_place":
        out[...], lse[...] = a
        call = eager = lambda: cuattn.merge_state_in_place(out, lse, *b)
    elif op == "merge_states_list":
        lists = list(outs), list(lses)
        call, eager = lambda: cuattn.merge_states(*lists, **into), lambda: cuattn.merge_states(*lists)
    elif op == "merge_states_varlen":
        by_row = tuple(cupy.ascontiguousarray(x.swapaxes(0, 1)).reshape(-1, *x.shape[2:]) for x in (outs, lses))
        indptr = cupy.arange(0, len(by_row[1]) + 1, case["states"], dtype=cupy.int32)
        call = lambda: cuattn.merge_states_varlen(*by_row, indptr, **into)  # noqa: E731
        eager = lambda: cuattn.merge_states_varlen(*by_row, indptr)  # noqa: E731
    else:
        if op == "merge_states_strided":
            outs, lses = (cupy.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (outs, lses))
        call, eager = lambda: cuattn.merge_states(outs, lses, **into), lambda: cuattn.merge_states(outs, lses)
    return harness.Run(call, lambda: error(outs, lses, out, lse, in_place=op.endswith("in_place")), eager)


def error(outs, lses, out, lse, in_place: bool) -> float:
    """Error over bound of 64 rows; merging in place has gone on meanwhile, so one more merge is judged."""
    some = np.random.default_rng(0).integers(0, out.shape[0], 64)
    if in_place:
        before = [out[some].copy(), lse[some].copy()]
        cuattn.merge_state_in_place(out, lse, outs[-1], lses[-1])
        parts = [np.stack([x.get(), y[-1, some].get()]) for x, y in zip(before, (outs, lses))]
    else:
        parts = [x[:, some].get() for x in (outs, lses)]
    bound = merge_bound(*parts, out.dtype)
    return max(assert_state((out[some], lse[some]), reference.merge_states(*parts), bound))


def setup_flashinfer(case: harness.Case, seed: int) -> harness.Run | None:
    """FlashInfer's merge_state and merge_states; it has 16-bit dtypes and some head sizes only, and no list."""
    try:
        import flashinfer
        import torch
    except ImportError:
        return None
    if case["op"] not in ("merge_state", "merge_states", "merge_state_in_place"):
        raise NotImplementedError("no such function")
    outs, lses = (torch.from_dlpack(x) for x in inputs(case, seed))
    if case["op"] == "merge_state":
        return harness.Run(lambda: flashinfer.merge_state(outs[0], lses[0], outs[1], lses[1]))
    if case["op"] == "merge_state_in_place":
        return harness.Run(lambda: flashinfer.merge_state_in_place(outs[0], lses[0], outs[1], lses[1]))
    outs, lses = (x.transpose(0, 1).contiguous() for x in (outs, lses))
    return harness.Run(lambda: flashinfer.merge_states(outs, lses))


if __name__ == "__main__":
    harness.main("state", CASES, setup, bytes_moved=bytes_moved, peers={"flashinfer": setup_flashinfer}, l2="warm")
