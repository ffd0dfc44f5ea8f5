"""The CPU emulator: tensor cores, that is mma, ldmatrix and the conversion of half that they use.

Expectations come from NumPy and from the formulas of the PTX manual, never from the emulator's own code.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.emulated import LANES, compiled
from tests.emulator import EmulatedModule, EmulationError

pytestmark = pytest.mark.emulator

# groupID and 2 * threadID_in_group of the PTX manual, one row per lane
GROUP, PAIR_START = LANES[:, None] // 4, LANES[:, None] % 4 * 2

MMA = r"""
extern "C" __global__ void mma(const uint4* a, const uint2* b, const float4* c, float4* d, int kind) {
    const int lane = threadIdx.x;
    const unsigned A[4] = {a[lane].x, a[lane].y, a[lane].z, a[lane].w}, B[2] = {b[lane].x, b[lane].y};
    const unsigned A8[2] = {A[0], A[1]}, B8[1] = {B[0]};
    const float C[4] = {c[lane].x, c[lane].y, c[lane].z, c[lane].w};
    float D[4];
    if (kind == 0) cuemu::mma_m16n8k16_f16(D, A, B, C);
    if (kind == 1) cuemu::mma_m16n8k16_bf16(D, A, B, C);
    if (kind == 2) cuemu::mma_m16n8k8_f16(D, A8, B8, C);
    if (kind == 3) cuemu::mma_m16n8k8_bf16(D, A8, B8, C);
    d[lane] = make_float4(D[0], D[1], D[2], D[3]);
}
extern "C" __global__ void convert(float* out) {
    for (int i = 0; i < 65536; ++i) out[i] = cuemu::f16_to_float(i);
}
template <int N, bool TRANSPOSED> __device__ void load(unsigned* out, const int* rows) {
    __shared__ __align__(16) unsigned short matrix[32][8];
    for (int i = 0; i < 8; ++i) matrix[threadIdx.x][i] = 8 * threadIdx.x + i;
    __syncwarp();
    unsigned registers[N];
    const int row = rows[threadIdx.x];                 // lanes past 8 N may point anywhere
    cuemu::ldmatrix<N, TRANSPOSED>(registers, row < 0 ? nullptr : matrix[row]);
    for (int m = 0; m < N; ++m) out[m * 32 + threadIdx.x] = registers[m];
}
extern "C" __global__ void ldmatrix(unsigned* out, const int* rows, int n, int transposed) {
    if (n == 1) transposed ? load<1, true>(out, rows) : load<1, false>(out, rows);
    if (n == 2) transposed ? load<2, true>(out, rows) : load<2, false>(out, rows);
    if (n == 4) transposed ? load<4, true>(out, rows) : load<4, false>(out, rows);
}
extern "C" __global__ void movmatrix(const unsigned* x, unsigned* y) { y[threadIdx.x] = cuemu::movmatrix(x[threadIdx.x]); }
extern "C" __global__ void ldmatrix_faults(const uint4* global, int kind) {
    __shared__ __align__(16) char shared[64];
    unsigned r[1];
    if (threadIdx.x == 9) return;
    cuemu::ldmatrix<1, false>(r, kind == 0 ? shared + 8 : kind == 1 ? (const void*)global : shared);
}
"""


def mma_module() -> EmulatedModule:
    return compiled(MMA, "mma convert ldmatrix movmatrix ldmatrix_faults")


def registers(elements: np.ndarray) -> np.ndarray:
    """Pairs of 16-bit elements as 32-bit registers, the first in the lower half."""
    return np.ascontiguousarray(elements).view(np.uint32)


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("k", [16, 8])
def test_mma(k, dtype, integers):
    rng = np.random.default_rng(3)
    draws = [rng.integers(-9, 10, (16, 16)) if integers else rng.normal(size=(16, 16)) for _ in range(3)]
    a, b, c = (
        draws[0][:, :k].astype(dtype),
        draws[1][:k, :8].astype(dtype),
        draws[2][:, :8].astype(np.float32),
    )
    # "Matrix Fragments for mma.m16n8k16 with floating point type"; those of m16n8k8 are their first halves.
    i = np.arange(k // 2)
    fragment_a = a[GROUP + 8 * (i % 4 >= 2), PAIR_START + i % 2 + 8 * (i >= 4)]
    i = np.arange(k // 4)
    fragment_b = b[PAIR_START + i % 2 + 8 * (i >= 2), GROUP]
    i = np.arange(4)
    rows, columns = GROUP + 8 * (i >= 2), PAIR_START + i % 2
    packed_a, packed_b = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32)
    packed_a[:, : k // 4], packed_b[:, : k // 8] = registers(fragment_a), registers(fragment_b)
    packed_d = np.zeros((32, 4), np.float32)
    kind = np.int32(2 * (k == 8) + (dtype != np.float16))
    args = (packed_a, packed_b, np.ascontiguousarray(c[rows, columns]), packed_d, kind)
    mma_module().launch("mma", (1,), (32,), args, order="shuffle", seed=4)
    d = np.zeros((16, 8), np.float32)
    d[rows, columns] = packed_d
    expected = c.copy()
    for step in range(k):  # in float32, k ascending, as cuemu_mma.h says; the products are exact
        expected += a[:, step, None].astype(np.float32) * b[step].astype(np.float32)
    np.testing.assert_array_equal(d, expected)
    if integers:
        np.testing.assert_array_equal(d, a.astype(int) @ b.astype(int) + c)


def test_half_conversion_of_every_bit_pattern():
    out = np.zeros(65536, np.float32)
    mma_module().launch("convert", (1,), (1,), (out,))
    np.testing.assert_array_equal(out, np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32))
    assert np.signbit(out[0x8000])


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_ldmatrix(n, transposed):
    rows = np.full(32, -1, np.int32)
    rows[: 8 * n] = np.random.default_rng(5).permutation(32)[: 8 * n]
    out = np.zeros((n, 32), np.uint32)
    args = (out, rows, np.int32(n), np.int32(transposed))
    mma_module().launch("ldmatrix", (1,), (32,), args, order="reverse")
    matrices = (8 * rows[: 8 * n].reshape(n, 8, 1) + np.arange(8)).astype(np.uint16)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    # A thread holds the elements 2 * (lane % 4) and next of row lane / 4.
    np.testing.assert_array_equal(out, registers(matrices[:, GROUP, PAIR_START + np.arange(2)])[..., 0])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (0, "not 16-byte aligned"),
        (1, "not in shared memory"),
        (2, "lanes 0x00000200, which have exited|waits for"),
    ],
)
def test_ldmatrix_faults(kind, message):
    outside = np.zeros(32, np.complex128)
    with pytest.raises(EmulationError, match=message):
        mma_module().launch("ldmatrix_faults", (1,), (32,), (outside, np.int32(kind)))


def test_movmatrix_transposes():
    """Row r of the matrix is in lanes 4 r to 4 r + 3, two columns each, the lower in the lower half."""
    matrix = np.random.default_rng(5).integers(0, 2**16, (8, 8)).astype(np.uint16)
    result = np.zeros(32, np.uint32)
    mma_module().launch("movmatrix", (1,), (32,), (matrix.view(np.uint32).ravel(), result))
    np.testing.assert_array_equal(result.view(np.uint16).reshape(8, 8), matrix.T)
