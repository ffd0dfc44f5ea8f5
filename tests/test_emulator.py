"""The CPU emulator itself: what it must compute, and the faults in kernels that it must find.

Expectations come from NumPy and from the formulas of the CUDA and PTX manuals, never from the emulator's own
code. Kernels are grouped in a few sources, because one compilation costs more than most launches.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import CompileError, EmulatedModule, EmulationError, build, sanitized_environment

pytestmark = pytest.mark.emulator

ORDERS = [("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)]
ROOT = pathlib.Path(__file__).parent.parent
LANES = np.arange(32)
FULL = 0xFFFFFFFF


@functools.cache
def compiled(
    source: str, entries: str, defines: tuple[tuple[str, str], ...] = (), **options
) -> EmulatedModule:
    return EmulatedModule(source, entries.split(), dict(defines), **options)


# ---- threads, blocks, barriers ----

BLOCKS = r"""
#include <cuda_fp16.h>    // as NVRTC needs it; here it has been included already
struct Shape { int rows; double scale; };

extern "C" __global__ void __launch_bounds__(1024)
where(int* __restrict__ seen, unsigned* dims, const __grid_constant__ Shape shape) {
    const size_t block = blockIdx.x + gridDim.x * (blockIdx.y + size_t(gridDim.y) * blockIdx.z);
    const size_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    if (int(thread) >= shape.rows) return;
    const size_t place = block * blockDim.x * blockDim.y * blockDim.z + thread;
    seen[place] += 1 + int(shape.scale * thread) + 1000 * int(block);
    if (place == 0) dims[0] = gridDim.y, dims[1] = blockDim.z, dims[2] = warpSize, dims[3] = sizeof(long);
}

template <int N> __device__ unsigned char* hidden() { __shared__ unsigned char bytes[N]; return bytes; }

extern "C" __global__ void poison(unsigned char* seen, unsigned* offset) {
    extern __shared__ __align__(32) unsigned char dynamic[];
    __shared__ alignas(64) unsigned char fixed[100];
    __shared__ __align__(128) float aligned;
    const int i = threadIdx.x;
    unsigned char* all[3] = {dynamic, fixed, hidden<100>()};
    for (int a = 0; a < 3; ++a) {
        seen[(blockIdx.x * 3 + a) * 100 + i] = all[a][i];
        all[a][i] = 7;
    }
    offset[0] = size_t(dynamic) % 64, offset[1] = size_t(fixed) % 64, offset[2] = size_t(&aligned) % 128;
}

extern "C" __global__ void flip(int* x) {          // reverses each block's piece through shared memory
    extern __shared__ int tile[];
    const int i = threadIdx.x, n = blockDim.x;
    tile[i] = x[blockIdx.x * n + i];
#ifndef NO_BARRIER
    __syncthreads();
#endif
    x[blockIdx.x * n + i] = tile[n - 1 - i];
}

extern "C" __global__ void predicates(int* out, int limit) {   // threads >= 70 have left before
    const int i = threadIdx.x;
    if (i >= 70) return;
    out[3 * i] = __syncthreads_count(i < limit);
    out[3 * i + 1] = __syncthreads_and(i < limit);
    out[3 * i + 2] = __syncthreads_or(i < limit);
}

