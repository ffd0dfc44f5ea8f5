"""The CPU emulator: intrinsics of warps (shuffles, votes, reductions) and functions of one thread.

Expectations come from NumPy and from the formulas of the CUDA manual, never from the emulator's own code.
Kernels are grouped in a few sources, because one compilation costs more than most launches.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.emulated import FULL, LANES, ORDERS, compiled
from tests.emulator import EmulatedModule

pytestmark = pytest.mark.emulator

# ---- warps ----

WARPS = r"""
#define FULL 0xffffffffu
extern "C" __global__ void shuffles(float* f, double* d, size_t* u, __half* h, int by, int width) {
    const int lane = threadIdx.x;
    f[lane] = __shfl_sync(FULL, float(lane), by, width);
    d[lane] = __shfl_up_sync(FULL, double(lane), by, width);
    u[lane] = __shfl_down_sync(FULL, size_t(lane) << 40, by, width);
    h[lane] = __shfl_xor_sync(FULL, __int2half_rn(lane), by, width);
}
extern "C" __global__ void votes(const int* x, unsigned* out) {
    const unsigned lane = threadIdx.x, thirds = 0x49249249u, mask = lane % 3 == 0 ? thirds : ~thirds;
    out[0 * 32 + lane] = __ballot_sync(mask, x[lane]);
    out[1 * 32 + lane] = __any_sync(mask, x[lane] > 6);
    out[2 * 32 + lane] = __all_sync(mask, x[lane] < 9);
    out[3 * 32 + lane] = __reduce_add_sync(mask, x[lane]);
    out[4 * 32 + lane] = __reduce_max_sync(mask, x[lane] - 5);
    out[5 * 32 + lane] = __reduce_min_sync(mask, (unsigned)(x[lane] - 5));
    out[6 * 32 + lane] = __reduce_xor_sync(mask, (unsigned)x[lane]);
    __syncwarp(mask);
    if (lane == 4) return;
    out[7 * 32 + lane] = __ballot_sync(FULL, 1);                     // the exited lane votes no more
    out[8 * 32 + lane] = __all_sync(FULL, 1);
    out[9 * 32 + lane] = __activemask() >> lane & 1;
}
extern "C" __global__ void outside_the_mask(unsigned* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, threadIdx.x, 4);
}
extern "C" __global__ void warp_exchange(int* x) {                     // neighbours swap through memory
    __shared__ int cell[32];
    cell[threadIdx.x] = x[threadIdx.x];
#ifndef NO_BARRIER
    __syncwarp();
#endif
    x[threadIdx.x] = cell[threadIdx.x ^ 1];
}
"""


def warps(**defines) -> EmulatedModule:
    return compiled(WARPS, "shuffles votes outside_the_mask warp_exchange", tuple(defines.items()))


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("by", [0, 1, 3, 7, 16, 31])
@pytest.mark.parametrize(("order", "seed"), ORDERS[::3])
def test_shuffles(width, by, order, seed):
    f, d = np.zeros(32, np.float32), np.zeros(32, np.float64)
    u, h = np.zeros(32, np.uint64), np.zeros(32, np.float16)
    warps().launch(
        "shuffles", (1,), (32,), (f, d, u, h, np.int32(by), np.int32(width)), order=order, seed=seed
    )
    first = LANES // width * width  # of the segment
    np.testing.assert_array_equal(f, first + by % width)
    np.testing.assert_array_equal(d, np.where(LANES - by >= first, LANES - by, LANES))
    np.testing.assert_array_equal(u >> np.uint64(40), np.where(LANES + by < first + width, LANES + by, LANES))
    np.testing.assert_array_equal(h, np.where(LANES ^ by < first + width, LANES ^ by, LANES))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_votes_and_reductions_of_two_interleaved_groups(order, seed):
    x = np.random.default_rng(0).integers(0, 10, 32).astype(np.int32)
    out = np.zeros((10, 32), np.uint32)
    warps().launch("votes", (1,), (32,), (x, out), order=order, seed=seed)
    for group in (LANES % 3 == 0, LANES % 3 != 0):
        mine = x[group]
        ballot = np.sum((mine != 0) * (1 << LANES[group]))
        expected = [ballot, (mine > 6).any(), (mine < 9).all(), mine.sum(), (int(mine.max()) - 5) & FULL]
        expected += [(mine - 5).astype(np.uint32).min(), np.bitwise_xor.reduce(mine)]
        np.testing.assert_array_equal(
            out[:7, group], np.repeat([[int(e)] for e in expected], len(mine), axis=1)
        )
    alive = LANES != 4
    assert (out[7, alive] == FULL - (1 << 4)).all()
    assert (out[8:, alive] == 1).all()


def test_a_shuffle_from_outside_the_mask_gives_poison():
    out = np.zeros(16, np.uint32)
    warps().launch("outside_the_mask", (1,), (32,), (out,))
    np.testing.assert_array_equal(out, [*range(4, 16), *[FULL] * 4])


def test_a_missing_syncwarp_shows_as_a_difference_between_orders():
    def run(order, **defines):
        x = LANES.astype(np.int32)
        warps(**defines).launch("warp_exchange", (1,), (32,), (x,), order=order)
        return x

    for order in ("forward", "reverse"):
        np.testing.assert_array_equal(run(order), LANES ^ 1)
    assert (run("forward", NO_BARRIER="1") != run("reverse", NO_BARRIER="1")).any()


# ---- functions of one thread ----

FUNCTIONS = r"""
extern "C" __global__ void atomics(int* i, unsigned* u, unsigned long long* l, float* f, __half* h,
                                   __nv_bfloat16* b) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;               // 0..99
    atomicAdd(&i[0], t); atomicSub(&i[1], t); atomicMax(&i[2], t - 50);
    atomicMin(&i[3], t - 50); atomicExch(&i[4], 7); atomicCAS(&i[5], t, t + 1);
    atomicOr(&u[0], 1u << t % 32); atomicAnd(&u[1], ~(1u << t % 20)); atomicXor(&u[2], t);
    atomicInc(&u[3], 6u);
    atomicDec(&u[4], 6u);
    atomicAdd(l, 1ull << 33); atomicMax(l + 1, 1ull << t % 64);
    atomicAdd(f, 1); atomicAdd(h, __float2half(0.5f)); atomicAdd(b, __float2bfloat16(1.0f));
}
extern "C" __global__ void bits(const unsigned* x, const unsigned* y, unsigned* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const unsigned a = x[i], b = y[i];
    unsigned long long both = (unsigned long long)a << 32 | b;
    const long long results[] = {__popc(a), __clz(a), __ffs(a), __brev(a), __byte_perm(a, b, b),
        __funnelshift_l(a, b, b), __funnelshift_r(a, b, b), __umulhi(a, b), __popcll(both), __clzll(both),
        __ffsll(both), (long long)(__brevll(both) >> 32), __mulhi(int(a), int(b)),
        __float_as_uint(__uint_as_float(a & 0x7f7fffff)), __float_as_int(__int_as_float(a & 0x7f7fffff))};
    for (int r = 0; r < 15; ++r) out[r * n + i] = results[r];
}
extern "C" __global__ void arithmetic(const float* x, const float* y, float* out, int n) {
    const int i = threadIdx.x;
    const float a = __ldg(x + i), b = __ldcg(y + i);
    const float results[] = {__fadd_rn(a, b), __fsub_rn(a, b), __fmul_rn(a, b), __fdividef(a, b),
        __fdiv_rn(a, b), __frcp_rn(a), b * b + 1.0f, __fmaf_rn(a, b, 1.0f), min(a, b), max(a, NAN),
        __saturatef(a), rsqrtf(fabsf(a)), __expf(a), __logf(fabsf(a)), exp2f(a), __log2f(fabsf(a))};
    for (int r = 0; r < 16; ++r) __stcs(out + r * n + i, results[r]);
}
template <class A, class B> constexpr bool same = std::is_same_v<A, B>;
extern "C" __global__ void types(int* out, const float4* v) {
    static_assert(same<decltype(min(1, 2u)), unsigned>, "");
    static_assert(same<decltype(max(1ll, 2ull)), unsigned long long>, "");
    static_assert(same<decltype(min(1.0f, 2.0)), double> && same<decltype(max(1l, 2l)), long>, "");
    static_assert(sizeof(long long) == 8 && sizeof(size_t) == 8 && sizeof(long) == 8 && char(-1) < 0, "");
    static_assert(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(int2) == 8, "");
    out[0] = max(-1, 1u) == 0xffffffffu; out[1] = min(-1, 1u) == 1; out[2] = -INFINITY < -FLT_MAX;
    const float4 w = make_float4(v->w, v->z, v->y, v->x);
    const uint4 z = {1, 2, 3, 4};
    out[3] = int(w.x + 10 * w.y) + int(z.w);
    __shared__ float cell[4];
    extern __shared__ float dynamic[];
    out[4] = __cvta_shared_to_generic(__cvta_generic_to_shared(cell + 3)) == cell + 3;
    out[5] = __cvta_shared_to_generic(unsigned(__cvta_generic_to_shared(dynamic + 1))) == dynamic + 1;
    __threadfence(), __threadfence_block(), __threadfence_system();
    dim3 d(3); out[6] = d.x + d.y + d.z;
    out[7] = __half2float(__nv_cvt_fp8_to_halfraw(0x38, __NV_E4M3)) == 1.0f;
}
"""


def functions() -> EmulatedModule:
    return compiled(FUNCTIONS, "atomics bits arithmetic types")


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_atomics(order, seed):
    i, u = np.zeros(6, np.int32), np.array([0, FULL, 0, 0, 0], np.uint32)
    longs, f = np.zeros(2, np.uint64), np.zeros(1, np.float32)
    h, b = np.zeros(1, np.float16), np.zeros(1, ml_dtypes.bfloat16)
    functions().launch("atomics", (5,), (20,), (i, u, longs, f, h, b), order=order, seed=seed)
    chain = {"forward": 100, "reverse": 1}.get(order, i[5])  # 0 -> 1 -> 2 ... only in ascending order
    assert i.tolist() == [4950, -4950, 49, -50, 7, chain]
    # Inc and Dec walk 0..6 in a circle, 100 steps.
    assert u.tolist() == [FULL, FULL - (2**20 - 1), np.bitwise_xor.reduce(np.arange(100)), 100 % 7, -100 % 7]
    assert longs.tolist() == [100 << 33, 1 << 63]
    assert (f[0], h[0], b[0]) == (100, 50, 100)  # all partial sums are exact in these types


def test_bit_functions():
    rng = np.random.default_rng(1)
    special = np.array([0, 1, 0x80000000, FULL, 0x7FFFFFFF, 0x12345678], np.uint32)
    x = np.concatenate([np.repeat(special, 6), rng.integers(0, 2**32, 200, dtype=np.uint32)])
    y = np.concatenate([np.tile(special, 6), rng.integers(0, 2**32, 200, dtype=np.uint32)])
    out = np.zeros((15, x.size), np.uint32)
    functions().launch("bits", (4,), (64,), (x, y, out, np.int32(x.size)))

    def expected(a, b):
        both, pair = a << 32 | b, b << 32 | a  # pair: as __byte_perm and __funnelshift see their operands
        signed = [v - (v >> 31 << 32) for v in (a, b)]
        picked = sum((pair >> 8 * (b >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
        return [
            a.bit_count(), 32 - a.bit_length(), (a & -a).bit_length(), int(f"{a:032b}"[::-1], 2), picked,
            (pair << (b & 31)) >> 32 & FULL, pair >> (b & 31) & FULL, a * b >> 32, both.bit_count(),
            64 - both.bit_length(), (both & -both).bit_length(), int(f"{both:064b}"[::-1], 2) >> 32,
            (signed[0] * signed[1] >> 32) & FULL, a & 0x7F7FFFFF, a & 0x7F7FFFFF,
        ]  # fmt: skip

    np.testing.assert_array_equal(out.T, [expected(int(a), int(b)) for a, b in zip(x, y)])


def test_arithmetic_is_float32_without_contraction():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 512)).astype(np.float32) * 3
    out = np.zeros((16, 512), np.float32)
    functions().launch("arithmetic", (1,), (512,), (x, y, out, np.int32(512)))
    one, wide, wide_y = np.float32(1), x.astype(np.float64), y.astype(np.float64)
    fused = (wide * y + 1).astype(np.float32)  # the product is exact in float64
    exact = [
        x + y,
        x - y,
        x * y,
        x / y,
        x / y,
        one / x,
        y * y + one,
        fused,
        np.fmin(x, y),
        x,
        np.clip(x, 0, 1),
    ]
    np.testing.assert_array_equal(out[:11], exact)
    assert (y * y + one != (wide_y * wide_y + 1).astype(np.float32)).any()  # contraction would be seen
    with np.errstate(all="ignore"):
        close = [1 / np.sqrt(abs(wide)), np.exp(wide), np.log(abs(wide)), np.exp2(wide), np.log2(abs(wide))]
    # glibc promises 1 ulp for its float functions: at most 2^-23 of the result.
    np.testing.assert_allclose(out[11:], close, rtol=2.0**-23)


def test_types_and_conversions():
    out = np.zeros(8, np.int32)
    functions().launch("types", (1,), (1,), (out, np.array([1, 2, 3, 4], np.float32)), shared_bytes=16)
    assert out.tolist() == [1, 1, 1, 4 + 30 + 4, 1, 1, 5, 1]
