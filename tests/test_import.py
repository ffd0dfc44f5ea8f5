"""Importing cuattn, with and without what it uses, in processes of their own; and what an installation contains."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import cuattn

ROOT = Path(__file__).parent.parent
OPTIONAL = {"cupy", "cupy_backends", "cuda", "numba", "llvmlite", "scipy", "hypothesis", "pytest"}

TIMED = """
import sys, time
started = time.perf_counter()
import cuattn
elapsed = time.perf_counter() - started
import json
print(json.dumps([elapsed, sorted({name.split(".")[0] for name in sys.modules})]))
"""

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"cupy", "cupy_backends", "cuda"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

WITHOUT_NVRTC = """
from cuda import pathfinder

def load(name, load=pathfinder.load_nvidia_dynamic_lib):
    if name == "nvrtc":
        raise pathfinder.DynamicLibNotFoundError("no nvrtc here")
    return load(name)

pathfinder.load_nvidia_dynamic_lib = load
"""

BUILD = """
import pathlib
from cuattn import _compile
folder = pathlib.Path("kernels")
folder.mkdir()
(folder / "tiny.cu").write_text('extern "C" __global__ void tiny() {}')
_compile.get_include = lambda: str(folder)
try:
    print(sorted(_compile.build(_compile.Kernel("tiny.cu", "tiny"), "sm_90").resources))
except ImportError as error:
    print(error)
"""

ON_NUMPY = """
import numpy as np, cuattn
one = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
two = np.full((3, 4), 3, np.float16), np.zeros(3, np.float32)
state = cuattn.merge_state(*one, *two)
assert (state.out == 2).all() and np.allclose(state.lse, np.log(2)), state
assert cuattn.merge_states(np.stack([one[0]] * 4), np.stack([one[1]] * 4)).out.dtype == np.float32
assert cuattn.get_include()

class Tensor:
    shape, dtype = (3, 4), np.dtype(np.float32)

class Dlpack(Tensor):
    def __dlpack_device__(self):
        return (2, 0)

class Interface(Tensor):
    __cuda_array_interface__ = {"shape": (3, 4), "typestr": "<f4", "data": (256, False), "version": 3}

for foreign in (Dlpack(), Interface()):
    try:
        cuattn.merge_state(foreign, one[1], *two)
    except TypeError as error:
        print(error)
