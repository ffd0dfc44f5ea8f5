"""Prefill: the dense causal rows of peers.md, full attention, short prompts, packed mixtures and pages."""

from __future__ import annotations

import numpy as np

from bench import harness
from bench.inputs import cupy, dtype_named, normal
from cuattn import attention, attention_varlen, reference
from cuattn.testing import assert_state, attention_bound

BASE = {"batch": 1, "length": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True, "page_size": 0}
CASES = [
    *({"op": "attention", **BASE, "head_dim": d, "length": n} for d in (128, 64) for n in (4096, 16384, 65536)),
    {"op": "attention", **BASE, "head_dim": 256, "length": 16384},
    {"op": "attention", **BASE, "length": 16384, "causal": False},
    {"op": "attention", **BASE, "length": 16384, "kv_heads": 32},
    {"op": "attention", **BASE, "batch": 32, "length": 512},
    {"op": "varlen", **BASE, "batch": 16, "length": 8192},  # 8192 tokens, half as many, a third, ... a sixteenth
    *({"op": "paged", **BASE, "length": 16384, "page_size": p} for p in (1, 16, 64, 256)),
]


def lengths(case: harness.Case) -> np.ndarray:
    """Tokens of each sequence."""
    parts = 1 + np.arange(case["batch"]) if case["op"] == "varlen" else np.ones(case["batch"], int)
    return case["length"] // parts


def flops(case: harness.Case) -> int:
    """Two products, of the pairs that are seen."""
    n = lengths(case).astype(float)
    return int((4 * n * n * case["head_dim"] * case["heads"] / (2 if case["causal"] else 1)).sum())


def bytes_moved(case: harness.Case) -> int:
    """q, k, v and out once."""
    return int(lengths(case).sum()) * case["head_dim"] * 2 * 2 * (case["heads"] + case["kv_heads"])


def inputs(case: harness.Case, seed: int) -> tuple:
    """q, k and v, packed."""
    rng, total = cupy.random.default_rng(seed), int(lengths(case).sum())
    heads = (case["heads"], case["kv_heads"], case["kv_heads"])
    return tuple(normal((total, h, case["head_dim"]), dtype_named("bfloat16"), rng) for h in heads)


