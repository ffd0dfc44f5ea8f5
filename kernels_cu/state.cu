// state.cu - merge attention states over disjoint sets of keys: two, a list, a stack, or ragged segments of a stack.
//
// What     For row n (everything but the last axis) and the states s of that row:
//            lse[n] = log sum_s exp(lse_s[n])                        (-inf if every state is empty)
//            out[n] = sum_s exp(lse_s[n] - lse[n]) out_s[n]          (0    if every state is empty)
// Shapes   out_s (rows, D) TA or TB read    lse_s (rows) f32 read    rows = up to four axes with strides of their own;
//          out   (rows, D) TO      written  lse   (rows) f32 written  the last axis of out_s and out is contiguous
// Work     threadIdx.x owns VEC neighbouring features of a row, threadIdx.y is the row in the block.
//          SPLIT = 1, for few rows with many states: a block is one row, threadIdx.z takes chunks of its states in turn.
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
constexpr int THREADS = 512;
constexpr int CHUNK = 8;                 // states in flight per thread; part of the arithmetic, not of the tile
constexpr int LIST = 32;                 // states in one launch of a list: 80 bytes each of the 4 KB of parameters

struct PairLayout { Rows rows; RowStrides out_a, lse_a, out_b, lse_b, mask, out, lse; };
struct ListState { const TA* out; const float* lse; RowStrides out_at, lse_at; };
struct ListLayout { Rows rows; RowStrides out, lse; int64 states; ListState state[LIST]; };
struct StackLayout {
    Rows rows;                           // ragged: size0 segments
    RowStrides outs, lses, out, lse;     // ragged: outs.s0 = lses.s0 = 0, the start of the segment takes their place
    int64 states, outs_step, lses_step;  // from one state to the next
    int64 index_bytes, index_step;       // indptr: 4 or 8 bytes an entry, 0 if the stack is not ragged
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
    const bool mine = my_row() < at.rows.count;
    const RowIndex i = at.rows.split(mine ? my_row() : 0);
    const float la = lse_a[at.lse_a.offset(i)], lb = lse_b[at.lse_b.offset(i)];
    Packed<TA, VEC> a;
    Packed<TB, VEC> b;
    a.load(out_a + at.out_a.offset(i) + my_feature());
    b.load(out_b + at.out_b.offset(i) + my_feature());
    const bool write = mine && (mask == nullptr || mask[at.mask.offset(i)]);
    State<VEC> state = State<VEC>::empty(fmaxf(la, lb));
    float x[VEC];
    a.unpack(x);
    state.add(la, x);
    b.unpack(x);
    state.add(lb, x);
    store(state, out + at.out.offset(i) + my_feature(), lse + at.lse.offset(i), write);
}

// The largest lse of my row's states [begin, end); with SPLIT by all threads of the block together.
template <typename LoadLse> __device__ __forceinline__ float largest(int64 begin, int64 end, const LoadLse& load_lse) {
    float top = -INFINITY;
    const int width = SPLIT ? blockDim.x * blockDim.z : 1;
    const int rank = SPLIT ? threadIdx.z * blockDim.x + threadIdx.x : 0;
#pragma unroll 8
    for (int64 s = begin + rank; s < end; s += width) top = fmaxf(top, load_lse(s));
    if constexpr (SPLIT) {
        __shared__ float tops[THREADS];
        tops[rank] = top;
        __syncthreads();
        for (int n = width; n > 1; n = (n + 1) / 2) {              // any width, not only powers of two
            if (rank < n / 2) tops[rank] = fmaxf(tops[rank], tops[rank + (n + 1) / 2]);
            __syncthreads();
        }
        top = tops[0];
    }
    return top;
}

