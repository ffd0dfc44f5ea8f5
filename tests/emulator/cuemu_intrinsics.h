// cuemu_intrinsics.h - CUDA's device functions for one thread: atomics, memory, bits, arithmetic.
//
// Fast-math functions (__expf, __fdividef, ...) are exactly rounded or as good as the C library's: a test
// has to allow for the GPU's documented error on its own.
// Included by cuemu.h.
#pragma once

// ---- atomics: plain, since threads never run at once ----

namespace cuemu {
template <class T, class... Allowed>
constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);
template <class T>
struct Same { using type = T; };               // not deduced from the value: atomicAdd(&a_float, 1) is fine
template <class T, class Operation>
static T exchange(T* address, Operation operation) {
    T old = *address;
    *address = operation(old);
    return old;
}
}  // namespace cuemu

#define CUEMU_ATOMIC(NAME, NEW_VALUE, ...)                                                         \
    template <class T>                                                                             \
    static T NAME(T* address, typename cuemu::Same<T>::type value) {                               \
        static_assert(cuemu::is_one_of<T, __VA_ARGS__>, "CUDA has no " #NAME " for this type");    \
        return cuemu::exchange(address, [&](T old) -> T { return NEW_VALUE; });                    \
    }
CUEMU_ATOMIC(atomicAdd, old + value, int, unsigned, unsigned long long, float, double, __half, __half2,
             __nv_bfloat16, __nv_bfloat162)
CUEMU_ATOMIC(atomicSub, old - value, int, unsigned)
CUEMU_ATOMIC(atomicMin, value < old ? value : old, int, unsigned, long long, unsigned long long)
CUEMU_ATOMIC(atomicMax, old < value ? value : old, int, unsigned, long long, unsigned long long)
CUEMU_ATOMIC(atomicAnd, old & value, int, unsigned, unsigned long long)
CUEMU_ATOMIC(atomicOr, old | value, int, unsigned, unsigned long long)
CUEMU_ATOMIC(atomicXor, old ^ value, int, unsigned, unsigned long long)
CUEMU_ATOMIC(atomicExch, value, int, unsigned, unsigned long long, float)
CUEMU_ATOMIC(atomicInc, old >= value ? 0 : old + 1, unsigned)
CUEMU_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1, unsigned)
#undef CUEMU_ATOMIC
template <class T>
static T atomicCAS(T* address, typename cuemu::Same<T>::type expected, typename cuemu::Same<T>::type value) {
    static_assert(cuemu::is_one_of<T, int, unsigned, unsigned long long, unsigned short>,
                  "CUDA has no atomicCAS for this type");
    return cuemu::exchange(address, [&](T old) { return old == expected ? value : old; });
}

// ---- loads and stores with cache hints; address spaces ----

#define CUEMU_LOAD(NAME) \
    template <class T>   \
    static T NAME(const T* address) { return *address; }
#define CUEMU_STORE(NAME) \
    template <class T>    \
    static void NAME(T* address, typename cuemu::Same<T>::type value) { *address = value; }
CUEMU_LOAD(__ldg)
CUEMU_LOAD(__ldca)
CUEMU_LOAD(__ldcg)
CUEMU_LOAD(__ldcs)
CUEMU_LOAD(__ldlu)
CUEMU_LOAD(__ldcv)
CUEMU_STORE(__stwb)
CUEMU_STORE(__stcg)
CUEMU_STORE(__stcs)
CUEMU_STORE(__stwt)
#undef CUEMU_LOAD
#undef CUEMU_STORE

namespace cuemu {
// Shared addresses are offsets, as on the GPU: from 0 for dynamic shared memory, behind it for static.
static ptrdiff_t shared_offset(const void* pointer) {   // negative: not shared
    auto* byte = static_cast<const unsigned char*>(pointer);
    if (byte >= shared_base && byte < shared_base + launch_now->shared_bytes) return byte - shared_base;
    const Bytes statics = static_shared();
    const bool is_static = byte >= statics.start && byte < statics.start + statics.count;
    return is_static ? kMaxShared + (byte - statics.start) : -1;
}
}  // namespace cuemu
static inline size_t __cvta_generic_to_shared(const void* pointer) {
    ptrdiff_t offset = cuemu::shared_offset(pointer);
    if (offset < 0) cuemu::fail("__cvta_generic_to_shared: the address is not in shared memory");
    return offset;
}
static inline void* __cvta_shared_to_generic(size_t offset) {
    if (offset < cuemu::kMaxShared) return cuemu::shared_base + offset;
    return cuemu::static_shared().start + (offset - cuemu::kMaxShared);
}

