"""Pages: the append rows of peers.md, other dtypes and page sizes, rotary, gathering and copying."""

from __future__ import annotations

import numpy as np

from bench import harness
from bench.inputs import as_bits, cupy, dtype_named, normal
from cuattn import reference
from cuattn.paged import append_kv, copy_pages, gather_kv

BASE = {"tokens": 65536, "heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16", "cache": "bfloat16"}
FLOAT8 = {"cache": "float8_e4m3fn"}
CASES = [
    {"op": "append", **BASE},
    {"op": "append", **BASE, "tokens": 256},
    {"op": "append", **BASE, "page_size": 1},
    {"op": "append", **BASE, "page_size": 64},
    {"op": "append_head_major", **BASE},  # (pages, heads, page_size, head_dim)
    {"op": "append_rotary", **BASE},
    {"op": "append", **BASE, **FLOAT8},
    {"op": "append", **BASE, **FLOAT8, "tokens": 256},
    {"op": "append_per_head", **BASE, **FLOAT8},  # a scale for each head
    {"op": "append_rotary", **BASE, **FLOAT8},
    {"op": "gather", **BASE},
    {"op": "gather", **BASE, "page_size": 1},
    {"op": "gather", **BASE, **FLOAT8},
    {"op": "copy", **BASE},
    {"op": "copy", **BASE, "page_size": 1},
    {"op": "copy", **BASE, "tokens": 256},
    {"op": "copy", **BASE, **FLOAT8},
]
SCALE = 0.37  # no power of two: dividing by those is exact
POOL = 65536  # slots at least, so that few tokens lie far apart too


def itemsizes(case: harness.Case) -> tuple[int, int]:
    """Bytes of an element outside the cache and in it."""
    cache = dtype_named(case["cache"]).itemsize
    return (cache if case["op"] == "copy" else 2), cache


def bytes_moved(case: harness.Case) -> int:
    """K and V, read and written, and the rows of cos and sin; indices (0.1 % of it) are not counted."""
    tables = case["tokens"] * case["head_dim"] * 4 if case["op"] == "append_rotary" else 0
    return 2 * case["tokens"] * case["heads"] * case["head_dim"] * sum(itemsizes(case)) + tables


def page_order(case: harness.Case, seed: int) -> np.ndarray:
    """All pages of the pool, in random order: token i is on page order[i // page_size]."""
    pages = max(POOL, case["tokens"]) // case["page_size"]
    return np.random.default_rng(seed).permutation(2 * pages if case["op"] == "copy" else pages)


