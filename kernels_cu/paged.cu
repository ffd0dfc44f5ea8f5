// paged.cu - write tokens to slots of a paged cache, read them back, copy pages.
//
// What     append_kv   pages[slot[i]] = k[i]; in a float8 cache k[i] / scale, rounded to nearest, saturated to +-448;
//                      with cos and sin, k[i] is rotated by its position before.
//          gather_kv   k[i] = pages[slot[i]]; out of a float8 cache times scale; 0 where the slot names nothing.
//          copy_pages  to[target[i]] = from[source[i]], a whole page at a time.
//          K and V in one launch. What an index out of range would have written is left as it was.
// Shapes   k, v (num_tokens, num_kv_heads, head_dim or head_dim_v) T        slot, position (num_tokens) i32 or i64
//          pages (num_pages, page_size, num_kv_heads, head_dim or head_dim_v) T or float8    scale (1 or heads) f32
//          cos, sin (max_positions, rotary_dim / 2) T or f32                source, target (num_pairs) i32 or i64
//          all with strides of their own; the last axis of every floating array is contiguous
// Work     one thread per vector of a token, for K and for V: both loads are under way before either is stored.
//          threadIdx.y and blockIdx.x: the token; threadIdx.x and blockIdx.y: the vector, within a head, or within all
//          heads of a token where they lie one behind another.
// Memory   bound by reading and writing every vector once: 2 * tokens * heads * (head_dim + head_dim_v) * itemsize.
// Bits     Copies are exact. A quotient by the scale is rounded to float32 and then to float8. A rotation is two products
//          and a sum in float32, each rounded, and then rounded to what is stored.
// Compile  T, VEC, CONVERT. CONVERT = 0 moves words: T is uint4, uint1, ushort1 or uchar1, a "head_dim" counts words.
//          CONVERT = 1: T is __half, __nv_bfloat16 or float; append rotates or stores float8, gather reads float8.
// Source   reshape_and_cache of vLLM; rotary after Su et al. 2021, its two orders of features after flash-attn
// Oracle   reference/paged.py
#include "paged_kv.cuh"
#include "rotary.cuh"

using namespace cuattn;
using T = CUATTN_T;
using Fp8 = __nv_fp8_e4m3;
constexpr int VEC = CUATTN_VEC;          // elements of a thread: 16 bytes where size and alignment allow
#if CUATTN_CONVERT
using Stored = Fp8;                      // what gather reads and copy_pages copies
#else
using Stored = T;
#endif
constexpr int THREADS = 128;

struct Row { int64 vectors, run; };      // of one token; of what is contiguous in it: a head, or all of them
struct TokenSide { Row row; TokenStrides tokens; PageStrides pages; int64 scale_step; };
struct PageSide { Row row; PageStrides from, to; };
struct AppendLayout {
    int64 tokens;
    PageSizes sizes;
    Indices slots;
    TokenSide k, v;
    int64 to_float8;
    Rotary rotary;
    Indices positions;                   // of the rotation
};
struct GatherLayout { int64 tokens; PageSizes sizes; Indices slots; TokenSide k, v; };
struct CopyLayout { int64 tokens, from_pages, to_pages, page_size; Indices source, target; PageSide k, v; };

__device__ __forceinline__ int64 my_token() { return int64(blockIdx.x) * blockDim.y + threadIdx.y; }
__device__ __forceinline__ unsigned my_vector() { return blockIdx.y * blockDim.x + threadIdx.x; }
__device__ __forceinline__ bool have(const Row& row) { return my_vector() < unsigned(row.vectors); }

struct Place { unsigned head; int d; };  // of my vector: its head, and its first element there (rows have below 2^22)

__device__ __forceinline__ Place place_in(const Row& row) {
    const unsigned n = my_vector();
    if (row.run == row.vectors) return {0, int(n) * VEC};
    const unsigned head = n / unsigned(row.run);
    return {head, int(n - head * unsigned(row.run)) * VEC};
}

#if CUATTN_CONVERT
template <typename X> __device__ __forceinline__ void store_as(const float (&x)[VEC], void* pages, int64 at) {
    Packed<X, VEC> packed;
    packed.pack(x);
    packed.store(static_cast<X*>(pages) + at);
}

