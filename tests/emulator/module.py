"""Compiles CUDA kernel text for the CPU and launches it on NumPy arrays, by the rules of CuPy's RawKernel."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tests.emulator.build import build

ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2}
MAX_BLOCK, MAX_BLOCK_THREADS, MAX_GRID = (1024, 1024, 64), 1024, (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = 232448  # kMaxShared

# A module keeps the running block in plain variables, and all modules run on the same stacks.
_launch_lock = threading.Lock()
_stacks: list[int] = []


class EmulationError(RuntimeError):
    """A launch that no GPU would finish properly: a deadlock, a wrong mask, a failed assert, a trap."""


class _Launch(ctypes.Structure):  # cuemu::Launch
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_align", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("stacks", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_uint64),
    ]


class EmulatedModule:
    """The kernels of one source text, compiled for the CPU.

    Parameters
    ----------
    source : str
        Complete kernel text as given to NVRTC: own headers pasted in, NVIDIA's float headers included or not.
    entries : sequence of str
        Names of its ``extern "C" __global__`` functions to be launched.
    defines : mapping of str to str
        Macros the text sees, as with ``-DNAME=value``.
    name : str
        What compiler messages and errors call the source.
    sanitize : str, optional
        "address", "undefined" or both with a comma between. The first needs `sanitized_environment`.
    optimize : str
        Optimisation level of g++.

    Raises
    ------
    CompileError    If g++ refuses the text.
    RuntimeError    If CUDA's headers are missing, or "address" is asked for outside `sanitized_environment`.
    """

    def __init__(
        self,
        source: str,
        entries: Sequence[str],
        defines: Mapping[str, str] = MappingProxyType({}),
        *,
        name: str = "kernel.cu",
        sanitize: str | None = None,
        optimize: str = "-O2",
    ) -> None:
        self.name, self.defines = name, dict(defines)
        library, self._shared_align = build(source, entries, self.defines, name, sanitize, optimize)
        self._library = ctypes.CDLL(str(library))
        self._kernels = {entry: _Kernel(self._library, entry) for entry in entries}

    def launch(
        self,
        entry: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence,
        shared_bytes: int = 0,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        """Run one kernel to its end.

        Parameters
        ----------
        entry : str
            One of the module's entries.
        grid, block : tuple of up to three int
            Sizes, x first.
        args : sequence of numpy.ndarray, numpy.generic or None
            Arrays pass their address, None a null pointer, NumPy scalars themselves (numpy.void: a struct).
        shared_bytes : int
            Dynamic shared memory.
        order : {"forward", "reverse", "shuffle"}
            In which order lanes, warps and blocks run; "shuffle" draws it from `seed`.

        Raises
        ------
        TypeError         If the arguments do not fit the kernel's parameters.
        ValueError        If no GPU would take this grid, block or amount of shared memory.
        EmulationError    If the kernel goes wrong in a way the emulator notices.
        """
        kernel = self._kernels[entry]
        grid = _sizes(entry, "grid", grid, MAX_GRID)
        block = _sizes(entry, "block", block, MAX_BLOCK)
        if math.prod(block) > MAX_BLOCK_THREADS:
            raise ValueError(f"{entry}: block must have at most {MAX_BLOCK_THREADS} threads; got {block}")
        if order not in ORDERS:
            raise ValueError(f"{entry}: order must be one of {sorted(ORDERS)}; got {order!r}")
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(f"{entry}: shared_bytes must be in 0..{MAX_SHARED_BYTES}; got {shared_bytes}")
        pointers, keep_alive = _pack(entry, kernel.parameters, args)
        message = ctypes.create_string_buffer(2048)
        launch = _Launch(
            grid, block, shared_bytes, self._shared_align, ORDERS[order], seed, _stacks_for(self._library),
            ctypes.addressof(pointers), ctypes.addressof(message), len(message),
        )  # fmt: skip
        with _launch_lock:
            failed = kernel.run(ctypes.byref(launch))
        del keep_alive
        if failed:
            raise EmulationError(message.value.decode())


class _Kernel:
    def __init__(self, library: ctypes.CDLL, entry: str):
        self.run = library[f"cuemu_launch_{entry}"]
        self.run.restype = ctypes.c_bool
        describe = library[f"cuemu_parameters_{entry}"]
        describe.restype = ctypes.c_char_p
        self.parameters = [(word[0], int(word[1:])) for word in describe().decode().split()]


def _stacks_for(library: ctypes.CDLL) -> int:
    """Address of the stacks all launches of this process use, allocated by the first module to launch."""
    if not _stacks:
        library.cuemu_allocate_stacks.restype = ctypes.c_void_p
        _stacks.append(library.cuemu_allocate_stacks())
    return _stacks[0]


# ---- arguments ----

# What may be passed by value, by kind of parameter. Structs and 16-bit floats take anything of their size.
_NUMPY_KINDS = {
    "p": ("an array, None or an address", "iu"),
    "i": ("an integer", "iub"),
    "f": ("a float", "f"),
}


def _sizes(entry: str, what: str, sizes: Sequence[int], limits: tuple[int, int, int]) -> tuple[int, ...]:
    full = (*sizes, 1, 1)[:3]
    if not 1 <= len(sizes) <= 3 or any(not 1 <= size <= limit for size, limit in zip(full, limits)):
        raise ValueError(f"{entry}: {what} must be up to three sizes from 1 to {limits}; got {tuple(sizes)}")
    return tuple(int(size) for size in full)


def _pack(
    entry: str, parameters: Sequence[tuple[str, int]], args: Sequence
) -> tuple[ctypes.Array, np.ndarray]:
    """The array of pointers to arguments that a launch takes, and the storage they point into."""
    if len(args) != len(parameters):
        raise TypeError(f"{entry}: takes {len(parameters)} arguments; got {len(args)}")
    values = [_value(entry, i, *parameters[i], arg) for i, arg in enumerate(args)]
    slot = -(-max(map(len, values), default=1) // 64) * 64  # structs may be aligned to 64 bytes
    storage = np.zeros(slot * (len(values) + 1), np.uint8)
    start = -storage.ctypes.data % 64
    for i, value in enumerate(values):
        storage[start + i * slot :][: len(value)] = np.frombuffer(value, np.uint8)
    first = storage.ctypes.data + start
    return (ctypes.c_void_p * len(values))(*(first + i * slot for i in range(len(values)))), storage


def _value(entry: str, position: int, kind: str, size: int, arg: object) -> bytes:
    """The bytes a parameter of this kind and size gets; kinds as in cuemu::parameters."""
    where = f"{entry}: argument {position}"
    if arg is None or isinstance(arg, np.ndarray):
        if kind != "p":
            raise TypeError(f"{where} must be a scalar of {size} bytes; got {type(arg).__name__}")
        return (0 if arg is None else arg.ctypes.data).to_bytes(8, "little")
    if not isinstance(arg, np.generic):
        raise TypeError(f"{where} must be a NumPy array or scalar or None; got {type(arg).__name__}")
    if arg.nbytes != size:
        raise TypeError(f"{where} must have {size} bytes; got {arg.dtype} of {arg.nbytes}")
    expected, kinds = _NUMPY_KINDS.get(kind, ("", arg.dtype.kind))
    if arg.dtype.kind not in kinds:
        raise TypeError(f"{where} must be {expected}; got {arg.dtype}")
    return arg.tobytes()
