// Weights of a quantized checkpoint as they are packed: chunks of columns that share a scale and a zero point.
//
// A panel of PANEL features is a row of chunks. A chunk is its header (PANEL scales, then PANEL zero points) and blocks of
// 32 columns: nibbles, or [8][PANEL][4] bytes, k = 4 j + i.
#pragma once

#include "nibbles.h"

constexpr int64_t MOST_BLOCKS = 8;  // of a chunk: sums of its products stay exact, and a whole one in the L1 cache

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

// Blocks of 32 columns: four columns of each feature, from 4 i on.
template <class S> struct Bytes {
    static constexpr int64_t BYTES = PANEL * BLOCK_COLUMNS;
    using Sum = S;
    static vi four(const uint8_t* block, int i, int v) { return load_any<vi>(block + (i * PANEL_VECTORS + v) * VL * GROUP); }
};

// The numbers of MXFP4 by their four bits, e2m1, times 2 and plus 12: a zero point of 12 takes it off again.
constexpr uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Levels : Nibbles {
    using Sum = LevelSum;
    static vi four(const uint8_t* block, int i, int v) { return looked_up(E2M1, Nibbles::four(block, i, v)); }
};

// Calls f(header, blocks) with the types of a layer.
template <class F> inline void with_packing(const Linear& l, const F& f) {
    if (l.kind == LEVELS4) return f(TypedHeader<BF16>{}, Levels{});
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
        columns = l.chunk;
        blocks = columns / BLOCK_COLUMNS;
        count = (l.columns + columns - 1) / columns;
        with_packing(l, [&](auto header, auto codes) {
            block_bytes = codes.BYTES;
            bytes = header.BYTES + blocks * codes.BYTES;
        });
    }
    int64_t padded_columns() const { return count * columns; }
    int64_t panel_bytes() const { return count * bytes; }
};
