"""Launching: the one module that knows CuPy's rules for memory, streams and kernel arguments.

An `Engine` is a place where kernels run. There is one for CuPy; the tests add another, which runs the same sources on
the CPU with NumPy arrays in the role of device memory.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from cuattn._compile import Kernel, build, supported_architectures
from cuattn._counters import Counters


class DeviceInfo(NamedTuple):
    """What a plan may depend on."""

    capability: tuple[int, int]  # (9, 0) on an H100 or H200
    num_sms: int


class Engine(Protocol):
    """A place where kernels run."""

    @property
    def array_type(self) -> type: ...
    def place(self, array: Any) -> tuple[int, int]: ...
    def info(self, device: int) -> DeviceInfo: ...
    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> Any: ...
    def to_host(self, array: Any) -> np.ndarray: ...
    def on(self, device: int) -> contextlib.AbstractContextManager[Any]: ...
    def capturing(self, device: int) -> bool: ...
    def counter(self, device: int) -> Any: ...
    def copy_async(self, pieces: Iterable[tuple[int, int, int]], to_host: bool, device: int, stream: Any) -> None: ...
    def from_dlpack(self, array: Any) -> Any: ...
    def from_cuda_array_interface(self, array: Any) -> Any: ...
    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Any],
        device: int,
    ) -> None: ...


def by_value(*numbers: int, size: int = 0) -> np.void:
    """64-bit integers as one struct, passed by value as one kernel argument; `size` fields at least, the rest 0."""
    packed = struct.pack(f"{len(numbers)}q", *numbers).ljust(8 * size, b"\0")
    return np.frombuffer(packed, dtype=f"V{len(packed)}")[0]


_BARE = frozenset([bool, int, float])


def refuse_bare_numbers(kernel: Kernel, args: Sequence[Any]) -> None:
    """A Python int or float would reach the kernel as 8 bytes, whatever its parameter is."""
    if not _BARE.isdisjoint(map(type, args)):  # not isinstance: numpy.float64 is a float too, but says its size
        position, kind = next((n, type(arg).__name__) for n, arg in enumerate(args) if type(arg) in _BARE)
        raise TypeError(f"{kernel.entry}: argument {position} is a bare {kind}; pass a NumPy scalar")


class CupyEngine:
    """Kernels on CUDA devices, on CuPy's current stream, whatever the current device is."""

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import nvtx

        self._cupy, self._nvtx = cupy, nvtx
        self.array_type = cupy.ndarray
        self._functions: dict[tuple[int, Kernel], Any] = {}
        self._infos: dict[int, DeviceInfo] = {}
        self._counters, self._lock = Counters(cupy), threading.Lock()

    def place(self, array: Any) -> tuple[int, int]:
        """Device and address."""
        memory = array.data
        return memory.device_id, memory.ptr

    def info(self, device: int) -> DeviceInfo:
        if device not in self._infos:
            capability = self._cupy.cuda.Device(device).compute_capability
            properties = self._cupy.cuda.runtime.getDeviceProperties(device)
            self._infos[device] = DeviceInfo(
                (int(capability[:-1]), int(capability[-1])), properties["multiProcessorCount"]
            )
        return self._infos[device]

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> Any:
        if self._is_elsewhere(device):
            with self._cupy.cuda.Device(device):
                return self.empty(shape, dtype, device)
        return self._cupy.ndarray(shape, dtype)

    def to_host(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)  # the current stream is waited for

    def copy_async(self, pieces: Iterable[tuple[int, int, int]], to_host: bool, device: int, stream: Any) -> None:
        """Copy pieces (address on the device, address on the host, bytes) on a stream, None: the current one."""
        runtime = self._cupy.cuda.runtime
        with self.on(device):
            queue = (self._cupy.cuda.get_current_stream() if stream is None else stream).ptr
            for ours, theirs, size in pieces:
                if to_host:
                    runtime.memcpyAsync(theirs, ours, size, runtime.memcpyDeviceToHost, queue)
                else:
                    runtime.memcpyAsync(ours, theirs, size, runtime.memcpyHostToDevice, queue)

    def from_dlpack(self, array: Any) -> Any:
        return self._cupy.from_dlpack(array)

    def from_cuda_array_interface(self, array: Any) -> Any:
        return self._cupy.asarray(array)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[Any],
        device: int,
    ) -> None:
        refuse_bare_numbers(kernel, args)
        if self._is_elsewhere(device):
            with self._cupy.cuda.Device(device):
                return self.launch(kernel, grid, block, shared_bytes, args, device)
        function = self._functions.get((device, kernel)) or self._load(device, kernel)
        self._nvtx.RangePush(kernel.entry)
        try:
            function(grid, block, tuple(args), shared_bytes)
        finally:
            self._nvtx.RangePop()

    def attributes(self, kernel: Kernel, device: int) -> dict[str, int]:
        """Registers, local and static shared bytes of a loaded kernel, as the driver reports them."""
        driver = _driver()
        function = self._functions.get((device, kernel)) or self._load(device, kernel)
        return {
            "registers": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr),
            "local": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function.ptr),
            "shared": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr),
        }

    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        return self._cupy.cuda.Device(device) if self._is_elsewhere(device) else contextlib.nullcontext()

    def _is_elsewhere(self, device: int) -> bool:
        """Whether another device is the current one; asked first, as entering a device takes time."""
        return self._cupy.cuda.runtime.getDevice() != device

    def capturing(self, device: int) -> bool:
        with self.on(device):
            return self._cupy.cuda.get_current_stream().is_capturing()

    def counter(self, device: int) -> Any:
        with self.on(device):
            return self._counters.zeroed(device)

    def _load(self, device: int, kernel: Kernel) -> Any:
        with self._lock, self._cupy.cuda.Device(device):
            if (device, kernel) not in self._functions:
                capability = self.info(device).capability
                binary = build(kernel, architecture(capability, supported_architectures(), kernel.suffix))
                module = self._cupy.cuda.function.Module()
                module.load(binary.code)
                function = module.get_function(kernel.entry)  # keeps its module alive
                driver = _driver()
                most = self._cupy.cuda.runtime.getDeviceProperties(device)["sharedMemPerBlockOptin"]
                if most > 48 << 10:  # above 48 KB a kernel must ask; once per device is enough
                    static = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
                    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    driver.funcSetAttribute(function.ptr, attribute, most - static)
                self._functions[device, kernel] = function
            return self._functions[device, kernel]


