"""Numba's kernels in Numba's simulator: it is chosen when Numba is imported, so in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_python(*args: str, simulator: bool) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout, without the settings of the pytest that is running."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["NUMBA_ENABLE_CUDASIM"] = "1" if simulator else "0"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.simulator
def test_kernels_in_the_simulator():
    result = run_python("-m", "pytest", "tests/simulator", "-p", "no:cacheprovider", simulator=True)
    summary = result.stdout.strip().rpartition("\n")[2]
    passed = re.search(r"\b(\d+) passed\b", summary)
    assert result.returncode == 0, result.stdout + result.stderr
    assert passed, result.stdout
    assert "skipped" not in summary, result.stdout


def test_host_arrays_need_the_simulator():
    program = (
        "import numpy as np, cuattn.numba\n"
        "out, lse = np.zeros((1, 2, 3), np.float32), np.zeros((1, 2), np.float32)\n"
        "cuattn.numba.merge_state(out, lse, out, lse)\n"
    )
    result = run_python("-c", program, simulator=False)
    message = "TypeError: numba.merge_state: arrays must be on a CUDA device outside Numba's simulator"
    assert message in result.stderr, result.stderr


def test_cuattn_does_not_import_numba():
    result = run_python("-c", "import cuattn, sys; sys.exit('numba' in sys.modules)", simulator=False)
    assert result.returncode == 0, result.stderr
