// Paged attention on a CPU: flash-style over pages, split over long contexts, for whole prompts, chunks and decode.
//
// Over an int8 cache a query row is rounded to 16 bits, and so are the weights of a row and split, times the scales of V:
// the sums of products are then whole and exact.
//
// A query row's result depends on that row and its keys alone, bit for bit: keys are summed in splits of KEYS tokens
// counted from position 0, whatever the batch, the chunk and the number of threads. So sequences whose tables name the same
// blocks for a split (a system prompt, samples of one prompt) may share one reading of it.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

#include "paged_plan.h"
#include "parallel.h"

namespace {

constexpr int AHEAD = 8;  // tiles between what is fetched and what is read
constexpr float LOG2E = 1.4426950408889634f;

// Memory that grows and is never given back: an allocation of this size per call would fault its pages in each time.
struct Arena {
    char* base = nullptr;
    size_t capacity = 0, used = 0;
    ~Arena() { free(base); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= capacity) return;
        free(base);
        capacity = (std::max(bytes, capacity / 2 * 3) + 4095) / 4096 * 4096;  // not a little more at each step
        base = static_cast<char*>(aligned_alloc(4096, capacity));
        if (!base) {
            capacity = 0;
            throw std::bad_alloc();
        }
    }
    template <class X> X* take(size_t count) {
        X* p = reinterpret_cast<X*>(base + used);
        used += (count * sizeof(X) + 63) / 64 * 64;
        return p;
    }
};

// Softmax of some rows so far: maximum (in units of log2), sum of weights, weighted sum of values [rows][width].
struct State {
    float *max, *sum, *out;
    State from(int64_t row, int64_t width) const { return {max + row, sum + row, out + row * width}; }
};

template <class T> struct Buffers {
    typename T::Op *q, *weights;
    float* scores;
    float *q_steps, *weight_steps;  // what one unit of a row's q and weights stands for, if they are whole numbers
    State split, total;
    typename T::Elem *key_pack, *value_pack;
    int64_t q_stride, rows;

    static size_t bytes(const Geometry& g, int64_t rows) {
        return 4096 + rows * (4 * (g.width() + 2) + 8 * KEYS + 4 * (2 * g.width() + 10)) +
               2 * (g.width() + 2 + SCALE<T>) * KEYS * sizeof(typename T::Elem);
    }
    Buffers(Arena& arena, const Geometry& g, int64_t max_rows) : rows(max_rows) {
        arena.reserve(bytes(g, rows));
        int64_t steps = (g.head_dim + T::PAIR - 1) / T::PAIR;
        q_stride = T::SCALED ? g.width() : steps * T::OPS;
        q = arena.take<typename T::Op>(rows * q_stride);
        scores = arena.take<float>(rows * KEYS);
        weights = arena.take<typename T::Op>(rows * KEYS / T::PAIR * T::OPS);
        q_steps = arena.take<float>(rows);
        weight_steps = arena.take<float>(rows);
        for (State* s : {&split, &total})
            *s = {arena.take<float>(rows), arena.take<float>(rows), arena.take<float>(rows * g.width())};
        key_pack = arena.take<typename T::Elem>(KEYS * (g.head_dim + 1 + SCALE<T>));
        value_pack = arena.take<typename T::Elem>(KEYS * (g.width() + SCALE<T>));
    }
};

// Where the tiles of one split lie. The kernels fetch as many others as they go: pages are scattered, so the processor does
// not foresee them. Measured on one Zen 5 core at block size 16: 14 GB/s without, 24 with; reading pages
// in such an order and doing nothing else gives 25 to 28.
template <class T> struct Tiles {
    int64_t count = 0, last_pairs = 0;  // pairs of tokens in the last one
    const typename T::Elem *keys[KEYS / VL], *values[KEYS / VL];
    const typename T::Elem* half_pair = nullptr;  // V of one more token in the last one, beside zeros: [width][PAIR]
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

static inline void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// scores[R][N * VL] = q[R][steps] . tiles, for N tiles of VL tokens.
template <class T, int R, int N>
inline void score_kernel(const typename T::Op* q, int64_t q_stride, const float* q_steps,
                         const typename T::Elem* const* tiles, const typename T::Elem* const* ahead, int64_t steps,
                         float* scores) {
    typename T::Acc acc[R][N] = {};
    for (int64_t i = 0; i < steps; i++) {
        typename T::Block b[N];
        for (int n = 0; n < N; n++) {
            b[n] = T::load(tiles[n] + HEADER<T> + i * VL * T::PAIR);
            fetch(ahead[n] + HEADER<T> + i * VL * T::PAIR);
        }
        HIDE(q_stride);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) T::madd(acc[r][n], q + r * q_stride + i * T::OPS, b[n]);
    }
    if constexpr (T::SCALED) {
        for (int n = 0; n < N; n++) {
            const vf scales = load_any<vf>(tiles[n]);
            fetch(ahead[n]);
            for (int r = 0; r < R; r++)
                storef(scores + r * KEYS + n * VL, __builtin_convertvector(acc[r][n], vf) * q_steps[r] * scales);
        }
    } else {
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) storef(scores + r * KEYS + n * VL, acc[r][n]);
    }
}

