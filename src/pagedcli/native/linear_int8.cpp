// Linear layers on int8 weights, and on 4-bit weights that are widened to int8 (packed_int4.h): a scale per output feature,
// activations rounded to 8 bits with a scale per token.
//
// int8 is packed as in linear.h with groups of four: [K / 4][PANEL][4]. Where the instruction multiplies unsigned by signed bytes,
// activations are stored with 128 added, and 128 times the sum of a feature's weights is taken off at the end.

#include "arena.h"
#include "epilogue.h"
#include "int8_dot.h"
#include "linear.h"
#include "linear_tiles.h"
#include "packed_int4.h"
#include "paths.h"

#include <numeric>
#include <type_traits>

namespace {

// Four columns of a panel of int8.
struct Int8Columns {
    static constexpr int STEPS = 1;
    static constexpr int64_t BYTES = PANEL * GROUP, AHEAD = 4 << 10;
    const uint8_t* from;
    explicit Int8Columns(const uint8_t* from) : from(from) {}
    vi four(int, int v) const { return load_any<vi>(from + v * VL * GROUP); }
};

// How far ahead of what is read a panel is fetched from memory; 0 fetches what is being read, so nothing. More rows leave time to
// fetch more, for which the L1 cache has no room if it is int8.
template <class Columns, int R> int64_t bytes_ahead() { return R > 3 ? 8 << 10 : fetches_alone() ? 0 : Columns::AHEAD; }
template <class Columns, int R> constexpr int LOCALITY = R > 3 && std::is_same_v<Columns, Int8Columns> ? 2 : 3;

// sums[R][PANEL] = x[R][k] . panel, which consists of Columns. With PREFETCH, what is needed next is fetched, some bytes at
// each step; without, the panel is read from memory, and fetched some way ahead.
template <class Columns, int R, bool PREFETCH>
inline void multiply(const uint8_t* x, int64_t stride, const uint8_t* panel, const char* next, int64_t next_bytes, int32_t* sums) {
    const int64_t ahead = bytes_ahead<Columns, R>();
    vi acc[R][PANEL_VECTORS] = {};
    for (const uint8_t* end = x + stride; x < end; panel += Columns::BYTES) {
        const Columns columns(panel);
        for (int64_t i = 0; !PREFETCH && i < Columns::BYTES; i += 64)
            __builtin_prefetch(panel + ahead + i, 0, LOCALITY<Columns, R>);
#pragma GCC unroll 8
        for (int i = 0; i < Columns::STEPS; i++, x += GROUP) {
            vi w[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++) w[v] = columns.four(i, v);
            if (PREFETCH) __builtin_prefetch(next, 0, 2), next += next_bytes;
            for (int r = 0; r < R; r++)
                for (int v = 0; v < PANEL_VECTORS; v++) madd_int8(acc[r][v], x + r * stride, w[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) store_any(sums + r * PANEL + v * VL, acc[r][v]);
}

// Of 4-bit weights times at most so many tokens a group's codes are summed before its step multiplies them, once for 32 weights:
// the same whole numbers by 0.7 times the instructions. More tokens share widened weights. Where a product of signed bytes takes
// several instructions, as sums of codes do not, so do any number of tokens.
#if !defined(HAS_UNSIGNED_DOT) && defined(HAS_PAIR_SUMS)
constexpr int64_t FEW_ROWS = INT64_MAX;
#else
constexpr int64_t FEW_ROWS = 2;
#endif

// Activations of all tokens as bytes, with OFFSET added unless there are sums of groups.
struct Rounded {
    const uint8_t* bytes;
    int64_t stride;
    const float* steps;         // what 1 is worth, of each token
    const int32_t* group_sums;  // [tokens][groups]: of the bytes of 32 columns; null: of many tokens, or of int8 weights
};

// sums[R][PANEL] of x as multiply() gives them with OFFSET.
template <int R>
void multiply_codes(const Rounded& x, int64_t row, const uint8_t* panel, const int32_t* weight_sums, int32_t* sums) {
    const int64_t groups = x.stride / BLOCK_COLUMNS, ahead = bytes_ahead<Int4Group, R>();
    const int8_t* from = (const int8_t*)x.bytes + row * x.stride;
    const int32_t* of_group = x.group_sums + row * groups;
    vi acc[R][PANEL_VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = OFFSET * load_any<vi>(weight_sums + v * VL);
    for (int64_t g = 0; g < groups; g++, panel += Int4Group::BYTES, from += BLOCK_COLUMNS) {
        for (int64_t i = 0; i < Int4Group::BYTES; i += 64) __builtin_prefetch(panel + ahead + i);
        NibbleSum codes[R][PANEL_VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < Int4Group::STEPS; i++)
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vi w = Nibbles::four(panel + 2 * PANEL, i, v);
                for (int r = 0; r < R; r++) codes[r][v].add(from + r * x.stride + i * GROUP, w);
            }
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const vi step = load_bytes(panel + v * VL), zero = load_bytes(panel + PANEL + v * VL);
            for (int r = 0; r < R; r++) {
                codes[r][v].end_block();
                acc[r][v] += codes[r][v].get() * step - of_group[r * groups + g] * zero;
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) store_any(sums + r * PANEL + v * VL, acc[r][v]);
}

// The PANEL sums of a token and panel as they follow from whole numbers.
template <class T>
inline void put_whole(const Linear& l, const Output<T>& output, float step_of, int64_t token, int64_t panel, const int32_t* sums) {
    float y[PANEL];
    for (int64_t v = 0, at = panel * PANEL; v < PANEL; v += VL, at += VL) {
        vi exact = load_any<vi>(sums + v) - OFFSET * load_any<vi>(l.sums + at);
        storef(y + v, __builtin_convertvector(exact, vf) * (loadf(l.scales + at) * step_of));
    }
    output.put(token, panel, y);
}

template <class T>
void run_piece(const Linear& l, const Rounded& x, int64_t begin, int64_t end, int64_t first, int64_t last,
               typename T::Elem* out, Epilogue epilogue) {
    const int64_t stride = x.stride;
    const int64_t tokens = end - begin, passes = (tokens + MAX_ROWS - 1) / MAX_ROWS, panels = padded_rows(l) / PANEL;
    const int64_t panel_bytes = packed_panel_bytes(l), next_bytes = panel_bytes / (stride / GROUP) / 2;
    const Output<T> output(l, out, epilogue);
    alignas(64) int32_t sums[MAX_ROWS * PANEL];
    static thread_local std::vector<char> room;
    const bool widens = l.kind == INT4 && !x.group_sums && passes > 1;
    uint8_t* widened = widens ? (uint8_t*)lines_of(room, stride * PANEL) : nullptr;
    for (int64_t p = first; p < last; p++) {
        const uint8_t *packed = (const uint8_t*)l.weight + p * panel_bytes, *panel = widens ? widened : packed;
        for (int64_t i = 0; i < PANEL; i += 16)  // for put_whole: nothing else reads them, so they come from memory
            __builtin_prefetch(l.scales + p * PANEL + i), __builtin_prefetch(l.sums + p * PANEL + i);
        if (widens) widen_int4(packed, stride / BLOCK_COLUMNS, widened);
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t row = begin + tokens * pass / passes, rows = begin + tokens * (pass + 1) / passes - row;
            const bool fetch = pass < 2 && p + 1 < panels;  // the next panel, half in each pass
            const char* next = (const char*)packed + (fetch ? panel_bytes + pass * panel_bytes / 2 : 0);
            const uint8_t* from = x.bytes + row * stride;
            with_rows<MAX_ROWS>(rows, [&](auto R) {
                if constexpr (R() <= FEW_ROWS)
                    if (x.group_sums) return multiply_codes<R()>(x, row, packed, l.sums + p * PANEL, sums);
                if (passes > 1)
                    multiply<Int8Columns, R(), true>(from, stride, panel, next, next_bytes, sums);
                else if (l.kind == INT8)
                    multiply<Int8Columns, R(), false>(from, stride, panel, next, 0, sums);
                else
                    multiply<Int4Group, R(), false>(from, stride, panel, next, 0, sums);
            });
            for (int64_t r = 0; r < rows; r++) put_whole(l, output, x.steps[row + r], row + r, p, sums + r * PANEL);
        }
    }
}

// A feature's weights into its lane of a panel.
inline void put_feature(const std::vector<int8_t>& q, int64_t lane, int8_t* panel) {
    for (size_t k = 0; k < q.size(); k += GROUP) memcpy(panel + k * PANEL + lane * GROUP, q.data() + k, GROUP);
}

#if defined(HAS_TILES)
struct Int4Tiles {
    static constexpr bool WIDENS = true;
    static constexpr int64_t GROUPS = TILE_BYTES / BLOCK_COLUMNS;  // of a step
    static constexpr int64_t BYTES = GROUPS * Int4Group::BYTES;
    const void* weight;
    int64_t row_bytes;
    const char* at(int64_t panel, int64_t step) const {
        return (const char*)weight + (panel * (row_bytes / TILE_BYTES) + step) * BYTES;
    }
    const char* part(int64_t panel, int64_t first, int64_t end, char* widened) const {
        widen_int4((const uint8_t*)at(panel, first), (end - first) * GROUPS, (uint8_t*)widened);
        return widened;
    }
};
#endif

}  // namespace

void linear_forward_int8(const Linear& l, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                         int threads, Order x_order, Order out_order) {
    const int64_t stride = padded_columns(l);
    static thread_local std::vector<char> bytes;
    static thread_local std::vector<float> worth;
    static thread_local std::vector<int32_t> groups;
#if defined(HAS_TILES)
    const bool tiles = fills_int8_tiles(l) && (l.kind == INT8 || num_tokens > FEW_TOKENS);
    const Order order = tiles && wants_tiles(num_tokens) ? BY_TILES : BY_ROWS;
#else
    constexpr bool tiles = false;
    constexpr Order order = BY_ROWS;
#endif
    const Matrix<uint8_t> quantized{(uint8_t*)lines_of(bytes, Matrix<uint8_t>::size(num_tokens, stride)), stride, order};
    worth.resize(num_tokens);
    float* steps_of = worth.data();
    const bool sums_codes = l.kind == INT4 && num_tokens <= FEW_ROWS && !tiles;
    const int offset = sums_codes ? 0 : OFFSET;
    groups.resize(sums_codes ? num_tokens * stride / BLOCK_COLUMNS : 0);
    int32_t* group_sums = groups.data();  // this thread's, for all
    const int64_t panels = padded_rows(l) / PANEL;
    const double ns_per_row = 2.0 * PANEL * l.columns / (VL * 2 * 2 * 4.0) / GROUP;
    [[maybe_unused]] const int most_threads = threads;
    Cut cut(num_tokens, panels, packed_panel_bytes(l), stride, ns_per_row, threads);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        const Matrix<const E> from{(const E*)x, l.columns, x_order};
        for_rows(num_tokens > 16 ? threads : 1, num_tokens, order == BY_TILES ? Matrix<E>::ROWS : 1, [&](int64_t t) {
            for (int64_t k = l.columns; k < stride; k++) *quantized.at(t, k) = offset;
            steps_of[t] = quantize_row<T>([&](int64_t k) { return from.at(t, k); }, l.columns, offset,
                                          [&](int64_t k) { return quantized.at(t, k); });
            for (int64_t k = 0; sums_codes && k < stride; k += BLOCK_COLUMNS) {
                const int8_t* group = (const int8_t*)quantized.at(t, k);
                group_sums[(t * stride + k) / BLOCK_COLUMNS] = std::accumulate(group, group + BLOCK_COLUMNS, 0);
            }
        });
#if defined(HAS_TILES)
        if (tiles) {
            const Output<T> output(l, (E*)out, epilogue, out_order);
            const TileRows rows{{(const char*)quantized.base, stride, order}};
            const auto finish = [&](int64_t t, int64_t p, const char* sums) {
                put_whole(l, output, steps_of[t], t, p, (const int32_t*)sums);
            };
            const auto multiply_by = [&](const auto& weight) {
                forward_tiles<TileProductInt8>(rows, weight, panels, num_tokens, most_threads, finish);
            };
            return l.kind == INT4 ? multiply_by(Int4Tiles{l.weight, stride}) : multiply_by(PackedTiles{l.weight, stride});
        }
#endif
        const Rounded rounded{quantized.base, stride, steps_of, sums_codes ? group_sums : nullptr};
        cut.run(threads, num_tokens, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
            run_piece<T>(l, rounded, begin, end, first, last, (E*)out, epilogue);
        });
    });
}

