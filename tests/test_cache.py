"""The disk cache of compiled kernels: what its key covers, damage, folders that can't be used, many processes."""

from __future__ import annotations

import errno
import importlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuattn import _cache, _compile
from cuattn._compile import CompileError, build
from tests.planted import TINY, TINY_HEADER, TINY_KERNEL, count_compilations, plant, real_sources

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.compile


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache, and a kernel that compiles at once."""
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))
    plant(monkeypatch, tmp_path / "kernels", {"tiny.cu": TINY, "tiny.cuh": TINY_HEADER})
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    return count_compilations(monkeypatch)


def only_file(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


# Hits and what makes a miss


def test_second_build_is_read_from_disk(cache, compilations):
    first, second = build(TINY_KERNEL, "sm_90"), build(TINY_KERNEL, "sm_90")
    assert compilations == ["tiny.cu"]
    assert first == second
    assert first.resources["tiny"].registers > 0
    assert only_file(cache).name.isalnum()


def test_entries_of_a_file_share_their_code(cache, compilations):
    assert build(TINY_KERNEL, "sm_90") == build(TINY_KERNEL._replace(entry="other"), "sm_90")
    assert compilations == ["tiny.cu"]


def newer_nvrtc(patch: pytest.MonkeyPatch) -> None:
    names = ["createProgram", "compileProgram", "getProgramLog", "getCUBIN", "destroyProgram", "NVRTCError"]
    same = {name: getattr(_compile._nvrtc(), name) for name in names}
    newer = SimpleNamespace(getVersion=lambda: (99, 0), **same)
    patch.setattr(_compile, "_nvrtc", lambda: newer)


def other_cuda_headers(patch: pytest.MonkeyPatch) -> None:
    found = _compile._toolkit()[0]
    patch.setattr(_compile, "_toolkit", lambda: (found, "another digest"))


CHANGES = {
    "header": lambda patch, folder: plant(patch, folder, {"tiny.cuh": TINY_HEADER.replace("1", "3")}),
    "source": lambda patch, folder: plant(patch, folder, {"tiny.cu": TINY + "// a comment\n"}),
    "nvrtc": lambda patch, folder: newer_nvrtc(patch),
    "cuda headers": lambda patch, folder: other_cuda_headers(patch),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_below_compiles_anew(cache, compilations, monkeypatch, tmp_path, change):
    build(TINY_KERNEL, "sm_90")
    CHANGES[change](monkeypatch, tmp_path / "kernels")
    build(TINY_KERNEL, "sm_90")
    assert len(compilations) == len(list(cache.iterdir())) == 2


def test_defines_and_architecture_are_part_of_the_key(cache, compilations):
    wanted = [(TINY_KERNEL, arch) for arch in ("sm_75", "sm_90", "sm_90a", "compute_90")]
    wanted += [(TINY_KERNEL._replace(defines=d), "sm_90") for d in ((("VALUE", 3),), (("VALUE", 2), ("OTHER", 1)))]
    codes = [build(*w).code for w in wanted]
    assert len(compilations) == len(list(cache.iterdir())) == len(wanted)
    assert [build(*w).code for w in wanted] == codes
    assert len(compilations) == len(wanted)


def test_place_of_the_cuda_headers_is_not(cache, compilations, monkeypatch, tmp_path):
    build(TINY_KERNEL, "sm_90")
    digest = _compile._toolkit()[1]
    monkeypatch.setattr(_compile, "_toolkit", lambda: (str(tmp_path), digest))
    build(TINY_KERNEL, "sm_90")
    assert len(compilations) == 1


def test_digest_of_the_cuda_headers_covers_what_sources_include(monkeypatch, tmp_path):
    """NVIDIA's headers, too, change while the options and NVRTC stay the same."""
    pathfinder = importlib.import_module("cuda.pathfinder")
    found = Path(pathfinder.find_nvidia_header_directory("cudart"))
    for header in found.glob("cuda_[bf]*.h*"):
        shutil.copy(header, tmp_path)
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda _: str(tmp_path))
    digest = _compile._toolkit.__wrapped__
    included = {h for text in real_sources().values() for h in re.findall(r"^#include <(\S+)>", text, re.MULTILINE)}
    for header in sorted(included):
        before = digest()
        assert before[0] == str(tmp_path)
        with (tmp_path / header).open("a") as file:
            file.write("// changed\n")
        assert digest()[1] != before[1], header


def test_refused_code_is_not_kept(cache, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path / "kernels", {"tiny.cu": "no C++"})
    with pytest.raises(CompileError):
        build(TINY_KERNEL, "sm_90")
    assert not cache.exists()


# Damage


