// decode_work.cuh - how the tensor-core decode shares its work among warps, and the states that it merges.
//
// Tree     A sequence is cut into leaves of LEAF tokens, twice that where it is longer than 1024 LEAF, and so on; four
//          leaves are a split, MOST leaves a group. Its state is that of the groups merged in order, a group's that of
//          its splits, a split's that of its leaves: whoever does it. So neither the batch nor the device changes a bit.
// PieceSizes   A leaf, a split or a group that a warp does by itself, as large as the work of all sequences allows.
// Runs     All sequences lie behind each other on one line, each as long as it has tokens to read, TILE at least. The
//          line is cut into `teams` equal runs; a piece belongs to the run in which it begins. A team is a warp for each
//          share (kv head and row group) of a sequence: side by side, so all kv heads of a token are read at about the
//          same time, which memory likes.
#pragma once
#include "decode.cuh"
#include "mma.cuh"

namespace cuattn {

constexpr int TILE = 16;                 // tokens that a warp multiplies at once
constexpr int SPLIT = 4;                 // leaves of a split

struct PageBytes { int64 page, row; };   // from page to page, from token to token

// n / d for n < 2^31: n * magic >> (31 + shift), with magic = 2^(31 + shift) / d rounded up and 2^shift >= d.
struct Divider {
    int64 d, magic, shift;

    __device__ __forceinline__ unsigned divide(unsigned n) const {
        return __umulhi(2 * n, unsigned(magic)) >> unsigned(shift);
    }
};

struct Work {
    int64 batch, chunk;                  // sequences; those of a thread that adds them up
    int64 teams, slots, groups;          // slots: of the workspace; groups: that a sequence can have
    int64 stages;                        // tiles of a warp in shared memory
    int64 aligned, full;                 // whether page_size is a multiple of TILE; whether rows fill those of a tile
    int64 merge_alone;                   // blockIdx.y from there on: all warps of a block of the merge for one set of items
    L2Policy usual, first_out, last_out; // lines of L2 like any other, that go first, that go last
    Divider shares, kv_heads, page_size, groups_of_query;            // shares: of a sequence
    PageBytes k, v;
};

// Of a plain call, PLAIN, the code is short: one query, which sees all tokens; no batch index, padding, new tokens or
// rotation; page_size is a multiple of TILE, and the table is of int32.
template <bool PLAIN>
__device__ __forceinline__ Sequence sequence_of(int b, const void* lengths, const void* batch_idx, const void* leftpad,
                                                const DecodeLayout& at) {
    if (!PLAIN) return sequence_of(int64(b), lengths, batch_idx, leftpad, at);
    const int length = int(min(max(at.lengths.read(lengths, b), int64(0)), at.max_tokens));
    return {b, length, length, 0};
}

// A share of a sequence: ROWS heads at most of one query, so that all its rows see the same keys.
struct Share {
    int g, query, first_head, rows;      // row r is query head first_head + r

    __device__ __forceinline__ Share(int share, int most_rows, const Work& work, const DecodeLayout& at) {
        const int row_group = int(work.kv_heads.divide(share));
        g = share - row_group * int(work.kv_heads.d);
        query = int(work.groups_of_query.divide(row_group));
        const int before = (row_group - query * int(work.groups_of_query.d)) * most_rows;
        first_head = g * int(at.group) + before, rows = min(most_rows, int(at.group) - before);
    }
};

// The leaves of a sequence that are read: those in which a query sees a key or that have new tokens, at least one.
template <int LEAF, int MOST, bool PLAIN> struct SequenceCut {
    int shift, first, past;              // a leaf has 2^shift tokens; leaves first .. past - 1

    __device__ __forceinline__ SequenceCut(const Sequence& own, const DecodeLayout& at) {
        constexpr int LEAST = LEAF == 64 ? 6 : 7;
        static_assert(LEAF == 1 << LEAST, "64 or 128");
        shift = max(32 - __clz(max(own.length, 1) - 1) - 10, LEAST);
        past = max(((own.length - 1) >> shift) + 1, 1);
        first = 0;
        if (PLAIN) return;
        const int64 seen = min(max(own.length - at.seqlen_q - at.window_left, int64(own.first)), int64(own.past));
        first = min(int(seen) >> shift, past - 1);
    }
    // Where its place on the line begins, in tokens: pieces of any size begin at multiples of their size from there.
    __device__ __forceinline__ int origin() const { return (first & -MOST) << shift; }
    __device__ __forceinline__ int weight(const Sequence& own) const { return max(own.length - origin(), TILE); }
};

// What a team does of the line.
struct Run {
    int64 begin, end;