extern "C" {

// weight [rows][columns] of dtype -> packed bytes, scales and sums of the padded rows, symmetric around zero.
void linear_pack_int8(const Linear* linear, int64_t dtype, const void* weight, int8_t* packed, float* scales, int32_t* sums,
                      int threads) {
    const Linear& l = *linear;
    const int64_t stride = (l.columns + GROUP - 1) / GROUP * GROUP;
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        for_panels(threads, padded_rows(l) / PANEL, PANEL * stride, [&](int64_t p) {
            int8_t* to = packed + p * PANEL * stride;
            std::vector<int8_t> q(stride);
            for (int64_t i = 0; i < PANEL; i++) {
                const int64_t row = source_row(l, p * PANEL + i), columns = row < 0 ? 0 : l.columns;
                const E* from = (const E*)weight + row * l.columns;
                const float top = largest_of<T>(from, columns), inverse = top > 0 ? 127 / top : 0;
                int32_t sum = 0;
                std::fill(q.begin(), q.end(), 0);
                for (int64_t k = 0; k < columns; k++) sum += q[k] = (int8_t)std::nearbyint(Rows<T>::load_one(from + k) * inverse);
                put_feature(q, i, to);
                scales[p * PANEL + i] = top / 127;
                sums[p * PANEL + i] = sum;
            }
        });
    });
}

// The same from codes [rows][columns] and the scales of the rows.
void linear_pack_int8_codes(const Linear* linear, const int8_t* codes, const float* row_scales, int8_t* packed, float* scales,
                            int32_t* sums, int threads) {
    const Linear& l = *linear;
    const int64_t stride = (l.columns + GROUP - 1) / GROUP * GROUP;
    for_panels(threads, padded_rows(l) / PANEL, PANEL * stride, [&](int64_t p) {
        int8_t* to = packed + p * PANEL * stride;
        std::vector<int8_t> q(stride);
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t row = source_row(l, p * PANEL + i), columns = row < 0 ? 0 : l.columns;
            std::fill(std::copy_n(codes + row * l.columns, columns, q.begin()), q.end(), 0);
            int32_t sum = 0;
            for (int64_t k = 0; k < columns; k++) sum += q[k];
            put_feature(q, i, to);
            scales[p * PANEL + i] = row < 0 ? 0 : row_scales[row];
            sums[p * PANEL + i] = sum;
        }
    });
}
}
