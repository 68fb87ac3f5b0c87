// Memory for activations and other intermediate results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <vector>

// Memory that grows and is not freed: an allocation of this size per call would fault its pages in each time.
struct Arena {
    char* base = nullptr;
    size_t capacity = 0, used = 0;
    ~Arena() { free(base); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= capacity) return;
        free(base);
        capacity = (std::max(bytes, capacity / 2 * 3) + 4095) / 4096 * 4096;  // not a little more at each step
        base = static_cast<char*>(aligned_alloc(4096, capacity));
        if (!base) {
            // Python calls these functions: an exception would end the process with nothing but its name.
            fprintf(stderr, "error: not enough memory for a step: %zu MiB more could not be had\nhint: lower "
                            "--max-num-batched-tokens or --max-num-seqs\n", capacity >> 20);
            _exit(2);
        }
    }
    template <class X> X* take(size_t count) {
        X* p = reinterpret_cast<X*>(base + used);
        used += (count * sizeof(X) + 63) / 64 * 64;
        return p;
    }
};

// `bytes` of a vector, from the beginning of a line on.
inline char* lines_of(std::vector<char>& room, size_t bytes) {
    room.resize(bytes + 64);
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
}
