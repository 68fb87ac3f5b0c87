// Weights that were rounded to 4 bits here (kind INT4): w = scale * (step * q - zero), with a float per output feature and
// two bytes per 32 columns. step * q - zero lies in -127 ... 127, so the products are those of int8 weights: exact whole
// numbers, the same whether weights are widened in registers, into a buffer, or for tiles.
//
// A panel of PANEL features is a row of groups: PANEL steps, PANEL zeros, a block of nibbles.
#pragma once

#include "nibbles.h"
#include "paths.h"

// A group of a panel, widened in registers.
struct Int4Group {
    static constexpr int STEPS = BLOCK_STEPS;  // of four columns
    static constexpr int64_t BYTES = 2 * PANEL + Nibbles::BYTES, AHEAD = 8 << 10;
    const uint8_t* block;
    vi step[PANEL_VECTORS], zero[PANEL_VECTORS];  // in both halves of a lane, in its four bytes

    explicit Int4Group(const uint8_t* group) : block(group + 2 * PANEL) {
        for (int v = 0; v < PANEL_VECTORS; v++) {
            step[v] = load_bytes(group + v * VL) * 0x00010001;
            zero[v] = load_bytes(group + PANEL + v * VL) * 0x01010101;
        }
    }
    // Four columns of each feature as int8. A step times 15 fits in a byte, so 16 bits hold two products.
    vi four(int i, int v) const {
        typedef uint16_t pairs __attribute__((vector_size(VL * 4)));
        typedef uint8_t bytes __attribute__((vector_size(VL * 4)));
        return (vi)((bytes)((pairs)Nibbles::four(block, i, v) * (pairs)step[v]) - (bytes)zero[v]);
    }
};

static inline int64_t padded_columns(const Linear& l) {
    const int64_t unit = l.kind == INT4 ? BLOCK_COLUMNS : GROUP;
    return (l.columns + unit - 1) / unit * unit;
}
// Of kinds INT8 and INT4.
static inline int64_t packed_panel_bytes(const Linear& l) {
    return l.kind == INT4 ? padded_columns(l) / BLOCK_COLUMNS * Int4Group::BYTES : padded_columns(l) * PANEL;
}

#if defined(HAS_TILES)
// Whether products of kinds INT8 and INT4 are those of tile registers, for int4 from more than FEW_TOKENS on.
inline bool fills_int8_tiles(const Linear& l) {
    return (l.kind == INT8 || l.kind == INT4) && int8_path() == INT8_TILES && padded_columns(l) % TILE_BYTES == 0;
}
#endif

// Groups of a panel -> int8, [8][PANEL][4] for each.
inline void widen_int4(const uint8_t* groups, int64_t count, uint8_t* to) {
    for (; count > 0; count--, groups += Int4Group::BYTES) {
        const Int4Group group(groups);
#pragma GCC unroll 8
        for (int i = 0; i < Int4Group::STEPS; i++)
            for (int v = 0; v < PANEL_VECTORS; v++, to += VL * GROUP) store_any(to, group.four(i, v));
    }
}
