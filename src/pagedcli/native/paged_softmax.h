// Softmax of one split's scores, and what several splits of a row add up to.
#pragma once

#include "paged_kernels.h"

// The lanes of a row's tile t that come after its first `hidden` tokens.
inline vi after_hidden(int64_t hidden, int64_t t) { return iota() >= (vi{} + (int32_t)(hidden - t * VL)); }

// The weights p of one row's tile, times the scales of V, as whole numbers. Up to the tile number `used` there are tokens
// that the row sees: all after the first `hidden`, and `seen_last` of the last tile. The others' scales may be anything.
inline void whole_weights(const Buffers<I8>& w, int64_t r, const Tiles<I8>& tiles, int64_t hidden, int64_t used, vi seen_last) {
    float* p = w.scores + r * KEYS;
    Largest largest;
    for (int64_t t = 0; t < used; t++) {
        vf scales = load_any<vf>(tiles.values[t]);
        if (t == used - 1) scales = select_of(seen_last, scales, vf{});
        if (t * VL < hidden) scales = select_of(after_hidden(hidden, t), scales, vf{});
        const vf scaled = loadf(p + t * VL) * scales;
        largest.put(scaled);
        storef(p + t * VL, scaled);
    }
    const float top = largest.get(), inverse = steps_per_unit(top, 32767.f);
    for (int64_t t = 0; t < used; t++) store_whole(w.weights + r * KEYS + t * VL, loadf(p + t * VL) * inverse);
    w.weight_steps[r] = top / 32767.f;
}

// One row: scores -> weights of the tiles' tokens, of which the row sees number `hidden` to `visible` - 1; their maximum and
// sum. Either number may lie outside of the tiles.
// factor is positive, so the largest score has the largest weight. With a cap other than 0, the products of factor and
// score are capped: both in units of log2.
template <class T>
inline void softmax_row(const Buffers<T>& w, const State& state, int64_t r, int64_t hidden, int64_t visible,
                        const Tiles<T>& tiles, float factor, float cap) {
    const int64_t num_tiles = tiles.count;
    float* scores = w.scores + r * KEYS;
    auto* weights = w.weights + r * (KEYS / T::PAIR * T::OPS);
    const vf low = splat(-INFINITY);
    vf top = low;
    const int64_t used = visible <= 0 ? 0 : std::min<int64_t>(num_tiles, (visible + VL - 1) / VL);
    if (cap != 0) {
        for (int64_t t = 0; t < used; t++) storef(scores + t * VL, tanh_of(loadf(scores + t * VL) * (factor / cap)) * cap);
        factor = 1;
    }
    vi seen = ~vi{};  // of the last used tile
    if (used * VL > visible && used) {
        float* last = scores + (used - 1) * VL;
        seen = iota() < (vi{} + (int32_t)(visible - (used - 1) * VL));
        storef(last, select_of(seen, loadf(last), low));
    }
    for (int64_t t = 0; t < used && t * VL < hidden; t++)
        storef(scores + t * VL, select_of(after_hidden(hidden, t), loadf(scores + t * VL), low));
    for (int64_t t = 0; t < used; t++) top = max_of(top, loadf(scores + t * VL));
    const float largest = max_in(top) * factor;
    const vf base = splat(largest == -INFINITY ? 0.f : largest);
    vf sum = {};
    for (int64_t t = 0; t < used; t++) {
        const vf power = loadf(scores + t * VL) * factor - base;
        const vf p = std::is_base_of_v<BF16Pairs, T> ? short_exp2_of(power) : exp2_of(power);
        sum += p;
        if constexpr (T::SCALED)
            storef(scores + t * VL, p);
        else
            T::put_ops(weights, (int)(t * VL), p);
    }
    if constexpr (T::SCALED) {
        whole_weights(w, r, tiles, hidden, used, seen);
        memset(weights + used * VL, 0, (num_tiles - used) * VL * sizeof *weights);
    } else {
        for (int64_t t = used; t < num_tiles; t++) T::put_ops(weights, (int)(t * VL), vf{});
    }
    state.max[r] = largest;
    state.sum[r] = sum_of(sum);
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
