// Paged attention on a CPU: flash-style over pages, split over long contexts, for whole prompts, chunks and decode.
//
// Cache: [N, G, S, D], cut into tiles of VL tokens of one head. In a tile, K is [D / PAIR][VL][PAIR] and V is
// [VL / PAIR][D][PAIR]: both are the right-hand side that a matrix kernel wants, so a page is read as it lies. Where S or
// D is not a multiple of VL the cache is plain [N, G, S, D] and a tile is packed before use ("packed" below).
//
// A query row's result depends on that row and its keys alone, bit for bit: keys are summed in tiles of KEYS and splits
// of SPLIT tokens counted from position 0, whatever the batch, the chunk and the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "parallel.h"
#include "rows.h"
#include "simd.h"

namespace {

constexpr int KEYS = 128;   // tokens of one softmax tile: its K, V and scores stay in the L2 cache
constexpr int SPLIT = 512;  // tokens of one split, a multiple of KEYS
constexpr int ROWS = 48;    // query rows (new tokens x heads of a group) that share one reading of K and V
constexpr float LOG2E = 1.4426950408889634f;

struct Geometry {
    int64_t num_blocks, block_size, num_heads, num_kv_heads, head_dim;
    int64_t group() const { return num_heads / num_kv_heads; }
    bool packed() const { return block_size % VL || head_dim % VL; }
    int64_t width() const { return (head_dim + VL - 1) / VL * VL; }  // head_dim as vectors see it
};

// New tokens q_begin ... q_end-1 of sequence b for some key/value heads. split >= 0: only that split, and the last of the
// num_splits items that finishes merges their partial results.
struct Item {
    int32_t b, q_begin, q_end, head_begin, head_end, split, num_splits;
    int32_t partial;  // of the first split
    int32_t merge;    // which counter of unfinished splits
};

struct Plan {
    const int32_t *cu_q, *num_tokens, *table;
    int64_t table_stride;
    int threads;
    int64_t num_partials = 0, num_merges = 0;
    std::vector<Item> items;
};

// Memory that grows and is never given back: an allocation of this size per call would fault its pages in each time.
struct Arena {
    char* base = nullptr;
    size_t capacity = 0, used = 0;
    ~Arena() { free(base); }
    void reserve(size_t bytes) {
        used = 0;
        if (bytes <= capacity) return;
        free(base);
        capacity = (bytes + 4095) / 4096 * 4096;
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

// Running softmax of some rows: maximum (in units of log2), sum of weights, weighted sum of values [rows][width].
struct State {
    float *max, *sum, *out;
};

template <class T> struct Buffers {
    typename T::Op *q, *weights;
    float* scores;
    State split, total;
    typename T::Elem *key_pack, *value_pack;
    int64_t q_stride, rows;

    static size_t bytes(const Geometry& g, int64_t rows) {
        return 4096 + rows * (4 * (g.width() + 2) + 8 * KEYS + 4 * (2 * g.width() + 8)) +
               2 * (g.width() + 2) * KEYS * sizeof(typename T::Elem);
    }
    Buffers(Arena& arena, const Geometry& g, int64_t max_rows) : rows(max_rows) {
        arena.reserve(bytes(g, rows));
        int64_t steps = (g.head_dim + T::PAIR - 1) / T::PAIR;
        q_stride = steps * T::OPS;
        q = arena.take<typename T::Op>(rows * q_stride);
        scores = arena.take<float>(rows * KEYS);
        weights = arena.take<typename T::Op>(rows * KEYS / T::PAIR * T::OPS);
        for (State* s : {&split, &total})
            *s = {arena.take<float>(rows), arena.take<float>(rows), arena.take<float>(rows * g.width())};
        key_pack = arena.take<typename T::Elem>(KEYS * (g.head_dim + 1));
        value_pack = arena.take<typename T::Elem>(KEYS * g.width());
    }
};

// Where the tiles of one softmax tile lie. The kernels fetch the next one's as they go: pages are scattered, so the
// processor does not foresee them. Measured on one Zen 5 core at block size 16: 14 GB/s without, 24 with; reading pages
// in such an order and doing nothing else gives 25 to 28.
template <class T> struct Tiles {
    int64_t count = 0;
    const typename T::Elem *keys[KEYS / VL], *values[KEYS / VL];
};

// gcc alone keeps one pointer per row, more than there are registers, and unrolls whole tiles; clang does neither.
#if defined(__clang__)
#define HIDE(x) (void)x
#define ROLLED
#else
#define HIDE(x) __asm__("" : "+r"(x))
#define ROLLED _Pragma("GCC unroll 1")
#endif

static inline void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// scores[R][N * VL] = q[R][steps] . tiles, for N tiles of VL tokens.
template <class T, int R, int N>
inline void score_kernel(const typename T::Op* q, int64_t q_stride, const typename T::Elem* const* tiles,
                         const typename T::Elem* const* ahead, int64_t steps, float* scores) {
    vf acc[R][N] = {};
    for (int64_t i = 0; i < steps; i++) {
        typename T::Block b[N];
        for (int n = 0; n < N; n++) {
            b[n] = T::load(tiles[n] + i * VL * T::PAIR);
            fetch(ahead[n] + i * VL * T::PAIR);
        }
        HIDE(q_stride);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) T::madd(acc[r][n], q + r * q_stride + i * T::OPS, b[n]);
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) storef(scores + r * KEYS + n * VL, acc[r][n]);
}

// out[R][N * VL] += weights[R][num_tiles * VL] . N columns of the tiles.
template <class T, int R, int N>
inline void value_kernel(const typename T::Op* weights, const typename T::Elem* const* tiles,
                         const typename T::Elem* const* ahead, int64_t num_tiles, int64_t column, int64_t width, float* out) {
    constexpr int64_t STRIDE = KEYS / T::PAIR * T::OPS;
    vf acc[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = loadf(out + r * width + column + n * VL);
    for (int64_t t = 0; t < num_tiles; t++) {
        const typename T::Elem *tile = tiles[t] + column * T::PAIR, *next = ahead[t] + column * T::PAIR;
        ROLLED for (int i = 0; i < VL / T::PAIR; i++) {
            typename T::Block b[N];
            for (int n = 0; n < N; n++) {
                b[n] = T::load(tile + (i * width + n * VL) * T::PAIR);
                fetch(next + (i * width + n * VL) * T::PAIR);
            }
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++)
                    T::madd(acc[r][n], weights + r * STRIDE + (t * (VL / T::PAIR) + i) * T::OPS, b[n]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) storef(out + r * width + column + n * VL, acc[r][n]);
}

// Calls f(integral constant R) for the compile-time R that equals r, 1 <= r <= MAX.
template <int MAX, class F> inline void with_constant(int64_t r, const F& f) {
    if constexpr (MAX > 1)
        if (r < MAX) return with_constant<MAX - 1>(r, f);
    f(std::integral_constant<int, MAX>{});
}

template <class T> void all_scores(const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, const Tiles<T>& ahead, int64_t steps) {
    for (int64_t t = 0; t < tiles.count; t += SCORE_TILES) {
        const auto* const* next = t + SCORE_TILES <= ahead.count ? ahead.keys + t : tiles.keys + t;
        for (int64_t r = 0; r < rows; r += SCORE_ROWS)
            with_constant<SCORE_ROWS>(rows - r, [&](auto R) {
                const auto* q = w.q + r * w.q_stride;
                float* out = w.scores + r * KEYS + t * VL;
                if (t + SCORE_TILES <= tiles.count)
                    score_kernel<T, R(), SCORE_TILES>(q, w.q_stride, tiles.keys + t, next, steps, out);
                else
                    score_kernel<T, R(), 1>(q, w.q_stride, tiles.keys + t, next, steps, out);
            });
    }
}

template <class T> void add_values(const Buffers<T>& w, int64_t rows, const Tiles<T>& tiles, const Tiles<T>& ahead, int64_t width) {
    constexpr int64_t STRIDE = KEYS / T::PAIR * T::OPS;
    const auto* const* next = tiles.count <= ahead.count ? ahead.values : tiles.values;
    // few rows leave registers for whole lines of a tile, so that it is read in one stream
    if (VL == 16 && rows <= 3 && width % (8 * VL) == 0) {
        for (int64_t c = 0; c < width; c += 8 * VL)
            with_constant<3>(rows, [&](auto R) {
                value_kernel<T, R(), 8>(w.weights, tiles.values, next, tiles.count, c, width, w.split.out);
            });
        return;
    }
    for (int64_t c = 0; c < width; c += VALUE_COLS * VL)
        with_constant<VALUE_COLS>((width - c) / VL, [&](auto N) {
            for (int64_t r = 0; r < rows; r += VALUE_ROWS)
                with_constant<VALUE_ROWS>(rows - r, [&](auto R) {
                    value_kernel<T, R(), N()>(w.weights + r * STRIDE, tiles.values, next, tiles.count, c, width,
                                              w.split.out + r * width);
                });
        });
}

// One row: scores -> weights of the tile's tokens, the first `visible` of which the row sees; updates the running state.
// factor is positive, so the largest score has the largest weight.
template <class T>
inline void softmax_row(const Buffers<T>& w, int64_t r, int64_t visible, int64_t num_tiles, float factor, int64_t width) {
    float* scores = w.scores + r * KEYS;
    auto* weights = w.weights + r * (KEYS / T::PAIR * T::OPS);
    const vf low = splat(-INFINITY);
    vf top = low;
    const int64_t used = visible <= 0 ? 0 : std::min<int64_t>(num_tiles, (visible + VL - 1) / VL);
    if (used * VL > visible && used) {
        float* last = scores + (used - 1) * VL;
        vi seen = iota() < (vi{} + (int32_t)(visible - (used - 1) * VL));
        storef(last, select_of(seen, loadf(last), low));
    }
    for (int64_t t = 0; t < used; t++) top = max_of(top, loadf(scores + t * VL));
    const float old_max = w.split.max[r], new_max = std::max(old_max, max_in(top) * factor);
    const vf base = splat(new_max == -INFINITY ? 0.f : new_max);
    vf sum = {};
    for (int64_t t = 0; t < used; t++) {
        vf p = exp2_of(loadf(scores + t * VL) * factor - base);
        sum += p;
        T::put_ops(weights, (int)(t * VL), p);
    }
    for (int64_t t = used; t < num_tiles; t++) T::put_ops(weights, (int)(t * VL), vf{});
    if (new_max > old_max) {
        float shrink = exp2_of(old_max - new_max);
        w.split.sum[r] *= shrink;
        float* out = w.split.out + r * width;
        for (int64_t c = 0; c < width; c += VL) storef(out + c, loadf(out + c) * shrink);
        w.split.max[r] = new_max;
    }
    w.split.sum[r] += sum_of(sum);
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

void clear(const State& s, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) s.max[r] = -INFINITY, s.sum[r] = 0;
    memset(s.out, 0, rows * width * sizeof(float));
}

template <class T> struct Attention {
    using Elem = typename T::Elem;
    Geometry g;
    const Plan& plan;
    const Elem *q, *k, *v;
    int64_t q_token_stride, q_head_stride;
    Elem* out;
    float factor;  // scale * log2(e)
    float* partials = nullptr;
    std::atomic<int32_t>* unfinished = nullptr;
    std::atomic<bool> bad_block{false};

    int64_t max_rows() const { return std::max<int64_t>(ROWS, g.group()); }
    int64_t partial_floats() const { return max_rows() * (g.width() + 2); }
    State partial(int64_t i) const {
        float* p = partials + i * partial_floats();
        return {p, p + max_rows(), p + 2 * max_rows()};
    }

    void load_queries(const Buffers<T>& w, const Item& it, int64_t head) const {
        int64_t group = g.group(), row = 0;
        for (int64_t t = it.q_begin; t < it.q_end; t++)
            for (int64_t j = 0; j < group; j++, row++) {
                const Elem* from = q + (plan.cu_q[it.b] + t) * q_token_stride + (head * group + j) * q_head_stride;
                typename T::Op* to = w.q + row * w.q_stride;
                if constexpr (T::OPS * sizeof(typename T::Op) == T::PAIR * sizeof(Elem)) {  // an operand is the element itself
                    if (g.head_dim % T::PAIR) memset(to + w.q_stride - 1, 0, sizeof *to);
                    memcpy(to, from, g.head_dim * sizeof(Elem));
                } else {
                    if (g.head_dim % T::PAIR) memset(to + w.q_stride - T::OPS, 0, T::OPS * sizeof *to);
                    for (int64_t d = 0; d < g.head_dim; d++) T::put_op(to, (int)d, from[d]);
                }
            }
    }

    // The tiles of tokens begin ... end-1 of sequence b. Packed tiles are made here, the others are where they are.
    bool find_tiles(const Buffers<T>& w, int64_t b, int64_t head, int64_t begin, int64_t end, Tiles<T>& tiles) const {
        const int32_t* table = plan.table + b * plan.table_stride;
        const int64_t S = g.block_size, D = g.head_dim;
        tiles.count = 0;
        for (int64_t t = begin; t < end; t += VL, tiles.count++) {
            if (g.packed()) {
                int64_t valid = std::min<int64_t>(VL, plan.num_tokens[b] - t);
                if (!pack(w, table, head, t, valid, tiles)) return false;
                continue;
            }
            int64_t block = table[t / S];
            if (block < 0 || block >= g.num_blocks) return false;
            int64_t offset = ((block * g.num_kv_heads + head) * S + t % S) * D;
            tiles.keys[tiles.count] = k + offset;
            tiles.values[tiles.count] = v + offset;
        }
        return true;
    }

    // A copy of a V tile with zeros where no token lives: 0 x NaN would be NaN.
    const Elem* zero_tail(const Buffers<T>& w, const Elem* tile, int64_t valid) const {
        for (int64_t i = 0; i < VL / T::PAIR; i++)
            for (int64_t d = 0; d < g.head_dim; d++)
                for (int64_t j = 0; j < T::PAIR; j++) {
                    int64_t at = (i * g.head_dim + d) * T::PAIR + j;
                    w.value_pack[at] = i * T::PAIR + j < valid ? tile[at] : Elem(0);
                }
        return w.value_pack;
    }

    bool pack(const Buffers<T>& w, const int32_t* table, int64_t head, int64_t t, int64_t valid, Tiles<T>& tiles) const {
        const int64_t n = tiles.count;
        const int64_t S = g.block_size, D = g.head_dim, width = g.width();
        const int64_t steps = (D + T::PAIR - 1) / T::PAIR;
        Elem *key = w.key_pack + n * VL * steps * T::PAIR, *value = w.value_pack + n * VL * width;
        memset(key, 0, VL * steps * T::PAIR * sizeof(Elem));
        memset(value, 0, VL * width * sizeof(Elem));
        for (int64_t i = 0; i < valid; i++) {
            int64_t block = table[(t + i) / S];
            if (block < 0 || block >= g.num_blocks) return false;
            int64_t offset = ((block * g.num_kv_heads + head) * S + (t + i) % S) * D;
            for (int64_t d = 0; d < D; d++) {
                key[(d / T::PAIR * VL + i) * T::PAIR + d % T::PAIR] = k[offset + d];
                value[(i / T::PAIR * width + d) * T::PAIR + i % T::PAIR] = v[offset + d];
            }
        }
        tiles.keys[n] = key;
        tiles.values[n] = value;
        return true;
    }

    void store(const State& s, const Item& it, int64_t head) const {
        const int64_t group = g.group(), width = g.width(), rows = (it.q_end - it.q_begin) * group;
        for (int64_t r = 0; r < rows; r++) {
            int64_t token = plan.cu_q[it.b] + it.q_begin + r / group;
            Elem* to = out + (token * g.num_heads + head * group + r % group) * g.head_dim;
            const float *from = s.out + r * width, inverse = 1.f / s.sum[r];
            int64_t d = 0;
            for (; d + VL <= g.head_dim; d += VL) Rows<T>::store(to + d, loadf(from + d) * inverse);
            if (d == g.head_dim) continue;
            Elem rest[VL];
            Rows<T>::store(rest, loadf(from + d) * inverse);
            memcpy(to + d, rest, (g.head_dim - d) * sizeof(Elem));
        }
    }

    // The split's state is complete: keep it, add it up with the others, or write the result.
    void finish_split(const Buffers<T>& w, const Item& it, int64_t head, int64_t split) const {
        const int64_t rows = (it.q_end - it.q_begin) * g.group(), width = g.width();
        if (it.num_splits == 1) return store(w.split, it, head);
        if (it.split < 0) {
            if (split == 0) clear(w.total, rows, width);
            merge(w.total, w.split, rows, width);
            if (split == it.num_splits - 1) store(w.total, it, head);
            return;
        }
        int64_t first = head * plan.num_partials + it.partial;
        State mine = partial(first + split);
        memcpy(mine.max, w.split.max, rows * sizeof(float));
        memcpy(mine.sum, w.split.sum, rows * sizeof(float));
        memcpy(mine.out, w.split.out, rows * width * sizeof(float));
        if (unfinished[head * plan.num_merges + it.merge].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        clear(w.total, rows, width);
        for (int64_t s = 0; s < it.num_splits; s++) merge(w.total, partial(first + s), rows, width);
        store(w.total, it, head);
    }

    bool run(const Item& it) const {
        static thread_local Arena arena;
        Buffers<T> w(arena, g, max_rows());
        const int64_t group = g.group(), rows = (it.q_end - it.q_begin) * group, width = g.width();
        const int64_t total = plan.num_tokens[it.b], steps = (g.head_dim + T::PAIR - 1) / T::PAIR;
        const int64_t first_position = total - (plan.cu_q[it.b + 1] - plan.cu_q[it.b]) + it.q_begin;
        const int64_t last = first_position + it.q_end - it.q_begin;
        const int64_t begin = it.split < 0 ? 0 : it.split * SPLIT;
        const int64_t end = it.split < 0 ? last : std::min<int64_t>(last, begin + SPLIT);
        Tiles<T> tiles, ahead;
        if (!find_tiles(w, it.b, it.head_begin, begin, std::min(end, begin + KEYS), tiles)) return false;
        for (int64_t head = it.head_begin; head < it.head_end; head++) {
            load_queries(w, it, head);
            for (int64_t t = begin; t < end; t += KEYS) {
                const bool last_tile = t + KEYS >= end;
                const int64_t next = last_tile ? begin : t + KEYS, next_head = head + last_tile;
                const bool more = next_head < it.head_end;
                ahead.count = 0;
                if (more && !g.packed())
                    if (!find_tiles(w, it.b, next_head, next, std::min(end, next + KEYS), ahead)) return false;
                if (t % SPLIT == 0) clear(w.split, rows, width);
                all_scores<T>(w, rows, tiles, ahead, steps);
                for (int64_t r = 0; r < rows; r++)
                    softmax_row<T>(w, r, first_position + r / group + 1 - t, tiles.count, factor, width);
                const int64_t valid = total - t - (tiles.count - 1) * VL;  // of the last tile
                if (valid < VL && !g.packed())
                    tiles.values[tiles.count - 1] = zero_tail(w, tiles.values[tiles.count - 1], valid);
                add_values<T>(w, rows, tiles, ahead, width);
                if (last_tile || (t + KEYS) % SPLIT == 0) finish_split(w, it, head, t / SPLIT);
                if (more && g.packed())
                    if (!find_tiles(w, it.b, next_head, next, std::min(end, next + KEYS), ahead)) return false;
                tiles = ahead;
            }
        }
        return true;
    }

    int run_all() {
        static thread_local Arena arena;
        const int64_t heads = g.num_kv_heads, counters = heads * plan.num_merges;
        arena.reserve(heads * plan.num_partials * partial_floats() * sizeof(float) + counters * 4 + 256);
        partials = arena.take<float>(heads * plan.num_partials * partial_floats());
        unfinished = arena.take<std::atomic<int32_t>>(counters);
        for (const Item& it : plan.items)
            if (it.split == 0)
                for (int64_t h = it.head_begin; h < it.head_end; h++)
                    unfinished[h * plan.num_merges + it.merge] = it.num_splits;
        parallel_for(plan.threads, (int64_t)plan.items.size(), [&](int64_t i) {
            if (!run(plan.items[i])) bad_block = true;
        });
        return bad_block ? 1 : 0;
    }
};

template <class T>
void write_cache(const Geometry& g, int64_t num_tokens, int threads, const void* k_, const void* v_,
                 const int64_t* strides, void* k_cache, void* v_cache, const int32_t* slots) {
    using Elem = typename T::Elem;
    const int64_t S = g.block_size, D = g.head_dim, P = T::PAIR;
    constexpr int64_t CHUNK = 16;  // tokens per piece of work
    parallel_for(num_tokens <= CHUNK ? 1 : threads, (num_tokens + CHUNK - 1) / CHUNK, [&](int64_t chunk) {
        for (int64_t i = chunk * CHUNK; i < std::min(num_tokens, (chunk + 1) * CHUNK); i++) {
            if (slots[i] < 0) continue;
            const int64_t block = slots[i] / S, offset = slots[i] % S, lane = offset % VL;
            for (int64_t h = 0; h < g.num_kv_heads; h++) {
                const Elem* k = (const Elem*)k_ + i * strides[0] + h * strides[1];
                const Elem* v = (const Elem*)v_ + i * strides[2] + h * strides[3];
                const int64_t head = (block * g.num_kv_heads + h) * S * D;
                if (g.packed()) {
                    memcpy((Elem*)k_cache + head + offset * D, k, D * sizeof(Elem));
                    memcpy((Elem*)v_cache + head + offset * D, v, D * sizeof(Elem));
                    continue;
                }
                Elem* k_tile = (Elem*)k_cache + head + (offset - lane) * D;
                Elem* v_tile = (Elem*)v_cache + head + (offset - lane) * D;
                for (int64_t d = 0; d < D; d += P) memcpy(k_tile + (d / P * VL + lane) * P, k + d, P * sizeof(Elem));
                for (int64_t d = 0; d < D; d++) v_tile[(lane / P * D + d) * P + lane % P] = v[d];
            }
        }
    });
}

template <class F> int with_type(int dtype, const F& f) {
    if (dtype == 0) return f(F32{});
    if (dtype == 1) return f(BF16{});
    return f(F16{});
}

}  // namespace

extern "C" {

// The items of one step. geometry: five int64 (num_blocks, block_size, num_heads, num_kv_heads, head_dim).
Plan* paged_plan_new(const Geometry* geometry, int64_t num_sequences, const int32_t* cu_q, const int32_t* num_tokens,
                     const int32_t* table, int64_t table_stride, int threads) {
    auto plan = std::make_unique<Plan>();
    plan->cu_q = cu_q, plan->num_tokens = num_tokens, plan->table = table, plan->table_stride = table_stride;
    plan->threads = threads;
    const int64_t heads = geometry->num_kv_heads, group = geometry->group(), tokens = std::max<int64_t>(1, ROWS / group);
    double work = 0;  // query rows x keys of all heads
    for (int64_t b = 0; b < num_sequences; b++) work += double(cu_q[b + 1] - cu_q[b]) * num_tokens[b] * group * heads;
    const double share = work / (8.0 * threads);  // an item of more than this could keep one thread busy alone
    for (int64_t b = 0; b < num_sequences; b++) {
        const int32_t num_new = cu_q[b + 1] - cu_q[b];
        for (int32_t end = num_new; end > 0;) {  // the longest first
            const int32_t begin = std::max<int32_t>(0, (end - 1) / tokens * tokens);
            const int32_t keys = num_tokens[b] - num_new + end, splits = (keys + SPLIT - 1) / SPLIT;
            const double cost = double(end - begin) * group * keys;  // of one head
            const bool split = splits > 1 && threads > 1 && cost > share;
            // As many heads in a row as a fair share allows: from one to the next the cache is fetched ahead.
            const int32_t step = threads == 1 ? heads : std::clamp<int64_t>(share / cost * (split ? splits : 1), 1, heads);
            const int32_t partial = (int32_t)plan->num_partials, merge = (int32_t)plan->num_merges;
            for (int32_t h = 0; h < heads; h += step) {
                Item item{(int32_t)b, begin, end, h, std::min<int32_t>(heads, h + step), -1, splits, partial, merge};
                if (!split) plan->items.push_back(item);
                for (int32_t s = 0; split && s < splits; s++) item.split = s, plan->items.push_back(item);
            }
            if (split) plan->num_partials += splits, plan->num_merges++;
            end = begin;
        }
    }
    return plan.release();
}

void paged_plan_free(Plan* plan) { delete plan; }

// 0, or 1 if the block table names a block that does not exist. dtype: 0 float32, 1 bfloat16, 2 float16.
int paged_attend(int dtype, const Geometry* geometry, const Plan* plan, const void* q, int64_t q_token_stride,
                 int64_t q_head_stride, const void* k_cache, const void* v_cache, void* out, float scale) {
    return with_type(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        Attention<T> attention{*geometry, *plan,         (const E*)q, (const E*)k_cache, (const E*)v_cache, q_token_stride,
                               q_head_stride, (E*)out, scale * LOG2E};
        return attention.run_all();
    });
}

// strides: four int64, k and v, token and head, in elements.
void paged_write(int dtype, const Geometry* geometry, int64_t num_tokens, int threads, const void* k, const void* v,
                 const int64_t* strides, void* k_cache, void* v_cache, const int32_t* slots) {
    with_type(dtype, [&](auto type) {
        write_cache<decltype(type)>(*geometry, num_tokens, threads, k, v, strides, k_cache, v_cache, slots);
        return 0;
    });
}
}
