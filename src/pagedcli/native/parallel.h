// Runs pieces of work on the caller and a few helper threads.
//
// The caller waits for pieces, never for threads: a helper that the system has not scheduled simply gets none. With a
// barrier, as in OpenMP, a step of hundreds of short kernels takes a hundred times longer on a machine that is busy.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

// Calls run(data, i) once for each i in 0 ... count-1, in any order, on at most `threads` threads.
void run_pieces(int threads, int64_t count, void (*run)(void* data, int64_t i), void* data);

// The same for anything that can be called with an int64_t.
template <class Work> static void parallel_for(int threads, int64_t count, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
    run_pieces(threads, count, [](void* data, int64_t i) { (*static_cast<const Work*>(data))(i); }, (void*)&work);
}
