// cuemu_mma.h - what mma.cuh wraps in inline PTX: mma.sync, ldmatrix, movmatrix, cp.async.
//
// Layouts are the PTX manual's ("Matrix Fragments for mma.m16n8k8 / m16n8k16", "ldmatrix", "cp.async").
// With group = lane / 4 and pair = 2 * (lane % 4), register r holds two neighbours, the lower index in the
// lower half:
//   A (16 x K)   row group + 8 * (r % 2), columns pair + 8 * (r / 2) and the next
//   B (K x 8)    rows pair + 8 * r and the next, column group
//   C, D (16 x 8, float)   element i: row group + 8 * (i / 2), column pair + i % 2
// mma adds the products in float, k ascending, to C. Products of two 16-bit floats are exact in float, so
// each sum of K terms has K roundings; the GPU sums in another order and may truncate. Tests must bound the
// difference.
// Included by cuemu.h.
#pragma once

namespace cuemu {

// ---- mma ----

static inline float f16_to_float(uint16_t bits) {
    // Exponent and mantissa moved into place are the value times 2^-112, subnormals included.
    float magnitude = same_bits<float>(uint32_t(bits & 0x7FFF) << 13) * 0x1p112f;
    if ((bits & 0x7C00) == 0x7C00) magnitude = same_bits<float>(0x7F800000u | uint32_t(bits & 0x3FF) << 13);
    return bits >> 15 ? -magnitude : magnitude;
}
static inline float bf16_to_float(uint16_t bits) { return same_bits<float>(uint32_t(bits) << 16); }

template <int K>
struct MmaOperand {
    uint32_t a[K / 4], b[K / 8];
    float c[4];                               // becomes D
};

template <int K, class Visit>
static void each_fragment(Thread* const* lanes, Visit visit) {
    for (int lane = 0; lane < 32; ++lane) visit(operand<MmaOperand<K>>(lanes[lane]), lane / 4, lane % 4 * 2);
}

template <int K, float to_float(uint16_t)>
static void mma(const char* name, float (&d)[4], const uint32_t (&a)[K / 4], const uint32_t (&b)[K / 8],
                const float (&c)[4], Site site) {
    MmaOperand<K> mine;
    memcpy(mine.a, a, sizeof a), memcpy(mine.b, b, sizeof b), memcpy(mine.c, c, sizeof c);
    lanes_together({name, ~0u, true, [](Thread* const* lanes, uint32_t) {
        float A[16][K], B[K][8], D[16][8];
        each_fragment<K>(lanes, [&](MmaOperand<K>& mine, int group, int pair) {
            for (int half = 0; half < 2; ++half) {
                for (int r = 0; r < K / 4; ++r)
                    A[group + 8 * (r % 2)][pair + 8 * (r / 2) + half] = to_float(mine.a[r] >> 16 * half);
                for (int r = 0; r < K / 8; ++r)
                    B[pair + 8 * r + half][group] = to_float(mine.b[r] >> 16 * half);
            }
            for (int i = 0; i < 4; ++i) D[group + 8 * (i / 2)][pair + i % 2] = mine.c[i];
        });
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < K; ++k)
                for (int column = 0; column < 8; ++column) D[row][column] += A[row][k] * B[k][column];
        each_fragment<K>(lanes, [&](MmaOperand<K>& mine, int group, int pair) {
            for (int i = 0; i < 4; ++i) mine.c[i] = D[group + 8 * (i / 2)][pair + i % 2];
        });
    }, site}, &mine);
    memcpy(d, mine.c, sizeof d);
}

static inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    const float (&c)[4], Site site = here()) {
    mma<16, f16_to_float>("mma.m16n8k16.f16", d, a, b, c, site);
}
static inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                     const float (&c)[4], Site site = here()) {
    mma<16, bf16_to_float>("mma.m16n8k16.bf16", d, a, b, c, site);
}
static inline void mma_m16n8k8_f16(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1],
                                   const float (&c)[4], Site site = here()) {
    mma<8, f16_to_float>("mma.m16n8k8.f16", d, a, b, c, site);
}
static inline void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1],
                                    const float (&c)[4], Site site = here()) {
    mma<8, bf16_to_float>("mma.m16n8k8.bf16", d, a, b, c, site);
}

// ---- ldmatrix ----
// Lane 8 m + i gives the address of row i of 8 x 8 matrix m: 16 bytes in shared memory, 16-byte aligned;
// addresses of lanes 8 * MATRICES and up are not looked at. Register m of a lane gets the two elements of
// matrix m at row `group`, columns `pair` and next; transposed: at rows `pair` and next, column `group`.

struct LdmatrixOperand {
    const void* row;
    uint32_t registers[4];
};

