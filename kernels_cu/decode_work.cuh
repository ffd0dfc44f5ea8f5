// decode_work.cuh - the pieces into which the tensor-core decode cuts its work, and the states that it merges.
//
// A piece is one split of a sequence, or FOLD neighbouring ones, for a kv head and ROWS of its query heads. Pieces are
// numbered by kv head first: blocks side by side read the same tokens at about the same time, which memory likes.
// Merge    States are (max, sum, acc), in base 2 and not divided by the sum. The quarters of a split are merged in
//          order, then FOLD neighbouring splits, then those groups: always, in one block or in several. So neither the
//          batch nor the size of a piece changes a bit.
#pragma once
#include "decode.cuh"
#include "mma.cuh"

namespace cuattn {

constexpr int FOLD = 4;

struct Splits { int first, end; };
struct PageBytes { int64 page, row; };   // from page to page, from token to token

// n / d for n < 2^31: n * magic >> (31 + shift), with magic = 2^(31 + shift) / d rounded up and 2^shift >= d.
struct Divider {
    int64 d, magic, shift;

    __device__ __forceinline__ unsigned divide(unsigned n) const {
        return __umulhi(2 * n, unsigned(magic)) >> unsigned(shift);
    }
};

struct Work {
    int64 batch;
    int64 usual;                         // one query, no window, padding or batch index, and no new tokens
    int64 aligned, folded;               // whether page_size is a multiple of 16; splits of a piece: 1 or FOLD
    int64 full, alike;                   // whether rows of K and V fill their lines; whether K and V lie in pages alike
    Divider shares, kv_heads, page_size, most_splits, groups_of_query;   // shares: of a sequence
    PageBytes k, v;
};

// A piece: which splits of which sequence, and ROWS heads of one query at most, so that all its rows see the same keys.
// blockIdx.x counts kv heads, then row groups, then sequences; blockIdx.y is the number of the piece.
struct alignas(16) Piece {
    Sequence own;
    int b, g, row_group, size;           // size: tokens of a split
    Splits used, mine;                   // of the sequence: those in which a query sees a key or that have new tokens
    int query, first_head, rows;         // row r is query head first_head + r
    Keys keys;                           // that they see, if they are there

    __device__ __forceinline__ Piece(int most_rows, const void* lengths, const void* batch_idx, const void* leftpad,
                                     const Work& work, const DecodeLayout& at) {
        const int folded = int(work.folded);
        b = int(work.shares.divide(blockIdx.x));
        const int share = int(blockIdx.x) - b * int(work.shares.d);
        row_group = int(work.kv_heads.divide(share)), g = share - row_group * int(work.kv_heads.d);
        query = int(work.groups_of_query.divide(row_group));
        const int before = (row_group - query * int(work.groups_of_query.d)) * most_rows;
        first_head = g * int(at.group) + before, rows = min(most_rows, int(at.group) - before);
        if (work.usual) {                // few instructions: all that a block does before its first load costs time
            const int length = int(min(max(at.lengths.read(lengths, b), int64(0)), at.max_tokens));
            own = {b, length, length, 0};
            size_of(length, work);
            used = {0, splits_of(length)};
            mine = {int(blockIdx.y) * folded, 0};
            mine.end = mine.first + min(splits_of(length - mine.first * size), folded);
            keys = {min(mine.first * size, length), min(mine.end * size, length)};
            return;
        }
        own = sequence_of(b, lengths, batch_idx, leftpad, at);
        size_of(own.length, work);
        used = {0, max(int(unsigned(own.length + size - 1) / unsigned(size)), 1)};
        const int seen = int(min(max(own.length - at.seqlen_q - at.window_left, int64(own.first)), int64(own.past)));
        if (seen >= size) used.first = min(int(unsigned(seen) / unsigned(size)), used.end - 1);
        const int number = used.first / folded + int(blockIdx.y);
        mine = {max(number * folded, used.first), min((number + 1) * folded, used.end)};
        keys = keys_within(int64(mine.first) * size, int64(mine.end) * size, own, query, query, at);
    }
    // split_size, without a division.
    __device__ __forceinline__ void size_of(int length, const Work& work) {
        const int least = int(work.most_splits.divide(length + int(work.most_splits.d) - 1));
        size = max((least + SPLIT_STEP - 1) / SPLIT_STEP * SPLIT_STEP, SPLIT_LEAST);
    }
    // How many splits that many tokens fill, up to FOLD + 1; one if there are none.
    __device__ __forceinline__ int splits_of(int tokens) const {
        int count = 1;
#pragma unroll
        for (int n = 1; n <= FOLD; ++n) count += tokens > n * size;
        return count;
    }
    // Piece 0 always does: it writes the result of a sequence without keys.
    __device__ __forceinline__ bool exists(const Work& work) const {
        return work.usual ? blockIdx.y == 0 || mine.first * size < own.length : mine.first < mine.end;
    }
    // Whether this is all of the sequence, whose used.end may be FOLD + 1 for more.
    __device__ __forceinline__ bool alone(int folded) const { return used.end <= (used.first / folded + 1) * folded; }
    __device__ __forceinline__ int64 id(const Work& work) const {
        return int64(b) * work.shares.d + row_group * int(work.kv_heads.d) + g;
    }
};

// A merge in progress, of two rows: their largest scores and sums, ...
struct Weight {
    float max[2], sum[2];                // max -INFINITY: no keys

