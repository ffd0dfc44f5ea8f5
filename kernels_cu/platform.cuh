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
