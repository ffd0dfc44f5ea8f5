"""Turns kernel text into a shared library with g++, and keeps the libraries in a cache on disk."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

HERE = pathlib.Path(__file__).parent
HEADERS = tuple(sorted(path.name for path in HERE.glob("cuemu*.h")))
SANITIZERS = {"address", "undefined"}
DEFAULT_SHARED_ALIGN, MAX_SHARED_ALIGN = 16, 1024  # the latter is kMaxSharedAlign

# NVIDIA's float headers choose by this macro between device code and the host code that runs here. Its usual
# definition comes in yet another package.
_NV_TARGET = "#pragma once\n#define NV_IF_ELSE_TARGET(condition, on_device, on_host) { on_host }\n"

# extern __shared__ [__align__(N)] TYPE NAME[];   (specifiers in any order)
_EXTERN_SHARED = re.compile(
    r"\bextern\s+(?P<specifiers>[^;{}=]*?\b__shared__\b[^;{}=]*?)\b(?P<name>\w+)\s*\[\s*\]\s*;"
)
_ALIGNMENT = re.compile(r"\b(?:__align__|alignas)\s*\(\s*(\d+)\s*\)")


class CompileError(RuntimeError):
    """g++ refused a kernel. `name`, `defines` and `log` say which one and why."""

    def __init__(self, name: str, defines: Mapping[str, str], log: str):
        self.name, self.defines, self.log = name, dict(defines), log
        super().__init__(f"{name} does not compile for the emulator; defines {self.defines}\n{log}")


def build(
    source: str,
    entries: Sequence[str],
    defines: Mapping[str, str],
    name: str,
    sanitize: str | None,
    optimize: str,
) -> tuple[pathlib.Path, int]:
    """Path of the library, from the cache if it is there, and the alignment of its dynamic shared memory."""
    text, shared_align = _bind_dynamic_shared(source)
    unit = _translation_unit(text, entries, defines, name)
    options = [*_common_flags(), optimize, *_sanitizer_flags(sanitize)]
    library = _cache_directory() / f"{_digest(_toolchain(), options, unit)}.so"
    if not library.exists():
        _compile(unit, options, library, name, defines)
    return library, shared_align


def sanitized_environment() -> dict[str, str]:
    """Environment for a subprocess whose modules use ``sanitize=``: the sanitizer has to be loaded first."""
    libraries = [_run_compiler(f"-print-file-name={name}").strip() for name in ("libasan.so", "libstdc++.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _bind_dynamic_shared(source: str) -> tuple[str, int]:
    """Text in which ``extern __shared__ T name[];`` is a pointer to shared memory, and its alignment."""
    found = [int(n) for m in _EXTERN_SHARED.finditer(source) for n in _ALIGNMENT.findall(m["specifiers"])]
    align = max([DEFAULT_SHARED_ALIGN, *found])
    if align > MAX_SHARED_ALIGN:
        raise ValueError(f"dynamic shared memory: alignment must be at most {MAX_SHARED_ALIGN}; got {align}")

    def pointer(match: re.Match) -> str:
        element = _ALIGNMENT.sub("", match["specifiers"]).replace("__shared__", "")
        element = " ".join(element.split())
        value = f"({element}*)(cuemu::shared_arena + {align})"
        newlines = "\n" * match[0].count("\n")  # later lines keep their numbers
        return f"static {element}* const {match['name']} = {value};{newlines}"

    return _EXTERN_SHARED.sub(pointer, source), align


def _translation_unit(text: str, entries: Sequence[str], defines: Mapping[str, str], name: str) -> str:
    # Not by -D, so that no name can change the emulator's headers or forbid their precompiled form.
    macros = "".join(f"#define {macro} {value}\n" for macro, value in defines.items())
    # The unnamed namespace keeps templates and their statics private to the module. Else the loader might
    # unite those of modules compiled with other tile sizes, and AddressSanitizer would not guard them.
    exports = "".join(f"CUEMU_EXPORT({entry})\n" for entry in entries)
    kernels = f'namespace {{\n#line 1 "{name}"\n{text}\n}}\n'
    return f'#include "cuemu.h"\n{macros}{kernels}#line 1 "exports of {name}"\n{exports}'


def _sanitizer_flags(sanitize: str | None) -> list[str]:
    if sanitize is None:
        return []
    names = sanitize.split(",")
    if not set(names) <= SANITIZERS:
        raise ValueError(f"sanitize must name {sorted(SANITIZERS)}; got {sanitize!r}")
    if "address" in names and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        raise RuntimeError("sanitize='address' needs a process started with sanitized_environment()")
    # A finding ends the process: later ones may be its consequences.
    return [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]


def _compile(
    unit: str, options: list[str], library: pathlib.Path, name: str, defines: Mapping[str, str]
) -> None:
    includes = ["-I", str(_precompiled_header(tuple(options)))]
    handle, temporary = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    command = [*options, *includes, "-shared", "-x", "c++", "-", "-o", temporary]
    try:
        _run_compiler(*command, text=unit)
    except subprocess.CalledProcessError as error:
        os.unlink(temporary)
        raise CompileError(name, defines, error.stderr) from None
    os.replace(temporary, library)  # another process may have been faster: its file is as good


@functools.cache
def _precompiled_header(options: tuple[str, ...]) -> pathlib.Path:
    """Directory with the emulator's headers, parsed once: NVIDIA's take longer than most kernels."""
    directory = _cache_directory() / f"headers-{_digest(_toolchain(), options)}"
    if directory.exists():
        return directory
    temporary = pathlib.Path(tempfile.mkdtemp(dir=directory.parent))
    (temporary / "nv").mkdir()
    (temporary / "nv" / "target").write_text(_NV_TARGET)
    for header in HEADERS:
        shutil.copy(HERE / header, temporary)
    header = str(temporary / "cuemu.h")
    try:
        _run_compiler(*options, "-I", str(temporary), "-x", "c++-header", header, "-o", f"{header}.gch")
    except subprocess.CalledProcessError as error:
        shutil.rmtree(temporary)
        raise CompileError("cuemu.h", {}, error.stderr) from None
    try:
        temporary.rename(directory)
    except OSError:  # another process was faster
        shutil.rmtree(temporary)
    return directory


def _common_flags() -> list[str]:
    includes = [flag for path in _nvidia_includes() for flag in ("-isystem", path)]
    return [
        "-std=c++17", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-DCUEMU=1", *includes,
        "-ffp-contract=off", "-fno-strict-aliasing", "-fsigned-char",  # as NVRTC sees the language
        "-fvisibility=hidden", *(["-mtls-dialect=gnu2"] if os.uname().machine == "x86_64" else []),
    ]  # fmt: skip


@functools.cache
def _nvidia_includes() -> tuple[str, ...]:
    """Folders of CUDA's headers: NVIDIA's wheels (one since CUDA 13, several before), or CUDA_PATH."""
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(path) for path in (spec and spec.submodule_search_locations) or ()]
    candidates = [folder for root in roots for folder in sorted(root.glob("*/include"))]
    if "CUDA_PATH" in os.environ:
        candidates.append(pathlib.Path(os.environ["CUDA_PATH"]) / "include")
    wanted = ("cuda_fp16.h", "crt/host_defines.h")
    folders = [str(folder) for folder in candidates if any((folder / header).exists() for header in wanted)]
    if not folders:
        raise RuntimeError("the emulator needs CUDA's headers: nvidia-cuda-runtime and nvidia-cuda-crt")
    return tuple(folders)


@functools.cache
def _toolchain() -> str:
    """Digest of all that a library depends on besides its own text and options."""
    folders = [pathlib.Path(folder) for folder in _nvidia_includes()]
    nvidia = [path for folder in folders for path in sorted(folder.glob("cuda_[fb]*.h*"))]  # fp16, bf16, fp8
    texts = [path.read_bytes() for path in [*(HERE / header for header in HEADERS), *nvidia]]
    return _digest(_run_compiler("--version"), _NV_TARGET, *texts)


def _run_compiler(*arguments: str, text: str = "") -> str:
    command = [os.environ.get("CXX", "g++"), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _cache_directory() -> pathlib.Path:
    default = pathlib.Path(tempfile.gettempdir()) / f"cuattn-emulator-{os.getuid()}"
    directory = pathlib.Path(os.environ.get("CUATTN_EMU_CACHE", default))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise RuntimeError(f"{directory} belongs to somebody else; set CUATTN_EMU_CACHE to one of your own")
    return directory
