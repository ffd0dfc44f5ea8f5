"""A small random Llama in a GGUF file, and an independent float64 model of it that knows what rounding does to it.

How far an implementation may be: worst-case bounds grow tenfold with each product and say nothing after two layers. So
the sensitivity is measured, by Monte Carlo arithmetic (Parker 1997): the float64 model is run again with random errors,
at every place where `cuattn.llama` rounds, of the size that rounding has there. With u = 2^-24 and u_T the unit
roundoff of the dtype T in which activations are stored, uniform within

    stored in T             u_T |x|, + 2^-25 for float16, whose small numbers are spaced evenly
    x @ W, n terms          sqrt(n) u abs(x) @ abs(W)         n roundings of partial sums, each u of that at most
    rms, softmax weights    (n + 8)^0.5 u relative, n terms in the sum
    everything else         4 u |x|: functions and products of a few operations

The logits of an implementation are off by a sum of many such errors, near enough normal, so the bound is 8 standard
deviations, taken over all runs and the vocabulary: one in 10^15 is beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

U = 2.0**-24
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ t"]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"


def bytes_as_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones are their own, the others follow from U+0100 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in own else chr(next(others)) for b in range(256)]


VOCABULARY = [*WORDS, *bytes_as_letters(), *(merge.replace(" ", "") for merge in MERGES)]


class Sizes(NamedTuple):
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    feed_forward: int = 96
    context: int = 512
    theta: float = 10000.0
    eps: float = 2.0**-17  # exact in the file, which has float32


SMALL = Sizes()
FLOAT32 = np.dtype(np.float32)


def write(path: Path, sizes: Sizes = SMALL, seed: int = 0, tied: bool = False, scaled: bool = False, more: Callable = lambda writer: None, **fields: object) -> dict:
    """Write a model, to which `more` adds, and return its tensors as a reader finds them."""
    rng, kinds = np.random.default_rng(seed), gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, str(fields.get("architecture", "llama")))
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_layer_norm_rms_eps(sizes.eps)
    writer.add_rope_freq_base(sizes.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(fields.get("pre", "smollm")))
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(WORDS) + [1] * (len(VOCABULARY) - len(WORDS) - 1) + [int(fields.get("last", 1))])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    writer.add_chat_template(str(fields.get("template", CHATML)))
    tensors: dict[str, np.ndarray] = {}

    def tensor(name: str, *shape: int, scale: float = 1.0, kind: gguf.GGMLQuantizationType = kinds.F32) -> None:
        values = rng.standard_normal(shape) * scale / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.3 * rng.standard_normal(shape)
        stored = gguf.quantize(values.astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
        tensors[name] = gguf.dequantize(stored, kind).astype(np.float64)

    wide = sizes.heads * sizes.head_dim
    tensor("token_embd", len(VOCABULARY), sizes.hidden, scale=3)
    for i in range(sizes.layers):
        tensor(f"blk.{i}.attn_norm", sizes.hidden)
        tensor(f"blk.{i}.attn_q", wide, sizes.hidden)
        tensor(f"blk.{i}.attn_k", sizes.kv_heads * sizes.head_dim, sizes.hidden)
        tensor(f"blk.{i}.attn_v", sizes.kv_heads * sizes.head_dim, sizes.hidden)
        tensor(f"blk.{i}.attn_output", sizes.hidden, wide, scale=0.5, kind=kinds.F16)
        tensor(f"blk.{i}.ffn_norm", sizes.hidden)
        tensor(f"blk.{i}.ffn_gate", sizes.feed_forward, sizes.hidden)
        tensor(f"blk.{i}.ffn_up", sizes.feed_forward, sizes.hidden)
        tensor(f"blk.{i}.ffn_down", sizes.hidden, sizes.feed_forward, scale=0.5, kind=kinds.Q8_0)
    tensor("output_norm", sizes.hidden)
    if not tied:
        tensor("output", len(VOCABULARY), sizes.hidden, scale=3)
    if scaled:
        tensor("rope_freqs", sizes.head_dim // 2)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


class Noise:
    """Random errors as large as the roundings of an implementation; none without a seed."""

    def __init__(self, dtype: np.dtype, seed: int | None) -> None:
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.unit, self.least = (U, 0.0) if dtype == np.float32 else (2.0**-11, 2.0**-25)

    def off(self, x: np.ndarray, amount: np.ndarray | float) -> np.ndarray:
        return x if self.rng is None else x + amount * self.rng.uniform(-1, 1, x.shape)

    def few(self, x: np.ndarray) -> np.ndarray:
        return self.off(x, 4 * U * abs(x))

    def stored(self, x: np.ndarray) -> np.ndarray:
        return self.off(x, self.unit * abs(x) + self.least)

    def product(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return self.off(x @ w, len(w) ** 0.5 * U * (abs(x) @ abs(w)))

    def terms(self, x: np.ndarray, n: int) -> np.ndarray:
        return self.off(x, (n + 8) ** 0.5 * U * abs(x))


def norm(x: np.ndarray, weight: np.ndarray, eps: float, noise: Noise) -> np.ndarray:
    r = noise.terms(np.sqrt((x**2).mean(-1, keepdims=True) + eps), x.shape[-1])
    return noise.few(x / r * weight)


def rotate(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Pairs of neighbours as complex numbers, (n, heads, head_dim)."""
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, noise: Noise) -> np.ndarray:
    """Causal, (n, heads, head_dim)."""
    n, heads, head_dim = q.shape
    out = np.empty_like(q)
    for h in range(heads):
        g = h * k.shape[1] // heads
        s = noise.product(q[:, h] * head_dim**-0.5, k[:, g].T)
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        p = noise.stored(p / noise.terms(p.sum(1, keepdims=True), n))  # kernels store weights too
        out[:, h] = noise.product(p, v[:, g])
    return out


