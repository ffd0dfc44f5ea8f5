// decode.cu - the newest queries of each sequence against a paged cache, split along the keys; the merge of the splits.
//
// What     For row (b, i, h), kv head g = h / group, and the keys j of split s that it sees:
//            S_j  = log2(e) (softcap tanh(sm_scale <q, k_scale K[j,g]> / softcap) - slope |pos(i) - j|)
//            lse  = log sum_j exp2(S_j)                               (-inf if there is none)
//            part = v_scale sum_j exp2(S_j) V[j,g] / sum_j exp2(S_j)  (0    if there is none)
//          New tokens are written to their pages before; they count, and q and new keys may be rotated.
//          decode_merge merges the parts in order, and the sink as the state (0, sink). If no sequence can have two
//          splits (workspace is nullptr), decode_split does that itself, with the same bits.
// Shapes   q (batch, seqlen_q, num_heads, head_dim) T read; out (batch, seqlen_q, num_heads, head_dim_v) T written
//          lse (batch, seqlen_q, num_heads) f32 written, or nullptr
//          k_pages, v_pages (num_pages, page_size, num_kv_heads, head_dim or head_dim_v) C read, new tokens written
//          new_k, new_v (batch, seqlen_new, num_kv_heads, head_dim or head_dim_v) T read, or nullptr
//          cos, sin (max_positions, rotary_dim / 2) T or f32 read, or nullptr
//          block_table (num_sequences, width), cache_seqlens, batch_idx, leftpad (batch) i32 or i64
//          slopes (batch or 1, num_heads), sinks (num_heads), k_scale, v_scale (1 or num_kv_heads) f32, or nullptr
//          all with strides of their own; the last axis of q, out and the pages is contiguous
//          workspace (rows, splits, head_dim_v), then (rows, splits) f32; rows = batch * seqlen_q * num_heads
// Work     split: blockIdx.x = (b, s), blockIdx.y = (kv head, ROWS of its query rows). `lanes` lanes share a key, each
//          has FEATURES of its features, so a block walks THREADS / lanes keys at a time, KEYS of them in flight.
//          merge: a block per row, a thread per feature.
// Bits     depend on the sequence's own length and tokens, the head counts and the tile; not on batch, table or pages.
// Memory   bound by reading K and V once for ROWS rows: len * num_kv_heads * (head_dim + head_dim_v) * itemsize.
// Compile  T, C, VEC, FEATURES; everything else is a runtime value.
// Source   Flash-Decoding (Dao et al. 2023); page tables after vLLM (Kwon et al. 2023)
// Oracle   reference/decode.py
#include "decode.cuh"
#include "decode_append.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half, __nv_bfloat16 or float
using C = CUATTN_C;                      // T or __nv_fp8_e4m3
constexpr int VEC = CUATTN_VEC;          // elements of one load: 16 bytes where sizes and strides allow, else 1
constexpr int FEATURES = CUATTN_FEATURES;                            // of a lane: head_dim is at most 32 times that
constexpr int VECTORS = FEATURES / VEC;
constexpr int ROWS = FEATURES == 8 ? 4 : 2;                          // query rows of a block: what registers hold
constexpr int KEYS = VEC > 1 ? FEATURES * sizeof(C) > 16 ? 2 : 4 : sizeof(C) > 1 ? 2 : 1;   // in flight per lane
constexpr int THREADS = 128, BLOCKS = VEC > 1 ? 3 : 2;               // a multiprocessor; NVRTC would spill for a third
static_assert(ROWS * 32 <= THREADS, "query rows pass through the memory in which streams are merged");

__device__ __forceinline__ int vector_of(int n, int lane, int lanes) { return n * lanes + lane; }

