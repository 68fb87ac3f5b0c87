// Depthwise convolutions, gated delta nets and Mamba-2, over the sequences of a step.

#include "recurrent.h"

#include <cmath>

#include "arena.h"
#include "decoder_rows.h"

namespace {

constexpr int64_t BLOCK = 32;      // tokens whose inputs are prepared together
constexpr int64_t MOST_KERNEL = 8;
constexpr int NV = 2;              // vectors of a part: its rows of the matrix stay in the L1 cache while a block passes
constexpr int64_t PART = NV * VL;

// a * b + c, always rounded once where the processor can: a compiler's choice could differ between instances of a template.
inline vf fma_of(vf a, vf b, vf c) {
#if defined(USE_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(USE_AVX2) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(USE_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// Neighbouring channels of a convolution whose inputs are neighbouring columns.
struct Segment {
    int64_t channel, column, size;
};

struct Sequence {
    int64_t begin, end;  // its new tokens
    int64_t seen;        // the end of those that its state sees, begin + 1 at least
    int64_t read, write;
};

// Where the parts of a projected row lie.
struct Columns {
    int64_t q, k, v, z, key_stride, value_stride, gate_stride;

    explicit Columns(const Recurrent& r) {
        const int64_t N = r.key_dim, values = r.kind == GATED_DELTA ? r.num_heads / r.num_key_heads * r.value_dim : 0;
        const int64_t all = r.num_key_heads * N, row = 2 * N + 2 * values;
        if (r.interleaved) q = 0, k = N, v = 2 * N, z = 2 * N + values, key_stride = value_stride = row;
        else q = 0, k = all, v = 2 * all, z = r.channels, key_stride = N, value_stride = values;
    }
};

// One layer in a step.
template <class T> struct Mixer {
    using E = typename T::Elem;
    const Recurrent& r;
    const StatePools& pools;
    const std::vector<Sequence> sequences;
    const E *projected, *gates;  // [T][width], [T][2 * heads], of Kimi's [T][heads]
    E* mixed;                    // [T][channels], after the convolution
    int64_t width;
    const E *decays, *shares;  // [T][heads][key_dim], of Kimi's

    // y_t = sum over j of w_j x_(t - K + 1 + j), rounded, and its SiLU.
    template <int K> void convolve(const Sequence& seq, const Segment& segment, int64_t column, bool silu) const {
        const int64_t C = r.channels, size = segment.size;
        E* const slots = (E*)pools.conv + segment.channel;
        const E* const before = seq.read < 0 ? nullptr : slots + seq.read * (K - 1) * C;
        E* const after = slots + seq.write * (K - 1) * C;
        const E* const x = projected + seq.begin * width + column;
        E* const y = mixed + seq.begin * C + segment.channel;
        const int64_t count = seq.end - seq.begin;
        auto row = [&](int64_t t) { return t >= 0 ? x + t * width : before ? before + (t + K - 1) * C : nullptr; };
        for (int64_t first = 0; first < count; first += BLOCK)
            for (int64_t c = 0; c < size; c += VL) {
                const int64_t room = size - c;
                vf weight[K], seen[K];
                for (int j = 0; j < K; j++) weight[j] = load_some<F32>(r.conv + j * C + segment.channel + c, room);
                for (int j = 0; j < K - 1; j++) {
                    const E* from = row(first - K + 1 + j);
                    seen[j] = from ? load_some<T>(from + c, room) : vf{};
                }
                const vf bias = r.conv_bias ? load_some<F32>(r.conv_bias + segment.channel + c, room) : vf{};
                for (int64_t t = first; t < std::min(count, first + BLOCK); t++) {
                    seen[K - 1] = load_some<T>(x + t * width + c, room);
                    vf sum = bias;
                    for (int j = 0; j < K; j++) sum = fma_of(weight[j], seen[j], sum);
                    for (int j = 0; j < K - 1; j++) seen[j] = seen[j + 1];
                    sum = Rows<T>::round(sum);
                    store_some<T>(y + t * C + c, silu ? silu_of(sum) : sum, room);
                }
            }
        for (int64_t i = 0; i < K - 1; i++) {  // in place: a row moves to a place before it
            const E* from = row(seq.seen - seq.begin - K + 1 + i);
            if (from) memmove(after + i * C, from, size * sizeof(E));
            else memset(after + i * C, 0, size * sizeof(E));
        }
    }

    void convolve_all(const std::vector<Segment>& segments, int threads) const {
        const int64_t count = segments.size();
        const bool silu = r.kind != SHORT_CONV;
        with_rows<MOST_KERNEL>(r.kernel, [&](auto kernel) {
            parallel_ranges(threads, (int64_t)sequences.size() * count, [&](int64_t i) {
                const Segment& segment = segments[i % count];
                convolve<decltype(kernel)::value>(sequences[i / count], segment, segment.column, silu);
            });
        });
    }
};

// One token of V vectors of a matrix's columns: S = a S; S += k (b (v - k S)) or, without correction, S += k v; o = q S.
// decay: a, of each row if BY_CHANNEL.
template <int V, bool CORRECTS, bool BY_CHANNEL>
inline void advance(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t N, const float* q,
                    const float* k, const float* v, const float* decay, float beta, float* out) {
    const vf first = splat(decay[0]);
    auto kept = [&](int64_t n) { return BY_CHANNEL ? splat(decay[n]) : first; };
    vf added[V], o[V] = {};
    for (int i = 0; i < V; i++) added[i] = loadf(v + i * VL);
    if constexpr (CORRECTS) {
        vf stored[V] = {};
        for (int64_t n = 0; n < N; n++) {
            const vf key = splat(k[n]), a = kept(n);
            for (int i = 0; i < V; i++) stored[i] = fma_of(key, loadf(from + n * from_stride + i * VL) * a, stored[i]);
        }
        for (int i = 0; i < V; i++) added[i] = (added[i] - stored[i]) * beta;
    }
    for (int64_t n = 0; n < N; n++) {
        const vf key = splat(k[n]), query = splat(q[n]), a = kept(n);
        for (int i = 0; i < V; i++) {
            const vf s = fma_of(key, added[i], loadf(from + n * from_stride + i * VL) * a);
            storef(to + n * to_stride + i * VL, s);
            o[i] = fma_of(query, s, o[i]);
        }
    }
    for (int i = 0; i < V; i++) storef(out + i * VL, o[i]);
}

// What a head's recurrence takes in and gives for a block of tokens.
struct HeadBlock {
    int64_t N, P;             // P: the padded size of a value
    float *q, *k, *v, *o;     // [BLOCK][N], [BLOCK][N], [BLOCK][P], [BLOCK][P]
    float *decay;             // [BLOCK], by channel [BLOCK][N]
    float beta[BLOCK];
};

// The recurrence of one head over the new tokens of a sequence. prepare(first token, count) fills the block,
// finish(first token, count) takes its results.
template <bool CORRECTS, bool BY_CHANNEL = false, class Prepare, class Finish>
void scan_head(const Recurrent& r, const StatePools& pools, const Sequence& seq, int64_t head, HeadBlock& block, float* packed,
               const Prepare& prepare, const Finish& finish) {
    const int64_t N = r.key_dim, P = r.value_dim, size = N * P, parts = block.P / PART;
    const float* const from = seq.read < 0 ? nullptr : pools.matrix + (seq.read * r.num_heads + head) * size;
    float* const to = pools.matrix + (seq.write * r.num_heads + head) * size;
    if (seq.end - seq.begin == 1 && from && P == block.P) {  // row by row, as it lies in memory
        prepare(seq.begin, 1);
        constexpr int MOST = VL >= 16 ? 4 : 1;
        int64_t c = 0;
        for (; c + MOST * PART <= P; c += MOST * PART)
            advance<MOST * NV, CORRECTS, BY_CHANNEL>(from + c, P, to + c, P, N, block.q, block.k, block.v + c, block.decay,
                                                     block.beta[0], block.o + c);
        for (; c < P; c += PART)
            advance<NV, CORRECTS, BY_CHANNEL>(from + c, P, to + c, P, N, block.q, block.k, block.v + c, block.decay,
                                              block.beta[0], block.o + c);
        return finish(seq.begin, 1);
    }
    auto place = [&](int64_t part, int64_t n) { return packed + (part * N + n) * PART; };
    auto inside = [&](int64_t part) { return std::min(PART, P - part * PART) * (int64_t)sizeof(float); };
    memset(packed, 0, N * block.P * sizeof(float));
    for (int64_t part = 0; from && part < parts; part++)
        for (int64_t n = 0; n < N; n++) memcpy(place(part, n), from + n * P + part * PART, inside(part));
    for (int64_t first = seq.begin; first < seq.end; first += BLOCK) {
        const int64_t count = std::min(BLOCK, seq.end - first);
        prepare(first, count);
        for (int64_t part = 0; part < parts; part++)
            for (int64_t t = 0; t < count; t++) {
                float* const s = place(part, 0);
                const int64_t at = t * block.P + part * PART;
                const float* decay = block.decay + t * (BY_CHANNEL ? N : 1);
                advance<NV, CORRECTS, BY_CHANNEL>(s, PART, s, PART, N, block.q + t * N, block.k + t * N, block.v + at, decay,
                                                  block.beta[t], block.o + at);
                if (first + t + 1 == seq.seen)
                    for (int64_t n = 0; n < N; n++) memcpy(to + n * P + part * PART, place(part, n), inside(part));
            }
        finish(first, count);
    }
}

template <class T> void widen(const typename T::Elem* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i += VL) store_some<F32>(to + i, load_some<T>(from + i, size - i), size - i);
}

// x / sqrt(sum x^2 + 1e-6) * scale
template <class T> void l2_norm(const typename T::Elem* from, int64_t size, float scale, float* to) {
    vf squares = {};
    for (int64_t i = 0; i < size; i += VL) {
        const vf x = load_some<T>(from + i, size - i);
        squares = fma_of(x, x, squares);
    }
    const float inverse = 1.f / std::sqrt(sum_of(squares) + 1e-6f);
    for (int64_t i = 0; i < size; i += VL)
        store_some<F32>(to + i, load_some<T>(from + i, size - i) * inverse * scale, size - i);
}

// Rounds x; returns 1 / rms(x).
template <class T> float round_to_norm(float* x, int64_t size, float eps) {
    vf squares = {};
    for (int64_t i = 0; i < size; i += VL) {
        const vf rounded = Rows<T>::round(load_some<F32>(x + i, size - i));
        store_some<F32>(x + i, rounded, size - i);
        squares = fma_of(rounded, rounded, squares);
    }
    return 1.f / std::sqrt(sum_of(squares) / size + eps);
}

// rms_norm(x) * weight * silu(gate), x rounded first.
template <class T> void norm_then_gate(float* x, const typename T::Elem* weight, const typename T::Elem* gate, int64_t size,
                                       float eps, typename T::Elem* out) {
    const float scale = round_to_norm<T>(x, size, eps);
    for (int64_t i = 0; i < size; i += VL) {
        const int64_t room = size - i;
        const vf normed = Rows<T>::round(load_some<F32>(x + i, room) * scale);
        const vf weighted = Rows<T>::round(normed * load_some<T>(weight + i, room));
        store_some<T>(out + i, weighted * silu_of(load_some<T>(gate + i, room)), room);
    }
}

// rms_norm(x) * weight * sigmoid(gate), x rounded first.
template <class T> void norm_then_share(float* x, const typename T::Elem* weight, const typename T::Elem* gate, int64_t size,
                                        float eps, typename T::Elem* out) {
    const float scale = round_to_norm<T>(x, size, eps);
    for (int64_t i = 0; i < size; i += VL) {
        const int64_t room = size - i;
        const vf normed = load_some<F32>(x + i, room) * scale * load_some<T>(weight + i, room);
        store_some<T>(out + i, normed * sigmoid_of(load_some<T>(gate + i, room)), room);
    }
}

// rms_norm(x * silu(gate)) * weight, each group on its own; without a weight x * silu(gate).
template <class T> void gate_then_norm(float* x, const typename T::Elem* weight, const typename T::Elem* gate, int64_t size,
                                       float eps, typename T::Elem* out) {
    vf squares = {};
    for (int64_t i = 0; i < size; i += VL) {
        const vf gated = load_some<F32>(x + i, size - i) * silu_of(load_some<T>(gate + i, size - i));
        store_some<F32>(x + i, gated, size - i);
        squares = fma_of(gated, gated, squares);
    }
    const float scale = 1.f / std::sqrt(sum_of(squares) / size + eps);
    for (int64_t i = 0; i < size; i += VL) {
        const int64_t room = size - i;
        const vf gated = load_some<F32>(x + i, room);
        store_some<T>(out + i, weight ? gated * scale * load_some<T>(weight + i, room) : gated, room);
    }
}

// Memory for one head's block and packed matrix, of each thread.
struct HeadMemory {
    Arena arena;
    float* packed;

