"""The CUDA sources as text: how they are pasted together, what each file must say, and their use by others."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cuattn
from cuattn import _compile
from cuattn._compile import CompileError, Kernel, build, source_text
from cuattn.testing import StateCase, assert_state, merge_bound
from tests.emulator import EmulatedModule
from tests.planted import plant, real_sources

SOURCES = real_sources()
KERNEL_FILES = sorted(name for name in SOURCES if name.endswith(".cu"))
HEADERS = sorted(name for name in SOURCES if name.endswith(".cuh"))
ASSEMBLY = {"mma.cuh", "hopper.cuh"}  # the only places of inline PTX

STATE = Kernel(
    "state.cu", "cuattn_merge_pair", (("TA", "float"), ("TB", "float"), ("TO", "float"), ("VEC", 1), ("SPLIT", 0))
)

# A kernel of a user: a row per thread, two features, and each state merged into the sum of those before it.
USER = """
#include "state.cuh"
extern "C" __global__ void user_merge(const float* outs, const float* lses, float* out, float* lse, int rows,
                                      int states) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    using Two = cuattn::State<2>;
    Two total = Two::empty();
    for (int s = 0; s < states; ++s) {
        const int at = s * rows + row;
        const float x[2] = {outs[2 * at], outs[2 * at + 1]};
        Two one = Two::empty(lses[at]);
        one.add(lses[at], x);
        total.merge(one);
    }
    float x[2];
    total.finish(lse[row], x);
    out[2 * row] = x[0];
    out[2 * row + 1] = x[1];
}
"""


def code_of(text: str) -> str:
    """Without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


# Pasting


@pytest.mark.parametrize("file", KERNEL_FILES)
def test_headers_are_pasted_once_and_before_their_use(file):
    text = source_text(file)
    starts = re.findall(r'^#line 1 "([^"]+)"', text, re.MULTILINE)
    assert starts[0] == file
    assert sorted(starts) == sorted(set(starts))
    assert set(starts) - {file} == headers_of(file)
    assert not re.search(r'^\s*#include "', text, re.MULTILINE)
    assert "#pragma once" not in text


def headers_of(file: str) -> set[str]:
    direct = set(re.findall(r'^\s*#include "([^"]+)"', SOURCES[file], re.MULTILINE))
    return direct.union(*map(headers_of, direct))


@pytest.mark.parametrize("file", KERNEL_FILES)
def test_every_pasted_line_knows_where_it_came_from(file):
    """Follow the #line directives as a compiler does: each line must be the one at that place, and none is left out."""
    name, following = file, dict.fromkeys(headers_of(file) | {file}, 1)
    for line in source_text(file).splitlines():
        if directive := re.fullmatch(r'#line (\d+) "([^"]+)"', line):
            number, name = int(directive[1]), directive[2]
            if number > 1:  # back from a header, whose include has no line of its own
                assert SOURCES[name].splitlines()[number - 2].startswith("#include"), f"{name}:{number}"
                following[name] += 1
            assert following[name] == number
        else:
            original = SOURCES[name].splitlines()[following[name] - 1]
            dropped = re.match(r'#include "|#pragma once', original)
            assert line == ("" if dropped else original), f"{name}:{following[name]}"
            following[name] += 1
    assert following == {name: len(SOURCES[name].splitlines()) + 1 for name in following}


@pytest.mark.compile
@pytest.mark.parametrize(
    ("file", "after"),
    [
        ("platform.cuh", "namespace cuattn {"),  # the header that all others include
        ("vec.cuh", "template <int BYTES> struct Word;"),  # after an include that was pasted before
        ("rows.cuh", '#include "platform.cuh"'),  # right behind an include
        ("state.cu", "constexpr int CHUNK"),  # after all includes
        ("state.cu", "// state.cu"),  # before them
    ],
)
def test_compile_errors_name_file_and_line(monkeypatch, tmp_path, file, after):
    lines = SOURCES[file].splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(after)) + 1
    lines.insert(at, "this is no C++;")
    plant(monkeypatch, tmp_path, {**SOURCES, file: "\n".join(lines)})
    with pytest.raises(CompileError) as caught:
        build(STATE, "sm_90")
    first = re.search(r"(\S+)\((\d+)\): error", str(caught.value))
    assert first is not None
    assert (first[1], int(first[2])) == (file, at + 1)