def run(tensors: dict[str, np.ndarray], tokens: list[int], sizes: Sizes, dtype: np.dtype, seed: int | None, kept: dict | None = None) -> np.ndarray:
    """Logits after each token of a text, (n, vocabulary), of weights stored in a dtype."""
    def matrix(name: str) -> np.ndarray:
        return tensors[name].astype(dtype).astype(np.float64).T

    noise, n = Noise(dtype, seed), len(tokens)
    frequency = sizes.theta ** (-2 * np.arange(sizes.head_dim // 2) / sizes.head_dim) / tensors.get("rope_freqs", 1.0)
    angle = np.outer(np.arange(n), frequency)
    x = tensors["token_embd"][tokens]
    for i in range(sizes.layers):
        block = f"blk.{i}"
        h = noise.stored(norm(x, tensors[f"{block}.attn_norm"], sizes.eps, noise))
        q, k, v = (noise.stored(noise.product(h, matrix(f"{block}.attn_{name}"))) for name in "qkv")
        q, k, v = (part.reshape(n, -1, sizes.head_dim) for part in (q, k, v))
        q, k = (noise.stored(noise.few(rotate(part, angle))) for part in (q, k))
        if kept is not None:
            kept |= {f"q_{i}": q, f"k_{i}": k, f"v_{i}": v}
        a = noise.stored(attention(q, k, v, noise)).reshape(n, -1)
        x = noise.few(x + noise.stored(noise.product(a, matrix(f"{block}.attn_output"))))
        h = noise.stored(norm(x, tensors[f"{block}.ffn_norm"], sizes.eps, noise))
        gate, up = (noise.stored(noise.product(h, matrix(f"{block}.ffn_{name}"))) for name in ("gate", "up"))
        h = noise.stored(noise.few(gate / (1 + np.exp(-gate)) * up))
        x = noise.few(x + noise.stored(noise.product(h, matrix(f"{block}.ffn_down"))))
    head = tensors.get("output", tensors["token_embd"]).T
    return noise.product(norm(x, tensors["output_norm"], sizes.eps, noise), head)


def logits(
    tensors: dict[str, np.ndarray], tokens: list[int], sizes: Sizes = SMALL, dtype: np.dtype = FLOAT32
) -> tuple[np.ndarray, np.ndarray]:
    """After each token of a text, (n, vocabulary), and how far an implementation may be that stores `dtype`, (n, 1)."""
    exact = run(tensors, tokens, sizes, dtype, None)
    off = np.stack([run(tensors, tokens, sizes, dtype, seed) - exact for seed in range(8)])
    return exact, 8 * np.sqrt((off**2).mean((0, 2)))[:, None]


def activations(tensors: dict[str, np.ndarray], tokens: list[int], sizes: Sizes = SMALL) -> tuple[dict, dict]:
    """Queries and keys after rotary embedding, and values, of each layer in float32; and the bounds."""
    exact: dict[str, np.ndarray] = {}
    run(tensors, tokens, sizes, np.dtype(np.float32), None, exact)
    off: dict[str, list[np.ndarray]] = {name: [] for name in exact}
    for seed in range(8):
        kept: dict[str, np.ndarray] = {}
        run(tensors, tokens, sizes, np.dtype(np.float32), seed, kept)
        for name in exact:
            off[name].append(kept[name] - exact[name])
    return exact, {name: 8 * np.std(off[name]) for name in exact}
