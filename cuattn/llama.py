"""Text generation by a Llama model on NumPy or CuPy: an example of how to embed cuattn.

`Llama` is the network; its attention is four calls of cuattn. `Engine` runs many sequences over one `PagedKVCache`:
they join and leave between steps, and prompts that begin alike share pages.

>>> model = Llama.load()                                             # doctest: +SKIP
>>> engine = Engine(model, num_pages=256)                            # doctest: +SKIP
>>> request = engine.add(model.tokenizer.encode("1, 2, 3,"), max_tokens=8)   # doctest: +SKIP
>>> while not request.done: engine.step()                            # doctest: +SKIP
>>> model.tokenizer.decode(request.generated)                        # doctest: +SKIP
' 4, 5, 6,'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cuattn
from cuattn._batching import Engine, Request
from cuattn._gguf import Checkpoint, Config, ModelError, default_path, read
from cuattn._sampling import Sampling
from cuattn._tokenizer import Tokenizer

__all__ = ["Config", "Engine", "Llama", "ModelError", "Request", "Sampling"]


class Llama:
    """The network: token ids in, logits of the next token out.

    Parameters
    ----------
    checkpoint : Checkpoint
        Sizes and weights.
    xp : module
        numpy or cupy.
    dtype : dtype, optional
        Of the weights, the pages and what is multiplied; norms, residual sums and logits are float32. Default: float32
        for NumPy, whose float16 products are slow, float16 for CuPy.

    Attributes
    ----------
    config : Config
        Sizes.
    tokenizer : Tokenizer or None
        Set by `load`.
    """

    def __init__(self, checkpoint: Checkpoint, xp: Any = np, dtype: Any = None) -> None:
        self.config, self.xp = checkpoint.config, xp
        self.tokenizer: Tokenizer | None = None
        self.dtype = np.dtype((np.float32 if xp is np else np.float16) if dtype is None else dtype)
        self._layers = [
            {name: xp.asarray(w, np.float32 if w.ndim == 1 else self.dtype) for name, w in layer.items()}
            for layer in checkpoint.layers
        ]
        self._top = {name: xp.asarray(w, np.float32) for name, w in checkpoint.top.items() if name != "inv_freq"}
        angles = np.arange(self.config.max_positions)[:, None] * checkpoint.top["inv_freq"]  # float64
        cos, sin = (xp.asarray(table, np.float32) for table in (np.cos(angles), np.sin(angles)))
        self._rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": True}

    @classmethod
    def load(cls, path: Path | None = None, xp: Any = np) -> Llama:
        """Read a model and its tokenizer from a GGUF file.

        Parameters
        ----------
        path : pathlib.Path, optional
            The file. Default: SmolLM2-135M-Instruct, which the extra `llm` brings.
        xp : module
            numpy or cupy.

        Returns
        -------
        Llama

        Raises
        ------
        ModelError
            If there is no such file or package, or the file is no Llama model.
        """
        checkpoint = read(default_path() if path is None else path)
        model = cls(checkpoint, xp)
        model.tokenizer = Tokenizer(checkpoint.fields)
        return model

    def cache(self, num_pages: int, page_size: int = 16) -> cuattn.PagedKVCache:
        """Pages for the keys and values of this model.

        Parameters
        ----------
        num_pages, page_size : int
            Pages in each layer, and tokens in a page.

        Returns
        -------
        PagedKVCache
        """
        c = self.config
        return cuattn.PagedKVCache(
            num_pages, page_size, c.num_kv_heads, c.head_dim, num_layers=c.num_layers, dtype=self.dtype, xp=self.xp
        )

    def prefill(
        self, cache: cuattn.PagedKVCache, sequences: Sequence[Any], tokens: Sequence[Sequence[int]],
        on_query: Callable[[int, Any], None] | None = None,
    ) -> Any:  # fmt: skip
        """Compute the newest tokens of each sequence, and write their keys and values to its pages.

        Parameters
        ----------
        cache : PagedKVCache
            Has pages for these tokens already.
        sequences : sequence of hashable
            The batch.
        tokens : sequence of sequence of int
            The last tokens of each sequence, at least one.
        on_query : function of (layer, array (num_tokens, num_heads, head_dim)), optional
            Called with the rotated queries of each layer.

        Returns
        -------
        array, (batch, vocab_size), float32
            Logits after the last token of each sequence.
        """
        xp, new = self.xp, [len(ids) for ids in tokens]
        lengths, table = cache.cache_seqlens(sequences), cache.block_table(sequences)
        slots = cache.slot_mapping(sequences, new)
        ids = xp.asarray(np.concatenate([np.asarray(ids, np.int64) for ids in tokens]))
        ends = xp.asarray(np.cumsum([0, *new]))
        positions = xp.repeat(lengths - ends[1:], new) + xp.arange(len(ids))

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            cos, sin, style = self._rotary.values()
            q = cuattn.apply_rotary(q, cos, sin, positions, interleaved=style)
            if on_query is not None:
                on_query(layer, q)
            pages = cache.layer(layer)
            cuattn.append_kv(k, v, slot_mapping=slots, positions=positions, **self._rotary, **pages)
            keys, values = pages["k_pages"], pages["v_pages"]
            seen = {"block_table": table, "seqused_k": lengths, "causal": True}
            return cuattn.attention_varlen(q, keys, values, ends, None, **seen)

        return self._logits(self._hidden(ids, attend)[ends[1:] - 1])

    def decode(self, cache: Any, tokens: Any, block_table: Any, cache_seqlens: Any, workspace: Any = None) -> Any:
        """Compute one token of each sequence; everything it depends on is read on the device.

        Parameters
        ----------
        cache : PagedKVCache
            Has a place for the token already.
        tokens : array, (batch,), int64
            The newest token of each sequence.
        block_table : array, (batch, width), int32
            Its pages.
        cache_seqlens : array, (batch,), int32
            Its tokens without the newest one.
        workspace : array, float32, optional
            As for `cuattn.decode`; needed to capture the call in a CUDA graph.

        Returns
        -------
        array, (batch, vocab_size), float32
            Logits after the token.
        """
        where = {"block_table": block_table, "cache_seqlens": cache_seqlens, "workspace": workspace}

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            q, k, v = q[:, None], k[:, None], v[:, None]  # one token of each sequence
            return cuattn.decode(q, k=k, v=v, **where, **self._rotary, **cache.layer(layer))

        return self._logits(self._hidden(tokens, attend))

    def _hidden(self, tokens: Any, attend: Callable[[int, Any, Any, Any], Any]) -> Any:
        """The hidden states after the last layer, (num_tokens, hidden_size) float32."""
        c, xp = self.config, self.xp
        heads = (c.num_heads, c.num_heads + c.num_kv_heads)
        x = self._embed(tokens)
        for i, w in enumerate(self._layers):
            qkv = self._norm(x, w["attn_norm"]) @ w["qkv"]
            q, k, v = xp.split(qkv.reshape(len(x), -1, c.head_dim), heads, axis=1)
            x += attend(i, q, k, v).reshape(len(x), -1) @ w["out"]
            gate, up = xp.split((self._norm(x, w["ffn_norm"]) @ w["gate_up"]).astype(np.float32), 2, axis=1)
            with np.errstate(over="ignore"):  # exp(-gate) is inf where gate is far below 0: the quotient is 0
                x += (gate / (1 + xp.exp(-gate)) * up).astype(self.dtype) @ w["down"]
        return x

    def _embed(self, tokens: Any) -> Any:
        if "embedding" in self._top:
            return self._top["embedding"][tokens]
        return self.xp.ascontiguousarray(self.xp.take(self._top["head"], tokens, axis=1).T)

    def _norm(self, x: Any, weight: Any, dtype: Any = None) -> Any:
        mean = self.xp.mean(x * x, axis=-1, keepdims=True)
        return (x / self.xp.sqrt(mean + np.float32(self.config.rms_norm_eps)) * weight).astype(dtype or self.dtype)

    def _logits(self, x: Any) -> Any:
        return self._norm(x, self._top["norm"], np.float32) @ self._top["head"]
