// One step of a pre-norm decoder: the loop over its layers, and the small kernels between the matrix products.
//
// Rounds where the torch implementation in pagedcli.models.decoder and pagedcli.layers does, so that both give the same
// numbers up to the order of sums. Everything is computed row by row: a token never depends on its neighbours' number.

#include "decoder.h"

#include <cmath>
#include <cstdlib>

#include "rows.h"

namespace {

// Elements of work below which a second thread is not worth waking.
constexpr int64_t SMALL = 1 << 15;

inline int threads_for(int threads, int64_t elements) { return elements < SMALL ? 1 : threads; }

template <class T> void rms_norm(const typename T::Elem* x, const typename T::Elem* weight, int64_t size, float eps,
                                 typename T::Elem* out) {
    vf squares[2] = {};
    for (int64_t i = 0; i < size; i += VL) {
        vf v = load_some<T>(x + i, size - i);
        squares[i / VL % 2] += v * v;
    }
    const float scale = 1.f / std::sqrt(sum_of(squares[0] + squares[1]) / size + eps);
    for (int64_t i = 0; i < size; i += VL) {
        vf scaled = Rows<T>::round(load_some<T>(x + i, size - i) * scale);
        store_some<T>(out + i, scaled * load_some<T>(weight + i, size - i), size - i);
    }
}

template <class T> void norm_rows(const void* x, const void* weight, int64_t num_rows, int64_t size, float eps, void* out,
                                  int threads) {
    using E = typename T::Elem;
    constexpr int64_t CHUNK = 8;
    parallel_for(threads_for(threads, num_rows * size), (num_rows + CHUNK - 1) / CHUNK, [&](int64_t chunk) {
        for (int64_t r = chunk * CHUNK; r < std::min(num_rows, (chunk + 1) * CHUNK); r++)
            rms_norm<T>((const E*)x + r * size, (const E*)weight, size, eps, (E*)out + r * size);
    });
}

// Pairs (i, i + D/2) of a head, turned by the token's angles.
template <class T> void rotate(typename T::Elem* x, const typename T::Elem* angles, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += VL) {
        const int64_t room = half - i;
        const vf cosine = load_some<T>(angles + i, room), sine = load_some<T>(angles + half + i, room);
        const vf a = load_some<T>(x + i, room), b = load_some<T>(x + half + i, room);
        store_some<T>(x + i, Rows<T>::round(a * cosine) - Rows<T>::round(b * sine), room);
        store_some<T>(x + half + i, Rows<T>::round(b * cosine) + Rows<T>::round(a * sine), room);
    }
}

// q and k of each token, where they lie in qkv [T][H + 2G][D].
template <class T> void norm_and_rotate(const Model& m, const Layer& layer, const Step& step, void* qkv) {
    using E = typename T::Elem;
    const int64_t D = m.head_dim, width = (m.num_heads + 2 * m.num_kv_heads) * D;
    constexpr int64_t CHUNK = 4;
    const int threads = threads_for((int)step.threads, step.num_tokens * width);
    parallel_for(threads, (step.num_tokens + CHUNK - 1) / CHUNK, [&](int64_t chunk) {
        for (int64_t t = chunk * CHUNK; t < std::min(step.num_tokens, (chunk + 1) * CHUNK); t++) {
            const E* angles = (const E*)m.rope_table + step.positions[t] * D;
            for (int64_t h = 0; h < m.num_heads + m.num_kv_heads; h++) {
                E* head = (E*)qkv + t * width + h * D;
                const void* weight = h < m.num_heads ? layer.q_norm : layer.k_norm;
                if (weight) rms_norm<T>(head, (const E*)weight, D, (float)m.eps, head);
                rotate<T>(head, angles, D);
            }
        }
    });
}

template <class E> void keep_rows(E* x, int64_t width, const int64_t* rows, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; r++)
        if (rows[r] != r) memcpy(x + r * width, x + rows[r] * width, width * sizeof(E));
}

// Memory for activations, which grows and stays.
struct Workspace {
    std::vector<char> bytes;
    size_t used = 0;
    void reserve(size_t size) {
        used = 0;
        if (bytes.size() < size + 4096) bytes = std::vector<char>(size + 4096);
    }
    template <class E> E* take(int64_t count) {
        const size_t base = (size_t)bytes.data(), at = (base + used + 63) / 64 * 64;
        used = at - base + count * sizeof(E);
        return reinterpret_cast<E*>(at);
    }
};

