// Runs pieces of work on the caller and a few helper threads.
//
// The caller waits for pieces, never for threads: a helper that the system has not scheduled simply gets none. With a
// barrier, as in OpenMP, a step of hundreds of short kernels takes a hundred times longer on a machine that is busy.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

// Calls run(data, i) once for each i in 0 ... count-1, in any order, on at most `threads` threads.
void run_pieces(int threads, int64_t count, void (*run)(void* data, int64_t i), void* data);

// 0 on the thread that calls run_pieces, from 1 on a helper's number.
int worker_number();

// The same for anything that can be called with an int64_t.
template <class Work> static void parallel_for(int threads, int64_t count, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
    run_pieces(threads, count, [](void* data, int64_t i) { (*static_cast<const Work*>(data))(i); }, (void*)&work);
}

// Calls work(row) for all rows, `chunk` neighbours on one thread.
template <class Work> static void for_rows(int threads, int64_t num_rows, int64_t chunk, const Work& work) {
    parallel_for(threads, (num_rows + chunk - 1) / chunk, [&](int64_t i) {
        for (int64_t r = i * chunk; r < std::min(num_rows, (i + 1) * chunk); r++) work(r);
    });
}

// Calls work(i) for each i in 0 ... count-1. Each worker has a range of neighbouring pieces, the same in every call of this
// count, and helps the others when it is done: what it touched first, it reads again, and no counter is everybody's.
template <class Work> static void parallel_ranges(int threads, int64_t count, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
    struct alignas(64) Range {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const int num_ranges = (int)std::min<int64_t>(threads, count);
    std::vector<Range> ranges(num_ranges);
    for (int t = 0; t < num_ranges; t++)
        ranges[t].next = count * t / num_ranges, ranges[t].end = count * (t + 1) / num_ranges;
    parallel_for(num_ranges, num_ranges, [&](int64_t) {
        const int own = worker_number() % num_ranges;
        for (int t = 0; t < num_ranges; t++) {
            Range& range = ranges[(own + t) % num_ranges];
            if (range.next.load(std::memory_order_relaxed) >= range.end) continue;  // a look is cheaper than an addition
            for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) work(i);
        }
    });
}
