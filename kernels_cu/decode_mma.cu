// decode_mma.cu - decode on tensor cores, for 16-bit queries and caches of their type or float8.
//
// What     As decode.cu: for row (b, i, h), kv head g = h / group, over the keys j that it sees,
//            S_j = log2(e) (softcap tanh(sm_scale <q, k_scale K[j,g]> / softcap) - slope |pos(i) - j|)
//            lse = log sum_j exp2(S_j),   out = v_scale sum_j exp2(S_j) V[j,g] / sum_j exp2(S_j)
//          New tokens are written to their pages before; they count, and q and new keys may be rotated.
// Shapes   as in decode.cu, but head_dim and head_dim_v are multiples of 16 up to DIM, rows of pages begin at multiples
//          of 16 bytes, num_pages < 2^31, at most 2^29 tokens; workspace: see decode_work.cuh, or nullptr if no
//          sequence can have two pieces
// Work     decode_mma: warps that know nothing of each other once the line of all sequences is cut, see decode_work.cuh. A
//          warp walks its run tile by tile: `stages` - 1 tiles are on their way to shared memory while it multiplies one,
//          through pieces and sequences without a pause. What has several pieces is left to decode_merge_mma.cu.
// Memory   bound by reading K and V once for ROWS rows: they are let go of first by L2, partial states last, or the
//          stores would cost as much as five times their bytes of loads.
// Bits     a sequence's own: an online softmax over each leaf, and the tree of decode_work.cuh. Keys that are not seen are
//          selected away, and what is not there is 0.
// Compile  T, C, DIM, ROWS, PLAIN, BLOCKS; all else is a runtime value. The code is kept short: what runs seldom comes
//          from instruction caches that have long forgotten it.
// Source   Flash-Decoding (Dao et al. 2023); online softmax (Milakov and Gimelshein 2018)
// Oracle   reference/decode.py
#include "decode_walk.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half or __nv_bfloat16
using C = CUATTN_C;                      // T or __nv_fp8_e4m3
constexpr int DIM = CUATTN_DIM, ROWS = CUATTN_ROWS;
constexpr bool PLAIN = CUATTN_PLAIN;     // a call without most options: see sequence_of in decode_work.cuh
using Tile = DecodeTile<T, C, DIM, ROWS, PLAIN>;
using M = Tile::M;
using Stream = Tile::Stream;
constexpr int COLUMNS = Tile::COLUMNS, STEPS = Tile::STEPS, ITEMS = COLUMNS * STEPS;
constexpr bool WIDE = Tile::WIDE;
constexpr int MOST = Tile::MOST;
constexpr int THREADS = 128, BLOCKS = CUATTN_BLOCKS;                 // at most; of a multiprocessor, at least
using Cut = Tile::Cut;
using Pieces = Tile::Pieces;

// What the threads of a block tell each other; behind it, what each warp has to itself, and then its tiles.
using Shared = LineMemory<THREADS>;
constexpr int MOST_STAGES = 6;
struct alignas(16) Private {
    T query[ROWS][Tile::QUERY];
    Ticket tickets[MOST_STAGES];
};
static_assert(sizeof(Shared) == CUATTN_SHARED && sizeof(Private) == CUATTN_PRIVATE && Tile::BYTES == CUATTN_TILE,
              "what cuattn/_plan_decode_mma.py asks for");

