// paged_kv.cuh - where the tokens of a paged cache lie, and the indices that say so.
//
// A slot is the place of a token: slot = page * page_size + offset. K and V pages (num_pages, page_size, num_kv_heads,
// head_dim) have strides of their own, so an interleaved or head-major cache is a view like any other. Every id that
// comes from the device is compared with what there is before it becomes an address: one that is negative or too large
// names nothing.
#pragma once
#include "platform.cuh"
#include "vec.cuh"

namespace cuattn {

// How to read an array of int32 or int64 whose elements are any distance apart.
struct Indices {
    int64 bytes, step;                   // 4 or 8 an entry; from one to the next, in entries

    __device__ __forceinline__ int64 read(const void* at, int64 i) const {
        return bytes == 8 ? static_cast<const int64*>(at)[i * step] : static_cast<const int*>(at)[i * step];
    }
};

__device__ __forceinline__ bool names_one_of(int64 id, int64 count) {
    return static_cast<unsigned long long>(id) < static_cast<unsigned long long>(count);
}

// n / d for n < count. 64 bits take ten times the instructions of 32; the branch is the same for every thread.
__device__ __forceinline__ int64 divide_below(int64 n, int64 d, int64 count) {
    if (count <= 0x7fffffff) return unsigned(n) / unsigned(d);
    return n / d;
}

struct Slot {
    int64 page, offset;
    bool valid;
};

struct PageSizes {
    int64 num_pages, page_size, num_slots;

    __device__ __forceinline__ Slot locate(int64 slot) const {
        if (!names_one_of(slot, num_slots)) return {0, 0, false};
        const int64 page = divide_below(slot, page_size, num_slots);
        return {page, slot - page * page_size, true};
    }
};

struct PageStrides {                     // in elements
    int64 page, offset, head;

    __device__ __forceinline__ int64 at(const Slot& slot, int64 h) const {
        return slot.page * page + slot.offset * offset + h * head;
    }
};

struct TokenStrides {                    // of an array (num_tokens, num_kv_heads, head_dim), in elements
    int64 token, head;

    __device__ __forceinline__ int64 at(int64 i, int64 h) const { return i * token + h * head; }
};

// The scales of a float8 cache: one for all heads, or one each.
struct Scales {
    const float* array;                  // nullptr: `value` for all
    float value;
    int64 step;                          // from one head to the next, 0: one for all

    __device__ __forceinline__ float of(int64 h) const { return array == nullptr ? value : array[h * step]; }
};

// x / scale for a positive scale, to the bits of __fdiv_rn wherever they decide a float8. One reciprocal serves many x,
// and then it is the sequence that the compiler emits for a division, without its branches.
struct Divisor {
    float scale, factor, reciprocal;     // a power of two in both keeps remainders of tiny and huge scales exact

    __device__ __forceinline__ explicit Divisor(float s) {
        factor = s >= 0x1p60f ? 0x1p-64f : s <= 0x1p-60f ? 0x1p64f : 1.f;
        scale = s * factor;
        const float r = __fdividef(1.f, scale);
        reciprocal = __fmaf_rn(r, __fmaf_rn(r, -scale, 1.f), r);
    }
    __device__ __forceinline__ float divide(float x) const {
        x = __fmul_rn(x, factor);
        const float q = __fmul_rn(x, reciprocal);
        const float excess = __fmaf_rn(q, scale, -x);          // NaN if q is infinite, but large ones all saturate
        return fabsf(q) < 65536.f ? __fmaf_rn(-reciprocal, excess, q) : q;   // so written, -0 / scale remains -0
    }
};

}  // namespace cuattn