@pytest.mark.parametrize("kept", [0, 1, 60, 100, -1])
def test_truncated_file_is_compiled_anew(cache, compilations, kept):
    first = build(TINY_KERNEL, "sm_90")
    whole = only_file(cache).read_bytes()
    only_file(cache).write_bytes(whole[:kept])
    assert build(TINY_KERNEL, "sm_90") == first
    assert len(compilations) == 2
    assert only_file(cache).read_bytes() == whole


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), in_header=st.booleans())
@settings(max_examples=200)
def test_a_flipped_bit_is_no_hit_with_other_contents(place, bit, in_header):
    """Wherever it is: in the code, the digest, or the resources that a launch relies on."""
    resources = {"tiny": {"registers": 8, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 2048}}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUATTN_CACHE_DIR", folder)
        _cache.store("key", resources, b"code\nof\0some length")
        whole = bytearray((Path(folder) / "key").read_bytes())
        end = whole.index(b"\n") if in_header else len(whole)
        whole[int(place * end)] ^= 1 << bit
        (Path(folder) / "key").write_bytes(whole)
        assert _cache.load("key") in (None, (resources, b"code\nof\0some length"))


@pytest.mark.parametrize("resources", [{"tiny": {}}, {"tiny": {"registers": 8, "new_field": 1}}, ["tiny"], None])
def test_resources_that_this_version_does_not_know_are_compiled_anew(cache, compilations, resources):
    first = build(TINY_KERNEL, "sm_90")
    _cache.store(only_file(cache).name, resources, first.code)  # intact, from another version
    assert build(TINY_KERNEL, "sm_90") == first
    assert len(compilations) == 2


# Folders


def test_missing_folder_is_made(cache, compilations, monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(cache / "a" / "b"))
    build(TINY_KERNEL, "sm_90")
    build(TINY_KERNEL, "sm_90")
    assert len(compilations) == len(list((cache / "a" / "b").iterdir())) == 1


@pytest.mark.parametrize("below", [".", "deeper"])
def test_file_in_place_of_the_folder(cache, compilations, monkeypatch, tmp_path, below):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "file" / below))
    assert build(TINY_KERNEL, "sm_90") == build(TINY_KERNEL, "sm_90")
    assert len(compilations) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_read_only_folder(cache, compilations, monkeypatch):
    cache.mkdir(mode=0o555)

    def refuse(**_: object) -> None:  # root may write anywhere, so the mode alone does not tell
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert build(TINY_KERNEL, "sm_90") == build(TINY_KERNEL, "sm_90")
    assert len(compilations) == 2
    assert not list(cache.iterdir())


@pytest.mark.parametrize("step", ["fdopen", "replace"])
def test_full_disk_leaves_no_temporary_file(cache, compilations, monkeypatch, step):
    def full(handle: int | str, *_: object) -> None:
        if isinstance(handle, int):
            os.close(handle)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_cache.os, step, full)
    build(TINY_KERNEL, "sm_90")
    assert compilations == ["tiny.cu"]
    assert not list(cache.iterdir())


def test_folder_of_the_user(cache, monkeypatch, tmp_path):
    for name in ("CUATTN_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cache.directory() == tmp_path / ".cache" / "cuattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert _cache.directory() == tmp_path / "other" / "cuattn"


def test_user_without_a_home(cache, compilations, monkeypatch, tmp_path):
    """A container that runs under a number without a name."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("CUATTN_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    build(TINY_KERNEL, "sm_90")
    assert compilations == ["tiny.cu"]
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]  # no folder of the name ~


# Many processes

RACE = """
import hashlib, pathlib, sys, time
import pytest
from cuattn import _compile
from tests.planted import count_compilations, plant
patch = pytest.MonkeyPatch()
seen = count_compilations(patch)
here, number = pathlib.Path(sys.argv[1]), sys.argv[2]
# Work for about half a second.
loop = "for (int i = 0; i < 200; ++i) { x[i] = expf(x[i]) / x[i + 200]; }"
text = 'extern "C" __global__ void slow(float* x) {\\n#pragma unroll\\n' + loop + "}"
plant(patch, here / f"kernels-{number}", {"slow.cu": text})
_compile._nvrtc().getVersion()
(here / f"ready-{number}").touch()
while not (here / "go").exists():
    time.sleep(0.001)
binary = _compile.build(_compile.Kernel("slow.cu", "slow"), "sm_90")
print(len(seen), hashlib.sha256(binary.code).hexdigest(), sorted(binary.resources))
"""


def test_processes_compile_one_kernel_at_once(tmp_path):
    cache = tmp_path / "cache"
    env = {**os.environ, "CUATTN_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}

    def start(number: int) -> subprocess.Popen:
        command = [sys.executable, "-c", RACE, str(tmp_path), str(number)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    racers = [start(n) for n in range(2)]
    while not all((tmp_path / f"ready-{n}").exists() or racers[n].poll() is not None for n in range(2)):
        os.sched_yield()
    (tmp_path / "go").touch()
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    last = start(2)
    outputs.append(last.communicate(timeout=60)[0])
    compiled, results = zip(*(text.split(" ", 1) for text in outputs))
    assert compiled == ("1", "1", "0")  # both were at it at once, and what they left is valid
    assert len(set(results)) == 1
    assert len(only_file(cache).name) == 64  # and nothing beside it
