// online_softmax.cuh - scores, which keys are seen, and the end of a softmax: what every kernel of attention shares.
//
// Scores are in base 2: a weight is exp2(S - top), with `top` the largest score so far. A key that is not seen has the score
// -inf, and its value is selected away, never multiplied: it may be NaN.
// Source: online softmax (Milakov and Gimelshein 2018). Oracle: reference/attention.py
#pragma once
#include "state.cuh"

namespace cuattn {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct QueryStrides {                    // of an array (batch, seqlen_q, num_heads, ...), in elements
    int64 b, i, h;

    __device__ __forceinline__ int64 at(int64 batch, int64 query, int64 head) const {
        return batch * b + query * i + head * h;
    }
};

struct Keys { int begin, end; };         // begin .. end - 1

// Whether a window reaches a key that lies `ahead` of the position of a query (behind it: negative).
__device__ __forceinline__ bool within(int ahead, int64 left, int64 right) { return ahead <= right && -int64(ahead) <= left; }

struct ScoreRule {
    float factor, softcap;               // without a cap, factor holds log2(e)

    __device__ __forceinline__ ScoreRule(float sm_scale, float k_scale, float cap) : softcap(cap) {
        factor = cap > 0.f ? sm_scale * k_scale / cap : sm_scale * k_scale * LOG2E;
    }
    // slope in base 2 too, see slope_of.
    __device__ __forceinline__ float score(float product, float slope, int ahead) const {
        float s = __fmul_rn(product, factor);              // rounded on its own, also where a kernel has fewer options
        if (softcap > 0.f) s = __fmul_rn(tanhf(s), softcap * LOG2E);
        return slope == 0.f ? s : fmaf(-slope, fabsf(float(ahead)), s);
    }
};

// The slope of a head in base 2, 0 if there is none. Layout: of a call of decode or attention.
template <typename Layout>
__device__ __forceinline__ float slope_of(const float* slopes, int64 b, int64 h, const Layout& at) {
    return slopes == nullptr ? 0.f : slopes[b * at.slopes_b + h * at.slopes_h] * LOG2E;
}
// The sink of a head, -inf if there is none: an empty state then, which changes no bit.
template <typename Layout> __device__ __forceinline__ float sink_of(const float* sinks, int64 h, const Layout& at) {
    return sinks == nullptr ? -INFINITY : sinks[h * at.sinks_h];
}

// exp2(m - shift(m)): the difference is never -inf - -inf.
__device__ __forceinline__ float shift_of(float max) { return max == -INFINITY ? 0.f : max; }

// The end of a softmax, from its largest score and the sum of weights: lse, and the factor on the sum of weighted values.
// `sink`: one more score (natural) whose value is 0, -inf if there is none.
struct Ending {
    float lse, factor;

    __device__ __forceinline__ Ending(float top, float sum, float value_scale, float sink) {
        lse = sum == 0.f ? -INFINITY : fmaf(top, LN2, logf(sum));
        factor = sum == 0.f ? 0.f : value_scale / sum;
        if (sink == -INFINITY) return;
        float own, other;
        state_weights(lse, sink, own, other);
        const float both = own + other;
        lse = fmaxf(lse, sink) + logf(both), factor *= own / both;
    }
};

}  // namespace cuattn
