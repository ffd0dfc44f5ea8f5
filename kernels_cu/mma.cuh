// mma.cuh - tensor core instructions of sm_80 and newer under plain names, for warps.
//
// With g = lane / 4 and t = lane % 4, a register of a fragment holds two neighbours, the lower index in the lower half:
//   A (16 x 16)   a0: row g, columns 2t, 2t+1   a1: row g + 8, the same   a2, a3: columns 2t + 8, 2t + 9
//   B (16 x 8)    b0: rows 2t, 2t+1, column g   b1: rows 2t + 8, 2t + 9
//   C (16 x 8)    float c0, c1: row g, columns 2t, 2t+1   c2, c3: row g + 8
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k16", "movmatrix". The CPU emulator has bodies of its own.
#pragma once
#include "platform.cuh"

namespace cuattn {

constexpr unsigned ALL = 0xffffffff;

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

// 16 bytes that are read once: they take no room in L1.
__device__ __forceinline__ uint4 load_once(const void* p) {
#ifdef CUEMU
    return *static_cast<const uint4*>(p);
#else
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
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
