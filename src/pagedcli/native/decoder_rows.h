// What a decoder computes row by row between its matrix products: norms, the rotary embedding, additions.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "decoder.h"
#include "parallel.h"
#include "rows.h"

// Elements of work below which a second thread is not worth waking.
constexpr int64_t SMALL = 1 << 15;

inline int threads_for(int threads, int64_t elements) { return elements < SMALL ? 1 : threads; }

// As in parallel.h, with fewer threads for little work.
template <class Work> void for_rows(int threads, int64_t num_rows, int64_t row_elements, int64_t chunk, const Work& work) {
    for_rows(threads_for(threads, num_rows * row_elements), num_rows, chunk, work);
}

// is_float: the weight is float32 and applied before rounding; otherwise it has the type of x; null: there is none.
// out(i): where element i lies.
template <class T, class Out> void rms_norm(const typename T::Elem* x, const void* weight, bool is_float, int64_t size, float eps,
                                            const Out& out) {
    vf squares[2] = {};
    for (int64_t i = 0; i < size; i += VL) {
        vf v = load_some<T>(x + i, size - i);
        squares[i / VL % 2] += v * v;
    }
    const float scale = 1.f / std::sqrt(sum_of(squares[0] + squares[1]) / size + eps);
    for (int64_t i = 0; i < size; i += VL) {
        const vf scaled = load_some<T>(x + i, size - i) * scale;
        if (!weight) {
            store_some<T>(out(i), scaled, size - i);
            continue;
        }
        const vf weighted = is_float ? scaled * load_some<F32>((const float*)weight + i, size - i)
                                     : Rows<T>::round(scaled) * load_some<T>((const typename T::Elem*)weight + i, size - i);
        store_some<T>(out(i), weighted, size - i);
    }
}
template <class T> void rms_norm(typename T::Elem* x, const void* weight, bool is_float, int64_t size, float eps) {
    rms_norm<T>(x, weight, is_float, size, eps, [&](int64_t i) { return x + i; });
}

template <class T> void norm_rows(const void* x, const void* weight, bool is_float, int64_t num_rows, int64_t size, float eps,
                                  void* out, int threads, Order order = BY_ROWS) {
    using E = typename T::Elem;
    const Matrix<E> to{(E*)out, size, order};
    for_rows(threads, num_rows, size, order == BY_TILES ? Matrix<E>::ROWS : 8, [&](int64_t r) {
        rms_norm<T>((const E*)x + r * size, weight, is_float, size, eps, [&](int64_t i) { return to.at(r, i); });
    });
}

// Norms rows by mean and variance. weight [size] float32, and after it, if it has_bias, as many biases.
template <class T> void layer_norm_rows(const void* x, const float* weight, bool has_bias, int64_t num_rows, int64_t size, float eps,
                                        void* out, int threads, Order order = BY_ROWS) {
    using E = typename T::Elem;
    const Matrix<E> to{(E*)out, size, order};
    for_rows(threads, num_rows, size, order == BY_TILES ? Matrix<E>::ROWS : 8, [&](int64_t r) {
        const E* row = (const E*)x + r * size;
        vf sums[2] = {}, squares[2] = {};
        for (int64_t i = 0; i < size; i += VL) sums[i / VL % 2] += load_some<T>(row + i, size - i);
        const float mean = sum_of(sums[0] + sums[1]) / size;
        for (int64_t i = 0; i < size; i += VL) {
            vf v = load_some<T>(row + i, size - i) - mean;
            for (int64_t j = size - i; j < VL; j++) v[j] = 0;  // what is beyond the row
            squares[i / VL % 2] += v * v;
        }
        const float scale = 1.f / std::sqrt(sum_of(squares[0] + squares[1]) / size + eps);
        for (int64_t i = 0; i < size; i += VL) {
            vf v = (load_some<T>(row + i, size - i) - mean) * scale * load_some<F32>(weight + i, size - i);
            if (has_bias) v += load_some<F32>(weight + size + i, size - i);
            store_some<T>(to.at(r, i), v, size - i);
        }
    });
}

