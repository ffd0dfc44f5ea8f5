"""Split-KV decode: the rows of peers.md, other group sizes and page sizes, skewed lengths, float8 caches."""

from __future__ import annotations

import numpy as np

from bench import harness
from bench.inputs import as_bits, cupy, dtype_named, normal
from cuattn import reference
from cuattn.decode import decode, decode_workspace_size, plan_decode
from cuattn.testing import assert_state, attention_bound

BASE = {"batch": 64, "length": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "cache": "bfloat16"}
FLOAT8 = {"cache": "float8_e4m3fn"}
CASES = [
    {"op": "decode", **BASE, "batch": 1},
    {"op": "decode", **BASE, "batch": 1, "length": 131072},
    {"op": "decode", **BASE, "batch": 8},
    {"op": "decode", **BASE, "length": 1024},
    {"op": "decode", **BASE},
    {"op": "decode", **BASE, "batch": 256, "length": 2048},
    {"op": "decode_skewed", **BASE, "length": 131072},  # one sequence of that length among others of 1024
    {"op": "decode", **BASE, "kv_heads": 32, "batch": 16},
    {"op": "decode", **BASE, "kv_heads": 1},
    {"op": "decode", **BASE, **FLOAT8},
    {"op": "decode", **BASE, **FLOAT8, "batch": 1, "length": 131072},
    {"op": "decode", **BASE, "page_size": 1},
    {"op": "decode", **BASE, "page_size": 64},
    {"op": "decode", **BASE, "page_size": 256},
    {"op": "decode", **BASE, "head_dim": 64},
    {"op": "decode", **BASE, "head_dim": 256},
]
SCALE = 0.02  # of a float8 cache: its values are up to 448


def lengths(case: harness.Case) -> np.ndarray:
    """Tokens of each sequence."""
    every = np.full(case["batch"], case["length"], np.int32)
    if case["op"] == "decode_skewed":
        every[1:] = 1024
    return every


def bytes_moved(case: harness.Case) -> int:
    """K and V of the tokens in use, q and out."""
    itemsize = dtype_named(case["cache"]).itemsize
    tokens = int(lengths(case).sum()) * case["kv_heads"]
    return 2 * case["head_dim"] * (tokens * itemsize + case["batch"] * case["heads"] * 2)


def inputs(case: harness.Case, seed: int) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray, np.ndarray]:
    """Queries, K and V pages, and the table: all pages of the pool in random order, -1 behind the end."""
    rng, used = cupy.random.default_rng(seed), -(-lengths(case) // case["page_size"])
    shape = (int(used.sum()), case["page_size"], case["kv_heads"], case["head_dim"])
    pages = [normal(shape, dtype_named(case["cache"]), rng) for _ in "kv"]
    q = normal((case["batch"], 1, case["heads"], case["head_dim"]), dtype_named("bfloat16"), rng)
    table, start = np.full((case["batch"], int(used.max())), -1, np.int32), 0
    order = np.random.default_rng(seed).permutation(shape[0])
    for row, count in zip(table, used):
        row[:count], start = order[start : start + count], start + count
    return q, *pages, table


def options(case: harness.Case) -> dict:
    return {"k_scale": SCALE, "v_scale": SCALE} if case["cache"] == FLOAT8["cache"] else {}


def setup(case: harness.Case, seed: int) -> harness.Run:
    q, k_pages, v_pages, table = inputs(case, seed)
    args = q, k_pages, v_pages, cupy.asarray(table), cupy.asarray(lengths(case))
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:3], cupy.float32)
    sizes = case["batch"], 1, case["heads"], case["kv_heads"], case["head_dim"], table.shape[1] * case["page_size"]
    into = {"out": out, "lse": lse, "workspace": cupy.empty(decode_workspace_size(*sizes) // 4, cupy.float32)}
    plan = plan_decode(*args)
    return harness.Run(
        lambda: decode(*args, **options(case), **into),
        lambda: error(case, q, (k_pages, v_pages), table, out, lse),
        lambda: decode(*args, **options(case), plan=plan),
    )


def error(case: harness.Case, q, pages, table: np.ndarray, out, lse) -> float:
    """Error over bound of the query heads of one kv head, in the first and in the last sequence."""
    worst, group = 0.0, case["heads"] // case["kv_heads"]
    scale, d = options(case).get("k_scale", 1.0), case["head_dim"]
    for b, g in ((0, 0), (case["batch"] - 1, case["kv_heads"] - 1)):
        length, heads = int(lengths(case)[b]), slice(g * group, (g + 1) * group)
        ids = cupy.asarray(table[b, : -(-length // case["page_size"])])
        stored = (as_bits(x)[:, :, g][ids].get().view(x.dtype) for x in pages)
        k, v = (x.reshape(-1, 1, d)[:length].astype(np.float32) * scale for x in stored)
        query = q[b : b + 1, :, heads].get()
        expected = reference.attention(query, k[None], v[None], causal=True)
        sizes = np.einsum("ihd,jd->ihj", abs(query[0].astype(np.float32)), abs(k[:, 0])).max(-1)
        # Tensor cores may cut off where the bound counts roundings, and there are 3 more: see tests/decode_cases.py.
        bound = attention_bound(
            *expected, head_dim=d, num_keys=length, tile=2, sm_scale=d**-0.5, qk=sizes[None] * (2 * d + 6) / (d + 3),
            v=np.float64(abs(v).max()), dtype=out.dtype, p_dtype=out.dtype, num_splits=128,
        )  # fmt: skip
        worst = max(worst, *assert_state((out[b : b + 1, :, heads], lse[b : b + 1, :, heads]), expected, bound))
    return worst


def setup_flashinfer(case: harness.Case, seed: int) -> harness.Run | None:
    """FlashInfer's decode on tensor cores; its plan, which reads lengths on the host, is made before."""
    try:
        import flashinfer
        import torch
    except ImportError:
        return None
    q, k_pages, v_pages, table = inputs(case, seed)
    float8 = case["cache"] == FLOAT8["cache"]
    k, v = (torch.from_dlpack(x.view(cupy.uint8) if float8 else x) for x in (k_pages, v_pages))
    if float8:
        k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
    queries, page_size = torch.from_dlpack(q)[:, 0], case["page_size"]
    used = -(-lengths(case) // page_size)
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(used)]).astype(np.int32)).cuda()
    indices = torch.from_numpy(table[table >= 0]).cuda()
    last = torch.from_numpy(lengths(case) - (used - 1).astype(np.int32) * page_size).to(torch.int32).cuda()
    space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr, indices, last, case["heads"], case["kv_heads"], case["head_dim"], page_size,
        q_data_type=torch.bfloat16, kv_data_type=torch.float8_e4m3fn if float8 else torch.bfloat16,
    )  # fmt: skip
    out, scales = torch.empty_like(queries), options(case)
    return harness.Run(lambda: wrapper.run(queries, (k, v), out=out, **scales))


if __name__ == "__main__":
    harness.main("decode", CASES, setup, bytes_moved=bytes_moved, peers={"flashinfer": setup_flashinfer}, l2="cold")
