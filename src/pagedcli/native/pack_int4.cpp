// Rounds weights to 4 bits (packed_int4.h).

#include "packed_int4.h"

namespace {

constexpr int GROUP_VECTORS = BLOCK_COLUMNS / VL;
constexpr int MOST = 127;  // of step * q - zero

// A group of a feature's weights in units of its scale, and as step * q - zero.
struct Rounded {
    float step, zero, error = INFINITY;
    vf q[GROUP_VECTORS];
};

// Adding 1.5 * 2^23 rounds to an integer.
inline vf nearest(vf x) { return x + splat(12582912.f) - splat(12582912.f); }
inline float nearest_in(float x, float least, float most) { return std::min(most, std::max(least, std::nearbyint(x))); }

Rounded round_group(const vf* w, float step, float zero) {
    Rounded group{step, zero};
    const vf most = splat(std::min(15.f, std::floor((MOST + zero) / step)));
    vf errors = {};
    for (int i = 0; i < GROUP_VECTORS; i++) {
        const vf q = max_of(vf{}, nearest((w[i] + zero) * (1 / step)));
        group.q[i] = -max_of(-q, -most);
        const vf difference = step * group.q[i] - zero - w[i];
        errors += difference * difference;
    }
    group.error = sum_of(errors);
    return group;
}

// The step and zero of least squared error. Steps from that of the whole range down to three quarters of it are tried, as
// clipping the largest makes the others finer, and ranges half a step to both sides; zero is 0 or more, so that a weight of 0
// stays within reach.
Rounded best_fit(const vf* w) {
    vf tops = {}, bottoms = {};
    for (int i = 0; i < GROUP_VECTORS; i++) tops = max_of(tops, w[i]), bottoms = max_of(bottoms, -w[i]);
    const float most = max_in(tops), least = -max_in(bottoms), range = most - least;
    Rounded best{1, 0};
    for (float step = std::max(1.f, std::ceil(range / 20)); step <= std::max(1.f, std::ceil(range / 15)); step++)
        for (float shift = -step / 2; shift <= step / 2; shift += std::max(1.f, step / 8)) {
            const Rounded group = round_group(w, step, nearest_in(7.5f * step - (least + most) / 2 + shift, 0, MOST));
            if (group.error < best.error) best = group;
        }
    return best;
}

// One feature's weights [groups * 32] into its lane of a packed panel. Returns the sum of its rounded weights.
int32_t pack_feature(const float* weights, float scale, int64_t groups, int64_t lane, uint8_t* panel) {
    int32_t sum = 0;
    for (int64_t g = 0; g < groups; g++, panel += Int4Group::BYTES) {
        vf w[GROUP_VECTORS];
        for (int i = 0; i < GROUP_VECTORS; i++) w[i] = loadf(weights + g * BLOCK_COLUMNS + i * VL) * (scale > 0 ? 1 / scale : 0);
        const Rounded group = best_fit(w);
        const int step = (int)group.step, zero = (int)group.zero;
        panel[lane] = step, panel[PANEL + lane] = zero;
        for (int k = 0; k < BLOCK_COLUMNS; k++) {
            const int q = (int)group.q[k / VL][k % VL];
            Nibbles::put(panel + 2 * PANEL, k, lane, q);
            sum += step * q - zero;
        }
    }
    return sum;
}

}  // namespace

extern "C" {

// weight [rows][columns] of dtype -> packed bytes; scales and sums of the padded rows.
void linear_pack_int4(const Linear* linear, int64_t dtype, const void* weight, uint8_t* packed, float* scales, int32_t* sums,
                      int threads) {
    const Linear& l = *linear;
    const int64_t columns = padded_columns(l), panel_bytes = packed_panel_bytes(l);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        for_panels(threads, padded_rows(l) / PANEL, panel_bytes, [&](int64_t p) {
            memset(packed + p * panel_bytes, 0, panel_bytes);
            std::vector<float> feature(columns);
            for (int64_t i = p * PANEL; i < (p + 1) * PANEL; i++) {
                const int64_t row = source_row(l, i);
                float top = 0;
                for (int64_t k = 0; k < l.columns; k++) {
                    feature[k] = row < 0 ? 0 : Rows<T>::load_one((const E*)weight + row * l.columns + k);
                    top = std::max(top, std::fabs(feature[k]));
                }
                scales[i] = top / MOST;
                sums[i] = pack_feature(feature.data(), scales[i], columns / BLOCK_COLUMNS, i % PANEL, packed + p * panel_bytes);
            }
        });
    });
}
}
