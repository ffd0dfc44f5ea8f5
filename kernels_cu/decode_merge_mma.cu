// decode_merge_mma.cu - the pieces of a decode on tensor cores merged, once each.
//
// What     For each sequence of more than one piece and each share of it: the states of its pieces up the tree of
//          decode_work.cuh; then divided by the sum, with the sink, in T.
// Shapes   workspace: see decode_work.cuh, as decode_mma.cu leaves it; out, lse, sinks, v_scale as there
// Work     blockIdx.x = (sequence, share). Of many shares a warp takes SET items for itself; of few, and of sequences with
//          more than 32 pieces where both kinds of blocks are there, the warps of a block take a group each, in turn.
// Memory   bound by latency: 2 KB (head_dim 128, group 4) for a piece, from L2, BATCH of them under way for each warp.
// Compile  T, C, DIM, ROWS; everything else is a runtime value.
// Oracle   reference/decode.py
#include "decode_mma.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half or __nv_bfloat16
using C = CUATTN_C;                      // of the cache: T or __nv_fp8_e4m3
constexpr int ROWS = CUATTN_ROWS;
using Tile = DecodeTile<T, C, CUATTN_DIM, ROWS, true>;
constexpr int COLUMNS = Tile::COLUMNS, STEPS = Tile::STEPS, ITEMS = COLUMNS * STEPS;

// A state of some items of a share, and how it lies in shared memory.
constexpr int SET = 2, BATCH = 8;        // items of a warp; pieces that it asks for at once
struct Received {
    float4 acc[SET][32], max_and_sum[4];
};
static_assert(sizeof(Received) == 1088, "as in cuattn/_plan_decode_mma.py");
struct Merged {
    Weight weight;
    float4 acc[SET];

    __device__ __forceinline__ Merged() : weight(Weight::empty()), acc{} {}
    __device__ __forceinline__ explicit Merged(const Received& x) : weight(Weight::of(x.max_and_sum[threadIdx.x % 4])) {
#pragma unroll
        for (int i = 0; i < SET; ++i) acc[i] = x.acc[i][threadIdx.x % 32];
    }
    __device__ __forceinline__ void put(Received& x) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < SET; ++i) x.acc[i][lane] = acc[i];
        if (lane < 4) x.max_and_sum[lane] = weight.packed();
    }
    __device__ __forceinline__ void add(const Merged& other) {
        const Blend blend(weight, other.weight);
#pragma unroll
        for (int i = 0; i < SET; ++i) acc[i] = blend.of(acc[i], other.acc[i]);
    }
    __device__ __forceinline__ void add_four(const Received* four) {
#pragma unroll
        for (int i = 0; i < 4; ++i) add(Merged(four[i]));
    }
};

extern "C" __global__ void __launch_bounds__(256, 3)
cuattn_decode_merge_mma(float* workspace, const float* sinks, const float* v_scale, float v_factor, T* out, float* lse,
                        const __grid_constant__ MmaLayout layout) {
    // 1. My sequence and share, its pieces, my items.
    extern __shared__ float4 memory[];
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
    const int item = (together ? int(blockIdx.y) - alone : int(blockIdx.y) * warps + warp) * SET;
    // 2. A batch of pieces is asked for; those that are not there are states of nothing. Four lanes find a piece.
    Received* const received = reinterpret_cast<Received*>(memory) + warp * BATCH;
    Received* const merged = reinterpret_cast<Received*>(memory) + warps * BATCH;                // a group of each warp
    const int pair = min(lane % 4, partials.pairs - 1);
    const float4* const acc = partials.acc(0, share, item, lane / 4 * 4 + pair);
    const float4* const max_and_sum = partials.max_and_sum(0, share, item / STEPS, pair);
    const int64 acc_step = partials.acc_step(), max_and_sum_step = partials.max_and_sum_step();
    const auto receive = [&](int begin, int count) {
        const int p = begin + lane / 4;
        const bool there = p >= first && p < past && p < begin + count;
        const int64 slot = there ? own.slot(p, b) : -1;
        __syncwarp();
        float4* const to = &received[lane / 4].max_and_sum[lane % 4];
        if (there) copy_async(to, max_and_sum + slot * max_and_sum_step);
        else *to = Weight::empty().packed();
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int64 of_piece = __shfl_sync(ALL, slot, 4 * u);
            const float4* const from = acc + of_piece * acc_step;
#pragma unroll
            for (int i = 0; i < SET; ++i) {
                if (of_piece >= 0) copy_async(&received[u].acc[i][lane], from + i * 8 * partials.pairs);
                else received[u].acc[i][lane] = {0.f, 0.f, 0.f, 0.f};
            }
        }
        end_of_copies();
        wait_for_copies<0>();
        __syncwarp();
    };
    // 3. Up the tree: all groups, or one after another for all warps, each time one for each.
    Merged group, total;
    const bool direct = per_group == 1 && !together;       // pieces are groups
    const int padded = max(per_group, BATCH), mine = (groups + warps - 1) / warps * padded;
    for (int w = warp; w < 8; w += warps) if (together) Merged().put(merged[w]);
#pragma unroll 1
    for (int n = 0; n < (together ? mine : groups << of_group); n += BATCH) {
        const int g = n / padded * warps + warp, inside = n & (padded - 1);                      // if together
        if (together) receive(((first_group + g) << of_group) + inside, g < groups ? min(per_group, BATCH) : 0);
        else receive((first_group << of_group) + n, BATCH);
#pragma unroll 1
        for (int u = 0; u < (together ? min(per_group, BATCH) : BATCH); u += 4) {
            Merged split;
            if (direct) split = total;
            split.add_four(received + u);
            if (direct) {
                total = split;
                continue;
            }
            group.add(split);
            if (together ? inside + u + 4 < per_group : (n + u + 4) & (per_group - 1)) continue;
            if (together) {
                group.put(merged[warp]);
                __syncthreads();
#pragma unroll 1
                for (int w = 0; w < 8 && warp == 0; w += 4) total.add_four(merged + w);
                __syncthreads();
            } else {
                total.add(group);
            }
            group = Merged();
        }
    }
    if (together && warp > 0) return;
    const Share my(share, ROWS, work, at);
    const Finish<Tile> finish{sinks, v_scale, v_factor, out, lse, layout};
#pragma unroll 1
    for (int i = 0; i < SET; ++i) finish({i ? total.acc[1] : total.acc[0], total.weight}, b, my, item + i, lane);
}
