"""Layer 5 in one command: ``python -m tests.gpu_report`` runs the tests on a GPU and writes tests/gpu_report.json.

``--check`` needs no GPU and no packages: exit status 0 if the committed report speaks of the present sources, else 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "gpu_report.json"
FOLDERS = ("cuattn", "kernels_cu", "reference")


def digest() -> str:
    """sha256 over the names and texts of the sources that the report is about."""
    total = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def versions() -> dict[str, object]:
    """The device, and the versions of what the tests ran on."""
    import cupy
    import numba
    import numpy
    from cupy_backends.cuda.libs import nvrtc

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "device": properties["name"].decode(),
        "devices": cupy.cuda.runtime.getDeviceCount(),
        "multiprocessors": properties["multiProcessorCount"],
        "driver": driver.stdout.split("\n")[0],
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "numba": numba.__version__,
        "numpy": numpy.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def run(marker: str) -> dict[str, Any]:
    """The counts of one pytest run, by file."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "result.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-m", marker, f"--junitxml={xml}", "-p", "no:cacheprovider"]
        started = time.time()
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "CUATTN_CHECK": "values"}, check=False).returncode
        counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        files: dict[str, int] = {}
        for case in ET.parse(xml).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            counts[kind] += 1
            file = (case.get("classname") or "").rpartition(".")[2]
            files[file] = files.get(file, 0) + 1
        return {"exit": code, **counts, "files": files, "seconds": round(time.time() - started)}


def check() -> int:
    if not REPORT.exists():
        print("stale: there is no tests/gpu_report.json")
        return 1
    report = json.loads(REPORT.read_text())
    fresh = report["digest"] == digest() and all(good(run) for run in report["runs"].values())
    print(f"{'fresh' if fresh else 'stale'}: {report['device']}, {report['date']}, sources {report['digest'][:12]}")
    return 0 if fresh else 1


def good(run: dict[str, Any]) -> bool:
    """Something ran, and nothing failed."""
    return run["exit"] == 0 and run["failed"] == 0 and run["passed"] > 0


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return check()
    from tests.backends import gpu_available

    if not gpu_available():
        print("no CUDA device here (or no CuPy): layer 5 can't run; --check works without", file=sys.stderr)
        return 2
    before = digest()
    runs = {"gpu": run("gpu and not sanitizer"), "sanitizer": run("gpu and sanitizer")}
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), **versions(), "digest": before, "runs": runs,
    }  # fmt: skip
    text = json.dumps(report, indent=1) + "\n"
    if not all(good(r) for r in runs.values()):
        print(text, "not written: a test failed, or none ran", sep="")
        return 1
    Path(os.environ.get("CUATTN_GPU_REPORT", REPORT)).write_text(text)
    print(f"{sum(r['passed'] for r in runs.values())} passed, 0 failed on {report['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
