// Linear layers by tile registers: a packed panel [K / 2][32][2] of bf16 is two columns of right operands as it lies. One body for 1 token and for 512, so a token's sums do not depend on the others.
#pragma once

#include "arena.h"
#include "epilogue.h"
#include "tile_registers.h"

#if defined(HAS_TILES)

static_assert(PANEL * 4 == 2 * TILE_BYTES, "a panel is two tiles wide");

constexpr int64_t BLOCK_TOKENS = 2 * TILE_ROWS;            // of one pass over a panel
constexpr int64_t STEP_BYTES = TILE_ROWS * 2 * TILE_BYTES;  // of a panel, of one product: 64 bytes of a row of x

// x as bytes [T][row_bytes], where left operands are loaded from. BY_TILES they are read in streams, and rows of a power of
// two bytes do not compete for the same lines of the L1 cache; BLOCK_TOKENS or fewer are read as they are.
struct TileRows : Matrix<const char> {
    const char* tile(int64_t row, int64_t step) const { return at(row, step * TILE_BYTES); }  // row: a multiple of 16
    int64_t stride() const { return order == BY_TILES ? TILE_BYTES : width; }
};
static inline bool wants_tiles(int64_t num_tokens) { return num_tokens > BLOCK_TOKENS; }

// x as tiles want it, whose rows another kind of layer wrote.
static inline TileRows to_tiles(const void* x, int64_t num_tokens, int64_t row_bytes, std::vector<char>& room, int threads) {
    const TileRows rows{{(const char*)x, row_bytes, BY_ROWS}};
    if (!wants_tiles(num_tokens)) return rows;
    const Matrix<char> tiles{lines_of(room, Matrix<char>::size(num_tokens, row_bytes)), row_bytes, BY_TILES};
    parallel_for(threads, (num_tokens + TILE_ROWS - 1) / TILE_ROWS, [&](int64_t b) {
        for (int64_t k = 0; k < row_bytes; k += TILE_BYTES)
            for (int64_t r = b * TILE_ROWS; r < std::min(num_tokens, (b + 1) * TILE_ROWS); r++)
                memcpy(tiles.at(r, k), rows.at(r, k), TILE_BYTES);
    });
    return {{tiles.base, row_bytes, BY_TILES}};
}

// A weight that lies in memory as tiles read it. BYTES: of a step, as it is stored.
struct PackedTiles {
    static constexpr int64_t BYTES = STEP_BYTES;
    const void* weight;
    int64_t row_bytes;
    const char* at(int64_t panel, int64_t step) const {
        return (const char*)weight + (panel * (row_bytes / TILE_BYTES) + step) * BYTES;
    }
};

