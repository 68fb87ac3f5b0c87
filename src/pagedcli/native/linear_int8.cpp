// Linear layers on int8 weights: a scale per output feature, activations rounded to 8 bits with a scale per token.
//
// Packed as in linear.h with groups of four: [K / 4][PANEL][4]. Where the instruction multiplies unsigned by signed bytes,
// activations are stored with 128 added, and 128 times the sum of a feature's weights is taken off at the end.

#include "epilogue.h"
#include "int8_dot.h"
#include "linear.h"
#include "linear_tiles.h"
#include "paths.h"

#include <type_traits>

namespace {

template <int R, bool PREFETCH>
inline void multiply(const uint8_t* x, int64_t stride, const int8_t* panel, int64_t steps, const char* next,
                     int32_t* sums) {
    vi acc[R][PANEL_VECTORS] = {};
    for (int64_t i = 0; i < steps; i++) {
        vi w[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++) w[v] = load_any<vi>(panel + (i * PANEL_VECTORS + v) * VL * GROUP);
        if (PREFETCH) __builtin_prefetch(next + i * 64, 0, 2);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < PANEL_VECTORS; v++) madd_int8(acc[r][v], x + r * stride + i * GROUP, w[v]);
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
void run_piece(const Linear& l, const uint8_t* x, const float* steps_of, int64_t stride, int64_t begin, int64_t end,
               int64_t first, int64_t last, typename T::Elem* out, Epilogue epilogue) {
    const int64_t steps = stride / GROUP, panel_bytes = stride * PANEL, tokens = end - begin, passes = num_passes(tokens);
    const int64_t panels = padded_rows(l) / PANEL;
    const Output<T> output(l, out, epilogue);
    alignas(64) int32_t sums[MAX_ROWS * PANEL];
    for (int64_t p = first; p < last; p++) {
        const int8_t* panel = (const int8_t*)l.weight + p * panel_bytes;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t row = begin + tokens * pass / passes, rows = begin + tokens * (pass + 1) / passes - row;
            const bool fetch = pass < 2 && p + 1 < panels;
            const char* next = (const char*)panel + (fetch ? panel_bytes + pass * steps * 64 : 0);
            with_rows<MAX_ROWS>(rows, [&](auto R) {
                if (passes > 1)
                    multiply<R(), true>(x + row * stride, stride, panel, steps, next, sums);
                else
                    multiply<R(), false>(x + row * stride, stride, panel, steps, next, sums);
            });
            for (int64_t r = 0; r < rows; r++) put_whole(l, output, steps_of[row + r], row + r, p, sums + r * PANEL);
        }
    }
}

}  // namespace

void linear_forward_int8(const Linear& l, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                         int threads) {
    const int64_t stride = (l.columns + GROUP - 1) / GROUP * GROUP;
    static thread_local std::vector<uint8_t> bytes;
    static thread_local std::vector<float> worth;
    bytes.resize(num_tokens * stride);
    worth.resize(num_tokens);
    uint8_t* quantized = bytes.data();
    float* steps_of = worth.data();
    const int64_t panels = padded_rows(l) / PANEL;
    const double ns_per_row = 2.0 * PANEL * l.columns / (VL * 2 * 2 * 4.0) / GROUP;
    [[maybe_unused]] const int most_threads = threads;
    Cut cut(num_tokens, panels, stride * PANEL, stride, ns_per_row, threads);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        parallel_for(num_tokens > 16 ? threads : 1, num_tokens, [&](int64_t t) {
            steps_of[t] = quantize_row<T>((const E*)x + t * l.columns, l.columns, OFFSET, quantized + t * stride);
        });
#if defined(HAS_TILES)
        if (int8_path() == INT8_TILES && stride % TILE_BYTES == 0) {
            const Output<T> output(l, (E*)out, epilogue);
            return forward_tiles<TileProductInt8>(
                quantized, stride, l.weight, panels, num_tokens, most_threads, [&](int64_t t, int64_t p, const char* sums) {
                    put_whole(l, output, steps_of[t], t, p, (const int32_t*)sums);
                });
        }
#endif
        cut.run(threads, num_tokens, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
            run_piece<T>(l, quantized, steps_of, stride, begin, end, first, last, (E*)out, epilogue);
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
            memset(to, 0, PANEL * stride);
            for (int64_t i = 0; i < PANEL; i++) {
                const int64_t row = source_row(l, p * PANEL + i);
                float top = 0;
                const E* from = (const E*)weight + row * l.columns;
                for (int64_t k = 0; row >= 0 && k < l.columns; k++) top = std::max(top, std::fabs(Rows<T>::load_one(from + k)));
                const float inverse = top > 0 ? 127 / top : 0;
                int32_t sum = 0;
                for (int64_t k = 0; row >= 0 && k < l.columns; k++) {
                    const int8_t q = (int8_t)std::nearbyint(Rows<T>::load_one(from + k) * inverse);
                    to[(k / GROUP * PANEL + i) * GROUP + k % GROUP] = q;
                    sum += q;
                }
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
        memset(to, 0, PANEL * stride);
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t row = source_row(l, p * PANEL + i);
            int32_t sum = 0;
            for (int64_t k = 0; row >= 0 && k < l.columns; k++) {
                const int8_t code = codes[row * l.columns + k];
                to[(k / GROUP * PANEL + i) * GROUP + k % GROUP] = code;
                sum += code;
            }
            scales[p * PANEL + i] = row < 0 ? 0 : row_scales[row];
            sums[p * PANEL + i] = sum;
        }
    });
}
}
