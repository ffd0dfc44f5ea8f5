// decode_mma.cu - decode on tensor cores, for 16-bit queries and caches of their type or float8.
//
// What     As decode.cu: for row (b, i, h), kv head g = h / group, over the keys j that it sees,
//            S_j = log2(e) (softcap tanh(sm_scale <q, k_scale K[j,g]> / softcap) - slope |pos(i) - j|)
//            lse = log sum_j exp2(S_j),   out = v_scale sum_j exp2(S_j) V[j,g] / sum_j exp2(S_j)
//          New tokens are written to their pages before; they count, and q and new keys may be rotated.
// Shapes   as in decode.cu, but head_dim and head_dim_v are multiples of 16 up to DIM, rows of pages begin at multiples
//          of 16 bytes, num_pages < 2^31, at most 2^29 tokens; workspace: see decode_work.cuh, or nullptr if no
//          sequence can have two pieces
// Work     decode_mma: a block per piece, see decode_work.cuh. Of FOLD splits each warp has one, of a lone split a
//          quarter. It takes 16 keys at a time, see decode_mma.cuh; its next K is under way when its scores are done, its
//          next V when its output is. decode_mma_merge: a block per share of a sequence, a thread per item and lane.
// Memory   bound by reading K and V once for ROWS rows; 8 KB a warp under way (head_dim 128, 16 bit).
// Bits     a sequence's own: an online softmax over each quarter of a split, and the merges of decode_work.cuh. Keys
//          that are not seen are selected away, and their values are set to 0.
// Compile  T, C, DIM, ROWS, BLOCKS, SHARED; everything else is a runtime value.
// Source   Flash-Decoding (Dao et al. 2023); online softmax (Milakov and Gimelshein 2018)
// Oracle   reference/decode.py
#include "decode_append.cuh"
#include "decode_mma.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half or __nv_bfloat16
using C = CUATTN_C;                      // T or __nv_fp8_e4m3
constexpr int DIM = CUATTN_DIM, ROWS = CUATTN_ROWS;
using Tile = DecodeTile<T, C, DIM, ROWS>;
using M = Tile::M;
using Lines = Tile::Lines;
using Place = Tile::Place;
constexpr int WARPS = Tile::WARPS, THREADS = Tile::THREADS, TOKENS = Tile::TOKENS, COLUMNS = Tile::COLUMNS;
constexpr int CHUNK = Tile::CHUNK, LINES = Tile::LINES, HELD = Tile::HELD, STEPS = Tile::STEPS;
constexpr bool FLOAT8 = Tile::FLOAT8;
constexpr int BLOCKS = CUATTN_BLOCKS;    // of a multiprocessor, as many as registers allow

// What the warps of a block tell each other.
struct alignas(16) Shared {
    Piece piece;
    float score_factor;
    uint2 query[COLUMNS][STEPS][32];     // fragments of B, by lane
    float4 max_and_sum[WARPS][COLUMNS][4];                           // of rows 2t and 2t + 1
    float4 stream[WARPS][COLUMNS * STEPS][32];                       // output of each warp, as its lanes have it
    Partial group[COLUMNS * STEPS][32];  // the splits of the piece so far
};
static_assert(sizeof(Shared) == CUATTN_SHARED, "what cuattn/_plan_decode_mma.py asks for");

// Stores the two rows of an item.
struct Finish {
    const float *sinks, *v_scale;
    float v_factor;
    T* out;
    float* lse;
    const MmaLayout& layout;
    const Piece& my;

    __device__ __forceinline__ void operator()(const Partial& part, int item, int lane) const {
        const DecodeLayout& at = layout.at;
        const int n = item / STEPS, step = item % STEPS;
        const int d = (step / (CHUNK / 2) * 8 + lane / 4) * CHUNK + step % (CHUNK / 2) * 2;
        const float scale = Scales{v_scale, v_factor, at.v_scale}.of(my.g);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int r = 8 * n + lane % 4 * 2 + c;
            if (r >= my.rows || d >= at.head_dim_v) continue;
            const int64 h = my.first_head + r;
            store_row(part, c, Tile::RAISE, scale, sink_of(sinks, h, at), out + at.out.at(my.b, my.query, h), d,
                      lse == nullptr ? nullptr : lse + at.lse.at(my.b, my.query, h));
        }
    }
};

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
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;

    // 1. My queries are asked for; my piece, its keys, its new tokens.
    const Piece found(ROWS, cache_seqlens, batch_idx, leftpad, work, at);
    T given[COLUMNS][STEPS / WARPS][4];                    // see Tile::Scores::feature
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const int r = min(8 * n + lane / 4, found.rows - 1);
        const T* const mine = q + at.q.at(found.b, found.query, found.first_head + r);
