// Packing, and the matrix kernels of linear.h for float32, bfloat16 and float16 weights. 8 and 4 bits: linear_groups.cpp.

#include "linear.h"

#include <cstdlib>
#include <type_traits>

#include "epilogue.h"
#include "linear_tiles.h"
#include "paths.h"
#include "rows.h"

namespace {

// sums[R][PANEL] = x[R][k] . panel. With PREFETCH, a line of what is needed next is asked for at each step.
template <class T, int R, bool PREFETCH>
inline void multiply(const typename T::Op* x, int64_t x_stride, const typename T::Elem* panel, int64_t steps,
                     const char* next, float* sums) {
    vf acc[R][PANEL_VECTORS] = {};
    for (int64_t i = 0; i < steps; i++) {
        typename T::Block b[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++) b[v] = T::load(panel + (i * PANEL_VECTORS + v) * VL * T::PAIR);
        if (PREFETCH) __builtin_prefetch(next + i * 64, 0, 2);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < PANEL_VECTORS; v++) T::madd(acc[r][v], x + r * x_stride + i * T::OPS, b[v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) storef(sums + r * PANEL + v * VL, acc[r][v]);
}

// Tokens [begin, end) times panels [first, last). A: activations; T: how they and the weight are multiplied.
template <class A, class T>
void run_piece(const Linear& l, const typename T::Op* x, int64_t x_stride, int64_t begin, int64_t end, int64_t first,
               int64_t last, typename A::Elem* out, Epilogue epilogue) {
    using Elem = typename T::Elem;
    const int64_t steps = l.columns / T::PAIR, panel_elements = l.columns * PANEL, tokens = end - begin;
    const int64_t passes = num_passes(tokens);
    const int64_t panels = padded_rows(l) / PANEL;
    const Output<A> output(l, out, epilogue);
    alignas(64) float sums[MAX_ROWS * PANEL];
    for (int64_t p = first; p < last; p++) {
        const Elem* panel = (const Elem*)l.weight + p * panel_elements;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t row = begin + tokens * pass / passes, rows = begin + tokens * (pass + 1) / passes - row;
            // the first two passes over a panel fetch the next one, half each: more at once would stall them
            const bool fetch = pass < 2 && p + 1 < panels;
            const char* next = (const char*)panel + (fetch ? panel_elements * sizeof(Elem) + pass * steps * 64 : 0);
            with_rows<MAX_ROWS>(rows, [&](auto R) {
                if (passes > 1)
                    multiply<T, R(), true>(x + row * x_stride, x_stride, panel, steps, next, sums);
                else
                    multiply<T, R(), false>(x + row * x_stride, x_stride, panel, steps, next, sums);
            });
            output.put(row, rows, p, sums);
        }
    }
}

// Whether x can be multiplied as it lies in memory, or has to be widened to float first.
template <class T> constexpr bool DIRECT = sizeof(typename T::Op) * T::OPS == sizeof(typename T::Elem) * T::PAIR;

template <class A, class T>
void forward(const Linear& l, const typename A::Elem* x, int64_t num_tokens, typename A::Elem* out, Epilogue epilogue,
             int threads) {
    using Op = typename T::Op;
    const int64_t x_stride = l.columns / T::PAIR * T::OPS;
    const int64_t panels = padded_rows(l) / PANEL;
    const Op* ops = (const Op*)x;
    static thread_local std::vector<Op> widened;
    const double ns_per_row = 2.0 * PANEL * l.columns / (VL * 2 * 2 * 4.0) / (DIRECT<T> ? T::PAIR : 1);
    Cut cut(num_tokens, panels, l.columns * PANEL * sizeof(typename T::Elem), x_stride * sizeof(Op), ns_per_row, threads);
    if constexpr (!DIRECT<T>) {
        widened.resize(num_tokens * x_stride);
        Op* to = widened.data();
        parallel_for(num_tokens > 16 ? threads : 1, num_tokens, [&](int64_t t) {
            for (int64_t k = 0; k < l.columns; k++) T::put_op(to + t * x_stride, (int)k, x[t * l.columns + k]);
        });
        ops = to;
    }
    cut.run(threads, num_tokens, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
        run_piece<A, T>(l, ops, x_stride, begin, end, first, last, out, epilogue);
    });
}