// ---- bits ----

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long reversed = 0;
    for (int i = 0; i < 64; ++i) reversed |= (x >> i & 1) << (63 - i);
    return reversed;
}
static inline unsigned __brev(unsigned x) { return __brevll(x) >> 32; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {   // bit 3 of each is ignored
    uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned picked = 0;
    for (int i = 0; i < 4; ++i) picked |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return picked;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) << (shift & 31) >> 32;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (uint64_t(high) << 32 | low) >> (shift & 31);
}
static inline int __mulhi(int a, int b) { return int64_t(a) * b >> 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
static inline long long __mul64hi(long long a, long long b) { return static_cast<__int128>(a) * b >> 64; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}

namespace cuemu {
template <class To, class From>
static To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "reinterpretation keeps the size");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
}  // namespace cuemu
static inline int __float_as_int(float x) { return cuemu::same_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return cuemu::same_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return cuemu::same_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return cuemu::same_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return cuemu::same_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return cuemu::same_bits<double>(x); }

// ---- arithmetic ----

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frsqrt_rn(float a) { return float(1.0 / sqrt(double(a))); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float a) { return a > 0 ? a < 1 ? a : 1 : 0; }   // 0 for a NaN, as on the GPU
// Macros, for these names are in the C library already: the __ ones internal, rsqrtf since C23.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __sincosf sincosf
#define rsqrtf __frsqrt_rn
static inline int __float2int_rn(float a) { return int(rintf(a)); }
static inline int __float2int_rz(float a) { return int(a); }
static inline int __float2int_rd(float a) { return int(floorf(a)); }
static inline int __float2int_ru(float a) { return int(ceilf(a)); }
static inline float __int2float_rn(int a) { return float(a); }
static inline float __uint2float_rn(unsigned a) { return float(a); }

// CUDA's own list of mixed types, no more: what is ambiguous for NVRTC is so here. As in fminf, a NaN loses.
#define CUEMU_MIN_MAX(R, A, B)                                    \
    static inline R min(A first, B second) {                      \
        R a = first, b = second;                                  \
        return b < a ? b : a;                                     \
    }                                                             \
    static inline R max(A first, B second) {                      \
        R a = first, b = second;                                  \
        return a < b ? b : a;                                     \
    }
CUEMU_MIN_MAX(int, int, int)
CUEMU_MIN_MAX(unsigned, unsigned, unsigned)
CUEMU_MIN_MAX(unsigned, int, unsigned)
CUEMU_MIN_MAX(unsigned, unsigned, int)
CUEMU_MIN_MAX(long, long, long)
CUEMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUEMU_MIN_MAX(unsigned long, long, unsigned long)
CUEMU_MIN_MAX(unsigned long, unsigned long, long)
CUEMU_MIN_MAX(long long, long long, long long)
CUEMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CUEMU_MIN_MAX(unsigned long long, long long, unsigned long long)
CUEMU_MIN_MAX(unsigned long long, unsigned long long, long long)
#undef CUEMU_MIN_MAX
#define CUEMU_MIN_MAX(R, A, B)                                     \
    static inline R min(A a, B b) { return std::fmin(static_cast<R>(a), static_cast<R>(b)); } \
    static inline R max(A a, B b) { return std::fmax(static_cast<R>(a), static_cast<R>(b)); }
CUEMU_MIN_MAX(float, float, float)
CUEMU_MIN_MAX(double, double, double)
CUEMU_MIN_MAX(double, float, double)
CUEMU_MIN_MAX(double, double, float)
#undef CUEMU_MIN_MAX
