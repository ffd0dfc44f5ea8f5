"""One call of a public function: its arrays, all in one place, and what may be done with them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from cuattn import _launch
from cuattn._compile import Kernel
from cuattn._settings import checks_values

_DLPACK_CUDA = (2, 13)  # device types: CUDA, and CUDA managed memory
_HOST = -1  # its number among the devices
_REMEMBERED = 4096  # calls that a check remembers
_ALIGNMENTS = tuple((n | 16) & -(n | 16) for n in range(16))  # by the last four bits of an address

Checked = TypeVar("Checked")


@dataclass(frozen=True, eq=False)  # arrays alike share one object, see array_spec: hashing it must be cheap
class ArraySpec:
    """An array without its memory: enough for checks and plans, and hashable, so that both are cached."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype
    alignment: int  # the largest power of two up to 16 that divides the address

    @functools.cached_property
    def extent(self) -> tuple[int, int]:
        """First and past-the-last byte of the array, relative to its address."""
        if 0 in self.shape:
            return 0, 0
        ends = [(size - 1) * stride for size, stride in zip(self.shape, self.strides)]
        return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + self.dtype.itemsize


array_spec = functools.lru_cache(2**14)(ArraySpec)


class _Specs(dict[str, "ArraySpec | None"]):
    """Of the arguments that are there; that of another is None."""

    def __missing__(self, name: str) -> None:
        return None


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

    def __init__(self, function: str, arrays: dict[str, Any]) -> None:
        self.function = function
        self.arrays = arrays  # by argument name; an absent one is None
        self.specs: dict[str, ArraySpec | None] = _Specs()
        self.places: dict[str, tuple[ArraySpec, int]] = {}  # specs and addresses of those that are there
        self.engine: _launch.Engine | None = None  # None: NumPy arrays, computed by the reference
        self.device = _HOST
        first, usual = "", _launch.usual_engine()
        kind = () if usual is None else usual.array_type
        for name, array in arrays.items():  # asked once for what they are: that takes much of a call's time
            if array is None:
                continue
            engine = usual
            if not isinstance(array, kind):
                engine, array = self._adopted(name, array)
                self.arrays[name] = array
            device, address = (_HOST, _host_address(array)) if engine is None else engine.place(array)
            if not first:
                first, self.engine, self.device = name, engine, device
            elif device != self.device:
                self._refuse_places(first, name, device)
            spec = array_spec(array.shape, array.strides, array.dtype, _ALIGNMENTS[address & 15])
            self.specs[name], self.places[name] = spec, (spec, address)

    def required(self, *names: str) -> tuple[ArraySpec, ...]:
        """The specs of arguments that can't be None."""
        for name in names:
            if self.specs[name] is None:
                raise TypeError(f"{self.function}: {name} must be an array; got None")
        return tuple([self.places[name][0] for name in names])

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

    def checks_values(self) -> bool:
        """Whether index arrays are to be looked at: on the host always, on a device if asked for."""
        return checks_values() or self.engine is None  # asked in any case: a wrong CUATTN_CHECK is refused

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, what CuPy does by itself happens on the arrays' device and its current stream."""
        return contextlib.nullcontext() if self.engine is None else self.engine.on(self.device)

    def capturing(self) -> bool:
        """Whether the work goes into a CUDA graph instead of running now."""
        return self.engine is not None and self.engine.capturing(self.device)

    def counter(self) -> Any:
        """A counter that is 0 when the next launch begins, or None where there can be none."""
        assert self.engine is not None
        return self.engine.counter(self.device)

    def copy_async(self, pieces: Iterable[tuple[int, int, int]], to_host: bool, stream: Any) -> None:
        """Copy pieces (address on the device, address on the host, bytes) on a stream of the arrays' device."""
        assert self.engine is not None
        self.engine.copy_async(pieces, to_host, self.device, stream)

    def launch(self, plan: Plan, args: Sequence[Any]) -> None:
        """Run a kernel on the current stream of the arrays' device."""
        assert self.engine is not None
        self.engine.launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, args, self.device)

    def _adopted(self, name: str, array: Any) -> tuple[_launch.Engine | None, Any]:
        """Any array as one of NumPy or CuPy, and the engine for it."""
        if isinstance(array, np.ndarray):
            return None, array
        engine = _launch.cupy_engine()
        if engine is not None and isinstance(array, engine.array_type):
            return engine, array
        problem = "" if engine is not None else ", and CuPy is not installed"
        if hasattr(array, "__dlpack_device__"):
            if array.__dlpack_device__()[0] not in _DLPACK_CUDA:
                problem = " on the host (numpy.asarray makes it a NumPy array)"
            elif engine is not None:
                try:
                    return engine, engine.from_dlpack(array)
                except (BufferError, TypeError, RuntimeError) as error:
                    problem = f" ({error})"
        elif hasattr(array, "__cuda_array_interface__") and engine is not None:
            return engine, engine.from_cuda_array_interface(array)
        kind = f"{type(array).__module__}.{type(array).__name__}".removeprefix("builtins.")
        raise TypeError(
            f"{self.function}: {name} must be a NumPy array or an array on a CUDA device; got {kind}{problem}"
        )

    def _refuse_places(self, first: str, name: str, device: int) -> None:
        if _HOST in (self.device, device):
            raise TypeError(
                f"{self.function}: arrays must be all on the host or all on one device; "
                f"got {first} on {_place(self.device)} and {name} on {_place(device)}"
            )
        rule = f"{name} must be on the device of {first} ({self.device})"
        raise ValueError(f"{self.function}: {rule}; got device {device}")


def remembered(check: Callable[..., Checked]) -> Callable[..., Checked]:
    """Do a check once for all calls alike: of its call it may look at the function and the specs only."""
    known: dict[tuple[Hashable, ...], Checked] = {}

    @functools.wraps(check)
    def checked(call: Call, *options: Hashable) -> Checked:
        key = (call.function, *call.specs, *call.specs.values(), *options)
        found = known.get(key)
        if found is None:
            if len(known) >= _REMEMBERED:
                known.clear()
            found = known[key] = check(call, *options)
        return found

    return checked


def rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What the definition computed, in the dtype of a result: beyond its range is inf, as on a device."""
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _place(device: int) -> str:
    return "the host" if device == _HOST else f"device {device}"


def _host_address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
