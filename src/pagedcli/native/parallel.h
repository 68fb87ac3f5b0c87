// Runs a function on the threads of torch's own OpenMP pool: a second pool would fight with it for the cores.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

using GompParallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);
extern GompParallel gomp_parallel;  // of the runtime torch has loaded, set once by the loader; null where there is none

// Calls work(i) once for each i in 0 ... count-1, in any order, on up to `threads` threads.
template <class Work> static void parallel_for(int threads, int64_t count, const Work& work) {
    struct Shared {
        const Work& work;
        int64_t count;
        std::atomic<int64_t> next{0};
    } shared{work, count};
    auto drain = [](void* data) {
        Shared& s = *static_cast<Shared*>(data);
        for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.work(i);
    };
    if (threads > count) threads = (int)count;
    if (threads <= 1) return drain(&shared);
    if (gomp_parallel) return gomp_parallel(drain, &shared, threads, 0);
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; i++) helpers.emplace_back(drain, &shared);
    drain(&shared);
    for (auto& helper : helpers) helper.join();
}