// My vectors of one token, 0 behind its end and if there is no token.
__device__ __forceinline__ void load_token(Packed<C, VEC> (&x)[VECTORS], const C* pages, const PageStrides& strides,
                                           const Slot& slot, int g, int lane, int lanes, int size) {
    const C* row = pages + (slot.valid ? strides.at(slot, g) : 0);
#pragma unroll
    for (int n = 0; n < VECTORS; ++n) {
        const int d = vector_of(n, lane, lanes) * VEC;
        x[n] = Packed<C, VEC>{};
        if (slot.valid && d < size) x[n].load(row + d);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
cuattn_decode_split(const T* q, C* k_pages, C* v_pages, const void* block_table, const void* cache_seqlens,
                    const void* batch_idx, const void* leftpad, const T* new_k, const T* new_v, const void* cos,
                    const void* sin, const float* slopes, const float* sinks, const float* k_scale,
                    const float* v_scale, float sm_scale, float softcap, float k_factor, float v_factor, T* out,
                    float* lse, float* workspace, const __grid_constant__ DecodeLayout at) {
    // 1. My sequence and split, my kv head and query rows. Row r is head r % group of query r / group.
    const unsigned b = blockIdx.x / unsigned(at.splits), s = blockIdx.x - b * unsigned(at.splits);
    const Sequence own = sequence_of(b, cache_seqlens, batch_idx, leftpad, at);
    if (workspace != nullptr && s >= num_splits(own.length, int(at.max_splits))) return;
    const unsigned g = blockIdx.y / unsigned(at.row_groups), group = unsigned(at.group);
    const Scales k_scales{k_scale, k_factor, at.k_scale}, v_scales{v_scale, v_factor, at.v_scale};
    if (at.seqlen_new) {
        const int64 size = split_size(own.length, int(at.max_splits));
        const int begin = int(max(s * size, int64(own.past))), end = int(min((s + 1) * size, int64(own.length)));
        if (begin < end) {
            append_tokens(b, begin, end, g, own, threadIdx.x, THREADS, new_k, new_v, cos, sin, k_pages, v_pages,
                          block_table, k_scales, v_scales, at);
        }
        __syncthreads();
    }
    const int first_row = int(blockIdx.y - g * unsigned(at.row_groups)) * ROWS;
    const int rows = min(ROWS, int(at.seqlen_q * at.group) - first_row);
    if (rows <= 0) return;                                           // no queries, only new tokens
    const int lanes = int(at.lanes), lane = threadIdx.x % unsigned(lanes), stream = threadIdx.x / unsigned(lanes);
    const int streams = THREADS / unsigned(lanes), width = lanes * FEATURES;
    const ScoreRule rule(sm_scale, k_scales.of(g), softcap);

    // 2. Their queries, once for all streams, rotated on the way.
    __shared__ float accs[THREADS * FEATURES];                       // [rows, width] here, [streams, width] in 4.
    float query[ROWS][FEATURES], acc[ROWS][FEATURES], top[ROWS], sum[ROWS], slope[ROWS];
    int position[ROWS];
    for (int r = 0; r < rows; ++r) {
        const unsigned n = first_row + r, i = n / group, h = n - i * group + g * group;
        const T* mine = q + at.q.at(b, i, h);
        const Angles angles = at.rotary.at(own.past + (at.queries_turn ? i : 0), cos, sin);
        for (int d = threadIdx.x; d < width; d += THREADS) {
            accs[r * width + d] = d < at.head_dim ? to_float(rotated(mine, d, angles)) : 0.f;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const unsigned n = first_row + min(r, rows - 1), i = n / group, h = g * group + (n - i * group);
#pragma unroll
        for (int e = 0; e < FEATURES; ++e) {
            query[r][e] = accs[min(r, rows - 1) * width + vector_of(e / VEC, lane, lanes) * VEC + e % VEC];
            acc[r][e] = 0.f;
        }
        top[r] = -INFINITY, sum[r] = 0.f;
        slope[r] = slope_of(slopes, b, h, at);
        position[r] = int(i) + own.length - int(at.seqlen_q);
    }

    // 3. Online softmax over the keys that one of them sees; every lane of a warp goes round as often.
    const Keys keys = keys_of(s, own, first_row / group, (first_row + rows - 1) / group, at);
    for (int start = keys.begin; start < keys.end; start += streams * KEYS) {
        Packed<C, VEC> k[KEYS][VECTORS], v[KEYS][VECTORS];
        bool there[KEYS];
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
            const int j = start + u * streams + stream;
            Slot slot{0, 0, false};
            if (j < keys.end) slot = token_at(j, block_table, own.row, at);
            there[u] = slot.valid;
            load_token(k[u], k_pages, at.k, slot, g, lane, lanes, int(at.head_dim));
            load_token(v[u], v_pages, at.v, slot, g, lane, lanes, int(at.head_dim_v));
        }
        float weight[ROWS][KEYS];
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
            float x[FEATURES];
#pragma unroll
            for (int n = 0; n < VECTORS; ++n) k[u][n].unpack(reinterpret_cast<float(&)[VEC]>(x[n * VEC]));
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= rows) break;
                float product = 0.f;
#pragma unroll
                for (int e = 0; e < FEATURES; ++e) product = fmaf(query[r][e], x[e], product);
                for (int other = lanes / 2; other > 0; other /= 2) product += __shfl_xor_sync(ALL, product, other);
                const int ahead = start + u * streams + stream - position[r];
                weight[r][u] = there[u] && sees(ahead, at) ? rule.score(product, slope[r], ahead) : -INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            float highest = top[r];
#pragma unroll
            for (int u = 0; u < KEYS; ++u) highest = fmaxf(highest, weight[r][u]);
            const float shift = shift_of(highest), rescale = exp2f(top[r] - shift);
            top[r] = highest;
            sum[r] *= rescale;
#pragma unroll
            for (int e = 0; e < FEATURES; ++e) acc[r][e] *= rescale;
#pragma unroll
            for (int u = 0; u < KEYS; ++u) {
                weight[r][u] = exp2f(weight[r][u] - shift);            // 0 if it does not see the key
                sum[r] += weight[r][u];
            }
        }
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
            float x[FEATURES];
#pragma unroll
            for (int n = 0; n < VECTORS; ++n) v[u][n].unpack(reinterpret_cast<float(&)[VEC]>(x[n * VEC]));
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= rows) break;
                const bool seen = sees(start + u * streams + stream - position[r], at);
#pragma unroll
                for (int e = 0; e < FEATURES; ++e) {
                    const float more = fmaf(weight[r][u], x[e], acc[r][e]);
                    acc[r][e] = seen ? more : acc[r][e];             // a value that is not seen may be NaN
                }
            }
        }
    }

    // 4. Merge the streams of each row in order, normalise, leave base 2, store.
    __shared__ float tops[THREADS], sums[THREADS];                   // [streams] each
    const float value_scale = v_scales.of(g);
    const int64 all_rows = int64(gridDim.x / unsigned(at.splits)) * at.seqlen_q * at.num_heads;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
        __syncthreads();
