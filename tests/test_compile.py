"""Every kernel of every tile, compiled for every architecture: no spills, registers within tests/registers.json.

The table has a ceiling of registers and the static shared bytes for each entry and tile, over all architectures and
types, and the place where the ceiling is reached. After a change of a kernel that is meant to cost registers:

    python -m tests.test_compile --write
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import _compile
from cuattn._compile import Kernel, build

TABLE = Path(__file__).with_name("registers.json")
SLACK = 8  # registers by which a ceiling may exceed what is reached: the step in which a GPU hands them out
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16, "float": np.float32}

PLANS = [importlib.import_module(f"cuattn.{p.stem}") for p in Path(cuattn.__file__).parent.glob("_plan_*.py")]
KERNELS = [kernel for module in PLANS for kernel in module.kernels()]


class Group(NamedTuple):
    """What one test compiles."""

    file: str
    types: tuple[str, ...]
    arch: str


class Measured(NamedTuple):
    """Registers and static shared bytes of one entry of one tile, and where."""

    name: str  # as in the table
    registers: int
    shared: int
    group: Group


def architectures(file: str) -> tuple[str, ...]:
    """Those that a source file is for."""
    if file.endswith("_sm90.cu"):
        return ("sm_90a",)
    return ARCHITECTURES[1:] if file.endswith("_mma.cu") else ARCHITECTURES


def types_of(kernel: Kernel) -> tuple[str, ...]:
    return tuple(value for _, value in kernel.defines if isinstance(value, str))


def name_of(kernel: Kernel) -> str:
    tile = [f"{name}={value}" for name, value in kernel.defines if isinstance(value, int)]
    first = types_of(kernel)[0]  # a word of memory goes by its own name
    return " ".join([kernel.entry, *tile, f"itemsize={np.dtype(DTYPES[first]).itemsize}" if first in DTYPES else first])


def measure(group: Group, name: str | None = None) -> list[Measured]:
    """Compile the tiles of a group, each once; `build` refuses spills and local memory in any of its entries."""
    found = []
    for kernel in KERNELS:
        if (kernel.file, types_of(kernel)) == group[:2] and name in (None, name_of(kernel)):
            used = build(kernel, group.arch).resources[kernel.entry]
            found.append(Measured(name_of(kernel), used.registers, used.shared, group))
    return found


FILES_AND_TYPES = dict.fromkeys((k.file, types_of(k)) for k in KERNELS)
GROUPS = [Group(file, types, arch) for file, types in FILES_AND_TYPES for arch in architectures(file)]


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this run, so that an earlier one hides nothing; the workers of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUATTN_CACHE_DIR", str(shared / "compiled"))
        yield


@pytest.fixture(scope="module")
def table() -> dict:
    return json.loads(TABLE.read_text(encoding="utf-8"))


# Compilation


@pytest.mark.compile
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: "-".join([g.file, *g.types, g.arch]))
def test_kernels_keep_their_registers(table, group):
    wrong = []
    for m in measure(group):
        entry = table["kernels"].get(m.name, {"registers": 0, "shared": 0})
        if m.registers > entry["registers"] or m.shared != entry["shared"]:
            wrong.append(f"{m.name}: {m.registers} registers, {m.shared} bytes shared; the table has {entry}")
    assert not wrong, "\n".join([*wrong, versions(table)])


@pytest.mark.compile
@pytest.mark.parametrize("name", sorted({name_of(k) for k in KERNELS}))
def test_ceilings_are_reached(table, name):
    entry = table["kernels"][name]
    group = Group(entry["reached"][0], tuple(entry["reached"][1:-1]), entry["reached"][-1])
    reached = max(m.registers for m in measure(group, name))
    assert entry["registers"] - SLACK <= reached <= entry["registers"], versions(table)


def test_table_has_no_other_kernels(table):
    assert set(table["kernels"]) == {name_of(k) for k in KERNELS}


def versions(table: dict) -> str:
    return f"the table is from NVRTC {table['nvrtc']}, this is {list(_compile._nvrtc().getVersion())}; {__doc__}"


def test_architectures_of_a_file():
    assert architectures("decode.cu") == ARCHITECTURES
    assert architectures("decode_mma.cu") == ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
    assert architectures("prefill_sm90.cu") == ("sm_90a",)
    known = set(_compile.supported_architectures())
    assert {int(re.sub(r"\D", "", arch)) for arch in ARCHITECTURES} <= known


# The enumeration: everything that a plan can choose, and nothing else


def test_every_source_is_compiled():
    sources = {p.name for p in Path(cuattn.get_include()).glob("*.cu")}
    assert sources == {kernel.file for kernel in KERNELS}
    assert len(set(KERNELS)) == len(KERNELS)


@pytest.mark.parametrize("file", sorted({k.file for k in KERNELS}))
def test_every_entry_of_a_source_is_compiled(file):
    text = re.sub(r"__launch_bounds__\(.*?\)", "", _compile.source_text(file))
    declared = re.findall(r"__global__\s+void\s+(\w+)\(", text)
    assert sorted(declared) == sorted({k.entry for k in KERNELS if k.file == file})
    assert text.count("__global__") == len(declared)


def write_table() -> None:
    """Compile everything and write what is found."""
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor() as workers:
        os.environ["CUATTN_CACHE_DIR"] = cache  # before the first task starts the workers
        found = sorted(itertools.chain(*workers.map(measure, GROUPS)))
    kernels = {}
    for name, same in itertools.groupby(found, lambda m: m.name):
        tiles = list(same)
        top = max(tiles, key=lambda m: m.registers)
        shared = {m.shared for m in tiles}
        assert len(shared) == 1, f"{name} has several amounts of shared memory: {shared}"
        reached = [top.group.file, *top.group.types, top.group.arch]
        kernels[name] = {"registers": top.registers, "shared": top.shared, "reached": reached}
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in kernels.items())
    version = json.dumps(_compile._nvrtc().getVersion())
    TABLE.write_text(f'{{\n  "nvrtc": {version},\n  "kernels": {{\n{rows}\n  }}\n}}\n', encoding="utf-8")
    print(f"{TABLE.name}: {len(kernels)} kernels from {len(found)} measurements")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write_table()
