// Linear layers on 4-bit weights: in groups of 32 along the input, w = scale * q - min with q from 0 to 15, both scale and
// min 8-bit multiples of a float per output feature. Activations are rounded to 8 bits with a scale per token.
//
// Packed as panels of PANEL features, in each for every group: PANEL scales, PANEL mins (a byte each), then
// [4][PANEL][4] bytes; the low half of byte i in row j is k = 8 j + i, the high half k = 8 j + 4 + i. The sum of a group is
// exact; groups are added in ascending order, so a row never depends on the others.

#include "epilogue.h"
#include "int8_dot.h"
#include "linear.h"

namespace {

constexpr int64_t GROUP_COLUMNS = 32, GROUP_BYTES = PANEL * (2 + GROUP_COLUMNS / 2);
#if defined(USE_AVX512)
constexpr int ROWS_AT_ONCE = 5;
#elif defined(USE_AVX2)
constexpr int ROWS_AT_ONCE = 2;
#else
constexpr int ROWS_AT_ONCE = 4;
#endif

int64_t num_groups(const Linear& l) { return (l.columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS; }

// Activations of all tokens: bytes, the sums of their groups, and what a step of a token is worth.
struct Activations {
    const int8_t* bytes;
    const float *sums, *steps;
    int64_t groups;
};

// Groups of a panel as they are packed. ratio: of a step of the mins to a step of the scales.
struct Packed {
    static constexpr int64_t BYTES = GROUP_BYTES;
    const float* ratio;
    static vi low_half(const uint8_t* group, int j, int v) { return byte_rows(group, j, v) & (vi{} + 0x0f0f0f0f); }
    static vi high_half(const uint8_t* group, int j, int v) { return (vi)((vu)byte_rows(group, j, v) >> 4) & (vi{} + 0x0f0f0f0f); }
    static vf scale(const uint8_t* group, int v) { return widened(group + v * VL); }
    vf min(const uint8_t* group, int v) const { return widened(group + PANEL + v * VL) * loadf(ratio + v * VL); }

private:
    static vi byte_rows(const uint8_t* group, int j, int v) {
        return load_any<vi>(group + 2 * PANEL + (j * PANEL_VECTORS + v) * VL * GROUP);
    }
    static vf widened(const uint8_t* bytes) { return __builtin_convertvector(load_bytes(bytes), vf); }
};

// The same with a byte per weight and floats for scales and mins: what more rows than registers hold read many times.
struct Unpacked {
    static constexpr int64_t BYTES = PANEL * (8 + GROUP_COLUMNS);
    static vi low_half(const uint8_t* group, int j, int v) { return load_any<vi>(group + place(2 * j, v)); }
    static vi high_half(const uint8_t* group, int j, int v) { return load_any<vi>(group + place(2 * j + 1, v)); }
    static vf scale(const uint8_t* group, int v) { return load_any<vf>(group + v * VL * 4); }
    static vf min(const uint8_t* group, int v) { return load_any<vf>(group + (PANEL + v * VL) * 4); }

    static void unpack(const Packed& packed, const uint8_t* from, uint8_t* to) {
        for (int v = 0; v < PANEL_VECTORS; v++) {
            store_any(to + v * VL * 4, packed.scale(from, v));
            store_any(to + (PANEL + v * VL) * 4, packed.min(from, v));
            for (int j = 0; j < 4; j++) {
                store_any(to + place(2 * j, v), packed.low_half(from, j, v));
                store_any(to + place(2 * j + 1, v), packed.high_half(from, j, v));
            }
        }
    }

private:
    static int64_t place(int step, int v) { return 8 * PANEL + (step * PANEL_VECTORS + v) * VL * GROUP; }
};

// sums[R][PANEL] of rows from `row` on, continued with groups [first, end), which begin at `group`.
template <int R, class Weights>  // not inlined into the code of each type of activations: it is the same for all
__attribute__((noinline)) void multiply(const Activations& x, int64_t row, const Weights& weights, const uint8_t* group, int64_t first,
                     int64_t end, float* sums) {
    vf acc[R][PANEL_VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = loadf(sums + r * PANEL + v * VL);
    const int64_t stride = x.groups * GROUP_COLUMNS;
    for (int64_t g = first; g < end; g++, group += Weights::BYTES) {
        NibbleSum whole[R][PANEL_VECTORS];
        const int8_t* from = x.bytes + row * stride + g * GROUP_COLUMNS;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vi w = weights.low_half(group, j, v);
                for (int r = 0; r < R; r++) whole[r][v].add(from + r * stride + 8 * j, w);
            }
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vi w = weights.high_half(group, j, v);
                for (int r = 0; r < R; r++) whole[r][v].add(from + r * stride + 8 * j + 4, w);
            }
        }
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const vf scale = weights.scale(group, v), min = weights.min(group, v);
            for (int r = 0; r < R; r++) {
                acc[r][v] += __builtin_convertvector(whole[r][v].get(), vf) * scale;
                acc[r][v] -= x.sums[(row + r) * x.groups + g] * min;
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) storef(sums + r * PANEL + v * VL, acc[r][v]);
}

template <class T>
void run_piece(const Linear& l, const Activations& x, int64_t begin, int64_t end, int64_t first, int64_t last,
               typename T::Elem* out, Epilogue epilogue) {
    constexpr int64_t PART = 8;  // groups, whose bytes stay in the L1 cache
    const int64_t tokens = end - begin, passes = (tokens + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int64_t part = passes == 1 ? x.groups : PART;
    const Output<T> output(l, out, epilogue);
    alignas(64) uint8_t unpacked[PART * Unpacked::BYTES];
    static thread_local std::vector<float> room;
    room.resize(tokens * PANEL);
    float* sums = room.data();
    for (int64_t p = first; p < last; p++) {
        const uint8_t* panel = (const uint8_t*)l.weight + p * x.groups * GROUP_BYTES;
        const Packed packed{l.mins + p * PANEL};
        memset(sums, 0, tokens * PANEL * sizeof(float));
        for (int64_t g = 0; g < x.groups; g += part) {
            const int64_t stop = std::min(x.groups, g + part);
            for (int64_t i = g; passes > 1 && i < stop; i++) {
                const uint8_t* from = panel + i * GROUP_BYTES;
                Unpacked::unpack(packed, from, unpacked + (i - g) * Unpacked::BYTES);
                for (int64_t j = 0; j < GROUP_BYTES; j += 64) __builtin_prefetch(from + x.groups * GROUP_BYTES + j, 0, 2);
            }
            for (int64_t pass = 0; pass < passes; pass++) {
                const int64_t row = tokens * pass / passes, rows = tokens * (pass + 1) / passes - row;
                with_rows<ROWS_AT_ONCE>(rows, [&](auto R) {
                    if (passes == 1)
                        multiply<R()>(x, begin + row, packed, panel, g, stop, sums + row * PANEL);
                    else
                        multiply<R()>(x, begin + row, Unpacked{}, unpacked, g, stop, sums + row * PANEL);
                });
            }
        }
        for (int64_t r = 0; r < tokens; r++) {
            float* y = sums + r * PANEL;
            for (int64_t v = 0; v < PANEL; v += VL)
                storef(y + v, loadf(y + v) * loadf(l.scales + p * PANEL + v) * x.steps[begin + r]);
            output.put(begin + r, p, y);
        }
    }
}

// A group of weights as q, scale and min.
struct Quantized {
    float scale, min, error;
};

// The scale and min of least squared error for given q, and that error. A min is never negative: zero stays within reach.
Quantized fit(const float* w, const float* q) {
    float sum_q = 0, sum_qq = 0, sum_w = 0, sum_qw = 0;
    for (int i = 0; i < GROUP_COLUMNS; i++) {
        sum_q += q[i], sum_qq += q[i] * q[i];
        sum_w += w[i], sum_qw += q[i] * w[i];
    }
    const float n = GROUP_COLUMNS, determinant = n * sum_qq - sum_q * sum_q;
    float scale = determinant > 0 ? (n * sum_qw - sum_q * sum_w) / determinant : 0;
    float min = (scale * sum_q - sum_w) / n;
    if (min < 0) min = 0, scale = sum_qq > 0 ? sum_qw / sum_qq : 0;
    float error = 0;
    for (int i = 0; i < GROUP_COLUMNS; i++) {
        const float difference = scale * q[i] - min - w[i];
        error += difference * difference;
    }
    return {scale, min, error};
}

inline void round_to_nibbles(const float* w, float scale, float min, float* q) {
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < GROUP_COLUMNS; i++) q[i] = std::min(15.f, std::max(0.f, std::nearbyint((w[i] + min) * inverse)));
}

// Tries ranges from that of the group down to three quarters of it: clipping the largest makes the others finer.
Quantized best_fit(const float* w) {
    float least = 0, most = 0;
    for (int i = 0; i < GROUP_COLUMNS; i++) least = std::min(least, w[i]), most = std::max(most, w[i]);
    Quantized best{0, 0, INFINITY};
    float q[GROUP_COLUMNS];
    for (float steps = 15; steps < 20.5f; steps += 1) {
        const float scale = (most - least) / steps;
        const Quantized rough{scale, std::max(0.f, -(least + most) / 2 + 7.5f * scale), 0};
        round_to_nibbles(w, rough.scale, rough.min, q);
        const Quantized fitted = fit(w, q);
        if (fitted.error < best.error && fitted.scale >= 0) best = fitted;
    }
    return best;
}

inline uint8_t steps_of(float value, float unit) {
    return unit > 0 ? (uint8_t)std::min(255.f, std::nearbyint(value / unit)) : 0;
}

// One feature's weights [columns] into its lane of a packed panel. Returns the units of its scales and mins.
void pack_feature(const std::vector<float>& weights, int64_t groups, int64_t lane, uint8_t* panel, float& scale_unit, float& min_unit) {
    std::vector<Quantized> fits(groups);
    float scale = 0, min = 0;
    for (int64_t g = 0; g < groups; g++) {
        fits[g] = best_fit(&weights[g * GROUP_COLUMNS]);
        scale = std::max(scale, fits[g].scale), min = std::max(min, fits[g].min);
    }
    scale_unit = scale / 255, min_unit = min / 255;
    for (int64_t g = 0; g < groups; g++, panel += GROUP_BYTES) {
        panel[lane] = steps_of(fits[g].scale, scale_unit);
        panel[PANEL + lane] = steps_of(fits[g].min, min_unit);
        float q[GROUP_COLUMNS];
        round_to_nibbles(&weights[g * GROUP_COLUMNS], panel[lane] * scale_unit, panel[PANEL + lane] * min_unit, q);
        for (int k = 0; k < GROUP_COLUMNS; k++) {
            uint8_t& byte = panel[2 * PANEL + (k / 8 * PANEL + lane) * GROUP + k % GROUP];
            byte |= (uint8_t)q[k] << (k % 8 < 4 ? 0 : 4);
        }
    }
}

}  // namespace

