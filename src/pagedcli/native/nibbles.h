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
    // Columns 4 i to 4 i + 3 of a feature, a byte each, into a block of zeros.
    static void put_four(uint8_t* block, int64_t i, int64_t lane, uint32_t four) {
        uint8_t* at = block + (i / 2 * PANEL + lane) * GROUP;
        store_any(at, load_any<uint32_t>(at) | (four & 0x0f0f0f0f) << (i % 2 ? 4 : 0));
    }
    // All columns q of the features of vector v.
    static void store(uint8_t* block, int v, const vi* q) {
        for (int k = 0; k < C; k += 2 * GROUP) {
            vi bytes = {};
            for (int i = 0; i < GROUP; i++) bytes |= (q[k + i] | q[k + GROUP + i] << 4) << 8 * i;
            store_any(block + (k / 8 * PANEL_VECTORS + v) * VL * GROUP, bytes);
        }
    }
};
using Nibbles = NibblesOf<BLOCK_COLUMNS>;