template <int MATRICES, bool TRANSPOSED>
static void ldmatrix(uint32_t (&registers)[MATRICES], const void* row, Site site = here()) {
    static_assert(MATRICES == 1 || MATRICES == 2 || MATRICES == 4, "ldmatrix loads 1, 2 or 4 matrices");
    LdmatrixOperand mine{row, {}};
    if (current->lane < 8 * MATRICES) {
        if (reinterpret_cast<uintptr_t>(row) % 16)
            fail("ldmatrix (%s:%d): row address %p is not 16-byte aligned", site.file, site.line, row);
        if (shared_offset(row) < 0)
            fail("ldmatrix (%s:%d): row address %p is not in shared memory", site.file, site.line, row);
    }
    const char* name = TRANSPOSED ? "ldmatrix.trans" : "ldmatrix";
    lanes_together({name, ~0u, true, [](Thread* const* lanes, uint32_t) {
        for (int m = 0; m < MATRICES; ++m) {
            const uint16_t* rows[8];
            for (int i = 0; i < 8; ++i)
                rows[i] = static_cast<const uint16_t*>(operand<LdmatrixOperand>(lanes[8 * m + i]).row);
            for (int lane = 0; lane < 32; ++lane) {
                int group = lane / 4, pair = lane % 4 * 2;
                uint32_t low = TRANSPOSED ? rows[pair][group] : rows[group][pair];
                uint32_t high = TRANSPOSED ? rows[pair + 1][group] : rows[group][pair + 1];
                operand<LdmatrixOperand>(lanes[lane]).registers[m] = high << 16 | low;
            }
        }
    }, site}, &mine);
    memcpy(registers, mine.registers, sizeof registers);
}

// ---- movmatrix ----
// An 8 x 8 matrix, row `group` in the lanes of that group at columns `pair` and next, becomes its transpose.

struct MovmatrixOperand { uint32_t in, out; };

static inline uint32_t movmatrix(uint32_t x, Site site = here()) {
    MovmatrixOperand mine{x, 0};
    lanes_together({"movmatrix.trans", ~0u, true, [](Thread* const* lanes, uint32_t) {
        const auto element = [&](int row, int column) -> uint32_t {
            return operand<MovmatrixOperand>(lanes[row * 4 + column / 2]).in >> 16 * (column % 2) & 0xFFFF;
        };
        for (int lane = 0; lane < 32; ++lane) {
            int group = lane / 4, pair = lane % 4 * 2;
            operand<MovmatrixOperand>(lanes[lane]).out = element(pair + 1, group) << 16 | element(pair, group);
        }
    }, site}, &mine);
    return mine.out;
}

// ---- cp.async ----
// A copy poisons its destination when issued and takes place as late as the manual allows: in the wait that
// covers it, by the thread that issued it. So both a missing wait and a buffer reused too early are seen.
// Copies that nobody waits for never happen.

struct PendingCopy {
    unsigned char* destination;
    const void* source;
    int bytes, source_bytes;                  // the rest is zero-filled
    unsigned group;
};
struct CopyQueue {
    uint64_t block;                           // that the entries belong to
    unsigned groups;                          // committed so far
    std::vector<PendingCopy> copies;          // in the order of issue
};
static CopyQueue copy_queues[kMaxWarps * kLanes];

static CopyQueue& copy_queue() {
    unsigned rank = current->index.x + block_dim.x * (current->index.y + block_dim.y * current->index.z);
    CopyQueue& queue = copy_queues[rank];
    if (queue.block != blocks_run) {
        queue.block = blocks_run;
        queue.groups = 0;
        queue.copies.clear();
    }
    return queue;
}

template <int BYTES>
static void cp_async(void* destination, const void* source, int source_bytes = BYTES, Site site = here()) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if (source_bytes < 0 || source_bytes > BYTES)
        fail("cp.async (%s:%d): source size %d is not in 0..%d", site.file, site.line, source_bytes, BYTES);
    if (reinterpret_cast<uintptr_t>(destination) % BYTES || reinterpret_cast<uintptr_t>(source) % BYTES)
        fail("cp.async (%s:%d): destination %p or source %p is not %d-byte aligned", site.file, site.line,
             destination, source, BYTES);
    if (shared_offset(destination) < 0)
        fail("cp.async (%s:%d): destination %p is not in shared memory", site.file, site.line, destination);
    memset(destination, kPoison, BYTES);
    CopyQueue& queue = copy_queue();
    auto* bytes = static_cast<unsigned char*>(destination);
    queue.copies.push_back({bytes, source, BYTES, source_bytes, queue.groups});
}

static inline void cp_async_commit_group() { ++copy_queue().groups; }

// Waits until at most `newest` of the committed groups are still under way.
template <unsigned newest>
static void cp_async_wait_group() {
    CopyQueue& queue = copy_queue();
    size_t done = 0;
    for (; done < queue.copies.size() && queue.copies[done].group + newest < queue.groups; ++done) {
        const PendingCopy& copy = queue.copies[done];
        if (copy.source_bytes) memcpy(copy.destination, copy.source, copy.source_bytes);
        memset(copy.destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
    }
    queue.copies.erase(queue.copies.begin(), queue.copies.begin() + done);
}

static inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group<0>();
}

}  // namespace cuemu