    __device__ __forceinline__ static Weight empty() { return {{-INFINITY, -INFINITY}, {0.f, 0.f}}; }
    __device__ __forceinline__ static Weight of(const float4& x) { return {{x.x, x.z}, {x.y, x.w}}; }
    __device__ __forceinline__ float4 packed() const { return {max[0], sum[0], max[1], sum[1]}; }
};

// ... and two features of each: x, z of the first row, y, w of the second.
struct Blend {
    float mine[2], other[2];
    bool none[2];                        // of the other there are no keys, and it may hold anything

    // `so_far` becomes the merge of it and `more`; features follow by `of`.
    __device__ __forceinline__ Blend(Weight& so_far, const Weight& more) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float smaller = exp2_fast(-fabsf(more.max[c] - so_far.max[c]));
            const bool grows = more.max[c] > so_far.max[c];
            none[c] = more.max[c] == -INFINITY && more.sum[c] == 0.f;        // NaN has no maximum either
            mine[c] = grows ? smaller : 1.f, other[c] = grows ? 1.f : smaller;
            so_far.max[c] = grows ? more.max[c] : so_far.max[c];
            so_far.sum[c] = none[c] ? so_far.sum[c] : fmaf(more.sum[c], other[c], so_far.sum[c] * mine[c]);
        }
    }
    __device__ __forceinline__ float4 of(const float4& a, const float4& b) const {
        return {none[0] ? a.x : fmaf(b.x, other[0], a.x * mine[0]), none[1] ? a.y : fmaf(b.y, other[1], a.y * mine[1]),
                none[0] ? a.z : fmaf(b.z, other[0], a.z * mine[0]), none[1] ? a.w : fmaf(b.w, other[1], a.w * mine[1])};
    }
};

struct alignas(16) Partial {
    float4 acc;
    Weight weight;

    __device__ __forceinline__ static Partial empty() { return {{0.f, 0.f, 0.f, 0.f}, Weight::empty()}; }

    __device__ __forceinline__ void add(const Partial& other) {
        const Blend blend(weight, other.weight);
        acc = blend.of(acc, other.acc);
    }
};

// The workspace: acc (shares, splits, items, 8, pairs) and (max, sum) of two rows (shares, splits, columns, pairs), both
// of float4. An item is what the lanes have of a tile of output; lane = 4 * (0 .. 7) + (0 .. pairs - 1), each two rows.
// A group that a block has merged lies in the place of its first split, and nobody looks at the others.
struct Workspace {
    float4* start;
    int64 shares, splits;
    int items, columns, pairs;

    __device__ __forceinline__ float4* acc(int64 share, int64 s, int item, int lane) const {
        return start + ((share * splits + s) * items + item) * 8 * pairs + lane / 4 * pairs + lane % 4;
    }
    __device__ __forceinline__ float4* max_and_sum(int64 share, int64 s, int column, int lane) const {
        return acc(shares, 0, 0, 0) + ((share * splits + s) * columns + column) * pairs + lane % 4;
    }
};

template <int ITEMS, int ROWS>
__device__ __forceinline__ Workspace workspace_of(float* start, const Work& work, const DecodeLayout& at) {
    return {reinterpret_cast<float4*>(start), work.batch * work.shares.d, at.splits, ITEMS, ROWS / 8,
            (int(min(at.group, int64(8))) + 1) / 2};
}

// Divides by the sum, leaves base 2, adds the sink and stores features d and d + 1 of row c; with d = 0 the lse too.
// `raise`: what was added to every exponent.
template <typename T>
__device__ __forceinline__ void store_row(const Partial& part, int c, float raise, float value_scale, float sink,
                                          T* out, int d, float* lse) {
    const float top = part.weight.max[c], sum = part.weight.sum[c], scale = sum == 0.f ? 0.f : value_scale / sum;
    float x[2] = {c ? part.acc.y : part.acc.x, c ? part.acc.w : part.acc.z};
    float l = sum == 0.f ? -INFINITY : top * LN2 + (logf(sum) - raise * LN2);
#pragma unroll
    for (int e = 0; e < 2; ++e) x[e] = sum == 0.f ? 0.f : __fmul_rn(x[e], scale);
    if (sink != -INFINITY) {
        State<2> state = State<2>::empty(fmaxf(l, sink));
        const float nothing[2] = {0.f, 0.f};
        state.add(l, x);
        state.add(sink, nothing);
        state.finish(l, x);
    }
    from_float2(out + d, x[0], x[1]);
    if (d == 0 && lse != nullptr) *lse = l;
}

}  // namespace cuattn
