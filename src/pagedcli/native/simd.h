// Vectors of the widest register of the target, exp2, and the four cache element types behind one interface.
// Portable through GCC / Clang vector extensions; intrinsics only where the compiler has no word for the instruction.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// The instruction set behind the vectors. Emulated tiles need vectors of 16 lanes, whatever the processor has.
#if defined(__AVX512F__)
#define USE_AVX512
#elif defined(EMULATE_TILES)
#elif defined(__AVX2__)
#define USE_AVX2
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define USE_NEON
#endif

#if defined(USE_AVX512) || defined(EMULATE_TILES)
constexpr int VL = 16;  // lanes of one float vector, and tokens of one cache tile
constexpr int SCORE_ROWS = 12, SCORE_TILES = 2;  // accumulators of the score kernel: 24 of 32 registers
constexpr int VALUE_ROWS = 6, VALUE_COLS = 4;    // and of the value kernel
#elif defined(USE_AVX2)
constexpr int VL = 8;
constexpr int SCORE_ROWS = 6, SCORE_TILES = 2;  // 12 of 16 registers
constexpr int VALUE_ROWS = 3, VALUE_COLS = 4;
#else
constexpr int VL = 4;
constexpr int SCORE_ROWS = 6, SCORE_TILES = 2;
constexpr int VALUE_ROWS = 3, VALUE_COLS = 4;
#endif
constexpr int SOFTMAX_ROWS = VL == 16 ? 4 : 2;  // a maximum, a sum and a base of each

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

template <class V> static inline V load_any(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V> static inline void store_any(void* p, V v) { memcpy(p, &v, sizeof v); }
static inline vf loadf(const float* p) { return load_any<vf>(p); }
static inline void storef(float* p, vf v) { store_any(p, v); }
static inline vf splat(float x) { return x - vf{}; }
// Bytes 0 to 255 as lanes, and back: gcc does both lane by lane.
static inline vi load_bytes(const uint8_t* p) {
#if defined(USE_AVX512)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(USE_AVX2)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(USE_NEON)
    const uint16x8_t wide = vmovl_u8(vcreate_u8(load_any<uint32_t>(p)));
    return (vi)vmovl_u16(vget_low_u16(wide));
#else
    typedef uint8_t vb __attribute__((vector_size(VL)));
    return __builtin_convertvector(load_any<vb>(p), vi);
#endif
}
static inline vi load_signed_bytes(const uint8_t* p) {
#if defined(USE_AVX512)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(USE_AVX2)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return (load_bytes(p) << 24) >> 24;
#endif
}
static inline void store_bytes(uint8_t* p, vi x) {
#if defined(USE_AVX512)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(USE_AVX2)
    const __m256i low = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));  // lowest bytes, four times
    store_any(p, _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1))[0]);
#elif defined(USE_NEON)
    const uint8x8_t low = vmovn_u16(vcombine_u16(vmovn_u32((uint32x4_t)x), vcreate_u16(0)));
    store_any(p, vget_lane_u32(vreinterpret_u32_u8(low), 0));
#else
    typedef uint8_t vb __attribute__((vector_size(VL)));
    store_any(p, __builtin_convertvector((vu)x, vb));
#endif
}
static inline vf max_of(vf a, vf b) {
#if defined(USE_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    vi keep = a > b;
    return (vf)((keep & (vi)a) | (~keep & (vi)b));
#endif
}
static inline vf min_of(vf a, vf b) { return -max_of(-a, -b); }
static inline float sum_of(vf v) {
#if defined(USE_AVX512)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[VL];
    storef(s, v);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
#endif
}
static inline float max_in(vf v) {
#if defined(USE_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float s[VL];
    storef(s, v);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] = s[i] > s[i + width] ? s[i] : s[i + width];
    return s[0];
#endif
}
static inline vi iota() {
    vi v;
    for (int i = 0; i < VL; i++) v[i] = i;
    return v;
}

