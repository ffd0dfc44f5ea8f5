// decode_append.cuh - new tokens of a decode call, written to their pages by those who then attend to them.
//
// The block or warp that has a piece of sequence b for kv head g writes head g of the new tokens in that piece, before it
// reads a key of it, whether or not a query of its own sees them. So none waits for another. Where several share a piece,
// one for each few query rows, all of them write: the same values to the same bytes.
// Bits     those of append_kv. A token without a place, behind the table or in a page that doesn't exist, is skipped.
// Oracle: reference/decode.py, reference/paged.py
#pragma once
#include "decode.cuh"
#include "rotary.cuh"

namespace cuattn {

// Feature d of a row as a page holds it.
template <typename C, typename T>
__device__ __forceinline__ C stored(const T* row, int d, const Angles& by, const Divisor& scale) {
    C x;
    if constexpr (sizeof(C) == 1) from_float(&x, scale.divide(turned(row, d, by)));
    else x = by.half ? rotated(row, d, by) : row[d];       // without a rotation NaN keeps its payload
    return x;
}

// Tokens begin .. end - 1 of a sequence, by `threads` threads of which this is number `thread`; the caller synchronises.
template <typename T, typename C>
__device__ __forceinline__ void append_tokens(int64 b, int begin, int end, int g, const Sequence& own, int thread,
                                              int threads, const T* k, const T* v, const void* cos, const void* sin,
                                              C* k_pages, C* v_pages, const void* block_table, const Scales& k_scales,
                                              const Scales& v_scales, const DecodeLayout& at) {
    const unsigned widest = unsigned(max(at.head_dim, at.head_dim_v)), count = unsigned(end - begin) * widest;
    const Divisor by_k(k_scales.of(g)), by_v(v_scales.of(g));
    for (unsigned n = thread; n < count; n += threads) {
        const unsigned t = n / widest, d = n - t * widest;
        const int j = begin + int(t), i = j - own.past;
        const Slot slot = token_at(j, block_table, own.row, at);
        if (!slot.valid) continue;
        const Angles angles = at.rotary.at(j, cos, sin), none{};
        const int k_d = int(min(int64(d), at.head_dim - 1)), v_d = int(min(int64(d), at.head_dim_v - 1));
        const C x = stored<C>(k + at.new_k.at(b, i, g), k_d, angles, by_k);
        const C y = stored<C>(v + at.new_v.at(b, i, g), v_d, none, by_v);      // loaded before x is stored: at once
        if (d < at.head_dim) k_pages[at.k.at(slot, g) + d] = x;
        if (d < at.head_dim_v) v_pages[at.v.at(slot, g) + d] = y;
    }
}

}  // namespace cuattn
