// Weights of 4 or 8 bits as they are packed: chunks of columns that share a scale and a minimum, w = scale * q - min.
//
// A panel of PANEL features is a row of chunks. A chunk is its header (PANEL scales, then PANEL minima) and blocks of 32
// columns: [4][PANEL][4] bytes of 4-bit weights, of which the low half of byte i in row j is k = 8 j + i and the high half
// k = 8 j + 4 + i; or [8][PANEL][4] bytes, k = 4 j + i.
#pragma once

#include "epilogue.h"
#include "int8_dot.h"
#include "linear.h"

constexpr int64_t BLOCK_COLUMNS = 32;
constexpr int64_t MOST_BLOCKS = 8;  // of a chunk: sums of its products stay exact, and a whole one in the L1 cache

// Headers of kind INT4: scales and minima are bytes, in units of floats of their feature.
struct ByteHeader {
    static constexpr int64_t BYTES = 2 * PANEL;
    const float* ratio;  // [PANEL] of the minima's unit to the scales'
    static vf scale(const uint8_t* header, int v) { return __builtin_convertvector(load_bytes(header + v * VL), vf); }
    vf min(const uint8_t* header, int v) const { return scale(header + PANEL, v) * loadf(ratio + v * VL); }
};

// Headers of kinds CODES4 and CODES8: scales of a floating-point type, and a zero point of a byte: w = scale * (q - zero).
template <class T> struct TypedHeader {
    using Elem = typename T::Elem;
    static constexpr int64_t BYTES = PANEL * (sizeof(Elem) + 1);
    static vf scale(const uint8_t* header, int v) { return Rows<T>::load((const Elem*)header + v * VL); }
    static vf min(const uint8_t* header, int v) {
        return scale(header, v) * __builtin_convertvector(load_bytes(header + PANEL * sizeof(Elem) + v * VL), vf);
    }
};

// Headers of chunks that were unpacked because they are read many times.
struct FloatHeader {
    static constexpr int64_t BYTES = 8 * PANEL;
    static vf scale(const uint8_t* header, int v) { return load_any<vf>(header + v * VL * 4); }
    static vf min(const uint8_t* header, int v) { return load_any<vf>(header + (PANEL + v * VL) * 4); }
};

// Blocks of 32 columns: the weights of four of them, k = 4 i, in each lane.
struct Nibbles {
    static constexpr int64_t BYTES = PANEL * BLOCK_COLUMNS / 2;
    using Sum = NibbleSum;
    static vi four(const uint8_t* block, int i, int v) {
        const vi bytes = load_any<vi>(block + (i / 2 * PANEL_VECTORS + v) * VL * GROUP);
        return (i % 2 ? (vi)((vu)bytes >> 4) : bytes) & (vi{} + 0x0f0f0f0f);
    }
};
template <class S> struct Bytes {
    static constexpr int64_t BYTES = PANEL * BLOCK_COLUMNS;
    using Sum = S;
    static vi four(const uint8_t* block, int i, int v) { return load_any<vi>(block + (i * PANEL_VECTORS + v) * VL * GROUP); }
};

// Calls f(header, blocks) with the types of a kind, for the panel that is the p-th.
template <class F> inline void with_packing(const Linear& l, int64_t p, const F& f) {
    if (l.kind == INT4) return f(ByteHeader{l.mins + p * PANEL}, Nibbles{});
    if (l.kind == CODES8) return f(TypedHeader<F32>{}, Bytes<ByteSum>{});
    if (l.scale_type == FLOAT16) return f(TypedHeader<F16>{}, Nibbles{});
    if (l.scale_type == BFLOAT16) return f(TypedHeader<BF16>{}, Nibbles{});
    f(TypedHeader<F32>{}, Nibbles{});
}

// The sizes that follow from a layer.
struct Chunks {
    int64_t blocks, columns, count;  // of a chunk; of a chunk; chunks of a row
    int64_t block_bytes, bytes;      // of a block; of a chunk

    explicit Chunks(const Linear& l) {
        columns = l.kind == INT4 ? BLOCK_COLUMNS : l.chunk;
        blocks = columns / BLOCK_COLUMNS;
        count = (l.columns + columns - 1) / columns;
        with_packing(l, 0, [&](auto header, auto codes) {
            block_bytes = codes.BYTES;
            bytes = header.BYTES + blocks * codes.BYTES;
        });
    }
    int64_t padded_columns() const { return count * columns; }
    int64_t panel_bytes() const { return count * bytes; }
};
