"""From a kernel's text to machine code and its arguments: compile errors, slow code, logs, architectures. No GPU."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cuattn import _compile
from cuattn._compile import CompileError, Kernel, Resources, build, read_log
from cuattn._launch import architecture, by_value, refuse_bare_numbers
from tests.planted import TINY, TINY_HEADER, TINY_KERNEL, plant


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Write kernels of the test's own; their cache is empty."""
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))

    def write(text: str = TINY, name: str = "tiny.cu") -> Kernel:
        plant(monkeypatch, tmp_path / "kernels", {name: text, "tiny.cuh": TINY_HEADER})
        return TINY_KERNEL._replace(file=name)

    return write


# Compilation


@pytest.mark.compile
def test_compile_error_has_file_architecture_defines_and_log(planted):
    kernel = planted('extern "C" __global__ void tiny(float* x) {\n  *x = undeclared;\n}\n')
    with pytest.raises(CompileError) as caught:
        build(kernel._replace(defines=(("VALUE", 2), ("TA", "float"))), "sm_90")
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith("tiny.cu for sm_90 with VALUE=2 TA=float does not compile")
    assert second == 'tiny.cu(2): error: identifier "undeclared" is undefined'


@pytest.mark.compile
def test_unknown_architecture_is_a_compile_error(planted):
    with pytest.raises(CompileError, match=r"tiny.cu for sm_12 with VALUE=2 does not compile"):
        build(planted(), "sm_12")


INDEXED_ARRAY = """
extern "C" __global__ void tiny(float* x, int n) {
    float a[32];
    for (int i = 0; i < 32; ++i) a[i] = x[i * 7];
    a[n] += 1;
    for (int i = 0; i < 32; ++i) x[i] = a[(i * n) % 32];
}
"""
CALLED_FUNCTION = """
__device__ __noinline__ float f(const float* p, int n) {
    float a[32];
    for (int i = 0; i < 32; ++i) a[i] = p[i * 7];
    a[n] += 1;
    return a[n * 5 % 32] + a[n];
}
extern "C" __global__ void tiny(float* x, int n) { *x = f(x, n); }
"""
MANY_VALUES = """
extern "C" __global__ void __launch_bounds__(1024, 2) tiny(float* x, int n) {
    float a[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) a[i] = x[i * 32 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) x[(63 - i) * 33 + threadIdx.x] = a[i] * a[(i * 5 + 1) % 64];
}
"""
SETMAXNREG = """
extern "C" __global__ void __launch_bounds__(256) tiny(float* x) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    *x = 1;
}
"""
SLOW = {  # text and what is said about it
    "an array indexed at run time": (INDEXED_ARRAY, r"tiny uses local memory: Resources\(registers=\d+, stack=128,"),
    "a function with an array, not inlined": (CALLED_FUNCTION, r"tiny uses local memory"),
    "more values than registers": (MANY_VALUES, r"tiny uses local memory: .*spill_stores=[1-9]"),
    "setmaxnreg without a minimum of blocks": (SETMAXNREG, r".*C7508.*setmaxnreg.*ignored"),
}


@pytest.mark.compile
@pytest.mark.parametrize("fault", SLOW)
def test_slow_code_is_refused(planted, tmp_path, fault):
    text, message = SLOW[fault]
    with pytest.raises(CompileError, match=rf"tiny.cu for sm_90a with VALUE=2 compiles to slow code\n{message}"):
        build(planted(text), "sm_90a")
    assert not (tmp_path / "cache").exists()


@pytest.mark.compile
def test_setmaxnreg_that_is_honoured_is_not(planted):
    used = build(planted(SETMAXNREG.replace("(256)", "(256, 1)")), "sm_90a").resources["tiny"]
    assert used.registers > 24