    HeadBlock take(const Recurrent& r) {
        const int64_t N = r.key_dim, P = (r.value_dim + PART - 1) / PART * PART, padded = (N + VL - 1) / VL * VL;
        arena.reserve((3 * BLOCK * padded + 2 * BLOCK * P + N * P) * sizeof(float) + 6 * 64);
        HeadBlock block{N, P};
        block.q = arena.take<float>(BLOCK * padded), block.k = arena.take<float>(BLOCK * padded);
        block.v = arena.take<float>(BLOCK * P), block.o = arena.take<float>(BLOCK * P);
        block.decay = arena.take<float>(BLOCK * padded), packed = arena.take<float>(N * P);
        memset(block.v, 0, BLOCK * P * sizeof(float));
        return block;
    }
};

template <class T> void delta_head(const Mixer<T>& layer, const Sequence& seq, int64_t head, typename T::Elem* out) {
    static thread_local HeadMemory memory;
    const Recurrent& r = layer.r;
    const Columns at(r);
    const int64_t N = r.key_dim, P = r.value_dim, H = r.num_heads, C = r.channels, repeats = H / r.num_key_heads;
    const int64_t key_head = r.tiled ? head % r.num_key_heads : head / repeats, within = head % repeats;
    const int64_t all = r.num_key_heads * N, z_at = at.z + (r.interleaved ? key_head * at.value_stride + within * P : head * P);
    const int64_t b = r.interleaved ? key_head * 2 * repeats + within : head, a = r.interleaved ? b + repeats : H + head;
    HeadBlock block = memory.take(r);
    auto prepare = [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const auto* row = layer.mixed + (first + i) * C;
            const auto* gates = layer.gates + (first + i) * 2 * H;
            l2_norm<T>(row + key_head * N, N, 1.f / std::sqrt((float)N), block.q + i * N);
            l2_norm<T>(row + all + key_head * N, N, 1.f, block.k + i * N);
            widen<T>(row + 2 * all + head * P, P, block.v + i * block.P);
            const typename T::Elem beta = T::from_float(sigmoid(Rows<T>::load_one(gates + b)));
            block.beta[i] = Rows<T>::load_one(&beta) * (float)r.correction;
            block.decay[i] = std::exp(r.decay[head] * softplus(Rows<T>::load_one(gates + a) + r.step_bias[head]));
        }
    };
    auto finish = [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const auto* z = layer.projected + (first + i) * layer.width + z_at;
            norm_then_gate<T>(block.o + i * block.P, (const typename T::Elem*)r.norm, z, P, (float)r.eps,
                              out + (first + i) * H * P + head * P);
        }
    };
    scan_head<true>(r, layer.pools, seq, head, block, memory.packed, prepare, finish);
}

