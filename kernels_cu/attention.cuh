// attention.cuh - what every variant of attention shares: the layout of a call, its sequences, and where their tokens lie.
//
// Queries come as (batch, seqlen_q, ...) or packed, (total_q, ...) with cu_seqlens_q; keys the same, or in pages. Whatever
// the index arrays hold, a sequence lies within the arrays: what leaves them is cut off.
// Rows     of a kv head: row n of a sequence is query n / group, head n % group of those that share the kv head.
// Tiles    of rows: every sequence has tiles of its own. Packed ones are found without a list of them: those of sequence b
//          begin at cu_seqlens_q[b] * group / ROWS + b, which leaves room for all of its rows.
// Oracle   reference/attention.py, reference/attention_varlen.py
#pragma once
#include "online_softmax.cuh"
#include "paged_kv.cuh"

namespace cuattn {

struct Mask {                            // of bool, or of bits, 8 keys a byte, the first one lowest; strides in bytes
    int64 bits, b, h, i, j;

    __device__ __forceinline__ bool keeps(const unsigned char* mask, int64 batch, int64 head, int64 query, int key) const {
        const unsigned char* const row = mask + batch * b + head * h + query * i;
        return bits ? row[key / 8 * j] >> key % 8 & 1 : row[key * j] != 0;
    }
};

struct AttentionLayout {
    int64 batch, seqlen_q, seqlen_k;     // packed: total_q, total_k; pages: tokens that a row of the table holds
    int64 group, head_dim, head_dim_v;   // group: query heads of one kv head
    int64 num_pages, page_size;          // page_size 0: keys don't lie in pages
    int64 window_left, window_right;     // keys seen before and after the position; causal: right = 0
    Indices cu_q, cu_k, used_k, table;   // bytes 0: there is none
    int64 table_row;                     // from one sequence to the next
    QueryStrides q, out, lse;            // packed: b = 0
    PageStrides k, v;                    // of (batch, seqlen_k), of pages; packed: page = 0
    int64 slopes_b, slopes_h, sinks_h, k_scale, v_scale;
    Mask mask;
    int64 tiles, heads, section;         // of attention_sm90.cu: tiles of rows of a head; heads that share L2;
    int64 box_shift;                     // and of pages: 2^box_shift keys are copied at once
};

struct SequenceRows {
    int b, first_q, length_q, length_k;  // first_q: its first row of packed queries, else 0
    int64 first_k;                       // the same of keys; not of pages

    __device__ __forceinline__ int ahead(int query, int key) const { return key - query - (length_k - length_q); }
};

// Entry i of ascending offsets, between `least` and `most`.
__device__ __forceinline__ int64 offset_at(const void* offsets, const Indices& of, int64 i, int64 least, int64 most) {
    return min(max(of.read(offsets, i), least), most);
}

__device__ __forceinline__ SequenceRows sequence_rows_of(int b, const void* cu_q, const void* cu_k, const void* used_k,
                                                const AttentionLayout& at) {
    SequenceRows own{b, 0, int(at.seqlen_q), int(at.seqlen_k), 0};
    if (at.cu_q.bytes) {
        const int64 first = offset_at(cu_q, at.cu_q, b, 0, at.seqlen_q);
        own.first_q = int(first), own.length_q = int(offset_at(cu_q, at.cu_q, b + 1, first, at.seqlen_q) - first);
    }
    if (at.cu_k.bytes) {
        const bool paged = at.page_size;
        const int64 first = paged ? at.cu_k.read(cu_k, b) : offset_at(cu_k, at.cu_k, b, 0, at.seqlen_k);
        const int64 room = min(at.seqlen_k, 0x7fffffffffffffff - max(first, int64(0)));
        const int64 past = offset_at(cu_k, at.cu_k, b + 1, first, paged ? first + room : at.seqlen_k);
        own.first_k = paged ? 0 : first, own.length_k = int(past - first);
    }
    if (at.used_k.bytes) own.length_k = int(offset_at(used_k, at.used_k, b, 0, own.length_k));
    return own;
}

// A tile of query rows of one kv head: its sequence, and rows first .. first + count - 1 of it; none if count is below 1.
struct RowTile {
    SequenceRows own;
    int first, count, group;             // group: rows of a query