# What each file must say


@pytest.mark.parametrize("file", KERNEL_FILES)
def test_kernels_open_with_what_they_do(file):
    head = SOURCES[file].split("\n#", 1)[0].splitlines()
    assert all(line.startswith("//") for line in head)
    assert head[0].startswith(f"// {file} - ")
    words = [re.match(r"// (\w+)  ", line) for line in head]
    named = [w[1] for w in words if w]
    assert {"What", "Shapes", "Work", "Memory", "Oracle"} <= set(named)
    oracle = next(line.split()[2].split("::")[0] for line in head if line.startswith("// Oracle"))
    root = Path(__file__).parent.parent
    assert (root / oracle).is_file()


@pytest.mark.parametrize("file", HEADERS)
def test_headers_are_vocabulary(file):
    assert SOURCES[file].startswith(f"// {file} - ")
    assert "#pragma once" in SOURCES[file].splitlines()
    assert "__global__" not in code_of(SOURCES[file])


@pytest.mark.parametrize("file", sorted(set(SOURCES) - ASSEMBLY))
def test_assembly_stays_in_its_headers(file):
    assert not re.search(r"\b(__)?asm(__)?\b", code_of(SOURCES[file]))


# Kernels of users


def compile_user(text: str, arch: str) -> bytes:
    """As ``nvcc -I`` would: nothing is pasted."""
    options = ("-std=c++17", f"-arch={arch}", f"-I{cuattn.get_include()}", f"-I{_compile._toolkit()[0]}")
    return _compile._run_nvrtc(Kernel("user.cu", "user_merge"), text, options, ptx=False)[0]


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_get_include_serves_kernels_of_users(arch):
    assert b"user_merge" in compile_user(USER, arch)
    with pytest.raises(CompileError, match="has no member"):
        compile_user(USER.replace("total.finish", "total.end"), arch)


@pytest.mark.compile
@pytest.mark.parametrize("header", HEADERS)
def test_headers_stand_alone_and_together(header):
    everything = "".join(f'#include "{name}"\n' for name in [header, *HEADERS, header])
    for text in (f'#include "{header}"\n', everything):
        assert compile_user(text + 'extern "C" __global__ void user_merge() {}', "sm_90a")


@pytest.mark.emulator
@pytest.mark.parametrize("order", ["forward", "shuffle"])
@pytest.mark.parametrize(
    "case",
    [
        StateCase((70,), 5, 2),
        StateCase((33,), 2, 2, profile="some empty"),
        StateCase((3,), 4, 2, profile="all empty"),
        StateCase((40,), 7, 2, profile="one state dominates"),
    ],
    ids=repr,
)
def test_kernel_of_a_user_merges(monkeypatch, tmp_path, case, order):
    plant(monkeypatch, tmp_path, {**SOURCES, "user.cu": USER})  # the emulator's compiler gets one text
    module = EmulatedModule(source_text("user.cu"), ["user_merge"], name="user.cu")
    outs, lses = np.ascontiguousarray(case.outs()), np.ascontiguousarray(case.lses())
    (rows,) = case.rows
    out, lse = np.full((rows, 2), np.nan, np.float32), np.full(rows, np.nan, np.float32)
    args = (outs, lses, out, lse, np.int32(rows), np.int32(case.num_states))
    module.launch("user_merge", (-(-rows // 32),), (32,), args, order=order)
    assert_state((out, lse), case.expected(), merge_bound(outs, lses, "float32"), dtype="float32", case=case)
