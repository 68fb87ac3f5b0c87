#include "paths.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

std::atomic<bool> avoided[NUM_PATHS];

// Intel's AVX-512 dot product of bf16 pairs runs at half the rate of plain float32 multiply-adds (measured on an Intel
// Xeon with AMX: 214 against 420 GFLOP/s); AMD's runs at twice that rate (Zen 4: 464 against 230), as does Arm's.
bool bf16_dot_is_fast() {
#if defined(__x86_64__)
    unsigned top, name[3];
    if (!__get_cpuid(0, &top, &name[0], &name[2], &name[1])) return true;
    return memcmp(name, "GenuineIntel", sizeof name) != 0;
#else
    return true;
#endif
}

}  // namespace

bool path_available(Path path) {
    if (avoided[path]) return false;
    switch (path) {
        case BF16_DOT:
#if defined(HAS_BF16_DOT)
            return true;
#else
            return false;
#endif
        case BF16_TILES:
        case INT8_TILES:
#if defined(HAS_TILES)
            return tiles_permitted();
#else
            return false;
#endif
        default: return true;
    }
}

Path bf16_vector_path() {
    static const bool dot_is_fast = bf16_dot_is_fast();
    return path_available(BF16_DOT) && dot_is_fast ? BF16_DOT : FMA;
}

Path bf16_path() { return path_available(BF16_TILES) ? BF16_TILES : bf16_vector_path(); }

Path int8_path() { return path_available(INT8_TILES) ? INT8_TILES : INT8_VECTOR; }

extern "C" {

int64_t native_bf16_path() { return bf16_path(); }
int64_t native_int8_path() { return int8_path(); }

// Whether the library was built for tile registers, and whether the system lets this process use them.
int native_has_tiles() {
#if defined(HAS_TILES)
    return 1;
#else
    return 0;
#endif
}
int native_may_use_tiles() { return path_available(BF16_TILES); }

#if defined(EMULATE_TILES)
// Configurations, loads, stores and products of emulated tiles since the last call.
void native_tile_counts(int64_t* out) {
    std::atomic<int64_t>* counts[] = {&tile_counts.configurations, &tile_counts.loads, &tile_counts.stores, &tile_counts.products};
    for (auto* count : counts) *out++ = count->exchange(0);
}
#endif

// For tests and measurements: from now on, do as if this processor did not have the path (1), or had it again (0).
void native_avoid_path(int64_t path, int yes) { avoided[path] = yes; }
}
