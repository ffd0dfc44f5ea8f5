// cuemu_stack.h - the stacks that emulated threads run on, and the switch between them.
//
// A worker is a stack with a loop on it: run a thread to its end, then start the next one. A thread that
// waits keeps the worker it is on, and another worker carries on. So a kernel without barriers runs on one
// worker with no switch at all.
//
// All modules of a process use the same stacks (module.py passes them to every launch): with stacks for
// each of hundreds of modules the operating system would run out of mappings. Below each stack is a page
// that cannot be written, so an overflow is a crash and not a write into the neighbour.
#pragma once
#include <stdint.h>
#include <sys/mman.h>

#include <sanitizer/asan_interface.h>   // its macros do nothing without AddressSanitizer
#include <ucontext.h>

namespace cuemu {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif
constexpr unsigned kMaxWorkers = 1024;               // threads of a block
constexpr size_t kStackBytes = 256 << 10, kPage = 64 << 10;   // a page is at most 64 KiB (aarch64)

#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)   // the macro lets the other branch be tested
// Saves what a callee must keep, swaps stack pointers, and jumps rather than returns: the CPU predicts
// returns by pairing them with calls, and would be wrong each time.
struct Context { void* stack_pointer; };
extern "C" void cuemu_switch(void** save, void* load);
asm(R"(
    .text
    .local cuemu_switch
    .type cuemu_switch, @function
cuemu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size cuemu_switch, .-cuemu_switch
)");
static void switch_context(Context& from, const Context& to) {
    cuemu_switch(&from.stack_pointer, to.stack_pointer);
}
static void prepare_context(Context& context, char* bottom, char* top, void (*body)()) {
    void** frame = reinterpret_cast<void**>(top) - 8;   // six registers, where to jump, a null return address
    for (int i = 0; i < 8; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(body);
    context.stack_pointer = frame;
}
#else
using Context = ucontext_t;
static void switch_context(Context& from, const Context& to) { swapcontext(&from, &to); }
static void prepare_context(Context& context, char* bottom, char* top, void (*body)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = bottom;
    context.uc_stack.ss_size = top - bottom;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
}
#endif

struct Worker { Context context; };

static char* allocate_stacks() {
    size_t bytes = kMaxWorkers * kStackBytes;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    char* stacks = static_cast<char*>(mapping);
    for (unsigned i = 0; i < kMaxWorkers; ++i) mprotect(stacks + i * kStackBytes, kPage, PROT_NONE);
    return stacks;
}

class Workers {
public:
    void reset(char* stacks, void (*body)()) { stacks_ = stacks; body_ = body; started_ = free_count_ = 0; }

    Worker* acquire() {
        if (free_count_) return free_[--free_count_];
        Worker* worker = &all_[started_];
        char* bottom = stacks_ + started_++ * kStackBytes;
        // Tops at equal distances would all fall into the same few sets of the caches.
        char* top = bottom + kStackBytes - (started_ * 7 % 64) * 192;
        prepare_context(worker->context, bottom + kPage, top, body_);
        return worker;
    }
    void release(Worker* worker) { free_[free_count_++] = worker; }

    // Back to the caller of the launch for good: frames left on the stacks are forgotten, as are their red
    // zones.
    void abandon(Context& host) {
        for (unsigned i = 0; i < started_; ++i)
            ASAN_UNPOISON_MEMORY_REGION(stacks_ + i * kStackBytes + kPage, kStackBytes - kPage);
        Context lost;
        switch_context(lost, host);
    }

private:
    char* stacks_;
    void (*body_)();
    unsigned started_, free_count_;
    Worker all_[kMaxWorkers];
    Worker* free_[kMaxWorkers];
};

}  // namespace cuemu
