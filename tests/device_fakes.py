"""Devices that are not there: CuPy arrays over host memory, and a CuPy that only records what it is asked."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import cupy
import numpy as np


def on_device(shape: tuple[int, ...], dtype=np.float32, device: int = 0) -> cupy.ndarray:
    """A CuPy array whose memory is on the host: everything but arithmetic works."""
    host = np.zeros(shape, dtype)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, max(host.nbytes, 1), host, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class Recorder:
    """As much of CuPy and of the driver as an engine uses, for devices like an H200."""

    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self) -> None:
        self.current = 0
        self.loaded: list[tuple[int, bytes]] = []
        self.launched: list[tuple] = []
        self.ranges: list[str] = []
        self.limits: list[tuple[int, int]] = []
        runtime = SimpleNamespace(
            getDevice=lambda: self.current,
            getDeviceProperties=lambda device: {"multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 << 10},
        )
        function = SimpleNamespace(Module=lambda: SimpleNamespace(load=self.load, get_function=self.get_function))
        self.cuda = SimpleNamespace(Device=functools.partial(FakeDevice, self), runtime=runtime, function=function)

    def load(self, code: bytes) -> None:
        self.loaded.append((self.current, code))

    def get_function(self, entry: str) -> FakeFunction:
        return FakeFunction(self, entry)

    def funcGetAttribute(self, attribute: int, function: int) -> int:
        assert attribute == self.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        return 1024

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        assert attribute == self.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.limits.append((function, value))


class FakeFunction:
    """Notes its launches; an argument that is a text is an error of the driver."""

    def __init__(self, recorder: Recorder, entry: str) -> None:
        self.recorder, self.entry, self.ptr = recorder, entry, 100 + len(recorder.loaded)

    def __call__(self, grid: tuple, block: tuple, args: tuple, shared_bytes: int) -> None:
        if isinstance(args[0], str):
            raise RuntimeError(args[0])
        self.recorder.launched.append((self.recorder.current, self.entry, grid, block, args, shared_bytes))


class FakeDevice:
    """Is the current one within a ``with`` block."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self.recorder, self.number = recorder, number
        self.compute_capability = {0: "90", 1: "90", 2: "120"}[number]

    def __enter__(self) -> None:
        self.before, self.recorder.current = self.recorder.current, self.number

    def __exit__(self, *error: object) -> None:
        self.recorder.current = self.before
