// Weights of a quantized checkpoint as they are packed: chunks of columns that share a scale and a zero point.
//
// A panel of PANEL features is a row of chunks. A chunk is its header (for example PANEL scales, then PANEL zero points) and
// blocks of 32 or 16 columns: nibbles, five bits, six bits, or bytes, [8][PANEL][4], k = 4 j + i. One token reads them in
// ascending order, of which processors fetch ahead.
#pragma once

#include "nibbles.h"

constexpr int64_t MOST_BLOCKS = 8;  // of a chunk: sums of its products stay exact, and a whole one in the L1 cache

// What Linear::scale_type may be beyond a floating-point type: scales and minima in float32, or as multiples of steps.
enum : int64_t { MINIMA = 3, STEPS = 4 };
constexpr int64_t STEP_COLUMNS = 256;  // that share a step

// Headers. w = scale * (q - zero of the layer) - minimum, where one of both is nothing: HAS_MIN says whether the header of each
// chunk has a minimum, HAS_ZERO whether the layer has a zero point. Without HAS_MIN a chunk is one block. Chunk headers of a
// panel are read after at(panel); `column` is the chunk's first.
//
// Scales of a floating-point type, and a zero point of a byte: w = scale * (q - zero).
template <class T> struct TypedHeader {
    using Elem = typename T::Elem;
    static constexpr int64_t BYTES = PANEL * (sizeof(Elem) + 1);
    static constexpr bool HAS_MIN = true, HAS_ZERO = false;
    TypedHeader at(const uint8_t*) const { return *this; }
    static vf scale(const uint8_t* header, int v, int64_t) { return Rows<T>::load((const Elem*)header + v * VL); }
    static vf min(const uint8_t* header, int v) {
        return scale(header, v, 0) * __builtin_convertvector(load_bytes(header + PANEL * sizeof(Elem) + v * VL), vf);
    }
};

// Scales of a floating-point type.
template <class T> struct ScaleHeader {
    using Elem = typename T::Elem;
    static constexpr int64_t BYTES = PANEL * sizeof(Elem);
    static constexpr bool HAS_MIN = false, HAS_ZERO = true;
    ScaleHeader at(const uint8_t*) const { return *this; }
    static vf scale(const uint8_t* header, int v, int64_t) { return Rows<T>::load((const Elem*)header + v * VL); }
};

// A scale and a minimum in float32. Chunks that were unpacked, because they are read many times, have this header or
// ScaleHeader<F32>.
struct FloatHeader {
    static constexpr int64_t BYTES = 8 * PANEL;
    static constexpr bool HAS_MIN = true, HAS_ZERO = false;
    FloatHeader at(const uint8_t*) const { return *this; }
    static vf scale(const uint8_t* header, int v, int64_t) { return load_any<vf>(header + v * VL * 4); }
    static vf min(const uint8_t* header, int v) { return load_any<vf>(header + (PANEL + v * VL) * 4); }
};

// A signed byte for the scale, times the step of 256 columns: a panel begins with its steps, [steps][PANEL] in float32. Without
// a zero point of the layer there follow those of the minima, and a byte for the minimum of each chunk, [chunks][PANEL].
template <bool ZERO = true> struct StepsHeader {
    static constexpr int64_t BYTES = PANEL;
    static constexpr bool HAS_MIN = false, HAS_ZERO = ZERO;
    const float* steps = nullptr;
    StepsHeader at(const uint8_t* panel) const { return {(const float*)panel}; }
    vf scale(const uint8_t* header, int v, int64_t column) const {
        const vi factor = load_signed_bytes(header + v * VL);
        return __builtin_convertvector(factor, vf) * loadf(steps + column / STEP_COLUMNS * PANEL + v * VL);
    }
};

