// attention_sm90.cu - attention of many queries on Hopper, for 16-bit arrays: dense or packed.
//
// What     As attention.cu, without softcap, slopes, mask and pages.
// Shapes   as in attention.cu, but T is float16 or bfloat16 and so are keys and values; head_dim and head_dim_v up to DIM;
//          q, k and v come as tensor maps of (batch, sequence, heads, features), packed ones with a batch of 1
// Work     a block takes tiles of ROWS queries of a head, every gridDim.x-th, the last first: causal ones there see most keys.
//          A thread of the first warpgroup asks for tiles of keys and values by tensor copies, STAGES of them ahead; each of
//          the others has 64 queries. The scores of a tile are under way together with the values of the one before, and
//          its softmax while these still are.
// Memory   bound by arithmetic: 4 ROWS KEYS DIM operations for the KEYS rows of K and V that a tile loads.
// Bits     of a row depend on its own sequence, and not on the rows that share its tile. Weights are rounded to T.
// Compile  T, DIM (64 or 128), CONSUMERS; everything else is a runtime value.
// Source   FlashAttention-3 (Shah et al. 2024)
// Oracle   reference/attention_varlen.py
#include "attention.cuh"
#include "hopper.cuh"
#include "mma.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half or __nv_bfloat16
constexpr int DIM = CUATTN_DIM, KEYS = 128, STAGES = 2;
constexpr int CONSUMERS = CUATTN_CONSUMERS;                 // warpgroups that multiply: as many as registers hold
constexpr int GROUP = 128, THREADS = GROUP * (CONSUMERS + 1), ROWS = 64 * CONSUMERS;
constexpr int PANELS = DIM / 64, HEIGHT = KEYS * 128;      // of 64 features; bytes of a panel of keys
constexpr float RAISE = IS_HALF<T> ? 8.f : 0.f;            // half, which is coarse below 2^-14, has room above 1
constexpr int TOGETHER = 1, OF_GROUP = 2;                  // named barriers: of all that multiply; OF_GROUP + warpgroup

struct alignas(1024) Shared {
    T value[STAGES][PANELS][KEYS * 64], key[STAGES][PANELS][KEYS * 64], query[PANELS][ROWS * 64];
    Barrier key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES], query_full, query_empty;
    unsigned odd[STAGES][KEYS / 32];     // a bit for each row of values that holds an infinity or NaN
};
static_assert(sizeof(Shared) == CUATTN_SHARED, "what cuattn/_plan_attention.py asks for");

// Chunk c, 16 bytes, of row r of panels of `height` bytes.
__device__ __forceinline__ char* chunk_at(T* panels, int height, int r, int c) {
    return reinterpret_cast<char*>(panels) + c / 8 * height + r * 128 + (c % 8 ^ r % 8) * 16;
}

// S = Q K^T: 64 queries, KEYS keys.
__device__ __forceinline__ void scores(float (&s)[64], const T* query, const T* key) {
    const unsigned long long a = matrix_at(query, 16), b = matrix_at(key, 16);
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int panel = step / 4, inside = step % 4 * 32;
        product(s, a + (panel * ROWS * 128 + inside) / 16, b + (panel * HEIGHT + inside) / 16, step > 0, T());
    }
}
// O += P V.
__device__ __forceinline__ void add_values(float (&o)[DIM / 2], const unsigned (&p)[KEYS / 16][4], const T* value) {
    const unsigned long long b = matrix_at(value, HEIGHT);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) product(o, p[step], b + step * 2048 / 16, T());
}

// What a thread has of its two rows, l / 4 and l / 4 + 8 of its warp.
struct Softmax {
    float top[2], sum[2], rescale[2];
    int first[2], past[2];               // keys that they see
    float factor, plus;                  // weights are exp2(S factor - top factor + RAISE), with scores in masked tiles times plus

