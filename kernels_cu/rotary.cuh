// rotary.cuh - rotary embedding: pairs of features turned by the angles of a position, given as cosines and sines.
//
//     (a, b) -> (a cos - b sin, b cos + a sin),  pair d = features d and d + half, or interleaved 2 d and 2 d + 1
// Two products and a sum in float32, each rounded on its own (no fused multiply-add): a feature has the same bits
// whoever turns it and in whatever vectors. Features from 2 half on stay as they are.
// Oracle: reference/rotary.py
#pragma once
#include "paged_kv.cuh"
#include "vec.cuh"

namespace cuattn {

struct Angles {                          // of one position
    const void *cos, *sin;               // the tables
    int64 cos_at, sin_at;                // where its rows begin
    int half;                            // of the features that rotate; 0: none do
    bool interleaved, wide;              // wide: the tables are float, not T

    template <typename C> __device__ __forceinline__ const C* row_of_cos() const {
        return static_cast<const C*>(cos) + cos_at;
    }
    template <typename C> __device__ __forceinline__ const C* row_of_sin() const {
        return static_cast<const C*>(sin) + sin_at;
    }
};

struct Rotary {
    int64 half, interleaved, float_tables;                 // half of the features that rotate, 0: none do
    int64 max_positions, cos_step, sin_step;               // rows of cos and sin, and from row to row

    __device__ __forceinline__ bool has(int64 position) const { return names_one_of(position, max_positions); }

    // A position without a row turns nothing.
    __device__ __forceinline__ Angles at(int64 position, const void* cos, const void* sin) const {
        return {cos, sin, position * cos_step, position * sin_step, has(position) ? int(half) : 0, interleaved != 0,
                float_tables != 0};
    }
};

__device__ __forceinline__ void rotate_pair(float& a, float& b, float cos, float sin) {
    const float first = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    b = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
    a = first;
}

// Turns x, features d .. d + VEC - 1 of a row, all below 2 half, and reads their partners: neighbours, or half away.
template <int VEC, typename T, typename C>
__device__ __forceinline__ void rotate(float (&x)[VEC], const T* row, int d, const C* cos, const C* sin, int half,
                                       bool interleaved) {
    float y[VEC], c[VEC], s[VEC];
    if (interleaved) {
        constexpr int PAIRS = (VEC + 1) / 2;
        float cs[PAIRS], ss[PAIRS];
        Packed<C, PAIRS> packed_cos, packed_sin;
        packed_cos.load(cos + d / 2), packed_sin.load(sin + d / 2);
        packed_cos.unpack(cs), packed_sin.unpack(ss);
#pragma unroll
        for (int j = 0; j < VEC; ++j) c[j] = cs[j / 2], s[j] = ss[j / 2], y[j] = x[VEC == 1 ? j : j ^ 1];
        if constexpr (VEC == 1) y[0] = to_float(row[d ^ 1]);
    } else {
        const int column = d < half ? d : d - half;
        Packed<T, VEC> partner;
        Packed<C, VEC> packed_cos, packed_sin;
        partner.load(row + (d < half ? d + half : d - half));
        packed_cos.load(cos + column), packed_sin.load(sin + column);
        partner.unpack(y), packed_cos.unpack(c), packed_sin.unpack(s);
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        const bool first = interleaved ? (d + j) % 2 == 0 : d < half;
        const float a = __fmul_rn(x[j], c[j]), b = __fmul_rn(y[j], s[j]);
        x[j] = first ? __fsub_rn(a, b) : __fadd_rn(a, b);
    }
}

template <int VEC, typename T>
__device__ __forceinline__ void rotate(float (&x)[VEC], const T* row, int d, const Angles& by) {
    if (by.wide) {
        rotate(x, row, d, by.row_of_cos<float>(), by.row_of_sin<float>(), by.half, by.interleaved);
    } else {
        rotate(x, row, d, by.row_of_cos<T>(), by.row_of_sin<T>(), by.half, by.interleaved);
    }
}

// Feature d of a row after its rotation, not rounded to T yet: a float8 cache divides it by a scale before.
template <typename T> __device__ __forceinline__ float turned(const T* row, int d, const Angles& by) {
    float x[1] = {to_float(row[d])};
    if (d < 2 * by.half) rotate(x, row, d, by);
    return x[0];
}

// The same in T, as `apply_rotary` and a 16-bit cache store it.
template <typename T> __device__ __forceinline__ T rotated(const T* row, int d, const Angles& by) {
    T x;
    from_float(&x, turned(row, d, by));
    return x;
}

}  // namespace cuattn