// An e4m3 number without a sign for the scale, times the step of 256 columns. Its bits, moved to those of a float, are its value
// times 2^-120: steps are stored times 2^120.
struct E4m3Header : StepsHeader<> {
    E4m3Header at(const uint8_t* panel) const { return {StepsHeader<>{(const float*)panel}}; }
    vf scale(const uint8_t* header, int v, int64_t column) const {
        return (vf)(load_bytes(header + v * VL) << 20) * loadf(steps + column / STEP_COLUMNS * PANEL + v * VL);
    }
};

// Of weights that were rounded here: a float per output feature multiplies the whole sum. Kind INT8: w = factor * (q - 128) times
// that float, a byte for the factor.
struct FactorHeader {
    static constexpr int64_t BYTES = PANEL;
    static constexpr bool HAS_MIN = false, HAS_ZERO = true;
    FactorHeader at(const uint8_t*) const { return *this; }
    static vf scale(const uint8_t* header, int v, int64_t) { return __builtin_convertvector(load_bytes(header + v * VL), vf); }
};

// Kind INT4: w = (step * q - zero) times that float, a byte each.
struct ByteHeader {
    static constexpr int64_t BYTES = 2 * PANEL;
    static constexpr bool HAS_MIN = true, HAS_ZERO = false;
    ByteHeader at(const uint8_t*) const { return *this; }
    static vf scale(const uint8_t* header, int v, int64_t) { return __builtin_convertvector(load_bytes(header + v * VL), vf); }
    static vf min(const uint8_t* header, int v) { return scale(header + PANEL, v, 0); }
};

// Bytes: four columns of each feature, from 4 i on.
template <class S, int64_t C = BLOCK_COLUMNS> struct Bytes {
    static constexpr int64_t COLUMNS = C, BYTES = PANEL * COLUMNS;
    using Sum = S;
    static vi four(const uint8_t* block, int i, int v) { return load_any<vi>(block + (i * PANEL_VECTORS + v) * VL * GROUP); }
    static void store(uint8_t* block, int v, const vi* fours) {
        for (int i = 0; i < C / GROUP; i++) store_any(block + (i * PANEL_VECTORS + v) * VL * GROUP, fours[i]);
    }
};

// A plane of the bits above nibbles, then these: bit n of byte i of the plane is that of k = 4 n + i.
struct FiveBits {
    static constexpr int64_t COLUMNS = BLOCK_COLUMNS, PLANE_BYTES = PANEL * GROUP, BYTES = PLANE_BYTES + Nibbles::BYTES;
    using Sum = LevelSum;
    static vi low_bytes(const uint8_t* block, int i, int v) { return Nibbles::bytes(block + PLANE_BYTES, i, v); }
    static vi plane_bytes(const uint8_t* block, int v) { return load_any<vi>(block + v * VL * GROUP); }
    static vi joined(vi low, vi plane, int i) {
        const vi moved = i < 4 ? plane << (4 - i) : (vi)((vu)plane >> (i - 4));
        return Nibbles::half(low, i) | (moved & (vi{} + 0x10101010));
    }
    static vi four(const uint8_t* block, int i, int v) { return joined(low_bytes(block, i, v), plane_bytes(block, v), i); }
    static void store(uint8_t* block, int v, const vi* fours) {
        Nibbles::store(block + PLANE_BYTES, v, fours);
        vi plane = {};
        for (int i = 0; i < BLOCK_STEPS; i++) plane |= (fours[i] >> 4 & (vi{} + 0x01010101)) << i;
        store_any(block + v * VL * GROUP, plane);
    }
};

