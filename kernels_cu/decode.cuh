// decode.cuh - what every variant of decode shares: the layout of a call, the split rule, scores and masks.
//
// A sequence of `length` tokens is cut into splits of split_size(length) tokens: at most max_splits of a multiple of
// 128 tokens, at least 256. The rule knows nothing of batch, table or device, so neither do the bits.
// Oracle: reference/decode.py, reference/attention.py
#pragma once
#include "online_softmax.cuh"
#include "paged_kv.cuh"
#include "rotary.cuh"
#include "state.cuh"

namespace cuattn {

constexpr int SPLIT_STEP = 128, SPLIT_LEAST = 256;      // tokens, as in cuattn/_plan_decode.py

struct DecodeLayout {
    int64 seqlen_q, num_heads, group;    // group: query heads of one kv head
    int64 head_dim, head_dim_v;
    int64 num_sequences, num_pages, page_size, max_tokens;             // rows of the table; tokens that one row holds
    int64 max_splits, splits, row_groups, lanes;       // splits: in the grid and the workspace, at most max_splits
    int64 window_left, window_right;     // keys seen before and after the position; causal: right = 0
    Indices table;
    int64 table_row;                     // from one sequence to the next
    Indices lengths, batch_idx, leftpad;
    QueryStrides q, out, lse;
    PageStrides k, v;
    int64 slopes_b, slopes_h, sinks_h, k_scale, v_scale;
    int64 seqlen_new, room;              // room: positions that new tokens have, in the table and in the rotation
    QueryStrides new_k, new_v;
    Rotary rotary;
    int64 queries_turn;                  // by their own positions, or all by that of the first new token
};

struct Sequence {
    int64 row;                           // of the table
    int length, past, first;             // its tokens with the new ones, and without; the first that is there
};

// Whatever the index arrays hold, a sequence lies within its row of the table: what is too long is cut off. A negative
// length, like a row that doesn't exist, is no sequence: it has no keys and takes none. batch_idx and leftpad may be
// nullptr.
__device__ __forceinline__ Sequence sequence_of(int64 b, const void* lengths, const void* batch_idx,
                                                const void* leftpad, const DecodeLayout& at) {
    const int64 row = batch_idx == nullptr ? b : at.batch_idx.read(batch_idx, b), given = at.lengths.read(lengths, b);
    if (!names_one_of(row, at.num_sequences) || given < 0) return {0, 0, 0, 0};
    const int64 past = min(given, at.max_tokens), fresh = min(max(at.room - past, int64(0)), at.seqlen_new);
    const int64 first = leftpad == nullptr ? 0 : min(max(at.leftpad.read(leftpad, b), int64(0)), past);
    return {row, int(past + fresh), int(past), int(first)};
}

__device__ __forceinline__ int split_size(int length, int max_splits) {
    const unsigned least = (unsigned(length) + max_splits - 1) / unsigned(max_splits);
    return max(int((least + SPLIT_STEP - 1) / SPLIT_STEP * SPLIT_STEP), SPLIT_LEAST);
}

__device__ __forceinline__ int num_splits(int length, int max_splits) {
    const unsigned size = split_size(length, max_splits);
    return (unsigned(length) + size - 1) / size;
}

// Keys from `from` to `to` - 1 that a query from first_query to last_query sees, if any does.
__device__ __forceinline__ Keys keys_within(int64 from, int64 to, const Sequence& own, int first_query, int last_query,
                                            const DecodeLayout& at) {
    const int64 shift = own.length - at.seqlen_q;
    const int64 begin = max(max(from, int64(own.first)), first_query + shift - at.window_left);
    const int64 end = min(min(to, int64(own.length)), last_query + shift + at.window_right + 1);
    return begin < end ? Keys{int(begin), int(end)} : Keys{0, 0};
}

// Those of split s.
__device__ __forceinline__ Keys keys_of(int s, const Sequence& own, int first_query, int last_query,
                                        const DecodeLayout& at) {
    const int64 size = split_size(own.length, int(at.max_splits));
    return keys_within(s * size, (s + 1) * size, own, first_query, last_query, at);
}

// Token j of a sequence; none if its page does not exist.
__device__ __forceinline__ Slot token_at(int j, const void* table, int64 row, const DecodeLayout& at) {
    const unsigned p = unsigned(j) / unsigned(at.page_size);
    const int64 page = at.table.read(static_cast<const char*>(table) + row * at.table_row * at.table.bytes, p);
    return {page, int64(unsigned(j) - p * unsigned(at.page_size)), names_one_of(page, at.num_pages)};
}

// Whether a query sees a key that lies `ahead` of its position (behind it: negative).
__device__ __forceinline__ bool sees(int ahead, const DecodeLayout& at) {
    return within(ahead, at.window_left, at.window_right);
}

// One query row in the workspace: num_splits float32 states. All outs lie before all lses.
struct PartialRow {
    float *out, *lse;                    // out (splits, head_dim_v), lse (splits)

    __device__ __forceinline__ PartialRow(float* workspace, int64 row, int64 rows, const DecodeLayout& at) {
        out = workspace + row * at.splits * at.head_dim_v;
        lse = workspace + rows * at.splits * at.head_dim_v + row * at.splits;
    }
};

// Adds the sink to a merge in progress and ends it.
__device__ __forceinline__ void finish_with_sink(State<1>& state, float sink, float& lse, float (&x)[1]) {
    const float nothing[1] = {0.f};
    state.add(sink, nothing);
    state.finish(lse, x);
}

}  // namespace cuattn
