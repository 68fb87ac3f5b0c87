// The products of paged attention for one item's rows: scores with K, weighted sums of V, and what both read and write.
#pragma once

#include <cmath>
#include <type_traits>

#include "arena.h"
#include "paged_work.h"
#include "paths.h"

// Softmax of some rows so far: maximum (in units of log2), sum of weights, weighted sum of values [rows][width].
struct State {
    float *max, *sum, *out;
    State from(int64_t row, int64_t width) const { return {max + row, sum + row, out + row * width}; }
};

// The tokens of a split that a row sees: number `hidden` to `visible` - 1. Either number may lie outside of the split.
struct Sight {
    int64_t hidden, visible;
    int64_t tiles(int64_t most) const { return visible <= 0 ? 0 : std::min(most, (visible + VL - 1) / VL); }
    vi in_tile(int64_t t) const {
        const vi number = iota() + (int32_t)(t * VL);
        return (number >= (vi{} + (int32_t)hidden)) & (number < (vi{} + (int32_t)visible));
    }
};

// Rows whose scores and weights exist at a time: those of a pass stay in the L1 cache, or nearly.
template <class T> constexpr int64_t PASS_ROWS = std::is_same_v<T, BF16Tiles> ? 32 : 48;

template <class T> struct Buffers {
    typename T::Op *q, *weights;  // of all rows; of a pass
    float* scores;                // of a pass
    float *q_steps, *weight_steps;  // what one unit of a row's q and weights stands for, if they are whole numbers
    Sight* sees;  // of all rows
    State split, total;
    typename T::Elem *key_pack, *value_pack;
    typename T::Elem* value_copy;  // V that tile registers cannot read as it lies
    int64_t q_stride, rows, fast_steps;  // fast_steps: those of the first part of K

    static size_t bytes(const Geometry& g, int64_t rows) {
        return 4096 + rows * (4 * (g.key_width() + 2) + 4 * (2 * g.width() + 10) + sizeof(Sight)) + PASS_ROWS<T> * 8 * KEYS +
               (g.key_width() + 2 * g.width() + 2 * (2 + SCALE<T>)) * KEYS * sizeof(typename T::Elem);
    }
    Buffers(Arena& arena, const Geometry& g, int64_t max_rows) : rows(max_rows) {
        arena.reserve(bytes(g, rows));
        int64_t steps = (g.head_dim + T::PAIR - 1) / T::PAIR;
        q_stride = T::SCALED ? g.key_width() : steps * T::OPS;
        fast_steps = T::SCALED && g.fast() < g.head_dim ? g.fast() / T::PAIR : steps;
        q = arena.take<typename T::Op>(rows * q_stride);
        scores = arena.take<float>(PASS_ROWS<T> * KEYS);
        weights = arena.take<typename T::Op>(PASS_ROWS<T> * KEYS / T::PAIR * T::OPS);
        q_steps = arena.take<float>(rows);
        weight_steps = arena.take<float>(PASS_ROWS<T>);
        sees = arena.take<Sight>(rows);
        for (State* s : {&split, &total})
            *s = {arena.take<float>(rows), arena.take<float>(rows), arena.take<float>(rows * g.width())};
        key_pack = arena.take<typename T::Elem>(KEYS * (g.head_dim + 1 + SCALE<T>));
        value_pack = arena.take<typename T::Elem>(KEYS * (g.width() + SCALE<T>));
        value_copy = arena.take<typename T::Elem>(KEYS * g.width());
    }
    // The same for a pass whose first row is this.
    Buffers from(int64_t row) const {
        Buffers pass = *this;
        pass.q += row * q_stride, pass.q_steps += row;
        return pass;
    }
};

constexpr int AHEAD = 16;  // tiles between what is fetched and what is read

