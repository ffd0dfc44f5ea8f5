// decode_softmax.cuh - an online softmax over keys that come 16 at a time, as tensor cores leave their scores.
//
// With g = lane / 4, t = lane % 4: a lane has the scores of keys g and g + 8 for rows 2t and 2t + 1 of each column of 8
// query rows, and of the output O^T items of 16 features for the same rows.
#pragma once
#include "decode_work.cuh"

namespace cuattn {

// M: of the weights. A state in progress: the largest score, or SLACK less, and the sum, and all the output.
template <int COLUMNS, int STEPS, typename M> struct OnlineSoftmax {
    // A weight is exp2(S - top + RAISE), with top at most SLACK below the largest score: so a new largest score seldom
    // makes what was summed up shrink. Half, which is coarse below 2^-14, has room above; where values may be as large as a
    // float, no weight exceeds 1.
    static constexpr float SLACK = 7.f, RAISE = IS_HALF<M> ? 8.f : -SLACK;

    Weight weight[COLUMNS];
    float o[COLUMNS][STEPS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            weight[n] = Weight::empty();
#pragma unroll
            for (int e = 0; e < STEPS * 4; ++e) o[n][e / 4][e % 4] = 0.f;
        }
    }
    // The weights of 16 keys as fragments of P^T. What was summed up shrinks if one of them is the new largest.
    __device__ __forceinline__ void weigh(float (&x)[COLUMNS][4], unsigned (&p)[COLUMNS][2]) {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            float (&top)[2] = weight[n].max;
            float (&sum)[2] = weight[n].sum;
            float high[2] = {fmaxf(x[n][0], x[n][2]), fmaxf(x[n][1], x[n][3])};
            if (__any_sync(ALL, high[0] - top[0] > SLACK || high[1] - top[1] > SLACK)) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
#pragma unroll
                    for (int other = 4; other < 32; other *= 2) {
                        high[c] = fmaxf(high[c], __shfl_xor_sync(ALL, high[c], other));
                    }
                    const float highest = high[c] - top[c] > SLACK ? high[c] : top[c];   // a row's own affair
                    const float rescale = exp2_fast(top[c] - shift_of(highest));
                    top[c] = highest, sum[c] = __fmul_rn(sum[c], rescale);
#pragma unroll
                    for (int step = 0; step < STEPS; ++step) o[n][step][c] *= rescale, o[n][step][2 + c] *= rescale;
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = exp2_fast((x[n][e] - shift_of(top[e % 2])) + RAISE);
            sum[0] += x[n][0] + x[n][2], sum[1] += x[n][1] + x[n][3];
            p[n][0] = transpose(pair_of(x[n][0], x[n][1], M()));
            p[n][1] = transpose(pair_of(x[n][2], x[n][3], M()));
        }
    }
    // Until here each lane has the sums of its own keys.
    __device__ __forceinline__ void sum_up() {
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; ++i) {
            float& sum = weight[i / 2].sum[i % 2];
#pragma unroll
            for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(ALL, sum, other);
        }
    }
    // Becomes the merge of itself and `more`, or `more` if it is the first.
    __device__ __forceinline__ void add(const OnlineSoftmax& more, bool first) {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            if (first) {
                weight[n] = more.weight[n];
#pragma unroll
                for (int e = 0; e < STEPS * 4; ++e) o[n][e / 4][e % 4] = more.o[n][e / 4][e % 4] + 0.f;   // -0 as 0
            } else {
                const Blend blend(weight[n], more.weight[n]);
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    float (&a)[4] = o[n][step];
                    const float (&b)[4] = more.o[n][step];
                    const float4 both = blend.of({a[0], a[1], a[2], a[3]}, {b[0], b[1], b[2], b[3]});
                    a[0] = both.x, a[1] = both.y, a[2] = both.z, a[3] = both.w;
                }
            }
        }
    }
};

}  // namespace cuattn
