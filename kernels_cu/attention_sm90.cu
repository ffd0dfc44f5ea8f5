// attention_sm90.cu - attention of many queries on Hopper, for 16-bit arrays: dense, packed or in pages.
//
// What     As attention.cu, without softcap, slopes and mask.
// Shapes   as in attention.cu, but T is float16 or bfloat16 and so are keys and values; head_dim and head_dim_v up to DIM;
//          q, k and v come as tensor maps of (batch, sequence, heads, features), packed ones with a batch of 1, pages as
//          (num_pages, page_size, ...), read in boxes of 2^box_shift tokens
// Work     a block takes tiles of ROWS queries of a head until none are left: the next one that `next_item` (0 before) says,
//          or, without that counter, of every two rounds the first and the last. Of a sequence those that see most keys come
//          first. Two warps of the first warpgroup ask for tiles of keys and of values by tensor copies, STAGES of them ahead;
//          each of the other warpgroups has 64 queries. A tile that needs a mask is multiplied on its own. Of those that need
//          none the scores are under way together with the values of the one before; what is left of a warpgroup's time, its
//          softmax, lies beside the products of another one.
// Memory   bound by arithmetic: 4 ROWS KEYS DIM operations for the KEYS rows of K and V that a tile loads.
// Bits     of a row depend on its own sequence, and not on the rows that share its tile, unless it sees an infinite value whose
//          weight rounds to 0: that gives NaN, or the infinity where the tile was masked. Weights are rounded to T.
// Compile  T, DIM (64, 96, 128, 192 or 256), KEYS (80, 112, 128 or 160), CONSUMERS (2 or 3); everything else is a runtime value.
// Source   FlashAttention-3 (Shah et al. 2024)
// Oracle   reference/attention_varlen.py
#include "attention.cuh"
#include "hopper.cuh"
#include "mma.cuh"

using namespace cuattn;
using T = CUATTN_T;                      // __half or __nv_bfloat16
constexpr int DIM = CUATTN_DIM, KEYS = CUATTN_KEYS, STAGES = 2;
constexpr int CONSUMERS = CUATTN_CONSUMERS;                // warpgroups that multiply, 64 rows each: as many as registers hold
constexpr int WARPS = 4, GROUP = 32 * WARPS, THREADS = GROUP * (CONSUMERS + 1), ROWS = 64 * CONSUMERS;
constexpr int PANELS = (DIM + 63) / 64, HEIGHT = KEYS * 128;         // bytes of a panel of keys
constexpr float SLACK = 4.f;                               // by how much a score may exceed `top`
// Weights are up to 2^(RAISE + SLACK): half, which is coarse below 2^-14, has room above 1; of bfloat16 values near the largest
// float must not overflow.
constexpr float RAISE = IS_HALF<T> ? 8.f : -SLACK;
// Registers of a thread: of all together no more than the block had at its start, or it would wait for them for ever.
constexpr bool WIDE = DIM > 192 || KEYS > 128;             // more addresses, and room for them
constexpr int OF_PRODUCER = CONSUMERS == 3 ? 32 : WIDE ? 56 : 40;
constexpr int OF_CONSUMER = CONSUMERS == 3 ? 160 : WIDE ? 224 : 232;
static_assert(OF_PRODUCER + CONSUMERS * OF_CONSUMER <= 65536 / THREADS / 8 * 8 * (CONSUMERS + 1));
// Named barriers: of all that multiply; of the two warps that ask for tiles; OF_GROUP + warpgroup.
constexpr int TOGETHER = 1, ASKERS = 2, OF_GROUP = 3;

// What the first warpgroup tells the others: of a tile of rows, and of a tile of keys.
struct Item {
    RowTile rows;
    int head;                            // -1: there are no more
    bool keys;                           // whether some are seen
    float scale, value_scale, sink;      // of products, in base 2; of the result
    int odd_first, odd_last;             // between which keys `clean_values` found infinities and NaN

    // Keys that row r sees, also one behind the last.
    __device__ __forceinline__ Keys seen_by(int r, const AttentionLayout& at) const {
        const int64 position = int64(rows.first) + r + rows.own.length_k - rows.own.length_q, length = rows.own.length_k;
        return {int(min(max(position - at.window_left, int64(0)), length)), int(min(max(position + at.window_right + 1, int64(0)), length))};
    }
};
enum Next { NONE, MASKED, PLAIN };       // what comes behind a tile of keys: nothing, one that needs a mask, one that needs none
struct alignas(16) Tile {
    int start, count;
    unsigned missing;                    // a bit for each box whose page does not exist
    short masked, next;

