"""Runs CUDA kernel text on the CPU, one block at a time, for tests on machines without a GPU.

>>> module = EmulatedModule(source, ["scale"], {"FACTOR": "2"})
>>> module.launch("scale", grid=(4,), block=(128,), args=(x, np.int32(x.size)), order="reverse")

What this proves and what not is at the top of ``cuemu.h``.
"""

from tests.emulator.build import CompileError, sanitized_environment
from tests.emulator.module import EmulatedModule, EmulationError

__all__ = ["CompileError", "EmulatedModule", "EmulationError", "sanitized_environment"]
