// What this machine can do at best, so that a kernel's speed can be stated as a share of it.

#include <cstdint>

#include "parallel.h"
#include "simd.h"

// Reads every byte of the buffer once, on all threads. Returns a sum, so that nothing is optimised away.
extern "C" double native_read_all(const float* data, int64_t count, int threads) {
    constexpr int64_t PIECE = 1 << 18;  // floats: 1 MiB
    std::atomic<int64_t> total{0};
    parallel_for(threads, count / PIECE, [&](int64_t piece) {
        const float* p = data + piece * PIECE;
        vi sums[4] = {};
        for (int64_t i = 0; i < PIECE; i += 4 * VL)
            for (int j = 0; j < 4; j++) sums[j] += load_any<vi>(p + i + j * VL);
        int64_t sum = 0;
        for (int j = 0; j < 4; j++) sum += sums[j][0];
        total += sum;
    });
    return (double)total;
}
