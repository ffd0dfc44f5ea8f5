"""Where a test body runs: on NumPy arrays (the reference), in the CPU emulator, on a GPU. One body for all.

A backend moves NumPy arrays to its place with their exact strides, and `use()` makes cuattn compute there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuattn import _launch
from cuattn.testing import guarded, to_device, to_host
from tests.engine import EmulatorEngine


class Backend:
    """NumPy arrays, computed by the reference."""

    name = "numpy"
    xp: Any = np

    def use(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def array(self, array: np.ndarray) -> Any:
        return to_device(array, self.xp)

    def guarded(self, shape: tuple[int, ...], dtype: Any, layout: str) -> tuple[Any, Any]:
        return guarded(shape, dtype, layout, self.xp)

    def host(self, array: Any) -> np.ndarray:
        return to_host(array)


class Emulator(Backend):
    """NumPy arrays in the role of device memory; the CUDA sources run on the CPU."""

    def __init__(self, order: str) -> None:
        self.name, self.engine = f"emulator-{order}", EmulatorEngine(order)

    def use(self) -> contextlib.AbstractContextManager[Any]:
        return _launch.emulated(self.engine)


class Gpu(Backend):
    """CuPy arrays."""

    name = "gpu"

    def __init__(self) -> None:
        import cupy

        self.xp = cupy


def moved(backend: Backend, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call with their arrays in the backend's place."""
    return {name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def gpu_available() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


BACKENDS: dict[str, Any] = {
    "numpy": Backend,
    "emulator-forward": lambda: Emulator("forward"),
    "emulator-shuffle": lambda: Emulator("shuffle"),
}
if gpu_available():
    BACKENDS["gpu"] = Gpu