// Pairs (i, i + size/2) of a head, turned by the token's angles.
template <class T> void rotate(typename T::Elem* x, const typename T::Elem* angles, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += VL) {
        const int64_t room = half - i;
        const vf cosine = load_some<T>(angles + i, room), sine = load_some<T>(angles + half + i, room);
        const vf a = load_some<T>(x + i, room), b = load_some<T>(x + half + i, room);
        store_some<T>(x + i, Rows<T>::round(a * cosine) - Rows<T>::round(b * sine), room);
        store_some<T>(x + half + i, Rows<T>::round(b * cosine) + Rows<T>::round(a * sine), room);
    }
}

// Moves the second elements of the pairs (2i, 2i + 1) behind the first ones.
template <class E> void part_interleaved(E* x, int64_t size) {
    thread_local std::vector<E> seconds;
    seconds.resize(size / 2);
    for (int64_t i = 0; i < size / 2; i++) seconds[i] = x[2 * i + 1], x[i] = x[2 * i];
    memcpy(x + size / 2, seconds.data(), size / 2 * sizeof(E));
}

// Norms each head [D] of rows of them by no weights, where it lies.
template <class T> void norm_heads(typename T::Elem* x, int64_t stride, int64_t num_tokens, int64_t heads, int64_t D, float eps,
                                   int threads) {
    for_rows(threads, num_tokens, heads * D, 4, [&](int64_t t) {
        for (int64_t h = 0; h < heads; h++) rms_norm<T>(x + t * stride + h * D, nullptr, true, D, eps);
    });
}

// A token's inputs [L][P], from the projection of its embedding in x, and its row of the table.
template <class T> void layer_inputs(const Model& m, const typename T::Elem* row, typename T::Elem* x) {
    using E = typename T::Elem;
    const int64_t size = m.input_size;
    const float shrink = 1.f / std::sqrt((float)m.hidden_size);
    const E rounded = T::from_float(std::sqrt((float)size));
    const float grow = Rows<T>::load_one(&rounded), half = std::sqrt(0.5f);
    for (int64_t i = 0; i < m.num_layers * size; i += VL)
        store_some<T>(x + i, load_some<T>(x + i, m.num_layers * size - i) * shrink, m.num_layers * size - i);
    for (int64_t l = 0; l < m.num_layers; l++, x += size, row += size) {
        rms_norm<T>(x, m.input_norm, m.float_norms, size, (float)m.eps);
        for (int64_t i = 0; i < size; i += VL) {
            const vf looked_up = Rows<T>::round(load_some<T>(row + i, size - i) * grow);
            store_some<T>(x + i, Rows<T>::round(load_some<T>(x + i, size - i) + looked_up) * half, size - i);
        }
    }
}

// gelu(x) * y, in x.
template <class T> void gelu_times(typename T::Elem* x, const typename T::Elem* y, int64_t size) {
    for (int64_t i = 0; i < size; i += VL) {
        const vf gate = Rows<T>::round(gelu_of(load_some<T>(x + i, size - i)));
        store_some<T>(x + i, gate * load_some<T>(y + i, size - i), size - i);
    }
}

// q and k of each token, where they lie in qkv [T][H + 2G][D]; a layer without K has q alone.
template <class T> void norm_and_rotate(const Model& m, const Layer& layer, int64_t num_tokens, const int64_t* positions,
                                        typename T::Elem* qkv, int threads) {
    using E = typename T::Elem;
    if (!layer.q_norm && !layer.rope_table) return;
    const int64_t D = layer.head_dim, H = layer.num_heads, G = layer.reads ? 0 : layer.num_kv_heads, each = m.output_gate ? 2 : 1;
    const int64_t width = qkv_width(m, layer);
    auto norm = [&](E* x, const void* weight, int64_t size) {
        rms_norm<T>(x, weight, m.float_norms, size, (float)m.eps);
    };
    for_rows(threads, num_tokens, width, 4, [&](int64_t t) {
        E* row = qkv + t * width;
        if (layer.q_norm && m.norms_heads) norm(row, layer.q_norm, H * D), norm(row + H * D, layer.k_norm, G * D);
        for (int64_t h = 0; h < H + G; h++) {
            E* head = row + (h < H ? each * h : (each - 1) * H + h) * D;
            const bool normed = layer.q_norm && !m.norms_heads;
            if (normed && !m.norms_last) norm(head, h < H ? layer.q_norm : layer.k_norm, D);
            if (!layer.rope_table) continue;
            if (layer.interleaved) part_interleaved(head, layer.rotated);
            rotate<T>(head, (const E*)layer.rope_table + positions[t] * layer.rotated, layer.rotated);
            if (normed && m.norms_last) norm(head, h < H ? layer.q_norm : layer.k_norm, D);
            if (!layer.query_scales || h >= H) continue;
            const vf scale = splat(Rows<T>::load_one((const E*)layer.query_scales + positions[t]));
            for (int64_t i = 0; i < D; i += VL) store_some<T>(head + i, load_some<T>(head + i, D - i) * scale, D - i);
        }
    });
}

