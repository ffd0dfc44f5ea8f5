// platform.cuh - the few names that differ between NVRTC, nvcc and the CPU emulator, and conversions to and from float.
#pragma once
#ifndef CUEMU                            // the emulator brings NVIDIA's own fp16 and bf16 headers and INFINITY itself
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef INFINITY                         // NVRTC has no <math.h>
#define INFINITY __int_as_float(0x7f800000)
#endif
#endif

namespace cuattn {

using int64 = long long;                 // every offset is 64-bit from its first multiplication
constexpr unsigned ALL = 0xffffffff;     // lanes of a warp

// Two neighbours at a time: one conversion instruction handles both.
__device__ __forceinline__ float2 to_float2(const float* p) { return {p[0], p[1]}; }
__device__ __forceinline__ float2 to_float2(const __half* p) { return __half22float2(__halves2half2(p[0], p[1])); }
__device__ __forceinline__ float2 to_float2(const __nv_bfloat16* p) {
    return __bfloat1622float2(__halves2bfloat162(p[0], p[1]));
}
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounded to nearest even, as a cast in NumPy does.
__device__ __forceinline__ void from_float2(float* p, float a, float b) { p[0] = a, p[1] = b; }
__device__ __forceinline__ void from_float2(__half* p, float a, float b) {
    const __half2 x = __floats2half2_rn(a, b);
    p[0] = __low2half(x), p[1] = __high2half(x);
}
__device__ __forceinline__ void from_float2(__nv_bfloat16* p, float a, float b) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
    p[0] = __low2bfloat16(x), p[1] = __high2bfloat16(x);
}
__device__ __forceinline__ void from_float(float* p, float x) { *p = x; }
__device__ __forceinline__ void from_float(__half* p, float x) { *p = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }

}  // namespace cuattn

// The narrow type of K/V caches, float8_e4m3fn: it has no infinity, and what is too large becomes +-448.
#ifndef CUEMU
#include <cuda_fp8.h>
#endif

namespace cuattn {

__device__ __forceinline__ float2 to_float2(const __nv_fp8_e4m3* p) {
    const __nv_fp8x2_storage_t two = __nv_fp8x2_storage_t(p[0].__x | p[1].__x << 8);
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
}
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return float(x); }
__device__ __forceinline__ void from_float2(__nv_fp8_e4m3* p, float a, float b) {
    const __nv_fp8x2_storage_t two = __nv_cvt_float2_to_fp8x2(float2{a, b}, __NV_SATFINITE, __NV_E4M3);
    p[0].__x = two & 0xFF, p[1].__x = two >> 8;
}
__device__ __forceinline__ void from_float(__nv_fp8_e4m3* p, float x) {
    p->__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

}  // namespace cuattn
