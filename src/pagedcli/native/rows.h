// Rows of activations as float vectors, with the roundings of their type. Used by linears, norms and the rotary step.
#pragma once

#include <type_traits>

#include "simd.h"

// Rows<T>: load and store VL elements of type T; round: to the precision of T and back.
template <class T> struct Rows;

template <> struct Rows<F32> {
    static inline vf load(const float* p) { return loadf(p); }
    static inline void store(float* p, vf x) { storef(p, x); }
    static inline vf round(vf x) { return x; }
    static inline float load_one(const float* p) { return *p; }
};

template <> struct Rows<BF16> {
    static inline vf load(const uint16_t* p) { return from_bf16(load_any<vh>(p)); }
    static inline vf round(vf x) { return from_bf16(to_bf16(x)); }
    static inline void store(uint16_t* p, vf x) { store_any(p, to_bf16(x)); }
    static inline float load_one(const uint16_t* p) {
        uint32_t bits = (uint32_t)*p << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
};

template <> struct Rows<F16> {
    static inline vf load(const uint16_t* p) { return F16::load(p); }
    static inline void store(uint16_t* p, vf x) {
#if defined(USE_AVX512)
        store_any(p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
        for (int i = 0; i < VL; i++) p[i] = float_to_half(x[i]);
#endif
    }
    static inline vf round(vf x) {
        uint16_t h[VL];
        store(h, x);
        return load(h);
    }
    static inline float load_one(const uint16_t* p) { return half_to_float(*p); }
};

// The first min(room, VL) elements; the others are 0 when loaded and not touched when stored.
template <class T> static inline vf load_some(const typename T::Elem* p, int64_t room) {
    if (room >= VL) return Rows<T>::load(p);
    typename T::Elem part[VL] = {};
    memcpy(part, p, room * sizeof *p);
    return Rows<T>::load(part);
}
template <class T> static inline void store_some(typename T::Elem* p, vf x, int64_t room) {
    if (room >= VL) return Rows<T>::store(p, x);
    typename T::Elem part[VL];
    Rows<T>::store(part, x);
    memcpy(p, part, room * sizeof *p);
}

// Two vectors, which are neighbours.
template <class T> static inline void store_both(typename T::Elem* p, vf a, vf b) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BF16>) return store_any(p, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#endif
    Rows<T>::store(p, a), Rows<T>::store(p + VL, b);
}

// How activations [T][width] lie in memory: row after row; or as tile registers load them, 64 bytes of 16 rows after each
// other: [T / 16][width / n][16][n], n elements of 64 bytes, with room for the rows that fill the last 16.
enum Order : int { BY_ROWS, BY_TILES };

template <class E> struct Matrix {
    static constexpr int64_t ROWS = 16, COLUMNS = 64 / sizeof(E);
    E* base;
    int64_t width;
    Order order;

    // The place of an element. Up to the next multiple of COLUMNS, the elements of its row follow.
    E* at(int64_t row, int64_t column) const {
        if (order == BY_ROWS) return base + row * width + column;
        return base + row / ROWS * ROWS * width + (column / COLUMNS * ROWS + row % ROWS) * COLUMNS + column % COLUMNS;
    }
    // Elements that it takes.
    static int64_t size(int64_t rows, int64_t width) { return (rows + ROWS - 1) / ROWS * ROWS * width; }
};

constexpr float LOG2E = 1.4426950408889634f;

static inline vf sigmoid_of(vf x) {
    const vf e = exp2_of((vf)((vi)x & 0x7fffffff) * -LOG2E);
    return select_of(x >= 0, splat(1.f), e) / (1.f + e);
}

// ln(1 + e^x): what is positive of x plus ln(1 + e^-|x|), which is a series of an area hyperbolic tangent
static inline vf softplus_of(vf x) {
    const vf e = exp2_of((vf)((vi)x & 0x7fffffff) * -LOG2E), z = e / (2.f + e), w = z * z;
    const vf rest = w * (1.f / 7 + w * (1.f / 9 + w * (1.f / 11 + w * (1.f / 13 + w * (1.f / 15)))));
    return select_of(x > vf{}, x, vf{}) + 2.f * z * (1.f + w * (1.f / 3 + w * (1.f / 5 + rest)));
}

// x * sigmoid(x)
static inline vf silu_of(vf x) {
    vf magnitude = (vf)((vi)x & 0x7fffffff);
    vf e = exp2_of(magnitude * -LOG2E);
    return x * select_of(x >= 0, splat(1.f), e) / (1.f + e);
}

// tanh x, within 2e-7
static inline vf tanh_of(vf x) {
    const vf e = exp2_of(max_of(x, -x) * splat(-2.f * LOG2E)), y = (splat(1.f) - e) / (splat(1.f) + e);
    return select_of(x < vf{}, -y, y);
}

// x * P(normal variable < x), by the usual approximation with a tanh
static inline vf gelu_of(vf x) {
    constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
    return x * 0.5f * (1.f + tanh_of((x + x * x * x * 0.044715f) * SQRT_2_OVER_PI));
}

static inline vf squared_relu(vf x) { return select_of(x < vf{}, vf{}, x * x); }  // NaN stays

// a x^2 + c x where x is positive, and elsewhere b (e^min(x, d) - 1 - x) + c x, with a, b, c, d = numbers.
// Source: Huang, Deriving Activation Functions via Integration, 2024.
static inline vf xielu_of(vf x, const float* numbers) {
    const vf least = splat(numbers[3]), m = select_of(x < least, x, least);
    // near 0, e^m - 1 - m as a difference would be rounding alone
    const vf series = m * m * (0.5f + m * (1.f / 6 + m * (1.f / 24 + m * (1.f / 120 + m * (1.f / 720 + m * (1.f / 5040))))));
    const vf bend = select_of(m > splat(-0.5f), series, exp2_of(m * LOG2E) - 1.f - m) + (m - x);
    return select_of(x > vf{}, x * x * numbers[0], bend * numbers[1]) + x * numbers[2];
}

// (up + 1) * gate * sigmoid(1.702 gate) with both clamped at 7, the gate only above, rounded after each operation.
// Source: gpt-oss.
template <class T> static inline vf clamped_gate(vf gate, vf up) {
    const vf limit = splat(7.f);
    gate = select_of(gate > limit, limit, gate);  // NaN stays
    up = select_of(up > limit, limit, select_of(up < -limit, -limit, up));
    const vf share = Rows<T>::round(sigmoid_of(Rows<T>::round(gate * 1.702f)));
    return Rows<T>::round(up + 1.f) * Rows<T>::round(gate * share);
}

template <class F> static inline auto with_activations(int64_t dtype, const F& f) {
    if (dtype == 0) return f(F32{});
    if (dtype == 1) return f(BF16{});
    return f(F16{});
}
