// cuemu_threads.h - the threads of a block, who of them runs next, and what they wait for.
//
// A thread runs until it waits or ends; nothing interrupts it. It waits at a barrier of the block, or in a
// warp-wide operation for the lanes its mask names. If nobody can run and somebody waits, that is a deadlock,
// and the message says who waits where.
// Included by cuemu.h.
#pragma once

namespace cuemu {

constexpr unsigned kLanes = 32, kMaxWarps = 32;
constexpr unsigned char kPoison = 0xFF;

struct Site {                                 // a place in the kernel's source
    const char* file;
    int line;
};
constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

struct Thread;
struct Wait {                                 // what a thread waits for
    const char* name;                         // null: for nothing
    uint32_t mask;                            // 0: the whole block
    bool all_present;                         // no lane of the mask may have exited
    void (*finish)(Thread* const* lanes, uint32_t members);   // run once, by the last lane to come
    Site site;
};
struct Warp;
struct Thread {
    uint3 index;
    unsigned lane, place;                     // place: position in its warp's order of running
    Warp* warp;
    Worker* worker;                           // null until it has run
    Wait wait;
    void* operand;                            // what it brings to a warp-wide operation
};
struct Warp {
    uint32_t present;                         // as many low bits as it has lanes
    uint32_t alive, waiting;                  // bit = lane; waiting: in a warp-wide operation
    uint32_t ready;                           // bit = place
    unsigned place;                           // position in the block's order of running
    Thread* lanes[kLanes];
    Thread threads[kLanes];                   // in the order of running
};
struct BlockBarrier {
    const char* name;
    Site site;
    unsigned arrived, nonzero;                // since the last release
    unsigned last_arrived, last_nonzero;      // up to the last release
};
enum Order : uint32_t { kForward, kReverse, kShuffle };
struct Launch {                               // mirrored by module.py
    uint32_t grid[3], block[3];
    uint64_t shared_bytes;
    uint32_t shared_align;
    Order order;
    uint64_t seed;
    char* stacks;
    void** arguments;
    char* message;
    uint64_t message_bytes;
};

static const Launch* launch_now;
static const char* kernel_name;
static void (*run_kernel)();                  // the kernel with its arguments, as the thread `current`
static dim3 grid_dim, block_dim;
static uint3 block_index;
static uint64_t blocks_run;                   // by this module, ever: names the block for cuemu_mma.h
static Warp warps[kMaxWarps];                 // in the order of running
static unsigned warp_count, running_warp, alive_count;
static uint32_t ready_warps;                  // bit = place
static BlockBarrier barrier;
static Thread* current;
static Workers workers;
static Context host;                          // the caller of the launch
static bool failed;

// Ends the launch with a message. Not declared noreturn, though it is: AddressSanitizer would prepare each
// call for unwinding the stack of the operating system's thread, which this is not.
__attribute__((noipa, format(printf, 1, 2))) static void fail(const char* format, ...) {
    char* out = launch_now->message;
    size_t room = launch_now->message_bytes;
    size_t used = snprintf(out, room, "kernel %s, block (%u, %u, %u)", kernel_name, block_index.x,
                           block_index.y, block_index.z);
    if (current)
        used += snprintf(out + used, room - used, ", thread (%u, %u, %u)", current->index.x, current->index.y,
                         current->index.z);
    used += snprintf(out + used, room - used, ": ");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out + used, room - used, format, arguments);
    va_end(arguments);
    failed = true;
    workers.abandon(host);
}

// ---- who runs next ----

static void make_ready(Thread& thread) {
    thread.wait.name = nullptr;
    thread.warp->ready |= 1u << thread.place;
    ready_warps |= 1u << thread.warp->place;
}

static Thread* take_ready() {
    if (!ready_warps) return nullptr;
    if (!(ready_warps >> running_warp & 1)) running_warp = __builtin_ctz(ready_warps);
    Warp& warp = warps[running_warp];
    unsigned place = __builtin_ctz(warp.ready);
    warp.ready &= warp.ready - 1;
    if (!warp.ready) ready_warps &= ~(1u << running_warp);
    return &warp.threads[place];
}

static bool same_wait(const Wait& a, const Wait& b) {
    return a.name && b.name && !strcmp(a.name, b.name) && a.mask == b.mask && a.site.line == b.site.line;
}

