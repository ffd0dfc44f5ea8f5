"""The CPU emulator: arguments of a launch, what a launch and a compilation refuse, the cache of libraries."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.emulated import ROOT, compiled
from tests.emulator import CompileError, EmulatedModule, build

pytestmark = pytest.mark.emulator

ARGUMENTS = r"""
struct alignas(16) Pair { double x; int y; };
extern "C" __global__ void take(double* out, const int* maybe, int i, long long l, float f, bool b, __half h,
                                Pair p, size_t a) {
    out[0] = maybe ? maybe[0] : -1;
    out[1] = i, out[2] = l, out[3] = f, out[4] = b, out[5] = __half2float(h), out[6] = p.x + p.y;
    out[7] = a % 64;
}
extern "C" __global__ void nothing() {}
"""
PAIR = np.array([(0.5, 7)], np.dtype([("x", "f8"), ("y", "i4")], align=True))[0]
GOOD = (
    np.zeros(8), np.array([3, 4], np.int32)[1:], np.int32(-5), np.int64(2**40), np.float32(0.1),
    np.bool_(True),
    np.float16(1.5), PAIR, np.uint64(65),
)  # fmt: skip


def arguments() -> EmulatedModule:
    return compiled(ARGUMENTS, "take nothing")


def test_arguments_arrive():
    for maybe, first in ((GOOD[1], 4), (None, -1), (np.uintp(GOOD[1].ctypes.data), 4)):
        arguments().launch("take", (1,), (1,), (GOOD[0], maybe, *GOOD[2:]))
        assert GOOD[0].tolist() == [first, -5, 2**40, float(np.float32(0.1)), 1, 1.5, 7.5, 1]
    arguments().launch("nothing", (1,), (1,), ())


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (2, 5, "take: argument 2 must be a NumPy array or scalar or None; got int"),
        (4, 0.5, "take: argument 4 must be a NumPy array .* got float"),
        (5, True, "take: argument 5 must be .* got bool"),
        (2, np.int64(5), "take: argument 2 must have 4 bytes; got int64 of 8"),
        (3, np.int32(5), "take: argument 3 must have 8 bytes; got int32 of 4"),
        (7, np.zeros(1, "f8,f8,f8")[0], "take: argument 7 must have 16 bytes; got .* of 24"),
        (6, np.float32(1), "take: argument 6 must have 2 bytes; got float32"),
        (4, np.int32(1), "take: argument 4 must be a float; got int32"),
        (2, np.float32(1), "take: argument 2 must be an integer; got float32"),
        (0, np.float64(1), "take: argument 0 must be an array, None or an address; got float64"),
        (3, np.zeros(1, np.int64), "take: argument 3 must be a scalar of 8 bytes; got ndarray"),
        (3, None, "take: argument 3 must be a scalar of 8 bytes; got NoneType"),
    ],
)
def test_wrong_arguments_are_refused(position, wrong, message):
    args = [*GOOD[:position], wrong, *GOOD[position + 1 :]]
    with pytest.raises(TypeError, match=message):
        arguments().launch("take", (1,), (1,), args)


def test_wrong_launches_are_refused():
    with pytest.raises(TypeError, match="take: takes 9 arguments; got 8"):
        arguments().launch("take", (1,), (1,), GOOD[:-1])
    refused = [
        ((0,), (1,)),
        ((1,), (0,)),
        ((1,), (1025,)),
        ((1,), (1, 1, 65)),
        ((1, 65536), (1,)),
        ((), (1,)),
    ]
    for grid, block in refused:
        with pytest.raises(ValueError, match=r"nothing: (grid|block) must be up to three sizes"):
            arguments().launch("nothing", grid, block, ())
    with pytest.raises(ValueError, match=r"block must have at most 1024 threads; got \(32, 33, 1\)"):
        arguments().launch("nothing", (1,), (32, 33), ())
    with pytest.raises(ValueError, match=r"shared_bytes must be in 0..232448; got 232449"):
        arguments().launch("nothing", (1,), (1,), (), shared_bytes=232449)
    with pytest.raises(ValueError, match="order must be one of"):
        arguments().launch("nothing", (1,), (1,), (), order="backward")


def test_compile_errors_name_file_line_and_defines():
    source = '#line 7 "inner.cuh"\n\nextern "C" __global__ void k() { undeclared = VALUE; }'
    with pytest.raises(CompileError, match=r"(?s)my.cu .*'VALUE': '12'.*inner.cuh:8.*undeclared") as error:
        EmulatedModule(source, ["k"], {"VALUE": "12"}, name="my.cu")
    assert (error.value.name, error.value.defines) == ("my.cu", {"VALUE": "12"})


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("void __cluster_dims__(2, 1, 1) k() {}", "no thread block clusters"),
        ("void k(long long* x) { atomicAdd(x, 1ll); }", "CUDA has no atomicAdd for this type"),
        ("void k(long long* x) { x[0] = min(x[0], 1); }", "ambiguous"),
    ],
)
def test_refused_as_by_nvrtc_or_not_supported(kernel, message):
    with pytest.raises(CompileError, match=message):
        EmulatedModule(f'extern "C" __global__ {kernel}', ["k"])


def test_the_cache_knows_what_a_library_depends_on(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_cache_directory", lambda: tmp_path)
    commands = []
    run = build._run_compiler

    def counted(*arguments, **options):
        commands.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(build, "_run_compiler", counted)

    def compilations(text="", defines=None, **options) -> int:
        before = len(commands)
        EmulatedModule(f'extern "C" __global__ void k() {{{text}}}', ["k"], defines or {}, **options)
        return len(commands) - before

    build._precompiled_header((*build._common_flags(), "-O2"))
    variants: list[dict] = [
        {},
        {"text": ";"},
        {"defines": {"A": "1"}},
        {"defines": {"A": "2"}},
        {"name": "other.cu"},
    ]
    assert [compilations(**v) for v in variants] == [1] * 5
    assert [compilations(**v) for v in variants] == [0] * 5
    monkeypatch.setattr(build, "_toolchain", lambda: "another compiler, or other headers")
    assert compilations() > 0


def test_processes_may_compile_at_once(tmp_path):
    script = """if True:
        import numpy as np
        from tests.emulator import EmulatedModule
        x = np.zeros(1, np.int32)
        source = 'extern "C" __global__ void k(int* x) { x[0] = 5; }'
        EmulatedModule(source, ["k"]).launch("k", (1,), (1,), (x,))
        assert x[0] == 5"""
    environment = {**os.environ, "CUATTN_EMU_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2  # one library, one folder of headers, nothing temporary
