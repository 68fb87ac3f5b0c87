// Products of 8-bit numbers, four at a time: activations as signed bytes, and their dot products with unsigned weights.
#pragma once

#include <algorithm>
#include <cmath>

#include "rows.h"

constexpr int GROUP = 4;  // elements of k that one 32-bit lane multiplies

#if defined(__AVX512VNNI__) || (defined(USE_AVX2) && defined(__AVXVNNI__))
#define HAS_UNSIGNED_DOT  // unsigned by signed bytes
#endif

static inline vi bytes_of(int32_t four) { return vi{} + four; }

#if defined(HAS_UNSIGNED_DOT)
static inline vi dot_unsigned(vi acc, vi bytes, vi signed_bytes) {
#if defined(USE_AVX512)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)bytes, (__m512i)signed_bytes);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)bytes, (__m256i)signed_bytes);
#endif
}
#endif

#if defined(USE_AVX512) && defined(__AVX512BW__)
static inline vi pair_sums(vi bytes, vi signed_bytes) { return (vi)_mm512_maddubs_epi16((__m512i)bytes, (__m512i)signed_bytes); }
static inline vi add_pairs(vi a, vi b) { return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b); }
static inline vi lane_sums(vi pairs) { return (vi)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
#define HAS_PAIR_SUMS
#elif defined(USE_AVX2)
static inline vi pair_sums(vi bytes, vi signed_bytes) { return (vi)_mm256_maddubs_epi16((__m256i)bytes, (__m256i)signed_bytes); }
static inline vi add_pairs(vi a, vi b) { return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b); }
static inline vi lane_sums(vi pairs) { return (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#define HAS_PAIR_SUMS
#endif

#if defined(USE_NEON)
static inline vi dot_signed_bytes(vi acc, vi w, vi x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
#else
    const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    return acc + (vi)vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b)));
#endif
}
#endif

// A sum of 4-bit weights times activations, -127 to 127: eight fours of k make a block.
struct NibbleSum {
    vi acc = {};
#if !defined(HAS_UNSIGNED_DOT) && defined(HAS_PAIR_SUMS)
    vi whole = {};
    inline void start(int32_t from) { whole = vi{} + from; }
#else
    inline void start(int32_t from) { acc = vi{} + from; }
#endif
    inline void add(const int8_t* x, vi w) {
        const vi four = bytes_of(load_any<int32_t>(x));
#if defined(HAS_UNSIGNED_DOT)
        acc = dot_unsigned(acc, w, four);
#elif defined(HAS_PAIR_SUMS)
        acc = add_pairs(acc, pair_sums(w, four));  // at most 8 x 2 x 15 x 127: fits into 16 bits
#elif defined(USE_NEON)
        acc = dot_signed_bytes(acc, w, four);
#else
        (void)four;
        for (int j = 0; j < GROUP; j++) acc += (int32_t)x[j] * ((w >> (8 * j)) & 15);
#endif
    }
#if !defined(HAS_UNSIGNED_DOT) && defined(HAS_PAIR_SUMS)
    inline void end_block() { whole += lane_sums(acc), acc = vi{}; }
    inline vi get() const { return whole; }
#else
    inline void end_block() {}
    inline vi get() const { return acc; }
#endif
};

// The same of weights 0 to 63: 16 bits hold one pair of products, not eight.
struct LevelSum {
    vi acc = {};
    inline void start(int32_t from) { acc = vi{} + from; }
    inline void add(const int8_t* x, vi w) {
        const vi four = bytes_of(load_any<int32_t>(x));
#if defined(HAS_UNSIGNED_DOT)
        acc = dot_unsigned(acc, w, four);
#elif defined(HAS_PAIR_SUMS)
        acc += lane_sums(pair_sums(w, four));
#elif defined(USE_NEON)
        acc = dot_signed_bytes(acc, w, four);
#else
        (void)four;
        for (int j = 0; j < GROUP; j++) acc += (int32_t)x[j] * ((w >> (8 * j)) & 63);
#endif
    }
    inline void end_block() {}
    inline vi get() const { return acc; }
};

// Each byte of `places`, 0 to 15, becomes the byte of the table at that place.
static inline vi looked_up(const uint8_t* table, vi places) {
#if defined(USE_AVX512) && defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)places);
#elif defined(USE_AVX2)
    return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), (__m256i)places);
#elif defined(USE_NEON)
    return (vi)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
#else
    uint8_t bytes[sizeof(vi)];
    store_any(bytes, places);
    for (auto& byte : bytes) byte = table[byte];
    return load_any<vi>(bytes);
#endif
}

// The same of 8-bit weights, 0 to 255.
struct ByteSum {
#if defined(HAS_UNSIGNED_DOT)
    vi acc = {};
    inline void start(int32_t from) { acc = vi{} + from; }
    inline void add(const int8_t* x, vi w) { acc = dot_unsigned(acc, w, bytes_of(load_any<int32_t>(x))); }
    inline void end_block() {}
    inline vi get() const { return acc; }
#else
    NibbleSum low, high;
    inline void start(int32_t from) { low.start(from); }
    inline void add(const int8_t* x, vi w) {
        low.add(x, w & (vi{} + 0x0f0f0f0f)), high.add(x, (vi)((vu)w >> 4) & (vi{} + 0x0f0f0f0f));
    }
    inline void end_block() { low.end_block(), high.end_block(); }
    inline vi get() const { return low.get() + 16 * high.get(); }
#endif
};

// The largest magnitude of a row.
template <class T> float largest_of(const typename T::Elem* x, int64_t columns) {
    vf tops = {};
    int64_t k = 0;
    for (; k + VL <= columns; k += VL) tops = max_of(tops, (vf)((vi)Rows<T>::load(x + k) & 0x7fffffff));
    float top = max_in(tops);
    for (; k < columns; k++) top = std::max(top, std::fabs(Rows<T>::load_one(x + k)));
    return top;
}

constexpr float SMALLEST = 4e-37f;  // 127 divided by less is no float

// Activations as bytes in steps of their largest / 127; returns the step.
template <class T> float quantize_row(const typename T::Elem* x, int64_t columns, uint8_t* to) {
    const float top = largest_of<T>(x, columns);
    int64_t k = 0;
    const float inverse = top > SMALLEST ? 127 / top : 0;
    const vf magic = splat(12582912.f);  // adding 1.5 * 2^23 rounds to an integer, kept in the low bits
    for (; k + VL <= columns; k += VL) {
        store_bytes(to + k, (vi)(Rows<T>::load(x + k) * inverse + magic) - (vi)magic);
    }
    for (; k < columns; k++) to[k] = (uint8_t)(int8_t)std::nearbyint(Rows<T>::load_one(x + k) * inverse);
    return top / 127;
}
