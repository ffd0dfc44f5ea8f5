"""Cases of decode as values, and the bound of their errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import float8_e4m3fn

from cuattn._plan_decode import splits_within
from cuattn.testing import attention_bound
from cuattn.testing.profiles import as_dtype

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
        used = [-(-n // self.page_size) for n in self.lengths]
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
        if axes := control.pop("alibi", 0):
            given["alibi_slopes"] = (rng.random((batch, self.heads[0])[-axes:]) / 4).astype(np.float32)
        if control.pop("sinks", False):
            given["sinks"] = np.repeat(rng.standard_normal(self.heads[0]).astype(np.float32), 2)[::2]
        if self.float8:
            scales = [0.75, np.exp(rng.standard_normal(2 * self.heads[1])).astype(np.float32)[::2]]
            given |= {"k_scale": scales[self.seed % 2], "v_scale": scales[1 - self.seed % 2]}
        return given | control


def decode_bounds(given: dict, expected: tuple[np.ndarray, np.ndarray], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """`attention_bound` of a case.

    Its score error (D + 3) u A is for a product and a scale. Here the product takes D roundings, and the factor 5:
    sm_scale in float32, k_scale, log2(e) and the product of both, the product with q.k. With softcap the division by it
    takes the place of log2(e), tanhf adds 4u (2 ulp), softcap log2(e) and its product 4: D + 13, of a score that tanh only
    makes smaller. ALiBi adds a term of at most B = slope * distance: slope, log2(e), its product, that with the distance,
    and the subtraction, which rounds A + B: so in all ((D + 6 [+ 8]) A + 5 B) u. Scores differ by at most 2 (A + B).
    All of this is (D + 3) u a with a = ((D + 6 [+ 8]) A + 5 B) / (D + 3) + B.

    A tile of 2 keys counts at least the rescalings there are: one per step of 4 keys or more, one when streams merge.
    A sink is one more key and one more split. k_scale and v_scale enlarge scores and values.
    """
    q = np.abs(given["q"].astype(float))
    batch, seqlen_q, num_heads, d = q.shape
    num_kv_heads, lengths = given["k_pages"].shape[2], np.asarray(given["cache_seqlens"])
    longest, of_head = int(lengths.max(initial=0)), np.arange(num_heads) // max(num_heads // num_kv_heads, 1)
    a, top = np.zeros((batch, seqlen_q, num_heads)), np.zeros((batch, seqlen_q, num_heads))
    for b in range(batch):
        keys, values = (tokens(given, side, b)[:, of_head] for side in "kv")
        a[b] = np.nanmax(np.einsum("ihd,jhd->jih", q[b], keys), axis=0, initial=0)
        top[b] = np.nanmax(values, axis=(0, 2), initial=0)
    a *= abs(given.get("sm_scale", d**-0.5))
    far = np.broadcast_to(given.get("alibi_slopes", 0.0), (batch, num_heads))[:, None] * longest
    more = 14 if given.get("softcap") else 6
    return attention_bound(
        *expected, head_dim=d, num_keys=longest + 1, tile=2, sm_scale=1.0, qk=((d + more) * a + 5 * far) / (d + 3) + far,
        v=top, dtype=dtype, num_splits=splits_within(longest, num_kv_heads) + 1,
    )  # fmt: skip


def tokens(given: dict, side: str, b: int) -> np.ndarray:
    """Sizes of the keys or values of a sequence, (length, num_kv_heads, head_dim), scaled; NaN where there are none."""
    pages, length = given[f"{side}_pages"], int(given["cache_seqlens"][b])
    ids = given["block_table"][b, : -(-length // pages.shape[1])]
    found = np.abs(pages[np.clip(ids, 0, len(pages) - 1)].astype(float).reshape(-1, *pages.shape[2:])[:length])
    return found * np.asarray(given.get(f"{side}_scale", 1.0)).reshape(-1, 1)
