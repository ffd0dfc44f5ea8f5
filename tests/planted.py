"""Kernel sources of a test's own in place of kernels_cu, and a count of the compilations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cuattn import _compile

# One instruction, so that NVRTC is done in 20 ms.
TINY = '#include "tiny.cuh"\nextern "C" __global__ void tiny(float* x) { *x = CUATTN_VALUE + OFFSET; }\n'
TINY_HEADER = "#pragma once\n#define OFFSET 1\n"
TINY_KERNEL = _compile.Kernel("tiny.cu", "tiny", (("VALUE", 2),))


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, files: Mapping[str, str]) -> None:
    """Kernels are read from `folder`, where `files` are written, until the test ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(_compile, "get_include", lambda: str(folder))


def real_sources() -> dict[str, str]:
    """The files of kernels_cu, for planting a change among them."""
    folder = Path(_compile.get_include())
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(folder.iterdir()) if p.suffix in (".cu", ".cuh")}


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by a file name whenever NVRTC runs."""
    seen: list[str] = []
    run = _compile._run_nvrtc

    def counting(kernel: _compile.Kernel, *args: Any, **kwargs: Any) -> tuple[bytes, str]:
        seen.append(kernel.file)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(_compile, "_run_nvrtc", counting)
    return seen
