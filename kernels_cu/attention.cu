// attention.cu - attention of many queries, dense, packed or over pages: the complete variant, for any GPU.
//
// What     For row (b, i, h), kv head g = h / group, over the keys j that it sees:
//            S_j = log2(e) (softcap tanh(sm_scale k_scale <q, K[j,g]> / softcap) - slope |pos(i) - j|)
//            lse = log sum_j exp2(S_j)                                        (-inf if there is none)
//            out = v_scale sum_j exp2(S_j) V[j,g] / sum_j exp2(S_j)           (0    if there is none)
//          A sink is one more score, whose value is 0.
// Shapes   q, out (batch, seqlen_q, num_heads, head_dim or head_dim_v) T, or packed (total_q, ...) with cu_seqlens_q
//          k, v (batch, seqlen_k, num_kv_heads, head_dim or head_dim_v) C, or packed (total_k, ...) with cu_seqlens_k, or
//          pages (num_pages, page_size, ...) with block_table (batch, width)
//          lse (batch, seqlen_q, num_heads) or (total_q, num_heads) f32, or nullptr; index arrays i32 or i64
//          mask (batch, num_heads, seqlen_q, seqlen_k) bool or bits, slopes (batch, num_heads), sinks (num_heads),
//          k_scale, v_scale (num_kv_heads) f32, or nullptr; all with strides of their own, some of them 0
// Work     blockIdx.x = tile of ROWS query rows, the last first: causal rows at the end see most keys; blockIdx.y = kv head.
//          A block walks a stream of tiles of KEYS keys. Thread (y, x) of 16 x 16 has rows y MINE .. and keys x, x + 16 of the
//          scores, and features 4x .. of every CHUNK of the output.
// Memory   bound by arithmetic: 4 ROWS KEYS head_dim operations for the KEYS rows of K and V that a tile loads.
// Bits     of a row depend on its own sequence, and not on the rows that share its tile.
// Compile  T, C, DIM (128 or 512; up to which head_dim and head_dim_v); everything else is a runtime value.
// Oracle   reference/attention_varlen.py
#include "attention.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half, __nv_bfloat16 or float
using C = CUATTN_C;                      // T or __nv_fp8_e4m3
constexpr int DIM = CUATTN_DIM, CHUNK = 64, CHUNKS = DIM / CHUNK;      // features that pass through shared memory at once
constexpr int ROWS = 8192 / DIM, KEYS = 32, MINE = ROWS / 16;          // 32 KB of queries; rows of a thread
constexpr int THREADS = 256;
constexpr float UNSEEN = -1.f;           // instead of a weight

struct Shared {
    float query[DIM][ROWS + 4];                                        // all of them, transposed
    union {
        float key[CHUNK][KEYS + 1], value[KEYS][CHUNK];                // transposed; as they are
    };
    float weight[KEYS][ROWS + 4];
    Slot place[KEYS];
};
static_assert(sizeof(Shared) == CUATTN_SHARED, "what cuattn/_plan_attention.py asks for");