    // Tile number `tile`, of `rows` rows; `group` is that of the layout, or 1 if rows are queries of one head.
    __device__ __forceinline__ static RowTile of(int64 tile, int rows, int group, const void* cu_q, const void* cu_k,
                                                 const void* used_k, const AttentionLayout& at) {
        int64 begin;                     // the first tile of the sequence
        int b = 0;
        if (at.cu_q.bytes) {
            const auto begin_of = [&](int n) { return offset_at(cu_q, at.cu_q, n, 0, at.seqlen_q) * group / rows + n; };
            for (int past = int(at.batch); past - b > 1;) {                  // the last sequence that does not begin behind
                const int middle = b + (past - b) / 2;
                if (begin_of(middle) <= tile) b = middle;
                else past = middle;
            }
            begin = begin_of(b);
        } else {
            const int64 tiles = (at.seqlen_q * group + rows - 1) / rows;
            b = int(tile / tiles), begin = b * tiles;
        }
        const SequenceRows own = sequence_rows_of(b, cu_q, cu_k, used_k, at);
        if (tile < begin) return {own, 0, 0, group};                   // before the first sequence
        const int64 first = min((tile - begin) * rows, int64(0x7fffffff)), all = int64(own.length_q) * group;
        return {own, int(first), int(min(int64(rows), all - first)), group};
    }
    // Keys that some row sees, and those that each row sees: if the first are none, neither are the second.
    __device__ __forceinline__ Keys seen_by_some(const AttentionLayout& at) const { return seen(first_query(), last_query(), at); }
    __device__ __forceinline__ Keys seen_by_all(const AttentionLayout& at) const { return seen(last_query(), first_query(), at); }

    // Of row r, behind the last one that of the last: its query, and its head with kv head g.
    __device__ __forceinline__ int query_of(int r) const { return unsigned(first + min(r, count - 1)) / unsigned(group); }
    __device__ __forceinline__ int head_of(int r, int query, int g) const {
        return g * group + first + min(r, count - 1) - query * group;
    }

private:
    __device__ __forceinline__ int first_query() const { return unsigned(first) / unsigned(group); }
    __device__ __forceinline__ int last_query() const { return unsigned(first + count - 1) / unsigned(group); }
    // From the left end of the window of one query to the right end of that of another.
    __device__ __forceinline__ Keys seen(int left_of, int right_of, const AttentionLayout& at) const {
        const int64 shift = int64(own.length_k) - own.length_q;
        const int64 begin = max(left_of + shift - at.window_left, int64(0));
        const int64 end = min(right_of + shift + at.window_right + 1, int64(own.length_k));
        return begin < end ? Keys{int(begin), int(end)} : Keys{0, 0};
    }
};

// Tiles of keys, in the order in which a block visits them. A pattern is another way to make them: what multiplies takes
// any stream, and asks for nothing but this.
struct KeyTile {
    int start, count;                    // keys start .. start + count - 1 of the sequence, or those of `list`
    const int* list;                     // nullptr: they are neighbours
    bool masked;                         // whether some row may not see some of them

    __device__ __forceinline__ int key(int n) const { return list == nullptr ? start + n : list[n]; }
};

// All keys between the first and the last that some row sees, the last first: those that only some see come before those
// that all do. Tiles begin at multiples of SIZE, so bits do not depend on which rows share a tile.
template <int SIZE> struct DenseTiles {
    Keys some, all;
    int next;
    bool masked;                         // all tiles are, by an array or for a reason of the kernel's own

    __device__ __forceinline__ DenseTiles(const RowTile& rows, bool masked, const AttentionLayout& at)
        : some(rows.seen_by_some(at)), all(rows.seen_by_all(at)), next((some.end - 1) / SIZE * SIZE), masked(masked) {}
    __device__ __forceinline__ bool get(KeyTile& tile) {
        if (next < 0 || next <= some.begin - SIZE || some.end == 0) return false;
        tile = {next, min(SIZE, some.end - next), nullptr, masked || next < all.begin || next > all.end - SIZE};
        next -= SIZE;
        return true;
    }
};

// Infinite or NaN.
template <typename T> __device__ __forceinline__ bool is_odd(T x) { return !(fabsf(to_float(x)) < INFINITY); }

// Where key j of a sequence lies; nowhere if its page does not exist.
__device__ __forceinline__ Slot place_of(const SequenceRows& own, int j, const void* table, const AttentionLayout& at) {
    if (!at.page_size) return {own.b, own.first_k + j, true};
    const unsigned p = unsigned(j) / unsigned(at.page_size);
    const int64 page = at.table.read(static_cast<const char*>(table) + own.b * at.table_row * at.table.bytes, p);
    return {page, int64(unsigned(j) - p * unsigned(at.page_size)), names_one_of(page, at.num_pages)};
}

}  // namespace cuattn