// out[R][N * VL] = weights[R] . N columns of the tiles' tokens.
template <class T, int R, int N>
inline void value_kernel(const typename T::Op* weights, const float* weight_steps, const Tiles<T>& tiles,
                         const Tiles<T>& ahead, int64_t column, int64_t width, float* out) {
    constexpr int64_t STRIDE = KEYS / T::PAIR * T::OPS, PAIRS = VL / T::PAIR;
    typename T::Acc acc[R][N] = {};
    for (int64_t t = 0; t < tiles.count; t++) {
        const typename T::Elem *tile = tiles.values[t] + HEADER<T> + column * T::PAIR;
        const typename T::Elem *next = ahead.values[t] + HEADER<T> + column * T::PAIR;
        const int64_t pairs = t + 1 < tiles.count ? PAIRS : tiles.last_pairs;
        if (T::SCALED) fetch(ahead.values[t]);
        ROLLED for (int64_t i = 0; i < pairs; i++) {
            typename T::Block b[N];
            for (int n = 0; n < N; n++) {
                b[n] = T::load(tile + (i * width + n * VL) * T::PAIR);
                fetch(next + (i * width + n * VL) * T::PAIR);
            }
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++)
                    T::madd(acc[r][n], weights + r * STRIDE + (t * PAIRS + i) * T::OPS, b[n]);
        }
    }
    if (tiles.half_pair) {
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
inline void some_scores(const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, const Tiles<T>& ahead, int64_t steps, int64_t& t) {
    for (; t + N <= tiles.count; t += N)
        for (int64_t r = 0; r < rows; r += MAX_R)
            with_constant<MAX_R>(rows - r, [&](auto R) {
                score_kernel<T, R(), N>(w.q + r * w.q_stride, w.q_stride, w.q_steps + r, tiles.keys + t, ahead.keys + t,
                                        steps, w.scores + r * KEYS + t * VL);
            });
}

template <class T> void all_scores(const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, const Tiles<T>& ahead, int64_t steps) {
    int64_t t = 0;
    // with few rows only more tiles at a time give each sum the time to arrive before the next one needs it
    if (VL == 16 && rows <= 2) some_scores<T, 8, 2>(w, rows, tiles, ahead, steps, t);
    if (VL == 16 && rows <= 4) some_scores<T, 4, 4>(w, rows, tiles, ahead, steps, t);
    some_scores<T, SCORE_TILES, SCORE_ROWS>(w, rows, tiles, ahead, steps, t);
    some_scores<T, 1, SCORE_ROWS>(w, rows, tiles, ahead, steps, t);
}

template <class T> void add_values(const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, const Tiles<T>& ahead, int64_t width, float* out) {
    constexpr int64_t STRIDE = KEYS / T::PAIR * T::OPS;
    // few rows leave registers for whole lines of a tile, so that it is read in one stream
    if (VL == 16 && rows <= 3 && width % (8 * VL) == 0) {
        for (int64_t c = 0; c < width; c += 8 * VL)
            with_constant<3>(rows, [&](auto R) {
                value_kernel<T, R(), 8>(w.weights, w.weight_steps, tiles, ahead, c, width, out);
            });
        return;
    }
    for (int64_t c = 0; c < width; c += VALUE_COLS * VL)
        with_constant<VALUE_COLS>((width - c) / VL, [&](auto N) {
            for (int64_t r = 0; r < rows; r += VALUE_ROWS)
                with_constant<VALUE_ROWS>(rows - r, [&](auto R) {
                    value_kernel<T, R(), N()>(w.weights + r * STRIDE, w.weight_steps + r, tiles, ahead, c, width,
                                              out + r * width);
                });
        });
}

// The weights p of one row's tile, times the scales of V, as whole numbers. `used` tiles have tokens that the row sees,
// the last of them `seen_last`: the others' scales may be anything.
inline void whole_weights(const Buffers<I8>& w, int64_t r, const Tiles<I8>& tiles, int64_t used, vi seen_last) {
    float* p = w.scores + r * KEYS;
    Largest largest;
    for (int64_t t = 0; t < used; t++) {
        vf scales = load_any<vf>(tiles.values[t]);
        if (t == used - 1) scales = select_of(seen_last, scales, vf{});
        const vf scaled = loadf(p + t * VL) * scales;
        largest.put(scaled);
        storef(p + t * VL, scaled);
    }
    const float top = largest.get(), inverse = steps_per_unit(top, 32767.f);
    for (int64_t t = 0; t < used; t++) store_whole(w.weights + r * KEYS + t * VL, loadf(p + t * VL) * inverse);
    w.weight_steps[r] = top / 32767.f;
}

// One row: scores -> weights of the split's tokens, the first `visible` of which the row sees; their maximum and sum.
// factor is positive, so the largest score has the largest weight.
template <class T>
inline void softmax_row(const Buffers<T>& w, const State& state, int64_t r, int64_t visible, const Tiles<T>& tiles, float factor) {
    const int64_t num_tiles = tiles.count;
    float* scores = w.scores + r * KEYS;
    auto* weights = w.weights + r * (KEYS / T::PAIR * T::OPS);
    const vf low = splat(-INFINITY);
    vf top = low;
    const int64_t used = visible <= 0 ? 0 : std::min<int64_t>(num_tiles, (visible + VL - 1) / VL);
    vi seen = ~vi{};  // of the last used tile
    if (used * VL > visible && used) {
        float* last = scores + (used - 1) * VL;
        seen = iota() < (vi{} + (int32_t)(visible - (used - 1) * VL));
        storef(last, select_of(seen, loadf(last), low));
    }
    for (int64_t t = 0; t < used; t++) top = max_of(top, loadf(scores + t * VL));
    const float largest = max_in(top) * factor;
    const vf base = splat(largest == -INFINITY ? 0.f : largest);
    vf sum = {};
    for (int64_t t = 0; t < used; t++) {
        vf p = exp2_of(loadf(scores + t * VL) * factor - base);
        sum += p;
        if constexpr (T::SCALED)
            storef(scores + t * VL, p);
        else
            T::put_ops(weights, (int)(t * VL), p);
    }
    if constexpr (T::SCALED) {
        whole_weights(w, r, tiles, used, seen);
        memset(weights + used * VL, 0, (num_tiles - used) * VL * sizeof *weights);
    } else {
        for (int64_t t = used; t < num_tiles; t++) T::put_ops(weights, (int)(t * VL), vf{});
    }
    state.max[r] = largest;
    state.sum[r] = sum_of(sum);
}

// into = both together. A row that saw nothing in `from` leaves `into` as it is.
void merge(const State& into, const State& from, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        if (from.max[r] == -INFINITY) continue;
        float top = into.max[r] > from.max[r] ? into.max[r] : from.max[r];
        float a = exp2_of(into.max[r] - top), b = exp2_of(from.max[r] - top);
        into.max[r] = top;
        into.sum[r] = into.sum[r] * a + from.sum[r] * b;
        float *x = into.out + r * width, *y = from.out + r * width;
        for (int64_t c = 0; c < width; c += VL) storef(x + c, loadf(x + c) * a + loadf(y + c) * b);
    }
}