#pragma unroll
        for (int m = 0; m < STEPS / WARPS; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int d = Tile::Scores::feature(m * WARPS + warp, t) + e % 2 + e / 2 * 4;
                given[n][m][e] = mine[work.full ? d : min(d, int(at.head_dim) - 1)];
            }
        }
    }
    if (!found.exists(work)) return;
    const Scales k_scales{k_scale, k_factor, at.k_scale};
    for (int s = found.mine.first; at.seqlen_new && s < found.mine.end; ++s) {
        append_tokens(found.b, s, found.g, found.own, new_k, new_v, cos, sin, k_pages, v_pages, block_table, k_scales,
                      Scales{v_scale, v_factor, at.v_scale}, at);
    }
    const Keys keys = found.keys;

    // 2. The first tile of each warp is asked for.
    const Tile::Rows k_rows(k_pages + found.g * at.k.head, lane / 4, t, work.k, work.aligned);
    const Tile::Rows v_rows(v_pages + found.g * at.v.head, 2 * t, lane / 4, work.v, work.aligned);
    const char* const table_row = static_cast<const char*>(block_table) + found.own.row * at.table_row * at.table.bytes;
    // A warp has a split to itself, or a quarter of each: then it goes from quarter to quarter.
    const bool many = found.mine.end - found.mine.first == FOLD;
    const int range = many ? found.size : found.size / WARPS, stride = many ? 1 << 29 : found.size;
    int start = found.mine.first * found.size + warp * range, range_end = start + range;
    const auto after = [&](int tile) {
        return tile + TOKENS == range_end ? range_end - range + stride : tile + TOKENS;
    };
    const bool any = keys.begin < keys.end;
    Place here{0, -1}, next{0, -1};
    if (any) here = Place::of(start, table_row, keys, layout), next = Place::of(after(start), table_row, keys, layout);
    unsigned there = any ? here.present(start, keys, layout) : 0;
    Lines k{}, v{};
    int64 k_own = 0, v_own = 0;                            // of the tile that is asked for
    if (there) {
        k_own = Tile::Rows::to(here, work.k, layout), v_own = work.alike ? k_own : Tile::Rows::to(here, work.v, layout);
        Tile::load_k(k, k_rows, k_own, 0, layout), Tile::load_v(v, v_rows, v_own, 0, layout);
    }

    // 3. The queries, as fragments of B.
    if (threadIdx.x == 0) {              // there, and not in registers
        shared.piece = found;
        shared.score_factor = ScoreRule(sm_scale, k_scales.of(found.g), softcap).factor;
    }
    float factor[COLUMNS][2];                              // of rows 8 n + 2t, 8 n + 2t + 1, for float8
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const int r = 8 * n + lane / 4;
        const T* const mine = q + at.q.at(found.b, found.query, found.first_head + min(r, found.rows - 1));
        const Angles angles = at.rotary.at(found.own.past + (at.queries_turn ? found.query : 0), cos, sin);
        float scale = 1.f;
        if (FLOAT8) {                                      // by a power of two, so that half can hold every bfloat16
            float largest = 0.f;
#pragma unroll 4
            for (int d = t; d < int(at.head_dim); d += 4) {
                largest = fmaxf(largest, fabsf(to_float(rotated(mine, d, angles))));
            }
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
            scale = largest > 0.f && largest < INFINITY ? ldexpf(1.f, min(12 - ilogbf(largest), 126)) : 1.f;
            factor[n][0] = 1.f / __shfl_sync(ALL, scale, 8 * t);
            factor[n][1] = 1.f / __shfl_sync(ALL, scale, 8 * t + 4);
        }
