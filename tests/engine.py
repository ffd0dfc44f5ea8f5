"""The emulator as an engine of cuattn: NumPy arrays in the role of device memory, kernels run on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuattn._compile import Kernel, source_text
from cuattn._launch import DeviceInfo, refuse_bare_numbers
from tests.emulator import EmulatedModule

ENTRIES = {  # every entry of a file is compiled at once: a tile then costs one compilation
    "attention.cu": ("cuattn_attention",),
    "attention_mma.cu": ("cuattn_attention_mma",),
    "decode.cu": ("cuattn_decode_split", "cuattn_decode_merge"),
    "decode_merge_mma.cu": ("cuattn_decode_merge_mma",),
    "decode_mma.cu": ("cuattn_decode_mma",),
    "paged.cu": ("cuattn_append_kv", "cuattn_gather_kv", "cuattn_copy_pages"),
    "rotary.cu": ("cuattn_apply_rotary",),
    "state.cu": ("cuattn_merge_pair", "cuattn_merge_list", "cuattn_merge_stack"),
}


@functools.cache
def module(file: str, defines: tuple[tuple[str, str | int], ...], sanitize: str | None = None) -> EmulatedModule:
    """One tile of one source file, compiled for the CPU."""
    named = {f"CUATTN_{name}": str(value) for name, value in defines}
    return EmulatedModule(source_text(file), ENTRIES[file], named, name=file, sanitize=sanitize)


class EmulatorEngine:
    """Runs every kernel of a call on the CPU.

    Parameters
    ----------
    order : {"forward", "reverse", "shuffle"}
        In which order threads run: a missing barrier shows as a difference.
    """

    array_type = np.ndarray

    def __init__(self, order: str = "forward", seed: int = 0, sanitize: str | None = None) -> None:
        self.order, self.seed, self.sanitize = order, seed, sanitize
        self.launched: list[Kernel] = []

    def place(self, array: np.ndarray) -> tuple[int, int]:
        return 0, array.ctypes.data

    def info(self, device: int) -> DeviceInfo:
        # Not 9.0, whose own instructions are not emulated. Few multiprocessors: small cases reach the plans of large ones.
        return DeviceInfo((8, 0), 4)

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xFF  # NaN: an element that is never written shows
        return array

    def to_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def capturing(self, device: int) -> bool:
        return False

    def counter(self, device: int) -> np.ndarray:
        return np.zeros(1, np.uint32)

    def copy_async(self, pieces: Any, to_host: bool, device: int, stream: Any) -> None:
        raise AssertionError("device and host are one in emulation")

    def from_dlpack(self, array: Any) -> Any:
        raise AssertionError("no foreign arrays in emulation")

    from_cuda_array_interface = from_dlpack

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
        self.launched.append(kernel)
        compiled = module(kernel.file, kernel.defines, self.sanitize)
        compiled.launch(kernel.entry, grid, block, args, shared_bytes, self.order, self.seed)