// 16 columns of six bits: three rows of fours, whose bytes have two bits of the last four each above their own, the lowest first.
struct SixBits {
    static constexpr int64_t COLUMNS = 16, ROWS = 3, BYTES = ROWS * PANEL * GROUP;
    using Sum = LevelSum;
    static vi row(const uint8_t* block, int i, int v) { return load_any<vi>(block + (i * PANEL_VECTORS + v) * VL * GROUP); }
    static vi own(vi row) { return row & (vi{} + 0x3f3f3f3f); }
    static vi last(vi a, vi b, vi c) {
        const vi lowest = (vi)((vu)a >> 6) & (vi{} + 0x03030303), middle = (vi)((vu)b >> 4) & (vi{} + 0x0c0c0c0c);
        return lowest | middle | ((vi)((vu)c >> 2) & (vi{} + 0x30303030));
    }
    static vi four(const uint8_t* block, int i, int v) {
        return i < ROWS ? own(row(block, i, v)) : last(row(block, 0, v), row(block, 1, v), row(block, 2, v));
    }
    static void store(uint8_t* block, int v, const vi* fours) {
        for (int i = 0; i < ROWS; i++) {
            const vi above = (vi)((vu)fours[ROWS] >> 2 * i) & (vi{} + 0x03030303);
            store_any(block + (i * PANEL_VECTORS + v) * VL * GROUP, fours[i] | above << 6);
        }
    }
};

// What reads the fours of a block in order, each byte from memory once: otherwise gcc loads a byte again for each part of it.
template <class Codes> struct Reader {
    const uint8_t* block;
    explicit Reader(const uint8_t* block) : block(block) {}
    vi four(int i, int v) const { return Codes::four(block, i, v); }
};
#if defined(USE_AVX512)
inline vi in_register(vi loaded) {
    __asm__("" : "+v"(loaded));
    return loaded;
}
template <> struct Reader<FiveBits> {
    const uint8_t* block;
    vi low[PANEL_VECTORS], plane[PANEL_VECTORS];
    explicit Reader(const uint8_t* block) : block(block) {}
    vi four(int i, int v) {
        if (i == 0) plane[v] = in_register(FiveBits::plane_bytes(block, v));
        if (i % 2 == 0) low[v] = in_register(FiveBits::low_bytes(block, i, v));
        return FiveBits::joined(low[v], plane[v], i);
    }
};
template <> struct Reader<SixBits> {
    const uint8_t* block;
    vi rows[SixBits::ROWS][PANEL_VECTORS];
    explicit Reader(const uint8_t* block) : block(block) {}
    vi four(int i, int v) {
        if (i == SixBits::ROWS) return SixBits::last(rows[0][v], rows[1][v], rows[2][v]);
        rows[i][v] = in_register(SixBits::row(block, i, v));
        return SixBits::own(rows[i][v]);
    }
};
#endif

// The numbers of MXFP4 by their four bits, e2m1, times 2 and plus 12: a zero point of 12 takes it off again. Those of IQ4_NL
// and IQ4_XS plus 128.
constexpr uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t IQ4_LEVELS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

template <const uint8_t* TABLE, class S, int64_t C = BLOCK_COLUMNS> struct Levels : NibblesOf<C> {
    using Sum = S;
    static vi four(const uint8_t* block, int i, int v) { return looked_up(TABLE, NibblesOf<C>::four(block, i, v)); }
};