#pragma unroll
        for (int m = 0; m < STEPS / WARPS; ++m) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int d = Tile::Scores::feature(m * WARPS + warp, t) + e % 2 + e / 2 * 4;
                x[e] = r < found.rows && (work.full || d < at.head_dim) ? to_float(given[n][m][e]) * scale : 0.f;
            }
            shared.query[n][m * WARPS + warp][lane] = {pair_of(x[0], x[1], M()), pair_of(x[2], x[3], M())};
        }
#pragma unroll 1
        for (int m = 0; m < STEPS && angles.half != 0 && r < found.rows; ++m) {              // again, rotated
            const int step = m / 4 * WARPS + warp, d = Tile::Scores::feature(step, t) + m % 2 + m / 2 % 2 * 4;
            M* const fragment = reinterpret_cast<M*>(&shared.query[n][step][lane]);
            if (d < 2 * angles.half) from_float(fragment + m % 4, to_float(rotated(mine, d, angles)) * scale);
        }
    }
    __syncthreads();
    const Piece& my = shared.piece;
    const bool simple = softcap == 0.f && slopes == nullptr;

    // 4. FOLD splits at once, or one after another.
    const Workspace left = workspace_of<COLUMNS * STEPS, ROWS>(workspace, work, at);
    const Finish finish{sinks, v_scale, v_factor, out, lse, layout, my};
    Tile::Stream stream;
    for (int s = my.mine.first; s < my.mine.end; s += many ? FOLD : 1) {
        for (int n = 0; n < (many ? WARPS : 1); ++n) {
            stream.clear();
            const int end = min(range_end - range + (n + 1) * (my.size / WARPS), my.keys.end);
            while (start < end) {
                const int next_start = after(start);
                // 4a. Scores.
                Tile::Scores scores;
                scores.clear();
#pragma unroll
                for (int line = 0; line < LINES; line += HELD) {
                    if (!there) break;
                    if (line) Tile::load_k(k, k_rows, k_own, line, layout);
                    scores.add(k, line, shared.query);
                }
                const unsigned more = next.present(next_start, my.keys, layout);
                if (more) {
                    k_own = Tile::Rows::to(next, work.k, layout);
                    v_own = work.alike ? k_own : Tile::Rows::to(next, work.v, layout);
                    Tile::load_k(k, k_rows, k_own, 0, layout);
                }
                if (there) {
                    float x[COLUMNS][4];
                    scores.gather(x);
                    const bool masked = there != 0xffff;
                    if (FLOAT8) {
#pragma unroll
                        for (int i = 0; i < COLUMNS * 4; ++i) x[i / 4][i % 4] *= factor[i / 4][i % 2];
                    }
                    if (simple) {
#pragma unroll
                        for (int i = 0; i < COLUMNS * 4; ++i) x[i / 4][i % 4] *= shared.score_factor;
                    }
                    if (!simple || masked) {
#pragma unroll
                        for (int i = 0; i < COLUMNS * 4; ++i) {
                            float& y = x[i / 4][i % 4];
                            const int token = lane / 4 + i / 2 % 2 * 8;
                            if (!simple) {
                                const int h = my.first_head + min(i / 4 * 8 + 2 * t + i % 2, my.rows - 1);
                                const int position = my.query + my.own.length - int(at.seqlen_q);
                                y = ScoreRule(sm_scale, k_scales.of(my.g), softcap)
                                        .score(y, slope_of(slopes, my.b, h, at), start + token - position);
                            }
                            y = there >> token & 1 ? y : -INFINITY;
                        }
                    }
                    // 4b. Weights and values.
                    unsigned p[COLUMNS][2];
                    stream.weigh(x, p);
#pragma unroll
                    for (int line = 0; line < LINES; line += HELD) {
                        if (line) Tile::load_v(v, v_rows, Tile::Rows::to(here, work.v, layout), line, layout);
                        if (masked) Tile::clear_absent(v, there);
                        Tile::add_values(stream.o, v, line, p);
                    }
                }
                if (more) Tile::load_v(v, v_rows, v_own, 0, layout);
                start = next_start, here = next, there = more;
                if (start >= range_end) range_end = start + range;
                next = Place::of(after(start), table_row, my.keys, layout);
            }
            // 4c. A quarter is added to those before it, by a warp that has the whole split.
            stream.sum_up();
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const Weight last{{stream.top[c][0], stream.top[c][1]}, {stream.sum[c][0], stream.sum[c][1]}};
                Weight weight = n ? Weight::of(shared.max_and_sum[warp][c][t]) : Weight::empty();
                const Blend blend(weight, last);
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const float (&o)[4] = stream.o[c][step];
                    float4& mine = shared.stream[warp][c * STEPS + step][lane];
                    mine = n ? blend.of(mine, {o[0], o[1], o[2], o[3]}) : float4{o[0], o[1], o[2], o[3]};
                }
                __syncwarp();
                if (lane < 4) shared.max_and_sum[warp][c][t] = weight.packed();
                __syncwarp();
            }
        }
        // 5. The warps' quarters or splits, in order; then the splits of the piece.
        __syncthreads();
        const bool last = s + (many ? FOLD : 1) >= my.mine.end, alone = my.alone(int(work.folded));
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            Partial part;
            part.weight = Weight::empty();
            const Blend blends[WARPS] = {Blend(part.weight, Weight::of(shared.max_and_sum[0][n][t])),
                                         Blend(part.weight, Weight::of(shared.max_and_sum[1][n][t])),
                                         Blend(part.weight, Weight::of(shared.max_and_sum[2][n][t])),
                                         Blend(part.weight, Weight::of(shared.max_and_sum[3][n][t]))};
            const Weight weight = part.weight;