template <class T> void kimi_head(const Mixer<T>& layer, const Sequence& seq, int64_t head, typename T::Elem* out) {
    static thread_local HeadMemory memory;
    const Recurrent& r = layer.r;
    const int64_t N = r.key_dim, H = r.num_heads, inner = H * N;
    HeadBlock block = memory.take(r);
    auto prepare = [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const auto *row = layer.mixed + (first + i) * 3 * inner + head * N, *raw = layer.decays + (first + i) * inner + head * N;
            l2_norm<T>(row, N, 1.f / std::sqrt((float)N), block.q + i * N);
            l2_norm<T>(row + inner, N, 1.f, block.k + i * N);
            widen<T>(row + 2 * inner, N, block.v + i * block.P);
            const typename T::Elem beta = T::from_float(sigmoid(Rows<T>::load_one(layer.gates + (first + i) * H + head)));
            block.beta[i] = Rows<T>::load_one(&beta);
            for (int64_t n = 0; n < N; n += VL) {
                const vf size = softplus_of(load_some<T>(raw + n, N - n) + load_some<F32>(r.step_bias + head * N + n, N - n));
                store_some<F32>(block.decay + i * N + n, exp2_of(size * (r.decay[head] * LOG2E)), N - n);
            }
        }
    };
    auto finish = [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = (first + i) * inner + head * N;
            norm_then_share<T>(block.o + i * block.P, (const typename T::Elem*)r.norm, layer.shares + at, N, (float)r.eps, out + at);
        }
    };
    scan_head<true, true>(r, layer.pools, seq, head, block, memory.packed, prepare, finish);
}

