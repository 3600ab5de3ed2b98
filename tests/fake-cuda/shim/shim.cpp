// The scheduler of the shim: one fiber per CUDA thread, the blocks of a grid one after another. See emu.h.
#include "shim.h"
#undef __shared__
#undef __device__
#undef __global__
#undef __constant__
#undef __host__
#undef __forceinline__

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "emu.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SHIM_ASAN 1
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
unsigned char* shim_dynamic_shared;

namespace {

// ----------------------------------------------------------------------------------------------------- context switch

#if defined(__x86_64__)
// Callee-saved registers of the System V ABI; the kernels change neither rounding mode nor exception masks.
asm(R"(
.text
.hidden paraft_shim_switch
.type paraft_shim_switch, @function
.globl paraft_shim_switch
paraft_shim_switch:
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
    ret
.size paraft_shim_switch, .-paraft_shim_switch
)");
extern "C" void paraft_shim_switch(void** save, void* load);
struct Context {
    void* sp = nullptr;
    void start_at(char* stack, size_t bytes, void (*entry)()) {
        void** top = (void**)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
        *--top = nullptr;  // the return address of `entry`, which never returns; aligns as a call would
        *--top = (void*)entry;
        for (int i = 0; i < 6; i++) *--top = nullptr;
        sp = top;
    }
};
inline void swap_to(Context& from, Context& to) { paraft_shim_switch(&from.sp, to.sp); }
#elif defined(__aarch64__)
asm(R"(
.text
.hidden paraft_shim_switch
.type paraft_shim_switch, %function
.globl paraft_shim_switch
paraft_shim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size paraft_shim_switch, .-paraft_shim_switch
)");
extern "C" void paraft_shim_switch(void** save, void* load);
struct Context {
    void* sp = nullptr;
    void start_at(char* stack, size_t bytes, void (*entry)()) {
        char* top = (char*)((uintptr_t)(stack + bytes) & ~(uintptr_t)15) - 160;
        memset(top, 0, 160);
        *(void**)(top + 88) = (void*)entry;  // x30
        sp = top;
    }
};
inline void swap_to(Context& from, Context& to) { paraft_shim_switch(&from.sp, to.sp); }
#else
#include <ucontext.h>
struct Context {
    ucontext_t context;
    void start_at(char* stack, size_t bytes, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = bytes;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
};
inline void swap_to(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#endif

// ------------------------------------------------------------------------------------------------------------- state

constexpr int MAX_THREADS = 1024;
#ifdef SHIM_ASAN
constexpr size_t STACK = 256 << 10;  // redzones make frames larger
#else
constexpr size_t STACK = 128 << 10;
#endif
constexpr size_t GUARD = 64 << 10;  // a multiple of any page size

using Kernel = shim_kernel;
std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

enum class State : uint8_t { Ready, AtBarrier, InWarp, Gone };

struct Thread {
    State state;
    int stack;  // -1: none taken yet
    uint3 index;
    int line;               // of the barrier it waits at
    int predicate;          // of a __syncthreads_count and its like
    const shim_lane_op* op;  // of the collective it waits in
    Context context;
#ifdef SHIM_ASAN
    void* fake_stack;
#endif
};

struct Warp {
    unsigned alive;    // lanes that exist and have not gone
    unsigned arrived;  // lanes that wait in a collective
};

struct Run {
    const char* name;
    const Kernel* kernel;
    void** args;
    int threads, alive, at_barrier, schedule;
    int barrier_reduce, barrier_result;
    uint64_t random;
    int current;
    int order[MAX_THREADS], order_length, cursor;
    uint64_t next[MAX_THREADS / 64];
    bool any_next;
    volatile bool in_fiber;   // a fiber runs, not the launcher
    volatile bool switching;  // between two stacks: AddressSanitizer cannot be told of another switch then
    struct timespec deadline;
    pthread_t owner;
    size_t dynamic_bytes;
    Context main;
    bool failed;
    char error[1024];
    Thread thread[MAX_THREADS];
    Warp warp[MAX_THREADS / 32];
    int free_stacks[MAX_THREADS], free_count;
#ifdef SHIM_ASAN
    void* main_fake_stack;
    const void* main_bottom;
    size_t main_size;
#endif
};

std::mutex running;
Run* run;  // the one launch that runs; allocated once
char* stacks;

uint64_t random_next() {
    uint64_t z = run->random += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
unsigned random_below(unsigned n) { return (unsigned)((random_next() >> 32) * n >> 32); }

char* stack_of(int i) { return stacks + (size_t)i * (STACK + GUARD) + GUARD; }

__attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
    if (run->failed) return;
    run->failed = true;
    int n = snprintf(run->error, sizeof run->error, "%s, grid (%u,%u,%u), block (%u,%u,%u), in block (%u,%u,%u): ",
                     run->name, gridDim.x, gridDim.y, gridDim.z, blockDim.x, blockDim.y, blockDim.z, blockIdx.x,
                     blockIdx.y, blockIdx.z);
    if (n < 0 || n >= (int)sizeof run->error) return;
    va_list list;
    va_start(list, format);
    vsnprintf(run->error + n, sizeof run->error - n, format, list);
    va_end(list);
}

// -------------------------------------------------------------------------------------------------------- scheduling

void fiber_entry();

void make_ready(int t) {
    run->thread[t].state = State::Ready;
    run->next[t >> 6] |= 1ull << (t & 63);
    run->any_next = true;
}

// The threads made ready in the last phase, in the order of the schedule.
bool next_phase() {
    Run& r = *run;
    if (!r.any_next) return false;
    int n = 0;
    const int words = (r.threads + 63) / 64;
    for (int w = 0; w < words; w++) {
        for (uint64_t bits = r.next[w]; bits; bits &= bits - 1) r.order[n++] = w * 64 + __builtin_ctzll(bits);
        r.next[w] = 0;
    }
    if (r.schedule == EMU_DESCENDING) {
        for (int i = 0; i < n / 2; i++) std::swap(r.order[i], r.order[n - 1 - i]);
    } else if (r.schedule == EMU_RANDOM) {
        for (int i = n - 1; i > 0; i--) std::swap(r.order[i], r.order[random_below(i + 1)]);
    }
    r.any_next = false;
    r.order_length = n;
    r.cursor = 0;
    return true;
}

// The lanes of a warp whose collective is complete go on at once, so that a warp runs ahead of the others as far as a
// barrier of the block lets it: a missing one shows. In random order they wait for the next phase, in step with the others.
void make_ready_now(int first, unsigned lanes) {
    Run& r = *run;
    const int count = __builtin_popcount(lanes), left = r.order_length - r.cursor;
    if (r.cursor < count) {
        memmove(r.order + count, r.order + r.cursor, left * sizeof(int));
        r.cursor = count;
        r.order_length = count + left;
    }
    for (unsigned rest = lanes; rest;) {
        const int lane = r.schedule == EMU_DESCENDING ? __builtin_ctz(rest) : 31 - __builtin_clz(rest);
        rest &= ~(1u << lane);
        r.thread[first + lane].state = State::Ready;
        r.order[--r.cursor] = first + lane;
    }
}

// The next thread that can run, or -1: the block has ended, or nobody can go on, or something failed.
int pick() {
    Run& r = *run;
    if (r.failed) return -1;
    if (r.cursor >= r.order_length && !next_phase()) return -1;
    return r.order[r.cursor++];
}

// Makes `t` the current thread, with a stack of its own.
Thread& set_current(int t) {
    Run& r = *run;
    Thread& to = r.thread[t];
    if (to.stack < 0) {
        to.stack = r.free_stacks[--r.free_count];
#ifdef SHIM_ASAN
        // What threads that were left in the midst of something had marked as out of bounds.
        __asan_unpoison_memory_region(stack_of(to.stack), STACK);
#endif
        to.context.start_at(stack_of(to.stack), STACK, fiber_entry);
    }
    r.current = t;
    threadIdx = to.index;
    return to;
}

// From the launcher into a block's first thread; returns when nobody in the block can go on.
void enter(int t) {
    Run& r = *run;
    Thread& to = set_current(t);
    r.in_fiber = true;
    r.switching = true;
#ifdef SHIM_ASAN
    __sanitizer_start_switch_fiber(&r.main_fake_stack, stack_of(to.stack), STACK);
#endif
    swap_to(r.main, to.context);
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(r.main_fake_stack, nullptr, nullptr);
#endif
    r.switching = false;
}

// Goes from `from` (null: this thread has ended) to thread `t`, or to the launcher with -1. Returns when `from` is gone
// on with.
void go(Thread* from, int t) {
    Run& r = *run;
    static Context discarded;
    Context* target = t >= 0 ? &set_current(t).context : &r.main;
    if (t < 0) r.in_fiber = false;
    r.switching = true;
#ifdef SHIM_ASAN
    __sanitizer_start_switch_fiber(from ? &from->fake_stack : nullptr, t >= 0 ? stack_of(r.thread[t].stack) : r.main_bottom,
                  t >= 0 ? STACK : r.main_size);
#endif
    swap_to(from ? from->context : discarded, *target);
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(from ? from->fake_stack : nullptr, nullptr, nullptr);
#endif
    r.switching = false;
}

void yield_from(int t) {
    const int to = pick();
    // Alone in its phase: no switch is needed.
    if (to == t) return;
    go(&run->thread[t], to);
}

void release_barrier() {
    Run& r = *run;
    int count = 0, line = r.thread[r.current].line;
    for (int t = 0; t < r.threads; t++) {
        if (r.thread[t].line != line) {
            fail("barrier divergence: threads wait at the __syncthreads of lines %d and %d", line, r.thread[t].line);
            return;
        }
        count += r.thread[t].predicate;
    }
    r.barrier_result = r.barrier_reduce == 0 ? count : r.barrier_reduce == 1 ? count == r.threads : count > 0;
    r.at_barrier = 0;
    for (int t = 0; t < r.threads; t++) make_ready(t);
}

const char* name_of(shim_collective what) {
    return what == SHIM_SYNC      ? "__syncwarp"
           : what == SHIM_SHUFFLE ? "__shfl_sync"
           : what == SHIM_BALLOT  ? "__ballot_sync"
                                  : "shim_warp_gather";
}

// Completes a collective of this warp if all lanes of its mask have come.
void complete_warp(int w, int lane_of_group) {
    Run& r = *run;
    Warp& warp = r.warp[w];
    const shim_lane_op& first = *r.thread[w * 32 + lane_of_group].op;
    const unsigned group = first.mask & warp.alive;
    if ((warp.arrived & group) != group) return;
    unsigned votes = 0;
    for (unsigned left = group; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        const shim_lane_op& op = *r.thread[w * 32 + lane].op;
        if (op.mask != first.mask || op.what != first.what || op.bytes != first.bytes) {
            fail("lanes of warp %d take part in different collectives: lane %d in %s (line %d, mask %08x), lane %d in "
                 "%s (line %d, mask %08x)",
                 w, lane_of_group, name_of(first.what), first.line, first.mask, lane, name_of(op.what), op.line, op.mask);
            return;
        }
        if (op.what == SHIM_BALLOT && *(const int*)op.mine) votes |= 1u << lane;
    }
    auto value = [&](int lane) -> const void* {
        return group >> lane & 1 ? r.thread[w * 32 + lane].op->mine : nullptr;
    };
    auto put = [&](void* to, const void* from, int bytes) {
        if (from) memcpy(to, from, bytes);
        else memset(to, 0xff, bytes);
    };
    for (unsigned left = group; left; left &= left - 1) {
        const shim_lane_op& op = *r.thread[w * 32 + __builtin_ctz(left)].op;
        if (op.what == SHIM_BALLOT) *(unsigned*)op.out = votes;
        if (op.what == SHIM_SHUFFLE) put(op.out, value(op.source & 31), op.bytes);
        if (op.what == SHIM_GATHER)
            for (int lane = 0; lane < 32; lane++) put((char*)op.out + lane * op.bytes, value(lane), op.bytes);
    }
    warp.arrived &= ~group;
    if (r.schedule != EMU_RANDOM) {
        make_ready_now(w * 32, group);
        return;
    }
    for (unsigned left = group; left; left &= left - 1) make_ready(w * 32 + __builtin_ctz(left));
}

void thread_ended() {
    Run& r = *run;
    const int t = r.current, w = t >> 5;
    r.thread[t].state = State::Gone;
    r.alive--;
    if (r.at_barrier > 0 && r.at_barrier == r.alive) {
        fail("barrier divergence: %d threads wait at a __syncthreads, the other %d have gone", r.at_barrier,
             r.threads - r.alive);
        return;
    }
    r.warp[w].alive &= ~(1u << (t & 31));
    // The lanes that wait may have waited for this one only.
    for (unsigned left = r.warp[w].arrived; left && !r.failed; left = left & (left - 1) & r.warp[w].arrived) {
        complete_warp(w, __builtin_ctz(left));
    }
}

void fiber_entry() {
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    Run& r = *run;
    r.switching = false;
    while (true) {
        r.kernel->call(r.kernel->function, r.args);
        thread_ended();
        const int stack = r.thread[r.current].stack, to = pick();
        if (to < 0 || r.thread[to].stack >= 0) {
            r.free_stacks[r.free_count++] = stack;
            go(nullptr, to);
        }
        // A thread that has not begun goes on in this fiber: a kernel without barriers needs no switch at all.
        r.thread[to].stack = stack;
        r.current = to;
        threadIdx = r.thread[to].index;
    }
}

// ------------------------------------------------------------------------------------------------------- time and memory

double seconds_allowed() {
    const char* text = getenv("PARAFT_FAKE_CUDA_KERNEL_SECONDS");
    const double seconds = text ? atof(text) : 0;
    return seconds > 0 ? seconds : 120;
}

bool past(const timespec& deadline) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec > deadline.tv_sec || (now.tv_sec == deadline.tv_sec && now.tv_nsec >= deadline.tv_nsec);
}

int watchdog_signal() { return SIGRTMIN + 7; }

// A fiber in an endless loop never comes back by itself: the signal leaves it where it is. Kernels hold nothing that
// would have to be given back.
void on_watchdog(int) {
    Run* r = run;
    if (!r || !r->in_fiber || r->switching || !pthread_equal(r->owner, pthread_self()) || !past(r->deadline)) return;
    fail("did not end within %g s (thread (%u,%u,%u) was running)", seconds_allowed(), threadIdx.x, threadIdx.y,
         threadIdx.z);
    go(&r->thread[r->current], -1);
}

struct Watchdog {
    timer_t timer;
    bool made = false;
    void arm(double seconds) {
        if (!made) {
            struct sigaction action = {};
            action.sa_handler = on_watchdog;
            // It does not return from the handler, after which the signal must not stay blocked.
            action.sa_flags = SA_NODEFER | SA_RESTART;
            sigaction(watchdog_signal(), &action, nullptr);
            struct sigevent event = {};
            event.sigev_notify = SIGEV_THREAD_ID;
            event.sigev_signo = watchdog_signal();
            event._sigev_un._tid = (int)syscall(SYS_gettid);
            made = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
        }
        set(seconds);
    }
    void disarm() { set(0); }
    ~Watchdog() {
        if (made) timer_delete(timer);
    }

