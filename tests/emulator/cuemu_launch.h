// cuemu_launch.h - shared memory, the order of running, blocks, and the functions a module exports.
// Included by cuemu.h.
#pragma once

namespace cuemu {

// ---- shared memory ----

constexpr size_t kMaxShared = 232448;         // bytes a block may have on sm_90, the most of any GPU so far
constexpr size_t kMaxSharedAlign = 1024;
constexpr size_t kGuard = 1024;               // bytes watched behind the dynamic shared memory
alignas(2 * kMaxSharedAlign) static unsigned char shared_arena[kMaxSharedAlign + kMaxShared + kGuard];
static unsigned char* shared_base;            // of the dynamic shared memory, in the arena

struct Bytes {
    unsigned char* start;
    size_t count;
};

// Static __shared__ variables are thread-locals, so they fill the thread-local segment of this module, with
// nothing beside them but the anchor. AddressSanitizer guards only plain statics; those lie in the writable
// segment.
#if defined(__SANITIZE_ADDRESS__)
#define CUEMU_SHARED static
#else
#define CUEMU_SHARED static __thread
#endif
CUEMU_SHARED unsigned char shared_anchor;

struct TlsIndex { size_t module, offset; };
extern "C" void* __tls_get_addr(TlsIndex*);   // of the loader

static int find_static_shared(dl_phdr_info* module, size_t, void* found) {
    Bytes writable = {}, thread_local_part = {};
    for (int i = 0; i < module->dlpi_phnum; ++i) {
        const auto& segment = module->dlpi_phdr[i];
        auto* start = reinterpret_cast<unsigned char*>(module->dlpi_addr + segment.p_vaddr);
        if (segment.p_type == PT_TLS) thread_local_part.count = segment.p_memsz;
        if (segment.p_type == PT_LOAD && shared_arena >= start && shared_arena < start + segment.p_memsz)
            writable = {start, segment.p_memsz};
    }
    if (!writable.start) return 0;            // another module
    TlsIndex first = {module->dlpi_tls_modid, 0};
    if (!kAddressSanitizer) thread_local_part.start = static_cast<unsigned char*>(__tls_get_addr(&first));
    *static_cast<Bytes*>(found) = kAddressSanitizer ? writable : thread_local_part;
    return 1;
}

// A thread's first access to a thread-local allocates it, and glibc before 2.40 then destroys vector
// registers that the compiler believes kept (-mtls-dialect=gnu2, which makes later accesses cheap, see
// build.py). Hence this is a call the optimiser cannot see through, and comes first in a launch.
__attribute__((noipa)) static Bytes static_shared() {
    static Bytes found;
    static const void* found_for;             // thread-locals move when another thread launches
    if (found_for != &shared_anchor) dl_iterate_phdr(find_static_shared, &found);
    found_for = &shared_anchor;
    return found;
}

static void check_guard() {
    const unsigned char* guard = shared_base + launch_now->shared_bytes;
    if (kAddressSanitizer) return;            // which reports the write itself
    if (guard[0] == kPoison && !memcmp(guard, guard + 1, kGuard - 1)) return;   // all alike
    size_t first = launch_now->shared_bytes;
    while (shared_base[first] == kPoison) ++first;
    current = nullptr;                        // any thread may have done it
    fail("wrote dynamic shared memory at byte %zu, but shared_bytes is %zu", first,
         size_t(launch_now->shared_bytes));
}

// ---- blocks ----

static void work() {                          // the loop on every worker's stack
    Worker* self = current->worker;
    for (;;) {
        run_kernel();
        leave_block(*current);
        Thread* next = take_ready();
        if (next && !next->worker) {          // not started yet: this worker is free to run it
            next->worker = self;
            current = next;
            continue;
        }
        workers.release(self);
        if (next) {
            resume(*next, self->context);
        } else {
            if (alive_count) report_deadlock();
            check_guard();
            switch_context(self->context, host);
        }
    }
}

static uint64_t random_below(uint64_t& state, uint64_t bound) {     // xorshift64
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % bound;
}

// order[i] = which of `count` runs as the i-th.
template <class Index>
static void fill_order(Index* order, size_t count, uint64_t& random) {
    for (size_t i = 0; i < count; ++i) order[i] = launch_now->order == kReverse ? count - 1 - i : i;
    if (launch_now->order == kShuffle)
        for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[random_below(random, i)]);
}

