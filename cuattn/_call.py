"""One call of a public function: its arrays, all in one place, and what may be done with them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from cuattn import _launch
from cuattn._compile import Kernel

_DLPACK_CUDA = (2, 13)  # device types: CUDA, and CUDA managed memory


class ArraySpec(NamedTuple):
    """An array without its memory: enough for checks and plans, and hashable, so that both are cached."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype
    alignment: int  # the largest power of two up to 16 that divides the address


class Plan(Protocol):
    """What every plan has: the kernel and how it is cut up."""

    @property
    def kernel(self) -> Kernel: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def block(self) -> tuple[int, int, int]: ...
    @property
    def shared_bytes(self) -> int: ...


class Call:
    """The arguments of a call as NumPy or CuPy arrays, taken without a copy.

    An array that has only ``__cuda_array_interface__`` and names a stream there makes CuPy wait for that stream; DLPack
    orders the streams on the device.

    Raises
    ------
    TypeError
        If an argument is not an array, or some are on the host and some on a device.
    ValueError
        If they are on several devices.
    """

    def __init__(self, function: str, arrays: Mapping[str, Any]) -> None:
        self.function = function
        self.arrays: dict[str, Any] = {}  # by argument name; an absent one is None
        self.engine: _launch.Engine | None = None  # None: NumPy arrays, computed by the reference
        self.device = -1
        first: dict[int, str] = {}  # device (-1: the host) -> the first argument found there
        emulator = _launch.emulator()
        for name, array in arrays.items():
            if isinstance(array, np.ndarray):
                device, self.engine = (-1 if emulator is None else 0), emulator
            elif array is not None:
                self.engine = _launch.cupy_engine()
                array = self._device_array(name, array)
                device = self.engine.device(array) if self.engine else -1
            self.arrays[name] = array
            if array is not None:
                first.setdefault(device, name)
                self.device = device
        if len(first) > 1:
            self._refuse_places(first)

    @functools.cached_property
    def specs(self) -> dict[str, ArraySpec | None]:
        """A spec of each argument."""
        return {
            name: None if a is None else ArraySpec(a.shape, a.strides, a.dtype, _alignment(self.address(a)))
            for name, a in self.arrays.items()
        }

    def address(self, array: Any) -> int:
        """Where an array begins."""
        return array.__array_interface__["data"][0] if self.engine is None else self.engine.address(array)

    def required(self, *names: str) -> tuple[ArraySpec, ...]:
        """The specs of arguments that can't be None."""
        specs = []
        for name in names:
            spec = self.specs[name]
            if spec is None:
                raise TypeError(f"{self.function}: {name} must be an array; got None")
            specs.append(spec)
        return tuple(specs)

    def info(self) -> _launch.DeviceInfo:
        """The device that a plan is for."""
        assert self.engine is not None
        return self.engine.info(self.device)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A new array where the arguments are."""
        return np.empty(shape, dtype) if self.engine is None else self.engine.empty(shape, dtype, self.device)

    def to_host(self, name: str) -> np.ndarray:
        """An argument as a NumPy array; waits for the device. For checking values only."""
        array = self.arrays[name]
        return array if self.engine is None else self.engine.to_host(array)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, what CuPy does by itself happens on the arrays' device and its current stream."""
        return contextlib.nullcontext() if self.engine is None else self.engine.on(self.device)

    def capturing(self) -> bool:
        """Whether the work goes into a CUDA graph instead of running now."""
        return self.engine is not None and self.engine.capturing(self.device)

    def copy_async(self, pieces: Iterable[tuple[int, int, int]], to_host: bool, stream: Any) -> None:
        """Copy pieces (address on the device, address on the host, bytes) on a stream of the arrays' device."""
        assert self.engine is not None
        self.engine.copy_async(pieces, to_host, self.device, stream)

    def launch(self, plan: Plan, args: Sequence[Any]) -> None:
        """Run a kernel on the current stream of the arrays' device."""
        assert self.engine is not None
        self.engine.launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, args, self.device)

    def _device_array(self, name: str, array: Any) -> Any:
        cupy = sys.modules.get("cupy")
        if cupy is not None and isinstance(array, cupy.ndarray):
            return array
        problem = "" if self.engine is not None else ", and CuPy is not installed"
        if hasattr(array, "__dlpack_device__"):
            if array.__dlpack_device__()[0] not in _DLPACK_CUDA:
                problem = " on the host (numpy.asarray makes it a NumPy array)"
            elif self.engine is not None:
                try:
                    return self.engine.from_dlpack(array)
                except (BufferError, TypeError, RuntimeError) as error:
                    problem = f" ({error})"
        elif hasattr(array, "__cuda_array_interface__") and self.engine is not None:
            return self.engine.from_cuda_array_interface(array)
        kind = f"{type(array).__module__}.{type(array).__name__}".removeprefix("builtins.")
        raise TypeError(
            f"{self.function}: {name} must be a NumPy array or an array on a CUDA device; got {kind}{problem}"
        )

    def _refuse_places(self, first: dict[int, str]) -> None:
        (d0, n0), (d1, n1) = list(first.items())[:2]
        if -1 in (d0, d1):
            raise TypeError(
                f"{self.function}: arrays must be all on the host or all on one device; "
                f"got {n0} on {_place(d0)} and {n1} on {_place(d1)}"
            )
        raise ValueError(f"{self.function}: {n1} must be on the device of {n0} ({d0}); got device {d1}")


def _place(device: int) -> str:
    return "the host" if device == -1 else f"device {device}"


def _alignment(address: int) -> int:
    return (address | 16) & -(address | 16)
