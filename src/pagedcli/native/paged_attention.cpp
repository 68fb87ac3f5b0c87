// Paged attention on a CPU: flash-style over pages, split over long contexts, for whole prompts, chunks and decode.
//
// Over an int8 cache a query row is rounded to 16 bits, and so are the weights of a row and split, times the scales of V:
// the sums of products are then whole and exact.
//
// A query row's result depends on that row and its keys alone, bit for bit: keys are summed in splits of KEYS tokens
// counted from position 0, whatever the batch, the chunk and the number of threads. So sequences whose tables name the same
// blocks for a split (a system prompt, samples of one prompt) may share one reading of it.

#include "paged_attention.h"

#include "paged_kernels.h"
#include "paged_softmax.h"
#include "paged_tiles.h"
#include "parallel.h"

namespace {

// Queries and results of type A over a cache of type T.
template <class A, class T> struct Attention {
    using Elem = typename T::Elem;
    using Row = typename A::Elem;
    Geometry g;
    const StepWork& work;
    const Row* q;
    const Elem *k, *v;
    int64_t q_token_stride, q_head_stride;
    Matrix<Row> out;  // [T][H * D]
    float factor;  // scale * log2(e)
    float cap;     // soft cap * log2(e), 0: none
    const float* sinks;  // [heads], or null
    float* partials = nullptr;
    std::atomic<int32_t>* unfinished = nullptr;
    std::atomic<bool> bad_block{false};

    int64_t partial_floats() const { return g.width() + 2; }  // of one row
    State partial(const Part& part, int64_t head, int64_t split) const {
        const int64_t rows = part.num_rows(g);
        const int64_t row = head * work.partial_rows + part.partial + (split - part.split_begin) * rows;
        float* p = partials + row * partial_floats();
        return {p, p + rows, p + 2 * rows};
    }

    void load_queries(const Buffers<T>& w, const Part& part, int64_t head, int64_t row) const {
        const int64_t group = g.group();
        for (int64_t t = part.q_begin; t < part.q_end; t++)
            for (int64_t j = 0; j < group; j++, row++) {
                const Row* from = q + (work.cu_q[part.b] + t) * q_token_stride + (head * group + j) * q_head_stride;
                typename T::Op* to = w.q + row * w.q_stride;
                if constexpr (T::SCALED) {
                    alignas(64) float numbers[MAX_INT8_HEAD];
                    mix<A>(g, from, 1.f / g.mixed(), numbers);
                    Largest largest;
                    for (int64_t d = 0; d < g.head_dim; d += VL) largest.put(loadf(numbers + d));
                    const float top = largest.get(), inverse = steps_per_unit(top, g.query_limit());
                    for (int64_t d = 0; d < g.head_dim; d += VL)
                        store_whole(to + d, loadf(numbers + d) * inverse);
                    w.q_steps[row] = top / g.query_limit();
                } else if constexpr (T::OPS * sizeof(typename T::Op) == T::PAIR * sizeof(Elem)) {  // an operand is the element itself
                    if (g.head_dim % T::PAIR) memset(to + w.q_stride - 1, 0, sizeof *to);
                    memcpy(to, from, g.head_dim * sizeof(Elem));
                } else {
                    if (g.head_dim % T::PAIR) memset(to + w.q_stride - T::OPS, 0, T::OPS * sizeof *to);
                    for (int64_t d = 0; d < g.head_dim; d++) T::put_op(to, (int)d, from[d]);
                }
            }
    }

    // The tiles of an item as they lie in the cache, head after head.
    struct Upcoming {
        const int32_t* table;
        int64_t begin, end, head_end;  // tokens, heads
        int64_t head, t;               // of the next one to find
    };

    // Finds the next tile of an item, past the last one that one again. False if its block does not exist.
    bool find_next(Upcoming& next, Tiles<T>& tiles, int64_t place) const {
        if (next.head >= next.head_end) {
            tiles.keys[place] = tiles.keys[place - 1], tiles.values[place] = tiles.values[place - 1];
            return true;
        }
        const uint32_t S = (uint32_t)g.block_size, token = (uint32_t)next.t;
        const int64_t block = next.table[token / S];
        if (block < 0 || block >= g.num_blocks) return false;
        const int64_t offset = block * g.block_stride + (next.head * S + token % S) * (g.head_dim + SCALE<T>);
        tiles.keys[place] = k + offset;
        tiles.values[place] = v + offset;
        if ((next.t += VL) >= next.end) next.t = next.begin, next.head++;
        return true;
    }

    // Goes on to the next `count` tiles, and finds as many that are read later.
    bool take_tiles(int64_t count, Upcoming& next, Tiles<T>& tiles) const {
        for (auto* places : {tiles.keys, tiles.values}) memmove(places, places + tiles.count, AHEAD * sizeof *places);
        tiles.count = count;
        for (int64_t place = AHEAD; place < AHEAD + count; place++)
            if (!find_next(next, tiles, place)) return false;
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
        const int32_t* table = work.table + part.b * work.table_stride;
        for (tiles.count = 0; t < end; t += VL, tiles.count++)
            if (!pack(w, part, table, head, t, tiles)) return false;
        for (auto* places : {tiles.keys, tiles.values}) std::fill_n(places + tiles.count, AHEAD, places[0]);  // nothing to fetch
        return true;
    }

    // V of PAIR tokens side by side; null: a token's numbers are 0.
    static void pack_values(const Elem* const* rows, int64_t size, Elem* to, int64_t width) {
        constexpr int P = T::PAIR;
        if (!std::all_of(rows, rows + P, [](const Elem* row) { return row; })) {
            memset(to, 0, width * P * sizeof(Elem));
            for (int j = 0; j < P; j++)
                for (int64_t d = 0; rows[j] && d < size; d++) to[d * P + j] = rows[j][d];
            return;
        }
        for (int64_t d = 0; d < size; d++)
            for (int j = 0; j < P; j++) to[d * P + j] = rows[j][d];
        memset(to + size * P, 0, (width - size) * P * sizeof(Elem));
    }

    bool pack(const Buffers<T>& w, const Part& part, const int32_t* table, int64_t head, int64_t t, Tiles<T>& tiles) const {
        const int64_t n = tiles.count, first = std::max<int64_t>(0, work.first_seen(part) - t);
        const int64_t valid = std::min<int64_t>(VL, work.num_tokens[part.b] - t);
        const int64_t S = g.block_size, D = g.head_dim, width = g.width();
        const int64_t steps = (D + T::PAIR - 1) / T::PAIR;
        const int64_t key_elements = HEADER<T> + VL * steps * T::PAIR, value_elements = HEADER<T> + VL * width;
        Elem *key = w.key_pack + n * key_elements, *value = w.value_pack + n * value_elements;
        const Elem* v_cache = g.value_dim ? k : v;
        const Elem* rows[VL] = {};  // of V
        memset(key, 0, key_elements * sizeof(Elem));
        for (int64_t i = first; i < valid; i++) {
            int64_t block = table[(t + i) / S], s = (t + i) % S;
            if (block < 0 || block >= g.num_blocks) return false;
            const int64_t plain = block * g.block_stride + head * S * (D + SCALE<T>), offset = plain + S * SCALE<T> + s * D;
            memcpy(key + i * SCALE<T>, k + plain + s * SCALE<T>, SCALE<T>);
            memcpy(value + i * SCALE<T>, v_cache + plain + s * SCALE<T>, SCALE<T>);
            for (int64_t d = 0; d < D / T::PAIR; d++)
                memcpy(key + HEADER<T> + (d * VL + i) * T::PAIR, k + offset + d * T::PAIR, T::PAIR * sizeof(Elem));
            for (int64_t d = D / T::PAIR * T::PAIR; d < D; d++)
                key[HEADER<T> + (d / T::PAIR * VL + i) * T::PAIR + d % T::PAIR] = k[offset + d];
            rows[i] = v_cache + offset;
        }
        for (int64_t i = 0; i < VL; i += T::PAIR) pack_values(rows + i, g.values(), value + HEADER<T> + i * width, width);
        tiles.keys[n] = key;
        tiles.values[n] = value;
        return true;
    }

    // What the rows of an item see of the split that begins with token t.
    void look(const Item& it, int64_t t, Sight* sees) const {
        for (const Part* part = &work.parts[it.first]; part < &work.parts[it.first] + it.count; part++)
            for (int64_t token = work.begin(*part) + 1 - t, r = 0; r < part->num_rows(g); r += g.group(), token++)
                for (int64_t j = 0; j < g.group(); j++) *sees++ = {work.window ? token - work.window : 0, token};
    }

    // Softmax and weighted values of one split for rows of an item.
    void attend_split(Registers<T>& registers, const Buffers<T>& w, int64_t rows, const Sight* sees, Tiles<T>& tiles,
                      const State& state) const {
        const int64_t width = g.width(), steps = (g.head_dim + T::PAIR - 1) / T::PAIR;
        const Values<T> values(w, tiles, width);
        for (int64_t r = 0; r < rows; r += PASS_ROWS<T>) {
            const Buffers<T> pass = w.from(r);
            const State of_pass = state.from(r, width);
            const int64_t count = std::min(rows - r, PASS_ROWS<T>);
            tiles.first_row = r, tiles.last_pass = r + count == rows;
            all_scores(registers, pass, count, tiles, steps);
            for (int64_t j = 0; j < count; j += SOFTMAX_ROWS)
                with_constant<SOFTMAX_ROWS>(count - j, [&](auto R) {
                    softmax_rows<T, R()>(pass, of_pass, j, sees + r + j, tiles, factor, cap);
                });
            add_values(registers, pass, count, tiles, values, width, of_pass.out);
        }
    }

    // What a row's weighted values are multiplied with: 1 / the sum of its weights, and that of its head's sink.
    float inverse_sum(const State& s, int64_t row, int64_t head) const {
        if (!sinks) return 1.f / s.sum[row];
        const float sink = sinks[head] * LOG2E, top = std::max(sink, s.max[row]), scale = exp2_of(s.max[row] - top);
        return scale / (s.sum[row] * scale + exp2_of(sink - top));
    }

    void store(const State& s, const Part& part, int64_t head) const {
        const int64_t group = g.group(), width = g.width();
        for (int64_t r = 0; r < part.num_rows(g); r++) {
            int64_t token = work.cu_q[part.b] + part.q_begin + r / group;
            const int64_t column = (head * group + r % group) * g.values();
            const float *from = s.out + r * width, inverse = inverse_sum(s, r, head * group + r % group);
            for (int64_t d = 0; d < g.values(); d += VL)
                store_some<A>(out.at(token, column + d), loadf(from + d) * inverse, g.values() - d);
        }
    }

    // Some splits of a part are in their places; the last item to say so adds all of them up.
    void finish_splits(const State& total, const Part& part, int64_t head, int32_t count) const {
        if (unfinished[head * work.num_merges + part.merge].fetch_sub(count, std::memory_order_acq_rel) > count) return;
        const int64_t rows = part.num_rows(g), width = g.width();
        copy(total, partial(part, head, part.split_begin), rows, width);
        for (int64_t s = part.split_begin + 1; s < part.split_end; s++) merge(total, partial(part, head, s), rows, width);
        store(total, part, head);
    }

    bool run(const Item& it) const {
        static thread_local Arena arena;
        Buffers<T> w(arena, g, work.max_rows);
        const Part *parts = &work.parts[it.first], &first = parts[0];
        const int64_t width = g.width();
        const bool joined = g.packed() || g.block_size % (2 * VL) == 0;
        // what is read lies in blocks of seen tokens: a tile, or two that are read at once, never crosses blocks
        const int64_t step = joined ? 2 * VL : VL;
        const int64_t begin = std::max<int64_t>(it.split_begin * KEYS, work.first_seen(first) / step * step);
        const int64_t end = std::min<int64_t>(work.end(first), it.split_end * KEYS);
        const bool keep = first.partial >= 0;  // for others to add up
        int64_t rows = 0;
        for (int32_t n = 0; n < it.count; n++) rows += parts[n].num_rows(g);
        Registers<T> registers;
        Tiles<T> tiles;
        tiles.joined = joined;
        Upcoming next{work.table + first.b * work.table_stride, begin, end, it.head_end, it.head_begin, begin};
        for (int64_t place = 0; place < AHEAD && !g.packed(); place++)
            if (!find_next(next, tiles, place)) return false;
        for (int64_t head = it.head_begin; head < it.head_end; head++) {
            for (int64_t n = 0, row = 0; n < it.count; row += parts[n++].num_rows(g)) load_queries(w, parts[n], head, row);
            for (int32_t split = it.split_begin; split < it.split_end; split++) {
                const int64_t t = std::max<int64_t>(split * KEYS, begin);
                const int64_t tokens = std::min<int64_t>((split + 1) * KEYS, end) - t;
                const bool found = g.packed() ? pack_tiles(w, first, head, t, t + tokens, tiles)
                                              : take_tiles((tokens + VL - 1) / VL, next, tiles);
                if (!found) return false;
                tiles.odd = t % (2 * VL) != 0;
                tiles.group = g.group(), tiles.first_sees = it.count > 1 ? tokens : work.begin(first) + 1 - t;
                end_values(w, std::min<int64_t>(VL, work.num_tokens[first.b] - t - (tiles.count - 1) * VL), tiles);
                const State& state = split == it.split_begin && !keep ? w.total : w.split;
                look(it, t, w.sees);
                attend_split(registers, w, rows, w.sees, tiles, state);
                for (int64_t n = 0, row = 0; keep && n < it.count; row += parts[n++].num_rows(g))
                    copy(partial(parts[n], head, split), state.from(row, width), parts[n].num_rows(g), width);
                if (!keep && split > it.split_begin) merge(w.total, w.split, rows, width);
            }
            if (!keep) store(w.total, first, head);
            for (int32_t n = 0; keep && n < it.count; n++)
                finish_splits(w.total, parts[n], head, it.split_end - it.split_begin);
        }
        return true;
    }

    int run_all() {
        static thread_local Arena arena;
        const int64_t heads = g.num_kv_heads, counters = heads * work.num_merges;
        const int64_t floats = heads * work.partial_rows * partial_floats();
        arena.reserve(floats * sizeof(float) + counters * 4 + 256);
        partials = arena.take<float>(floats);
        unfinished = arena.take<std::atomic<int32_t>>(counters);
        for (const Part& part : work.parts)
            for (int64_t h = 0; h < heads && part.partial >= 0; h++)
                unfinished[h * work.num_merges + part.merge] = part.num_splits();
        parallel_for(work.threads, (int64_t)work.items.size(), [&](int64_t i) {
            if (!run(work.items[i])) bad_block = true;
        });
        return bad_block ? 1 : 0;
    }
};

}  // namespace

