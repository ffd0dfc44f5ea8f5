"""Cases of decode as values, and the bound of their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import float8_e4m3fn

from cuattn import reference
from cuattn._plan_decode import splits_within
from cuattn.decode import decode
from cuattn.testing import attention_bound
from cuattn.testing.profiles import as_dtype
from cuattn.testing.tolerance import U, half_subnormal, unit_roundoff
from tests.backends import moved
from tests.paged_cases import host

FLOAT8 = np.dtype(float8_e4m3fn)
NOTHING = 2**31 - 1  # a page id that must not be followed
LAYOUTS = ("separate", "interleaved", "head major", "odd offset")
CONTROLS = [  # what changes scores and masks
    {},
    {"causal": False},
    {"window": (3, 0)},
    {"window": (40, 2), "causal": False},
    {"window": (0, -1)},
    {"softcap": 2.0},
    {"alibi": 1},
    {"alibi": 1, "causal": False},
    {"alibi": 2, "softcap": 15.0, "window": (100, -1)},
    {"sinks": True},
    {"sinks": True, "window": (0, 0), "sm_scale": -0.5},
]


@dataclass(frozen=True)
class DecodeCase:
    """Queries and a cache whose every other element is NaN."""

    lengths: tuple[int, ...] = (0, 1, 37)
    seqlen_q: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    dtype: str = "float16"
    float8: bool = False
    layout: str = "separate"
    index: str = "int32"
    control: int = 0
    seed: int = 0
    new: int | None = None  # tokens that come with the call
    rotary: str = ""  # "halves" or "interleaved", then as much of head_dim as can be in sevenths, then "wide" tables or not

    def pages(self, values: np.ndarray) -> np.ndarray:
        """NaN in the layout of the case, (num_pages, page_size, heads, head_dim); `values` is any array of that shape."""
        n, p, h, d = values.shape
        if self.layout == "head major":
            return np.full((n, h, p, d), np.nan, values.dtype).swapaxes(1, 2)
        if self.layout == "interleaved":
            return np.full((n, 2, p, h, d), np.nan, values.dtype)[:, 1]
        return np.full(values.size + 1, np.nan, values.dtype)[self.layout == "odd offset" :][: values.size].reshape(values.shape)

    def arrays(self) -> dict:
        """All arguments on the host."""
        rng, batch, dtype = np.random.default_rng([self.seed, 7]), len(self.lengths), as_dtype(self.dtype)
        used = [-(-(n + (self.new or 0)) // self.page_size) for n in self.lengths]
        ids = rng.permutation(sum(used) + 2)  # two free pages
        table = np.full((batch, max(used, default=0) + 2), NOTHING, self.index)
        shape, given = (len(ids), self.page_size, self.heads[1]), {}
        for side, d in zip(("k_pages", "v_pages"), self.head_dims):
            values = rng.standard_normal((*shape, d)).astype(FLOAT8 if self.float8 else dtype)
            given[side], start = self.pages(values), 0
            for b, (n, pages) in enumerate(zip(self.lengths, used)):
                table[b, :pages] = ids[start : start + pages]
                start += pages
                for j in range(pages):
                    filled = slice(0, min(self.page_size, n - j * self.page_size))
                    given[side][table[b, j], filled] = values[table[b, j], filled]
        q = np.full((batch, self.seqlen_q, self.heads[0] + 1, self.head_dims[0] + 8), np.nan, dtype)
        q = q[:, :, 1:, : self.head_dims[0]]
        q[...] = 2 * rng.standard_normal(q.shape)
        lengths = np.repeat(np.array(self.lengths, self.index), 2)[::2]
        given |= {"q": q, "block_table": np.repeat(table, 2, axis=1)[:, ::2], "cache_seqlens": lengths}
        control = dict(CONTROLS[self.control])
        given |= by_head(rng, control, self, batch)
        if self.new is not None:
            given |= self.fresh(self.new)
        return given | control

    def fresh(self, new: int) -> dict:
        """New tokens among NaN, and tables with not a row more than is needed."""
        rng, given = np.random.default_rng([self.seed, 8]), {}
        for name, d in zip("kv", self.head_dims):
            x = np.full((len(self.lengths), new, self.heads[1] + 1, d + 8), np.nan, as_dtype(self.dtype))
            given[name] = x[:, :, 1:, :d]
            given[name][...] = 2 * rng.standard_normal(given[name].shape)
        if self.rotary:
            style, sevenths, wide = self.rotary.split()
            half = max(self.head_dims[0] * int(sevenths) // 14, 1)
            rows = max(self.lengths, default=0) + max(new, self.seqlen_q if self.local() else 1, 1)
            angles = rng.uniform(0, 7, (rows, half))
            for name, f in (("rotary_cos", np.cos), ("rotary_sin", np.sin)):
                table = np.full((rows, half + 8), np.nan, np.float32 if wide == "wide" else as_dtype(self.dtype))[:, :half]
                table[...] = f(angles)
                given[name] = table
            given["rotary_interleaved"] = style == "interleaved"
        return given

    def local(self) -> bool:
        """Whether queries stand at positions of their own."""
        return CONTROLS[self.control].get("causal", True) or CONTROLS[self.control].get("window", (-1, -1)) != (-1, -1)


def by_head(rng: np.random.Generator, control: dict, case: Any, batch: int) -> dict:
    """Slopes and sinks, if they are taken out of `control`, and scales of a case of decode or attention."""
    given, (num_heads, num_kv_heads) = {}, case.heads
    if axes := control.pop("alibi", 0):
        given["alibi_slopes"] = (rng.random((batch, num_heads)[-axes:]) / 4).astype(np.float32)
    if control.pop("sinks", False):
        given["sinks"] = np.repeat(rng.standard_normal(num_heads).astype(np.float32), 2)[::2]
    if case.float8:
        scales = [0.75, np.exp(rng.standard_normal(2 * num_kv_heads)).astype(np.float32)[::2]]
        given |= {"k_scale": scales[case.seed % 2], "v_scale": scales[1 - case.seed % 2]}
    return given


PAGES = ("k_pages", "v_pages")
NEW = ("k", "v", "rotary_cos", "rotary_sin", "rotary_interleaved")  # arguments that only calls with new tokens have


def turned(given: dict, local: bool) -> tuple[np.ndarray, np.ndarray]:
    """The queries as decode rotates them, float64, and the error of doing that in float32 and rounding to their dtype."""
    q, exact = given["q"], given["q"].astype(float)
    if "rotary_cos" not in given:
        return exact, np.zeros(q.shape)
    at = np.asarray(given["cache_seqlens"])[:, None] + local * np.arange(q.shape[1])
    tables, style = (given["rotary_cos"], given["rotary_sin"]), {"interleaved": given["rotary_interleaved"]}
    size = rotated_size(exact, *tables, at, style)
    exact = reference.apply_rotary(exact, *tables, at, **style)
    return exact, 3 * U * size * (1 + 2 * unit_roundoff(q.dtype)) + unit_roundoff(q.dtype) * abs(exact) + half_subnormal(q.dtype)


def rotated_size(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, at: np.ndarray, style: dict) -> np.ndarray:
    """|a cos| + |b sin|: two products and their sum, each rounded, err by 3 u of it at most."""
    x, cos, sin = (abs(y.astype(float)) for y in (x, cos, sin))
    return np.maximum(*(reference.apply_rotary(x, cos, s, at, **style) for s in (sin, -sin)))


def run_and_pages(backend, arguments: dict, **more):
    """The state, and the pages afterwards."""
    there = moved(backend, arguments)
    state = decode(**there, return_state=True, **more)
    return state, [host(backend, there[name]) for name in PAGES]


def slots_of(given: dict) -> np.ndarray:
    """Where the new tokens belong, (batch, seqlen_new)."""
    return reference.slots(given["block_table"], given["cache_seqlens"], given["k"].shape[1], given["k_pages"].shape[1])


def alone(given: dict, b: int) -> dict:
    """Sequence b as a batch of its own."""
    own = ("q", "k", "v", "block_table", "cache_seqlens", "cache_leftpad")
    return {name: x[b : b + 1] if name in own else x for name, x in given.items()}


def without_new(given: dict, pages: list[np.ndarray], q: np.ndarray) -> dict:
    """The call that the rest of decode is, after new tokens were written to `pages` and queries were rotated to `q`."""
    lengths = given["cache_seqlens"] + np.int32(given["k"].shape[1])
    rest = {name: x for name, x in given.items() if name not in NEW}
    return rest | {"q": q, "k_pages": pages[0], "v_pages": pages[1], "cache_seqlens": lengths}


def decode_bounds(
    given: dict, expected: tuple[np.ndarray, np.ndarray], dtype: str, q_error: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """`attention_bound` of a case.

    Its score error (D + 3) u A is for a product and a scale. Here the product takes D roundings, and the factor 5:
    sm_scale in float32, k_scale, log2(e) and the product of both, the product with q.k. With softcap the division by it
    takes the place of log2(e), tanhf adds 4u (2 ulp), softcap log2(e) and its product 4: D + 13, of a score that tanh only
    makes smaller. ALiBi adds a term of at most B = slope * distance: slope, log2(e), its product, that with the distance,
    and the subtraction, which rounds A + B: so in all ((D + 6 [+ 8]) A + 5 B) u. Scores differ by at most 2 (A + B).
    All of this is (D + 3) u a with a = ((D + 6 [+ 8]) A + 5 B) / (D + 3) + B.

    A tile of 2 keys counts at least the rescalings there are: one per step of 4 keys or more, one when streams merge.
    A sink is one more key and one more split. k_scale and v_scale enlarge scores and values.

    Queries that are not exact move a score by sm_scale sum_d q_error_d |k_d|: more to the score's error, in units of u.

    On tensor cores, which take 16-bit queries and sizes that are multiples of 16, a sum may be cut off instead of rounded:
    2 D in the place of D. Weights are stored as q, or as half for a float8 cache; in half what is below 2^-14 errs by
    2^-25, where the largest weight is at least 2^8: n 2^-33 V. There bfloat16 queries become half, scaled so that their
    largest is 2^12 or more: they err by 2^-37 of it.
    """
    q = np.abs(given["q"].astype(float))
    batch, seqlen_q, num_heads, d = q.shape
    float8, head_dim_v = given["k_pages"].dtype == FLOAT8, given["v_pages"].shape[3]
    tensor_cores = as_dtype(dtype) != np.float32 and d % 16 == 0 and head_dim_v % 16 == 0
    weights = ("float16" if float8 else dtype) if tensor_cores else None
    narrowed = 2.0**-37 * q.max(-1, keepdims=True, initial=0) if tensor_cores and float8 and dtype == "bfloat16" else 0.0
    q_error = np.broadcast_to(q_error + narrowed, q.shape)
    num_kv_heads, lengths = given["k_pages"].shape[2], np.asarray(given["cache_seqlens"])
    longest, of_head = int(lengths.max(initial=0)), np.arange(num_heads) // max(num_heads // num_kv_heads, 1)
    a, top, off = np.zeros((3, batch, seqlen_q, num_heads))
    for b in range(batch):
        keys, values = (tokens(given, side, b)[:, of_head] for side in "kv")
        a[b] = np.nanmax(np.einsum("ihd,jhd->jih", q[b], keys), axis=0, initial=0)
        off[b] = np.nanmax(np.einsum("ihd,jhd->jih", q_error[b], keys), axis=0, initial=0)
        top[b] = np.nanmax(values, axis=(0, 2), initial=0)
    a, off = (x * abs(given.get("sm_scale", d**-0.5)) for x in (a, off))
    far = np.broadcast_to(given.get("alibi_slopes", 0.0), (batch, num_heads))[:, None] * longest
    more = (14 if given.get("softcap") else 6) + d * tensor_cores
    # On tensor cores: leaves of a split, splits of a group, groups of 512 tokens at least. Else: splits, and the sink.
    merges = 8 + -(-longest // 512) if tensor_cores else splits_within(longest, num_kv_heads) + 1
    out, lse = attention_bound(
        *expected, head_dim=d, num_keys=longest + 1, tile=2, sm_scale=1.0, p_dtype=weights,
        qk=((d + more) * a + 5 * far + off / U) / (d + 3) + far, v=top, dtype=dtype, num_splits=merges,
    )  # fmt: skip
    return out + (longest * 2.0**-33 * top[..., None] if weights == "float16" else 0.0), lse


def tokens(given: dict, side: str, b: int) -> np.ndarray:
    """Sizes of the keys or values of a sequence, (length, num_kv_heads, head_dim), scaled; NaN where there are none."""
    pages, length = given[f"{side}_pages"], int(given["cache_seqlens"][b])
    ids = given["block_table"][b, : -(-length // pages.shape[1])]
    found = np.abs(pages[np.clip(ids, 0, len(pages) - 1)].astype(float).reshape(-1, *pages.shape[2:])[:length])
    return found * np.asarray(given.get(f"{side}_scale", 1.0)).reshape(-1, 1)


def absent_keys_left_out(given: dict) -> tuple[np.ndarray, np.ndarray]:
    """The definition, where keys of pages that don't exist are masked."""
    q, table, page_size = given["q"], given["block_table"], given["k_pages"].shape[1]
    out, lse = np.zeros((*q.shape[:3], given["v_pages"].shape[3])), np.zeros(q.shape[:3])
    for b, n in enumerate(given["cache_seqlens"].tolist()):
        ids = np.repeat(table[b].astype(np.int64), page_size)[:n]
        there = (ids >= 0) & (ids < len(given["k_pages"]))
        k, v = (np.nan_to_num(given[x][np.where(there, ids, 0), np.arange(n) % page_size].astype(float)) for x in ("k_pages", "v_pages"))
        out[b], lse[b] = (x[0] for x in reference.attention(q[b : b + 1], k[None], v[None], causal=True, mask=there))
    return out, lse
