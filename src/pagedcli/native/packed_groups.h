// Weights of a quantized checkpoint as they are packed: chunks of columns that share a scale and a zero point.
//
// A panel of PANEL features is a row of chunks. A chunk is its header (for example PANEL scales, then PANEL zero points) and
// blocks of 32 columns: nibbles, or [8][PANEL][4] bytes, k = 4 j + i; or a block of 16 columns, [4][PANEL][4] bytes.
#pragma once

#include "nibbles.h"

constexpr int64_t MOST_BLOCKS = 8;  // of a chunk: sums of its products stay exact, and a whole one in the L1 cache

// What Linear::scale_type may be beyond a floating-point type: scales and minima in float32, or as multiples of steps.
enum : int64_t { MINIMA = 3, STEPS = 4 };
constexpr int64_t STEP_COLUMNS = 256;  // that share a step

// Headers of kinds CODES4 and CODES8. Each gives the scale and the minimum of chunk c of a panel, w = scale * q - min, and is
// the panel's after at(panel, chunks of a step).
//
// Scales of a floating-point type, and a zero point of a byte: w = scale * (q - zero).
template <class T> struct TypedHeader {
    using Elem = typename T::Elem;
    static constexpr int64_t BYTES = PANEL * (sizeof(Elem) + 1);
    TypedHeader at(const uint8_t*, int64_t) const { return *this; }
    static vf scale(const uint8_t* header, int v, int64_t) { return Rows<T>::load((const Elem*)header + v * VL); }
    static vf min(const uint8_t* header, int v, int64_t c) {
        return scale(header, v, c) * __builtin_convertvector(load_bytes(header + PANEL * sizeof(Elem) + v * VL), vf);
    }
};

// Also of chunks that were unpacked because they are read many times.
struct FloatHeader {
    static constexpr int64_t BYTES = 8 * PANEL;
    FloatHeader at(const uint8_t*, int64_t) const { return *this; }
    static vf scale(const uint8_t* header, int v, int64_t) { return load_any<vf>(header + v * VL * 4); }
    static vf min(const uint8_t* header, int v, int64_t) { return load_any<vf>(header + (PANEL + v * VL) * 4); }
};

// A signed byte each for scale and minimum, times the steps of 256 columns, which a panel begins with: [steps][2][PANEL].
struct StepsHeader {
    static constexpr int64_t BYTES = 2 * PANEL;
    const float* steps = nullptr;
    int64_t chunks = 1;  // of a step
    StepsHeader at(const uint8_t* panel, int64_t chunks_of_step) const { return {(const float*)panel, chunks_of_step}; }
    vf product(const uint8_t* header, int v, int64_t c, int64_t which) const {
        const vi factor = (load_bytes(header + which * PANEL + v * VL) << 24) >> 24;
        return __builtin_convertvector(factor, vf) * loadf(steps + (c / chunks * 2 + which) * PANEL + v * VL);
    }
    vf scale(const uint8_t* header, int v, int64_t c) const { return product(header, v, c, 0); }
    vf min(const uint8_t* header, int v, int64_t c) const { return product(header, v, c, 1); }
};

// Blocks of 32 or 16 columns: four columns of each feature, from 4 i on.
template <class S, int64_t C = BLOCK_COLUMNS> struct Bytes {
    static constexpr int64_t COLUMNS = C, BYTES = PANEL * COLUMNS;
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
    if (l.kind == CODES8) {
        if (l.chunk < BLOCK_COLUMNS) return f(StepsHeader{}, Bytes<ByteSum, 16>{});
        if (l.scale_type == STEPS) return f(StepsHeader{}, Bytes<ByteSum>{});
        if (l.scale_type == MINIMA) return f(FloatHeader{}, Bytes<ByteSum>{});
        if (l.scale_type == FLOAT16) return f(TypedHeader<F16>{}, Bytes<ByteSum>{});
        return f(TypedHeader<F32>{}, Bytes<ByteSum>{});
    }
    if (l.scale_type == STEPS) return f(StepsHeader{}, Nibbles{});
    if (l.scale_type == MINIMA) return f(FloatHeader{}, Nibbles{});
    if (l.scale_type == FLOAT16) return f(TypedHeader<F16>{}, Nibbles{});
    if (l.scale_type == BFLOAT16) return f(TypedHeader<BF16>{}, Nibbles{});
    f(TypedHeader<F32>{}, Nibbles{});
}

// The sizes that follow from a layer.
struct Chunks {
    int64_t blocks, columns, count;  // of a chunk; of a chunk; chunks of a row
    int64_t block_bytes, bytes;      // of a block; of a chunk
    int64_t head_bytes = 0;          // of the steps that a panel begins with

    explicit Chunks(const Linear& l) {
        columns = l.chunk;
        count = (l.columns + columns - 1) / columns;
        with_packing(l, [&](auto header, auto codes) {
            blocks = columns / codes.COLUMNS;
            block_bytes = codes.BYTES;
            bytes = header.BYTES + blocks * codes.BYTES;
        });
        if (l.scale_type == STEPS) head_bytes = l.columns / STEP_COLUMNS * 2 * PANEL * (int64_t)sizeof(float);
    }
    int64_t of_step() const { return std::max<int64_t>(1, STEP_COLUMNS / columns); }
    int64_t padded_columns() const { return count * columns; }
    int64_t panel_bytes() const { return head_bytes + count * bytes; }
};