    // `usual`: the length of a run, rounded down; `rest`: of the line, behind that of all teams.
    __device__ __forceinline__ Run(int64 team, int64 usual, int64 rest) {
        begin = usual * team + min(team, rest), end = usual * (team + 1) + min(team + 1, rest);
    }
};

// Of a sequence what the merge has to know: its pieces are first .. past - 1, 2^shift tokens each, 2^of_group of them a
// group. `place` and slot_shift say where their states go.
struct alignas(16) ToMerge {
    int64 place;
    short first, past;                   // none if the whole sequence is one piece
    signed char shift, of_group, slot_shift, none;         // 16 bytes, all of them written

    __device__ __forceinline__ int64 slot(int piece, int b) const {
        return past == 0 ? -1 : ((place + (int64(piece) << shift)) >> slot_shift) + b;
    }
};

// How large pieces are. Every warp finds the same.
template <int LEAF, int MOST, bool PLAIN> struct PieceSizes {
    int limit, slot_shift;

    __device__ __forceinline__ explicit PieceSizes(int64 usual_run) {
        limit = int(min(usual_run, int64(1 << 26))) * 4 / 7;         // about two pieces a run, rather than many
        slot_shift = 31 - __clz(max(limit / 4, LEAF));     // what is no group is longer than a fourth of the limit
    }
    // Leaves of a piece, as a power of two. What is short enough stays whole.
    __device__ __forceinline__ int leaves(const SequenceCut<LEAF, MOST, PLAIN>& cut, int weight) const {
        constexpr int ALL_OF_IT = MOST == 16 ? 4 : 2;
        if (MOST << cut.shift <= limit || weight <= limit) return ALL_OF_IT;
        return MOST > SPLIT && SPLIT << cut.shift <= limit ? 2 : 0;
    }
    // Places: first `groups` for each sequence whose pieces are groups, then by where the others begin on the line; these
    // are at least 2^slot_shift apart, or of different sequences. See _plan_decode_mma.num_slots.
    __device__ __forceinline__ ToMerge of(const SequenceCut<LEAF, MOST, PLAIN>& cut, const Sequence& own, int64 origin,
                                          int b, const Work& work) const {
        constexpr int ALL_OF_IT = MOST == 16 ? 4 : 2;
        const int by = leaves(cut, cut.weight(own)), shift = cut.shift + by, first = cut.first >> by;
        const int last = max(own.length - 1, 0) >> shift, by_line = by < ALL_OF_IT ? slot_shift : shift;
        const int64 place = by < ALL_OF_IT ? origin - cut.origin() + (work.batch * work.groups << by_line)
                                           : b * (work.groups - 1) << by_line;
        return {place, short(first), short(last > first ? last + 1 : 0), (signed char)(shift),
                (signed char)(ALL_OF_IT - by), (signed char)(by_line), 0};
    }
};

// A merge in progress, of two rows: their largest scores and sums, ...
struct Weight {
    float max[2], sum[2];                // max -INFINITY: no keys

    __device__ __forceinline__ static Weight empty() { return {{-INFINITY, -INFINITY}, {0.f, 0.f}}; }
    __device__ __forceinline__ static Weight of(const float4& x) { return {{x.x, x.z}, {x.y, x.w}}; }
    __device__ __forceinline__ float4 packed() const { return {max[0], sum[0], max[1], sum[1]}; }
};

// ... and two features of each: x, z of the first row, y, w of the second.
struct Blend {
    float mine[2], other[2];