void linear_forward_int4(const Linear& l, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                         int threads) {
    const int64_t groups = num_groups(l), stride = groups * GROUP_COLUMNS, panels = padded_rows(l) / PANEL;
    static thread_local std::vector<int8_t> bytes;
    static thread_local std::vector<float> floats;
    bytes.resize(num_tokens * stride);
    floats.resize(num_tokens * (groups + 1));
    int8_t* quantized = bytes.data();
    float *steps = floats.data(), *sums = steps + num_tokens;
    const double ns_per_row = 2.0 * PANEL * l.columns / (VL * 2 * 2 * 4.0) / GROUP * 1.5;
    Cut cut(num_tokens, panels, groups * GROUP_BYTES, stride, ns_per_row, threads);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        parallel_for(num_tokens > 16 ? threads : 1, num_tokens, [&](int64_t t) {
            int8_t* to = quantized + t * stride;
            memset(to + l.columns, 0, stride - l.columns);
            steps[t] = quantize_row<T>((const E*)x + t * l.columns, l.columns, 0, (uint8_t*)to);
            for (int64_t g = 0; g < groups; g++) {
                int32_t sum = 0;
                for (int64_t k = 0; k < GROUP_COLUMNS; k++) sum += to[g * GROUP_COLUMNS + k];
                sums[t * groups + g] = (float)sum;
            }
        });
        const Activations activations{quantized, sums, steps, groups};
        cut.run(threads, num_tokens, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
            run_piece<T>(l, activations, begin, end, first, last, (E*)out, epilogue);
        });
    });
}

