// state.cu - merge attention states over disjoint sets of keys: two, a list, a stack, or ragged segments of a stack.
//
// What     For row n (everything but the last axis) and the states s of that row:
//            lse[n] = log sum_s exp(lse_s[n])                        (-inf if every state is empty)
//            out[n] = sum_s exp(lse_s[n] - lse[n]) out_s[n]          (0    if every state is empty)
// Shapes   out_s (rows, D) TA or TB read    lse_s (rows) f32 read    rows = up to four axes with strides of their own;
//          out   (rows, D) TO      written  lse   (rows) f32 written  the last axis of out_s and out is contiguous
// Work     threadIdx.x owns VEC neighbouring features of a row, threadIdx.y its row.
//          SPLIT = 1, for few rows of many states: a block is one row, threadIdx.z takes chunks of its states in turn.
// Bits     The maximum first; then chunks of CHUNK states are summed in order, and the chunk sums in order. So neither
//          SPLIT nor the grid changes a bit, and two states give the same bits as a pair, a list or a stack.
// Memory   bound by reading every state and writing one: rows * (states + 1) * (D * itemsize + 4) bytes.
// Aliasing out and lse may be one of the inputs, row for row: a block has read its rows before it writes them.
// Compile  TA, TB, TO, VEC, SPLIT; everything else is a runtime value.
// Source   online softmax (Milakov and Gimelshein 2018); states as in FlashInfer's recursive attention
// Oracle   reference/state.py
#include "rows.cuh"
#include "state.cuh"
#include "vec.cuh"

using namespace cuattn;
using TA = CUATTN_TA;                    // float, __half or __nv_bfloat16
using TB = CUATTN_TB;
using TO = CUATTN_TO;
constexpr int VEC = CUATTN_VEC;          // features per thread: 16 bytes where size and alignment allow
constexpr bool SPLIT = CUATTN_SPLIT;
constexpr int THREADS = SPLIT || VEC == 1 ? 512 : 128, MAX_GROUPS = 64;
constexpr int BLOCKS = SPLIT ? 1 : VEC == 1 ? 2 : VEC == 8 ? 6 : 5;   // a multiprocessor, given what CHUNK loads take
constexpr int CHUNK = 8;                 // states in flight per thread; part of the arithmetic, not of the tile
constexpr int LIST = 32;                 // states in one launch of a list: 80 bytes each of the 4 KB of parameters

struct PairLayout { Rows rows; RowStrides out_a, lse_a, out_b, lse_b, mask, out, lse; };
struct ListState { const TA* out; const float* lse; RowStrides out_at, lse_at; };
struct ListLayout { Rows rows; RowStrides out, lse; int64 states; ListState state[LIST]; };
struct StackLayout {
    Rows rows;                           // ragged: one axis is the segment
    RowStrides outs, lses, out, lse;     // ragged: outs and lses have stride 0 there, the segment's start counts
    int64 states, outs_step, lses_step;  // fewer than 2^31 states; from one to the next
    int64 index_bytes, index_step;       // indptr: 4 or 8 bytes an entry, 0 if the stack is not ragged
    int64 segment_axis;
};

__device__ __forceinline__ int64 my_row() { return int64(blockIdx.x) * blockDim.y + threadIdx.y; }
__device__ __forceinline__ int my_feature() { return threadIdx.x * VEC; }

// Everybody has read what is needed before anybody writes: out and lse may be an input of these very rows.
__device__ __forceinline__ void store(const State<VEC>& state, TO* out, float* lse, bool write) {
    __syncthreads();
    if (!write) return;
    float x[VEC], l;
    state.finish(l, x);
    Packed<TO, VEC> packed;
    packed.pack(x);
    packed.store(out);
    if (threadIdx.x == 0) *lse = l;
}

// Two states; rows whose mask is 0 stay as they are.
extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_merge_pair(const TA* out_a, const float* lse_a, const TB* out_b, const float* lse_b, const unsigned char* mask,
                  TO* out, float* lse, const __grid_constant__ PairLayout at) {
    const auto merge = [&](const RowIndex& i) {
        float la = -INFINITY, lb = -INFINITY;
        Packed<TA, VEC> a;
        Packed<TB, VEC> b;
        bool write = my_row() < at.rows.count;
        if (write) {
            la = lse_a[at.lse_a.offset(i)], lb = lse_b[at.lse_b.offset(i)];
            a.load(out_a + at.out_a.offset(i) + my_feature());
            b.load(out_b + at.out_b.offset(i) + my_feature());
            if (mask != nullptr) write = mask[at.mask.offset(i)];
        }
        float wa, wb, x[VEC];
        state_weights(la, lb, wa, wb);
        State<VEC> state = State<VEC>::empty(fmaxf(la, lb));
        a.unpack(x);
        state.add_weighted(wa, la == -INFINITY, x);
        b.unpack(x);
        state.add_weighted(wb, lb == -INFINITY, x);
        store(state, out + at.out.offset(i) + my_feature(), lse + at.lse.offset(i), write);
    };
    // Here instructions limit and not only memory: a copy of the code for one axis is 10 % faster (bench/LOG.md).
    if (at.rows.one_axis()) merge({0, 0, 0, my_row(), 1});
    else merge(at.rows.split(my_row()));
}

// The largest value of the block, where the threads of one threadIdx.z agree already.
__device__ __forceinline__ float block_max(float x) {
    __shared__ float tops[MAX_GROUPS];
    if (threadIdx.x == 0) tops[threadIdx.z] = x;
    __syncthreads();
    for (int g = 0; g < blockDim.z; ++g) x = fmaxf(x, tops[g]);
    return x;
}