// Memory that is needed soon, fetched a few lines at a time: many at once would stall the products that wait meanwhile.
struct Soon {
    const char *at, *end;
    int64_t lines;  // at a time
    Soon(const char* at, int64_t bytes, int64_t times) : at(at), end(at + bytes), lines((bytes / 64 + times - 1) / times) {}
    void fetch() {
        for (int64_t j = 0; j < lines && at < end; j++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

struct TileProductBF16 {
    template <int C, int A, int B> static void multiply(TileRegisters& t) { t.multiply_bf16<C, A, B>(); }
};

// sums [32][PANEL] of up to 32 rows, begun at zero or as they are. `panel` begins at step `first`. `soon` is fetched twice
// per step.
template <class Product, bool TWO>
inline void multiply_tiles(TileRegisters& t, const TileRows& x, int64_t row, int64_t first, int64_t end, const char* panel,
                           Soon soon, bool begin, char* sums) {
    constexpr int64_t ROW = PANEL * 4;
    char* second = sums + TILE_ROWS * ROW;
    if (begin) {
        t.zero<0>(), t.zero<1>();
        if (TWO) t.zero<2>(), t.zero<3>();
    } else {
        t.load<0>(sums, ROW), t.load<1>(sums + TILE_BYTES, ROW);
        if (TWO) t.load<2>(second, ROW), t.load<3>(second + TILE_BYTES, ROW);
    }
    for (int64_t i = first; i < end; i++, panel += STEP_BYTES) {
        t.load<6>(panel, 2 * TILE_BYTES);
        t.load<4>(x.tile(row, i), x.stride());
        Product::template multiply<0, 4, 6>(t);
        t.load<7>(panel + TILE_BYTES, 2 * TILE_BYTES);
        Product::template multiply<1, 4, 7>(t);
        soon.fetch();
        if (TWO) {
            t.load<5>(x.tile(row + TILE_ROWS, i), x.stride());
            Product::template multiply<2, 5, 6>(t);
            soon.fetch();
            Product::template multiply<3, 5, 7>(t);
        } else {
            soon.fetch();
        }
    }
    t.store<0>(sums, ROW), t.store<1>(sums + TILE_BYTES, ROW);
    if (TWO) t.store<2>(second, ROW), t.store<3>(second + TILE_BYTES, ROW);
}

// Tokens [begin, end), begin a multiple of 16, times panels [first, last) of `steps` products each; after them comes panel
// `following`, -1: none. Calls finish(token, panel, its PANEL sums).
template <class Product, class Weight, class Finish>
void run_tiles(const TileRows& x, int64_t steps, const Weight& weight, int64_t begin, int64_t end, int64_t first, int64_t last,
               int64_t following, const Finish& finish) {
    // A part of the panel stays in the L1 cache while all tokens pass: 8 steps are 16 KiB, and 256 of K in bf16. What is
    // summed so far waits in memory, as exact as in a register.
    constexpr int64_t PART_STEPS = 8, BYTES = Weight::BYTES;
    constexpr int64_t AHEAD = 4 * STEP_BYTES;  // between what is fetched and what is read where all tokens are one block
    const bool one_block = end - begin <= BLOCK_TOKENS;
    const int64_t part_steps = one_block ? steps : PART_STEPS;
    const int64_t blocks = (end - begin + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    static thread_local std::vector<char> room;
    char* sums = lines_of(room, blocks * BLOCK_TOKENS * PANEL * 4);
    TileRegisters registers;
    for (int64_t p = first; p < last; p++) {
        const int64_t next = p + 1 < last ? p + 1 : following;
        for (int64_t part = 0; part < steps; part += part_steps) {
            const int64_t part_end = std::min(steps, part + part_steps), bytes = (part_end - part) * BYTES;
            const char* panel = weight.at(p, part);
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t row = begin + block * BLOCK_TOKENS, rows = std::min(end - row, BLOCK_TOKENS);
                // every block of tokens fetches its share of the same part of the next panel, or all of what comes soon
                const char* there = one_block ? weight.at(p, part) + AHEAD : weight.at(next, part);
                const int64_t share = (bytes / 64 + blocks - 1) / blocks * 64, from = std::min(block * share, bytes);
                const Soon soon(there + from, next < 0 && !one_block ? 0 : std::min(share, bytes - from), 2 * (part_end - part));
                char* to = sums + block * BLOCK_TOKENS * PANEL * 4;
                registers.shape(std::min<int64_t>(rows, TILE_ROWS), std::max<int64_t>(0, rows - TILE_ROWS), TILE_BYTES, TILE_ROWS);
                if (rows > TILE_ROWS)
                    multiply_tiles<Product, true>(registers, x, row, part, part_end, panel, soon, part == 0, to);
                else
                    multiply_tiles<Product, false>(registers, x, row, part, part_end, panel, soon, part == 0, to);
                for (int64_t r = 0; part_end == steps && r < rows; r++) finish(row + r, p, to + r * PANEL * 4);
            }
        }
    }
}

// A whole layer.
template <class Product, class Weight, class Finish>
void forward_tiles(const TileRows& x, const Weight& weight, int64_t panels, int64_t num_tokens, int threads, const Finish& finish) {
    const int64_t steps = x.width / TILE_BYTES;
    constexpr double NS_PER_ROW = 2 * 16 / 3.0 / TILE_ROWS;  // of a step: two products of 16 cycles for 16 rows
    Cut cut(num_tokens, panels, steps * STEP_BYTES, x.width, NS_PER_ROW * steps, threads, BLOCK_TOKENS);
    cut.run(threads, num_tokens, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
        // the next block of tokens begins with the same panels again
        const int64_t following = end < num_tokens ? first : last < panels ? last : -1;
        run_tiles<Product>(x, steps, weight, begin, end, first, last, following, finish);
    });
}

#endif