// 2^x for x <= 0, within 2 ulp; 0 below 2^-126 and for -inf. Polynomial: Cephes exp2f.
static inline vf exp2_of(vf x) {
#if defined(USE_AVX512)
    vf clamped = max_of(x, splat(-200.f));
    vf whole = (vf)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = clamped - whole;
#else
    const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    vi alive = x > splat(-126.f);
    vf clamped = max_of(x, splat(-126.f));
    vf shifted = clamped + magic;
    vf f = clamped - (shifted - magic);
#endif
    vf p = splat(1.535336188319500e-4f);
    p = p * f + splat(1.339887440266574e-3f);
    p = p * f + splat(9.618437357674640e-3f);
    p = p * f + splat(5.550332471162809e-2f);
    p = p * f + splat(2.402264791363012e-1f);
    p = p * f + splat(6.931472028550421e-1f);
    p = p * f + splat(1.f);
#if defined(USE_AVX512)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    vi exponent = ((vi)shifted - (vi)magic) << 23;
    return (vf)(((vi)p + exponent) & alive);
#endif
}
// The same within 1.1e-4, for weights that are rounded to bf16, which changes them twenty times as much. Exact for whole
// numbers. Polynomial: minimax on [0, 1], with 1 and 2 at its ends.
static inline vf short_exp2_of(vf x) {
#if defined(USE_AVX512) && defined(__AVX512DQ__)
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    const vf magic = splat(12582912.f);
    const vi alive = x > splat(-126.f);
    const vf clamped = max_of(x, splat(-126.f)), shifted = (clamped - 0.5f) + magic, f = clamped - (shifted - magic);
#endif
    vf p = splat(0.0782679701723138f);
    p = p * f + splat(0.22630768227869633f);
    p = p * f + splat(0.6954243475489899f);
    p = p * f + splat(1.f);
#if defined(USE_AVX512) && defined(__AVX512DQ__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const vi exponent = ((vi)shifted - (vi)magic) << 23;
    return (vf)(((vi)p + exponent) & alive);
#endif
}
static inline float exp2_of(float x) { return exp2_of(splat(x))[0]; }

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13, bits;
    float scaled;
    if (rest >= 0x0f800000) {  // inf, NaN
        bits = sign | 0x70000000 | rest;
        memcpy(&scaled, &bits, 4);
        return scaled;
    }
    memcpy(&scaled, &rest, 4);
    scaled *= 5.192296858534828e33f;  // 2^112 moves the exponent and makes subnormals normal
    memcpy(&bits, &scaled, 4);
    bits |= sign;
    memcpy(&scaled, &bits, 4);
    return scaled;
}
static inline uint16_t float_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to inf
    if (bits < 0x38800000) {                       // subnormal: let a float addition round at the right place
        float magic = 0.5f, y;
        memcpy(&y, &bits, 4);
        y += magic;
        memcpy(&bits, &y, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xc8000fff + ((bits >> 13) & 1);  // rebias by -112, round half to even
    return sign | (uint16_t)(bits >> 13);
}

// Element types. PAIR elements that are summed together lie side by side in a tile; Op is what one multiplies them
// with, OPS of them per step; Block is VL x PAIR elements in registers, Acc a vector of sums. SCALED: an element counts
// in steps of its token's scale.
struct F32 {
    using Elem = float;
    using Op = float;
    using Block = vf;
    using Acc = vf;
    static constexpr int PAIR = 1, OPS = 1;
    static constexpr bool SCALED = false;
    static inline Block load(const Elem* p) { return loadf(p); }
    static inline void madd(vf& acc, const Op* a, Block b) { acc += *a * b; }
    static inline void put_op(Op* row, int i, Elem x) { row[i] = x; }
    static inline void put_ops(Op* row, int i, vf x) { storef(row + i, x); }
    static inline Elem from_float(float x) { return x; }
};

struct F16 {
    using Elem = uint16_t;
    using Op = float;
    using Block = vf;
    using Acc = vf;
    static constexpr int PAIR = 1, OPS = 1;
    static constexpr bool SCALED = false;
    static inline Block load(const Elem* p) {
#if defined(USE_AVX512)
        return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(USE_AVX2) && defined(__F16C__)
        return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(USE_NEON)
        return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
        vf v;
        for (int i = 0; i < VL; i++) v[i] = half_to_float(p[i]);
        return v;
#endif
    }
    static inline void madd(vf& acc, const Op* a, Block b) { acc += *a * b; }
    static inline void put_op(Op* row, int i, Elem x) { row[i] = half_to_float(x); }
    static inline void put_ops(Op* row, int i, vf x) { storef(row + i, x); }
    static inline Elem from_float(float x) { return float_to_half(x); }
};

static inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

typedef uint16_t vh __attribute__((vector_size(VL * 2)));

static inline vf select_of(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

// The nearest bf16, ties to even. The instruction flushes denormals.
static inline vh to_bf16(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    const vu bits = (vu)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return __builtin_convertvector((vu)select_of(x == x, (vf)rounded, (vf)(vu{} + 0x7fc0u)), vh);
#endif
}

// gcc widens halves of a vector and joins them where one instruction would do.
static inline vf from_bf16(vh x) {
#if defined(USE_AVX512)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif defined(USE_AVX2)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

struct BF16 {  // a bf16 is the upper half of a float: a shift or a mask makes it one
    using Elem = uint16_t;
    using Op = float;
    struct Block {
        vf low, high;
    };
    using Acc = vf;
    static constexpr int PAIR = 2, OPS = 2;
    static constexpr bool SCALED = false;
    static inline Block load(const Elem* p) {
        vu both = load_any<vu>(p);
        return {(vf)(both << 16), (vf)(both & 0xffff0000u)};
    }
    static inline void madd(vf& acc, const Op* a, Block b) {
        acc += a[0] * b.low;
        acc += a[1] * b.high;
    }
    static inline void put_op(Op* row, int i, Elem x) {
        uint32_t bits = (uint32_t)x << 16;
        memcpy(row + i, &bits, 4);
    }
    static inline void put_ops(Op* row, int i, vf x) { storef(row + i, x); }
    static inline Elem from_float(float x) { return float_to_bf16(x); }
};

// bf16 whose operands are pairs of elements as they lie in memory.
struct BF16Pairs {
    using Elem = uint16_t;
    using Op = uint32_t;
    using Acc = vf;
    static constexpr int PAIR = 2, OPS = 1;
    static constexpr bool SCALED = false;
    static inline void put_op(Op* row, int i, Elem x) { memcpy((char*)row + 2 * i, &x, 2); }
    static inline void put_ops(Op* row, int i, vf x) { store_any((char*)row + 2 * i, to_bf16(x)); }
    static inline Elem from_float(float x) { return float_to_bf16(x); }
};

// ... multiplied by an instruction with two products per lane and float32 sums.
#if defined(__AVX512BF16__)
#define HAS_BF16_DOT
struct BF16Dot : BF16Pairs {
    using Block = __m512bh;
    static inline Block load(const Elem* p) { return (__m512bh)_mm512_loadu_si512(p); }
    static inline void madd(vf& acc, const Op* a, Block b) {
        acc = (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)*a), b);
    }
};
#elif defined(USE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_DOT
struct BF16Dot : BF16Pairs {
    using Block = bfloat16x8_t;
    static inline Block load(const Elem* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }
    static inline void madd(vf& acc, const Op* a, Block b) {
        acc = (vf)vbfdotq_f32((float32x4_t)acc, b, vreinterpretq_bf16_u32(vdupq_n_u32(*a)));
    }
};
#endif

// ... multiplied by tile registers: paged_tiles.h and linear_tiles.h.
struct BF16Tiles : BF16Pairs {};

// Whole numbers of 8 bits in a cache, of 16 bits in what multiplies them: sums of 32 bits are exact.
struct I8 {
    using Elem = int8_t;
    using Op = int16_t;
    using Acc = vi;
    static constexpr int PAIR = 2, OPS = 2;
    static constexpr bool SCALED = true;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    using Block = __m512i;
    static inline Block load(const Elem* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
    static inline void madd(vi& acc, const Op* a, Block b) {
        acc = (vi)_mm512_dpwssd_epi32((__m512i)acc, _mm512_set1_epi32(load_any<int32_t>(a)), b);
    }
#elif defined(__AVX512BW__)
    using Block = __m512i;
    static inline Block load(const Elem* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
    static inline void madd(vi& acc, const Op* a, Block b) {
        acc += (vi)_mm512_madd_epi16(_mm512_set1_epi32(load_any<int32_t>(a)), b);
    }
#elif defined(USE_AVX2)
    using Block = __m256i;
    static inline Block load(const Elem* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
    static inline void madd(vi& acc, const Op* a, Block b) {
        acc += (vi)_mm256_madd_epi16(_mm256_set1_epi32(load_any<int32_t>(a)), b);
    }
#else
    struct Block {
        vi low, high;
    };
    static inline Block load(const Elem* p) {
        typedef uint16_t vp __attribute__((vector_size(VL * 2)));
        vi both = (vi)__builtin_convertvector(load_any<vp>(p), vu);
        return {both << 24 >> 24, both << 16 >> 24};
    }
    static inline void madd(vi& acc, const Op* a, Block b) { acc += (int32_t)a[0] * b.low + (int32_t)a[1] * b.high; }
#endif
};