// state += the chunks of all threadIdx.z, in order; threadIdx.z == 0 keeps it. Empty chunks change no bit.
__device__ __forceinline__ void add_in_order(State<VEC>& state, const State<VEC>& chunk) {
    extern __shared__ float sums[];                                // [1 + VEC, blockDim.z, blockDim.x]
    const int plane = blockDim.z * blockDim.x, mine = threadIdx.z * blockDim.x + threadIdx.x;
    sums[mine] = chunk.sum;
#pragma unroll
    for (int d = 0; d < VEC; ++d) sums[(1 + d) * plane + mine] = chunk.acc[d];
    __syncthreads();
    if (threadIdx.z == 0) {
        for (int g = 0; g < blockDim.z; ++g) {
            State<VEC> other;
            other.sum = sums[g * blockDim.x + threadIdx.x];
#pragma unroll
            for (int d = 0; d < VEC; ++d) other.acc[d] = sums[(1 + d) * plane + g * blockDim.x + threadIdx.x];
            state.add_same_max(other);
        }
    }
    __syncthreads();
}

// `count` states of my row, `from` says where; with SPLIT only threadIdx.z == 0 has the result.
template <typename Source> __device__ __forceinline__ State<VEC> merge_range(int count, const Source& from) {
    const int groups = SPLIT ? blockDim.z : 1, group = SPLIT ? threadIdx.z : 0;
    State<VEC> state = State<VEC>::empty();
    for (int round = 0; round < count; round += groups * CHUNK) {
        // 1. All loads of my chunk.
        const int first = round + group * CHUNK;
        float l[CHUNK];
        Packed<TA, VEC> packed[CHUNK];
        auto at = from.state(first);
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            l[c] = -INFINITY;
            if (first + c < count) {
                l[c] = *at.lse();
                packed[c].load(at.out() + my_feature());
                at.next();
            }
        }
        // 2. The maximum of all states, while the first loads are under way.
        if (round == 0) {
            float top = -INFINITY;
            for (int s = groups * CHUNK + group; s < count; s += groups) top = fmaxf(top, *from.state(s).lse());
#pragma unroll
            for (int c = 0; c < CHUNK; ++c) top = fmaxf(top, l[c]);
            state.max = SPLIT ? block_max(top) : top;
        }
        // 3. Sum up my chunk, then add the chunks in order.
        State<VEC> chunk = State<VEC>::empty(state.max);
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            float x[VEC];
            packed[c].unpack(x);
            chunk.add(l[c], x);
        }
        if constexpr (SPLIT) add_in_order(state, chunk);
        else state.add_same_max(chunk);
    }
    return state;
}

// Up to LIST states, each wherever it lies.
struct ListSource {
    struct Cursor {
        const ListState* at;
        const RowIndex& row;
        __device__ __forceinline__ const float* lse() const { return at->lse + at->lse_at.offset(row); }
        __device__ __forceinline__ const TA* out() const { return at->out + at->out_at.offset(row); }
        __device__ __forceinline__ void next() { ++at; }
    };
    const ListState* states;
    const RowIndex& row;
    __device__ __forceinline__ Cursor state(int s) const { return {states + s, row}; }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
cuattn_merge_list(TO* out, float* lse, const __grid_constant__ ListLayout at) {
    const bool mine = my_row() < at.rows.count;
    const RowIndex i = at.rows.split(my_row());
    const State<VEC> state = merge_range(mine ? at.states : 0, ListSource{at.state, i});
    store(state, out + at.out.offset(i) + my_feature(), lse + at.lse.offset(i), mine && threadIdx.z == 0);
}

// A stack of states: every row merges all of them, or, ragged, a row of segment n the states indptr[n] to
// indptr[n + 1] - 1. Whatever indptr holds, nothing outside the stack is read.
struct StackSource {
    struct Cursor {
        const TA* out_at;
        const float* lse_at;
        int64 outs_step, lses_step;
        __device__ __forceinline__ const float* lse() const { return lse_at; }
        __device__ __forceinline__ const TA* out() const { return out_at; }
        __device__ __forceinline__ void next() { out_at += outs_step, lse_at += lses_step; }
    };
    Cursor first;
    __device__ __forceinline__ Cursor state(int s) const {
        Cursor cursor = first;
        cursor.out_at += s * first.outs_step;
        cursor.lse_at += s * first.lses_step;
        return cursor;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
cuattn_merge_stack(const TA* outs, const float* lses, const void* indptr, TO* out, float* lse,
                   const __grid_constant__ StackLayout at) {
    const bool mine = my_row() < at.rows.count;
    const RowIndex i = at.rows.split(my_row());
    TO* my_out = out + at.out.offset(i) + my_feature();
    float* my_lse = lse + at.lse.offset(i);
    StackSource from{{outs + at.outs.offset(i), lses + at.lses.offset(i), at.outs_step, at.lses_step}};
    int64 count = mine ? at.states : 0;
    if (at.index_bytes && mine) {
        const auto entry = [&](int64 n) -> int64 {
            return at.index_bytes == 8 ? static_cast<const int64*>(indptr)[n * at.index_step]
                                       : static_cast<const int*>(indptr)[n * at.index_step];
        };
        const int64 axis = at.segment_axis, segment = axis == 3 ? i.i3 : axis == 2 ? i.i2 : axis == 1 ? i.i1 : i.i0;
        const int64 begin = min(max(entry(segment), int64(0)), at.states);
        const int64 end = min(max(entry(segment + 1), begin), at.states);
        from.first.out_at += begin * at.outs_step;
        from.first.lse_at += begin * at.lses_step;
        count = end - begin;
    }
    const State<VEC> state = merge_range(int(count), from);
    store(state, my_out, my_lse, mine && threadIdx.z == 0);
}
