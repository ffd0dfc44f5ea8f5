"""The CPU emulator: cp.async takes place in the wait that covers it, fills with zeros, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulated import ORDERS, compiled
from tests.emulator import EmulatedModule, EmulationError

pytestmark = pytest.mark.emulator

CP_ASYNC = r"""
extern "C" __global__ void stages(const int* x, int* out) {   // two groups and a copy of no group
    extern __shared__ int buffer[];
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    int* mine = buffer + 3 * threadIdx.x;
    int* seen = out + 12 * thread;
    for (int s = 0; s < 3; ++s) mine[s] = -5;
    for (int s = 0; s < 3; ++s) {
        cuemu::cp_async<4>(mine + s, x + 3 * thread + s);
        if (s < 2) cuemu::cp_async_commit_group();
    }
    for (int s = 0; s < 3; ++s) seen[s] = mine[s];
    cuemu::cp_async_wait_group<1>();
    for (int s = 0; s < 3; ++s) seen[3 + s] = mine[s];
    cuemu::cp_async_wait_group<0>();
    for (int s = 0; s < 3; ++s) seen[6 + s] = mine[s];
    cuemu::cp_async_wait_all();
    for (int s = 0; s < 3; ++s) seen[9 + s] = mine[s];
}
template <int BYTES> __device__ void fill(const unsigned char* x, unsigned char* out, int count) {
    __shared__ __align__(16) unsigned char buffer[16];
    cuemu::cp_async<BYTES>(buffer, count ? x : nullptr, count);
    cuemu::cp_async_commit_group();
    cuemu::cp_async_wait_group<0>();
    for (int i = 0; i < 16; ++i) out[i] = buffer[i];
}
extern "C" __global__ void zero_fill(const unsigned char* x, unsigned char* out, int bytes, int count) {
    if (bytes == 4) fill<4>(x, out, count);
    if (bytes == 8) fill<8>(x, out, count);
    if (bytes == 16) fill<16>(x, out, count);
}
extern "C" __global__ void neighbours(const int* x, int* out) {   // reads what another thread copied
    __shared__ int buffer[64];
    cuemu::cp_async<4>(buffer + threadIdx.x, x + threadIdx.x);
    cuemu::cp_async_commit_group();
#ifndef NO_WAIT
    cuemu::cp_async_wait_group<0>();
#endif
    __syncthreads();
    out[threadIdx.x] = buffer[63 - threadIdx.x];
}
extern "C" __global__ void left_over(const int* x, int* out) {   // the second block waits, the first did not
    __shared__ int buffer[1];
    if (blockIdx.x == 0) cuemu::cp_async<4>(buffer, x);
    if (blockIdx.x == 1) cuemu::cp_async_wait_all();
    out[blockIdx.x] = buffer[0];
}
extern "C" __global__ void faults(const uint4* x, uint4* y, int kind) {
    __shared__ __align__(16) char buffer[64];
    if (kind == 0) cuemu::cp_async<16>(buffer + 8, x);
    if (kind == 1) cuemu::cp_async<8>(buffer, (const char*)x + 4);
    if (kind == 2) cuemu::cp_async<16>(y, x);
    if (kind == 3) cuemu::cp_async<16>(buffer, x, 17);
}
"""


def cp_async(**defines) -> EmulatedModule:
    return compiled(CP_ASYNC, "stages zero_fill neighbours left_over faults", tuple(defines.items()))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_cp_async_takes_place_in_the_wait_that_covers_it_and_not_before(order, seed):
    x, out = np.arange(1, 193, dtype=np.int32), np.zeros((64, 4, 3), np.int32)
    cp_async().launch("stages", (2,), (32,), (x, out), shared_bytes=32 * 12, order=order, seed=seed)
    done = np.tri(
        4, 3, -1, dtype=bool
    )  # after issue none, wait_group<1> one, wait_group<0> two, wait_all three
    np.testing.assert_array_equal(out, np.where(done, x.reshape(64, 1, 3), -1))  # -1 is poison


@pytest.mark.parametrize(("size", "count"), [(4, 4), (4, 0), (8, 4), (16, 16), (16, 6), (16, 0)])
def test_cp_async_fills_with_zeros_and_no_further(size, count):
    x, out = np.arange(1, 17, dtype=np.uint8), np.zeros(16, np.uint8)
    cp_async().launch("zero_fill", (1,), (1,), (x, out, np.int32(size), np.int32(count)))
    np.testing.assert_array_equal(out, [*x[:count], *[0] * (size - count), *[0xFF] * (16 - size)])


def test_a_missing_wait_shows_as_poison():
    x, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    cp_async().launch("neighbours", (1,), (64,), (x, out))
    np.testing.assert_array_equal(out, x[::-1])
    cp_async(NO_WAIT="1").launch("neighbours", (1,), (64,), (x, out))
    assert (out == -1).all()


def test_copies_nobody_waits_for_are_no_concern_of_the_next_block():
    out = np.zeros(2, np.int32)
    cp_async().launch("left_over", (2,), (1,), (np.array([5], np.int32), out))
    assert out.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (0, "not 16-byte aligned"),
        (1, "not 8-byte aligned"),
        (2, "not in shared memory"),
        (3, "17 is not in 0..16"),
    ],
)
def test_cp_async_faults(kind, message):
    x = np.zeros(32, np.complex128)  # NumPy aligns it to 16 bytes
    with pytest.raises(EmulationError, match=message):
        cp_async().launch("faults", (1,), (1,), (x, x, np.int32(kind)))
