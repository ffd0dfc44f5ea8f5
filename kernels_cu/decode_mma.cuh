// decode_mma.cuh - 16 tokens of a paged cache on tensor cores: from memory through shared memory, scores, output.
//
// S^T = K Q^T and O^T = V^T P^T by m16n8k16, with g = lane / 4, t = lane % 4; chunks are 16 bytes of a row of K or V.
// Shared   a tile has its rows of K, then those of V, each ROW_BYTES; chunk c of row j lies at c ^ turn(j), so eight rows
//          of a chunk, which a matrix load reads, lie in eight different banks.
// K        16 bit: a k-step is two chunks. float8: a lane's four bytes are two pairs, so a k-step is a chunk, with the
//          features in another order, which Q follows: see feature_of_query.
// V        16 bit: an item, 16 features, is two chunks. float8: one; rows g and g + 8 are its features 2g and 2g + 1.
// P        S^T as it comes, transposed by movmatrix.
#pragma once
#include "decode_softmax.cuh"

namespace cuattn {

template <bool YES, typename A, typename B> struct Select { using type = A; };
template <typename A, typename B> struct Select<false, A, B> { using type = B; };
struct MmaLayout {
    DecodeLayout at;
    Work work;
};

// A tile on its way: its first token, which of its tokens are there, what ends with it, where its piece's state goes
// (-1: it is all of sequence b).
struct alignas(16) Ticket {
    static constexpr unsigned THERE = 0xffff, LEAF_ENDS = 1 << 16, SPLIT_ENDS = 1 << 17, PIECE_ENDS = 1 << 18,
                              NOTHING = 1 << 19;
    int start;
    unsigned bits;
    int slot, b;
};

// T: __half or __nv_bfloat16; C: T or __nv_fp8_e4m3; DIM: 64, 128 or 256; ROWS of queries: 8 or 16.
template <typename T, typename C, int DIM, int ROWS, bool PLAIN> struct DecodeTile {
    using Out = T;
    static constexpr bool FLOAT8 = sizeof(C) == 1;
    using M = typename Select<FLOAT8, __half, T>::type;                // what is multiplied: a float8 is exact as half
    static constexpr int COLUMNS = ROWS / 8;                          // of 8 query rows
    static constexpr int STEPS = DIM / 16;                            // k-steps of K, and items of V
    static constexpr int ROW_BYTES = DIM * sizeof(C), CHUNKS = ROW_BYTES / 16;
    static constexpr int BYTES = 2 * TILE * ROW_BYTES;                 // of a tile
    static constexpr int QUERY = DIM + 8;                             // elements of a row of queries in shared memory
    static constexpr bool WIDE = DIM * COLUMNS > 128;                  // then registers hold one level of the tree less
    static constexpr int LEAF = WIDE ? 128 : 64, MOST = WIDE ? 4 : 16;
    using Cut = SequenceCut<LEAF, MOST, PLAIN>;
    using Pieces = PieceSizes<LEAF, MOST, PLAIN>;

    __device__ __forceinline__ static int turn(int row) {
        return ROW_BYTES >= 128 ? row % 8 : row * ROW_BYTES / 128 % 4;
    }

    // The rows of the cache that a lane copies: its chunk of token lane / CHUNKS of page 0, and how much of it there is.
    struct Rows {
        const char* first;
        int bytes;                                                     // 0 or 16

        __device__ __forceinline__ Rows(const C* head, int64 row_bytes, int64 head_dim) {
            const int lane = threadIdx.x % 32, chunk = lane % CHUNKS;
            first = kept(reinterpret_cast<const char*>(head) + lane / CHUNKS * row_bytes + chunk * 16);
            bytes = chunk * 16 < int(head_dim * sizeof(C)) ? 16 : 0;
        }
    };

    // Where a token lies, from the table: its page and its offset there.
    struct Place {
        int entry, offset;                                             // offset -1: an int64 below 0 or from 2^32 on

        __device__ __forceinline__ static Place of(int token, const char* table_row, const MmaLayout& layout) {
            const Indices& table = layout.at.table;
            const unsigned index = layout.work.page_size.divide(token);
            const int offset = token - int(index) * int(layout.at.page_size);
            if (PLAIN) return {reinterpret_cast<const int*>(table_row)[index * table.step], offset};
            const int* const entry = reinterpret_cast<const int*>(table_row + index * table.step * table.bytes);
            return {entry[0], table.bytes == 4 || entry[1] == 0 ? offset : -1};
        }
        __device__ __forceinline__ bool exists(const MmaLayout& layout) const {
            return offset >= 0 && unsigned(entry) < unsigned(layout.at.num_pages);
        }
        // Of the tokens `wanted`, a bit each, those whose page exists.
        __device__ __forceinline__ unsigned present(unsigned wanted, const MmaLayout& layout) const {
            const bool mine = exists(layout);
            if (PLAIN || layout.work.aligned) return mine ? wanted : 0;
            return wanted & __ballot_sync(ALL, mine);
        }
        __device__ __forceinline__ int64 bytes(const PageBytes& of) const {
            return unsigned(entry) * of.page + unsigned(offset) * of.row;
        }
    };

    // Chunk `chunk` of row `row` of a tile, in bytes.
    __device__ __forceinline__ static int place_of(int row, int chunk) {
        return row * ROW_BYTES + (chunk ^ turn(row)) * 16;
    }

    // Asks for a tile; what is not there becomes 0. A whole one in one page takes a fifth of the instructions.
    __device__ __forceinline__ static void copy(char* tile, const Place& place, unsigned there, const Rows& k,
                                                const Rows& v, L2Policy policy, const MmaLayout& layout) {
        constexpr int TOKENS = 32 / CHUNKS;                            // that a warp copies at once
        const int lane = threadIdx.x % 32, token = lane / CHUNKS, chunk = lane % CHUNKS;
        const int64 k_own = place.bytes(layout.work.k), v_own = place.bytes(layout.work.v);
        const int64 k_step = TOKENS * layout.work.k.row, v_step = TOKENS * layout.work.v.row;
        const int mine = place_of(token, chunk);                       // n and token have no bit in common
        if ((PLAIN || layout.work.aligned) && layout.work.full && there == Ticket::THERE) {
            const char *from_k = k.first + k_own, *from_v = v.first + v_own;
#pragma unroll
            for (int n = 0; n < TILE; n += TOKENS, from_k += k_step, from_v += v_step) {
                char* const to = tile + (mine ^ turn(n) * 16) + n * ROW_BYTES;
                copy_async(to, from_k, k.bytes, policy);
                copy_async(to + TILE * ROW_BYTES, from_v, v.bytes, policy);
            }
            return;
        }
#pragma unroll 1
        for (int n = 0; n < TILE; n += TOKENS) {                       // each row may have a place of its own
            const int j = n + token, some = there >> j & 1;
            const int from = PLAIN || layout.work.aligned ? lane : j;
            const int64 row = PLAIN || layout.work.aligned ? n : -token;
            const int64 k_row = __shfl_sync(ALL, k_own, from) + row * layout.work.k.row;
            const int64 v_row = __shfl_sync(ALL, v_own, from) + row * layout.work.v.row;
            char* const to = tile + (mine ^ turn(n) * 16) + n * ROW_BYTES;
            copy_async(to, k.first + k_row, some * k.bytes, policy);
            copy_async(to + TILE * ROW_BYTES, v.first + v_row, some * v.bytes, policy);
        }
    }

    // The feature of Q that lane t has first in a fragment; then come + 1, + APART, + APART + 1.
    static constexpr int APART = FLOAT8 ? 2 : 8;
    __device__ __forceinline__ static int feature_of_query(int step, int t) { return step * 16 + t * (FLOAT8 ? 4 : 2); }
    // The two features of an item that a lane has.
    __device__ __forceinline__ static int feature_of_value(int item, int lane, int second) {
        return item * 16 + (FLOAT8 ? lane / 4 * 2 + second : lane / 4 + second * 8);
    }

    // A fragment of B: row 8 n + g of the queries.
    __device__ __forceinline__ static uint2 query_of(const T (&query)[ROWS][QUERY], int n, int step) {
        const int lane = threadIdx.x % 32;
        const T* const x = query[8 * n + lane / 4] + feature_of_query(step, lane % 4);
        return {*reinterpret_cast<const unsigned*>(x), *reinterpret_cast<const unsigned*>(x + APART)};
    }

    // Tokens g and g + 8 of rows 2t and 2t + 1; `query` gives fragments of B.
    template <typename Query>
    __device__ __forceinline__ static void scores(float (&x)[COLUMNS][4], const char* tile, const Query& query) {
        const int lane = threadIdx.x % 32, mine = place_of(lane % 16, lane / 16);
        constexpr int SUMS = COLUMNS > 1 ? 1 : 2;                      // so that products wait less for each other
        float s[COLUMNS][SUMS][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 2) {
            unsigned a[4];
            load_matrices(a, tile + (mine ^ c * 16));
            if constexpr (FLOAT8) {
                unsigned w[8];
#pragma unroll
                for (int i = 0; i < 4; ++i) widen(a[i], w[2 * i], w[2 * i + 1]);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    const uint2 low = query(n, c), high = query(n, c + 1);
                    multiply_add(s[n][0], {w[0], w[2], w[1], w[3]}, {low.x, low.y}, M());
                    multiply_add(s[n][SUMS - 1], {w[4], w[6], w[5], w[7]}, {high.x, high.y}, M());
                }
            } else {
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    const uint2 b = query(n, c / 2);
                    multiply_add(s[n][c / 2 % SUMS], a, {b.x, b.y}, M());
                }
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS * 4; ++i) {
            x[i / 4][i % 4] = SUMS > 1 ? s[i / 4][0][i % 4] + s[i / 4][SUMS - 1][i % 4] : s[i / 4][0][i % 4];
        }
    }