// `out` is float: the norm that follows sees several heads.
template <class T> void mamba_head(const Mixer<T>& layer, const Sequence& seq, int64_t head, float* out) {
    static thread_local HeadMemory memory;
    const Recurrent& r = layer.r;
    const int64_t N = r.key_dim, P = r.value_dim, H = r.num_heads, C = r.channels, inner = H * P;
    const int64_t group = head / (H / r.num_key_heads);
    HeadBlock block = memory.take(r);
    auto prepare = [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const auto* row = layer.mixed + (first + i) * C;
            const float raw = Rows<T>::load_one(layer.projected + (first + i) * layer.width + inner + C + head);
            const float size = std::min(std::max(softplus(raw + r.step_bias[head]), (float)r.least_step), (float)r.most_step);
            widen<T>(row + inner + group * N, N, block.k + i * N);
            widen<T>(row + inner + (r.num_key_heads + group) * N, N, block.q + i * N);
            widen<T>(row + head * P, P, block.v + i * block.P);
            for (int64_t p = 0; p < P; p++) block.v[i * block.P + p] *= size;
            block.decay[i] = std::exp(r.decay[head] * size);
        }
    };
    auto finish = [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const auto* x = layer.mixed + (first + i) * C + head * P;
            for (int64_t p = 0; p < P; p += VL) {
                const vf skipped = load_some<T>(x + p, P - p), o = load_some<F32>(block.o + i * block.P + p, P - p);
                store_some<F32>(out + (first + i) * inner + head * P + p, fma_of(skipped, splat(r.skip[head]), o), P - p);
            }
        }
    };
    scan_head<false>(r, layer.pools, seq, head, block, memory.packed, prepare, finish);
}