  private:
    void set(double seconds) {
        if (!made) return;
        itimerspec time = {};
        time.it_value.tv_sec = (time_t)seconds;
        time.it_value.tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9);
        // Again every 100 ms: the first may come while the launcher itself runs.
        if (seconds > 0) time.it_interval.tv_nsec = 100000000;
        timer_settime(timer, 0, &time, nullptr);
    }
};
thread_local Watchdog watchdog;

bool make_stacks() {
    if (stacks) return true;
    const size_t bytes = MAX_THREADS * (STACK + GUARD);
    char* memory = (char*)mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    stacks = memory;
    for (int i = 0; i < MAX_THREADS; i++) {
        if (mprotect(stack_of(i), STACK, PROT_READ | PROT_WRITE) != 0) {
            munmap(memory, bytes);
            stacks = nullptr;
            return false;
        }
    }
    return true;
}

// By hand: a memset would be checked by AddressSanitizer against the red zones between the variables.
__attribute__((no_sanitize("address"), optimize("no-tree-loop-distribute-patterns"))) void poison(char* from, char* to) {
    for (; from < to && ((uintptr_t)from & 7); from++) *from = (char)0xff;
    for (; from + 8 <= to; from += 8) *(uint64_t*)from = ~0ull;
    for (; from < to; from++) *from = (char)0xff;
}

constexpr size_t CANARY = 256;
constexpr unsigned char CANARY_BYTE = 0xc5;

// ---------------------------------------------------------------------------------------------------------- the launch

void explain_standstill() {
    Run& r = *run;
    int in_warp = 0, warp_thread = -1, barrier_line = 0;
    for (int t = 0; t < r.threads; t++) {
        if (r.thread[t].state == State::InWarp) in_warp++, warp_thread = t;
        if (r.thread[t].state == State::AtBarrier) barrier_line = r.thread[t].line;
    }
    char waits[160] = "";
    if (warp_thread >= 0) {
        const shim_lane_op& op = *r.thread[warp_thread].op;
        snprintf(waits, sizeof waits, ", %d in collectives of their warp (one in %s, line %d, mask %08x)", in_warp,
                 name_of(op.what), op.line, op.mask);
    }
    fail("barrier divergence: %d threads wait at a __syncthreads (line %d)%s, %d have gone", r.at_barrier, barrier_line,
         waits, r.threads - r.alive);
}

void run_block() {
    Run& r = *run;
    r.alive = r.threads;
    r.at_barrier = 0;
    r.order_length = r.cursor = 0;
    r.any_next = false;
    memset(r.next, 0, sizeof r.next);
    r.free_count = 0;
    for (int i = MAX_THREADS; i-- > 0;) r.free_stacks[r.free_count++] = i;
    for (int w = 0; w * 32 < r.threads; w++) {
        const int lanes = r.threads - w * 32;
        r.warp[w] = {lanes >= 32 ? ~0u : (1u << lanes) - 1, 0};
    }
    for (int t = 0; t < r.threads; t++) {
        r.thread[t].stack = -1;
        make_ready(t);
    }
    const int first = pick();
    enter(first);
    r.in_fiber = false;
    if (!r.failed && r.alive > 0) explain_standstill();
}

void block_at(uint64_t linear) {
    blockIdx.x = (unsigned)(linear % gridDim.x);
    blockIdx.y = (unsigned)(linear / gridDim.x % gridDim.y);
    blockIdx.z = (unsigned)(linear / gridDim.x / gridDim.y);
}

void run_grid() {
    Run& r = *run;
    const uint64_t blocks = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
    // Above this many blocks the order is only turned round, not shuffled.
    constexpr uint64_t SHUFFLED = 1 << 22;
    std::vector<uint32_t> order;
    uint64_t turn = 0;
    if (r.schedule == EMU_RANDOM && blocks <= SHUFFLED) {
        order.resize(blocks);
        for (uint64_t i = 0; i < blocks; i++) order[i] = (uint32_t)i;
        for (uint64_t i = blocks; i-- > 1;) std::swap(order[i], order[random_below((unsigned)i + 1)]);
    } else if (r.schedule == EMU_RANDOM) {
        turn = random_next() % blocks;
    }
    // Poisoning all shared memory of a file before each of very many blocks would take longer than the blocks.
    size_t budget = 64 << 20;
    const size_t shared = r.kernel->shared_end - r.kernel->shared_begin;
    for (uint64_t i = 0; i < blocks && !r.failed; i++) {
        uint64_t linear = (i + turn) % blocks;
        if (r.schedule == EMU_DESCENDING) linear = blocks - 1 - i;
        if (!order.empty()) linear = order[i];
        block_at(linear);
        if (shared <= budget) {
            poison(r.kernel->shared_begin, r.kernel->shared_end);
            budget -= shared;
        }
        if (r.dynamic_bytes) memset(shim_dynamic_shared, 0xff, r.dynamic_bytes);
        run_block();
#ifndef SHIM_ASAN
        for (size_t c = 0; c < CANARY; c++)
            if (shim_dynamic_shared[r.dynamic_bytes + c] != CANARY_BYTE) {
                fail("wrote past its %zu bytes of dynamic shared memory (at byte %zu)", r.dynamic_bytes,
                     r.dynamic_bytes + c);
                break;
            }
#endif
    }
}

bool check_launch(const Kernel& kernel, emu_dim grid, emu_dim block) {
    const uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || !threads) fail("an empty grid or block");
    else if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) fail("the grid is too large");
    else if (block.x > 1024 || block.y > 1024 || block.z > 64 || threads > MAX_THREADS) fail("the block is too large");
    else if (threads > (uint64_t)kernel.max_threads)
        fail("%d threads in a block, its __launch_bounds__ allow %d", (int)threads, kernel.max_threads);
    return !run->failed;
}

}  // namespace