    // Read by lane 0, which gives it back.
    __device__ __forceinline__ Tile told_by_lane_0(int lane) const {
        int4 x = {0, 0, 0, 0};
        if (lane == 0) x = *reinterpret_cast<const int4*>(this);
        x = {__shfl_sync(ALL, x.x, 0), __shfl_sync(ALL, x.y, 0), __shfl_sync(ALL, x.z, 0), __shfl_sync(ALL, x.w, 0)};
        return *reinterpret_cast<const Tile*>(&x);
    }
};

// full: it has come; empty: it has been used. Products end for a warpgroup, so a thread speaks for the values; what its threads
// read by themselves, items and tiles, and what comes with it, each warp gives back.
struct alignas(1024) Shared {
    T value[STAGES][PANELS][KEYS * 64], key[STAGES][PANELS][KEYS * 64], query[PANELS][ROWS * 64];
    Barrier key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES], query_full, query_empty;
    Item item[2];
    Tile tile[STAGES];
    int2 box[2][KEYS / 8];               // where the boxes of a tile lie: page, and first token in it; of keys and of values
    unsigned following[2];               // items, of this round and the one before
};
static_assert(sizeof(Shared) <= CUATTN_SHARED, "what cuattn/_plan_attention.py asks for");

// Chunk c, 16 bytes, of row r of panels of `height` bytes.
__device__ __forceinline__ char* chunk_at(T* panels, int height, int r, int c) {
    return reinterpret_cast<char*>(panels) + c / 8 * height + r * 128 + (c % 8 ^ r % 8) * 16;
}

// S = Q K^T: 64 queries, KEYS keys.
__device__ __forceinline__ void scores(float (&s)[KEYS / 2], const T* query, const T* key) {
    const unsigned a = matrix_at(query, 16), b = matrix_at(key, 16);
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int panel = step / 4, inside = step % 4 * 32;
        product(s, a + (panel * ROWS * 128 + inside) / 16, b + (panel * HEIGHT + inside) / 16, step > 0, T());
    }
}
// O += P V.
__device__ __forceinline__ void add_values(float (&o)[DIM / 2], const unsigned (&p)[KEYS / 16][4], const T* value) {
    const unsigned b = matrix_at(value, HEIGHT);
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) product(o, p[step], b + step * 2048 / 16, T());
}

// The softmax so far of a thread's two rows, l / 4 and l / 4 + 8 of its warp: i / 2 % 2 is the row of register i.
struct Softmax {
    float top[2], sum[2], rescale[2];
    float factor;                        // weights are exp2(S factor - top factor + RAISE)

    // Scores become weights. `top` stays where it is until a score exceeds it by SLACK, so most tiles leave O as it is.
    __device__ __forceinline__ void weigh(float (&s)[KEYS / 2]) {
        float highest[2][2] = {{top[0], s[1]}, {top[1], s[3]}}, shift[2], more[2][2] = {};
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            if (i != 1 && i != 3) highest[i / 2 % 2][i % 2] = fmaxf(highest[i / 2 % 2][i % 2], s[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = fmaxf(highest[r][0], highest[r][1]);
            most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
            if ((most - top[r]) * factor <= SLACK) most = top[r];
            shift[r] = -__fmul_rn(shift_of(most), factor);
            rescale[r] = exp2_fast(__fmul_rn(top[r], factor) + shift[r]);           // 1 if it stays, to the bit
            top[r] = most, shift[r] += RAISE;
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            s[i] = exp2_fast(fmaf(s[i], factor, shift[i / 2 % 2]));
            more[i / 2 % 2][i % 2] += s[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], rescale[r], more[r][0] + more[r][1]);
    }
    // O, or what of it there is, after `weigh`.
    __device__ __forceinline__ void shrink(float (&o)[DIM / 2]) const {
        if (!__any_sync(ALL, rescale[0] != 1.f || rescale[1] != 1.f)) return;
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] *= rescale[i / 2 % 2];
    }
};

