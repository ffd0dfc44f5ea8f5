"""``python -m cuattn generate``: text of a Llama model, printed as it comes."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from cuattn._terminal import array_module, progress
from cuattn._tokenizer import Stream
from cuattn.llama import Engine, Llama, ModelError, Request, Sampling

_LONG_PROMPT = 256  # tokens from which on there is a bar
_PAGE_SIZE, _MOST_PAGES = 16, 2048  # more than this many pages only if one sequence needs them; others wait


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to go on with; - reads standard input")
    parser.add_argument("--chat", action="store_true", help="each prompt is a question to an assistant")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the assistant is told about itself")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="at most, for each prompt (128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from tokens of probability P")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; the same seed gives the same text (0)")
    parser.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a Llama GGUF file (SmolLM2-135M-Instruct)")


def run(args: argparse.Namespace) -> None:
    """Generate, print the text on standard output, and on standard error how fast it came."""
    if args.max_tokens < 1:
        raise ModelError(f"--max-tokens must be 1 or more; got {args.max_tokens}")
    if args.system is not None and not args.chat:
        raise ModelError("--system needs --chat")
    prompts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in args.prompts]
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ModelError("the prompt is empty" if len(prompts) == 1 else f"prompt {number} is empty")
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # what Python makes of bytes that are no UTF-8
            raise ModelError(f"prompt {number} is not UTF-8")
    sampling = [_sampling(args, args.seed + i) for i in range(len(prompts))]
    model = Llama.load(args.model, array_module(args.backend))
    tokenizer = model.tokenizer
    assert tokenizer is not None
    tokens = [tokenizer.encode(tokenizer.chat(p, args.system) if args.chat else p) for p in prompts]
    needed = [-(-min(len(ids) + args.max_tokens, model.config.max_positions) // _PAGE_SIZE) + 1 for ids in tokens]
    engine = Engine(model, max(*needed, min(sum(needed), _MOST_PAGES)), _PAGE_SIZE)
    options = {"max_tokens": args.max_tokens, "stop": tokenizer.stop}
    requests = [engine.add(ids, **options, sampling=s) for ids, s in zip(tokens, sampling)]
    _prefill(engine, requests)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    streams = [Stream(tokenizer) for _ in requests]
    for number, (request, stream) in enumerate(zip(requests, streams), 1):
        if len(requests) > 1:
            print(f"[{number}] ", end="")
        printed = 0
        while True:
            for token in request.generated[printed:]:
                print(stream.add(token), end="", flush=True)
            printed = len(request.generated)
            if request.done:
                break
            engine.step()
        print(stream.end())
    print(summary(engine), file=sys.stderr)


def summary(engine: Engine) -> str:
    """How many tokens there were, how fast, and in how many pages."""
    c = engine.counts
    parts = []
    for kind in ("prompt", "generated"):
        rate = c[f"{kind}_tokens"] / c[f"{kind}_seconds"] if c[f"{kind}_seconds"] else 0.0
        number = c["prompt_tokens" if kind == "prompt" else "new_tokens"]
        parts.append(f"{kind}: {number:.0f} tokens, {rate:.1f} per second")
    if c["reused_tokens"]:
        parts[0] += f", {c['reused_tokens']:.0f} more reused"
    parts.append(f"pages: {c['most_pages']:.0f} ({engine.cache.page_size} tokens each)")
    return "; ".join(parts)


def _sampling(args: argparse.Namespace, seed: int) -> Sampling:
    try:
        return Sampling(args.temperature, args.top_k, args.top_p, seed)
    except ValueError as error:
        raise ModelError(str(error).removeprefix("Sampling: ")) from None


def _prefill(engine: Engine, requests: list[Request]) -> None:
    """The steps until the first sequence has a token, with a bar if prompts are long."""
    total = sum(request.prompt_length for request in requests)
    with progress("prompt", total, _LONG_PROMPT) as show:
        while not requests[0].generated and not requests[0].done:
            engine.step()
            show(engine.counts["prompt_tokens"] + engine.counts["reused_tokens"])