    // Scores become weights. Sums are last: what waits for weights is what multiplies.
    __device__ __forceinline__ void weigh(float (&s)[64], const KeyTile& tile) {
        if (tile.masked) {
            const int shift = tile.start + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const int key = shift + i / 4 * 8 + i % 2, row = i / 2 % 2;
                s[i] = key >= first[row] && key < past[row] ? s[i] * plus : -INFINITY;
            }
        }
        float offset[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = top[r];
#pragma unroll
            for (int i = 2 * r; i < 64; i += i % 2 ? 3 : 1) highest = fmaxf(highest, s[i]);
            highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, 2));
            offset[r] = -__fmul_rn(shift_of(highest), factor);
            rescale[r] = exp2_fast(fmaf(top[r], factor, offset[r]));
            top[r] = highest, offset[r] += RAISE;
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] = exp2_fast(fmaf(s[i], factor, offset[i / 2 % 2]));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float more = 0.f;
#pragma unroll
            for (int i = 2 * r; i < 64; i += i % 2 ? 3 : 1) more += s[i];
            sum[r] = fmaf(sum[r], rescale[r], more);
        }
    }
    __device__ __forceinline__ bool sees(int r, int key) const { return key >= first[r] && key < past[r]; }
};

__device__ __forceinline__ void pack(unsigned (&p)[KEYS / 16][4], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i / 4][i % 4] = pair_of(s[2 * i], s[2 * i + 1], T());
}

// Values that some rows don't see may be infinite or NaN, and 0 times that is NaN. Those behind the sequence become 0; others
// too, but before that the rows that see them get them. By all warpgroups together.
__device__ __forceinline__ void clean_values(Shared& shared, int stage, const KeyTile& tile, float (&o)[DIM / 2],
                                             const Softmax& softmax) {
    T* const all = shared.value[stage][0];
    unsigned (&odd)[KEYS / 32] = shared.odd[stage];        // the next tile, where another may be already, has its own
    const int t = threadIdx.x - GROUP, lane = t % 32;
    for (int n = t; n < KEYS * DIM / 8; n += CONSUMERS * GROUP) {
        const int j = n / (DIM / 8);
        uint4* const chunk = reinterpret_cast<uint4*>(chunk_at(all, HEIGHT, j, n % (DIM / 8)));
        if (j >= tile.count) {
            *chunk = {0, 0, 0, 0};
            continue;
        }
        const uint4 x = *chunk;
        const T* const some = reinterpret_cast<const T*>(&x);
        bool found = false;
#pragma unroll
        for (int e = 0; e < 8; ++e) found |= is_odd(some[e]);
        if (found) atomicOr(&odd[j / 32], 1u << j % 32);
    }
    writes_are_for_products();
    meet(TOGETHER, CONSUMERS * GROUP);
    if (!(odd[0] | odd[1] | odd[2] | odd[3])) return;
#pragma unroll 1
    for (int j = 0; j < tile.count; ++j) {
        if (!(odd[j / 32] >> j % 32 & 1)) continue;
        const bool seen[2] = {softmax.sees(0, tile.start + j), softmax.sees(1, tile.start + j)};
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) {
            const T value = reinterpret_cast<const T*>(chunk_at(all, HEIGHT, j, i / 4))[lane % 4 * 2 + i % 2];
            o[i] += seen[i / 2 % 2] && is_odd(value) ? to_float(value) : 0.f;
        }
    }
    meet(TOGETHER, CONSUMERS * GROUP);
    for (int n = t; n < KEYS * DIM; n += CONSUMERS * GROUP) {
        T& value = reinterpret_cast<T*>(chunk_at(all, HEIGHT, n / DIM, n % DIM / 8))[n % 8];
        if (is_odd(value)) value = T(0.f);
    }
    if (t < KEYS / 32) odd[t] = 0;
    writes_are_for_products();
    meet(TOGETHER, CONSUMERS * GROUP);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
