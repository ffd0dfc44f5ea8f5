"""What tests on a GPU share: arrays there, work that takes a while, calls as graphs."""

from __future__ import annotations

import cupy
import numpy as np

from tests.backends import Gpu

GPU = Gpu()


def random(shape, dtype="float16", seed=0) -> cupy.ndarray:
    return GPU.array(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def busy() -> None:
    """Work on the current stream that takes some 300 ms: a product is 0.14 TFLOP."""
    x = cupy.ones((4096, 4096), np.float32)
    for _ in range(100):
        x = x @ x / 4096


def captured(stream, call):
    """The call as a graph, if it neither allocates nor waits when its kernels are loaded."""
    call()
    pool = cupy.get_default_memory_pool()
    used = pool.used_bytes(), pool.total_bytes()
    stream.begin_capture()
    call()
    graph = stream.end_capture()
    assert (pool.used_bytes(), pool.total_bytes()) == used
    return graph