// Nobody can go on: says who waits where. Threads that wait alike are counted together.
static void report_deadlock() {
    char text[800] = "";
    size_t used = 0;
    for (unsigned w = 0; w < warp_count; ++w)
        for (unsigned p = 0; p < kLanes && used < sizeof text - 1; ++p) {
            Wait first = warps[w].threads[p].wait;
            unsigned count = 0;
            for (unsigned v = w; v < warp_count; ++v)
                for (Thread& other : warps[v].threads)
                    if (same_wait(first, other.wait)) ++count, other.wait.name = nullptr;
            if (!count) continue;
            used += snprintf(text + used, sizeof text - used, "%s%u at %s (%s:%d)", used ? ", " : "", count,
                             first.name, first.site.file, first.site.line);
            if (first.mask && used < sizeof text - 1)
                used += snprintf(text + used, sizeof text - used, " with mask 0x%08x", first.mask);
        }
    unsigned total = block_dim.x * block_dim.y * block_dim.z;
    current = nullptr;                        // the message is about the block
    fail("deadlock: of %u threads %u exited and %u wait for others: %s", total, total - alive_count,
         alive_count, text);
}

static void resume(Thread& next, Context& from) {
    if (!next.worker) next.worker = workers.acquire();
    current = &next;
    switch_context(from, next.worker->context);
}

// Leaves the calling thread, which waits, until somebody makes it ready and its turn comes.
static void suspend() {
    Thread& me = *current;
    Thread* next = take_ready();
    if (!next) report_deadlock();
    if (next != &me) resume(*next, me.worker->context);
}

// ---- waiting for the block, and for lanes of the warp ----

static void release_block_if_complete() {
    if (!barrier.arrived || barrier.arrived < alive_count) return;
    barrier.last_arrived = barrier.arrived;
    barrier.last_nonzero = barrier.nonzero;
    barrier.arrived = barrier.nonzero = 0;
    for (unsigned w = 0; w < warp_count; ++w)
        for (uint32_t left = warps[w].alive; left; left &= left - 1)
            make_ready(*warps[w].lanes[__builtin_ctz(left)]);
}

// On a GPU two __syncthreads in different branches may meet by accident. The guide forbids to rely on it.
static void block_barrier(const char* name, Site site, bool predicate = false) {
    if (barrier.arrived && (barrier.site.line != site.line || strcmp(barrier.name, name)))
        fail("%s (%s:%d) while others of the block wait at %s (%s:%d)", name, site.file, site.line,
             barrier.name, barrier.site.file, barrier.site.line);
    barrier.name = name;
    barrier.site = site;
    ++barrier.arrived;
    barrier.nonzero += predicate;
    current->wait = Wait{name, 0, false, nullptr, site};
    release_block_if_complete();
    suspend();
}

// If all lanes that `wait` names have come, does its work and lets them go on. Exited lanes are not waited
// for.
static void release_lanes_if_complete(Warp& warp, const Wait wait) {
    uint32_t members = wait.mask & warp.alive;
    if (members & ~warp.waiting) return;
    for (uint32_t left = members; left; left &= left - 1) {
        const Wait& other = warp.lanes[__builtin_ctz(left)]->wait;
        if (other.name != wait.name || other.finish != wait.finish || other.mask != wait.mask) return;
    }
    wait.finish(warp.lanes, members);
    warp.waiting &= ~members;
    for (uint32_t left = members; left; left &= left - 1) make_ready(*warp.lanes[__builtin_ctz(left)]);
}

// A warp-wide operation: each lane of the mask brings an operand; the last one to come finishes for all of
// them, while the others stand still. Hence no operand is overwritten before it was read, whatever the masks.
static void lanes_together(const Wait& wait, void* operand) {
    Thread& me = *current;
    Warp& warp = *me.warp;
    if (!(wait.mask >> me.lane & 1))
        fail("%s (%s:%d): lane %u is not in its own mask 0x%08x", wait.name, wait.site.file, wait.site.line,
             me.lane, wait.mask);
    if (wait.all_present && (wait.mask & ~warp.alive))
        fail("%s (%s:%d): mask 0x%08x names lanes 0x%08x, which have exited", wait.name, wait.site.file,
             wait.site.line, wait.mask, wait.mask & ~warp.alive);
    me.wait = wait;
    me.operand = operand;
    warp.waiting |= 1u << me.lane;
    release_lanes_if_complete(warp, wait);
    suspend();
}

static void leave_block(Thread& thread) {
    Warp& warp = *thread.warp;
    thread.worker = nullptr;
    warp.alive &= ~(1u << thread.lane);
    --alive_count;
    release_block_if_complete();
    for (uint32_t left = warp.waiting; left; left &= left - 1) {
        unsigned lane = __builtin_ctz(left);
        const Wait& wait = warp.lanes[lane]->wait;
        if (!(warp.waiting >> lane & 1) || !(wait.mask >> thread.lane & 1)) continue;
        if (wait.all_present)
            fail("exits, but lane %u waits for it at %s (%s:%d)", lane, wait.name, wait.site.file,
                 wait.site.line);
        release_lanes_if_complete(warp, wait);
    }
}

}  // namespace cuemu