def architecture(capability: tuple[int, int], supported: Sequence[int], suffix: str = "") -> str:
    """The ``-arch`` for a GPU: its own, the nearest older one of its generation, or PTX if NVRTC knows none of it.

    Raises
    ------
    NotImplementedError
        If the GPU is older than all that NVRTC supports.
    """
    own = capability[0] * 10 + capability[1]
    older = [n for n in supported if n <= own]
    if not older:
        rule = f"this NVRTC compiles for compute capability {min(supported) / 10} and newer"
        raise NotImplementedError(f"{rule}; got {own / 10}")
    nearest = max(older)
    return f"sm_{nearest}{suffix}" if nearest // 10 == capability[0] else f"compute_{nearest}"


_engine: CupyEngine | None = None
_emulator: Engine | None = None
_engine_lock = threading.Lock()


def cupy_engine() -> CupyEngine | None:
    """The engine for device arrays, or None where CuPy is not installed."""
    global _engine
    if _engine is None:
        with _engine_lock:
            if _engine is None:
                try:
                    _engine = CupyEngine()
                except ImportError:
                    return None
    return _engine


def usual_engine() -> Engine | None:
    """The engine that the next array is probably for: the emulator of a test, else CuPy's if it was needed before."""
    return _engine if _emulator is None else _emulator


@contextlib.contextmanager
def emulated(engine: Engine) -> Iterator[None]:
    """Within the block, NumPy arrays are the device memory of `engine`. For tests, in one thread."""
    global _emulator
    before, _emulator = _emulator, engine
    try:
        yield
    finally:
        _emulator = before


def _driver() -> Any:
    from cupy_backends.cuda.api import driver

    return driver
