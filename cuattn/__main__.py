"""Command line: ``python -m cuattn info``, ``demo``, ``generate`` and ``activations``."""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np

import cuattn
from cuattn import _activations, _generate, _info, reference
from cuattn._gguf import ModelError


def demo() -> None:
    """Decode one token against a cache of 1000 keys: whole, and in four pieces that are merged."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 8, 64), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 1000, 2, 64), dtype=np.float32)
    whole = reference.attention(q, k, v)
    cuts = [0, 10, 400, 400, 1000]
    pieces = [reference.attention(q, k[:, a:b], v[:, a:b]) for a, b in zip(cuts[:-1], cuts[1:])]
    outs, lses = (np.stack(x).astype(np.float32) for x in zip(*pieces))
    merged = cuattn.merge_states(outs, lses)
    print("one token for each of 2 sequences, 8 query heads on 2 key heads, 1000 keys")
    print("cut into", [b - a for a, b in zip(cuts[:-1], cuts[1:])], "keys, one state per piece, merged:")
    for name, got, expected in zip(merged._fields, merged, whole):
        print(f"  {name:3} {got.shape}  largest difference from the whole {abs(got - expected).max():.1e}")


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; without arguments those of the process."""
    parser = argparse.ArgumentParser(prog="python -m cuattn", description=cuattn.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what is installed, which kernels would run, and what is missing")
    commands.add_parser("demo", help="merging on NumPy arrays")
    _generate.add_arguments(commands.add_parser("generate", help="text of a language model"))
    _activations.add_arguments(commands.add_parser("activations", help="queries, keys and values of a language model"))
    args = parser.parse_args(arguments)
    try:
        if args.command == "generate":
            _generate.run(args)
        elif args.command == "activations":
            _activations.run(args)
        else:
            {"info": _info.info, "demo": demo}[args.command]()
    except ModelError as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


if __name__ == "__main__":
    sys.exit(main())
