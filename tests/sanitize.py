"""Small cases of every kernel, to be run under compute-sanitizer: `python -m tests.sanitize state`."""

from __future__ import annotations

import sys

import cupy
import numpy as np

import cuattn
from cuattn.testing import StateCase, to_device

PLANTED = r"""
extern "C" __global__ void memcheck(float* x) { x[threadIdx.x + 1000000000] = 1; }
extern "C" __global__ void racecheck(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
"""


def state() -> None:
    """Every entry, vector width, and the split over a block; the memory around the arrays is their own buffer's."""
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim in (5, 12, 64, 128):
            for states in (2, 9, 40):
                case = StateCase((3, 2), states, head_dim, dtype, "some empty", "row slice")
                outs, lses = (to_device(x, cupy) for x in (case.outs(), case.lses()))
                cuattn.merge_states(outs, lses)
                cuattn.merge_states(list(outs), list(lses))
                cuattn.merge_states(outs, lses, out=outs[0], lse=lses[0])
                cuattn.merge_states_varlen(outs, lses, cupy.asarray(np.int32([0, 1, 1, states])))
                mask = cupy.asarray(np.array([True, False, True]))
                cuattn.merge_state_in_place(outs[0], lses[0], outs[1], lses[1], mask)
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    if sys.argv[1].startswith("planted-"):
        kernel = cupy.RawKernel(PLANTED, sys.argv[1].removeprefix("planted-"))
        kernel((1,), (64,), (cupy.zeros(64, np.float32),))
        cupy.cuda.Device().synchronize()
    else:
        {"state": state}[sys.argv[1]]()
