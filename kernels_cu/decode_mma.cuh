// decode_mma.cuh - 16 tokens of a paged cache on tensor cores: K and V from memory into fragments, scores, output.
//
// S^T = K Q^T and O^T = V^T P^T by m16n8k16, with g = lane / 4, t = lane % 4; chunks are 16 bytes of a row of K or V.
// K        a lane loads chunks t, t + 4, ... of tokens g and g + 8. Q is permuted as K lies: which features make a
//          k-step doesn't matter. See Scores.
// V        a lane loads chunk g of tokens 2t, 2t + 1, 2t + 8, 2t + 9. A word of each of two tokens, two features: a
//          fragment.
// P        S^T as it comes, transposed by movmatrix.
#pragma once
#include "decode_work.cuh"
#include "mma.cuh"

namespace cuattn {

template <bool YES, typename A, typename B> struct Select { using type = A; };
template <typename A, typename B> struct Select<false, A, B> { using type = B; };
template <typename X> constexpr bool IS_HALF = false;
template <> constexpr bool IS_HALF<__half> = true;

struct MmaLayout {
    DecodeLayout at;
    Work work;
};

// T: __half or __nv_bfloat16; C: T or __nv_fp8_e4m3; DIM: 64, 128 or 256; ROWS of queries: 8 or 16.
template <typename T, typename C, int DIM, int ROWS> struct DecodeTile {
    static constexpr bool FLOAT8 = sizeof(C) == 1;
    using M = typename Select<FLOAT8, __half, T>::type;                // what is multiplied: a float8 is exact as half
    static constexpr int WARPS = 4, THREADS = 32 * WARPS, TOKENS = 16;
    static constexpr int COLUMNS = ROWS / 8;                          // of 8 query rows
    static constexpr int CHUNK = 16 / sizeof(C);                      // features
    static constexpr int LINES = DIM * sizeof(C) <= 128 ? 1 : DIM * sizeof(C) / 128;
    // Lines of a row in registers.
    static constexpr int HELD = DIM * COLUMNS > 128 && (FLOAT8 || COLUMNS > 1) ? 1 : LINES > 2 ? 2 : LINES;
    static constexpr int STEPS = LINES * CHUNK / 2;                   // k-steps of K, and tiles of 16 features of V
    // A weight is exp2(S - top + RAISE), with top at most SLACK below the largest score: so a new largest score seldom
    // makes what was summed up shrink, and half, which is coarse below 2^-14, has room above.
    static constexpr float SLACK = 7.f, RAISE = IS_HALF<M> ? 8.f : 0.f;

    struct Lines { uint4 x[4 * HELD]; };     // of my four tokens of a tile

    // Where a tile of 16 tokens lies: one page and the offset of its first token if page_size is a multiple of 16, else
    // those of token lane % 16. An entry of the table is asked for early and looked at late.
    struct Place {
        int entry, offset;                   // offset -1: nothing is there

        // keys is not empty.
        __device__ __forceinline__ static Place of(int start, const char* table_row, const Keys& keys,
                                                   const MmaLayout& layout) {
            const Indices& table = layout.at.table;
            const int j = start + (layout.work.aligned ? 0 : threadIdx.x % 16), last = layout.work.aligned ? 15 : 0;
            const bool inside = j < keys.end && j + last >= keys.begin;
            const unsigned near = min(max(j, keys.begin), keys.end - 1), index = layout.work.page_size.divide(near);
            const int* const entry = reinterpret_cast<const int*>(table_row + index * table.step * table.bytes);
            const bool small = table.bytes == 4 || entry[1] == 0;                // an int32, or an int64 like one
            return {entry[0], inside && small ? j - int(index) * int(layout.at.page_size) : -1};
        }
        __device__ __forceinline__ bool valid(const MmaLayout& layout) const {
            return offset >= 0 && unsigned(entry) < unsigned(layout.at.num_pages);
        }
        // Bit n: token n is there.
        __device__ __forceinline__ unsigned present(int start, const Keys& keys, const MmaLayout& layout) const {
            if (!layout.work.aligned) return __ballot_sync(ALL, valid(layout)) & 0xffff;
            if (!valid(layout)) return 0;
            if (start >= keys.begin && start + 16 <= keys.end) return 0xffff;
            const int from = max(keys.begin - start, 0), to = min(keys.end - start, 16);
            return from >= to ? 0 : (0xffffu >> (16 - to)) & (0xffffu << from);
        }
    };

    // Where the rows of a cache begin, for each lane: its chunk of token 0 of page 0, or of token `token` of a tile whose
    // tokens lie in one page.
    struct Rows {
        const char* pages;

        __device__ __forceinline__ Rows(const C* head, int token, int chunk, const PageBytes& bytes, bool aligned) {
            pages = reinterpret_cast<const char*>(head) + chunk * 16 + (aligned ? token * bytes.row : 0);
        }
        // Bytes from there to the tile. For a token that is not there another stands in; one must be there.
        __device__ __forceinline__ static int64 to(const Place& place, const PageBytes& bytes,
                                                   const MmaLayout& layout) {
            int64 own = unsigned(place.entry) * bytes.page + unsigned(place.offset) * bytes.row;
            if (!layout.work.aligned) {
                const bool valid = place.valid(layout);
                const int stand_in = __ffs(__ballot_sync(ALL, valid)) - 1;
                own = __shfl_sync(ALL, own, valid ? int(threadIdx.x % 32) : stand_in);
            }
            return own;
        }
        // My chunk of token token + offset.
        __device__ __forceinline__ const char* at(int offset, int64 own, int token, const PageBytes& bytes,
                                                       const MmaLayout& layout) const {
            return pages + (layout.work.aligned ? own + offset * bytes.row : __shfl_sync(ALL, own, token + offset));
        }
    };

    // K of tokens g and g + 8, a chunk of every 64 bytes: x[half * 2 * HELD + chunk]. What a row doesn't have is 0.
    __device__ __forceinline__ static void load_k(Lines& k, const Rows& rows, int64 own, int first_line,
                                                  const MmaLayout& layout) {
        const int lane = threadIdx.x % 32;
        const char* const row[2] = {rows.at(0, own, lane / 4, layout.work.k, layout) + first_line * 128,
                                    rows.at(8, own, lane / 4, layout.work.k, layout) + first_line * 128};
#pragma unroll
        for (int n = 0; n < 4 * HELD; ++n) {
            const int half = n / (2 * HELD), chunk = n % (2 * HELD);
            if (layout.work.full || ((first_line * 2 + chunk) * 4 + lane % 4) * CHUNK < int(layout.at.head_dim)) {
                k.x[n] = load_once(row[half] + chunk * 64);
            } else if (HELD < LINES) {
                k.x[n] = uint4{0, 0, 0, 0};              // and not what another line left there
            }
        }
    }

    // V of tokens 2t, 2t + 1, 2t + 8, 2t + 9, a chunk of every line: x[n * HELD + line].
    __device__ __forceinline__ static void load_v(Lines& v, const Rows& rows, int64 own, int first_line,
                                                  const MmaLayout& layout) {
        const int lane = threadIdx.x % 32;
        const char* const row[4] = {rows.at(0, own, lane % 4 * 2, layout.work.v, layout) + first_line * 128,
                                    rows.at(1, own, lane % 4 * 2, layout.work.v, layout) + first_line * 128,
                                    rows.at(8, own, lane % 4 * 2, layout.work.v, layout) + first_line * 128,
                                    rows.at(9, own, lane % 4 * 2, layout.work.v, layout) + first_line * 128};
#pragma unroll
        for (int n = 0; n < 4 * HELD; ++n) {
            if (layout.work.full || ((first_line + n % HELD) * 8 + lane / 4) * CHUNK < int(layout.at.head_dim_v)) {
                v.x[n] = load_once(row[n / HELD] + n % HELD * 128);
            }
        }
    }

    // A chunk as words of two numbers that are multiplied.
    __device__ __forceinline__ static void words_of(const uint4& chunk, unsigned (&word)[CHUNK / 2]) {
        const unsigned x[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (FLOAT8) widen(x[i], word[2 * i], word[2 * i + 1]);
            else word[i] = x[i];
        }
    }

    // S^T of a tile. A fragment of A is a chunk as it was loaded: rows g and g + 8 are words 0, 2 and words 1, 3 of token
    // g, or of token g + 8 in another. Each is multiplied by Q of words 0, 2 and by Q of words 1, 3, of both products half
    // counts, and the halves are added up: twice the products, but no register has to be moved.
    struct Scores {
        float half[2][COLUMNS][2][4];        // token g or g + 8; words 0, 2 or 1, 3

        __device__ __forceinline__ void clear() {
#pragma unroll
            for (int i = 0; i < COLUMNS * 16; ++i) half[i / (8 * COLUMNS)][i / 8 % COLUMNS][i / 4 % 2][i % 4] = 0.f;
        }
        __device__ __forceinline__ void add(const Lines& k, int first_line, const uint2 (&query)[COLUMNS][STEPS][32]) {
#pragma unroll
            for (int i = 0; i < 2 * HELD; ++i) {
                unsigned word[2][CHUNK / 2];
                words_of(k.x[i], word[0]), words_of(k.x[2 * HELD + i], word[1]);
#pragma unroll
                for (int j = 0; j < CHUNK / 8; ++j) {
#pragma unroll
                    for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd) {
                            const int step = ((first_line * 2 + i) * (CHUNK / 8) + j) * 2 + odd;
                            const uint2 b = query[n][step][threadIdx.x % 32];
#pragma unroll
                            for (int token = 0; token < 2; ++token) {
                                const unsigned (&w)[CHUNK / 2] = word[token];
                                const unsigned a[4] = {w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3]};
                                multiply_add(half[token][n][odd], a, {b.x, b.y}, M());
                            }
                        }
                    }
                }
            }
        }
        // Tokens g and g + 8 of rows 2t and 2t + 1.
        __device__ __forceinline__ void gather(float (&x)[COLUMNS][4]) const {
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[n][e] = half[e / 2][n][0][e % 2] + half[e / 2][n][1][2 + e % 2];
            }
        }
        // The feature of Q that lane t has first in a fragment; the others are + 1, + 4, + 5.
        __device__ __forceinline__ static int feature(int step, int t) {
            return (step / 2 / (CHUNK / 8) * 4 + t) * CHUNK + step / 2 % (CHUNK / 8) * 8 + step % 2 * 2;
        }
    };

    // O^T += V^T P^T over the lines held.
    __device__ __forceinline__ static void add_values(float (&o)[COLUMNS][STEPS][4], const Lines& v, int first_line,
                                               const unsigned (&p)[COLUMNS][2]) {
#pragma unroll
        for (int line = 0; line < HELD; ++line) {
            unsigned x[4][CHUNK / 2];
#pragma unroll
            for (int n = 0; n < 4; ++n) words_of(v.x[n * HELD + line], x[n]);
#pragma unroll
            for (int w = 0; w < CHUNK / 2; ++w) {
                const unsigned a[4] = {__byte_perm(x[0][w], x[1][w], 0x5410), __byte_perm(x[0][w], x[1][w], 0x7632),
                                       __byte_perm(x[2][w], x[3][w], 0x5410), __byte_perm(x[2][w], x[3][w], 0x7632)};
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    multiply_add(o[n][(first_line + line) * (CHUNK / 2) + w], a, p[n], M());
                }
            }
        }
    }

    // Values of tokens that are not there become 0: they may be NaN, and their weight is 0.
    __device__ __forceinline__ static void clear_absent(Lines& v, unsigned there) {
#pragma unroll
        for (int n = 0; n < 4 * HELD; ++n) {
            const int token = threadIdx.x % 4 * 2 + n / HELD % 2 + n / HELD / 2 * 8;
            if (!(there >> token & 1)) v.x[n] = uint4{0, 0, 0, 0};
        }
    }

    // An online softmax in progress: of rows 2t and 2t + 1 of each column the largest score, or SLACK less, and the sum,
    // of all the output.
    struct Stream {
        float top[COLUMNS][2], sum[COLUMNS][2], o[COLUMNS][STEPS][4];

        __device__ __forceinline__ void clear() {
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
                top[n][0] = top[n][1] = -INFINITY, sum[n][0] = sum[n][1] = 0.f;
#pragma unroll
                for (int e = 0; e < STEPS * 4; ++e) o[n][e / 4][e % 4] = 0.f;
            }
        }
        // The weights of 16 keys as fragments of P^T. What was summed up shrinks if one of them is the new largest.
        __device__ __forceinline__ void weigh(float (&x)[COLUMNS][4], unsigned (&p)[COLUMNS][2]) {
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
                float high[2] = {fmaxf(x[n][0], x[n][2]), fmaxf(x[n][1], x[n][3])};
                if (__any_sync(ALL, high[0] - top[n][0] > SLACK || high[1] - top[n][1] > SLACK)) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
#pragma unroll
                        for (int other = 4; other < 32; other *= 2) {
                            high[c] = fmaxf(high[c], __shfl_xor_sync(ALL, high[c], other));
                        }
                        const float highest = high[c] - top[n][c] > SLACK ? high[c] : top[n][c];   // a row's own affair
                        const float rescale = exp2_fast(top[n][c] - shift_of(highest));
                        top[n][c] = highest, sum[n][c] *= rescale;
#pragma unroll
                        for (int step = 0; step < STEPS; ++step) o[n][step][c] *= rescale, o[n][step][2 + c] *= rescale;
                    }
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) x[n][e] = exp2_fast((x[n][e] - shift_of(top[n][e % 2])) + RAISE);
                sum[n][0] += x[n][0] + x[n][2], sum[n][1] += x[n][1] + x[n][3];
                p[n][0] = transpose(pair_of(x[n][0], x[n][1], M()));
                p[n][1] = transpose(pair_of(x[n][2], x[n][3], M()));
            }
        }
        // Until here each lane has the sums of its own keys.
        __device__ __forceinline__ void sum_up() {
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll
                for (int other = 4; other < 32; other *= 2) {
                    sum[n][0] += __shfl_xor_sync(ALL, sum[n][0], other);
                    sum[n][1] += __shfl_xor_sync(ALL, sum[n][1], other);
                }
            }
        }
    };
};

}  // namespace cuattn
