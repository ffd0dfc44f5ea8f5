"""``python -m cuattn activations``: queries, keys and values of a real model on real text, for tests and searches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cuattn
from cuattn._batching import to_host
from cuattn._terminal import array_module, progress
from cuattn.llama import Llama, ModelError

_CHUNK = 512  # tokens computed at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--layers", type=int, nargs="+", required=True, metavar="L", help="layers to keep, from 0")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="where they go")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (Python's own pydoc_data.topics)")
    parser.add_argument("--max-tokens", type=int, default=8192, metavar="N", help="of the text (8192)")
    parser.add_argument("--kv-heads", type=int, nargs="+", metavar="H", help="kv heads to keep, with their query heads")
    parser.add_argument("--dtype", choices=("float32", "float16"), help="of the file (as computed)")
    parser.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a Llama GGUF file (SmolLM2-135M-Instruct)")


def run(args: argparse.Namespace) -> None:
    """Compute, and write arrays ``q_L (tokens, heads, head_dim)``, ``k_L``, ``v_L`` of each layer, and ``tokens``."""
    if args.max_tokens < 1:
        raise ModelError(f"--max-tokens must be 1 or more; got {args.max_tokens}")
    if not args.out.absolute().parent.is_dir():
        raise ModelError(f"{args.out.parent} is not a folder")
    try:
        text = default_text() if args.text is None else args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{args.text} can't be read as text ({error})") from None
    model = Llama.load(args.model, array_module(args.backend))
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(text)[: min(args.max_tokens, model.config.max_positions)]
    with progress("tokens", len(tokens), _CHUNK) as show:
        arrays = capture(model, tokens, args.layers, kv_heads=args.kv_heads, show=show)
    if args.dtype:
        arrays = {name: x.astype(args.dtype) for name, x in arrays.items()}
    arrays["tokens"] = np.array(tokens, np.int32)
    np.savez_compressed(args.out, allow_pickle=False, **arrays)
    for name, array in arrays.items():
        print(f"{name} {array.shape} {array.dtype}")


def default_text() -> str:
    """Several hundred kilobytes of English that every Python has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def capture(
    model: Llama, tokens: Sequence[int], layers: Sequence[int], *, kv_heads: Sequence[int] | None = None,
    show: Callable[[float], None] = lambda done: None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Queries and keys after rotary embedding, and values, of one text.

    Parameters
    ----------
    model : Llama
        The network.
    tokens : sequence of int
        The text, one token at least.
    layers : sequence of int
        Layers to keep.
    kv_heads : sequence of int, optional
        kv heads to keep, with the query heads that read them. Default: all.
    show : function of float
        Called with the number of tokens that are computed.

    Returns
    -------
    dict of numpy.ndarray
        ``q_L (num_tokens, heads, head_dim)``, ``k_L`` and ``v_L (num_tokens, kv heads, head_dim)`` for each layer L, in
        the dtype that the model computes in. Rotary pairs are the features 2d and 2d + 1 of q and k.

    Raises
    ------
    ModelError
        If there is no such layer or head, or no token.
    """
    config, page_size = model.config, 16
    heads = range(config.num_kv_heads) if kv_heads is None else kv_heads
    for name, given, count in (("layers", layers, config.num_layers), ("kv heads", heads, config.num_kv_heads)):
        if not all(0 <= i < count for i in given):
            raise ModelError(f"{name} must be within 0 and {count - 1}; got {[*given]}")
    if not tokens:
        raise ModelError("the text is empty")
    group = config.num_heads // config.num_kv_heads
    readers = [g * group + i for g in heads for i in range(group)]
    queries: dict[int, list[np.ndarray]] = {layer: [] for layer in layers}

    def on_query(layer: int, q: Any) -> None:
        if layer in queries:
            queries[layer].append(to_host(q)[:, readers])

    cache = model.cache(-(-len(tokens) // page_size), page_size)
    cache.add_sequence("text")
    for begin in range(0, len(tokens), _CHUNK):
        chunk = tokens[begin : begin + _CHUNK]
        cache.append("text", chunk)
        model.prefill(cache, ["text"], [chunk], on_query)
        show(begin + len(chunk))
    slots = cache.slot_mapping(["text"], len(tokens))
    kept = {}
    for layer, parts in queries.items():
        pages = cache.layer(layer)
        k, v = cuattn.gather_kv(pages["k_pages"], pages["v_pages"], slots)
        kept[f"q_{layer}"] = np.concatenate(parts)
        kept[f"k_{layer}"], kept[f"v_{layer}"] = (to_host(x)[:, list(heads)] for x in (k, v))
    return kept