    // O^T += V^T P^T
    __device__ __forceinline__ static void add_values(float (&o)[COLUMNS][STEPS][4], const char* tile,
                                                      const unsigned (&p)[COLUMNS][2]) {
        const int lane = threadIdx.x % 32, row = FLOAT8 ? lane % 16 : lane % 8 + lane / 16 * 8;
        const int mine = place_of(row, FLOAT8 ? lane / 16 : lane / 8 % 2);
#pragma unroll
        for (int c = 0; c < CHUNKS; c += 2) {
            unsigned a[4];
            load_transposed(a, tile + TILE * ROW_BYTES + (mine ^ c * 16));
            if constexpr (FLOAT8) {
                unsigned w[8];
#pragma unroll
                for (int i = 0; i < 4; ++i) widen(__byte_perm(a[i], 0, 0x3120), w[2 * i], w[2 * i + 1]);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    multiply_add(o[n][c], {w[0], w[1], w[2], w[3]}, p[n], M());
                    multiply_add(o[n][c + 1], {w[4], w[5], w[6], w[7]}, p[n], M());
                }
            } else {
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) multiply_add(o[n][c / 2], a, p[n], M());
            }
        }
    }

    using Stream = OnlineSoftmax<COLUMNS, STEPS, M>;
};

// Stores the two rows of an item: a share's result.
template <typename Tile> struct Finish {
    const float *sinks, *v_scale;
    float v_factor;
    typename Tile::Out* out;
    float* lse;
    const MmaLayout& layout;

    __device__ __forceinline__ void operator()(const Partial& part, int b, const Share& my, int item, int lane) const {
        const DecodeLayout& at = layout.at;
        const int d0 = Tile::feature_of_value(item % Tile::STEPS, lane, 0), d1 = Tile::feature_of_value(item % Tile::STEPS, lane, 1);
        const float scale = Scales{v_scale, v_factor, at.v_scale}.of(my.g);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int r = item / Tile::STEPS * 8 + lane % 4 * 2 + c;
            if (r >= my.rows) continue;
            const int64 h = my.first_head + r;
            typename Tile::Out* const row = out + at.out.at(b, my.query, h);
            store_row(part, c, Tile::Stream::RAISE, scale, sink_of(sinks, h, at), d0 < at.head_dim_v ? row + d0 : nullptr,
                      d1 < at.head_dim_v ? row + d1 : nullptr,
                      d0 > 0 || lse == nullptr ? nullptr : lse + at.lse.at(b, my.query, h));
        }
    }
};

}  // namespace cuattn