#pragma unroll 1
            for (int step = warp; step < STEPS; step += WARPS) {
                const int item = n * STEPS + step;
                part = {{0.f, 0.f, 0.f, 0.f}, weight};
#pragma unroll
                for (int w = 0; w < WARPS; ++w) part.acc = blends[w].of(part.acc, shared.stream[w][item][lane]);
                if (s > my.mine.first) {
                    Partial before = shared.group[item][lane];
                    before.add(part);
                    part = before;
                }
                if (!last) {
                    shared.group[item][lane] = part;
                } else if (alone) {
                    finish(part, item, lane);
                } else if (t < left.pairs) {
                    *left.acc(my.id(work), my.mine.first, item, lane) = part.acc;
                    if (step > 0 || lane >= 4) continue;
                    *left.max_and_sum(my.id(work), my.mine.first, n, lane) = part.weight.packed();
                }
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(COLUMNS * STEPS * 32)
cuattn_decode_mma_merge(float* workspace, const void* cache_seqlens, const void* batch_idx, const void* leftpad,
                        const float* sinks, const float* v_scale, float v_factor, T* out, float* lse,
                        const __grid_constant__ MmaLayout layout) {
    // 1. My sequence and what there is of it.
    const DecodeLayout& at = layout.at;
    const Work& work = layout.work;
    const Piece my(ROWS, cache_seqlens, batch_idx, leftpad, work, at);
    const int folded = int(work.folded);
    if (my.alone(folded)) return;        // it is there already
    const Splits used{my.used.first, int(unsigned(my.own.length + my.size - 1) / unsigned(my.size))};
    // 2. Groups of FOLD splits in order, and the groups in order.
    constexpr int BATCH = 8;             // splits whose loads are under way
    const Workspace left = workspace_of<COLUMNS * STEPS, ROWS>(workspace, work, at);
    const int item = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane / 4 * 4 + min(lane % 4, left.pairs - 1);
    Partial total = Partial::empty(), group = Partial::empty();
    const int pieces = (used.end - 1) / folded + 1;
    for (int first = used.first / folded; first < pieces; first += BATCH) {
        Partial parts[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int s = max(min(first + u, pieces - 1) * folded, used.first);
            parts[u] = {__ldcg(left.acc(my.id(work), s, item, mine)),
                        Weight::of(__ldcg(left.max_and_sum(my.id(work), s, item / STEPS, mine)))};
        }
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            if (first + u >= pieces) break;
            group.add(parts[u]);
            if (folded == FOLD || (first + u) % FOLD == FOLD - 1 || first + u + 1 == pieces) {
                total.add(group);
                group = Partial::empty();
            }
        }
    }
    Finish{sinks, v_scale, v_factor, out, lse, layout, my}(total, item, lane);
}
