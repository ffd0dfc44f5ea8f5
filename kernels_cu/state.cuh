// state.cuh - attention states and their merge, for our kernels and for yours.
//
// A state over a set of keys is (out, lse): out the softmax-weighted mean of the values, lse = log sum_j exp(score_j),
// natural log, float32. States over disjoint sets merge:
//     lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
// No keys: (0, -inf), the identity. Such a state is skipped, never multiplied, so its `out` may hold anything.
//
// Arithmetic: weights exp(lse_s - max), of which one at least is 1; products and sums in float32, each rounded on its
// own (no fused multiply-add), so that a merge of two commutes bit for bit.
// Oracle: reference/state.py
#pragma once
#include "platform.cuh"

namespace cuattn {

// exp(lse - max), where an empty state weighs 0 also if all are empty (max = -inf).
__device__ __forceinline__ float state_weight(float lse, float max) {
    return expf(lse - (max == -INFINITY ? 0.f : max));
}

// Weights of two states relative to the larger lse: 1 and exp(-|difference|). The same bits as from state_weight.
__device__ __forceinline__ void state_weights(float lse_a, float lse_b, float& a, float& b) {
    const float smaller = expf(-fabsf(lse_a - lse_b));
    a = lse_a == -INFINITY ? 0.f : lse_a >= lse_b ? 1.f : smaller;
    b = lse_b == -INFINITY ? 0.f : lse_b >= lse_a ? 1.f : smaller;
}

// State<N>: N features of a merge in progress, not yet divided by the sum of the weights.
template <int N> struct State {
    float max, sum, acc[N];              // lse = max + log(sum), out = acc / sum

    __device__ __forceinline__ static State empty(float max = -INFINITY) {
        State s;
        s.max = max;
        s.sum = 0.f;
#pragma unroll
        for (int d = 0; d < N; ++d) s.acc[d] = -0.f;     // -0 + x is x for every x, signed zeros too
        return s;
    }

    // Adds the finished state (lse, out); `max` must cover its lse already.
    __device__ __forceinline__ void add(float lse, const float (&out)[N]) {
        add_weighted(state_weight(lse, max), lse == -INFINITY, out);
    }

    __device__ __forceinline__ void add_weighted(float weight, bool none, const float (&out)[N]) {
        sum = __fadd_rn(sum, weight);
        // Selected and not branched around: the compiler would move the loads of `out` behind the branch.
#pragma unroll
        for (int d = 0; d < N; ++d) acc[d] = __fadd_rn(acc[d], none ? -0.f : __fmul_rn(weight, out[d]));
    }

    // Adds a merge in progress over other keys that has the same max.
    __device__ __forceinline__ void add_same_max(const State& other) {
        sum = __fadd_rn(sum, other.sum);
#pragma unroll
        for (int d = 0; d < N; ++d) acc[d] = __fadd_rn(acc[d], other.acc[d]);
    }

    // Adds a merge in progress over other keys, whatever its max.
    __device__ __forceinline__ void merge(const State& other) {
        float a, b;
        state_weights(max, other.max, a, b);
        max = fmaxf(max, other.max);
        sum = __fadd_rn(__fmul_rn(sum, a), __fmul_rn(other.sum, b));
#pragma unroll
        for (int d = 0; d < N; ++d) acc[d] = __fadd_rn(__fmul_rn(acc[d], a), __fmul_rn(other.acc[d], b));
    }

    // The finished state. sum is 0 only if nothing was added (the largest weight is 1); it is NaN if a lse was NaN.
    __device__ __forceinline__ void finish(float& lse, float (&out)[N]) const {
        const float scale = sum == 0.f ? -0.f : __fdiv_rn(1.f, sum);         // nothing added: acc is -0, and -0 * -0 = 0
        lse = sum == 0.f ? -INFINITY : sum == 1.f ? max : max + logf(sum);   // -0 + log(1) would be +0
#pragma unroll
        for (int d = 0; d < N; ++d) out[d] = __fmul_rn(acc[d], scale);
    }
};

}  // namespace cuattn