def inputs(case: harness.Case, seed: int) -> tuple[list[cupy.ndarray], list[cupy.ndarray], np.ndarray]:
    """K and V, their pages, and the slots of the tokens."""
    order, page_size, rng = page_order(case, seed), case["page_size"], cupy.random.default_rng(seed)
    token = (case["heads"], case["head_dim"])
    tokens = [normal((case["tokens"], *token), dtype_named(case["dtype"]), rng) for _ in "kv"]
    shape = (len(order), page_size, *token)
    if case["op"] == "append_head_major":
        shape = (shape[0], shape[2], shape[1], shape[3])
    pages = [normal(shape, dtype_named(case["cache"]), rng) for _ in "kv"]
    if case["op"] == "append_head_major":
        pages = [x.swapaxes(1, 2) for x in pages]
    i = np.arange(case["tokens"])
    return tokens, pages, order[i // page_size] * page_size + i % page_size


def setup(case: harness.Case, seed: int) -> harness.Run:
    tokens, pages, slots = inputs(case, seed)
    index, options = cupy.asarray(slots), {}
    if case["cache"] == FLOAT8["cache"] and case["op"] != "copy":
        options = {"k_scale": SCALE, "v_scale": SCALE}
    if case["op"] == "append_per_head":
        options = dict.fromkeys(options, cupy.full(case["heads"], SCALE, cupy.float32))
    if case["op"] == "copy":
        count = case["tokens"] // case["page_size"]
        ids = page_order(case, seed).astype(np.int32)[: 2 * count]
        pairs = cupy.asarray(ids[:count]), cupy.asarray(ids[count:])
        return harness.Run(lambda: copy_pages(*pages, *pairs), lambda: wrong_pages(pages, ids.reshape(2, -1)))
    if case["op"] == "gather":
        out = dict(zip("kv", tokens))
        call = lambda: gather_kv(*pages, index, **options, **out)  # noqa: E731
        return harness.Run(call, lambda: wrong(case, tokens, pages, slots, options), call)
    if case["op"] == "append_rotary":
        positions = cupy.arange(case["tokens"])
        rng = cupy.random.default_rng(seed)
        angles = normal((case["tokens"], case["head_dim"] // 2), dtype_named("float32"), rng)
        options |= {"rotary_cos": cupy.cos(angles), "rotary_sin": cupy.sin(angles), "positions": positions}
    call = lambda: append_kv(*tokens, *pages, index, **options)  # noqa: E731
    return harness.Run(call, lambda: wrong(case, tokens, pages, slots, options), call)


def wrong(case: harness.Case, tokens, pages, slots: np.ndarray, options: dict) -> float:
    """0 if 64 tokens are what they must be (K too unless it was rotated), bit for bit; else infinity."""
    some = np.random.default_rng(0).integers(0, len(slots), 64)
    page, offset = np.divmod(slots[some], case["page_size"])
    outside = [as_bits(x)[some].get().view(x.dtype) for x in tokens]
    inside = [as_bits(x)[page, offset].get().view(x.dtype)[:, None] for x in pages]
    scales = {name: np.float32(SCALE) for name in options if name.endswith("scale")}
    if case["op"] == "gather":
        found = reference.gather_kv(*inside, np.arange(64), **scales)
        pairs = [(x, y.astype(np.float32).astype(x.dtype)) for x, y in zip(outside, found)]
    else:
        expected = [np.zeros_like(x) for x in inside]
        reference.append_kv(*outside, *expected, np.arange(64), **scales)
        pairs = list(zip(inside, expected))[case["op"] == "append_rotary" :]
    return 0.0 if all(x.tobytes() == y.tobytes() for x, y in pairs) else np.inf


def wrong_pages(pages, ids: np.ndarray) -> float:
    source, target = ids[:, :: max(ids.shape[1] // 64, 1)]
    same = [bool((as_bits(x)[source] == as_bits(x)[target]).all()) for x in pages]
    return 0.0 if all(same) else np.inf


def setup_flashinfer(case: harness.Case, seed: int) -> harness.Run | None:
    """FlashInfer's append_paged_kv_cache: one sequence, its pages in the same random order; no quantisation."""
    try:
        import flashinfer
        import torch
    except ImportError:
        return None
    if case["op"] not in ("append", "append_head_major") or case["cache"] != case["dtype"]:
        raise NotImplementedError("no such function")
    tokens, pages, _ = inputs(case, seed)
    layout = "HND" if case["op"] == "append_head_major" else "NHD"
    cache = tuple(torch.from_dlpack(x.swapaxes(1, 2) if layout == "HND" else x) for x in pages)
    k, v = (torch.from_dlpack(x) for x in tokens)
    count = -(-case["tokens"] // case["page_size"])
    arrays = {
        "batch_indices": np.zeros(case["tokens"], np.int32),
        "positions": np.arange(case["tokens"], dtype=np.int32),
        "kv_indices": page_order(case, seed)[:count].astype(np.int32),
        "kv_indptr": np.array([0, count], np.int32),
        "kv_last_page_len": np.array([(case["tokens"] - 1) % case["page_size"] + 1], np.int32),
    }
    on_device = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    place = on_device.pop("batch_indices"), on_device.pop("positions"), cache
    return harness.Run(lambda: flashinfer.append_paged_kv_cache(k, v, *place, *on_device.values(), kv_layout=layout))


if __name__ == "__main__":
    harness.main("paged", CASES, setup, bytes_moved=bytes_moved, peers={"flashinfer": setup_flashinfer}, l2="warm")
