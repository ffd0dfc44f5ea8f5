// cuemu_warp.h - barriers, and the exchanges between the lanes of a warp.
//
// They follow the programming guide where it defines a result. Where it says "undefined", the lane gets
// poison or the launch fails: each place says which.
// Included by cuemu.h.
#pragma once

// ---- barriers and fences ----

static inline void __syncthreads(cuemu::Site site = cuemu::here()) {
    cuemu::block_barrier("__syncthreads", site);
}
static inline int __syncthreads_count(int predicate, cuemu::Site site = cuemu::here()) {
    cuemu::block_barrier("__syncthreads_count", site, predicate);
    return cuemu::barrier.last_nonzero;
}
static inline int __syncthreads_and(int predicate, cuemu::Site site = cuemu::here()) {
    cuemu::block_barrier("__syncthreads_and", site, predicate);
    return cuemu::barrier.last_nonzero == cuemu::barrier.last_arrived;
}
static inline int __syncthreads_or(int predicate, cuemu::Site site = cuemu::here()) {
    cuemu::block_barrier("__syncthreads_or", site, predicate);
    return cuemu::barrier.last_nonzero != 0;
}
static inline void __syncwarp(unsigned mask = ~0u, cuemu::Site site = cuemu::here()) {
    cuemu::lanes_together({"__syncwarp", mask, false, [](cuemu::Thread* const*, uint32_t) {}, site}, nullptr);
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __trap() { cuemu::fail("__trap()"); }

// ---- exchanges between the lanes of a warp ----

namespace cuemu {

template <class Operand>
static Operand& operand(Thread* thread) { return *static_cast<Operand*>(thread->operand); }

template <class T>
struct Shuffle {
    T value, result;
    int source;                                // lane
};

// A lane that reads one outside the mask gets poison.
template <class T>
static T shuffle(const char* name, unsigned mask, T value, int source, Site site) {
    static_assert((std::is_arithmetic_v<T> || std::is_same_v<T, __half> || std::is_same_v<T, __half2> ||
                   std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __nv_bfloat162>) && sizeof(T) <= 8,
                  "CUDA has no shuffle for this type");
    Shuffle<T> mine{value, value, source};
    lanes_together({name, mask, true, [](Thread* const* lanes, uint32_t members) {
        for (uint32_t left = members; left; left &= left - 1) {
            auto& reader = operand<Shuffle<T>>(lanes[__builtin_ctz(left)]);
            if (members >> reader.source & 1)
                reader.result = operand<Shuffle<T>>(lanes[reader.source]).value;
            else
                memset(static_cast<void*>(&reader.result), kPoison, sizeof(T));
        }
    }, site}, &mine);
    return mine.result;
}

static int segment_start(int width, Site site) {   // the first of the `width` lanes that the caller is one of
    if (width < 1 || width > 32 || (width & (width - 1)))
        fail("shuffle (%s:%d): width %d is not a power of two up to 32", site.file, site.line, width);
    return current->lane & ~(width - 1);
}

struct Vote {
    int predicate;
    uint32_t nonzero, members;                 // of the lanes that voted
};
static Vote vote(const char* name, unsigned mask, int predicate, Site site) {
    Vote mine{predicate, 0, 0};
    lanes_together({name, mask, false, [](Thread* const* lanes, uint32_t members) {
        uint32_t nonzero = 0;
        for (uint32_t left = members; left; left &= left - 1)
            if (operand<Vote>(lanes[__builtin_ctz(left)]).predicate) nonzero |= left & -left;
        for (uint32_t left = members; left; left &= left - 1) {
            auto& voter = operand<Vote>(lanes[__builtin_ctz(left)]);
            voter.nonzero = nonzero;
            voter.members = members;
        }
    }, site}, &mine);
    return mine;
}

template <class T, class Operation>
static T reduce(const char* name, unsigned mask, T value, Operation, Site site) {
    static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>, "CUDA reduces int and unsigned");
    lanes_together({name, mask, false, [](Thread* const* lanes, uint32_t members) {
        T total = operand<T>(lanes[__builtin_ctz(members)]);
        for (uint32_t left = members & (members - 1); left; left &= left - 1)
            total = Operation{}(total, operand<T>(lanes[__builtin_ctz(left)]));
        for (uint32_t left = members; left; left &= left - 1) operand<T>(lanes[__builtin_ctz(left)]) = total;
    }, site}, &value);
    return value;
}
struct Sum { template <class T> T operator()(T a, T b) const { return T(unsigned(a) + unsigned(b)); } };
struct Least { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Greatest { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct BitAnd { template <class T> T operator()(T a, T b) const { return a & b; } };
struct BitOr { template <class T> T operator()(T a, T b) const { return a | b; } };
struct BitXor { template <class T> T operator()(T a, T b) const { return a ^ b; } };

}  // namespace cuemu

template <class T>
static T __shfl_sync(unsigned mask, T value, int source, int width = 32, cuemu::Site site = cuemu::here()) {
    int lane = cuemu::segment_start(width, site) | (source & (width - 1));
    return cuemu::shuffle("__shfl_sync", mask, value, lane, site);
}
// The instructions below take the distance modulo 32. A lane whose source is not allowed reads itself.
template <class T>
static T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                         cuemu::Site site = cuemu::here()) {
    int lane = cuemu::current->lane, source = lane - int(delta & 31);
    bool allowed = source >= cuemu::segment_start(width, site);
    return cuemu::shuffle("__shfl_up_sync", mask, value, allowed ? source : lane, site);
}
template <class T>
static T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                         cuemu::Site site = cuemu::here()) {
    int lane = cuemu::current->lane, source = lane + int(delta & 31);
    bool allowed = source < cuemu::segment_start(width, site) + width;
    return cuemu::shuffle("__shfl_down_sync", mask, value, allowed ? source : lane, site);
}
template <class T>   // may read an earlier segment, never a later one
static T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                         cuemu::Site site = cuemu::here()) {
    int lane = cuemu::current->lane, source = lane ^ (lane_mask & 31);
    bool allowed = source < cuemu::segment_start(width, site) + width;
    return cuemu::shuffle("__shfl_xor_sync", mask, value, allowed ? source : lane, site);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, cuemu::Site site = cuemu::here()) {
    return cuemu::vote("__ballot_sync", mask, predicate, site).nonzero;
}
static inline int __any_sync(unsigned mask, int predicate, cuemu::Site site = cuemu::here()) {
    return cuemu::vote("__any_sync", mask, predicate, site).nonzero != 0;
}
static inline int __all_sync(unsigned mask, int predicate, cuemu::Site site = cuemu::here()) {
    auto result = cuemu::vote("__all_sync", mask, predicate, site);
    return result.nonzero == result.members;
}
// The guide promises no lane but the caller, so no kernel may count on another one being in it.
static inline unsigned __activemask() { return 1u << cuemu::current->lane; }

#define CUEMU_REDUCE(NAME, OPERATION)                                                              \
    template <class T>                                                                             \
    static T NAME(unsigned mask, T value, cuemu::Site site = cuemu::here()) {                      \
        return cuemu::reduce(#NAME, mask, value, cuemu::OPERATION{}, site);                        \
    }
CUEMU_REDUCE(__reduce_add_sync, Sum)
CUEMU_REDUCE(__reduce_min_sync, Least)
CUEMU_REDUCE(__reduce_max_sync, Greatest)
CUEMU_REDUCE(__reduce_and_sync, BitAnd)
CUEMU_REDUCE(__reduce_or_sync, BitOr)
CUEMU_REDUCE(__reduce_xor_sync, BitXor)
#undef CUEMU_REDUCE
