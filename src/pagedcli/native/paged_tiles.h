// The products of paged attention by tile registers: a K tile [D / 2][16][2] and a V tile [8][D][2] of the cache are right
// operands as they lie. For head sizes that are a multiple of 32.
#pragma once

#include "paged_kernels.h"

#if defined(HAS_TILES)

// Of an item: its passes have the same shape, the last one of fewer rows apart.
template <> struct Registers<BF16Tiles> : TileRegisters {
    // For the rows of a pass, in two blocks of up to 16.
    void shape_rows(int64_t rows) {
        shape((int)std::min<int64_t>(TILE_ROWS, rows), (int)std::max<int64_t>(0, rows - TILE_ROWS), TILE_BYTES, TILE_ROWS);
    }
};
static_assert(PASS_ROWS<BF16Tiles> == 2 * TILE_ROWS);

// Stores the four sums that there are: [two row blocks, row_bytes apart by row][two columns, 64 bytes apart].
template <bool TWO_ROWS, bool TWO_COLUMNS> inline void store_sums(TileRegisters& t, float* to, int64_t row_bytes) {
    char *first = (char*)to, *second = first + TILE_ROWS * row_bytes;
    t.store<0>(first, row_bytes);
    if (TWO_COLUMNS) t.store<1>(first + TILE_BYTES, row_bytes);
    if (TWO_ROWS) t.store<2>(second, row_bytes);
    if (TWO_ROWS && TWO_COLUMNS) t.store<3>(second + TILE_BYTES, row_bytes);
}

// Adds left . right to the four sums.
template <bool TWO_ROWS, bool TWO_COLUMNS>
inline void multiply_block(TileRegisters& t, const char* left, int64_t left_stride, const char* right0, const char* right1,
                           int64_t right_stride) {
    t.load<6>(right0, right_stride);
    t.load<4>(left, left_stride);
    t.multiply_bf16<0, 4, 6>();
    if (TWO_COLUMNS) {
        t.load<7>(right1, right_stride);
        t.multiply_bf16<1, 4, 7>();
    }
    if (TWO_ROWS) {
        t.load<5>(left + TILE_ROWS * left_stride, left_stride);
        t.multiply_bf16<2, 5, 6>();
        if (TWO_COLUMNS) t.multiply_bf16<3, 5, 7>();
    }
}

template <bool TWO_ROWS, bool TWO_COLUMNS> inline void zero_sums(TileRegisters& t) {
    t.zero<0>();
    if (TWO_COLUMNS) t.zero<1>();
    if (TWO_ROWS) t.zero<2>();
    if (TWO_ROWS && TWO_COLUMNS) t.zero<3>();
}

// Calls f(integral constants) for two flags.
template <class F> inline void with_flags(bool a, bool b, const F& f) {
    if (a && b) return f(std::true_type{}, std::true_type{});
    if (a) return f(std::true_type{}, std::false_type{});
    if (b) return f(std::false_type{}, std::true_type{});
    f(std::false_type{}, std::false_type{});
}

inline void all_scores(Registers<BF16Tiles>& registers, const Buffers<BF16Tiles>& w, int64_t rows, const Tiles<BF16Tiles>& tiles,
                       int64_t steps) {
    constexpr int64_t KEY_BYTES = TILE_ROWS * TILE_BYTES;  // of a tile of tokens, 32 of head_dim
    const int64_t q_bytes = w.q_stride * 4, seen = tiles.seen(rows - 1);
    const char* q = (const char*)w.q;
    registers.shape_rows(rows);
    for (int64_t n = 0; n < seen; n += 2) {
        const int64_t other = std::min(n + 1, tiles.count - 1);
        const char *k0 = (const char*)tiles.keys[n], *k1 = (const char*)tiles.keys[other];
        const char *next0 = (const char*)tiles.keys[n + AHEAD], *next1 = (const char*)tiles.keys[other + AHEAD];
        with_flags(rows > TILE_ROWS, other > n, [&](auto two_rows, auto two_tiles) {
            zero_sums<two_rows(), two_tiles()>(registers);
            for (int64_t i = 0; i < steps / TILE_ROWS * KEY_BYTES; i += KEY_BYTES) {
                // the last rows see all tiles
                for (int64_t j = i; tiles.last_pass && j < i + KEY_BYTES; j += 64) fetch(next0 + j), fetch(next1 + j);
                multiply_block<two_rows(), two_tiles()>(registers, q + i / TILE_ROWS, q_bytes, k0 + i, k1 + i, TILE_BYTES);
            }
            store_sums<two_rows(), two_tiles()>(registers, w.scores + n * VL, KEYS * 4);
        });
    }
}

