// Softmax of one split's scores, and what several splits of a row add up to.
#pragma once

#include "paged_kernels.h"

// The weights p of one row's tiles, times the scales of V, as whole numbers. The scales of tokens that the row does not see
// may be anything.
inline void whole_weights(const Buffers<I8>& w, int64_t r, const Tiles<I8>& tiles, const Sight& sees) {
    float* p = w.scores + r * KEYS;
    const int64_t used = sees.tiles(tiles.count);
    Largest largest;
    for (int64_t t = 0; t < used; t++) {
        vf scales = load_any<vf>(tiles.values[t]);
        if (t * VL < sees.hidden || (t + 1) * VL > sees.visible) scales = select_of(sees.in_tile(t), scales, vf{});
        const vf scaled = loadf(p + t * VL) * scales;
        largest.put(scaled);
        storef(p + t * VL, scaled);
    }
    const float top = largest.get(), inverse = steps_per_unit(top, 32767.f);
    for (int64_t t = 0; t < used; t++) store_whole(w.weights + r * KEYS + t * VL, loadf(p + t * VL) * inverse);
    memset(w.weights + r * KEYS + used * VL, 0, (tiles.count - used) * VL * sizeof *w.weights);
    w.weight_steps[r] = top / 32767.f;
}

// Rows [row, row + R), whose sums do not wait for each other: scores -> weights of the tiles' tokens, their maximum and sum.
// factor is positive, so the largest score has the largest weight. With a cap other than 0, the products of factor and
// score are capped: both in units of log2.
template <class T, int R>
inline void softmax_rows(const Buffers<T>& w, const State& state, int64_t row, const Sight* sees, const Tiles<T>& tiles,
                         float factor, float cap) {
    constexpr int64_t STRIDE = KEYS / T::PAIR * T::OPS;
    float* scores = w.scores + row * KEYS;
    auto* weights = w.weights + row * STRIDE;
    const vf low = splat(-INFINITY);
    int64_t used = 0;  // tiles that any of the rows sees
    for (int r = 0; r < R; r++) used = std::max(used, sees[r].tiles(tiles.count));
    if (cap != 0) {
        for (int r = 0; r < R; r++)
            for (float* s = scores + r * KEYS; s < scores + r * KEYS + used * VL; s += VL)
                storef(s, tanh_of(loadf(s) * (factor / cap)) * cap);
        factor = 1;
    }
    for (int r = 0; r < R; r++)
        for (int64_t t = 0; t < used; t++) {
            if (t * VL >= sees[r].hidden) t = std::max(t, sees[r].visible / VL);  // those before it are seen as a whole
            if (t >= used) break;
            float* s = scores + r * KEYS + t * VL;
            storef(s, select_of(sees[r].in_tile(t), loadf(s), low));
        }
    vf top[R], base[R], sum[R] = {};
    for (int r = 0; r < R; r++) top[r] = low;
    for (int64_t t = 0; t < used; t++)
        for (int r = 0; r < R; r++) top[r] = max_of(top[r], loadf(scores + r * KEYS + t * VL));
    for (int r = 0; r < R; r++) {
        const float largest = max_in(top[r]) * factor;
        base[r] = splat(largest == -INFINITY ? 0.f : largest);
        state.max[row + r] = largest;
    }
    for (int64_t t = 0; t < used; t++)
        for (int r = 0; r < R; r++) {
            const vf power = loadf(scores + r * KEYS + t * VL) * factor - base[r];
            const vf p = std::is_base_of_v<BF16Pairs, T> ? short_exp2_of(power) : exp2_of(power);
            sum[r] += p;
            if constexpr (T::SCALED)
                storef(scores + r * KEYS + t * VL, p);
            else
                T::put_ops(weights + r * STRIDE, (int)(t * VL), p);
        }
    for (int r = 0; r < R; r++) {
        state.sum[row + r] = sum_of(sum[r]);
        if constexpr (T::SCALED)
            whole_weights(w, row + r, tiles, sees[r]);
        else
            for (int64_t t = used; t < tiles.count; t++) T::put_ops(weights + r * STRIDE, (int)(t * VL), vf{});
    }
}

// into = both together. A row that saw nothing in `from` leaves `into` as it is.
inline void merge(const State& into, const State& from, int64_t rows, int64_t width) {
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

inline void copy(const State& into, const State& from, int64_t rows, int64_t width) {
    memcpy(into.max, from.max, rows * sizeof(float));
    memcpy(into.sum, from.sum, rows * sizeof(float));
    memcpy(into.out, from.out, rows * width * sizeof(float));
}
