// Which instructions compute a product, where the processor has several. Decided once per process by what the processor is
// known to do well, so results do not change from run to run on one machine.
#pragma once

#include <type_traits>

#include "simd.h"
#include "tile_registers.h"

// Mirrored by pagedcli.native.paths.
enum Path : int64_t {
    FMA,          // float32 multiply-adds; bf16 and float16 are widened in registers
    BF16_DOT,     // dot products of bf16 pairs
    BF16_TILES,   // tile registers
    INT8_VECTOR,  // 8-bit dot products, or the nearest that the processor has
    INT8_TILES,
    NUM_PATHS,
};

bool path_available(Path path);

// Paths of this process for bf16 and for int8 weights; the vector path also where a shape does not fill tiles.
Path bf16_path();
Path bf16_vector_path();
Path int8_path();

// Calls f with the element type whose kernels multiply this type. fits: the shape allows whole tiles.
template <class T, class F> static inline auto with_kernel(T type, bool fits, const F& f) {
    (void)fits;
    if constexpr (std::is_same_v<T, BF16>) {
#if defined(HAS_TILES)
        if (bf16_path() == BF16_TILES && fits) return f(BF16Tiles{});
#endif
#if defined(HAS_BF16_DOT)
        if (bf16_vector_path() == BF16_DOT) return f(BF16Dot{});
#endif
    }
    return f(type);
}