def setup(case: harness.Case, seed: int) -> harness.Run:
    q, k, v = inputs(case, seed)
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:2], cupy.float32)
    options, check = {"causal": case["causal"]}, lambda: error(case, q, k, v, out, lse)
    if case["op"] == "attention":
        shape = case["batch"], case["length"]
        args = [x.reshape(*shape, *x.shape[1:]) for x in (q, k, v)]
        into = {"out": out.reshape(args[0].shape), "lse": lse.reshape(*shape, -1)}
        return harness.Run(lambda: attention(*args, **options, **into), check, lambda: attention(*args, **options))
    offsets = cupy.asarray(np.concatenate([[0], np.cumsum(lengths(case))]).astype(np.int32))
    args = [q, k, v, offsets, offsets]
    if case["op"] == "paged":
        order = np.random.default_rng(seed).permutation(case["length"] // case["page_size"]).astype(np.int32)
        table = cupy.asarray(order[None])
        for n, x in enumerate((k, v), 1):
            args[n] = cupy.empty_like(x).reshape(-1, case["page_size"], *x.shape[1:])
            args[n].view(cupy.uint16)[table[0]] = x.reshape(args[n].shape).view(cupy.uint16)
        options["block_table"] = table
    run = lambda **more: attention_varlen(*args, **options, **more)  # noqa: E731
    return harness.Run(lambda: run(out=out, lse=lse), check, run)


def error(case: harness.Case, q, k, v, out, lse) -> float:
    """Error over bound of some rows of the last head, of the first and the last sequence."""
    worst, ends = 0.0, np.concatenate([[0], np.cumsum(lengths(case))])
    for b in (0, case["batch"] - 1):
        n, d = int(lengths(case)[b]), case["head_dim"]
        own, rows = slice(int(ends[b]), int(ends[b + 1])), np.unique(np.linspace(0, n - 1, 8).astype(int))
        keys, values = (x[own, -1:].get().astype(np.float32)[None] for x in (k, v))
        for i in rows:
            seen = i + 1 if case["causal"] else n
            query = q[own][i : i + 1, -1:].get()[None]
            expected = reference.attention(query, keys[:, :seen], values[:, :seen])
            sizes = np.abs(query[0, 0].astype(np.float32)) @ np.abs(keys[0, :seen, 0]).max(0)
            # Tensor cores may cut off where the bound counts roundings, and there are 3 more: tests/decode_cases.py.
            bound = attention_bound(
                *expected, head_dim=d, num_keys=seen, tile=32, sm_scale=d**-0.5,
                qk=sizes[None, None] * (2 * d + 6) / (d + 3), v=np.float64(np.abs(values).max()),
                dtype=out.dtype, p_dtype=out.dtype,
            )  # fmt: skip
            state = out[own][i : i + 1, -1:][None], lse[own][i : i + 1, -1:][None]
            worst = max(worst, *assert_state(state, expected, bound))
    return worst


def setup_fa3(case: harness.Case, seed: int) -> harness.Run | None:
    """FlashAttention-3, which takes no pages in this build."""
    try:
        import torch
        from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return None
    if case["op"] == "paged":
        return None
    q, k, v = (torch.from_dlpack(x) for x in inputs(case, seed))
    if case["op"] == "attention":
        q, k, v = (x.reshape(case["batch"], case["length"], *x.shape[1:]) for x in (q, k, v))
        return harness.Run(lambda: flash_attn_func(q, k, v, causal=case["causal"]))
    n = lengths(case)
    offsets, most = torch.from_numpy(np.concatenate([[0], np.cumsum(n)]).astype(np.int32)).cuda(), int(n.max())
    return harness.Run(lambda: flash_attn_varlen_func(q, k, v, offsets, offsets, most, most, causal=case["causal"]))


def setup_cudnn(case: harness.Case, seed: int) -> harness.Run | None:
    """cuDNN through torch, with the kv heads repeated."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return None
    if case["op"] != "attention":
        return None
    shape = case["batch"], case["length"]
    q, k, v = (torch.from_dlpack(x).reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in inputs(case, seed))
    k, v = (x.repeat_interleave(case["heads"] // case["kv_heads"], 1) for x in (k, v))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case["causal"])

    return harness.Run(run)


def setup_flashinfer(case: harness.Case, seed: int) -> harness.Run | None:
    """FlashInfer's paged prefill, its own choice of backend; the plan is made before."""
    try:
        import flashinfer
        import torch
    except ImportError:
        return None
    if case["op"] != "paged":
        return None
    q, k, v = (torch.from_dlpack(x) for x in inputs(case, seed))
    pages = case["length"] // case["page_size"]
    k, v = (x.reshape(pages, case["page_size"], *x.shape[1:]) for x in (k, v))
    ids = torch.from_numpy(np.random.default_rng(seed).permutation(pages).astype(np.int32)).cuda()
    ends = torch.tensor([0, case["length"]], dtype=torch.int32).cuda()
    space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
    some, last = (torch.tensor(x, dtype=torch.int32).cuda() for x in ([0, pages], [case["page_size"]]))
    sizes = case["heads"], case["kv_heads"], case["head_dim"], case["page_size"]
    wrapper.plan(ends, some, ids, last, *sizes, causal=case["causal"], q_data_type=torch.bfloat16)
    out = torch.empty_like(q)
    return harness.Run(lambda: wrapper.run(q, (k, v), out=out))


PEERS = {"fa3": setup_fa3, "cudnn": setup_cudnn, "flashinfer": setup_flashinfer}

if __name__ == "__main__":
    harness.main("attention", CASES, setup, bytes_moved=bytes_moved, flops=flops, peers=PEERS, l2="warm")
