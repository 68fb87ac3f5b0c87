// Blocks of columns of a panel as 4-bit numbers: of 32 columns [4][PANEL][4] bytes, of which the low half of byte i in row j
// is k = 8 j + i and the high half k = 8 j + 4 + i; of 16 columns the first two rows.
#pragma once

#include "epilogue.h"
#include "int8_dot.h"

constexpr int64_t BLOCK_COLUMNS = 32, BLOCK_STEPS = BLOCK_COLUMNS / GROUP;

template <int64_t C> struct NibblesOf {
    static constexpr int64_t COLUMNS = C, BYTES = PANEL * C / 2;
    using Sum = NibbleSum;
    static vi bytes(const uint8_t* block, int i, int v) { return load_any<vi>(block + (i / 2 * PANEL_VECTORS + v) * VL * GROUP); }
    static vi half(vi bytes, int i) { return (i % 2 ? (vi)((vu)bytes >> 4) : bytes) & (vi{} + 0x0f0f0f0f); }
    // Columns 4 i to 4 i + 3 of each feature.
    static vi four(const uint8_t* block, int i, int v) { return half(bytes(block, i, v), i); }
    // All columns of the features of vector v, in fours as above.
    static void store(uint8_t* block, int v, const vi* fours) {
        constexpr int32_t LOW = 0x0f0f0f0f;
        for (int i = 0; i < C / GROUP; i += 2)
            store_any(block + (i / 2 * PANEL_VECTORS + v) * VL * GROUP, (fours[i] & LOW) | (fours[i + 1] & LOW) << 4);
    }
};
using Nibbles = NibblesOf<BLOCK_COLUMNS>;
