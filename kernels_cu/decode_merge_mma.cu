// decode_merge_mma.cu - the pieces of a decode on tensor cores merged, once each.
//
// What     For each sequence of more than one piece and each share of it: the states of its pieces up the tree of
//          decode_work.cuh; then divided by the sum, with the sink, in T.
// Shapes   workspace: see decode_work.cuh, as decode_mma.cu leaves it; out, lse, sinks, v_scale as there
// Work     blockIdx.x = (sequence, share). Of many shares a warp takes SET items by itself; of few, and of sequences with
//          more than 32 pieces where both kinds of blocks are there, the warps of a block share the groups of SET items,
//          and the first one merges these.
// Memory   bound by latency: 2 KB (head_dim 128, group 4) for a piece, from L2, BATCH of them under way for each warp.
// Compile  T, C, DIM, ROWS, SET: 1 for few blocks, whose warps wait less with more pieces under way, else 2, which share the
//          weights; everything else is a runtime value.
// Oracle   reference/decode.py
#include "decode_mma.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half or __nv_bfloat16
using C = CUATTN_C;                      // of the cache: T or __nv_fp8_e4m3
constexpr int ROWS = CUATTN_ROWS;
using Tile = DecodeTile<T, C, CUATTN_DIM, ROWS, true>;
constexpr int COLUMNS = Tile::COLUMNS, STEPS = Tile::STEPS, ITEMS = COLUMNS * STEPS;

constexpr int SET = CUATTN_SET, BATCH = 8 / SET;            // items of a warp; pieces that it asks for at once
constexpr int CHUNK = 64 / SET;                            // groups in shared memory

struct GroupState {
    float4 acc[SET][32], max_and_sum[4];                   // of a lane; of lane % 4
};
static_assert(CHUNK * sizeof(GroupState) == CUATTN_SHARED, "what cuattn/_plan_decode_mma.py asks for");

struct Merged {
    Weight weight;
    float4 acc[SET];

    __device__ __forceinline__ static Merged empty() { return {Weight::empty(), {}}; }
    __device__ __forceinline__ void add(const Merged& other) {
        const Blend blend(weight, other.weight);
#pragma unroll
        for (int i = 0; i < SET; ++i) acc[i] = blend.of(acc[i], other.acc[i]);
    }
};

extern "C" __global__ void __launch_bounds__(256, SET)
cuattn_decode_merge_mma(float* workspace, const float* sinks, const float* v_scale, float v_factor, T* out, float* lse,
                        const __grid_constant__ MmaLayout layout) {
    // 1. My sequence and share, its pieces and groups.
    extern __shared__ float4 memory[];
    GroupState* const merged = reinterpret_cast<GroupState*>(memory);
    const DecodeLayout& at = layout.at;
    const Work& work = layout.work;
    const Workspace partials(workspace, ITEMS, COLUMNS, work, at);
    const int b = int(work.shares.divide(blockIdx.x)), share = int(blockIdx.x) - b * int(work.shares.d);
    const ToMerge own = partials.sequences[b];
    const int first = own.first, past = own.past, of_group = own.of_group, per_group = 1 << of_group;
    const int first_group = first >> of_group, groups = ((past - 1) >> of_group) - first_group + 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, alone = int(work.merge_alone);
    const bool together = int(blockIdx.y) >= alone, both = alone > 0 && int(gridDim.y) > alone;
    if (past == 0) return;               // it is there already
    if (both && together != (past - first > 32)) return;
    const Share my(share, ROWS, work, at);
    const Finish<Tile> finish{sinks, v_scale, v_factor, out, lse, layout};
    const int64 acc_step = partials.acc_step(), max_and_sum_step = partials.max_and_sum_step();
    const int pair = min(lane % 4, partials.pairs - 1);

    const int begin = together ? int(blockIdx.y) - alone : int(blockIdx.y) * warps + warp;
    const int step = together ? int(gridDim.y) - alone : ITEMS;
#pragma unroll 1
    for (int item = begin * SET; item < ITEMS; item += step * SET) {
        // 2. A piece; what is not there is a state of nothing.
        const float4* const acc = partials.acc(0, share, item, lane / 4 * 4 + pair);
        const float4* const max_and_sum = partials.max_and_sum(0, share, item / STEPS, pair);
        const auto piece = [&](int p) {
            if (p < first || p >= past) return Merged::empty();
            const int64 slot = own.slot(p, b);
            Merged x{Weight::of(max_and_sum[slot * max_and_sum_step]), {}};
#pragma unroll
            for (int i = 0; i < SET; ++i) x.acc[i] = acc[slot * acc_step + i * 8 * partials.pairs];
            return x;
        };
        // 3. Up the tree, BATCH pieces at a time. Of groups a warp alone has all, together every so many.
        Merged total = Merged::empty();
        const int at_once = max(BATCH >> of_group, 1), mine = together ? warp * at_once : 0;         // groups
        const int next = together ? warps * at_once : at_once, chunk = together ? CHUNK : groups;
#pragma unroll 1
        for (int start = 0; start < groups; start += chunk) {
            const auto group_ends = [&](int number, const Merged& state) {
                if (!together) return total.add(state);
                GroupState& to = merged[number - start];
#pragma unroll
                for (int i = 0; i < SET; ++i) to.acc[i][lane] = state.acc[i];
                if (lane < 4) to.max_and_sum[lane] = state.weight.packed();
            };
#pragma unroll 1
            for (int g = start + mine; g < min(start + chunk, groups); g += next) {
                Merged group = Merged::empty();
#pragma unroll 1
                for (int n = 0; n < max(per_group, BATCH); n += BATCH) {
                    Merged x[BATCH];
#pragma unroll
                    for (int i = 0; i < BATCH; ++i) x[i] = piece(((first_group + g) << of_group) + n + i);
#pragma unroll
                    for (int i = 0; i < BATCH; i += SPLIT) {
                        if (of_group == 0) {               // pieces are groups
#pragma unroll
                            for (int j = i; j < i + SPLIT; ++j) group_ends(g + j, x[j]);
                            continue;
                        }
                        Merged& split = x[i];              // of leaves, or of splits: then it is a group
#pragma unroll
                        for (int j = i + 1; j < i + SPLIT; ++j) split.add(x[j]);
                        group.add(split);
                        if ((n + i + SPLIT) % per_group) continue;
                        group_ends(per_group == SPLIT ? g + i / SPLIT : g, group);
                        group = Merged::empty();
                    }
                }
            }
            if (!together) continue;
            __syncthreads();
#pragma unroll 1
            for (int g = 0; g < min(CHUNK, groups - start) && warp == 0; ++g) {
                Merged state{Weight::of(merged[g].max_and_sum[lane % 4]), {}};
#pragma unroll
                for (int i = 0; i < SET; ++i) state.acc[i] = merged[g].acc[i][lane];
                total.add(state);
            }
            __syncthreads();
        }
        if (together && warp > 0) continue;
#pragma unroll 1
        for (int i = 0; i < SET; ++i) finish({SET > 1 && i ? total.acc[SET - 1] : total.acc[0], total.weight}, b, my, item + i, lane);
    }
}