cuattn_attention_sm90(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                      const __grid_constant__ TensorMap values, const void* cu_q, const void* cu_k, const void* used_k,
                      const float* sinks, const float* k_scale, const float* v_scale, float sm_scale, float softcap,
                      float k_factor, float v_factor, T* out, float* lse, const __grid_constant__ AttentionLayout at) {
    extern __shared__ float4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<size_t>(memory) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int n = 0; n < STAGES; ++n) {
            shared.key_full[n].init(1), shared.value_full[n].init(1);
            shared.key_empty[n].init(CONSUMERS), shared.value_empty[n].init(CONSUMERS);
        }
        shared.query_full.init(1), shared.query_empty.init(CONSUMERS);
        barriers_are_ready();
    }
    if (threadIdx.x < STAGES * KEYS / 32) shared.odd[0][threadIdx.x] = 0;
    __syncthreads();
    // Item n of the work: as many heads at a time as L2 holds the keys and values of; of these the last rows first.
    const unsigned heads = unsigned(at.heads), tiles_of_rows = unsigned(at.tiles), section = unsigned(at.section);
    const unsigned items = heads * tiles_of_rows;
    const auto item_of = [&](unsigned n, int& h) {
        const unsigned first = n / (section * tiles_of_rows) * section, inside = n - first * tiles_of_rows;
        const unsigned wide = min(section, heads - first);
        h = int(first + inside % wide);
        return RowTile::of(tiles_of_rows - 1 - inside / wide, ROWS, 1, cu_q, cu_k, used_k, at);
    };
    KeyTile tile;
    int h, stage = 0;

    // 1. Who asks for tiles: one thread.
    const int warpgroup = __shfl_sync(ALL, int(threadIdx.x), 0) / GROUP;
    if (warpgroup == 0) {
        fewer_registers<CONSUMERS == 2 ? 24 : 32>();
        if (threadIdx.x != 0) return;
        const long long stays = 0x14F0ll << 48;                        // in L2: other tiles of rows want the same
        int parity = 1, query_parity = 1;
        for (unsigned n = blockIdx.x; n < items; n += gridDim.x) {
            const RowTile rows = item_of(n, h);
            const int g = unsigned(h) / unsigned(at.group), batch = at.cu_q.bytes ? 0 : rows.own.b;
            if (rows.count < 1) continue;
            bool first = true;
            for (DenseTiles<KEYS> tiles(rows, false, at); tiles.get(tile); first = false) {
                const int from = int(rows.own.first_k) + tile.start;
                shared.key_empty[stage].wait(parity);
                shared.key_full[stage].arrive_expecting(KEYS * DIM * 2);
                for (int p = 0; p < PANELS; ++p) copy_box(shared.key[stage][p], keys, shared.key_full[stage], p * 64, from, g, batch, stays);
                if (first) {
                    shared.query_empty.wait(query_parity), query_parity ^= 1;
                    shared.query_full.arrive_expecting(ROWS * DIM * 2);
                    const int row = rows.own.first_q + rows.first;
                    for (int p = 0; p < PANELS; ++p) copy_box(shared.query[p], queries, shared.query_full, p * 64, row, h, batch, stays);
                }
                shared.value_empty[stage].wait(parity);
                shared.value_full[stage].arrive_expecting(KEYS * DIM * 2);
                for (int p = 0; p < PANELS; ++p) copy_box(shared.value[stage][p], values, shared.value_full[stage], p * 64, from, g, batch, stays);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    // 2. Who multiplies: 64 queries each.
    more_registers<CONSUMERS == 2 ? 240 : 160>();
    const int w = warpgroup - 1, t = threadIdx.x % GROUP, lane = t % 32;
    T* const query = shared.query[0] + w * 64 * 64;
    const int first_row = w * 64 + t / 32 * 16 + lane / 4;
    int parity = 0, query_parity = 0;
    for (unsigned n = blockIdx.x; n < items; n += gridDim.x) {
        const RowTile rows = item_of(n, h);
        if (rows.count < 1) continue;
        float o[DIM / 2], s[64];
        unsigned p[KEYS / 16][4];
        Softmax softmax;
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] = 0.f;
        const float scale = sm_scale * Scales{k_scale, k_factor, at.k_scale}.of(unsigned(h) / unsigned(at.group)) * LOG2E;
        softmax.factor = scale > 0.f ? scale : 1.f, softmax.plus = scale > 0.f ? 1.f : scale;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64 position = int64(rows.first) + first_row + 8 * r + rows.own.length_k - rows.own.length_q;
            softmax.first[r] = int(min(max(position - at.window_left, int64(0)), int64(rows.own.length_k)));
            softmax.past[r] = int(min(max(position + at.window_right + 1, int64(0)), int64(rows.own.length_k)));
            softmax.top[r] = -INFINITY, softmax.sum[r] = 0.f;
        }
        // A factor that is not positive is left to the code for masked tiles.
        DenseTiles<KEYS> tiles(rows, !(scale > 0.f), at);
        const bool some = tiles.get(tile);
        if (some) {
            shared.query_full.wait(query_parity), query_parity ^= 1;
            shared.key_full[stage].wait(parity);
            registers_are_for_products();
            scores(s, query, shared.key[stage][0]);
            end_of_products();
            wait_for_products<0>();
            if (t == 0) shared.key_empty[stage].arrive();
            softmax.weigh(s, tile);
            pack(p, s);
            KeyTile next;
            for (bool more = tiles.get(next); more;) {
                if (tile.masked) {                         // out of the loop that follows, whose code shall be short
                    shared.value_full[stage].wait(parity);
                    clean_values(shared, stage, tile, o, softmax);
                }
                do {
                    const int before = stage, parity_before = parity;
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                    shared.key_full[stage].wait(parity);
                    shared.value_full[before].wait(parity_before);
                    registers_are_for_products();
                    scores(s, query, shared.key[stage][0]);
                    end_of_products();
                    add_values(o, p, shared.value[before][0]);
                    end_of_products();
                    wait_for_products<1>();
                    if (t == 0) shared.key_empty[stage].arrive();
                    softmax.weigh(s, next);
                    stays_before_wait(softmax.sum[0] + softmax.sum[1], next.start, query);
                    wait_for_products<0>();
                    if (t == 0) shared.value_empty[before].arrive();
                    pack(p, s);
#pragma unroll
                    for (int i = 0; i < DIM / 2; ++i) o[i] *= softmax.rescale[i / 2 % 2];
                    tile = next, more = tiles.get(next);
                } while (more && !tile.masked);
            }
            shared.value_full[stage].wait(parity);
            if (tile.masked) clean_values(shared, stage, tile, o, softmax);
            registers_are_for_products();
            add_values(o, p, shared.value[stage][0]);
            end_of_products();
            wait_for_products<0>();
            if (t == 0) shared.value_empty[stage].arrive();
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }

        // 3. The end of each row, through the memory of the queries.
        const float value_scale = Scales{v_scale, v_factor, at.v_scale}.of(unsigned(h) / unsigned(at.group));
        const float sink = sink_of(sinks, h, at);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = softmax.sum[r];
            total += __shfl_xor_sync(ALL, total, 1);
            total += __shfl_xor_sync(ALL, total, 2);
            const float top = softmax.top[r] == -INFINITY ? -INFINITY : __fmul_rn(softmax.top[r], softmax.factor) - RAISE;
            const Ending ending(top, total, value_scale, sink);
            const int row = first_row + 8 * r;
#pragma unroll
            for (int i = 2 * r; i < DIM / 2; i += 4) {
                const float x = total == 0.f ? 0.f : o[i] * ending.factor + 0.f, y = total == 0.f ? 0.f : o[i + 1] * ending.factor + 0.f;
                unsigned* const to = reinterpret_cast<unsigned*>(chunk_at(shared.query[0], ROWS * 128, row, i / 4));
                if (some) to[lane % 4] = pair_of(x, y, T());           // else there may be queries of another item
            }
            if (lane % 4 == 0 && row < rows.count && lse != nullptr) {
                lse[at.lse.at(rows.own.b, rows.own.first_q + rows.first + row, h)] = ending.lse;
            }
        }
        meet(OF_GROUP + w, GROUP);
        const bool vectors = (reinterpret_cast<size_t>(out) | 2 * (at.out.b | at.out.i | at.out.h)) % 16 == 0;
#pragma unroll 1
        for (int n = t; n < 64 * DIM / 8; n += GROUP) {
            const int row = w * 64 + n / (DIM / 8), c = n % (DIM / 8);
            if (row >= rows.count || c * 8 >= at.head_dim_v) continue;
            uint4 x = {0, 0, 0, 0};
            if (some) x = *reinterpret_cast<const uint4*>(chunk_at(shared.query[0], ROWS * 128, row, c));
            T* const to = out + at.out.at(rows.own.b, rows.own.first_q + rows.first + row, h) + c * 8;
            if (vectors) {
                *reinterpret_cast<uint4*>(to) = x;
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e) to[e] = reinterpret_cast<const T*>(&x)[e];
            }
        }
        writes_are_for_products();
        meet(OF_GROUP + w, GROUP);
        if (t == 0 && some) shared.query_empty.arrive();
    }
}