// Calls f(header, blocks) with the types of a layer.
template <class F> inline void with_packing(const Linear& l, const F& f) {
    const bool steps = l.scale_type == STEPS;
    if (l.kind == INT8) return f(FactorHeader{}, Bytes<ByteSum>{});
    if (l.kind == INT4) return f(ByteHeader{}, Nibbles{});
    if (l.kind == LEVELS4) {
        if (steps) return f(E4m3Header{}, Levels<E2M1, LevelSum, 16>{});
        if (l.zero < 0) return f(TypedHeader<BF16>{}, Levels<E2M1, LevelSum>{});
        return f(ScaleHeader<BF16>{}, Levels<E2M1, LevelSum>{});
    }
    if (l.kind == IQ4) {
        if (steps) return f(StepsHeader<>{}, Levels<IQ4_LEVELS, ByteSum>{});
        return f(ScaleHeader<F16>{}, Levels<IQ4_LEVELS, ByteSum>{});
    }
    if (l.kind == CODES8) {
        if (steps) return f(StepsHeader<>{}, Bytes<ByteSum, 16>{});
        if (l.zero < 0) return f(TypedHeader<F32>{}, Bytes<ByteSum>{});
        return f(ScaleHeader<F16>{}, Bytes<ByteSum>{});
    }
    if (l.kind == CODES6) return f(StepsHeader<>{}, SixBits{});
    if (l.kind == CODES5) {
        if (steps) return f(StepsHeader<false>{}, FiveBits{});
        if (l.scale_type == MINIMA) return f(FloatHeader{}, FiveBits{});
        return f(ScaleHeader<F16>{}, FiveBits{});
    }
    if (l.chunk < BLOCK_COLUMNS) {
        if (l.zero < 0) return f(StepsHeader<false>{}, NibblesOf<16>{});
        return f(StepsHeader<>{}, NibblesOf<16>{});
    }
    if (steps) return f(StepsHeader<false>{}, Nibbles{});
    if (l.scale_type == MINIMA) return f(FloatHeader{}, Nibbles{});
    if (l.zero >= 0) return f(ScaleHeader<F16>{}, Nibbles{});
    if (l.scale_type == FLOAT16) return f(TypedHeader<F16>{}, Nibbles{});
    if (l.scale_type == BFLOAT16) return f(TypedHeader<BF16>{}, Nibbles{});
    f(TypedHeader<F32>{}, Nibbles{});
}

// The sizes that follow from a layer.
struct Chunks {
    int64_t blocks, columns, count;  // of a chunk; of a chunk; chunks of a row
    int64_t block_bytes, bytes;      // of a block; of a chunk
    int64_t num_steps = 0;           // of 256 columns
    int64_t head_bytes = 0;          // of what a panel begins with: see StepsHeader
    bool has_zero;                   // see Headers
    bool step_minima = false;        // whether a panel begins with minima, too

    explicit Chunks(const Linear& l) {
        columns = l.chunk;
        count = (l.columns + columns - 1) / columns;
        with_packing(l, [&](auto header, auto codes) {
            has_zero = header.HAS_ZERO;
            blocks = columns / codes.COLUMNS;
            block_bytes = codes.BYTES;
            bytes = header.BYTES + blocks * codes.BYTES;
        });
        if (l.scale_type != STEPS) return;
        step_minima = l.zero < 0;
        num_steps = (l.columns + STEP_COLUMNS - 1) / STEP_COLUMNS;
        head_bytes = num_steps * PANEL * (int64_t)sizeof(float);
        if (step_minima) head_bytes += head_bytes + count * PANEL;
    }
    int64_t padded_columns() const { return count * columns; }
    int64_t panel_bytes() const { return head_bytes + count * bytes; }
    const float* minimum_steps(const uint8_t* panel) const { return (const float*)panel + num_steps * PANEL; }
    const uint8_t* minimum_factors(const uint8_t* panel) const { return panel + 2 * num_steps * PANEL * sizeof(float); }
};

// Some bits of each code of a block, in neighbouring bytes: of each `width` bytes, 1 or a multiple of 8, the lowest bits come
// first. Single bits are those of width 1.
struct Plane {
    int64_t first, end, bits, width, shift;
};

// Codes: [rows][columns], a byte each; or, if there are planes, [rows][blocks][block_bytes]. Mirrored by pagedcli.native.structs.
struct Codes {
    const uint8_t* bytes;
    int64_t block_bytes, block_columns, flipped, num_planes;
    Plane planes[2];
};

extern "C" {
void linear_pack_codes(const Linear* linear, const Codes* codes, const void* scales, const uint8_t* zeros, int64_t group_columns,
                       uint8_t* packed, int threads);
void linear_pack_grouped(const Linear* linear, const Codes* codes, const float* scales, const float* minima, const int8_t* factors,
                         const float* steps, const uint8_t* minimum_factors, const float* minimum_steps, uint8_t* packed, int threads);
}