// ------------------------------------------------------------------------------------------- what the kernels call

int shim_barrier_reduce(int predicate, int how, int line) {
    Run& r = *run;
    const int t = r.current;
    Thread& me = r.thread[t];
    me.state = State::AtBarrier;
    me.line = line;
    me.predicate = predicate;
    r.barrier_reduce = how;
    r.at_barrier++;
    if (r.at_barrier == r.threads) release_barrier();
    yield_from(t);
    return r.barrier_result;
}

void shim_barrier(int line) { shim_barrier_reduce(0, 0, line); }

void shim_warp(const shim_lane_op& op) {
    Run& r = *run;
    const int t = r.current, w = t >> 5, lane = t & 31;
    Thread& me = r.thread[t];
    me.state = State::InWarp;
    me.op = &op;
    if (!(op.mask >> lane & 1)) {
        fail("lane %d of warp %d is not in the mask %08x of its own %s (line %d)", lane, w, op.mask, name_of(op.what),
             op.line);
    } else {
        r.warp[w].arrived |= 1u << lane;
        complete_warp(w, lane);
    }
    yield_from(t);
}

unsigned shim_active_lanes() { return run->warp[run->current >> 5].alive; }
int shim_lane() { return run->current & 31; }

void shim_register(const char* name, const shim_kernel& kernel) {
    if (!kernels().emplace(name, kernel).second) {
        fprintf(stderr, "two kernels are called %s\n", name);
        abort();
    }
}