    // `so_far` becomes the merge of it and `more`; features follow by `of`.
    __device__ __forceinline__ Blend(Weight& so_far, const Weight& more) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float top = fmaxf(so_far.max[c], more.max[c]);
            mine[c] = exp2_fast(so_far.max[c] - shift_of(top)), other[c] = exp2_fast(more.max[c] - shift_of(top));
            so_far.max[c] = top;
            so_far.sum[c] = fmaf(more.sum[c], other[c], so_far.sum[c] * mine[c]);
        }
    }
    __device__ __forceinline__ float4 of(const float4& a, const float4& b) const {
        return {fmaf(b.x, other[0], a.x * mine[0]), fmaf(b.y, other[1], a.y * mine[1]),
                fmaf(b.z, other[0], a.z * mine[0]), fmaf(b.w, other[1], a.w * mine[1])};
    }
};

struct alignas(16) Partial {
    float4 acc;
    Weight weight;
};

// The workspace: ToMerge of each sequence, then acc (slots, shares, items, 8, pairs) and (max, sum) of two rows (slots,
// shares, columns, pairs), of float4. An item is what the lanes have of a tile of output; lane = 4 * (0 .. 7) + (0 ..
// pairs - 1), each two rows.
struct Workspace {
    ToMerge* sequences;
    float4* states;
    int64 slots, shares;
    int items, columns, pairs;

    __device__ __forceinline__ Workspace(float* start, int items, int columns, const Work& work,
                                         const DecodeLayout& at)
        : slots(work.slots), shares(work.shares.d), items(items), columns(columns) {
        sequences = reinterpret_cast<ToMerge*>(start);
        states = reinterpret_cast<float4*>(start) + work.batch;
        pairs = (int(min(at.group, int64(8))) + 1) / 2;
    }
    __device__ __forceinline__ float4* acc(int64 slot, int64 share, int item, int lane) const {
        return states + ((slot * shares + share) * items + item) * 8 * pairs + lane / 4 * pairs + lane % 4;
    }
    __device__ __forceinline__ float4* max_and_sum(int64 slot, int64 share, int column, int lane) const {
        return acc(slots, 0, 0, 0) + ((slot * shares + share) * columns + column) * pairs + lane % 4;
    }
    __device__ __forceinline__ int64 acc_step() const { return shares * items * 8 * pairs; }          // of a slot
    __device__ __forceinline__ int64 max_and_sum_step() const { return shares * columns * pairs; }
};

// Divides by the sum, leaves base 2, adds the sink and stores two features of row c; with lse not nullptr that too.
// `raise`: what was added to every exponent.
template <typename T>
__device__ __forceinline__ void store_row(const Partial& part, int c, float raise, float value_scale, float sink,
                                          T* first, T* second, float* lse) {
    const float top = part.weight.max[c], sum = part.weight.sum[c], scale = sum == 0.f ? 0.f : value_scale / sum;
    float x[2] = {c ? part.acc.y : part.acc.x, c ? part.acc.w : part.acc.z};
    float l = sum == 0.f ? -INFINITY : fmaf(top, LN2, logf(sum) - raise * LN2);
#pragma unroll
    for (int e = 0; e < 2; ++e) x[e] = sum == 0.f ? 0.f : __fmul_rn(x[e] + 0.f, scale);                // -0 as 0
    if (sink != -INFINITY) {
        State<2> state = State<2>::empty(fmaxf(l, sink));
        const float nothing[2] = {0.f, 0.f};
        state.add(l, x);
        state.add(sink, nothing);
        state.finish(l, x);
    }
    if (first != nullptr) from_float(first, x[0]);
    if (second != nullptr) from_float(second, x[1]);
    if (lse != nullptr) *lse = l;
}

}  // namespace cuattn
