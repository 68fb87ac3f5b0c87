// Packs weights of 4 and 8 bits (packed_groups.h): from floats, and from the codes of a quantized checkpoint.

#include "packed_groups.h"

namespace {

inline void put_nibble(uint8_t* block, int64_t k, int64_t lane, uint8_t q) {
    block[(k / 8 * PANEL + lane) * GROUP + k % GROUP] |= q << (k % 8 < 4 ? 0 : 4);
}

// A group of weights as q, scale and min.
struct Quantized {
    float scale, min, error;
};

// The scale and min of least squared error for given q, and that error. A min is never negative: zero stays within reach.
Quantized fit(const float* w, const float* q) {
    float sum_q = 0, sum_qq = 0, sum_w = 0, sum_qw = 0;
    for (int i = 0; i < BLOCK_COLUMNS; i++) {
        sum_q += q[i], sum_qq += q[i] * q[i];
        sum_w += w[i], sum_qw += q[i] * w[i];
    }
    const float n = BLOCK_COLUMNS, determinant = n * sum_qq - sum_q * sum_q;
    float scale = determinant > 0 ? (n * sum_qw - sum_q * sum_w) / determinant : 0;
    float min = (scale * sum_q - sum_w) / n;
    if (min < 0) min = 0, scale = sum_qq > 0 ? sum_qw / sum_qq : 0;
    float error = 0;
    for (int i = 0; i < BLOCK_COLUMNS; i++) {
        const float difference = scale * q[i] - min - w[i];
        error += difference * difference;
    }
    return {scale, min, error};
}

inline void round_to_nibbles(const float* w, float scale, float min, float* q) {
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < BLOCK_COLUMNS; i++) q[i] = std::min(15.f, std::max(0.f, std::nearbyint((w[i] + min) * inverse)));
}

// Tries ranges from that of the group down to three quarters of it: clipping the largest makes the others finer.
Quantized best_fit(const float* w) {
    float least = 0, most = 0;
    for (int i = 0; i < BLOCK_COLUMNS; i++) least = std::min(least, w[i]), most = std::max(most, w[i]);
    Quantized best{0, 0, INFINITY};
    float q[BLOCK_COLUMNS];
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
        fits[g] = best_fit(&weights[g * BLOCK_COLUMNS]);
        scale = std::max(scale, fits[g].scale), min = std::max(min, fits[g].min);
    }
    scale_unit = scale / 255, min_unit = min / 255;
    for (int64_t g = 0; g < groups; g++, panel += ByteHeader::BYTES + Nibbles::BYTES) {
        panel[lane] = steps_of(fits[g].scale, scale_unit);
        panel[PANEL + lane] = steps_of(fits[g].min, min_unit);
        float q[BLOCK_COLUMNS];
        round_to_nibbles(&weights[g * BLOCK_COLUMNS], panel[lane] * scale_unit, panel[PANEL + lane] * min_unit, q);
        for (int k = 0; k < BLOCK_COLUMNS; k++) put_nibble(panel + ByteHeader::BYTES, k, lane, (uint8_t)q[k]);
    }
}

}  // namespace

extern "C" {

// Bytes of a packed weight.
int64_t linear_groups_bytes(const Linear* linear) { return padded_rows(*linear) / PANEL * Chunks(*linear).panel_bytes(); }

// weight [rows][columns] of dtype -> packed bytes; by padded row: the unit of its scales, and of its mins in those units.
void linear_pack_int4(const Linear* linear, int64_t dtype, const void* weight, uint8_t* packed, float* scales, float* mins,
                      int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    const int64_t panel_bytes = chunks.panel_bytes();
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        for_panels(threads, padded_rows(l) / PANEL, panel_bytes, [&](int64_t p) {
            memset(packed + p * panel_bytes, 0, panel_bytes);
            std::vector<float> feature(chunks.padded_columns());
            for (int64_t i = p * PANEL; i < (p + 1) * PANEL; i++) {
                const int64_t row = source_row(l, i);
                for (int64_t k = 0; k < l.columns; k++)
                    feature[k] = row < 0 ? 0 : Rows<T>::load_one((const E*)weight + row * l.columns + k);
                float min_unit = 0;
                pack_feature(feature, chunks.count, i % PANEL, packed + p * panel_bytes, scales[i], min_unit);
                mins[i] = scales[i] > 0 ? min_unit / scales[i] : 0;
            }
        });
    });
}

// codes [rows][columns], a byte each, in the order of columns; scales [rows][groups] of scale_type; zeros [rows][groups]: what
// group_columns neighbours share -> packed. linear->chunk divides group_columns, or there is one group.
void linear_pack_codes(const Linear* linear, const uint8_t* codes, const void* scales, const uint8_t* zeros,
                       int64_t group_columns, uint8_t* packed, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    const int64_t groups = (l.columns + group_columns - 1) / group_columns;
    for_panels(threads, padded_rows(l) / PANEL, chunks.panel_bytes(), [&](int64_t p) {
        uint8_t* chunk = packed + p * chunks.panel_bytes();
        memset(chunk, 0, chunks.panel_bytes());
        for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes)
            with_activations(l.scale_type, [&](auto type) {
                using E = typename decltype(type)::Elem;
                uint8_t* blocks = chunk + chunks.bytes - chunks.blocks * chunks.block_bytes;
                for (int64_t lane = 0; lane < PANEL; lane++) {
                    const int64_t row = source_row(l, p * PANEL + lane);
                    if (row < 0) continue;
                    const int64_t group = row * groups + c * chunks.columns / group_columns;
                    ((E*)chunk)[lane] = ((const E*)scales)[group];
                    chunk[PANEL * sizeof(E) + lane] = zeros[group];
                    const int64_t first = c * chunks.columns, end = std::min(l.columns, first + chunks.columns);
                    for (int64_t k = first; k < end; k++) {
                        const int64_t at = (k - first) % BLOCK_COLUMNS;
                        uint8_t* block = blocks + (k - first) / BLOCK_COLUMNS * chunks.block_bytes;
                        const uint8_t code = codes[row * l.columns + k];
                        if (l.kind == CODES8)
                            block[(at / GROUP * PANEL + lane) * GROUP + at % GROUP] = code;
                        else
                            put_nibble(block, at, lane, code);
                    }
                }
            });
    });
}
}