// -------------------------------------------------------------------------------------------------------- the C interface

const char* emu_launch(const char* name, emu_dim grid, emu_dim block, size_t dynamic_bytes, void** args, int schedule,
                       uint64_t seed) {
    static thread_local std::string error;
    std::lock_guard<std::mutex> alone(running);
    const auto found = kernels().find(name);
    if (found == kernels().end()) {
        error = std::string("no kernel is called ") + name;
        return error.c_str();
    }
    if (!run) run = new Run();
    if (!make_stacks()) return "no memory for the stacks of the fibers";
    Run& r = *run;
    r.name = found->first.c_str();
    r.kernel = &found->second;
    r.args = args;
    r.schedule = schedule;
    r.random = seed;
    r.failed = false;
    r.in_fiber = false;
    r.owner = pthread_self();
    r.dynamic_bytes = dynamic_bytes;
    r.threads = (int)((uint64_t)block.x * block.y * block.z);
    gridDim = {grid.x, grid.y, grid.z};
    blockDim = {block.x, block.y, block.z};
    blockIdx = {0, 0, 0};
    if (!check_launch(found->second, grid, block)) {
        error = r.error;
        return error.c_str();
    }
    for (int t = 0; t < r.threads; t++) {
        const unsigned i = (unsigned)t;
        r.thread[t].index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
    }
#ifdef SHIM_ASAN
    pthread_attr_t attributes;
    void* bottom;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &r.main_size);
    r.main_bottom = bottom;
    pthread_attr_destroy(&attributes);
    const size_t canary = 0;