// Where the tiles of one split lie, and those that are read next. The kernels fetch as they go: pages are scattered, so the
// processor does not foresee them. Into the L2 cache it drops a fetch if too many are under way, so few rows, which wait for
// memory, fetch each line once more on half of the way: one Zen 4 core reads 0.71 instead of 0.63 of what it reads in a stream.
template <class T> struct Tiles {
    int64_t count = 0, last_pairs = 0;  // pairs of tokens in the last one
    const typename T::Elem *keys[KEYS / VL + AHEAD], *values[KEYS / VL + AHEAD];
    bool joined = false;  // tiles 2 n and 2 n + 1 follow each other in memory, both or as far as they go
    bool odd = false;     // the first one is the second of such two, counted from position 0
    const typename T::Elem* half_pair = nullptr;  // V of one more token in the last one, next to zeros: [width][PAIR]
    int64_t first_sees = 0, group = 1;  // tokens up to the last one that row 0 sees; every `group` rows see one more
    int64_t first_row = 0;              // of the pass
    bool last_pass = true;

    // Tiles that a row of the pass and those before it see at most: the others are not computed for them.
    int64_t seen(int64_t row) const {
        if (first_sees >= count * VL) return count;
        return std::clamp<int64_t>((first_sees + (first_row + row) / group + VL - 1) / VL, 0, count);
    }
};

// gcc alone keeps one pointer per row, more than there are registers, unrolls whole tiles, and keeps sums in memory where
// it does not unroll what reads them; clang does none of it.
#if defined(__clang__)
#define HIDE(x) (void)x
#define ROLLED
#define UNROLLED
#else
#define HIDE(x) __asm__("" : "+r"(x))
#define ROLLED _Pragma("GCC unroll 1")
#define UNROLLED _Pragma("GCC unroll 16")
#endif

// Into the L2 cache: what is fetched this far ahead would push what is being read out of the L1 cache.
static inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
// The element at `offset` of what is read AHEAD tiles after `tile`, for R rows.
template <int R, class E> static inline void fetch_ahead(const E* const* tile, int64_t offset) {
    fetch(tile[AHEAD] + offset);
    if (R <= 4) fetch(tile[AHEAD / 2] + offset);
}

// What an item's passes have in common besides its tiles.
template <class T> struct Registers {};

// V of a split, where a pass cannot read it as it lies.
template <class T> struct Values {
    Values(const Buffers<T>&, const Tiles<T>&, int64_t) {}
};

enum KeyPart { WHOLE, FAST, SLOW };  // of K

// scores[R][N * VL] = q[R][begin, end) . tiles, for N tiles of VL tokens; of the slow part, added to those of the fast one.
template <class T, KeyPart PART, int R, int N>
inline void score_kernel(const typename T::Op* q, int64_t q_stride, const float* q_steps,
                         const typename T::Elem* const* tiles, int64_t begin, int64_t end, float* scores) {
    typename T::Acc acc[R][N] = {};
    for (int64_t i = begin; i < end; i++) {
        typename T::Block b[N];
        for (int n = 0; n < N; n++) {
            b[n] = T::load(tiles[n] + HEADER<T> + i * VL * T::PAIR);
            fetch_ahead<R>(tiles + n, HEADER<T> + i * VL * T::PAIR);
        }
        HIDE(q_stride);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) T::madd(acc[r][n], q + r * q_stride + i * T::OPS, b[n]);
    }
    if constexpr (T::SCALED) {
        for (int n = 0; n < N; n++) {
            vu steps = load_any<vu>(tiles[n]);
            if (PART == FAST) steps <<= 16;
            if (PART == SLOW) steps &= 0xffff0000u;
            else fetch_ahead<R>(tiles + n, 0);
            for (int r = 0; r < R; r++) {
                float* to = scores + r * KEYS + n * VL;
                const vf score = __builtin_convertvector(acc[r][n], vf) * q_steps[r] * (vf)steps;
                storef(to, PART == SLOW ? loadf(to) + score : score);
            }
        }
    } else {
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) storef(scores + r * KEYS + n * VL, acc[r][n]);
    }
}