#pragma unroll
        for (int e = 0; e < FEATURES; ++e) {
            accs[stream * width + vector_of(e / VEC, lane, lanes) * VEC + e % VEC] = acc[r][e];
        }
        if (lane == 0) tops[stream] = top[r], sums[stream] = sum[r];
        __syncthreads();
        float highest = -INFINITY, total = 0.f;
        for (int t = 0; t < streams; ++t) highest = fmaxf(highest, tops[t]);
        const float shift = shift_of(highest);
        __syncthreads();
        if (threadIdx.x < streams) tops[threadIdx.x] = exp2f(tops[threadIdx.x] - shift);    // a weight from here on
        __syncthreads();
        for (int t = 0; t < streams; ++t) total = fmaf(tops[t], sums[t], total);
        const float scale = total == 0.f ? 0.f : value_scale / total;
        const float own_lse = total == 0.f ? -INFINITY : highest * LN2 + logf(total);    // from here on natural
        const unsigned n = first_row + r, i = n / group, h = g * group + (n - i * group);
        for (int d = threadIdx.x; d < at.head_dim_v; d += THREADS) {
            float x[1] = {0.f};
            for (int t = 0; t < streams; ++t) {
                x[0] = fmaf(tops[t], accs[t * width + d], x[0]);
            }
            x[0] = total == 0.f ? 0.f : __fmul_rn(x[0], scale);
            if (workspace != nullptr) {
                const PartialRow part(workspace, (int64(b) * at.seqlen_q + i) * at.num_heads + h, all_rows, at);
                part.out[int64(s) * at.head_dim_v + d] = x[0];
                if (d == 0) part.lse[s] = own_lse;
            } else {
                const float sink = sink_of(sinks, h, at);
                State<1> state = State<1>::empty(fmaxf(own_lse, sink));
                state.add(own_lse, x);
                float l;
                finish_with_sink(state, sink, l, x);
                from_float(out + at.out.at(b, i, h) + d, x[0]);
                if (d == 0 && lse != nullptr) lse[at.lse.at(b, i, h)] = l;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_decode_merge(float* workspace, const void* cache_seqlens, const void* batch_idx, const float* sinks, T* out,
                    float* lse, const __grid_constant__ DecodeLayout at) {
    // 1. My row and its splits.
    const unsigned n = blockIdx.x, token = n / unsigned(at.num_heads), h = n - token * unsigned(at.num_heads);
    const unsigned b = token / unsigned(at.seqlen_q), i = token - b * unsigned(at.seqlen_q);
    const Sequence own = sequence_of(b, cache_seqlens, batch_idx, nullptr, at);
    const int splits = num_splits(own.length, int(at.max_splits));
    const PartialRow part(workspace, n, gridDim.x, at);
    // 2. The maximum first; then the splits in order, the sink last.
    const float sink = sink_of(sinks, h, at);
    float top = sink;
    for (int s = 0; s < splits; ++s) top = fmaxf(top, part.lse[s]);
    for (int d = threadIdx.x; d < at.head_dim_v; d += THREADS) {
        State<1> state = State<1>::empty(top);
#pragma unroll 4
        for (int s = 0; s < splits; ++s) {
            const float x[1] = {part.out[int64(s) * at.head_dim_v + d]};
            state.add(part.lse[s], x);
        }
        float x[1], l;
        finish_with_sink(state, sink, l, x);
        from_float(out + at.out.at(b, i, h) + d, x[0]);
        if (d == 0 && lse != nullptr) lse[at.lse.at(b, i, h)] = l;
    }
}
