// cuemu.h - runs CUDA C++ kernels on the CPU, block after block, each CUDA thread on a stack of its own.
//
// What     The kernel text that NVRTC compiles is compiled by g++ behind this header. Indexing, masking,
//          paging, barriers, warp exchanges and arithmetic are the kernel's own. What the GPU would supply
//          comes from
//          cuemu_stack.h       stacks, and the switch between them
//          cuemu_threads.h     threads, who runs next, who waits for whom
//          cuemu_launch.h      shared memory, blocks, launches
//          cuemu_warp.h        __syncthreads, shuffles, votes
//          cuemu_intrinsics.h  functions of one thread: atomics, bits, arithmetic
//          cuemu_mma.h         mma, ldmatrix, cp.async, for the wrappers in mma.cuh
// Order    A warp runs until all its lanes wait or have exited, then the next warp; inside it a lane runs
//          until it waits. Lanes, warps and blocks go forward, in reverse, or shuffled by a seed. So a kernel
//          that lacks a __syncthreads computes other values in `reverse` than in `forward`: this is how a
//          race is found.
// Poison   Shared memory, static and dynamic, is 0xFF bytes (NaN in every float format) at each block start.
//          Only with AddressSanitizer, whose red zones need plain statics, static __shared__ is left as it
//          was.
// Errors   Deadlocks, wrong masks, failed asserts, false __builtin_assume, writes behind the dynamic shared
//          memory and __trap() end the launch with a message; the threads are abandoned where they stand.
// Limits   Not the GPU's compiler: no PTX and no SASS runs, NVRTC may refuse or contract what g++ takes, fast
//          intrinsics are exact here, __CUDA_ARCH__ is not defined. No true races: threads never run at once,
//          atomics are plain, fences do nothing, and whoever spins on memory hangs. Registers are not
//          counted. A wild pointer crashes the process. No clusters, mbarrier, TMA, wgmma, cooperative
//          groups, inline PTX. A pass here is "emulated", never "tested on a GPU".
// Cost     On one core of a 2020s x86-64 server, -O2: 6 ns per thread without a barrier; a barrier 12 ns per
//          thread in blocks of 128, 20 ns in blocks of 1024 (their stacks leave the inner caches); a shuffle
//          or vote 14 ns per lane; starting a stack 20 ns per thread, once per block with barriers;
//          mma.m16n8k16 1.5 us per warp; a launch 20 us, nearly all in Python. Compiling 0.1 s and up per
//          module, 1.2 s once for these headers.
#pragma once
#include <link.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include <vector_functions.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuemu_stack.h"
#include "cuemu_threads.h"
#include "cuemu_launch.h"
#include "cuemu_warp.h"
#include "cuemu_intrinsics.h"
#include "cuemu_mma.h"

// ---- CUDA's keywords: last, for the headers above must not see them ----
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __managed__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __maxnreg__
#undef __grid_constant__
#undef __cluster_dims__
#undef __align__
#undef assert
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ CUEMU_SHARED
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __cluster_dims__(...) _Pragma("GCC error \"the emulator has no thread block clusters\"")
#define __align__(bytes) __attribute__((aligned(bytes)))
#define alignas(bytes) __attribute__((aligned(bytes)))   // g++ takes alignas only in front of `static`
#define threadIdx (cuemu::current->index)
#define blockIdx (cuemu::block_index)
#define blockDim (cuemu::block_dim)
#define gridDim (cuemu::grid_dim)
#define warpSize 32
#define CUEMU_DEMAND(condition, text, what) \
    ((condition) ? void() : cuemu::fail("%s (%s:%d): %s", what, __FILE__, __LINE__, text))
#define assert(condition) CUEMU_DEMAND(condition, #condition, "assertion failed")
#define __builtin_assume(condition) CUEMU_DEMAND(condition, #condition, "__builtin_assume is false")