void copy(const State& into, const State& from, int64_t rows, int64_t width) {
    memcpy(into.max, from.max, rows * sizeof(float));
    memcpy(into.sum, from.sum, rows * sizeof(float));
    memcpy(into.out, from.out, rows * width * sizeof(float));
}

// Queries and results of type A over a cache of type T.
template <class A, class T> struct Attention {
    using Elem = typename T::Elem;
    using Row = typename A::Elem;
    Geometry g;
    const Plan& plan;
    const Row* q;
    const Elem *k, *v;
    int64_t q_token_stride, q_head_stride;
    Row* out;
    float factor;  // scale * log2(e)
    float* partials = nullptr;
    std::atomic<int32_t>* unfinished = nullptr;
    std::atomic<bool> bad_block{false};

    int64_t max_rows() const { return std::max<int64_t>(ROWS, g.group()); }

    int64_t partial_floats() const { return g.width() + 2; }  // of one row
    State partial(const Part& part, int64_t head, int64_t split) const {
        const int64_t rows = part.num_rows(g);
        float* p = partials + (head * plan.partial_rows + part.partial + split * rows) * partial_floats();
        return {p, p + rows, p + 2 * rows};
    }

    void load_queries(const Buffers<T>& w, const Part& part, int64_t head, int64_t row) const {
        const int64_t group = g.group();
        for (int64_t t = part.q_begin; t < part.q_end; t++)
            for (int64_t j = 0; j < group; j++, row++) {
                const Row* from = q + (plan.cu_q[part.b] + t) * q_token_stride + (head * group + j) * q_head_stride;
                typename T::Op* to = w.q + row * w.q_stride;
                if constexpr (T::SCALED) {
                    Largest largest;
                    for (int64_t d = 0; d < g.head_dim; d += VL) largest.put(load_some<A>(from + d, g.head_dim - d));
                    const float top = largest.get(), inverse = steps_per_unit(top, 32767.f);
                    for (int64_t d = 0; d < g.head_dim; d += VL)
                        store_whole(to + d, load_some<A>(from + d, g.head_dim - d) * inverse);
                    w.q_steps[row] = top / 32767.f;
                } else if constexpr (T::OPS * sizeof(typename T::Op) == T::PAIR * sizeof(Elem)) {  // an operand is the element itself
                    if (g.head_dim % T::PAIR) memset(to + w.q_stride - 1, 0, sizeof *to);
                    memcpy(to, from, g.head_dim * sizeof(Elem));
                } else {
                    if (g.head_dim % T::PAIR) memset(to + w.q_stride - T::OPS, 0, T::OPS * sizeof *to);
                    for (int64_t d = 0; d < g.head_dim; d++) T::put_op(to, (int)d, from[d]);
                }
            }
    }

    // The tiles of an item as they lie in the cache, head after head, each found AHEAD tiles before it is read.
    struct Upcoming {
        const int32_t* table;
        int64_t begin, end, head_end;  // tokens, heads
        int64_t head, t;               // of the next one to find
        int64_t place = 0;
        const Elem *keys[AHEAD] = {}, *values[AHEAD] = {};
    };

    // Finds the next tile of an item into its place, past the last one nothing. False if its block does not exist.
    bool find_next(Upcoming& next, int64_t place) const {
        next.keys[place] = nullptr;
        if (next.head >= next.head_end) return true;
        const uint32_t S = (uint32_t)g.block_size, token = (uint32_t)next.t;
        const int64_t block = next.table[token / S];
        if (block < 0 || block >= g.num_blocks) return false;
        const int64_t offset = ((block * g.num_kv_heads + next.head) * S + token % S) * (g.head_dim + SCALE<T>);
        next.keys[place] = k + offset;
        next.values[place] = v + offset;
        if ((next.t += VL) >= next.end) next.t = next.begin, next.head++;
        return true;
    }

    // The next `count` tiles, and as many to fetch while those are read.
    bool take_tiles(int64_t count, Upcoming& next, Tiles<T>& tiles, Tiles<T>& ahead) const {
        tiles.count = count;
        for (int64_t n = 0; n < count; n++) {
            const int64_t place = next.place++ % AHEAD;
            tiles.keys[n] = next.keys[place], tiles.values[n] = next.values[place];
            if (!find_next(next, place)) return false;
            const bool more = next.keys[place];
            ahead.keys[n] = more ? next.keys[place] : tiles.keys[n];
            ahead.values[n] = more ? next.values[place] : tiles.values[n];
        }
        return true;
    }

    // How far V is read in the last tile, of which `valid` tokens live. What shares a pair with the last of an odd number
    // may be anything, and 0 x NaN would be NaN; 0 x a whole number is always 0, and packed tiles end in zeros.
    void end_values(const Buffers<T>& w, int64_t valid, Tiles<T>& tiles) const {
        const bool any = T::SCALED || g.packed() || valid % T::PAIR == 0;
        tiles.last_pairs = any ? (valid + T::PAIR - 1) / T::PAIR : valid / T::PAIR;
        tiles.half_pair = any ? nullptr : w.value_pack;
        if (any) return;
        const Elem* pair = tiles.values[tiles.count - 1] + tiles.last_pairs * g.head_dim * T::PAIR;
        static_assert(T::PAIR == 1 || T::SCALED || sizeof(Elem) == 2);
        for (int64_t d = 0; d < g.head_dim; d += VL)  // vectors, as they are read next: single elements would stall it
            store_any(w.value_pack + d * T::PAIR, load_any<vu>(pair + d * T::PAIR) & 0xffffu);
    }

    // Tiles of tokens t ... end-1 where they cannot be read as they lie.
    bool pack_tiles(const Buffers<T>& w, const Part& part, int64_t head, int64_t t, int64_t end, Tiles<T>& tiles) const {
        const int32_t* table = plan.table + part.b * plan.table_stride;
        for (tiles.count = 0; t < end; t += VL, tiles.count++)
            if (!pack(w, table, head, t, std::min<int64_t>(VL, plan.num_tokens[part.b] - t), tiles)) return false;
        return true;
    }

    bool pack(const Buffers<T>& w, const int32_t* table, int64_t head, int64_t t, int64_t valid, Tiles<T>& tiles) const {
        const int64_t n = tiles.count;
        const int64_t S = g.block_size, D = g.head_dim, width = g.width();
        const int64_t steps = (D + T::PAIR - 1) / T::PAIR;
        const int64_t key_elements = HEADER<T> + VL * steps * T::PAIR, value_elements = HEADER<T> + VL * width;
        Elem *key = w.key_pack + n * key_elements, *value = w.value_pack + n * value_elements;
        memset(key, 0, key_elements * sizeof(Elem));
        memset(value, 0, value_elements * sizeof(Elem));
        for (int64_t i = 0; i < valid; i++) {
            int64_t block = table[(t + i) / S], s = (t + i) % S;
            if (block < 0 || block >= g.num_blocks) return false;
            const int64_t plain = (block * g.num_kv_heads + head) * S * (D + SCALE<T>), offset = plain + S * SCALE<T> + s * D;
            memcpy(key + i * SCALE<T>, k + plain + s * SCALE<T>, SCALE<T>);
            memcpy(value + i * SCALE<T>, v + plain + s * SCALE<T>, SCALE<T>);
            for (int64_t d = 0; d < D; d++) {
                key[HEADER<T> + (d / T::PAIR * VL + i) * T::PAIR + d % T::PAIR] = k[offset + d];
                value[HEADER<T> + (i / T::PAIR * width + d) * T::PAIR + i % T::PAIR] = v[offset + d];
            }
        }
        tiles.keys[n] = key;
        tiles.values[n] = value;
        return true;
    }

    void store(const State& s, const Part& part, int64_t head) const {
        const int64_t group = g.group(), width = g.width();
        for (int64_t r = 0; r < part.num_rows(g); r++) {
            int64_t token = plan.cu_q[part.b] + part.q_begin + r / group;
            Row* to = out + (token * g.num_heads + head * group + r % group) * g.head_dim;
            const float *from = s.out + r * width, inverse = 1.f / s.sum[r];
            for (int64_t d = 0; d < g.head_dim; d += VL) store_some<A>(to + d, loadf(from + d) * inverse, g.head_dim - d);
        }
    }

    // Some splits of a part are in their places; the last item to say so adds all of them up.
    void finish_splits(const State& total, const Part& part, int64_t head, int32_t count) const {
        if (unfinished[head * plan.num_merges + part.merge].fetch_sub(count, std::memory_order_acq_rel) > count) return;
        const int64_t rows = part.num_rows(g), width = g.width();
        copy(total, partial(part, head, 0), rows, width);
        for (int64_t s = 1; s < part.num_splits; s++) merge(total, partial(part, head, s), rows, width);
        store(total, part, head);
    }

    bool run(const Item& it) const {
        static thread_local Arena arena;
        Buffers<T> w(arena, g, max_rows());
        const Part *parts = &plan.parts[it.first], &first = parts[0];
        const int64_t width = g.width(), steps = (g.head_dim + T::PAIR - 1) / T::PAIR;
        const int64_t begin = it.split_begin * KEYS;
        const int64_t end = std::min<int64_t>(plan.end(first), it.split_end * KEYS);
        const bool keep = first.partial >= 0;  // for others to add up
        int64_t rows = 0;
        for (int32_t n = 0; n < it.count; n++) rows += parts[n].num_rows(g);
        Tiles<T> tiles, ahead;
        Upcoming next{plan.table + first.b * plan.table_stride, begin, end, it.head_end, it.head_begin, begin};
        for (int64_t place = 0; place < AHEAD && !g.packed(); place++)
            if (!find_next(next, place)) return false;
        for (int64_t head = it.head_begin; head < it.head_end; head++) {
            for (int64_t n = 0, row = 0; n < it.count; row += parts[n++].num_rows(g)) load_queries(w, parts[n], head, row);
            for (int32_t split = it.split_begin; split < it.split_end; split++) {
                const int64_t t = split * KEYS, tokens = std::min<int64_t>(KEYS, end - t);
                const bool found = g.packed() ? pack_tiles(w, first, head, t, t + tokens, tiles)
                                              : take_tiles((tokens + VL - 1) / VL, next, tiles, ahead);
                if (!found) return false;
                if (g.packed()) ahead = tiles;
                end_values(w, std::min<int64_t>(VL, plan.num_tokens[first.b] - t - (tiles.count - 1) * VL), tiles);
                const State& state = split == 0 && !keep ? w.total : w.split;
                all_scores<T>(w, rows, tiles, ahead, steps);
                for (int64_t n = 0, row = 0; n < it.count; row += parts[n++].num_rows(g))
                    for (int64_t r = 0; r < parts[n].num_rows(g); r++) {
                        const int64_t visible = plan.begin(parts[n]) + r / g.group() + 1 - t;
                        softmax_row<T>(w, state, row + r, visible, tiles, factor);
                    }
                add_values<T>(w, rows, tiles, ahead, width, state.out);
                for (int64_t n = 0, row = 0; keep && n < it.count; row += parts[n++].num_rows(g))
                    copy(partial(parts[n], head, split), state.from(row, width), parts[n].num_rows(g), width);
                if (!keep && split) merge(w.total, w.split, rows, width);
            }
            if (!keep) store(w.total, first, head);
            for (int32_t n = 0; keep && n < it.count; n++)
                finish_splits(w.total, parts[n], head, it.split_end - it.split_begin);
        }
        return true;
    }

    int run_all() {
        static thread_local Arena arena;
        const int64_t heads = g.num_kv_heads, counters = heads * plan.num_merges;
        const int64_t floats = heads * plan.partial_rows * partial_floats();
        arena.reserve(floats * sizeof(float) + counters * 4 + 256);
        partials = arena.take<float>(floats);
        unfinished = arena.take<std::atomic<int32_t>>(counters);
        for (const Part& part : plan.parts)
            for (int64_t h = 0; h < heads && part.partial >= 0; h++)
                unfinished[h * plan.num_merges + part.merge] = part.num_splits;
        parallel_for(plan.threads, (int64_t)plan.items.size(), [&](int64_t i) {
            if (!run(plan.items[i])) bad_block = true;
        });
        return bad_block ? 1 : 0;
    }
};

}  // namespace

extern "C" {

// 0, or 1 if the block table names a block that does not exist. dtype: 0 float32, 1 bfloat16, 2 float16, of q and out
// and, unless geometry says int8, of the cache.
int paged_attend(int dtype, const Geometry* geometry, const Plan* plan, const void* q, int64_t q_token_stride,
                 int64_t q_head_stride, const void* k_cache, const void* v_cache, void* out, float scale) {
    return with_types(dtype, *geometry, [&](auto type, auto cache_type) {
        using A = decltype(type);
        using T = decltype(cache_type);
        using E = typename T::Elem;
        using Row = typename A::Elem;
        Attention<A, T> attention{*geometry,  *plan, (const Row*)q, (const E*)k_cache, (const E*)v_cache, q_token_stride,
                                  q_head_stride, (Row*)out, scale * LOG2E};
        return attention.run_all();
    });
}
}