@pytest.mark.compile
def test_machine_code_is_whole(planted):
    """NVRTC's binding cuts off a byte of what it returns."""
    code = build(planted(), "sm_90").code
    assert code[:4] == b"\x7fELF"
    (programs, sections), (size, count), (section_size, section_count) = (
        struct.unpack_from(form, code, at) for form, at in (("<QQ", 32), ("<HH", 54), ("<HH", 58))
    )
    assert max(programs + size * count, sections + section_size * section_count) == len(code)
    ptx = build(planted(), "compute_90").code
    assert ptx.count(b"\0") == ptx[-1:].count(b"\0") == 1
    assert b".entry tiny" in ptx
    assert b".target sm_90" in ptx


LOG = """ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 16 bytes cumulative stack size, 2048 bytes smem, 100 bytes cmem[0]
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : Compile time = 8.241 ms
ptxas info    : Function properties for helper
    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""


def test_read_log():
    assert read_log(LOG) == {"second": Resources(168, 16, 4, 12, 2048), "first": Resources(30, 0, 0, 0, 0)}
    assert read_log("") == {}


@pytest.mark.compile
def test_read_log_of_this_compiler(planted):
    body = "__shared__ float s[100]; s[threadIdx.x] = *x; __syncthreads(); *x = s[99 - threadIdx.x];"
    found = build(planted(TINY + f'extern "C" __global__ void other(float* x) {{ {body} }}\n'), "sm_75").resources
    assert {name: r.shared for name, r in found.items()} == {"tiny": 0, "other": 400}
    assert all(1 <= r.registers <= 24 and r.stack == r.spill_loads == r.spill_stores == 0 for r in found.values())


KNOWN = (75, 80, 86, 89, 90, 100, 120)
ARCHITECTURES = [
    ((7, 5), KNOWN, "", "sm_75"),
    ((8, 6), KNOWN, "", "sm_86"),
    ((8, 7), KNOWN, "", "sm_86"),  # not known: the nearest older one of its generation
    ((8, 9), (75, 80), "", "sm_80"),
    ((9, 0), KNOWN, "", "sm_90"),
    ((9, 0), KNOWN, "a", "sm_90a"),
    ((10, 3), KNOWN, "", "sm_100"),
    ((12, 1), KNOWN, "", "sm_120"),
    ((11, 0), KNOWN, "", "compute_100"),  # a generation that is not known: PTX, which the driver translates
    ((13, 0), KNOWN, "", "compute_120"),
    ((9, 0), (75, 89), "", "compute_89"),
]


@pytest.mark.parametrize(("capability", "supported", "suffix", "expected"), ARCHITECTURES)
def test_architecture_of_a_gpu(capability, supported, suffix, expected):
    assert architecture(capability, supported, suffix) == expected


def test_gpu_that_is_too_old():
    with pytest.raises(NotImplementedError, match=r"compute capability 7\.5 and newer; got 7\.0"):
        architecture((7, 0), KNOWN)


# Kernel arguments


def test_by_value_is_a_struct_of_64_bit_fields():
    value = by_value(1, -3, 2**40, np.int32(-5), np.int64(-(2**62)))
    assert isinstance(value, np.void)
    assert value.tobytes() == struct.pack("<5q", 1, -3, 2**40, -5, -(2**62))
    assert by_value(1, 2, size=4).tobytes() == struct.pack("<4q", 1, 2, 0, 0)
    assert by_value(1, 2, size=1).nbytes == 16


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 1.5, None])
def test_by_value_cuts_nothing_off(number):
    with pytest.raises((struct.error, OverflowError, TypeError)):
        by_value(1, number)


@pytest.mark.parametrize("bare", [True, 1, 1.5, 2**40])
def test_bare_numbers_are_refused(bare):
    message = rf"^tiny: argument 1 is a bare {type(bare).__name__}; pass a NumPy scalar$"
    with pytest.raises(TypeError, match=message):
        refuse_bare_numbers(TINY_KERNEL, [np.int32(1), bare])


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.bool_, np.float16, np.float32, np.float64])
def test_numpy_scalars_are_not_bare(kind):
    refuse_bare_numbers(TINY_KERNEL, [kind(1), None, np.zeros(3), by_value(1, 2)])


def test_supported_architectures_are_sorted():
    known = _compile.supported_architectures()
    assert list(known) == sorted(known)
    assert {75, 90} <= set(known)