template <class T> int forward(const Model& m, const Step& step) {
    using E = typename T::Elem;
    static thread_local Workspace workspace;
    const int64_t E_ = m.hidden_size, D = m.head_dim, H = m.num_heads, G = m.num_kv_heads, width = (H + 2 * G) * D;
    const int64_t inner = m.num_layers ? m.layers[0].gate_up.rows / 2 : 0;
    const int threads = (int)step.threads;
    int64_t tokens = step.num_tokens;
    workspace.reserve(tokens * (E_ + width + std::max(H * D, inner)) * sizeof(E) + 256);
    E *residual = (E*)step.residual, *x = workspace.take<E>(tokens * E_), *qkv = workspace.take<E>(tokens * width);
    E* wide = workspace.take<E>(tokens * std::max(H * D, inner));
    const int64_t strides[4] = {width, D, width, D};
    for (int64_t i = 0; i < m.num_layers; i++) {
        const Layer& layer = m.layers[i];
        char *k_cache = (char*)step.k_cache + i * step.layer_bytes, *v_cache = (char*)step.v_cache + i * step.layer_bytes;
        norm_rows<T>(residual, layer.input_norm, tokens, E_, (float)m.eps, x, threads);
        linear_forward(layer.qkv, m.dtype, x, tokens, qkv, STORE, threads);
        norm_and_rotate<T>(m, layer, step, qkv);
        paged_write((int)m.dtype, step.geometry, tokens, threads, qkv + H * D, qkv + (H + G) * D, strides, k_cache, v_cache,
                    step.slots);
        if (paged_attend((int)m.dtype, step.geometry, step.work, qkv, width, D, k_cache, v_cache, wide,
                         1.f / std::sqrt((float)D), 0.f))
            return 1;
        if (i == m.num_layers - 1 && step.num_rows < tokens) {  // behind the last attention no token looks at another
            keep_rows(wide, H * D, step.rows, step.num_rows);
            keep_rows(residual, E_, step.rows, step.num_rows);
            tokens = step.num_rows;
            if (!tokens) return 0;
        }
        linear_forward(layer.attention_out, m.dtype, wide, tokens, residual, ADD, threads);
        norm_rows<T>(residual, layer.mlp_norm, tokens, E_, (float)m.eps, x, threads);
        linear_forward(layer.gate_up, m.dtype, x, tokens, wide, GATE, threads);
        linear_forward(layer.down, m.dtype, wide, tokens, residual, ADD, threads);
    }
    norm_rows<T>(residual, m.final_norm, tokens, E_, (float)m.eps, step.out, threads);
    return 0;
}

// The largest of n elements; NaN if one is.
template <class T> float largest(const typename T::Elem* x, int64_t n) {
    vf top = splat(-INFINITY);
    vi bad = {};
    for (int64_t i = 0; i + VL <= n; i += VL) {
        vf v = Rows<T>::load(x + i);
        bad |= v != v;
        top = max_of(top, v);
    }
    float best = max_in(top);
    for (int j = 0; j < VL; j++)
        if (bad[j]) return NAN;
    for (int64_t i = n / VL * VL; i < n; i++) {
        const float v = Rows<T>::load_one(x + i);
        if (v != v) return v;
        best = std::max(best, v);
    }
    return best;
}

template <class T> void likeliest(const void* scores, int64_t num_rows, int64_t size, int64_t* out, int threads) {
    using E = typename T::Elem;
    constexpr int64_t CHUNK = 1024;  // only the chunk that holds the largest is looked at twice
    parallel_for(threads_for(threads, num_rows * size / 4), num_rows, [&](int64_t r) {
        const E* row = (const E*)scores + r * size;
        float best = largest<T>(row, std::min(CHUNK, size));
        int64_t where = 0;
        for (int64_t i = CHUNK; i < size && best == best; i += CHUNK) {
            const float top = largest<T>(row + i, std::min(CHUNK, size - i));
            if (!(top <= best)) best = top, where = i;  // as in torch, NaN is larger than any number
        }
        out[r] = -1;
        if (!std::isfinite(best)) return;
        for (out[r] = where;; out[r]++) {
            const float v = Rows<T>::load_one(row + out[r]);
            if (v == best) return;
        }
    });
}

}  // namespace

extern "C" {

// 0, or 1 if the block table names a block that does not exist.
int decoder_forward(const Model* model, const Step* step) {
    return with_activations(model->dtype, [&](auto type) { return forward<decltype(type)>(*model, *step); });
}

void decoder_norm_rows(int64_t dtype, const void* x, const void* weight, int64_t num_rows, int64_t size, float eps, void* out,
                       int threads) {
    with_activations(dtype, [&](auto type) { norm_rows<decltype(type)>(x, weight, num_rows, size, eps, out, threads); });
}

// The index of the largest of each row [num_rows][size], the first one of equals; -1 where the largest is no number.
void decoder_argmax(int64_t dtype, const void* scores, int64_t num_rows, int64_t size, int64_t* out, int threads) {
    with_activations(dtype, [&](auto type) { likeliest<decltype(type)>(scores, num_rows, size, out, threads); });
}
}