// Scores of keys that a row does not see become -inf; those of others change their sign if the factor is negative.
__device__ __forceinline__ void mask(float (&s)[KEYS / 2], const Tile& tile, const Item& item, int first_row, const AttentionLayout& at) {
    const int shift = threadIdx.x % 4 * 2;
    if (!(item.scale > 0.f)) {
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) s[i] *= item.scale;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Keys seen = item.seen_by(first_row + 8 * r, at);
        const int begin = seen.begin - tile.start - shift;
        const unsigned count = max(seen.end - seen.begin, 0);
#pragma unroll
        for (int i = 2 * r; i < KEYS / 2; i += i % 2 ? 3 : 1) {
            if (unsigned(i / 4 * 8 + i % 2 - begin) >= count) s[i] = -INFINITY;
        }
    }
    if (tile.missing == 0) return;
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        if (tile.missing >> (i / 4 * 8 >> at.box_shift) & 1) s[i] = -INFINITY;           // boxes are of whole eights
    }
}

__device__ __forceinline__ void pack(unsigned (&p)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) p[i / 4][i % 4] = pair_of(s[2 * i], s[2 * i + 1], T());
}

// Values that some rows don't see may be infinite or NaN, and 0 times that is NaN. They become 0, as those behind the sequence
// do, and `add_odd_values` gives them to the rows that do see them. A warpgroup looks at all values by itself, so that it need
// not wait for the others. If there is something to do they all say so, and share it.
__device__ __forceinline__ void clean_values(T* values, const Tile& tile, Item& item, int w, const AttentionLayout& at) {
    // The exponent of an odd one is all ones: 1 more reaches the sign.
    constexpr unsigned EXPONENTS = IS_HALF<T> ? 0x7c007c00 : 0x7f807f80, ONES = IS_HALF<T> ? 0x04000400 : 0x00800080;
    const auto reach = [](unsigned pair) { return (pair & EXPONENTS) + ONES; };
    constexpr int ROUNDS = KEYS / 16;                      // eight threads a row of a panel
    const int t = threadIdx.x % GROUP;
    const char* const mine = chunk_at(values, HEIGHT, t / 8, t % 8);
    unsigned odd = 0;
#pragma unroll 8
    for (int n = 0; n < PANELS * ROUNDS; ++n) {
        const uint4 x = *reinterpret_cast<const uint4*>(mine + n / ROUNDS * HEIGHT + n % ROUNDS * 16 * 128);
        odd |= reach(x.x) | reach(x.y) | reach(x.z) | reach(x.w);
    }
    if (!any_of(OF_GROUP + w, GROUP, odd & 0x80008000) && tile.count == KEYS) return;
    constexpr int THERE = CONSUMERS * GROUP;
    const int first = item.rows.seen_by_some(at).begin;    // what lies before it no row sees
    meet(TOGETHER, THERE);                                 // all have looked
#pragma unroll 1
    for (int n = threadIdx.x - GROUP; n < KEYS * PANELS * 8; n += THERE) {
        const int j = n / (PANELS * 8);
        uint4* const chunk = reinterpret_cast<uint4*>(chunk_at(values, HEIGHT, j, n % (PANELS * 8)));
        uint4 x = *chunk;
        T* const some = reinterpret_cast<T*>(&x);
        bool found = false;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (j >= tile.count) some[e] = T(0.f);
            else if (is_odd(some[e])) some[e] = T(0.f), found = true;
        }
        if (found && tile.start + j >= first) atomicMin(&item.odd_first, tile.start + j), atomicMax(&item.odd_last, tile.start + j);
        *chunk = x;
    }
    writes_are_for_products();
    meet(TOGETHER, THERE);
}
// Adds those that a row sees to its result. By the warpgroup of 64 rows from `first_row` on, after it stored them.
__device__ __forceinline__ void add_odd_values(const Item& item, int first_row, const T* v, const void* table, T* out,
                                               const AttentionLayout& at) {
    const SequenceRows& own = item.rows.own;
    const int rows = min(item.rows.count - first_row, 64), dim = int(at.head_dim_v);
    // Tiles that all rows see were not cleaned, unless pages may be missing or the factor is not positive: they are passed over.
    Keys plain = item.rows.seen_by_all(at);
    plain = {(plain.begin + KEYS - 1) / KEYS * KEYS, plain.end / KEYS * KEYS};
    const bool passes = !at.page_size && item.scale > 0.f && plain.begin < plain.end;
#pragma unroll 1
    for (int n = threadIdx.x % GROUP; n < rows * dim; n += GROUP) {
        const int row = first_row + n / dim, d = n % dim;
        const Keys seen = item.seen_by(row, at);
        float sum = 0.f;
#pragma unroll 1
        for (int j = max(seen.begin, item.odd_first); j < min(seen.end, item.odd_last + 1); ++j) {
            if (passes && j >= plain.begin && j < plain.end) j = plain.end;
            if (j >= seen.end || j > item.odd_last) break;
            const Slot place = place_of(own, j, table, at);
            const float value = place.valid ? to_float(v[at.v.at(place, unsigned(item.head) / unsigned(at.group)) + d]) : 0.f;
            if (is_odd(value)) sum += value * item.value_scale;
        }
        T& result = out[at.out.at(own.b, own.first_q + item.rows.first + row, item.head) + d];
        if (is_odd(sum)) result = T(to_float(result) + sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
cuattn_attention_sm90(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,
                      const __grid_constant__ TensorMap values, unsigned* next_item, const T* v, const void* cu_q, const void* cu_k,
                      const void* used_k, const void* table, const float* sinks, const float* k_scale, const float* v_scale,
                      float sm_scale, float softcap, float k_factor, float v_factor, T* out, float* lse,
                      const __grid_constant__ AttentionLayout at) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int n = 0; n < STAGES; ++n) {
            shared.key_full[n].init(1), shared.value_full[n].init(1);
            shared.key_empty[n].init(CONSUMERS * WARPS), shared.value_empty[n].init(CONSUMERS);
        }
        shared.query_full.init(1), shared.query_empty.init(CONSUMERS * WARPS);
        barriers_are_ready();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(ALL, int(threadIdx.x), 0) / GROUP, lane = threadIdx.x % 32;
    int stage = 0;

    // 1. Who takes items of work, a tile of rows each, and asks for what they need: a warp for queries and keys, one for values.
    if (warpgroup == 0) {
        fewer_registers<OF_PRODUCER>();
        if (threadIdx.x >= 64) return;
        const bool of_values = __shfl_sync(ALL, int(threadIdx.x), 0) / 32;
        const long long stays = 0x14F0ll << 48, goes = 0x12F0ll << 48;     // in L2: other tiles of rows want the same keys
        const unsigned heads = unsigned(at.heads), tiles_of_rows = unsigned(at.tiles), section = unsigned(at.section);
        const unsigned items = heads * tiles_of_rows;
        const int box = 1 << at.box_shift;
        int2* const places = shared.box[of_values];
        int parity = 1, query_parity = 1, slot = 0, item_slot = 0;
        const auto next_of = [&](unsigned following) {
            if (!of_values && lane == 0) shared.following[slot] = following;
            meet(ASKERS, 64);
            slot ^= 1;
            return shared.following[slot ^ 1];
        };
        for (unsigned n = blockIdx.x, following; n < items; n = next_of(following)) {
            // The next one is asked for early. Without a counter rounds go to and fro.
            if (!of_values && lane == 0) {
                following = next_item != nullptr ? gridDim.x + atomicAdd(next_item, 1) : (n / gridDim.x + 1) * 2 * gridDim.x - 1 - n;
            }
            // As many heads at a time as L2 holds the keys and values of; of these the last rows first: they see most keys.
            const unsigned first = n / (section * tiles_of_rows) * section, inside = n - first * tiles_of_rows;
            const unsigned wide = min(section, heads - first);
            const RowTile rows = RowTile::of(tiles_of_rows - 1 - inside / wide, ROWS, 1, cu_q, cu_k, used_k, at);
            if (rows.count < 1) continue;
            const int h = int(first + inside % wide), g = unsigned(h) / unsigned(at.group), batch = at.cu_q.bytes ? 0 : rows.own.b;
            const float scale = sm_scale * Scales{k_scale, k_factor, at.k_scale}.of(g) * LOG2E;
            // A factor that is not positive is left to the code for masked tiles.
            DenseTiles<KEYS> tiles(rows, !(scale > 0.f), at);
            KeyTile tile, next;
            // Keys in pages come in boxes, each of one page: lane n knows where box n lies. From page -1, outside, zeros come.
            const auto boxes_of = [&](const KeyTile& some) { return (some.count + box - 1) >> at.box_shift; };
            const auto find = [&](const KeyTile& some) {
                if (!at.page_size || lane >= boxes_of(some)) return int2{0, 0};
                const Slot place = place_of(rows.own, some.start + lane * box, table, at);
                return int2{place.valid ? int(place.page) : -1, int(place.offset)};
            };
            bool more = tiles.get(next), first_tile = true;
            int2 place = more ? find(next) : int2{0, 0};
            unsigned missing = __ballot_sync(ALL, place.x < 0);
            const auto publish = [&]() {
                shared.query_empty.wait(query_parity), query_parity ^= 1;
                if (lane == 0) {
                    const int row = rows.own.first_q + rows.first;
                    shared.item[item_slot] = {rows, h, more, scale, Scales{v_scale, v_factor, at.v_scale}.of(g), sink_of(sinks, h, at), 0x7fffffff, -1};
                    shared.query_full.arrive_expecting(more ? ROWS * PANELS * 128 : 0);
#pragma unroll 1
                    for (int p = 0; more && p < PANELS; ++p) copy_box(shared.query[p], queries, shared.query_full, p * 64, row, h, batch, goes);
                }
                item_slot ^= 1;
            };
            if (!more && !of_values) publish();
            while (more) {
                tile = next;
                Tile told{tile.start, tile.count, missing, short(tile.masked || missing), NONE};
                if (at.page_size) {
                    __syncwarp();
                    if (lane < KEYS / 8) places[lane] = place;
                    __syncwarp();
                }
                const bool others = tiles.get(next);
                if (others) {
                    place = find(next);
                    missing = __ballot_sync(ALL, place.x < 0);
                    told.next = next.masked || missing ? MASKED : PLAIN;
                }
                const auto copy = [&](T (&to)[PANELS][KEYS * 64], const TensorMap& map, Barrier& barrier) {
                    if (!is_elected()) return;
                    const int boxes = boxes_of(tile);
                    barrier.arrive_expecting((at.page_size ? boxes << at.box_shift : KEYS) * PANELS * 128);
                    if (!at.page_size) {
                        const int from = int(rows.own.first_k) + tile.start;
#pragma unroll 1
                        for (int p = 0; p < PANELS; ++p) copy_box(to[p], map, barrier, p * 64, from, g, batch, stays);
                        return;
                    }
#pragma unroll (DIM > 128 ? 1 : 2)
                    for (int n = 0; n < boxes; ++n) {
                        const int2 place = places[n];
#pragma unroll
                        for (int p = 0; p < PANELS; ++p) copy_box(to[p] + n * box * 64, map, barrier, p * 64, place.y, g, place.x, stays);
                    }
                };
                if (of_values) {
                    shared.value_empty[stage].wait(parity);
                    copy(shared.value[stage], values, shared.value_full[stage]);
                } else {
                    shared.key_empty[stage].wait(parity);
                    if (is_elected()) shared.tile[stage] = told;
                    copy(shared.key[stage], keys, shared.key_full[stage]);
                    if (first_tile) publish(), first_tile = false;
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
                more = others;
            }
        }
        if (of_values) return;
        shared.query_empty.wait(query_parity);
        if (lane == 0) shared.item[item_slot].head = -1, shared.query_full.arrive();
        return;
    }

    // 2. Who multiplies: 64 queries each.
    more_registers<OF_CONSUMER>();
    const int w = warpgroup - 1, t = threadIdx.x % GROUP;
    const T* const query = shared.query[0] + w * 64 * 64;
    const int first_row = w * 64 + t / 32 * 16 + lane / 4;
    int parity = 0;
    for (int slot = 0;; slot ^= 1) {
        shared.query_full.wait(slot);
        Item& item = shared.item[slot];
        if (item.head < 0) break;
        float o[DIM / 2], s[KEYS / 2];
        unsigned p[KEYS / 16][4];
        Softmax softmax{{-INFINITY, -INFINITY}, {0.f, 0.f}, {0.f, 0.f}, item.scale > 0.f ? item.scale : 1.f};
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] = 0.f;
        int next = item.keys ? MASKED : NONE;
        if (next == NONE) shared.query_empty.arrive_as_warp(lane);
        while (next != NONE) {
            // 2a. A tile on its own, up to its weights.
            shared.key_full[stage].wait(parity);
            const Tile tile = shared.tile[stage].told_by_lane_0(lane);
            registers_are_for_products();
            scores(s, query, shared.key[stage][0]);
            end_of_products();
            if (tile.masked) {
                shared.value_full[stage].wait(parity);
                clean_values(shared.value[stage][0], tile, item, w, at);
            }
            wait_for_products<0>();
            shared.key_empty[stage].arrive_as_warp(lane);
            if (tile.masked) mask(s, tile, item, first_row, at);
            softmax.weigh(s);
            softmax.shrink(o);
            pack(p, s);
            // 2b. Tiles that need no mask: their scores together with the values of the one before.
            next = tile.next;
            int before = stage, parity_before = parity;
            if (++stage == STAGES) stage = 0, parity ^= 1;
            bool ready = false;
            while (next == PLAIN) {
                if (!ready) shared.key_full[stage].wait(parity), shared.value_full[before].wait(parity_before);
                registers_are_for_products();
                scores(s, query, shared.key[stage][0]);
                end_of_products();
                add_values(o, p, shared.value[before][0]);
                end_of_products();
                next = __shfl_sync(ALL, lane == 0 ? shared.tile[stage].next : 0, 0);
                wait_for_products<1>();
                shared.key_empty[stage].arrive_as_warp(lane);
                softmax.weigh(s);
                wait_for_products<0>();
                if (t == 0) shared.value_empty[before].arrive();
                before = stage, parity_before = parity;
                if (++stage == STAGES) stage = 0, parity ^= 1;
                ready = shared.key_full[stage].is_over(parity) && shared.value_full[before].is_over(parity_before);
                pack(p, s);
                softmax.shrink(o);
            }
            // 2c. The values of the last of them.
            if (next == NONE) shared.query_empty.arrive_as_warp(lane);
            shared.value_full[before].wait(parity_before);
            registers_are_for_products();
            add_values(o, p, shared.value[before][0]);
            end_of_products();
            wait_for_products<0>();
            if (t == 0) shared.value_empty[before].arrive();
        }

        // 3. The end of each row.
        const int count = item.rows.count, batch = item.rows.own.b, head = item.head;
        const int64 query = item.rows.own.first_q + item.rows.first + first_row;
        const bool vectors = (reinterpret_cast<size_t>(out) | 2 * (at.out.b | at.out.i | at.out.h)) % 16 == 0;
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float total = softmax.sum[r];
            total += __shfl_xor_sync(ALL, total, 1);
            total += __shfl_xor_sync(ALL, total, 2);
            const float top = softmax.top[r] == -INFINITY ? -INFINITY : __fmul_rn(softmax.top[r], softmax.factor) - RAISE;
            const Ending ending(top, total, item.value_scale, item.sink);
            factor[r] = ending.factor;
            if (lane % 4 == 0 && first_row + 8 * r < count && lse != nullptr) lse[at.lse.at(batch, query + 8 * r, head)] = ending.lse;
        }
        // Lane l of four has columns 2 l, 2 l + 1 of each 8; after a transposition it has all 8 of every fourth.
        T* const to = out + at.out.at(batch, query, head) + lane % 4 * 8;
        const bool there[2] = {first_row < count, first_row + 8 < count};
#pragma unroll
        for (int c = 0; c < DIM / 32; ++c) {
            unsigned x[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = i / 4, from = (4 * c + i % 4) * 4 + 2 * r;
                x[r][i % 4] = pair_of(fmaf(o[from], factor[r], 0.f), fmaf(o[from + 1], factor[r], 0.f), T());
            }
            transpose_of_four(x[0], lane), transpose_of_four(x[1], lane);
            const bool inside = c * 32 + lane % 4 * 8 < at.head_dim_v;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                T* const chunk = to + 8 * r * at.out.i + c * 32;
                if (!inside || !there[r]) continue;
                if (vectors) {
                    *reinterpret_cast<uint4*>(chunk) = {x[r][0], x[r][1], x[r][2], x[r][3]};
                } else {
#pragma unroll 1
                    for (int e = 0; e < 4; ++e) {
                        const unsigned pair = e == 0 ? x[r][0] : e == 1 ? x[r][1] : e == 2 ? x[r][2] : x[r][3];
                        chunk[2 * e] = reinterpret_cast<const T*>(&pair)[0], chunk[2 * e + 1] = reinterpret_cast<const T*>(&pair)[1];
                    }
                }
            }
        }
        if (item.odd_last >= 0) {
            meet(OF_GROUP + w, GROUP);
            add_odd_values(item, w * 64, v, table, out, at);
        }
    }
}