// out[R][N * VL] = weights[R] . N columns of the tokens of the first `count` tiles.
template <class T, int R, int N>
inline void value_kernel(const typename T::Op* weights, const float* weight_steps, const Tiles<T>& tiles,
                         int64_t count, int64_t column, int64_t width, float* out) {
    constexpr int64_t STRIDE = KEYS / T::PAIR * T::OPS, PAIRS = VL / T::PAIR;
    typename T::Acc acc[R][N] = {};
    for (int64_t t = 0; t < count; t++) {
        const int64_t first = HEADER<T> + column * T::PAIR;
        const typename T::Elem* tile = tiles.values[t] + first;
        const int64_t pairs = t + 1 < tiles.count ? PAIRS : tiles.last_pairs;
        if (T::SCALED) fetch_ahead<R>(tiles.values + t, 0);
        ROLLED for (int64_t i = 0; i < pairs; i++) {
            typename T::Block b[N];
            for (int n = 0; n < N; n++) {
                b[n] = T::load(tile + (i * width + n * VL) * T::PAIR);
                fetch_ahead<R>(tiles.values + t, first + (i * width + n * VL) * T::PAIR);
            }
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++)
                    T::madd(acc[r][n], weights + r * STRIDE + (t * PAIRS + i) * T::OPS, b[n]);
        }
    }
    if (tiles.half_pair && count == tiles.count) {
        const int64_t pair = (tiles.count - 1) * PAIRS + tiles.last_pairs;
        typename T::Block b[N];
        UNROLLED for (int n = 0; n < N; n++) b[n] = T::load(tiles.half_pair + (column + n * VL) * T::PAIR);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int n = 0; n < N; n++) T::madd(acc[r][n], weights + r * STRIDE + pair * T::OPS, b[n]);
    }
    if constexpr (T::SCALED) {
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int n = 0; n < N; n++) {
                storef(out + r * width + column + n * VL, __builtin_convertvector(acc[r][n], vf) * weight_steps[r]);
            }
    } else {
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int n = 0; n < N; n++) storef(out + r * width + column + n * VL, acc[r][n]);
    }
}

// Calls f(integral constant R) for the compile-time R that equals r, 1 <= r <= MAX.
template <int MAX, class F> inline void with_constant(int64_t r, const F& f) {
    if constexpr (MAX > 1)
        if (r < MAX) return with_constant<MAX - 1>(r, f);
    f(std::integral_constant<int, MAX>{});
}

// Scores of N tiles at a time for up to MAX_R rows at a time, from tile t on, as long as there are N.
template <class T, int N, int MAX_R>
inline void some_scores(const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, int64_t steps, int64_t& t) {
    for (; t + N <= tiles.count; t += N)
        for (int64_t r = 0; r < rows; r += MAX_R)
            with_constant<MAX_R>(rows - r, [&](auto R) {
                if (t >= tiles.seen(r + R() - 1)) return;
                const auto add = [&](auto part, int64_t begin, int64_t end) {
                    score_kernel<T, part(), R(), N>(w.q + r * w.q_stride, w.q_stride, w.q_steps + r, tiles.keys + t, begin, end,
                                                    w.scores + r * KEYS + t * VL);
                };
                if constexpr (T::SCALED)
                    if (w.fast_steps < steps) {
                        add(std::integral_constant<KeyPart, FAST>{}, 0, w.fast_steps);
                        return add(std::integral_constant<KeyPart, SLOW>{}, w.fast_steps, steps);
                    }
                add(std::integral_constant<KeyPart, WHOLE>{}, 0, steps);
            });
}

template <class T>
void all_scores(Registers<T>&, const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, int64_t steps) {
    int64_t t = 0;
    // with few rows only more tiles at a time give each sum the time to arrive before the next one needs it
    if (VL == 16 && rows <= 2) some_scores<T, 8, 2>(w, rows, tiles, steps, t);
    if (VL == 16 && rows <= 4) some_scores<T, 4, 4>(w, rows, tiles, steps, t);
    some_scores<T, SCORE_TILES, SCORE_ROWS>(w, rows, tiles, steps, t);
    some_scores<T, 1, SCORE_ROWS>(w, rows, tiles, steps, t);
}

template <class T>
void add_values(Registers<T>&, const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, const Values<T>&,
                int64_t width, float* out) {
    constexpr int64_t STRIDE = KEYS / T::PAIR * T::OPS;
    // few rows leave registers for whole lines of a tile, so that it is read in one stream
    if (VL == 16 && rows <= 3 && width % (8 * VL) == 0) {
        for (int64_t c = 0; c < width; c += 8 * VL)
            with_constant<3>(rows, [&](auto R) {
                value_kernel<T, R(), 8>(w.weights, w.weight_steps, tiles, tiles.seen(rows - 1), c, width, out);
            });
        return;
    }
    for (int64_t c = 0; c < width; c += VALUE_COLS * VL)
        with_constant<VALUE_COLS>((width - c) / VL, [&](auto N) {
            for (int64_t r = 0; r < rows; r += VALUE_ROWS)
                with_constant<VALUE_ROWS>(rows - r, [&](auto R) {
                    value_kernel<T, R(), N()>(w.weights + r * STRIDE, w.weight_steps + r, tiles,
                                              tiles.seen(r + R() - 1), c, width, out + r * width);
                });
        });
}