// `bytes`, a multiple of 64, copied while as many of what is read next are fetched: whole lines, in the order of memory.
inline void copy_fetching(char* to, const void* from, int64_t bytes, const void* next) {
    for (int64_t i = 0; i < bytes; i += 64) {
        fetch((const char*)next + i);
        memcpy(to + i, (const char*)from + i, 64);
    }
}

// What one product reads: 32 tokens of V, counted from position 0 whatever the block size, as a product rounds its sums once.
// Tokens of a product that are not one piece of memory, as blocks of 16 are not, are copied together. Zeros take the place
// of tokens outside of the split (what lies there may be anything, and 0 x NaN is NaN); those before it after all others, so
// that weights begin with the first tile.
template <> struct Values<BF16Tiles> {
    int64_t count = 0;                // products
    const char* at[KEYS / VL / 2];    // V of each
    int64_t weights[KEYS / VL / 2];   // and the bytes in a row before its weights
    bool half_empty = false;          // the last product has one tile

    Values(const Buffers<BF16Tiles>& w, const Tiles<BF16Tiles>& tiles, int64_t width) {
        constexpr int64_t PAIRS = VL / 2;
        const int64_t pair_bytes = width * 4;
        int64_t each = 0;  // tiles in the product
        for (int64_t t = 0; t < tiles.count; t += each, count++) {
            each = t == 0 && tiles.odd ? 1 : std::min<int64_t>(2, tiles.count - t);
            const bool is_last = t + each == tiles.count;
            const int64_t pairs = (each - 1) * PAIRS + (is_last ? tiles.last_pairs : PAIRS);
            weights[count] = t * VL * 2;
            at[count] = (const char*)tiles.values[t];
            if (tiles.joined && pairs == 2 * PAIRS) continue;
            char* copy = (char*)w.value_copy + count * 2 * PAIRS * pair_bytes;
            at[count] = copy;
            copy_fetching(copy, tiles.values[t], std::min(pairs, PAIRS) * pair_bytes, tiles.values[t + AHEAD]);
            if (pairs > PAIRS)
                copy_fetching(copy + PAIRS * pair_bytes, tiles.values[t + 1], (pairs - PAIRS) * pair_bytes, tiles.values[t + 1 + AHEAD]);
            memset(copy + pairs * pair_bytes, 0, (2 * PAIRS - pairs) * pair_bytes);
            if (is_last && tiles.half_pair) memcpy(copy + pairs * pair_bytes, tiles.half_pair, pair_bytes);
        }
        half_empty = each == 1;
    }
};

inline void add_values(Registers<BF16Tiles>& registers, const Buffers<BF16Tiles>& w, int64_t rows, const Tiles<BF16Tiles>& tiles,
                       const Values<BF16Tiles>& values, int64_t width, float* out) {
    constexpr int64_t WEIGHT_BYTES = KEYS * 2;  // of a row
    const int64_t seen = tiles.seen(rows - 1), count = (seen + tiles.odd + 1) / 2;
    const bool fetches = tiles.joined && tiles.last_pass;
    for (int64_t r = 0; values.half_empty && r < rows; r++)  // no softmax wrote the weights of a tile that is not there
        memset(w.weights + r * (KEYS / 2) + tiles.count * VL / 2, 0, VL * 2);
    registers.shape_rows(rows);
    for (int64_t c = 0; c < width; c += 2 * VL)
        with_flags(rows > TILE_ROWS, true, [&](auto two_rows, auto two_columns) {
            zero_sums<two_rows(), two_columns()>(registers);
            for (int64_t n = 0; n < count; n++) {
                const char* v = values.at[n] + c * 4;
                for (int64_t t = 2 * n; fetches && t < std::min(2 * n + 2, tiles.count); t++)  // a kilobyte of each tile
                    for (int64_t j = 0; j < 1024; j += 64) fetch((const char*)tiles.values[t + AHEAD] + c * 32 + j);
                multiply_block<two_rows(), two_columns()>(registers, (const char*)w.weights + values.weights[n], WEIGHT_BYTES, v,
                                                          v + TILE_BYTES, width * 4);
            }
            store_sums<two_rows(), two_columns()>(registers, out + c, width * 4);
        });
}

#endif
