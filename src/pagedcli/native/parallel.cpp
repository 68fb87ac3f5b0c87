#include "parallel.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() (void)0
#endif

namespace {

// The kernels of a step follow each other within microseconds; after this many looks a helper sleeps.
constexpr int SPINS = 20000;

constexpr uint32_t NONE = 1u << 30;
thread_local int own_number = 0;

struct Pool {
    std::mutex busy;  // one job at a time

    // The job. `left` holds its number (upper half) and NONE plus how many pieces nobody has taken (lower half), so that
    // taking a piece of a job that has ended fails. The rest changes only while no piece is out. What helpers look at while
    // they wait, what they write when they are done and the rest lie in different cache lines.
    alignas(64) std::atomic<uint64_t> left{NONE};
    std::atomic<int> most_helpers{0};
    alignas(64) std::atomic<int64_t> num_done{0};
    alignas(64) int64_t count = 0;
    void (*run)(void*, int64_t) = nullptr;
    void* data = nullptr;

    std::mutex asleep_mutex;
    std::condition_variable wake;
    std::atomic<int> num_asleep{0};
    int num_helpers = 0;

    // Subtracts without a loop: of many threads that compare and exchange, all but one try again. Each thread subtracts at
    // most once too often, so the lower half never borrows from the upper one.
    bool take_piece() {
        if (uint32_t(left.load(std::memory_order_acquire)) <= NONE) return false;
        const uint32_t before = uint32_t(left.fetch_sub(1, std::memory_order_acq_rel));
        if (before <= NONE) return false;
        run(data, count - int64_t(before - NONE));
        num_done.fetch_add(1, std::memory_order_release);
        return true;
    }

    bool has_work(int helper) const { return uint32_t(left.load()) > NONE && helper < most_helpers.load(); }

    void help(int helper) {
        own_number = helper + 1;
        for (;;) {
            for (int spin = 0; spin < SPINS; spin++) {
                if (has_work(helper) && take_piece())
                    spin = 0;
                else
                    PAUSE();
            }
            std::unique_lock<std::mutex> lock(asleep_mutex);
            num_asleep++;
            wake.wait(lock, [&] { return has_work(helper); });
            num_asleep--;
        }
    }

    void start(int threads, int64_t pieces, void (*function)(void*, int64_t), void* argument) {
        try {
            for (; num_helpers < threads - 1; num_helpers++) std::thread(&Pool::help, this, num_helpers).detach();
        } catch (const std::system_error&) {  // no memory for a stack, or too many threads: fewer compute the same
        }
        count = pieces, run = function, data = argument;
        num_done.store(0, std::memory_order_relaxed);
        most_helpers.store(threads - 1);
        left.store(((left.load() >> 32) + 1) << 32 | (NONE + uint64_t(pieces)));
        if (num_asleep.load()) {
            std::lock_guard<std::mutex> lock(asleep_mutex);
            wake.notify_all();
        }
    }
};

// Never destroyed: helpers may outlive static objects. A forked process has no helpers, and may have inherited a lock that
// nobody will open, so it starts with a pool of its own.
Pool* only = nullptr;

Pool& pool() {
    static const bool made = [] {
        only = new Pool;
        return pthread_atfork(nullptr, nullptr, [] { only = new Pool; }) == 0;
    }();
    (void)made;
    return *only;
}

}  // namespace

int worker_number() { return own_number; }

void run_pieces(int threads, int64_t count, void (*run)(void*, int64_t), void* data) {
    Pool& p = pool();
    std::unique_lock<std::mutex> lock(p.busy, std::try_to_lock);
    if (!lock.owns_lock() || count > NONE) {  // another thread computes: the cores are taken
        for (int64_t i = 0; i < count; i++) run(data, i);
        return;
    }
    p.start(threads, count, run, data);
    while (p.take_piece()) {
    }
    for (int spin = 0; p.num_done.load(std::memory_order_acquire) < count; spin++) {
        if (spin < 1000)
            PAUSE();
        else
            std::this_thread::yield();  // the helper with the last piece may be waiting for this core
    }
}
