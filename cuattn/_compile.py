"""From a kernel's name to machine code: NVRTC through CuPy's bindings. Needs no GPU.

``RawModule(code=...)`` is not used: its disk cache does not see included headers, and it forces ``-ftz=true`` and an
architecture without the ``a`` suffix. Here the headers are pasted into one text, which is compiled and is part of the
cache key.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cuattn import _cache
from cuattn._settings import debug


class Kernel(NamedTuple):
    """One entry point of one source file for one tile."""

    file: str  # in kernels_cu
    entry: str  # the extern "C" name
    defines: tuple[tuple[str, str | int], ...] = ()  # becomes -DCUATTN_<NAME>=<value>
    suffix: str = ""  # "a" for code that needs sm_90a


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one entry point, in bytes except the registers."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Binary:
    """Machine code (a cubin, or PTX for a GPU newer than NVRTC) and the resources of each entry point in it."""

    code: bytes
    resources: dict[str, Resources]


class CompileError(RuntimeError):
    """A kernel did not compile, or compiled to code that spills or serialises its matrix instructions."""


def get_include() -> str:
    """Directory of the CUDA headers (``state.cuh`` and others), for ``#include`` in RawKernel, NVRTC or nvcc.

    Returns
    -------
    str
        A path to pass as ``-I``.

    Examples
    --------
    >>> import cupy, cuattn                                                   # doctest: +SKIP
    >>> cupy.RawModule(code='#include "state.cuh" ...', options=(f"-I{cuattn.get_include()}",))  # doctest: +SKIP
    """
    from cuattn import kernels_cu

    assert kernels_cu.__file__ is not None
    return str(Path(kernels_cu.__file__).parent)


def source_text(file: str) -> str:
    """The whole text of a kernel file: our own headers pasted in, once each, with ``#line`` so errors find them."""
    folder, pasted = Path(get_include()), set[str]()

    def paste(name: str) -> str:
        pasted.add(name)
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines(), 1):
            header = re.match(r'\s*#include "([^"]+)"', line)
            if line.strip() == "#pragma once":  # a warning in a main file, and `pasted` does its work
                lines.append("")
            elif not header:
                lines.append(line)
            elif header[1] not in pasted:
                lines += [paste(header[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return "\n".join(lines)

    return paste(file) + "\n"


def build(kernel: Kernel, arch: str) -> Binary:
    """Machine code of `kernel` for `arch` (``"sm_90"``, ``"sm_90a"``, ``"compute_90"``), from the disk cache if there.

    Raises
    ------
    CompileError
        With the file, the defines and the compiler's log.
    ImportError
        If CuPy or NVRTC is not installed; the message names what to install.
    """
    version = _nvrtc().getVersion()
    text = source_text(kernel.file)
    options = (
        "-std=c++17",
        f"-arch={arch}",
        "--ptxas-options=-v",
        "-lineinfo",
        f"-I{_toolkit()[0]}",
        *(f"-DCUATTN_{name}={value}" for name, value in kernel.defines),
    )
    digest = hashlib.sha256()
    for part in (text, *options[:4], *options[5:], repr(version), _toolkit()[1]):
        digest.update(part.encode() + b"\0")
    key = digest.hexdigest()
    stored = _cache.load(key)
    if stored is not None:
        try:
            return Binary(stored[1], {name: Resources(**r) for name, r in stored[0].items()})
        except (AttributeError, TypeError):
            pass  # written by another version of cuattn
    debug(3, f"source of {kernel.file}\n{text}")
    started = time.perf_counter()
    code, log = _run_nvrtc(kernel, text, options, ptx=arch.startswith("compute"))
    binary = Binary(code, read_log(log))
    _refuse_slow_code(kernel, arch, binary, log)
    debug(2, f"{_title(kernel, arch)}: {time.perf_counter() - started:.2f} s, {binary.resources}")
    _cache.store(key, {name: vars(r) for name, r in binary.resources.items()}, code)
    return binary


def read_log(log: str) -> dict[str, Resources]:
    """Resources of each entry point from the text that ``ptxas -v`` writes."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if frame and registers:
            numbers = int(registers[1]), *(int(x) for x in frame.groups()), int(shared[1]) if shared else 0
            found[part.split("'", 1)[0]] = Resources(*numbers)
    return found


def _title(kernel: Kernel, arch: str) -> str:
    return f"{kernel.file} for {arch} with {' '.join(f'{n}={v}' for n, v in kernel.defines)}"


def _refuse_slow_code(kernel: Kernel, arch: str, binary: Binary, log: str) -> None:
    # Local memory is as slow as a spill; C7508 and C7510: setmaxnreg ignored, wgmma serialised.
    slow = [f"{n} uses local memory: {r}" for n, r in binary.resources.items() if r.stack or r.spill_stores]
    slow += [line for line in log.splitlines() if re.search(r"C75\d\d|serialized|setmaxnreg.*ignored", line)]
    if slow:
        raise CompileError("\n".join([f"{_title(kernel, arch)} compiles to slow code", *slow]))


def _run_nvrtc(kernel: Kernel, text: str, options: tuple[str, ...], *, ptx: bool) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, kernel.file, (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            arch = options[1].removeprefix("-arch=")
            raise CompileError(f"{_title(kernel, arch)} does not compile ({error})\n{log}") from None
        code = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
        if isinstance(code, str):
            code = code.encode()
        return code + b"\0", nvrtc.getProgramLog(program)  # the binding cuts off the last byte
    finally:
        nvrtc.destroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise ImportError(f"compiling kernels needs CuPy and NVRTC: pip install 'cuattn[cuda13x]' ({error})") from error
    return nvrtc


def supported_architectures() -> tuple[int, ...]:
    """Compute capabilities that this NVRTC can compile for, such as ``(75, 80, 90)``."""
    return tuple(sorted(_nvrtc().getSupportedArchs()))


@functools.cache
def _toolkit() -> tuple[str, str]:
    """The folder of cuda_fp16.h and its neighbours, and a digest of those that our sources include."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise ImportError("compiling kernels needs the CUDA headers: pip install 'cuattn[cuda13x]'")
    digest = hashlib.sha256()
    for pattern in ("cuda_fp16.h*", "cuda_bf16.h*", "cuda_fp8.h*"):
        for header in sorted(Path(found).glob(pattern)):
            digest.update(header.read_bytes())
    return found, digest.hexdigest()