"""


def run(script: str, folder: Path, *options: str) -> str:
    """Standard output of a process with a home, a current directory and a temporary one of its own in `folder`."""
    own = {name: str(folder) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "CUATTN_CACHE_DIR")}
    env = {**os.environ, **own, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *options, "-c", script]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The import


def test_import_takes_less_than_300_ms(tmp_path):
    run("import cuattn", tmp_path)  # the files are in memory from here on
    times = [json.loads(run(TIMED, tmp_path))[0] for _ in range(7)]
    assert min(times) < 0.3, times  # the others waited for other processes


def test_import_loads_no_optional_package(tmp_path):
    modules = set(json.loads(run(TIMED, tmp_path))[1])
    assert {"cuattn", "numpy"} <= modules
    assert not modules & OPTIONAL


def test_import_creates_no_files(tmp_path):
    assert run("import cuattn, cuattn.testing; print(cuattn.get_include())", tmp_path)
    assert not list(tmp_path.iterdir())


def test_import_does_not_look_at_settings(monkeypatch, tmp_path):
    """The first call that looks refuses a wrong one, see tests/test_settings.py."""
    for name in ("CUATTN_CHECK", "CUATTN_DEBUG"):
        monkeypatch.setenv(name, "valeus")
    run("import cuattn, cuattn.testing", tmp_path)


def test_import_warns_of_nothing(tmp_path):
    run("import cuattn", tmp_path, "-W", "error")


def test_all_names_exist_and_are_sorted():
    assert all(hasattr(cuattn, name) for name in cuattn.__all__)
    assert cuattn.__all__ == sorted(cuattn.__all__)


def classes(hint: object) -> set[type]:
    """Those that an annotation is made of."""
    if parts := typing.get_args(hint):
        return set().union(*map(classes, parts))
    return {hint} if isinstance(hint, type) else set()


def test_types_of_results_are_public():
    public = [getattr(cuattn, name) for name in cuattn.__all__ if name != "__version__"]
    calls = [x for x in public if not isinstance(x, type)]
    for owner in set(public).difference(calls):
        members = [x.fget if isinstance(x, property) else x for name, x in inspect.getmembers(owner) if name[0] != "_"]
        calls += filter(inspect.isfunction, members)
    found = set().union(*(classes(typing.get_type_hints(call).get("return")) for call in calls))
    ours = {x for x in found if x.__module__.startswith("cuattn")}
    assert {cuattn.AttentionState, cuattn.DecodePlan, cuattn.PageEvent, cuattn.Swap} <= ours <= set(public)


@pytest.mark.parametrize("kind", [cuattn.AttentionState, cuattn.DecodePlan, cuattn.PageEvent, cuattn.Swap])
def test_fields_of_results_are_documented(kind):
    fields = kind._fields if issubclass(kind, tuple) else kind.__dataclass_fields__
    documented = re.findall(r"^ *(\w[\w, ]*) : ", kind.__doc__, re.MULTILINE)
    assert [x for names in documented for x in names.split(", ")] == [*fields]


NAMESAKES = """
import sys
import cuattn, cuattn.decode
from cuattn.decode import plan_decode
assert cuattn.decode is sys.modules["cuattn.decode"].decode and cuattn.plan_decode is plan_decode
"""


def test_decode_is_the_function_and_its_module_can_be_imported_from(tmp_path):
    run(NAMESAKES, tmp_path)


# Without CuPy, without NVRTC


def test_without_cupy_numpy_arrays_merge(tmp_path):
    lines = run(BLOCKED + ON_NUMPY, tmp_path).splitlines()
    rule = "merge_state: out_a must be a NumPy array or an array on a CUDA device; got __main__."
    assert [line.removeprefix(rule) for line in lines] == [
        f"{kind}, and CuPy is not installed" for kind in ("Dlpack", "Interface")
    ]


@pytest.mark.parametrize("without", [BLOCKED, WITHOUT_NVRTC], ids=["CuPy", "NVRTC"])
def test_without_a_compiler_build_says_what_to_install(tmp_path, without):
    assert "pip install 'cuattn[cuda13x]'" in run(without + BUILD, tmp_path)


@pytest.mark.compile
def test_with_both_it_builds(tmp_path):
    """So the test above sees the lack of what it takes away, and nothing else."""
    assert run(BUILD, tmp_path) == "['tiny']\n"


# What is installed


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def folders(setup: configparser.ConfigParser) -> dict[str, Path]:
    """Of each package that setup.cfg lists."""
    mapped = dict(line.split(" = ") for line in lines(setup["options"]["package_dir"]))
    return {package: ROOT / mapped[package] for package in lines(setup["options"]["packages"])}


def test_every_package_folder_is_listed(setup):
    listed = {folder.resolve() for folder in folders(setup).values()}
    for top in ("cuattn", "kernels_cu", "reference"):
        for init in (ROOT / top).rglob("__init__.py"):
            assert init.parent.resolve() in listed, f"{init.parent.name} is missing in setup.cfg"


def test_every_listed_package_has_its_folder(setup):
    missing = [package for package, folder in folders(setup).items() if not (folder / "__init__.py").is_file()]
    assert not missing


def test_every_kernel_source_is_installed(setup):
    patterns = [p.strip() for p in setup["options.package_data"]["cuattn.kernels_cu"].split(",")]
    sources = [p for p in (ROOT / "kernels_cu").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert {".cu", ".cuh"} <= {p.suffix for p in sources}
    for source in sources:
        name = str(source.relative_to(ROOT / "kernels_cu"))
        assert any(fnmatch.fnmatch(name, p) for p in patterns), f"{name} would not be installed"
        assert "/" not in name, "a folder of kernels needs an __init__.py, a package and patterns of its own"


def test_package_says_that_it_is_typed(setup):
    assert "py.typed" in setup["options.package_data"]["cuattn"]
    assert (ROOT / "cuattn" / "py.typed").read_bytes() == b""


def test_version_is_readable_without_an_import(setup):
    module, attribute = setup["metadata"]["version"].removeprefix("attr: ").rsplit(".", 1)
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(values[attribute]) == cuattn.__version__
    assert str(Version(cuattn.__version__)) == cuattn.__version__


def test_requirements_are_well_formed(setup):
    extras = setup["options.extras_require"]
    groups = {name: [Requirement(line) for line in lines(text)] for name, text in extras.items()}
    base = [Requirement(line) for line in lines(setup["options"]["install_requires"])]
    assert {"numpy", "ml_dtypes"} <= {r.name for r in base}
    assert not any(r.name.startswith(("cupy", "nvidia", "torch")) for r in base)
    for name in ("cuda12x", "cuda13x"):  # what the ImportError recommends brings CuPy, NVRTC and the CUDA headers
        names = " ".join(r.name for r in groups[name])
        assert all(word in names for word in (f"cupy-{name}", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"))
