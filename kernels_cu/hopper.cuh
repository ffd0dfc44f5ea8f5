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
    __device__ __forceinline__ void arrive_as_warp(int lane) {
        __syncwarp();
        if (lane == 0) arrive();
    }
    __device__ __forceinline__ void arrive_expecting(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(this)), "r"(bytes) : "memory");
    }
    __device__ __forceinline__ bool is_over(int parity) const {
        unsigned done;
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(this)), "r"(parity) : "memory");
        return done;
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

// One lane of a warp whose lanes are all here: a branch on it is uniform, unlike one on a lane's number.
__device__ __forceinline__ bool is_elected() {
    unsigned is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
    return is;
}

// A named barrier of `threads` threads.
__device__ __forceinline__ void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }

// The same, and whether any of them says so.
__device__ __forceinline__ bool any_of(int id, int threads, unsigned says) {
    unsigned any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any) : "r"(says), "r"(id), "r"(threads) : "memory");
    return any;
}

__device__ __forceinline__ void registers_are_for_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the newest N groups are done.
template <int N> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// Word i of lane l of four becomes word l of lane i.
__device__ __forceinline__ void transpose_of_four(unsigned (&x)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = lane & bit;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n & bit) continue;
            const unsigned got = __shfl_xor_sync(0xffffffff, upper ? x[n] : x[n + bit], bit);
            if (upper) x[n] = got;
            else x[n + bit] = got;
        }
    }
}

// A matrix in panels, as an instruction names it: the lower word; the upper one is the same for all. To a place `bytes` further
// it is matrix + bytes / 16. Rows are contiguous along the summed axis (Q, K): `panel` is not used. Or along the other one (V,
// read by rows of keys): `panel` bytes from one panel to the next.
constexpr unsigned UPPER_WORD = 1024 / 16 | 1u << 30;      // eight rows are 1024 bytes; swizzled by 128 bytes
__device__ __forceinline__ unsigned matrix_at(const void* p, int panel) { return (shared_address(p) & 0x3ffff) / 16 | panel / 16 << 16; }

#define CUATTN_8(x, i) x(i), x(i + 1), x(i + 2), x(i + 3), x(i + 4), x(i + 5), x(i + 6), x(i + 7)
#define CUATTN_32(x, i) CUATTN_8(x, i), CUATTN_8(x, i + 8), CUATTN_8(x, i + 16), CUATTN_8(x, i + 24)
#define CUATTN_D(i) "+f"(d[i])
#define CUATTN_NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
    "%27,%28,%29,%30,%31"
#define CUATTN_NAMES_40 \
    CUATTN_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define CUATTN_NAMES_48 \
    CUATTN_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define CUATTN_NAMES_56 \
    CUATTN_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define CUATTN_NAMES_64 \
    CUATTN_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define CUATTN_NAMES_80 \
    CUATTN_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define CUATTN_NAMES_96 \
    CUATTN_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define CUATTN_NAMES_128 \
    CUATTN_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
    "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define CUATTN_OPERANDS_32 CUATTN_32(CUATTN_D, 0)
#define CUATTN_OPERANDS_40 CUATTN_32(CUATTN_D, 0), CUATTN_8(CUATTN_D, 32)
#define CUATTN_OPERANDS_48 CUATTN_32(CUATTN_D, 0), CUATTN_8(CUATTN_D, 32), CUATTN_8(CUATTN_D, 40)
#define CUATTN_OPERANDS_56 CUATTN_32(CUATTN_D, 0), CUATTN_8(CUATTN_D, 32), CUATTN_8(CUATTN_D, 40), CUATTN_8(CUATTN_D, 48)
#define CUATTN_OPERANDS_64 CUATTN_32(CUATTN_D, 0), CUATTN_32(CUATTN_D, 32)
#define CUATTN_OPERANDS_80 CUATTN_32(CUATTN_D, 0), CUATTN_32(CUATTN_D, 32), CUATTN_8(CUATTN_D, 64), CUATTN_8(CUATTN_D, 72)
#define CUATTN_OPERANDS_96 CUATTN_32(CUATTN_D, 0), CUATTN_32(CUATTN_D, 32), CUATTN_32(CUATTN_D, 64)
#define CUATTN_OPERANDS_128 CUATTN_32(CUATTN_D, 0), CUATTN_32(CUATTN_D, 32), CUATTN_32(CUATTN_D, 64), CUATTN_32(CUATTN_D, 96)

// d (+)= a b with a (64 x 16) and b (16 x N) in shared memory, both contiguous along the summed axis; COUNT = N / 2.
#define CUATTN_PRODUCT_SHARED(TYPE, NAME, N, COUNT, A, B, ADDS, UPPER)                                                        \
    __device__ __forceinline__ void product(float (&d)[COUNT], unsigned a, unsigned b, bool adds, TYPE) {                     \
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " ADDS ", 0;\nmov.b64 a, {" A ", " UPPER "};\n"         \
                     "mov.b64 b, {" B ", " UPPER "};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." NAME "." NAME           \
                     " {" CUATTN_NAMES_##COUNT "}, a, b, p, 1, 1, 0, 0;\n}"                                                   \
                     : CUATTN_OPERANDS_##COUNT : "r"(a), "r"(b), "r"(int(adds)), "r"(UPPER_WORD));                            \
    }
// d += a b with a (64 x 16) in registers, as an mma fragment of each warp, and b (16 x N) in shared memory, contiguous along N.
#define CUATTN_PRODUCT_REGISTERS(TYPE, NAME, N, COUNT, A0, A1, A2, A3, B, UPPER)                                              \
    __device__ __forceinline__ void product(float (&d)[COUNT], const unsigned (&a)[4], unsigned b, TYPE) {                    \
        asm volatile("{\n.reg .b64 b;\nmov.b64 b, {" B ", " UPPER "};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." NAME   \
                     "." NAME " {" CUATTN_NAMES_##COUNT "}, {" A0 "," A1 "," A2 "," A3 "}, b, 1, 1, 1, 1;\n}"                  \
                     : CUATTN_OPERANDS_##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(UPPER_WORD));        \
    }
#define CUATTN_PRODUCTS(TYPE, NAME)                                                                                           \
    CUATTN_PRODUCT_SHARED(TYPE, NAME, "80", 40, "%40", "%41", "%42", "%43") \
    CUATTN_PRODUCT_SHARED(TYPE, NAME, "112", 56, "%56", "%57", "%58", "%59") \
    CUATTN_PRODUCT_SHARED(TYPE, NAME, "128", 64, "%64", "%65", "%66", "%67") \
    CUATTN_PRODUCT_SHARED(TYPE, NAME, "160", 80, "%80", "%81", "%82", "%83") \
    CUATTN_PRODUCT_REGISTERS(TYPE, NAME, "64", 32, "%32", "%33", "%34", "%35", "%36", "%37") \
    CUATTN_PRODUCT_REGISTERS(TYPE, NAME, "96", 48, "%48", "%49", "%50", "%51", "%52", "%53") \
    CUATTN_PRODUCT_REGISTERS(TYPE, NAME, "128", 64, "%64", "%65", "%66", "%67", "%68", "%69") \
    CUATTN_PRODUCT_REGISTERS(TYPE, NAME, "192", 96, "%96", "%97", "%98", "%99", "%100", "%101") \
    CUATTN_PRODUCT_REGISTERS(TYPE, NAME, "256", 128, "%128", "%129", "%130", "%131", "%132", "%133")
CUATTN_PRODUCTS(__half, "f16")
CUATTN_PRODUCTS(__nv_bfloat16, "bf16")

}  // namespace cuattn
