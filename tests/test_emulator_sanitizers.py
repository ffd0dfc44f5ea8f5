"""The CPU emulator: faults that the sanitizers must find, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.emulated import ROOT
from tests.emulator import EmulatedModule, EmulationError, sanitized_environment

pytestmark = pytest.mark.emulator

PLANTED = r"""
template <int N> __device__ __noinline__ float* cells() { __shared__ float values[N]; return values; }
__device__ float pick(const float* x, int i, bool trap) {
    float local[4] = {x[0], x[1], x[2], x[3]};
    __syncthreads();
    if (trap) __trap();
    return local[i];
}
extern "C" __global__ void planted(float* x, float4* y, int global, int fixed, int dynamic, int local,
                                   int offset, int trap) {
    extern __shared__ float tile[];
    cells<32>()[fixed + threadIdx.x] = x[threadIdx.x];
    tile[dynamic + threadIdx.x] = cells<32>()[threadIdx.x];
    __syncthreads();
    const float back = __shfl_xor_sync(~0u, tile[threadIdx.x ^ 1], 1);
    x[global + threadIdx.x] = back + 0 * pick(x, local, trap);
    if (threadIdx.x == 0) y[0] = *(const float4*)(x + offset);
}
extern "C" __global__ void roomy(float* x) {   // lays its stack out in another way
    float room[512];
    for (int i = 0; i < 512; ++i) room[i] = x[(i + threadIdx.x) % 32];
    __syncthreads();
    x[threadIdx.x] = room[32 * threadIdx.x % 512];
}
"""
PLACES = ("global", "fixed", "dynamic", "local", "offset", "trap")


def run_planted(fault: str) -> None:
    """Runs in the subprocess: right launches and one that traps, then one with the fault."""
    module = EmulatedModule(PLANTED, ["planted", "roomy"], name="planted.cu", sanitize="address,undefined")
    x, y = np.arange(32, dtype=np.float32), np.zeros(1, np.complex128)

    def launch(**amounts):
        faults = [np.int32(amounts.get(place, 0)) for place in PLACES]
        module.launch("planted", (2,), (32,), (x, y, *faults), shared_bytes=128, order="shuffle", seed=3)

    for _ in range(2):
        with pytest.raises(EmulationError, match="__trap"):
            launch(trap=1)  # leaves threads on their stacks, which must be usable again
        module.launch("roomy", (1,), (32,), (x,))
        launch()
    if fault:
        launch(**{fault: 4 if fault == "local" else 1})
    np.testing.assert_array_equal(x, np.arange(32))
    print("clean")


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("", None),
        ("global", r"heap-buffer-overflow.*WRITE of size 4.* in planted \S*planted.cu:16"),
        ("fixed", r"global-buffer-overflow.* in planted \S*planted.cu:12"),
        ("dynamic", r"use-after-poison.* in planted \S*planted.cu:13"),
        ("local", r"planted.cu:7:.* index 4 out of bounds"),
        ("offset", r"planted.cu:17:.* misaligned address"),
    ],
)
def test_sanitizers(fault, finding):
    script = f"from tests.test_emulator_sanitizers import run_planted; run_planted({fault!r})"
    environment = sanitized_environment()
    run = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if finding is None:
        assert (run.returncode, run.stdout, run.stderr) == (0, "clean\n", "")
    else:
        assert run.returncode != 0
        assert "clean" not in run.stdout
        assert re.search(finding, run.stderr, re.DOTALL), run.stderr


def test_sanitizers_are_refused_where_they_cannot_work(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with pytest.raises(RuntimeError, match="sanitized_environment"):
        EmulatedModule("", [], sanitize="address")
    with pytest.raises(ValueError, match="sanitize must name"):
        EmulatedModule("", [], sanitize="thread")
