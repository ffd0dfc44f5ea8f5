"""The GPU that is measured: the one module of the benches that touches it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bench.timing import CaptureError

Call = Callable[[], object]

# A device-to-device memcpy reaches two thirds of what a kernel with 16-byte accesses does on an H200.
COPY = r"""
extern "C" __global__ void copy(const uint4* from, uint4* to) {
    const long long i = (long long)blockIdx.x * 2048 + threadIdx.x;
    uint4 x[4];
    for (int k = 0; k < 4; ++k) x[k] = from[i + k * 512];
    for (int k = 0; k < 4; ++k) to[i + k * 512] = x[k];
}
"""


def missing_gpu() -> str | None:
    """Why nothing can be timed here, or None."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (pip install 'cuattn[cuda13x]' brings it)"
    return None if cupy.cuda.is_available() else "CuPy finds no CUDA GPU"


def version_text(version: int) -> str:
    """CUDA's 13020 as 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


class GpuDevice:
    """CuPy's current GPU and one stream on it, which torch shares when it is there."""

    def __init__(self, use_torch: bool) -> None:
        import cupy

        self._cupy = cupy
        # Not a non-blocking stream: a peer that launches on the null stream then breaks the capture and is
        # timed eagerly, in order, where otherwise an empty graph would be timed.
        self._stream = cupy.cuda.Stream()
        self._properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.l2_bytes = int(self._properties["l2CacheSize"])
        self._flush = cupy.empty(2 * self.l2_bytes, dtype=cupy.uint8)
        # Imported before the stream is made current, so that a peer importing torch later finds it current.
        self._torch = _import_torch() if use_torch or "torch" in sys.modules else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream current for CuPy and torch."""
        with ExitStack() as stack:
            stack.enter_context(self._stream)
            if self._torch is not None:
                cuda = self._torch.cuda
                stack.enter_context(cuda.stream(cuda.ExternalStream(self._stream.ptr)))
            yield

    def capture(self, calls: Sequence[Call]) -> Call:
        """A function that replays `calls`.

        Torch's allocator does not know of this capture: what a call allocates and frees is handed out again
        while the graph still writes to it. So inputs are built and results checked before the first capture
        of a case.
        """
        self._stream.begin_capture()
        failure: Exception | None = None
        try:
            for call in calls:
                call()
        except Exception as error:  # any library may refuse in its own way
            failure = error
        try:
            graph = self._stream.end_capture()  # also after a failure: the stream must leave capture mode
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            failure = failure or error
        if failure is not None:
            raise CaptureError(f"{type(failure).__name__}: {failure}") from failure
        return lambda: graph.launch(self._stream)

    def time_us(self, launches: Sequence[Call], before: Call | None = None) -> list[float]:
        """GPU time of each launch; `before` runs ahead of each, outside the timed interval."""
        cuda = self._cupy.cuda
        pairs = [(cuda.Event(), cuda.Event()) for _ in launches]
        for launch, (start, end) in zip(launches, pairs, strict=True):
            if before is not None:
                before()
            start.record(self._stream)
            launch()
            end.record(self._stream)
        self._stream.synchronize()
        return [cuda.get_elapsed_time(start, end) * 1e3 for start, end in pairs]

    def flush(self) -> None:
        self._flush.data.memset_async(0, self._flush.nbytes, self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def now(self) -> float:
        return time.perf_counter()

    def copy_call(self, num_bytes: int) -> Call:
        source, target = (self._cupy.zeros(num_bytes, dtype=self._cupy.uint8) for _ in range(2))
        copy = self._cupy.RawKernel(COPY, "copy")
        return lambda: copy((num_bytes // (16 * 2048),), (512,), (source, target))

    def matmul_call(self, n: int) -> Call | None:
        if self._torch is None:
            return None
        torch = self._torch
        # Random values: power, and with it the clock, depends on the bits that toggle.
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.matmul(a, b, out=out)

    def describe(self) -> dict[str, object]:
        runtime = self._cupy.cuda.runtime
        return {
            "gpu": self._properties["name"].decode(),
            "sms": self._properties["multiProcessorCount"],
            "driver": version_text(runtime.driverGetVersion()),
            "runtime": version_text(runtime.runtimeGetVersion()),
            "cupy": self._cupy.__version__,
        }

    def release(self) -> None:
        """Give cached memory back, so that one library's cache does not starve the other in the next case."""
        gc.collect()
        self._cupy.get_default_memory_pool().free_all_blocks()
        if self._torch is not None:
            self._torch.cuda.empty_cache()


def _import_torch():
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