__device__ __forceinline__ float max_of_16(float x) {
#pragma unroll
    for (int other = 8; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, other));
    return x;
}
__device__ __forceinline__ float sum_of_16(float x) {
#pragma unroll
    for (int other = 8; other > 0; other /= 2) x += __shfl_xor_sync(ALL, x, other);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
cuattn_attention(const T* q, const C* k, const C* v, const void* cu_q, const void* cu_k, const void* used_k,
                 const void* block_table, const unsigned char* mask, const float* slopes, const float* sinks,
                 const float* k_scale, const float* v_scale, float sm_scale, float softcap, float k_factor, float v_factor,
                 T* out, float* lse, const __grid_constant__ AttentionLayout at) {
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // 1. My rows.
    const RowTile rows = RowTile::of(gridDim.x - 1 - blockIdx.x, ROWS, int(at.group), cu_q, cu_k, used_k, at);
    if (rows.count < 1) return;
    const SequenceRows& own = rows.own;
    const int g = blockIdx.y, t = threadIdx.x, x = t % 16, y = t / 16;
    for (int n = t; n < ROWS * CHUNK * CHUNKS; n += THREADS) {
        const int r = n / DIM, d = n % DIM, i = rows.query_of(r);
        const bool there = r < rows.count && d < at.head_dim;
        shared.query[d][r] = there ? to_float(q[at.q.at(own.b, own.first_q + i, rows.head_of(r, i, g)) + d]) : 0.f;
    }
    const ScoreRule rule(sm_scale, Scales{k_scale, k_factor, at.k_scale}.of(g), softcap);
    float acc[CHUNKS][MINE][4] = {}, top[MINE], sum[MINE], slope[MINE];
    int query[MINE], head[MINE];
#pragma unroll
    for (int r = 0; r < MINE; ++r) {
        query[r] = rows.query_of(y * MINE + r), head[r] = rows.head_of(y * MINE + r, query[r], g);
        slope[r] = slope_of(slopes, own.b, head[r], at);
        top[r] = -INFINITY, sum[r] = 0.f;
    }

    // 2. Online softmax over the tiles of keys.
    KeyTile tile;
    for (DenseTiles<KEYS> tiles(rows, mask != nullptr || at.page_size, at); tiles.get(tile);) {
        __syncthreads();
        if (t < KEYS) shared.place[t] = t < tile.count ? place_of(own, tile.key(t), block_table, at) : Slot{0, 0, false};
        // Features c CHUNK .. of the rows of K or V; 0 behind their end and where there is no row.
        const auto load = [&](const C* from, const PageStrides& strides, int64 size, int c, float* to, int key, int feature) {
            const int d = c * CHUNK + t % CHUNK;
#pragma unroll
            for (int n = 0; n < KEYS; n += THREADS / CHUNK) {
                const Slot& place = shared.place[n + t / CHUNK];
                const bool there = place.valid && d < size;
                to[(n + t / CHUNK) * key + t % CHUNK * feature] = there ? to_float(from[strides.at(place, g) + d]) : 0.f;
            }
        };
        float s[MINE][2] = {};
#pragma unroll 1
        for (int c = 0; c * CHUNK < at.head_dim; ++c) {
            __syncthreads();
            load(k, at.k, at.head_dim, c, shared.key[0], 1, KEYS + 1);
            __syncthreads();
#pragma unroll 8
            for (int d = 0; d < CHUNK; ++d) {
                const float a = shared.key[d][x], b = shared.key[d][x + 16];
#pragma unroll
                for (int r = 0; r < MINE; ++r) {
                    const float own_query = shared.query[c * CHUNK + d][y * MINE + r];
                    s[r][0] = fmaf(own_query, a, s[r][0]), s[r][1] = fmaf(own_query, b, s[r][1]);
                }
            }
        }
        bool seen[MINE][2];
        float rescale[MINE];
#pragma unroll
        for (int r = 0; r < MINE; ++r) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int n = x + 16 * e, j = tile.key(min(n, tile.count - 1)), ahead = own.ahead(query[r], j);
                seen[r][e] = !tile.masked || (n < tile.count && shared.place[n].valid
                                              && within(ahead, at.window_left, at.window_right)
                                              && (mask == nullptr || at.mask.keeps(mask, own.b, head[r], query[r], j)));
                s[r][e] = seen[r][e] ? rule.score(s[r][e], slope[r], ahead) : -INFINITY;
            }
            const float highest = max_of_16(fmaxf(fmaxf(s[r][0], s[r][1]), top[r])), shift = shift_of(highest);
            rescale[r] = exp2f(top[r] - shift);
            top[r] = highest, sum[r] *= rescale[r];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float weight = exp2f(s[r][e] - shift);
                sum[r] += weight;
                shared.weight[x + 16 * e][y * MINE + r] = seen[r][e] ? weight : UNSEEN;
            }
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c * CHUNK >= at.head_dim_v) break;
            __syncthreads();
            load(v, at.v, at.head_dim_v, c, shared.value[0], CHUNK, 1);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < MINE * 4; ++i) acc[c][i / 4][i % 4] *= rescale[i / 4];
#pragma unroll 4
            for (int j = 0; j < KEYS; ++j) {
                const float4 four = *reinterpret_cast<const float4*>(&shared.value[j][4 * x]);
                const float value[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < MINE * 4; ++i) {
                    float& to = acc[c][i / 4][i % 4];
                    const float weight = shared.weight[j][y * MINE + i / 4], more = fmaf(weight, value[i % 4], to);
                    to = weight == UNSEEN ? to : more;                 // such a value may be NaN
                }
            }
        }
    }

    // 3. The end of each row.
    const float value_scale = Scales{v_scale, v_factor, at.v_scale}.of(g);
#pragma unroll
    for (int r = 0; r < MINE; ++r) {
        const float total = sum_of_16(sum[r]);
        if (y * MINE + r >= rows.count) continue;
        const Ending ending(top[r], total, value_scale, sink_of(sinks, head[r], at));
        T* const row = out + at.out.at(own.b, own.first_q + query[r], head[r]);
#pragma unroll
        for (int i = 0; i < CHUNKS * 4; ++i) {
            const int d = i / 4 * CHUNK + 4 * x + i % 4;
            if (d < at.head_dim_v) from_float(row + d, total == 0.f ? 0.f : acc[i / 4][r][i % 4] * ending.factor + 0.f);
        }
        if (x == 0 && lse != nullptr) lse[at.lse.at(own.b, own.first_q + query[r], head[r])] = ending.lse;
    }
}
