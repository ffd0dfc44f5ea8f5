// attention_mma.cu - attention of many queries on tensor cores, for 16-bit queries, keys and values: dense, packed or pages.
//
// What     As attention.cu.
// Shapes   as in attention.cu, but T is float16 or bfloat16 and so are keys and values; head_dim and head_dim_v are multiples
//          of 8 up to DIM, rows of q, k and v begin at multiples of 16 bytes
// Work     blockIdx.x = tile of ROWS query rows, the last first; blockIdx.y = kv head. Warp w has rows 16 ATOMS w .., and a
//          block walks a stream of tiles of KEYS keys, which come to shared memory by cp.async: those of the next tile are on
//          their way while one is multiplied, K before V.
// Memory   bound by arithmetic: 4 ROWS KEYS head_dim operations for the KEYS rows of K and V that a tile loads.
// Bits     of a row depend on its own sequence, and not on the rows that share its tile. Weights are rounded to T.
// Compile  T, DIM (64, 128 or 256), ATOMS, KEYS, PLAIN; everything else is a runtime value.
// Source   FlashAttention-2 (Dao 2023)
// Oracle   reference/attention_varlen.py
#include "attention.cuh"
#include "mma.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half or __nv_bfloat16
constexpr int DIM = CUATTN_DIM, ATOMS = CUATTN_ATOMS, KEYS = CUATTN_KEYS;
constexpr bool PLAIN = CUATTN_PLAIN;     // a call without softcap, slopes and mask
constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 16 * ATOMS * WARPS;
constexpr int CHUNKS = DIM / 8, STEPS = DIM / 16;          // of 16 bytes, in a row of shared memory; of 16 features
constexpr int COLUMNS = KEYS / 8;                          // of 8 keys
// A weight is exp2(S - top + RAISE): half, which is coarse below 2^-14, has room above 1.
constexpr float RAISE = IS_HALF<T> ? 8.f : 0.f;

// Chunk c of row r lies at c ^ r % 8: eight rows of a chunk, which a matrix load reads, lie in eight different banks.
__device__ __forceinline__ int place_in_tile(int r, int c) { return (r * CHUNKS + (c ^ r % 8)) * 8; }

constexpr int64 NOWHERE = -1;

struct Shared {
    T query[ROWS * DIM], key[2][KEYS * DIM], value[2][KEYS * DIM];
    int64 key_at[2][KEYS], value_at[2][KEYS];              // in elements from the head's first, multiples of 8; or NOWHERE
    unsigned missing[2][2], odd[2][2];   // a bit for each row: not there; of values: with an infinity or NaN
};
static_assert(sizeof(Shared) == CUATTN_SHARED, "what cuattn/_plan_attention.py asks for");

extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_attention_mma(const T* q, const T* k, const T* v, const void* cu_q, const void* cu_k, const void* used_k,
                     const void* block_table, const unsigned char* mask, const float* slopes, const float* sinks,
                     const float* k_scale, const float* v_scale, float sm_scale, float softcap, float k_factor,
                     float v_factor, T* out, float* lse, const __grid_constant__ AttentionLayout at) {
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // 1. My rows; their queries on the way.
    const RowTile rows = RowTile::of(gridDim.x - 1 - blockIdx.x, ROWS, int(at.group), cu_q, cu_k, used_k, at);
    if (rows.count < 1) return;
    const SequenceRows& own = rows.own;
    const int g = blockIdx.y, t = threadIdx.x, lane = t % 32, warp = t / 32;
#pragma unroll 4
    for (int n = t; n < ROWS * CHUNKS; n += THREADS) {
        const int r = n / CHUNKS, c = n % CHUNKS, i = rows.query_of(r);
        const bool there = r < rows.count && c * 8 < at.head_dim;
        const T* const from = q + at.q.at(own.b, own.first_q + i, rows.head_of(r, i, g)) + (there ? c * 8 : 0);
        copy_async(&shared.query[place_in_tile(r, c)], from, there ? 16 : 0);
    }
    const T *const keys = k + g * at.k.head, *const values = v + g * at.v.head;
    const auto find = [&](const KeyTile& tile, int stage) {
        if (t >= KEYS) return;
        const Slot place = t < tile.count ? place_of(own, tile.key(t), block_table, at) : Slot{0, 0, false};
        shared.key_at[stage][t] = place.valid ? at.k.at(place, 0) : NOWHERE;
        shared.value_at[stage][t] = place.valid ? at.v.at(place, 0) : NOWHERE;
        const unsigned missing = __ballot_sync(ALL, !place.valid && t < tile.count);
        if (lane == 0) shared.missing[stage][warp] = missing, shared.odd[stage][warp] = 0;
    };
    const auto copy = [&](T* to, const T* from, const int64* places, int64 size) {
#pragma unroll (DIM > 64 ? 1 : 2)
        for (int n = 0; n < KEYS * CHUNKS / THREADS; ++n) {
            const int r = (n * THREADS + t) / CHUNKS, c = (n * THREADS + t) % CHUNKS;
            const int64 place = places[r];
            const bool there = place != NOWHERE && c * 8 < size;
            copy_async(to + place_in_tile(r, c), from + (there ? place + c * 8 : 0), there ? 16 : 0);
        }
    };

    // 2. Online softmax over the tiles of keys.
    const ScoreRule rule(sm_scale, Scales{k_scale, k_factor, at.k_scale}.of(g), softcap);
    float o[ATOMS][STEPS * 2][4] = {}, top[ATOMS][2], sum[ATOMS][2] = {};
#pragma unroll
    for (int i = 0; i < ATOMS * 2; ++i) top[i / 2][i % 2] = -INFINITY;
    const auto row_of = [&](int a, int half) { return (warp * ATOMS + a) * 16 + half * 8 + lane / 4; };
    // Whether a row sees key n of a tile.
    const auto sees = [&](const KeyTile& tile, int stage, int i, int h, int n) {
        const int j = tile.key(min(n, tile.count - 1)), ahead = own.ahead(i, j);
        return n < tile.count && !(shared.missing[stage][n / 32] >> n % 32 & 1)
               && within(ahead, at.window_left, at.window_right)
               && (PLAIN || mask == nullptr || at.mask.keeps(mask, own.b, h, i, j));
    };
    DenseTiles<KEYS> tiles(rows, !PLAIN && mask != nullptr, at);
    KeyTile tile, next;
    bool more = tiles.get(tile);
    if (more) {
        find(tile, 0);
        __syncthreads();
        copy(shared.key[0], keys, shared.key_at[0], at.head_dim);
    }
    end_of_copies();
    if (more) copy(shared.value[0], values, shared.value_at[0], at.head_dim_v);
    end_of_copies();
#pragma unroll 1
    for (int stage = 0; more; stage ^= 1, tile = next) {
        more = tiles.get(next);
        if (more) find(next, stage ^ 1);
        wait_for_copies<1>();            // all but the values
        __syncthreads();
        if (more) copy(shared.key[stage ^ 1], keys, shared.key_at[stage ^ 1], at.head_dim);
        end_of_copies();
        // 2a. S = Q K^T.
        float s[ATOMS][COLUMNS][4] = {};
#pragma unroll (DIM > 64 ? 4 : STEPS)
        for (int step = 0; step < STEPS; ++step) {
            unsigned a[ATOMS][4];
#pragma unroll
            for (int i = 0; i < ATOMS; ++i) {
                const int r = (warp * ATOMS + i) * 16 + lane % 16;
                load_matrices(a[i], &shared.query[place_in_tile(r, step * 2 + lane / 16)]);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS; n += 2) {
                unsigned b[4];
                const int r = n * 8 + lane % 8 + lane / 16 * 8;
                load_matrices(b, &shared.key[stage][place_in_tile(r, step * 2 + lane / 8 % 2)]);
#pragma unroll
                for (int i = 0; i < ATOMS; ++i) {
                    multiply_add(s[i][n], a[i], {b[0], b[1]}, T());
                    multiply_add(s[i][n + 1], a[i], {b[2], b[3]}, T());
                }
            }
        }
        // 2b. Weights. A new largest score makes what was summed up shrink.
        const bool masked = tile.masked || (shared.missing[stage][0] | shared.missing[stage][KEYS / 32 - 1]) != 0;
#pragma unroll
        for (int i = 0; i < ATOMS; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned seen = 0xffffffff;                // of my keys, a bit each
                int query = 0, head = 0;
                if (!PLAIN || masked) query = rows.query_of(row_of(i, half)), head = rows.head_of(row_of(i, half), query, g);
                if (masked) {
                    seen = 0;
#pragma unroll 1
                    for (int e = 0; e < COLUMNS * 2; ++e) {
                        seen |= unsigned(sees(tile, stage, query, head, e / 2 * 8 + lane % 4 * 2 + e % 2)) << e;
                    }
                }
                const float slope = PLAIN ? 0.f : slope_of(slopes, own.b, head, at);
                float highest = top[i][half];
#pragma unroll
                for (int e = 0; e < COLUMNS * 2; ++e) {
                    float& x = s[i][e / 2][half * 2 + e % 2];
                    const int n = e / 2 * 8 + lane % 4 * 2 + e % 2;
                    if (PLAIN) x = __fmul_rn(x, rule.factor);          // not into the difference below
                    else x = rule.score(x, slope, own.ahead(query, tile.key(min(n, tile.count - 1))));
                    x = seen >> e & 1 ? x : -INFINITY;
                    highest = fmaxf(highest, x);
                }
                highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 2));
                if (__any_sync(ALL, highest != top[i][half])) {
                    const float rescale = exp2_fast(top[i][half] - shift_of(highest));
                    top[i][half] = highest, sum[i][half] *= rescale;
#pragma unroll
                    for (int n = 0; n < STEPS * 2; ++n) o[i][n][half * 2] *= rescale, o[i][n][half * 2 + 1] *= rescale;
                }
                const float shift = shift_of(highest) - RAISE;
                float more_sum = 0.f;
#pragma unroll
                for (int e = 0; e < COLUMNS * 2; ++e) {
                    float& x = s[i][e / 2][half * 2 + e % 2];
                    x = exp2_fast(x - shift);
                    more_sum += x;
                }
                sum[i][half] += more_sum;
            }
        }
        wait_for_copies<1>();            // all but the next keys
        __syncthreads();
        if (more) copy(shared.value[stage ^ 1], values, shared.value_at[stage ^ 1], at.head_dim_v);
        end_of_copies();
        // 2c. A value that some rows don't see may be infinite or NaN, and 0 times that is NaN. Such values become 0 here, and
        // the rows that do see them get them now.
        if (masked) {
            T* const all = shared.value[stage];
#pragma unroll 1
            for (int n = t; n < KEYS * DIM; n += THREADS) {
                if (is_odd(all[place_in_tile(n / DIM, n % DIM / 8) + n % 8])) atomicOr(&shared.odd[stage][n / DIM / 32], 1u << n / DIM % 32);
            }
            __syncthreads();
            if (shared.odd[stage][0] | shared.odd[stage][KEYS / 32 - 1]) {
#pragma unroll 1
                for (int j = 0; j < KEYS; ++j) {
                    if (!(shared.odd[stage][j / 32] >> j % 32 & 1)) continue;
#pragma unroll
                    for (int i = 0; i < ATOMS * 2; ++i) {
                        const int query = rows.query_of(row_of(i / 2, i % 2));
                        if (!sees(tile, stage, query, rows.head_of(row_of(i / 2, i % 2), query, g), j)) continue;
#pragma unroll
                        for (int e = 0; e < STEPS * 4; ++e) {
                            const T value = all[place_in_tile(j, e / 2) + lane % 4 * 2 + e % 2];
                            o[i / 2][e / 2][i % 2 * 2 + e % 2] += is_odd(value) ? to_float(value) : 0.f;
                        }
                    }
                }
                __syncthreads();
#pragma unroll 1
                for (int n = t; n < KEYS * DIM; n += THREADS) {
                    T& value = all[place_in_tile(n / DIM, n % DIM / 8) + n % 8];
                    if (is_odd(value)) value = T(0.f);
                }
                __syncthreads();
            }
        }
        // 2d. O += P V.
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            unsigned p[ATOMS][4];
#pragma unroll
            for (int i = 0; i < ATOMS; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float (&x)[4] = s[i][step * 2 + e / 2];
                    p[i][e] = pair_of(x[e % 2 * 2], x[e % 2 * 2 + 1], T());
                }
            }
