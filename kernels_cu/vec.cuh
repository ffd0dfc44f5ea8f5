// vec.cuh - N neighbouring elements of one row, moved as the widest words that their size allows and used as float.
//
// The address must be a multiple of min(16, N * sizeof(T)) bytes: the plan picks N so that pointers and strides are.
#pragma once
#include "platform.cuh"

namespace cuattn {

template <int BYTES> struct Word;
template <> struct Word<1>  { using type = unsigned char;  static constexpr int count = 1; };
template <> struct Word<2>  { using type = unsigned short; static constexpr int count = 1; };
template <> struct Word<4>  { using type = unsigned int;   static constexpr int count = 1; };
template <> struct Word<8>  { using type = uint2;          static constexpr int count = 1; };
template <> struct Word<16> { using type = uint4;          static constexpr int count = 1; };
template <> struct Word<32> { using type = uint4;          static constexpr int count = 2; };

// Packed<T, N>: N elements as they lie in memory, kept in registers until they are needed as floats.
template <typename T, int N> struct Packed {
    using W = Word<N * int(sizeof(T))>;
    typename W::type word[W::count];

    __device__ __forceinline__ void load(const T* p) {
#pragma unroll
        for (int i = 0; i < W::count; ++i) word[i] = reinterpret_cast<const typename W::type*>(p)[i];
    }
    __device__ __forceinline__ void store(T* p) const {
#pragma unroll
        for (int i = 0; i < W::count; ++i) reinterpret_cast<typename W::type*>(p)[i] = word[i];
    }
    __device__ __forceinline__ void unpack(float (&x)[N]) const {
        const T* element = reinterpret_cast<const T*>(word);
        if constexpr (N == 1) {
            x[0] = to_float(element[0]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const float2 two = to_float2(element + i);
                x[i] = two.x, x[i + 1] = two.y;
            }
        }
    }
    __device__ __forceinline__ void pack(const float (&x)[N]) {
        T* element = reinterpret_cast<T*>(word);
        if constexpr (N == 1) {
            from_float(element, x[0]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) from_float2(element + i, x[i], x[i + 1]);
        }
    }
};

}  // namespace cuattn
