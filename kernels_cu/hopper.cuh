// hopper.cuh - instructions of sm_90a under plain names: barriers in shared memory, tensor copies, products of warpgroups.
//
// Panels   A tile of shared memory is panels of 64 columns of 16 bits: rows of 128 bytes, 1024 bytes aligned; chunk c (16
//          bytes) of row r lies at c ^ r % 8. Tensor copies write that, and products of warpgroups read it.
// Products D (64 x N, float32) of a warpgroup: with warp w of it and lane l, register i is row 16 w + l / 4 + 8 (i / 2 % 2),
//          column 8 (i / 4) + 2 (l % 4) + i % 2. So a row is spread over four lanes.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "cp.async.bulk.tensor", "mbarrier"
#pragma once
#include "platform.cuh"

namespace cuattn {

struct alignas(64) TensorMap { unsigned long long words[16]; };        // what cuTensorMapEncodeTiled makes on the host

__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// A barrier in shared memory. A phase ends when all have arrived and all bytes that were announced have come.
struct Barrier {
    unsigned long long word;

    __device__ __forceinline__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(this)), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(this)) : "memory");
    }
    __device__ __forceinline__ void arrive_expecting(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(this)), "r"(bytes) : "memory");
    }
    // Until the phase of that parity is over; before the first one, parity 1 is.
    __device__ __forceinline__ void wait(int parity) {
        unsigned done;
        do {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done) : "r"(shared_address(this)), "r"(parity) : "memory");
        } while (!done);
    }
};
__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// What this thread wrote to shared memory can be seen by tensor copies and products.
__device__ __forceinline__ void writes_are_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The box at these coordinates into shared memory; what lies outside the array is 0.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, Barrier& barrier, int c0, int c1, int c2, int c3,
                                         long long policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                    "l"(policy) : "memory");
}

template <int N> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }

// A named barrier of `threads` threads.
__device__ __forceinline__ void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }

__device__ __forceinline__ void registers_are_for_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the newest N groups are done.
template <int N> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// What `x` comes from stays before the next wait: ptxas would wait first. It is a store that is never made, for `natural` is
// not negative.
__device__ __forceinline__ void stays_before_wait(float x, int natural, const void* somewhere) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.s32 p, %1, -1;\n@p st.shared.f32 [%2], %0;\n}"
                 :: "f"(x), "r"(natural), "r"(shared_address(somewhere)) : "memory");
}

// A matrix in panels. Rows are contiguous along the summed axis (Q, K): `panel` is not used. Or along the other one (V, read
// by rows of keys): `panel` bytes from one panel to the next.
__device__ __forceinline__ unsigned long long matrix_at(const void* p, int panel) {
    const unsigned long long address = (shared_address(p) & 0x3ffff) >> 4;
    return address | (unsigned long long)(panel >> 4) << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

#define CUATTN_8(x, i) x(i), x(i + 1), x(i + 2), x(i + 3), x(i + 4), x(i + 5), x(i + 6), x(i + 7)
#define CUATTN_32(x, i) CUATTN_8(x, i), CUATTN_8(x, i + 8), CUATTN_8(x, i + 16), CUATTN_8(x, i + 24)
#define CUATTN_D(i) "+f"(d[i])
#define CUATTN_REGISTERS_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define CUATTN_REGISTERS_64 \
    CUATTN_REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d (+)= a b with a (64 x 16) and b (16 x 128) in shared memory, both contiguous along the summed axis.
#define CUATTN_PRODUCT_SHARED(TYPE, NAME)                                                                                     \
    __device__ __forceinline__ void product(float (&d)[64], unsigned long long a, unsigned long long b, bool adds, TYPE) {     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME    \
                     " {" CUATTN_REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0;\n}"                                                 \
                     : CUATTN_32(CUATTN_D, 0), CUATTN_32(CUATTN_D, 32) : "l"(a), "l"(b), "r"(int(adds)));                     \
    }
CUATTN_PRODUCT_SHARED(__half, "f16")
CUATTN_PRODUCT_SHARED(__nv_bfloat16, "bf16")

// d += a b with a (64 x 16) in registers, as an mma fragment of each warp, and b (16 x N) in shared memory, contiguous along N.
#define CUATTN_PRODUCT_REGISTERS(TYPE, NAME)                                                                                  \
    __device__ __forceinline__ void product(float (&d)[64], const unsigned (&a)[4], unsigned long long b, TYPE) {             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" CUATTN_REGISTERS_64                    \
                     "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                                                 \
                     : CUATTN_32(CUATTN_D, 0), CUATTN_32(CUATTN_D, 32)                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }                                                                                                                         \
    __device__ __forceinline__ void product(float (&d)[32], const unsigned (&a)[4], unsigned long long b, TYPE) {             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" CUATTN_REGISTERS_32                     \
                     "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"                                                                 \
                     : CUATTN_32(CUATTN_D, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
    }
CUATTN_PRODUCT_REGISTERS(__half, "f16")
CUATTN_PRODUCT_REGISTERS(__nv_bfloat16, "bf16")

}  // namespace cuattn
