// Rounds weights to 4 bits, w = scale * (step * q - zero), with a float per output feature and two bytes per 32 columns: kind INT4.
// VL features at a time, a lane each. step * q - zero lies in -127 ... 127.

#include "packed_groups.h"

namespace {

constexpr int MOST = 127;  // of step * q - zero

// Adding 1.5 * 2^23 rounds to an integer.
inline vf nearest(vf x) { return x + splat(12582912.f) - splat(12582912.f); }
inline vf ceil_of(vf x) {
    const vf near = nearest(x);
    return near + select_of(near < x, splat(1), vf{});
}
inline bool any_of(vi mask) {
    int32_t any = 0;
    for (int i = 0; i < VL; i++) any |= mask[i];
    return any;
}

// How a group of each feature is rounded, all in units of the feature's scale.
struct Grid {
    vf step, zero, inverse, most;
    Grid(vf step, vf zero) : step(step), zero(zero), inverse(1.f / step) {
        most = min_of(splat(15), -ceil_of(-((splat(MOST) + zero) / step)));
    }
    vf rounded(vf w) const { return min_of(max_of(vf{}, nearest((w + zero) * inverse)), most); }
    // The squared errors of each lane, added in the order of sum_of(errors of VL neighbours).
    template <int STRIDE = 1> vf error(const vf* w, int first = 0) const {
        if constexpr (STRIDE < VL) {
            return error<2 * STRIDE>(w, first) + error<2 * STRIDE>(w, first + STRIDE);
        } else {
            vf errors = {};
            for (int k = first; k < BLOCK_COLUMNS; k += VL) {
                const vf difference = step * rounded(w[k]) - zero - w[k];
                errors += difference * difference;
            }
            return errors;
        }
    }
};

// The step and zero of least squared error; of equals the least step, then the least zero. Steps from that of the whole range
// down to three quarters of it are tried, as clipping the largest makes the others finer, and ranges half a step to both
// sides; zero is 0 or more, so that a weight of 0 stays within reach.
Grid best_fit(const vf* w) {
    vf tops = {}, bottoms = {};
    for (int k = 0; k < BLOCK_COLUMNS; k++) tops = max_of(tops, w[k]), bottoms = max_of(bottoms, -w[k]);
    const vf range = tops + bottoms, centre = (tops - bottoms) / 2;
    const vf first = max_of(splat(1), ceil_of(range / 20));
    vf best_step = splat(1), best_zero = {}, least_error = splat(INFINITY);
    for (vf step = max_of(splat(1), ceil_of(range / 15)); any_of(step >= first); step -= 1)
        for (int i = 8; i >= 0; i--) {
            const vf shift = (float)i * max_of(splat(1), step / 8) - step / 2;
            const vf zero = min_of(splat(MOST), max_of(vf{}, nearest(7.5f * step - centre + shift)));
            const Grid grid(step, zero);
            // the errors of the largest and the least weight alone are often too many
            const vf above = max_of(vf{}, tops - (step * grid.most - zero)), below = max_of(vf{}, bottoms - zero);
            const vi tried = step >= first & shift <= step / 2 & above * above + below * below <= least_error * 1.001f;
            if (!any_of(tried)) continue;
            const vf error = grid.error(w);
            const vi better = tried & error <= least_error;
            best_step = select_of(better, step, best_step), best_zero = select_of(better, zero, best_zero);
            least_error = select_of(better, error, least_error);
        }
    return Grid(best_step, best_zero);
}

// A group of VL features into vector v of a packed panel.
void pack_group(const vf* w, int v, uint8_t* group) {
    const Grid grid = best_fit(w);
    const vi step = __builtin_convertvector(grid.step, vi), zero = __builtin_convertvector(grid.zero, vi);
    store_bytes(group + v * VL, step), store_bytes(group + PANEL + v * VL, zero);
    vi fours[BLOCK_STEPS] = {};
    for (int k = 0; k < BLOCK_COLUMNS; k++) {
        const vi q = __builtin_convertvector(grid.rounded(w[k]), vi);
        fours[k / GROUP] |= q << k % GROUP * 8;
    }
    Nibbles::store(group + 2 * PANEL, v, fours);
}

}  // namespace

extern "C" {

// weight [rows][columns] of dtype -> packed bytes; scales of the padded rows.
void linear_pack_int4(const Linear* linear, int64_t dtype, const void* weight, uint8_t* packed, float* scales, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        for_panels(threads, padded_rows(l) / PANEL, chunks.panel_bytes(), [&](int64_t p) {
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const int64_t first = p * PANEL + v * VL;
                const E* rows[VL];
                vf inverse = {};
                for (int i = 0; i < VL; i++) {
                    const int64_t row = source_row(l, first + i);
                    rows[i] = row < 0 ? nullptr : (const E*)weight + row * l.columns;
                    const float scale = row < 0 ? 0 : largest_of<T>(rows[i], l.columns) / MOST;
                    scales[first + i] = scale;
                    inverse[i] = scale > 0 ? 1 / scale : 0;
                }
                for (int64_t g = 0; g < chunks.count; g++) {
                    const int64_t begin = g * BLOCK_COLUMNS, count = std::min(BLOCK_COLUMNS, l.columns - begin);
                    vf w[BLOCK_COLUMNS] = {};
                    for (int i = 0; i < VL; i++)
                        for (int64_t k = 0; rows[i] && k < count; k++) w[k][i] = Rows<T>::load_one(rows[i] + begin + k);
                    for (vf& each : w) each *= inverse;
                    pack_group(w, v, packed + p * chunks.panel_bytes() + g * chunks.bytes);
                }
            }
        });
    });
}
}