#pragma unroll
            for (int n = 0; n < STEPS * 2; n += 2) {
                unsigned b[4];
                load_transposed(b, &shared.value[stage][place_in_tile(step * 16 + lane % 16, n + lane / 16)]);
#pragma unroll
                for (int i = 0; i < ATOMS; ++i) {
                    multiply_add(o[i][n], p[i], {b[0], b[1]}, T());
                    multiply_add(o[i][n + 1], p[i], {b[2], b[3]}, T());
                }
            }
        }
    }

    // 3. The end of each row.
    const float value_scale = Scales{v_scale, v_factor, at.v_scale}.of(g);
    const bool pairs = (reinterpret_cast<size_t>(out) | 2 * (at.out.b | at.out.i | at.out.h)) % 4 == 0;
#pragma unroll
    for (int i = 0; i < ATOMS * 2; ++i) {
        float total = sum[i / 2][i % 2];
        total += __shfl_xor_sync(ALL, total, 1);
        total += __shfl_xor_sync(ALL, total, 2);
        const int r = row_of(i / 2, i % 2), query = rows.query_of(r), head = rows.head_of(r, query, g);
        if (r >= rows.count) continue;
        Ending ending(top[i / 2][i % 2] - RAISE, total, value_scale, sink_of(sinks, head, at));
        T* const row = out + at.out.at(own.b, own.first_q + query, head);
#pragma unroll
        for (int n = 0; n < STEPS * 2; ++n) {
            const int d = n * 8 + lane % 4 * 2;
            const float x = total == 0.f ? 0.f : o[i / 2][n][i % 2 * 2] * ending.factor + 0.f;
            const float y = total == 0.f ? 0.f : o[i / 2][n][i % 2 * 2 + 1] * ending.factor + 0.f;
            if (d >= at.head_dim_v) continue;
            if (pairs) *reinterpret_cast<unsigned*>(row + d) = pair_of(x, y, T());
            else from_float(row + d, x), from_float(row + d + 1, y);
        }
        if (lane % 4 == 0 && lse != nullptr) lse[at.lse.at(own.b, own.first_q + query, head)] = ending.lse;
    }
}