#else
    const size_t canary = CANARY;
#endif
    void* dynamic = nullptr;
    if (posix_memalign(&dynamic, 1024, dynamic_bytes + canary) != 0) return "no memory for dynamic shared memory";
    shim_dynamic_shared = (unsigned char*)dynamic;
    memset(shim_dynamic_shared + dynamic_bytes, CANARY_BYTE, canary);
    const double seconds = seconds_allowed();
    clock_gettime(CLOCK_MONOTONIC, &r.deadline);
    r.deadline.tv_sec += (time_t)seconds;
    r.deadline.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (r.deadline.tv_nsec >= 1000000000) r.deadline.tv_sec++, r.deadline.tv_nsec -= 1000000000;
    watchdog.arm(seconds);
    run_grid();
    watchdog.disarm();
    free(dynamic);
    shim_dynamic_shared = nullptr;
    if (!r.failed) return nullptr;
    error = r.error;
    return error.c_str();
}

int emu_kernel_args(const char* name, size_t* sizes, int capacity) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) return -1;
    const Kernel& kernel = found->second;
    for (int i = 0; sizes && i < capacity && i < kernel.arg_count; i++) sizes[i] = kernel.arg_sizes[i];
    return kernel.arg_count;
}

int emu_kernel_arg_is_pointer(const char* name, int argument) {
    const auto found = kernels().find(name);
    if (found == kernels().end() || argument < 0 || argument >= found->second.arg_count) return 0;
    return found->second.arg_is_pointer[argument];
}

int emu_kernel_max_threads(const char* name) {
    const auto found = kernels().find(name);
    return found == kernels().end() ? -1 : found->second.max_threads;
}

const char* emu_kernel_name(int index) {
    if (index < 0 || index >= (int)kernels().size()) return nullptr;
    auto at = kernels().begin();
    std::advance(at, index);
    return at->first.c_str();
}
