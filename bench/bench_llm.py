"""Tokens per second of SmolLM2-135M-Instruct, or of another Llama: prompts and generated text, one sequence and many.

`python -m bench.bench_llm` prints a row for each number of sequences. On CuPy there are two rows: "steps" is the engine
as `python -m cuattn generate` runs it, which reads every token back; "graph" is decode and the choice of the next token
captured once as a CUDA graph and replayed, with tokens and lengths on the device.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np

import cuattn
from cuattn._activations import default_text
from cuattn._terminal import array_module
from cuattn.llama import Engine, Llama

PAGE_SIZE = 16


def prompts(model: Llama, sequences: int, context: int) -> list[list[int]]:
    """Pieces of Python's documentation that have nothing in common."""
    tokens = model.tokenizer.encode(default_text()[: 8 * sequences * context])
    if len(tokens) < sequences * context:
        raise SystemExit(f"the text has {len(tokens)} tokens; {sequences} prompts of {context} need more")
    return [tokens[i * context : (i + 1) * context] for i in range(sequences)]


def pages(sequences: int, tokens: int) -> int:
    return sequences * (-(-tokens // PAGE_SIZE) + 1)


def steps(model: Llama, sequences: int, context: int, number: int) -> tuple[float, float]:
    """Prompt and generated tokens per second of the engine."""
    for _ in range(2):  # the first run compiles kernels and fills pools
        engine = Engine(model, pages(sequences, context + number), PAGE_SIZE, chunk=2048 if model.xp is not np else 512)
        for prompt in prompts(model, sequences, context):
            engine.add(prompt, max_tokens=number)
        while engine.active:
            engine.step()
        if model.xp is np:
            break
    c = engine.counts
    return c["prompt_tokens"] / c["prompt_seconds"], c["generated_tokens"] / c["generated_seconds"]


class Replayed:
    """Greedy decode of a batch whose tokens, table and lengths stay where they are, so that a graph can be replayed."""

    def __init__(self, model: Llama, sequences: int, context: int, number: int) -> None:
        self.model, self.cache = model, model.cache(pages(sequences, context + number), PAGE_SIZE)
        batch, texts = range(sequences), prompts(model, sequences, context)
        for i in batch:
            self.cache.add_sequence(i, texts[i])
        logits = [model.prefill(self.cache, [i], [texts[i]])[0] for i in batch]
        self.tokens = model.xp.stack(logits).argmax(axis=1)
        self.cache.extend_many(dict.fromkeys(batch, number))
        self.table, self.lengths = self.cache.block_table(batch), self.cache.cache_seqlens(batch, number)
        c, width = model.config, self.table.shape[1] * PAGE_SIZE
        size = cuattn.decode_workspace_size(sequences, 1, c.num_heads, c.num_kv_heads, c.head_dim, width)
        self.workspace = model.xp.empty(max(size // 4, 4), np.float32)

    def step(self) -> None:
        """One token of each sequence; what changes, changes in place."""
        logits = self.model.decode(self.cache, self.tokens, self.table, self.lengths, self.workspace)
        self.tokens[...] = logits.argmax(axis=1)
        self.lengths += 1


def graph(model: Llama, sequences: int, context: int, number: int) -> float:
    """Generated tokens per second of replays."""
    cupy = model.xp
    with cupy.cuda.Stream(non_blocking=True) as stream:
        run = Replayed(model, sequences, context, number + 3)
        run.step(), run.step()  # compile, and leave in the pool what the capture takes
        stream.synchronize()
        stream.begin_capture()
        run.step()
        captured = stream.end_capture()
        captured.launch(stream)
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(number):
            captured.launch(stream)
        stream.synchronize()
        return sequences * number / (time.perf_counter() - began)


def where(xp: Any) -> str:
    if xp is np:
        return f"NumPy {np.__version__}, float32"
    device = xp.cuda.runtime.getDeviceProperties(xp.cuda.runtime.getDevice())["name"].decode()
    return f"{device}, CuPy {xp.__version__}, float16"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_llm", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[64], help="tokens of each prompt (64)")
    parser.add_argument("--tokens", type=int, default=32, help="generated for each sequence (32)")
    parser.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    model = Llama.load(args.model, array_module(args.backend))
    print(f"llm  {where(model.xp)}  cuattn {cuattn.__version__}")
    print("| sequences | context | how | prompt tokens/s | generated tokens/s |\n| ---: | ---: | :--- | ---: | ---: |")
    for sequences, context in itertools.product(args.sequences, args.context):
        prompt, generated = steps(model, sequences, context, args.tokens)
        print(f"| {sequences} | {context} | steps | {prompt:.0f} | {generated:.1f} |", flush=True)
        if model.xp is not np:
            replayed = graph(model, sequences, context, args.tokens)
            print(f"| {sequences} | {context} | graph | - | {replayed:.1f} |", flush=True)


if __name__ == "__main__":
    main()
