// The KV cache of a CPU: [N, G, S, D], cut into tiles of VL tokens of one head. In a tile, K is [D / PAIR][VL][PAIR] and V
// is [VL / PAIR][D][PAIR]: both are the right-hand side that a matrix kernel wants, so a page is read as it lies. Where S or
// D is not a multiple of VL the cache is plain [N, G, S, D] and a tile is packed before use ("packed" below).
//
// An int8 cache is [N, G, S, D + 4] bytes: float scales of the VL tokens before each tile (of all S tokens before a plain
// head), then the elements, each token of a head in steps of its largest / 127. K is kept in another order and mixed, see mix, in
// two parts, whose steps are the lower and the upper half of what is otherwise a float.
//
// Where V is the first value_dim numbers of K, as in latent attention, only K is kept: plain, and both tiles are packed of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rows.h"
#include "simd.h"

constexpr int MAX_INT8_HEAD = 1024;  // head_dim of an int8 cache, see query_limit

struct Geometry {
    int64_t num_blocks, block_size, num_heads, num_kv_heads, head_dim, int8_cache;
    int64_t block_stride;  // elements from one block to the next, in K and in V
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t value_dim;     // V is the first so many numbers of K; 0: V is kept, too
    bool packed() const { return value_dim || block_size % VL || head_dim % VL; }
    int64_t values() const { return value_dim ? value_dim : head_dim; }
    bool fits_tile_registers() const { return head_dim % 32 == 0 && values() % 32 == 0; }
    // Sizes of V and K as vectors see them.
    int64_t width() const { return (values() + VL - 1) / VL * VL; }
    int64_t key_width() const { return (head_dim + VL - 1) / VL * VL; }
    // Elements of the first part of K: all but those of the quarter of the rotary pairs that turn slowest, if pairs are as
    // far apart as they can be. What biases leave in K turns with them, so outliers are there.
    int64_t fast() const { return value_dim || head_dim % 64 ? head_dim : head_dim / 4 * 3; }
    // Neighbouring elements of K that are mixed; where V is read from K, as it is, none are.
    int64_t mixed() const {
        const int64_t size = fast() < head_dim ? head_dim / 4 : head_dim;
        return value_dim ? 1 : size & -size;
    }
    // Whole numbers that an element of a query is rounded to: the sum of its products with 127 still fits into 32 bits.
    float query_limit() const { return (float)std::min<int64_t>(32767, INT32_MAX / 127 / head_dim); }
};

// Bytes of scale per token and head, and elements before those of a tile.
template <class C> constexpr int64_t SCALE = C::SCALED ? sizeof(float) : 0;
template <class C> constexpr int64_t HEADER = VL * SCALE<C>;

// The largest magnitude among what was put in; NaN or infinite if one is, as their bits are the largest.
struct Largest {
    vi bits = {};
    void put(vf x) {
        const vi magnitude = (vi)x & 0x7fffffff, larger = magnitude > bits;
        bits = (larger & magnitude) | (~larger & bits);
    }
    float get() const {
#if defined(USE_AVX512)
        const int32_t top = _mm512_reduce_max_epi32((__m512i)bits);
        return load_any<float>(&top);
#endif
        int32_t of[VL];
        store_any(of, bits);
        for (int width = VL / 2; width; width /= 2)
            for (int i = 0; i < width; i++) of[i] = std::max(of[i], of[i + width]);
        return load_any<float>(of);
    }
};

// Rounds to whole numbers of E's width: adding 1.5 * 2^23 leaves them in the low bits.
template <class E> static inline void store_whole(E* to, vf x) {
    typedef E vw __attribute__((vector_size(VL * sizeof(E))));
    store_any(to, __builtin_convertvector((vi)(x + splat(12582912.f)), vw));
}

// How many whole numbers up to `limit` a unit is, so that the largest becomes `limit`. Below 1e-30 all are 0.
static inline float steps_per_unit(float largest, float limit) { return largest > 1e-30f ? limit / largest : 0; }

// x [D] of type A as floats, times factor, those of the first part first, and each `mixed` neighbours multiplied by the Hadamard
// matrix of that size. A query and a key that are both mixed have `mixed` times their product, and an outlier in a channel is
// spread over all of them, so that it does not set the step. Source: QuaRot (Ashkboos et al., 2024).
template <class A> inline void mix(const Geometry& g, const typename A::Elem* x, float factor, float* to) {
    const int64_t D = g.head_dim, fast = g.fast() / 2, slow = D / 2 - fast;
    float as_given[MAX_INT8_HEAD];
    float* from = fast < D / 2 ? as_given : to;
    for (int64_t d = 0; d < D; d += VL) storef(from + d, load_some<A>(x + d, D - d) * factor);
    if (from != to)
        for (int64_t half = 0; half < 2; half++) {
            std::copy_n(from + half * D / 2, fast, to + half * fast);
            std::copy_n(from + half * D / 2 + fast, slow, to + 2 * fast + half * slow);
        }
    const int64_t mixed = g.mixed();
    for (int64_t half = 1; half < mixed; half *= 2)
        for (int64_t begin = 0; begin < D; begin += 2 * half)
            for (int64_t d = begin; d < begin + half; d++) {
                const float a = to[d], b = to[d + half];
                to[d] = a + b, to[d + half] = a - b;
            }
}

// Calls f with the type of activations and that of the cache.
template <class F> int with_types(int dtype, const Geometry& g, const F& f) {
    return with_activations(dtype, [&](auto type) { return g.int8_cache ? f(type, I8{}) : f(type, type); });
}