// Who runs in which place.
static void place_threads(uint64_t& random) {
    unsigned thread_count = block_dim.x * block_dim.y * block_dim.z;
    warp_count = (thread_count + kLanes - 1) / kLanes;
    unsigned warp_order[kMaxWarps], lane_order[kLanes];
    fill_order(warp_order, warp_count, random);
    for (unsigned w = 0; w < warp_count; ++w) {
        Warp& warp = warps[w];
        unsigned first = warp_order[w] * kLanes, lanes = std::min(kLanes, thread_count - first);
        fill_order(lane_order, lanes, random);
        warp.place = w;
        warp.present = ~0u >> (kLanes - lanes);
        for (unsigned p = 0; p < lanes; ++p) {
            unsigned lane = lane_order[p], rank = first + lane;
            Thread& thread = warp.threads[p];
            thread.index = {rank % block_dim.x, rank / block_dim.x % block_dim.y,
                            rank / (block_dim.x * block_dim.y)};
            thread.lane = lane;
            thread.place = p;
            thread.warp = &warp;
            warp.lanes[lane] = &thread;
        }
    }
}

static void start_block() {
    for (unsigned w = 0; w < warp_count; ++w) {
        warps[w].alive = warps[w].ready = warps[w].present;
        warps[w].waiting = 0;
    }
    ready_warps = ~0u >> (kMaxWarps - warp_count);
    running_warp = 0;
    alive_count = block_dim.x * block_dim.y * block_dim.z;
    barrier = BlockBarrier{};
    ++blocks_run;
}

// ---- launches ----

// Runs the grid. Returns whether it failed; launch.message then says why.
static bool launch(const Launch& launch, const char* name, void (*kernel)()) {
    const Bytes statics = static_shared();
    if (failed)                               // the launch before this one: its threads stand as they stood
        for (Warp& warp : warps)
            for (Thread& thread : warp.threads) thread.worker = nullptr, thread.wait.name = nullptr;
    failed = false;
    launch_now = &launch;
    kernel_name = name;
    run_kernel = kernel;
    grid_dim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
    block_dim = dim3(launch.block[0], launch.block[1], launch.block[2]);
    workers.reset(launch.stacks, work);
    // No better aligned than the kernel asks for, so that reliance on more is seen.
    shared_base = shared_arena + launch.shared_align;
    uint64_t random = launch.seed * 0x9E3779B97F4A7C15u + 1;
    std::vector<uint64_t> blocks(uint64_t(grid_dim.x) * grid_dim.y * grid_dim.z);
    fill_order(blocks.data(), blocks.size(), random);
    ASAN_UNPOISON_MEMORY_REGION(shared_arena, sizeof shared_arena);
    memset(shared_base + launch.shared_bytes, kPoison, kGuard);
    ASAN_POISON_MEMORY_REGION(shared_arena, launch.shared_align);
    ASAN_POISON_MEMORY_REGION(shared_base + launch.shared_bytes, kGuard);
    for (uint64_t block : blocks) {
        block_index = {unsigned(block % grid_dim.x), unsigned(block / grid_dim.x % grid_dim.y),
                       unsigned(block / (uint64_t(grid_dim.x) * grid_dim.y))};
        memset(shared_base, kPoison, launch.shared_bytes);
        if (!kAddressSanitizer) memset(statics.start, kPoison, statics.count);
        if (launch.order == kShuffle || block == blocks.front()) place_threads(random);
        start_block();
        resume(*take_ready(), host);
        if (failed) break;
    }
    current = nullptr;
    return failed;
}

template <class... A, size_t... I>
static void call(void (*kernel)(A...), std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(launch_now->arguments[I])...);
}
template <class... A>
static void call(void (*kernel)(A...)) { call(kernel, std::index_sequence_for<A...>{}); }

template <class A>
constexpr char kind_of() {
    if (std::is_pointer_v<A>) return 'p';
    if (std::is_integral_v<A> || std::is_enum_v<A>) return 'i';
    return std::is_floating_point_v<A> ? 'f' : 's';
}

// Kind and size of each parameter, "p8 i4 f4 s24": pointer, integer, floating point, other (struct, __half).
template <class... A>
static const char* parameters(void (*)(A...)) {
    static char text[1024];
    size_t used = 0;
    ((used += snprintf(text + used, sizeof text - used, " %c%zu", kind_of<A>(), sizeof(A))), ...);
    return text;
}

}  // namespace cuemu

#define CUEMU_C extern "C" __attribute__((visibility("default")))
#define CUEMU_EXPORT(NAME)                                                            \
    CUEMU_C const char* cuemu_parameters_##NAME() { return cuemu::parameters(NAME); } \
    CUEMU_C bool cuemu_launch_##NAME(const cuemu::Launch* launch) {                   \
        return cuemu::launch(*launch, #NAME, [] { cuemu::call(NAME); });              \
    }
CUEMU_C char* cuemu_allocate_stacks() { return cuemu::allocate_stacks(); }