int paged_attend(int dtype, const Geometry* geometry, const StepWork* work, const void* q, int64_t q_token_stride,
                 int64_t q_head_stride, const void* k_cache, const void* v_cache, void* out, float scale, float soft_cap,
                 const float* sinks, Order order) {
    return with_types(dtype, *geometry, [&](auto type, auto cache_type) {
        return with_kernel(cache_type, geometry->fits_tile_registers(), [&](auto kernel) {
            using A = decltype(type);
            using T = decltype(kernel);
            using E = typename T::Elem;
            using Row = typename A::Elem;
            Attention<A, T> attention{*geometry,  *work, (const Row*)q, (const E*)k_cache, (const E*)v_cache, q_token_stride,
                                      q_head_stride, {(Row*)out, geometry->num_heads * geometry->values(), order}, scale * LOG2E, soft_cap * LOG2E, sinks};
            return attention.run_all();
        });
    });
}

extern "C" {

int paged_attend(int dtype, const Geometry* geometry, const StepWork* work, const void* q, int64_t q_token_stride,
                 int64_t q_head_stride, const void* k_cache, const void* v_cache, void* out, float scale, float soft_cap,
                 const float* sinks) {
    return paged_attend(dtype, geometry, work, q, q_token_stride, q_head_stride, k_cache, v_cache, out, scale, soft_cap, sinks,
                        BY_ROWS);
}
}