// Multiplies the result [T][H][D] of each head by the sigmoid or softplus of its gates, D numbers or one. Strides in elements,
// from token to token and from head to head.
template <class T> void gate_heads(const Matrix<typename T::Elem>& out, const typename T::Elem* gates, int64_t token_stride,
                                   int64_t head_stride, int64_t size, bool is_softplus, int64_t num_tokens, int64_t H, int64_t D,
                                   int threads) {
    for_rows(threads, num_tokens, H * D, 4, [&](int64_t t) {
        for (int64_t h = 0; h < H; h++) {
            const auto* gate = gates + t * token_stride + h * head_stride;
            for (int64_t i = 0; i < D; i += VL) {
                auto* head = out.at(t, h * D + i);
                const vf raw = size == 1 ? splat(Rows<T>::load_one(gate)) : load_some<T>(gate + i, D - i);
                const vf share = Rows<T>::round(is_softplus ? softplus_of(raw) : sigmoid_of(raw));
                store_some<T>(head, load_some<T>(head, D - i) * share, D - i);
            }
        }
    });
}

// xielu_of each element, where it lies.
template <class T> void xielu_rows(const float* numbers, int64_t num_rows, int64_t size, typename T::Elem* x, int threads) {
    for_rows(threads, num_rows, 4 * size, 8, [&](int64_t r) {
        auto* row = x + r * size;
        for (int64_t i = 0; i < size; i += VL)
            store_some<T>(row + i, xielu_of(load_some<T>(row + i, size - i), numbers), size - i);
    });
}

// x + y, in x.
template <class T> void sum_rows(const typename T::Elem* y, int64_t num_rows, int64_t size, typename T::Elem* x, int threads) {
    for_rows(threads, num_rows, size, 8, [&](int64_t r) {
        const auto* from = y + r * size;
        auto* to = x + r * size;
        for (int64_t i = 0; i < size; i += VL)
            store_some<T>(to + i, load_some<T>(to + i, size - i) + load_some<T>(from + i, size - i), size - i);
    });
}

// Multiplies rows by a number.
template <class T> void scale_rows(float factor, int64_t num_rows, int64_t size, typename T::Elem* x, int threads) {
    for_rows(threads, num_rows, size, 8, [&](int64_t r) {
        auto* row = x + r * size;
        for (int64_t i = 0; i < size; i += VL) store_some<T>(row + i, load_some<T>(row + i, size - i) * factor, size - i);
    });
}

// residual + multiplier * (x or, with a weight, its norm). Overwrites x.
template <class T> void add_rows(const Model& m, typename T::Elem* x, const void* weight, int64_t num_rows,
                                 typename T::Elem* residual, int threads) {
    const int64_t size = m.hidden_size;
    const float multiplier = (float)m.residual_multiplier;
    for_rows(threads, num_rows, size, 8, [&](int64_t r) {
        auto *from = x + r * size, *to = residual + r * size;
        if (weight) rms_norm<T>(from, weight, m.float_norms, size, (float)m.added_eps);
        for (int64_t i = 0; i < size; i += VL) {
            const vf added = Rows<T>::round(load_some<T>(from + i, size - i) * multiplier);
            store_some<T>(to + i, load_some<T>(to + i, size - i) + added, size - i);
        }
    });
}