extern "C" __global__ void rank_of_running(int* next, int* ranks) {
    ranks[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(next, 1);
}

__device__ int calls;                              // of the module, as on the GPU
__constant__ float table[3] = {1.5f, 2.5f, 3.5f};
extern "C" __global__ void globals(float* out) { out[0] = table[++calls]; }
"""
BLOCK_ENTRIES = "where poison flip predicates rank_of_running globals"


def blocks(**defines) -> EmulatedModule:
    return compiled(BLOCKS, BLOCK_ENTRIES, tuple(defines.items()))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_every_thread_of_every_block_runs_once(order, seed):
    grid, block, rows = (3, 2, 2), (5, 3, 4), 50
    seen, dims = np.zeros((12, 60), np.int32), np.zeros(4, np.uint32)
    shape = np.array([(rows, 2.5)], np.dtype([("rows", "i4"), ("scale", "f8")], align=True))[0]
    blocks().launch("where", grid, block, (seen, dims, shape), order=order, seed=seed)
    thread = np.arange(60)
    expected = np.where(thread < rows, 1 + np.int32(2.5 * thread) + 1000 * np.arange(12)[:, None], 0)
    np.testing.assert_array_equal(seen, expected)
    assert dims.tolist() == [2, 4, 32, 8]


def test_shared_memory_is_poisoned_for_every_block_and_aligned_as_declared_only():
    seen, offset = np.zeros((3, 3, 100), np.uint8), np.zeros(3, np.uint32)
    blocks().launch("poison", (3,), (100,), (seen, offset), shared_bytes=100)
    assert (seen == 0xFF).all()
    assert offset.tolist() == [32, 0, 0]  # dynamic: a multiple of 32, and of nothing larger


def run_flip(order: str, seed: int = 0, **defines) -> np.ndarray:
    x = np.arange(2 * 96, dtype=np.int32)
    blocks(**defines).launch("flip", (2,), (96,), (x,), shared_bytes=96 * 4, order=order, seed=seed)
    return x


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_barrier(order, seed):
    expected = np.arange(2 * 96).reshape(2, 96)[:, ::-1].ravel()
    np.testing.assert_array_equal(run_flip(order, seed), expected)


def test_a_missing_barrier_shows_as_a_difference_between_orders():
    forward, reverse = run_flip("forward", NO_BARRIER="1"), run_flip("reverse", NO_BARRIER="1")
    assert (forward != reverse).any()


@pytest.mark.parametrize("order", ["forward", "reverse"])  # the others exit after the first waits, or before
@pytest.mark.parametrize("limit", [0, 1, 69, 70, 128])
def test_barriers_with_predicates_count_only_threads_that_have_not_exited(limit, order):
    out = np.zeros((70, 3), np.int32)
    blocks().launch("predicates", (1,), (128,), (out, np.int32(limit)), order=order)
    count = min(limit, 70)
    np.testing.assert_array_equal(out, np.broadcast_to([count, count == 70, count > 0], (70, 3)))


def test_orders():
    def ranks(order, seed=0):
        out = np.zeros((3, 2, 32), np.int32)
        blocks().launch("rank_of_running", (3,), (64,), (np.zeros(1, np.int32), out), order=order, seed=seed)
        return out

    np.testing.assert_array_equal(ranks("forward").ravel(), np.arange(192))
    np.testing.assert_array_equal(ranks("reverse").ravel(), np.arange(192)[::-1])
    one, two = ranks("shuffle", 1), ranks("shuffle", 2)
    np.testing.assert_array_equal(one, ranks("shuffle", 1))
    assert (one != two).any()
    for shuffled in (one, two):
        np.testing.assert_array_equal(np.sort(shuffled.ravel()), np.arange(192))
        warps = shuffled.reshape(6, 32)
        assert (np.ptp(warps, axis=1) == 31).all()  # a warp without barriers runs to its end before the next
        assert (np.diff(warps) < 0).any(axis=1).all()
        assert (np.ptp(shuffled.reshape(3, 64), axis=1) == 63).all()


def test_module_variables_keep_their_values_between_launches():
    out = np.zeros(1, np.float32)
    for expected in (2.5, 3.5):
        blocks(FRESH="1").launch("globals", (1,), (1,), (out,))
        assert out[0] == expected


def test_modules_do_not_share_statics_of_templates_and_launch_from_any_thread():
    source = """
    template <class T> __device__ T* tile() { __shared__ T values[SIZE]; return values; }
    extern "C" __global__ void fill(int* out) {
        tile<int>()[threadIdx.x] = SIZE + threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = tile<int>()[SIZE - 1 - threadIdx.x];
    }"""

    def check(size):
        out = np.zeros(size, np.int32)
        compiled(source, "fill", (("SIZE", str(size)),)).launch("fill", (1,), (size,), (out,))
        np.testing.assert_array_equal(out, size + np.arange(size)[::-1])
        passed.append(size)

    passed: list[int] = []
    check(4)
    check(1000)
    for size in (4, 1000):
        other = threading.Thread(target=check, args=(size,))
        other.start()
        other.join()
    assert passed == [4, 1000, 4, 1000]


# ---- faults that end a launch ----

FAULTS = r"""
#line 1 "faults.cu"
extern "C" __global__ void half_at_barrier(int* x) {
    if (threadIdx.x < 40)
        __syncthreads();
    else
        x[0] = __shfl_sync(0xffffffffu, x[0], 0);
}
extern "C" __global__ void two_barriers() {
    if (threadIdx.x < 32) __syncthreads();
    else
        __syncthreads();
}
extern "C" __global__ void stranger(int* x) { x[0] = __shfl_sync(0xfffffffeu, threadIdx.x, 1); }
extern "C" __global__ void voting_stranger(int* x) { x[0] = __ballot_sync(2u, 1); }
extern "C" __global__ void gone_before(int* x) {
    if (threadIdx.x == 5) return;
    x[0] = __shfl_sync(0xffffffffu, threadIdx.x, 1);
}
extern "C" __global__ void different_masks(int* x) {
    x[0] = __shfl_sync(threadIdx.x < 16 ? ~0u : 0xffff0001u, 1, 16);
}
extern "C" __global__ void different_shuffles(int* x) {
    x[0] = threadIdx.x < 16 ? __shfl_up_sync(~0u, 1, 1) : __shfl_down_sync(~0u, 1, 1);
}
extern "C" __global__ void bad_width(int* x) { x[0] = __shfl_sync(~0u, 1, 0, 12); }
extern "C" __global__ void trap() { if (blockIdx.x == 2 && threadIdx.y == 1) __trap(); }
extern "C" __global__ void claim(int n) { assert(n > 3); }
extern "C" __global__ void assume(int n) { __builtin_assume(n > 3); }
extern "C" __global__ void overrun(int n) { extern __shared__ char bytes[]; bytes[n] = 1; }
"""
FAULT_ENTRIES = (
    "half_at_barrier two_barriers stranger voting_stranger gone_before different_masks different_shuffles "
    "bad_width trap claim assume overrun"
)
X = np.zeros(4, np.int32)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("entry", "block", "args", "message"),
    [
        (
            "half_at_barrier",
            64,
            (X,),
            r"of 64 threads 0 exited and 64 wait for others: (?=.*40 at __syncthreads \(faults.cu:3\))"
            + r"(?=.*24 at __shfl_sync \(faults.cu:5\) with mask 0xffffffff)",
        ),
        ("two_barriers", 64, (), r"__syncthreads \(faults.cu:\d+\) while others of the block wait at __sync"),
        (
            "stranger",
            32,
            (X,),
            r"\(0, 0, 0\): __shfl_sync \(faults.cu:12\): lane 0 is not in its own mask 0xfffffffe",
        ),
        ("voting_stranger", 32, (X,), r"__ballot_sync .*is not in its own mask 0x00000002"),
        (
            "gone_before",
            32,
            (X,),
            r"lanes 0x00000020, which have exited|exits, but lane \d+ waits for it at __shfl",
        ),
        (
            "different_masks",
            32,
            (X,),
            r"deadlock: of 32 threads 0 exited and 32 .*16 at .*16 at|is not in its own mask 0xffff0001",
        ),
        (
            "different_shuffles",
            32,
            (X,),
            r"deadlock.*16 at __shfl_\w+ .* with mask 0xffffffff, 16 at __shfl_\w+",
        ),
        ("bad_width", 32, (X,), r"width 12 is not a power of two"),
        ("trap", (2, 2), (), r"kernel trap, block \(2, 0, 0\), thread \([01], 1, 0\): __trap\(\)"),
        ("claim", 1, (np.int32(3),), r"assertion failed \(faults.cu:\d+\): n > 3"),
        ("assume", 1, (np.int32(3),), r"__builtin_assume is false .*: n > 3"),
        ("overrun", 1, (np.int32(100),), r"wrote dynamic shared memory at byte 100, but shared_bytes is 100"),
    ],
)
def test_faults_end_the_launch_with_a_message(entry, block, args, message, order):
    module = compiled(FAULTS, FAULT_ENTRIES)
    block = (block,) if isinstance(block, int) else block
    with pytest.raises(EmulationError, match=message):
        module.launch(entry, (3,), block, args, shared_bytes=100, order=order)
    # The process and the module survive: right launches follow.
    module.launch("claim", (2,), (64,), (np.int32(4),))
    module.launch("assume", (2,), (64,), (np.int32(4),))
    module.launch("overrun", (1,), (1,), (np.int32(99),), shared_bytes=100)
    np.testing.assert_array_equal(run_flip("forward"), np.arange(192).reshape(2, 96)[:, ::-1].ravel())


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


# ---- arguments, compilation ----

ARGUMENTS = r"""
struct alignas(16) Pair { double x; int y; };
extern "C" __global__ void take(double* out, const int* maybe, int i, long long l, float f, bool b, __half h,
                                Pair p, size_t a) {
    out[0] = maybe ? maybe[0] : -1;
    out[1] = i, out[2] = l, out[3] = f, out[4] = b, out[5] = __half2float(h), out[6] = p.x + p.y;
    out[7] = a % 64;
}
extern "C" __global__ void nothing() {}
"""
PAIR = np.array([(0.5, 7)], np.dtype([("x", "f8"), ("y", "i4")], align=True))[0]
GOOD = (
    np.zeros(8), np.array([3, 4], np.int32)[1:], np.int32(-5), np.int64(2**40), np.float32(0.1),
    np.bool_(True),
    np.float16(1.5), PAIR, np.uint64(65),
)  # fmt: skip


def arguments() -> EmulatedModule:
    return compiled(ARGUMENTS, "take nothing")


def test_arguments_arrive():
    for maybe, first in ((GOOD[1], 4), (None, -1), (np.uintp(GOOD[1].ctypes.data), 4)):
        arguments().launch("take", (1,), (1,), (GOOD[0], maybe, *GOOD[2:]))
        assert GOOD[0].tolist() == [first, -5, 2**40, float(np.float32(0.1)), 1, 1.5, 7.5, 1]
    arguments().launch("nothing", (1,), (1,), ())


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (2, 5, "take: argument 2 must be a NumPy array or scalar or None; got int"),
        (4, 0.5, "take: argument 4 must be a NumPy array .* got float"),
        (5, True, "take: argument 5 must be .* got bool"),
        (2, np.int64(5), "take: argument 2 must have 4 bytes; got int64 of 8"),
        (3, np.int32(5), "take: argument 3 must have 8 bytes; got int32 of 4"),
        (7, np.zeros(1, "f8,f8,f8")[0], "take: argument 7 must have 16 bytes; got .* of 24"),
        (6, np.float32(1), "take: argument 6 must have 2 bytes; got float32"),
        (4, np.int32(1), "take: argument 4 must be a float; got int32"),
        (2, np.float32(1), "take: argument 2 must be an integer; got float32"),
        (0, np.float64(1), "take: argument 0 must be an array, None or an address; got float64"),
        (3, np.zeros(1, np.int64), "take: argument 3 must be a scalar of 8 bytes; got ndarray"),
        (3, None, "take: argument 3 must be a scalar of 8 bytes; got NoneType"),
    ],
)
def test_wrong_arguments_are_refused(position, wrong, message):
    args = [*GOOD[:position], wrong, *GOOD[position + 1 :]]
    with pytest.raises(TypeError, match=message):
        arguments().launch("take", (1,), (1,), args)


def test_wrong_launches_are_refused():
    with pytest.raises(TypeError, match="take: takes 9 arguments; got 8"):
        arguments().launch("take", (1,), (1,), GOOD[:-1])
    refused = [
        ((0,), (1,)),
        ((1,), (0,)),
        ((1,), (1025,)),
        ((1,), (1, 1, 65)),
        ((1, 65536), (1,)),
        ((), (1,)),
    ]
    for grid, block in refused:
        with pytest.raises(ValueError, match=r"nothing: (grid|block) must be up to three sizes"):
            arguments().launch("nothing", grid, block, ())
    with pytest.raises(ValueError, match=r"block must have at most 1024 threads; got \(32, 33, 1\)"):
        arguments().launch("nothing", (1,), (32, 33), ())
    with pytest.raises(ValueError, match=r"shared_bytes must be in 0..232448; got 232449"):
        arguments().launch("nothing", (1,), (1,), (), shared_bytes=232449)
    with pytest.raises(ValueError, match="order must be one of"):
        arguments().launch("nothing", (1,), (1,), (), order="backward")


def test_compile_errors_name_file_line_and_defines():
    source = '#line 7 "inner.cuh"\n\nextern "C" __global__ void k() { undeclared = VALUE; }'
    with pytest.raises(CompileError, match=r"(?s)my.cu .*'VALUE': '12'.*inner.cuh:8.*undeclared") as error:
        EmulatedModule(source, ["k"], {"VALUE": "12"}, name="my.cu")
    assert (error.value.name, error.value.defines) == ("my.cu", {"VALUE": "12"})


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("void __cluster_dims__(2, 1, 1) k() {}", "no thread block clusters"),
        ("void k(long long* x) { atomicAdd(x, 1ll); }", "CUDA has no atomicAdd for this type"),
        ("void k(long long* x) { x[0] = min(x[0], 1); }", "ambiguous"),
    ],
)
def test_refused_as_by_nvrtc_or_not_supported(kernel, message):
    with pytest.raises(CompileError, match=message):
        EmulatedModule(f'extern "C" __global__ {kernel}', ["k"])


def test_the_cache_knows_what_a_library_depends_on(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_cache_directory", lambda: tmp_path)
    commands = []
    run = build._run_compiler

    def counted(*arguments, **options):
        commands.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(build, "_run_compiler", counted)

    def compilations(text="", defines=None, **options) -> int:
        before = len(commands)
        EmulatedModule(f'extern "C" __global__ void k() {{{text}}}', ["k"], defines or {}, **options)
        return len(commands) - before

    build._precompiled_header((*build._common_flags(), "-O2"))
    variants: list[dict] = [
        {},
        {"text": ";"},
        {"defines": {"A": "1"}},
        {"defines": {"A": "2"}},
        {"name": "other.cu"},
    ]
    assert [compilations(**v) for v in variants] == [1] * 5
    assert [compilations(**v) for v in variants] == [0] * 5
    monkeypatch.setattr(build, "_toolchain", lambda: "another compiler, or other headers")
    assert compilations() > 0


def test_processes_may_compile_at_once(tmp_path):
    script = """if True:
        import numpy as np
        from tests.emulator import EmulatedModule
        x = np.zeros(1, np.int32)
        source = 'extern "C" __global__ void k(int* x) { x[0] = 5; }'
        EmulatedModule(source, ["k"]).launch("k", (1,), (1,), (x,))
        assert x[0] == 5"""
    environment = {**os.environ, "CUATTN_EMU_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2  # one library, one folder of headers, nothing temporary


def test_without_assembly_threads_switch_by_ucontext(monkeypatch):
    flags = [*build._common_flags(), "-DCUEMU_UCONTEXT"]
    monkeypatch.setattr(build, "_common_flags", lambda: flags)
    np.testing.assert_array_equal(run_flip("forward", SWITCH="ucontext"), run_flip("forward"))


# ---- tensor cores ----

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
extern "C" __global__ void ldmatrix_faults(const uint4* global, int kind) {
    __shared__ __align__(16) char shared[64];
    unsigned r[1];
    if (threadIdx.x == 9) return;
    cuemu::ldmatrix<1, false>(r, kind == 0 ? shared + 8 : kind == 1 ? (const void*)global : shared);
}
"""


def mma_module() -> EmulatedModule:
    return compiled(MMA, "mma convert ldmatrix ldmatrix_faults")


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


# ---- cp.async ----

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


# ---- sanitizers, each in a process of its own ----

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
    script = f"from tests.test_emulator import run_planted; run_planted({fault!r})"
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
