// mma.cuh - tensor core instructions of sm_80 and newer under plain names, for warps.
//
// With g = lane / 4 and t = lane % 4, a register of a fragment holds two neighbours, the lower index in the lower half:
//   A (16 x 16)   a0: row g, columns 2t, 2t+1   a1: row g + 8, the same   a2, a3: columns 2t + 8, 2t + 9
//   B (16 x 8)    b0: rows 2t, 2t+1, column g   b1: rows 2t + 8, 2t + 9
//   C (16 x 8)    float c0, c1: row g, columns 2t, 2t+1   c2, c3: row g + 8
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k16", "movmatrix", "ldmatrix", "cp.async". The CPU emulator has bodies of its own.
#pragma once
#include "platform.cuh"

namespace cuattn {

template <typename X> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<__half> = true;

// A value that stays in its register: the compiler cannot tell how it came about and so will not compute it again.
template <typename X> __device__ __forceinline__ X kept(X x) {
#ifndef CUEMU
    asm volatile("" : "+l"(x));
#endif
    return x;
}

// c += a b, products exact, sums in float32.
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
#ifdef CUEMU
    cuemu::mma_m16n8k16_f16(c, a, b, c);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                             __nv_bfloat16) {
#ifdef CUEMU
    cuemu::mma_m16n8k16_bf16(c, a, b, c);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// An 8 x 8 matrix of 16-bit elements, row g in the lanes of g (columns 2t, 2t+1), transposed.
__device__ __forceinline__ unsigned transpose(unsigned x) {
#ifdef CUEMU
    return cuemu::movmatrix(x);
#else
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
#endif
}

// Four 8 x 8 matrices of 16-bit elements from shared memory: lane 8 n + i gives the address of row i of matrix n, 16
// bytes. Register n has row g, columns 2t, 2t+1 of matrix n; transposed: rows 2t, 2t+1 of column g.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const void* row) {
#ifdef CUEMU
    cuemu::ldmatrix<4, false>(x, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
#endif
}
__device__ __forceinline__ void load_transposed(unsigned (&x)[4], const void* row) {
#ifdef CUEMU
    cuemu::ldmatrix<4, true>(x, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
#endif
}

// What L2 shall do with lines, on sm_90 and newer. `word` is what createpolicy gives there for a fraction of 1, said by the
// host. `nothing` is 0, and ptxas must not know: where it can split an address in shared memory into a uniform and another
// register, ptxas 13.0 compiles cp.async with a policy to an LDGSTS that reads uniform registers nobody wrote (seen in
// machine code; an illegal instruction on an H200). An exclusive or with `nothing` cannot be split.
struct L2Policy { int64 word, nothing; };

// 16 bytes from global to shared memory while the thread goes on; the first `bytes` of them, the rest is 0.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes, L2Policy policy) {
#ifdef CUEMU
    cuemu::cp_async<16>(to, bytes ? from : nullptr, bytes);
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 :: "r"(unsigned(__cvta_generic_to_shared(to)) ^ unsigned(policy.nothing)), "l"(from), "r"(bytes), "l"(policy.word) : "memory");
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
#ifdef CUEMU
    cuemu::cp_async<16>(to, bytes ? from : nullptr, bytes);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes) : "memory");
#endif
}
// The copies since the last one become a group, maybe an empty one.
__device__ __forceinline__ void end_of_copies() {
#ifdef CUEMU
    cuemu::cp_async_commit_group();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for the calling thread's groups, but for the newest N.
template <int N> __device__ __forceinline__ void wait_for_copies() {
#ifdef CUEMU
    cuemu::cp_async_wait_group<N>();
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}

__device__ __forceinline__ void store(float4* p, const float4& x, L2Policy policy) {
#if !defined(CUEMU) && __CUDA_ARCH__ >= 900
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1,%2,%3,%4}, %5;"
                 :: "l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy.word) : "memory");
#else
    *p = x;
#endif
}

// 2^x with a relative error of 2^-22; 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef CUEMU
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Two numbers as one register, rounded to nearest.
__device__ __forceinline__ unsigned pair_of(float low, float high, __half) {
    const __half2 two = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(two);
}
__device__ __forceinline__ unsigned pair_of(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(two);
}

// Four float8 as half, exactly.
__device__ __forceinline__ void widen(unsigned four, unsigned& low, unsigned& high) {
    const __half2_raw a = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(four & 0xffff), __NV_E4M3);
    const __half2_raw b = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(four >> 16), __NV_E4M3);
    low = a.x | unsigned(a.y) << 16;
    high = b.x | unsigned(b.y) << 16;
}

}  // namespace cuattn