template <class T> void pack(const Linear& l, const typename T::Elem* weight, typename T::Elem* packed, int threads) {
    for_panels(threads, padded_rows(l) / PANEL, PANEL * l.columns * sizeof *packed, [&](int64_t p) {
        constexpr int64_t STEPS = 16;  // of a row at a time: what is written stays in the L1 cache
        const int64_t steps = l.columns / T::PAIR;
        typename T::Elem* to = packed + p * PANEL * l.columns;
        for (int64_t begin = 0; begin < steps; begin += STEPS)
            for (int64_t i = 0; i < PANEL; i++) {
                const int64_t row = source_row(l, p * PANEL + i);
                for (int64_t k = begin; k < std::min(steps, begin + STEPS); k++) {
                    typename T::Elem* place = to + (k * PANEL + i) * T::PAIR;
                    if (row < 0)
                        memset(place, 0, T::PAIR * sizeof *place);
                    else
                        memcpy(place, weight + row * l.columns + k * T::PAIR, T::PAIR * sizeof *place);
                }
            }
    });
}

}  // namespace

bool reads_tiles(const Linear& l, int64_t dtype, int64_t num_tokens) {
#if defined(HAS_TILES)
    constexpr int64_t COLUMNS = Matrix<BF16::Elem>::COLUMNS;
    if (dtype != BFLOAT16 || l.kind != BFLOAT16 || l.columns % COLUMNS || !wants_tiles(num_tokens)) return false;
    return bf16_path() == BF16_TILES && (!l.next || reads_tiles(*l.next, dtype, num_tokens));
#else
    return false;
#endif
}

bool writes_tiles(const Linear& l, int64_t dtype, int64_t num_tokens) {
    const int64_t width = l.gated ? l.rows / 2 : l.rows;
    return !l.next && !l.out_stride && width % Matrix<BF16::Elem>::COLUMNS == 0 && reads_tiles(l, dtype, num_tokens);
}

void linear_forward(const Linear& l, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                    int threads, Order x_order, Order out_order) {
    if (l.next) {
        const int64_t element = dtype == FLOAT32 || epilogue == STORE_FLOAT ? 4 : 2;
        linear_forward(*l.next, dtype, x, num_tokens, (char*)out + l.rows * element, epilogue, threads, x_order);
    }
    if (l.kind >= INT8) return linear_forward_groups(l, dtype, x, num_tokens, out, epilogue, threads);
    with_activations(dtype, [&](auto type) {
        using A = decltype(type);
        using E = typename A::Elem;
        with_kernel(type, l.columns % 32 == 0, [&](auto kernel) {
            using T = decltype(kernel);
#if defined(HAS_TILES)
            if constexpr (std::is_same_v<T, BF16Tiles>) {
                static thread_local std::vector<char> room;
                const int64_t bytes = l.columns * 2;
                const Output<A> output(l, (E*)out, epilogue, out_order);
                const TileRows rows =
                    x_order == BY_TILES ? TileRows{{(const char*)x, bytes, BY_TILES}} : to_tiles(x, num_tokens, bytes, room, threads);
                return forward_tiles<TileProductBF16>(
                    rows, PackedTiles{l.weight, bytes}, padded_rows(l) / PANEL, num_tokens, threads,
                    [&](int64_t t, int64_t p, const char* sums) { output.put(t, 1, p, (const float*)sums); });
            } else
#endif
                forward<A, T>(l, (const E*)x, num_tokens, (E*)out, epilogue, threads);
        });
    });
}

extern "C" {

// Output features with those that fill the last panel.
int64_t linear_padded_rows(const Linear* linear) { return padded_rows(*linear); }
int64_t linear_num_panels(const Linear* linear) { return num_panels(*linear); }

// weight [rows][columns] -> packed [padded rows * columns], both of linear->kind. columns must be even.
void linear_pack(const Linear* linear, const void* weight, void* packed, int threads) {
    with_activations(linear->kind, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        pack<T>(*linear, (const E*)weight, (E*)packed, threads);
    });
}

void linear_run(const Linear* linear, int64_t dtype, const void* x, int64_t num_tokens, void* out, int epilogue, int threads) {
    linear_forward(*linear, dtype, x, num_tokens, out, (Epilogue)epilogue, threads);
}

// Rows of a packed weight as they were: the embedding of a model that shares it with its output layer.
// 0, or 1 if a row does not exist; then nothing is read.
int linear_unpack_rows(const Linear* linear, const int64_t* rows, int64_t num_rows, void* out, int threads) {
    for (int64_t r = 0; r < num_rows; r++)
        if (rows[r] < 0 || rows[r] >= linear->rows) return 1;
    with_activations(linear->kind, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        const int64_t columns = linear->columns;
        parallel_for(num_rows > 8 ? threads : 1, num_rows, [&](int64_t r) {
            const E* from = (const E*)linear->weight + rows[r] / PANEL * PANEL * columns + rows[r] % PANEL * T::PAIR;
            E* to = (E*)out + r * columns;
            for (int64_t k = 0; k < columns; k += T::PAIR) memcpy(to + k, from + k * PANEL, T::PAIR * sizeof(E));
        });
    });
    return 0;
}
}
