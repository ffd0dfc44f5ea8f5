"""The CPU emulator: blocks, shared memory, barriers and the orders of threads, and the faults that end a launch.

Kernels are grouped in a few sources, because one compilation costs more than most launches.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.emulated import ORDERS, compiled
from tests.emulator import EmulatedModule, EmulationError, build

pytestmark = pytest.mark.emulator

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


def test_without_assembly_threads_switch_by_ucontext(monkeypatch):
    flags = [*build._common_flags(), "-DCUEMU_UCONTEXT"]
    monkeypatch.setattr(build, "_common_flags", lambda: flags)
    np.testing.assert_array_equal(run_flip("forward", SWITCH="ucontext"), run_flip("forward"))


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
