// rows.cuh - rows of an array with up to four leading axes, each with a stride of its own.
//
// A row is everything but the last axis: (batch, seqlen, head), (token, head), (head). The host merges neighbouring
// axes that are contiguous in every array of a call and puts axes of size 1 in front. So the usual call has one axis;
// the branches below are the same for every thread and leave it without a division.
#pragma once
#include "platform.cuh"

namespace cuattn {

struct RowIndex {
    int64 i0, i1, i2, i3;
    int axes;                                // how many of them, from the last, can be other than 0: 1, 2 or 4
};

struct Rows {                                // size0 * size1 * size2 * size3 rows, the last axis fastest
    int64 count, size1, size2, size3;        // more than one axis: fewer than 2^31 rows, so that 32 bits can divide them

    __device__ __forceinline__ bool one_axis() const { return size3 == count; }

    __device__ __forceinline__ RowIndex split(int64 row) const {
        if (one_axis()) return {0, 0, 0, row, 1};
        const unsigned r3 = unsigned(row), r2 = r3 / unsigned(size3), i3 = r3 - r2 * unsigned(size3);
        if (size2 * size3 == count) return {0, 0, r2, i3, 2};
        const unsigned r1 = r2 / unsigned(size2), r0 = r1 / unsigned(size1);
        return {r0, r1 - r0 * unsigned(size1), r2 - r1 * unsigned(size2), i3, 4};
    }
};

struct RowStrides {                          // in elements
    int64 s0, s1, s2, s3;

    __device__ __forceinline__ int64 offset(const RowIndex& i) const {
        int64 at = i.i3 * s3;
        if (i.axes > 1) at += i.i2 * s2;
        if (i.axes > 2) at += i.i1 * s1 + i.i0 * s0;
        return at;
    }
};

}  // namespace cuattn