// The groups that are older than all but the newest `stages` - 2.
__device__ __forceinline__ void wait_for_tile(int stages) {
    if (stages == 2) wait_for_copies<0>();
    else if (stages == 3) wait_for_copies<1>();
    else wait_for_copies<MOST_STAGES - 2>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
cuattn_decode_mma(const T* q, C* k_pages, C* v_pages, const void* block_table, const void* cache_seqlens,
                  const void* batch_idx, const void* leftpad, const T* new_k, const T* new_v, const void* cos,
                  const void* sin, const float* slopes, const float* sinks, const float* k_scale, const float* v_scale,
                  float sm_scale, float softcap, float k_factor, float v_factor, T* out, float* lse, float* workspace,
                  const __grid_constant__ MmaLayout layout) {
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const DecodeLayout& at = layout.at;
    const Work& work = layout.work;
    const DecodeInputs<T, C> in{q, k_pages, v_pages, block_table, cache_seqlens, batch_idx, leftpad, new_k, new_v, cos, sin,
                                {k_scale, k_factor, at.k_scale}, {v_scale, v_factor, at.v_scale}, layout};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, t = lane % 4;
    const auto sequence = [&](int b) { return sequence_of<PLAIN>(b, cache_seqlens, batch_idx, leftpad, at); };

    // 1. The line of all sequences.
    const Line line = Line::of<Cut>(sequence, shared, work, at);
    const int64 usual = divide_below(line.length, work.teams, line.length);
    const Pieces pieces(usual);
    const Workspace partials(workspace, ITEMS, COLUMNS, work, at);
    if (blockIdx.x + 1 == gridDim.x && workspace != nullptr) {       // for the merge
        int64 origin = line.before;
        for (int b = line.first; b < line.past; ++b) {
            const Sequence own = sequence(b);
            const Cut cut(own, at);
            partials.sequences[b] = pieces.of(cut, own, origin, b, work);
            origin += cut.weight(own);
        }
    }

    // 2. My team, my share and my run.
    const int number = blockIdx.x * warps + warp, team = int(work.shares.divide(number));
    if (team >= work.teams) return;
    const int share = number - team * int(work.shares.d);
    const Share my(share, ROWS, work, at);
    const Run run(team, usual, line.length - usual * work.teams);
    if (run.begin >= run.end) return;
    Walk<Tile, T, C, PLAIN> walk(in, my, run, pieces, shared);

    // 3. Queries as fragments of B, through shared memory: asked for with the tiles, taken before the first of them.
    Private& own_memory = reinterpret_cast<Private*>(&shared + 1)[warp];
    char* const tiles = reinterpret_cast<char*>(reinterpret_cast<Private*>(&shared + 1) + warps)
                        + warp * int(work.stages) * Tile::BYTES;
    uint2 query[ITEMS];
    float factor[COLUMNS][2];                              // of rows 8 n + 2t, 8 n + 2t + 1, for float8
    int asked = -1, position = 0;                          // the sequence of the queries, and their place in it
    bool fresh = false;                                    // they are asked for and not taken
    const auto ask_for_queries = [&](int b) {
        const Sequence own = sequence(b);
        asked = b, fresh = true, position = my.query + own.length - int(at.seqlen_q);
        const Angles angles = PLAIN ? Angles{} : at.rotary.at(own.past + (at.queries_turn ? my.query : 0), cos, sin);
        const auto row = [&](int r) { return q + at.q.at(b, my.query, my.first_head + min(r, my.rows - 1)); };
        const bool vectors = angles.half == 0 && (reinterpret_cast<size_t>(row(0)) | (2 * at.q.h)) % 16 == 0;
        __syncwarp();
        if (vectors) {
#pragma unroll (WIDE ? 2 : 4)
            for (int n = 0; n < ROWS * DIM / 256; ++n) {
                const int r = (n * 32 + lane) / (DIM / 8), d = (n * 32 + lane) % (DIM / 8) * 8;
                const bool there = r < my.rows && d < int(at.head_dim);
                copy_async(&own_memory.query[r][d], row(r) + (there ? d : 0), there ? 16 : 0, work.usual);
            }
        } else {
#pragma unroll 2
            for (int n = lane; n < ROWS * DIM; n += 32) {
                const int r = n / DIM, d = n % DIM;
                const bool there = r < my.rows && d < int(at.head_dim);
                const T x = rotated(row(r), there ? d : 0, angles);
                own_memory.query[r][d] = there ? x : T(0.f);
            }
        }
    };
    const auto take_queries = [&] {
        fresh = false;
        if (Tile::FLOAT8) {              // as half, each row by a power of two, so that half can hold every bfloat16
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) {
                T* const mine = own_memory.query[8 * n + lane / 4];
                float largest = 0.f;
#pragma unroll 4
                for (int d = t; d < DIM; d += 4) largest = fmaxf(largest, fabsf(to_float(mine[d])));
                largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
                const float scale = largest > 0.f && largest < INFINITY ? ldexpf(1.f, min(12 - ilogbf(largest), 126)) : 1.f;
#pragma unroll 4
                for (int d = t; d < DIM; d += 4) from_float(reinterpret_cast<M*>(mine) + d, to_float(mine[d]) * scale);
                factor[n][0] = 1.f / __shfl_sync(ALL, scale, 8 * t);
                factor[n][1] = 1.f / __shfl_sync(ALL, scale, 8 * t + 4);
            }
            __syncwarp();
        }
        if (!WIDE) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) query[i] = Tile::query_of(own_memory.query, i / STEPS, i % STEPS);
        }
    };
    const auto fragment = [&](int n, int step) {
        return WIDE ? Tile::query_of(own_memory.query, n, step) : query[n * STEPS + step];
    };

    // 4. Tile after tile: one is asked for, one is multiplied.
    const Tile::Rows k_rows(k_pages + my.g * at.k.head, work.k.row, at.head_dim);
    const Tile::Rows v_rows(v_pages + my.g * at.v.head, work.v.row, at.head_dim_v);
    const Finish<Tile> finish{sinks, v_scale, v_factor, out, lse, layout};
    const bool simple = softcap == 0.f && slopes == nullptr;
    const float score_factor = ScoreRule(sm_scale, in.k_scales.of(my.g), softcap).factor;
    const int stages = int(work.stages);
    // Of a short call K and V may still be in L2 the next time.
    const L2Policy reading = usual < 8 * TILE ? work.usual : work.first_out;
    Stream leaf, split, group;
    bool first_leaf = true, first_split = true;
    leaf.clear();
    Ticket next;
    for (int round = -stages, filled = 0, taken = 0;; ++round) {
        Ticket here{0, 0, 0, 0};
        if (round >= 0) {
            __syncwarp();
            here = own_memory.tickets[taken];
            if (here.bits & Ticket::NOTHING) break;
        }
        // Queries come before tiles that are asked for later: the first ones, those of other sequences on their own.
        const bool first = round < 0 && round > -stages && asked < 0 && !(next.bits & Ticket::NOTHING);
        if (first || (round >= 0 && here.b != asked)) ask_for_queries(first ? next.b : here.b);
        if (round >= 0) {
            if (fresh && round > 0) {
                end_of_copies();
                wait_for_copies<0>();
            } else {
                wait_for_tile(stages);
            }
            __syncwarp();
            if (fresh) take_queries();
        }
        // 4a. The tile that comes stages - 1 later takes the place of the one before this.
        if (round > -stages) {
            const Tile::Place place = walk.place(next.start);
            next.bits &= place.present(next.bits & Ticket::THERE, layout) | ~Ticket::THERE;
            if (next.bits & Ticket::THERE) {
                Tile::copy(tiles + filled * Tile::BYTES, place, next.bits & Ticket::THERE, k_rows, v_rows, reading, layout);
            }
            end_of_copies();
            if (lane == 0) own_memory.tickets[filled] = next;
            if (++filled == stages) filled = 0;
        }
        next = walk.next_tile();
        if (round < 0) continue;
        const char* const tile = tiles + taken * Tile::BYTES;
        if (++taken == stages) taken = 0;
        // 4b. Scores, weights and values.
        if (here.bits & Ticket::THERE) {
            float x[COLUMNS][4];
            Tile::scores(x, tile, fragment);
            const bool masked = (here.bits & Ticket::THERE) != Ticket::THERE;
            if (Tile::FLOAT8) {
#pragma unroll
                for (int i = 0; i < COLUMNS * 4; ++i) x[i / 4][i % 4] *= factor[i / 4][i % 2];
            }
            if (simple) {
#pragma unroll
                for (int i = 0; i < COLUMNS * 4; ++i) {
                    x[i / 4][i % 4] = __fmul_rn(x[i / 4][i % 4], score_factor);        // not into the difference below
                }
            }
            if (!simple || masked) {
#pragma unroll
                for (int i = 0; i < COLUMNS * 4; ++i) {
                    float& y = x[i / 4][i % 4];
                    const int j = lane / 4 + i / 2 % 2 * 8;
                    if (!simple) {
                        const int h = my.first_head + min(i / 4 * 8 + 2 * t + i % 2, my.rows - 1);
                        y = ScoreRule(sm_scale, in.k_scales.of(my.g), softcap)
                                .score(y, slope_of(slopes, here.b, h, at), here.start + j - position);
                    }
                    y = here.bits >> j & 1 ? y : -INFINITY;
                }
            }
            unsigned p[COLUMNS][2];
            leaf.weigh(x, p);
            Tile::add_values(leaf.o, tile, p);
        }
        // 4c. Up the tree.
        if (!(here.bits & Ticket::LEAF_ENDS)) continue;
        leaf.sum_up();
        split.add(leaf, first_leaf);
        leaf.clear();
        first_leaf = here.bits & Ticket::SPLIT_ENDS;
        if (first_leaf && MOST > SPLIT) {
            group.add(split, first_split);
            first_split = false;
        }
        if (!(here.bits & Ticket::PIECE_ENDS)) continue;
        first_split = true;
        Stream& done = MOST > SPLIT ? group : split;
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) {     // the first, and the others move up: code for one
                const float (&o)[4] = done.o[n][0];
                const Partial part{{o[0], o[1], o[2], o[3]}, done.weight[n]};
                const int item = n * STEPS + step;
                if (here.slot < 0) finish(part, here.b, my, item, lane);
                else if (t < partials.pairs) store(partials.acc(here.slot, share, item, lane), part.acc, work.last_out);
#pragma unroll
                for (int i = 0; i < 4 * STEPS - 4; ++i) done.o[n][i / 4][i % 4] = done.o[n][i / 4 + 1][i % 4];
            }
            if (here.slot >= 0 && lane < partials.pairs) {
                store(partials.max_and_sum(here.slot, share, n, lane), done.weight[n].packed(), work.last_out);
            }
        }
    }
}