// The convolution's channels in runs that lie together in a projected row.
std::vector<Segment> segments_of(const Recurrent& r) {
    std::vector<Segment> segments;
    auto add = [&](int64_t channel, int64_t column, int64_t size) {
        constexpr int64_t MOST = 128;
        for (int64_t i = 0; i < size; i += MOST) segments.push_back({channel + i, column + i, std::min(MOST, size - i)});
    };
    if (!r.interleaved) {
        add(0, r.kind == MAMBA2 ? inner_of(r) : 0, r.channels);
        return segments;
    }
    const Columns at(r);
    const int64_t N = r.key_dim, all = r.num_key_heads * N, values = r.num_heads / r.num_key_heads * r.value_dim;
    for (int64_t h = 0; h < r.num_key_heads; h++) {
        add(h * N, at.q + h * at.key_stride, N);
        add(all + h * N, at.k + h * at.key_stride, N);
        add(2 * all + h * values, at.v + h * at.value_stride, values);
    }
    return segments;
}

std::vector<Sequence> sequences_of(const StateStep& step) {
    std::vector<Sequence> sequences;
    for (int64_t i = 0; i < step.num_seqs; i++)
        sequences.push_back({step.cu_q[i], step.cu_q[i + 1], step.ends[i], step.reads[i], step.writes[i]});
    return sequences;
}