extern "C" {

// Bytes of a packed 4-bit weight.
int64_t linear_int4_bytes(const Linear* linear) { return padded_rows(*linear) / PANEL * num_groups(*linear) * GROUP_BYTES; }

// weight [rows][columns] of dtype -> packed bytes; by padded row: the unit of its scales, and of its mins in those units.
void linear_pack_int4(const Linear* linear, int64_t dtype, const void* weight, uint8_t* packed, float* scales, float* mins,
                      int threads) {
    const Linear& l = *linear;
    const int64_t groups = num_groups(l), panel_bytes = groups * GROUP_BYTES;
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        for_panels(threads, padded_rows(l) / PANEL, panel_bytes, [&](int64_t p) {
            memset(packed + p * panel_bytes, 0, panel_bytes);
            std::vector<float> feature(groups * GROUP_COLUMNS);
            for (int64_t i = p * PANEL; i < (p + 1) * PANEL; i++) {
                const int64_t row = source_row(l, i);
                for (int64_t k = 0; k < l.columns; k++)
                    feature[k] = row < 0 ? 0 : Rows<T>::load_one((const E*)weight + row * l.columns + k);
                float min_unit = 0;
                pack_feature(feature, groups, i % PANEL, packed + p * panel_bytes, scales[i], min_unit);
                mins[i] = scales[i] > 0 ? min_unit / scales[i] : 0;
            }
        });
    });
}
}
