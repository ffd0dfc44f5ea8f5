"""Cases of attention as values, and the bound of their errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import cuattn
from cuattn import reference
from cuattn.testing import attention_bound
from cuattn.testing.profiles import as_dtype
from tests.backends import moved
from tests.decode_cases import FLOAT8, NOTHING, by_head

KINDS = ("dense", "packed", "pages")
LAYOUTS = ("separate", "interleaved", "head major", "odd offset", "flipped")
CONTROLS = [  # what changes scores and masks
    {},
    {"causal": True},
    {"causal": True, "window": (7, 0)},
    {"window": (40, 2)},
    {"window": (0, -1)},
    {"causal": True, "softcap": 2.0},
    {"alibi": 1, "causal": True},
    {"alibi": 2, "softcap": 15.0, "window": (100, 30)},
    {"sinks": True, "causal": True},
    {"sinks": True, "window": (0, 0), "sm_scale": -0.5},
    {"mask": "bool"},
    {"mask": "bits", "causal": True},
]


@dataclass(frozen=True)
class AttentionCase:
    """Sequences of pairs (seqlen_q, seqlen_k), among NaN. Dense ones all have the first pair."""

    lengths: tuple[tuple[int, int], ...] = ((10, 0), (3, 1), (1, 7))
    kind: str = "packed"
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    dtype: str = "float16"
    float8: bool = False
    layout: str = "separate"
    index: str = "int32"
    control: int = 0
    used: bool = False  # seqused_k says how long the keys are, and there are more
    padding: int = 0  # rows before and behind those of all sequences
    seed: int = 0

    def place(self, values: np.ndarray) -> np.ndarray:
        """The same values among NaN, in the layout of the case; the heads are the last axis but one."""
        *rows, h, d = values.shape
        if self.layout == "head major":
            x = np.full((*rows[:-1], h, rows[-1] + 1, d), np.nan, values.dtype).swapaxes(-2, -3)[..., :-1, :, :]
        elif self.layout == "flipped":
            x = np.full((*rows, h, d), np.nan, values.dtype)[(slice(None, None, -1),) * (len(rows) + 1)]
        elif self.layout == "interleaved":
            x = np.full((*rows, 2, h, d + 8), np.nan, values.dtype)[..., 1, :, :d]
        else:
            x = np.full(values.size + 1, np.nan, values.dtype)[self.layout == "odd offset" :][: values.size].reshape(values.shape)
        x[...] = values
        return x

    def arrays(self) -> dict:
        """All arguments on the host."""
        rng, dtype, batch = np.random.default_rng([self.seed, 3]), as_dtype(self.dtype), len(self.lengths)
        stored = FLOAT8 if self.float8 else dtype
        control = dict(CONTROLS[self.control])
        mask = control.pop("mask", "")

        def normal(shape, d, kind, scale=1.0):
            return self.place((scale * rng.standard_normal((*shape, d))).astype(kind))

        if self.kind == "dense":
            (nq, nk), given = self.lengths[0] if batch else (2, 2), {}
            given["q"] = normal((batch, nq, self.heads[0]), self.head_dims[0], dtype, 2.0)
            for name, d in zip("kv", self.head_dims):
                given[name] = normal((batch, nk, self.heads[1]), d, stored)
            if mask:
                shape = [(batch, self.heads[0], nq, nk), (nq, nk), (batch, 1, 1, nk)][self.seed % 3]
                kept = rng.random(shape) < 0.7
                given["mask"] = np.packbits(kept, axis=-1, bitorder="little") if mask == "bits" else kept
        else:
            given = self.packed(rng, normal, dtype, stored)
        given |= by_head(rng, control, self, batch)
        return given | control

    def packed(self, rng, normal, dtype, stored) -> dict:
        """Packed queries; keys packed or in pages."""
        ends_q = self.padding + np.cumsum([0, *(n for n, _ in self.lengths)])
        given = {"q": normal((ends_q[-1] + self.padding, self.heads[0]), self.head_dims[0], dtype, 2.0)}
        given["q"][: ends_q[0]] = given["q"][ends_q[-1] :] = np.nan
        given["cu_seqlens_q"] = np.repeat(ends_q.astype(self.index), 2)[::2]
        lengths = np.array([n for _, n in self.lengths], np.int64)
        room = lengths + 5 * self.used
        ends_k = self.padding + np.concatenate([[0], np.cumsum(room)])
        given["cu_seqlens_k"] = np.repeat(ends_k.astype(self.index), 2)[::2]
        if self.used:
            given["seqused_k"] = np.repeat(lengths.astype(self.index), 2)[::2]
        if self.kind == "packed":
            for name, d in zip("kv", self.head_dims):
                given[name] = normal((ends_k[-1] + self.padding, self.heads[1]), d, stored)
                there = np.zeros(len(given[name]), bool)
                for begin, n in zip(ends_k, lengths):
                    there[begin : begin + n] = True
                given[name][~there] = np.nan
            return given
        pages = -(-lengths // self.page_size)
        ids, start = rng.permutation(int(pages.sum()) + 2), 0
        table = np.full((len(lengths), int((-(-room // self.page_size)).max(initial=0)) + 1), NOTHING, self.index)
        for name, d in zip("kv", self.head_dims):
            given[name] = normal((len(ids), self.page_size, self.heads[1]), d, stored)
        there = np.zeros(given["k"].shape[:2], bool)
        for b, (n, count) in enumerate(zip(lengths.tolist(), pages.tolist())):
            table[b, :count] = ids[start : start + count]
            start += count
            for j in range(count):
                there[table[b, j], : min(self.page_size, n - j * self.page_size)] = True
        given["k"][~there] = given["v"][~there] = np.nan
        return given | {"block_table": np.repeat(table, 2, axis=1)[:, ::2]}


def expected_of(given: dict) -> tuple[np.ndarray, np.ndarray]:
    """The definition."""
    if "cu_seqlens_q" in given:
        return reference.attention_varlen(**given)
    mask = given.get("mask")
    if mask is not None and mask.dtype == np.uint8:
        count = given["k"].shape[1]
        mask = np.broadcast_to(mask, (*mask.shape[:-1], -(-count // 8)))
        mask = np.unpackbits(mask, axis=-1, bitorder="little", count=count).astype(bool)
    return reference.attention(**{**given, "mask": mask})


def run(backend, given: dict, **more):
    """The state on a backend."""
    function = cuattn.attention_varlen if "cu_seqlens_q" in given else cuattn.attention
    return function(**moved(backend, given), return_state=True, **more)


def bounds(given: dict, expected: tuple[np.ndarray, np.ndarray], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """`attention_bound` of a case, with the factors that `decode_cases.decode_bounds` derives.

    A tile of 32 keys: one rescaling for each. The sink is one more key and one more split. The largest |q.k| over all keys
    of the call stands for that of each row's own keys. On tensor cores, which take 16-bit arrays and sizes that are
    multiples of 8, a sum may be cut off instead of rounded, so 2 D in the place of D, and weights are stored as q: those of
    half below 2^-14 err by 2^-25, where the largest is 2^8, so n 2^-33 V.
    """
    q, k, v = (abs(np.nan_to_num(given[n].astype(float))) for n in "qkv")
    scales = [np.asarray(given.get(f"{n}_scale", 1.0)).reshape(-1, 1) for n in "kv"]
    k, v, d = k * scales[0], v * scales[1], q.shape[-1]
    group = q.shape[-2] // max(k.shape[-2], 1)
    top_k = np.repeat(k.reshape(-1, *k.shape[-2:]).max(0, initial=0), group, 0)  # (num_heads, head_dim)
    a = abs(given.get("sm_scale", d**-0.5)) * (q * top_k).sum(-1)
    longest = k.shape[1] if "cu_seqlens_q" not in given else int(np.prod(k.shape[:-2]))
    far = np.asarray(given.get("alibi_slopes", 0.0)).max(initial=0) * (longest + q.shape[-3] if q.ndim > 2 else longest)
    tensor_cores = as_dtype(dtype) != np.float32 and d % 8 == 0 and v.shape[-1] % 8 == 0
    more = (14 if given.get("softcap") else 6) + d * tensor_cores
    out, lse = attention_bound(
        *expected, head_dim=d, num_keys=longest + 1, tile=32, sm_scale=1.0, qk=((d + more) * a + 5 * far) / (d + 3) + far,
        v=v.max(initial=0), dtype=dtype, num_splits=2, p_dtype=dtype if tensor_cores else None,
    )  # fmt: skip
    return out + (longest * 2.0**-33 * v.max(initial=0) if tensor_cores and dtype == "float16" else 0.0), lse