template <class T> void run(const Recurrent& r, int64_t dtype, const void* x, int64_t tokens, const StateStep& step,
                            const StatePools& pools, void* out, int threads) {
    using E = typename T::Elem;
    static thread_local Arena arena;
    const bool is_delta = r.kind == GATED_DELTA, is_mamba = r.kind == MAMBA2, is_kimi = r.kind == KIMI_DELTA;
    const int64_t width = r.inner.rows, C = r.channels, inner = inner_of(r), H = r.num_heads;
    const int64_t num_gates = is_delta ? 2 * H : is_kimi ? H : 0, thin = is_kimi ? r.key_dim : 0, by_channel = is_kimi ? inner : 0;
    arena.reserve(tokens * ((width + C + num_gates + thin + 2 * by_channel) * sizeof(E) + (is_mamba ? inner * sizeof(float) : 0)) +
                  7 * 64);
    E* const projected = arena.take<E>(tokens * width);
    E* const mixed = arena.take<E>(tokens * C);
    E* const gates = arena.take<E>(tokens * num_gates);
    E *const between = arena.take<E>(tokens * thin), *const decays = arena.take<E>(tokens * by_channel);
    E* const shares = arena.take<E>(tokens * by_channel);
    float* const scanned = arena.take<float>(is_mamba ? tokens * inner : 0);
    linear_forward(r.inner, dtype, x, tokens, projected, STORE, threads);
    if (num_gates) linear_forward(r.gates, dtype, x, tokens, gates, STORE, threads);
    if (is_kimi) {
        linear_forward(r.decay_down, dtype, x, tokens, between, STORE, threads);
        linear_forward(r.decay_up, dtype, between, tokens, decays, STORE, threads);
        linear_forward(r.shares_down, dtype, x, tokens, between, STORE, threads);
        linear_forward(r.shares_up, dtype, between, tokens, shares, STORE, threads);
    }
    if (r.kind == SHORT_CONV)  // the first gate: B * x, in B's place
        for_rows(threads, tokens, C, 8, [&](int64_t t) {
            E* row = projected + t * width;
            for (int64_t i = 0; i < C; i += VL)
                store_some<T>(row + i, load_some<T>(row + i, C - i) * load_some<T>(row + 2 * C + i, C - i), C - i);
        });
    const Mixer<T> layer{r, pools, sequences_of(step), projected, gates, mixed, width, decays, shares};
    layer.convolve_all(segments_of(r), threads_for(threads, tokens * C));
    if (r.kind == SHORT_CONV)
        return for_rows(threads, tokens, C, 8, [&](int64_t t) {
            const E *y = mixed + t * C, *gate = projected + t * width + C;
            for (int64_t i = 0; i < C; i += VL)
                store_some<T>((E*)out + t * C + i, load_some<T>(gate + i, C - i) * load_some<T>(y + i, C - i), C - i);
        });
    parallel_ranges(threads_for(threads, tokens * H * r.key_dim * r.value_dim), (int64_t)layer.sequences.size() * H, [&](int64_t i) {
        const Sequence& seq = layer.sequences[i / H];
        if (is_delta) delta_head(layer, seq, i % H, (E*)out);
        else if (is_kimi) kimi_head(layer, seq, i % H, (E*)out);
        else mamba_head(layer, seq, i % H, scanned);
    });
    if (is_mamba)
        for_rows(threads, tokens, inner, 4, [&](int64_t t) {
            for (int64_t g = 0; g < inner; g += r.norm_group)
                gate_then_norm<T>(scanned + t * inner + g, r.norm ? (const E*)r.norm + g : nullptr, projected + t * width + g, r.norm_group,
                                  (float)r.eps, (E*)out + t * inner + g);
        });
}

}  // namespace

void recurrent_forward(const Recurrent& r, int64_t dtype, const void* x, int64_t num_tokens, const StateStep& step,
                       const StatePools& pools, void* out, int threads) {
    with_activations(dtype, [&](auto type) { run<decltype(type)>(r, dtype, x, num_tokens, step, pools, out, threads); });
}
