"""Fixtures and settings of the whole suite."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.reference_laws", "tests.bench_fakes", "tests.device_fakes")  # helpers whose asserts speak too
SIMULATOR = bool(os.environ.get("NUMBA_ENABLE_CUDASIM"))
collect_ignore = [] if SIMULATOR else ["simulator"]  # a process of its own: tests/test_simulator.py starts it

# Cases differ a hundredfold in cost and the first use of a tile compiles it, so there is no deadline.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
settings.register_profile("long", deadline=None, max_examples=1000, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("CUATTN_HYPOTHESIS", "ci"))
os.environ.setdefault("CUATTN_CHECK", "values")

if not SIMULATOR:
    from tests.backends import BACKENDS

    if "gpu" not in BACKENDS:
        collect_ignore += ["test_gpu.py", "test_gpu_attention.py", "test_gpu_paged.py", "test_gpu_paged_numba.py"]

    def pytest_report_header(config: pytest.Config) -> list[str]:
        report = subprocess.run([sys.executable, "-m", "tests.gpu_report", "--check"], capture_output=True, text=True, check=False)
        return [f"cuattn backends: {', '.join(BACKENDS)}", f"layer 5 report: {report.stdout.strip()}"]

    # Not of the session: while a backend is in use NumPy arrays are its device memory, for every test that runs.
    def places(*names: str) -> list:
        return [pytest.param(n, marks=pytest.mark.gpu) if n == "gpu" else n for n in names]

    def in_use(request: pytest.FixtureRequest):
        chosen = BACKENDS[request.param]()
        with chosen.use():
            yield chosen

    @pytest.fixture(params=places(*BACKENDS))
    def backend(request: pytest.FixtureRequest):
        """Each place where the reference or kernels can run on this machine, see tests/backends.py."""
        yield from in_use(request)

    @pytest.fixture(params=places(*(n for n in BACKENDS if n != "numpy")))
    def kernels(request: pytest.FixtureRequest):
        """The backends that run kernels."""
        yield from in_use(request)

    class WideMemory:
        """Views whose strides reach past 2^32 elements; only the pages that are touched exist."""

        def __init__(self, backend) -> None:
            self.backend, self.memory = backend, None

        def __call__(self, shape: tuple[int, ...], dtype, strides: tuple[int, ...]) -> np.ndarray:
            """A host view, `strides` in bytes; on a GPU `move` gives it the same strides there."""
            span = sum((n - 1) * s for n, s in zip(shape, strides)) + np.dtype(dtype).itemsize
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which has a name from Python 3.13 on
            self.memory = mmap.mmap(-1, span, flags=flags)
            return np.ndarray(shape, dtype, self.memory, 0, strides)

        def move(self, view: np.ndarray):
            xp = self.backend.xp
            if xp is np:
                return view
            buffer = xp.empty(len(self.memory), xp.uint8)
            moved = xp.ndarray(view.shape, view.dtype, buffer.data, strides=view.strides)
            moved[...] = xp.asarray(view.copy())
            return moved

    @pytest.fixture
    def much_memory():
        """On a GPU only one of several workers has many gigabytes at a time, and gives them back."""
        if "gpu" not in BACKENDS:
            yield
            return
        import cupy

        with (Path(tempfile.gettempdir()) / f"cuattn-much-memory-{os.getuid()}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            cupy.get_default_memory_pool().free_all_blocks()

    @pytest.fixture
    def wide_memory(backend, much_memory):
        return WideMemory(backend)

    if "gpu" in BACKENDS:

        @pytest.fixture(autouse=True)
        def memory_goes_back():
            """Each worker has a pool of its own, which would keep what its largest test took."""
            yield
            import cupy

            pool = cupy.get_default_memory_pool()
            if pool.total_bytes() > 1 << 30:
                pool.free_all_blocks()
