// rotary.cu - rotate the features of queries or keys by the angles of their tokens' positions.
//
// What     (a, b) -> (a cos - b sin, b cos + a sin) for every pair of features of every row; the other features stay,
//          and so does a row whose position has no row in the tables.
// Shapes   x (rows, head_dim) T read; out (rows, head_dim) T written; rows = up to four axes with strides of their own,
//          the last axis contiguous; positions (rows) i32 or i64, for the heads of a token one and the same
//          cos, sin (max_positions, half) T or f32
// Work     a thread per vector of pairs, which are two vectors of features, and per vector of features that stay.
//          threadIdx.y and blockIdx.x: the row; threadIdx.x and blockIdx.y: the vector.
// Bits     Two products and a sum in float32, each rounded, then rounded to T; VEC and the grid change none.
// Memory   bound by reading and writing every row once: 2 * rows * head_dim * itemsize bytes.
// Aliasing out may be x: a thread has read what it writes, and nobody else reads that.
// Compile  T, VEC; everything else is a runtime value.
// Source   rotary embedding (Su et al. 2021), its two orders of features after flash-attn
// Oracle   reference/rotary.py
#include "rotary.cuh"
#include "rows.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half, __nv_bfloat16 or float
constexpr int VEC = CUATTN_VEC;          // 16 bytes where sizes and alignment allow, else 1
constexpr int THREADS = 128;

struct RotationLayout {
    Rows rows;
    RowStrides x, out, positions;
    int64 items, index_bytes;            // vectors of pairs and vectors that stay, in a row; bytes of a position
    Rotary rotary;
};

template <typename C> __device__ __forceinline__ void load(float (&x)[VEC], const C* from) {
    Packed<C, VEC> packed;
    packed.load(from);
    packed.unpack(x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_apply_rotary(const T* x, const void* cos, const void* sin, const void* positions, T* out,
                    const __grid_constant__ RotationLayout at) {
    // 1. My row, its position and my vector.
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    const int n = blockIdx.y * blockDim.x + threadIdx.x, half = int(at.rotary.half);
    if (row >= at.rows.count || n >= at.items) return;
    const RowIndex i = at.rows.split(row);
    const T* from = x + at.x.offset(i);
    T* to = out + at.out.offset(i);
    // 2. Behind the rotated features: as it is.
    Packed<T, VEC> first, second;
    if (n >= half / VEC) {
        const int d = half + n * VEC;
        first.load(from + d);
        first.store(to + d);
        return;
    }
    // 3. Pairs n VEC to n VEC + VEC - 1.
    const Indices index{at.index_bytes, 1};
    const Angles by = at.rotary.at(index.read(positions, at.positions.offset(i)), cos, sin);
    const int d = by.interleaved ? 2 * n * VEC : n * VEC, other = by.interleaved ? d + VEC : d + half;
    first.load(from + d), second.load(from + other);
    if (by.half) {
        float z[2 * VEC], c[VEC], s[VEC];
        first.unpack(reinterpret_cast<float(&)[VEC]>(z[0]));
        second.unpack(reinterpret_cast<float(&)[VEC]>(z[VEC]));
        if (by.wide) load(c, by.row_of_cos<float>() + n * VEC), load(s, by.row_of_sin<float>() + n * VEC);
        else load(c, by.row_of_cos<T>() + n * VEC), load(s, by.row_of_sin<T>() + n * VEC);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            if (by.interleaved) rotate_pair(z[2 * j], z[2 * j + 1], c[j], s[j]);
            else rotate_pair(z[j], z[VEC + j], c[j], s[j]);
        }
        first.pack(reinterpret_cast<float(&)[VEC]>(z[0]));
        second.pack(reinterpret_cast<float(&)[VEC]>(z[VEC]));
    }
    first.store(to + d), second.store(to + other);
}
