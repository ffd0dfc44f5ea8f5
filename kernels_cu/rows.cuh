// rows.cuh - rows of an array with up to four leading axes, each with a stride of its own.
//
// A row is everything but the last axis: (batch, seqlen, head), (token, head), (head). The host merges neighbouring
// axes that are contiguous in every array of a call, so the usual call has one axis and needs no division.
#pragma once
#include "platform.cuh"

namespace cuattn {

struct RowIndex { int64 i0, i1, i2, i3; };   // unused axes are leading and 0

struct Rows {                                // the index space: size0 * size1 * size2 * size3 rows, the last fastest
    int64 count, size1, size2, size3;

    __device__ __forceinline__ RowIndex split(int64 row) const {
        if (size3 == count) return {0, 0, 0, row};
        // The same branch in every thread; a 64-bit division costs several 32-bit ones.
        return count <= 0x7fffffff ? split_as<unsigned>(row) : split_as<unsigned long long>(row);
    }

    template <typename U> __device__ __forceinline__ RowIndex split_as(int64 row) const {
        const U r3 = U(row), r2 = r3 / U(size3), r1 = r2 / U(size2), r0 = r1 / U(size1);
        return {int64(r0), int64(r1 - r0 * U(size1)), int64(r2 - r1 * U(size2)), int64(r3 - r2 * U(size3))};
    }
};

struct RowStrides {                          // in elements
    int64 s0, s1, s2, s3;

    __device__ __forceinline__ int64 offset(RowIndex i) const {
        return i.i0 * s0 + i.i1 * s1 + i.i2 * s2 + i.i3 * s3;
    }
};

}  // namespace cuattn