// The states [begin, end) of my row, chunk by chunk; with SPLIT only threadIdx.z == 0 has the result.
template <typename LoadLse, typename LoadOut>
__device__ __forceinline__ State<VEC> merge_range(int64 begin, int64 end, const LoadLse& load_lse, const LoadOut& load_out) {
    extern __shared__ float sums[];                                // SPLIT: [blockDim.z, 1 + D], weights and features
    const int width = SPLIT ? blockDim.z : 1, pitch = 1 + blockDim.x * VEC;
    State<VEC> state = State<VEC>::empty();
    if (end - begin > CHUNK) state.max = largest(begin, end, load_lse);
    for (int64 s0 = begin; s0 < end; s0 += CHUNK * width) {
        const int64 s = s0 + (SPLIT ? threadIdx.z * CHUNK : 0);
        float l[CHUNK];
        Packed<TA, VEC> packed[CHUNK];
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {                          // all loads first, then the arithmetic
            l[c] = -INFINITY;
            if (s + c < end) {
                l[c] = load_lse(s + c);
                packed[c].load(load_out(s + c));
            }
        }
        if (end - begin <= CHUNK) {                                // one chunk: the maximum comes with it
#pragma unroll
            for (int c = 0; c < CHUNK; ++c) state.max = fmaxf(state.max, l[c]);
        }
        State<VEC> chunk = State<VEC>::empty(state.max);
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            float x[VEC];
            packed[c].unpack(x);
            chunk.add(l[c], x);
        }
        if constexpr (!SPLIT) {
            state.sum = __fadd_rn(state.sum, chunk.sum);
#pragma unroll
            for (int d = 0; d < VEC; ++d) state.acc[d] = __fadd_rn(state.acc[d], chunk.acc[d]);
        } else {
            float* mine = sums + threadIdx.z * pitch;
            if (threadIdx.x == 0) mine[0] = chunk.sum;
#pragma unroll
            for (int d = 0; d < VEC; ++d) mine[1 + d * blockDim.x + threadIdx.x] = chunk.acc[d];
            __syncthreads();
            if (threadIdx.z == 0) {                                // chunks past the end are empty and change no bit
                for (int g = 0; g < width; ++g) {
                    state.sum = __fadd_rn(state.sum, sums[g * pitch]);
#pragma unroll
                    for (int d = 0; d < VEC; ++d)
                        state.acc[d] = __fadd_rn(state.acc[d], sums[g * pitch + 1 + d * blockDim.x + threadIdx.x]);
                }
            }
            __syncthreads();
        }
    }
    return state;
}

// Up to LIST states, each wherever it lies.
extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_merge_list(TO* out, float* lse, const __grid_constant__ ListLayout at) {
    const bool mine = my_row() < at.rows.count;
    const RowIndex i = at.rows.split(mine ? my_row() : 0);
    const State<VEC> state = merge_range(
        0, at.states, [&](int64 s) { return at.state[s].lse[at.state[s].lse_at.offset(i)]; },
        [&](int64 s) { return at.state[s].out + at.state[s].out_at.offset(i) + my_feature(); });
    store(state, out + at.out.offset(i) + my_feature(), lse + at.lse.offset(i), mine && threadIdx.z == 0);
}

// A stack of states: every row merges all of them, or, ragged, row (segment, ...) the states indptr[segment] to
// indptr[segment + 1] - 1. Whatever indptr holds, nothing outside the stack is read.
extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_merge_stack(const TA* outs, const float* lses, const void* indptr, TO* out, float* lse,
                   const __grid_constant__ StackLayout at) {
    const bool mine = my_row() < at.rows.count;
    const RowIndex i = at.rows.split(mine ? my_row() : 0);
    int64 begin = 0, end = at.states;
    if (at.index_bytes) {
        const auto entry = [&](int64 n) -> int64 {
            return at.index_bytes == 8 ? static_cast<const int64*>(indptr)[n * at.index_step]
                                       : static_cast<const int*>(indptr)[n * at.index_step];
        };
        begin = max(begin, entry(i.i0));
        end = min(end, entry(i.i0 + 1));
    }
    const float* my_lses = lses + at.lses.offset(i);
    const TA* my_outs = outs + at.outs.offset(i) + my_feature();
    const State<VEC> state = merge_range(begin, end, [&](int64 s) { return my_lses[s * at.lses_step]; },
                                         [&](int64 s) { return my_outs + s * at.outs_step; });
    store(state, out + at.out.offset(i) + my_feature(), lse + at.lse.offset(i), mine && threadIdx.z == 0);
}
