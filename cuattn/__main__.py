"""Command line: ``python -m cuattn info`` and ``python -m cuattn demo``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys

import numpy as np

import cuattn
from cuattn import _cache, _launch, reference


def info() -> None:
    """Print what is installed, which device there is, and what is missing with the command that mends it."""
    print(f"cuattn {cuattn.__version__}")
    for package in ("numpy", "ml_dtypes", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            print(f"  {package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package} -")
    print(f"compiled kernels are kept in {_cache.directory()}")
    engine = _launch.cupy_engine()
    if engine is None:
        print("no CuPy: NumPy arrays only. For GPUs: pip install 'cuattn[cuda13x]'")
        return
    import cupy

    if not cupy.cuda.is_available():
        print("no CUDA device: NumPy arrays only")
        return
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        capability, num_sms = engine.info(device)
        name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
        print(f"device {device}: {name}, compute capability {capability[0]}.{capability[1]}, {num_sms} multiprocessors")


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cuattn", description=cuattn.__doc__)
    help_text = "info: what is installed; demo: merging on NumPy arrays"
    parser.add_argument("command", choices=("info", "demo"), help=help_text)
    {"info": info, "demo": demo}[parser.parse_args().command]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