__device__ __forceinline__ void store_float8(float (&x)[VEC], void* pages, int64 at, float scale) {
    const Divisor by(scale);
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[j] = by.divide(x[j]);
    store_as<Fp8>(x, pages, at);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_append_kv(const T* k, const T* v, void* k_pages, void* v_pages, const void* slots, const float* k_scale,
                 const float* v_scale, float k_factor, float v_factor, const void* cos, const void* sin,
                 const void* positions, const __grid_constant__ AppendLayout at) {
    // 1. My vectors of K and of V.
    const int64 i = my_token();
    if (i >= at.tokens) return;
    const bool have_k = have(at.k.row), have_v = have(at.v.row);
    const Place pk = place_in(at.k.row), pv = place_in(at.v.row);
    const T* k_row = k + at.k.tokens.at(i, pk.head);
    Packed<T, VEC> xk, xv;
    if (have_k) xk.load(k_row + pk.d);
    if (have_v) xv.load(v + at.v.tokens.at(i, pv.head) + pv.d);
    // 2. Where they go, if anywhere.
    const Slot slot = at.sizes.locate(at.slots.read(slots, i));
    if (!slot.valid) return;
    const int64 k_at = at.k.pages.at(slot, pk.head) + pk.d, v_at = at.v.pages.at(slot, pv.head) + pv.d;
#if CUATTN_CONVERT
    // 3. Rotate K, divide by the scales, store.
    const int64 position = at.rotary.half ? at.positions.read(positions, i) : 0;
    if (at.rotary.half && !at.rotary.has(position)) return;
    float x[VEC];
    if (have_k) {
        xk.unpack(x);
        if (pk.d < 2 * at.rotary.half) rotate(x, k_row, pk.d, at.rotary.at(position, cos, sin));
        if (at.to_float8) store_float8(x, k_pages, k_at, Scales{k_scale, k_factor, at.k.scale_step}.of(pk.head));
        else store_as<T>(x, k_pages, k_at);
    }
    if (have_v && at.to_float8) {
        xv.unpack(x);
        store_float8(x, v_pages, v_at, Scales{v_scale, v_factor, at.v.scale_step}.of(pv.head));
    } else if (have_v) {
        xv.store(static_cast<T*>(v_pages) + v_at);
    }
#else
    // 3. Store.
    if (have_k) xk.store(static_cast<T*>(k_pages) + k_at);
    if (have_v) xv.store(static_cast<T*>(v_pages) + v_at);
#endif
}

// A vector that was read becomes tokens: as it is, or times the scale.
__device__ __forceinline__ void store_token(const Packed<Stored, VEC>& packed, T* to, float scale) {
#if CUATTN_CONVERT
    float x[VEC];
    packed.unpack(x);
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[j] = __fmul_rn(x[j], scale);
    Packed<T, VEC> scaled;
    scaled.pack(x);
    scaled.store(to);
#else
    packed.store(to);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_gather_kv(const Stored* k_pages, const Stored* v_pages, T* k, T* v, const void* slots, const float* k_scale,
                 const float* v_scale, float k_factor, float v_factor, const __grid_constant__ GatherLayout at) {
    const int64 i = my_token();
    if (i >= at.tokens) return;
    const bool have_k = have(at.k.row), have_v = have(at.v.row);
    const Place pk = place_in(at.k.row), pv = place_in(at.v.row);
    const Slot slot = at.sizes.locate(at.slots.read(slots, i));
    Packed<Stored, VEC> xk{}, xv{};      // zeros
    float sk = 0.f, sv = 0.f;
    if (slot.valid) {
        if (have_k) xk.load(k_pages + at.k.pages.at(slot, pk.head) + pk.d);
        if (have_v) xv.load(v_pages + at.v.pages.at(slot, pv.head) + pv.d);
        if (have_k) sk = Scales{k_scale, k_factor, at.k.scale_step}.of(pk.head);
        if (have_v) sv = Scales{v_scale, v_factor, at.v.scale_step}.of(pv.head);
    }
    if (have_k) store_token(xk, k + at.k.tokens.at(i, pk.head) + pk.d, sk);
    if (have_v) store_token(xv, v + at.v.tokens.at(i, pv.head) + pv.d, sv);
}

// Token i of the call is offset i % page_size of pair i / page_size.
extern "C" __global__ void __launch_bounds__(THREADS)
cuattn_copy_pages(const Stored* k_from, const Stored* v_from, Stored* k_to, Stored* v_to, const void* source,
                  const void* target, const __grid_constant__ CopyLayout at) {
    const int64 i = my_token();
    if (i >= at.tokens) return;
    const int64 pair = divide_below(i, at.page_size, at.tokens), offset = i - pair * at.page_size;
    const Slot from{at.source.read(source, pair), offset, true}, to{at.target.read(target, pair), offset, true};
    if (!names_one_of(from.page, at.from_pages) || !names_one_of(to.page, at.to_pages)) return;
    const bool have_k = have(at.k.row), have_v = have(at.v.row);
    const Place pk = place_in(at.k.row), pv = place_in(at.v.row);
    Packed<Stored, VEC> xk, xv;
    if (have_k) xk.load(k_from + at.k.from.at(from, pk.head) + pk.d);
    if (have_v) xv.load(v_from + at.v.from.at(from, pv.head) + pv.d);
    if (have_k) xk.store(k_to + at.k.to.at(to, pk.head) + pk.d);
    if (have_v) xv.store(v_to + at.v.to.at(to, pv.head) + pv.d);
}
