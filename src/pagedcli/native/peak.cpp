// The rate of vector multiply-adds that live in registers: what no kernel of the same instructions can exceed.

#include "parallel.h"
#include "simd.h"

namespace {

// Twelve independent sums hide the latency of the instruction.
template <class T> float rounds(int64_t count) {
    typename T::Elem data[VL * T::PAIR] = {};
    typename T::Op op[T::OPS] = {};
    const auto block = T::load(data);
    vf acc[12] = {};
    for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) T::madd(acc[j], op, block);
        __asm__ volatile("");
    }
    vf sum = {};
    for (const vf& a : acc) sum += a;
    return sum[0];
}

float int8_rounds(int64_t count) {
#if defined(__AVX512VNNI__)
    __m512i acc[12] = {}, ones = _mm512_set1_epi8(1);
    for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) acc[j] = _mm512_dpbusd_epi32(acc[j], ones, ones);
        __asm__ volatile("");
    }
    int32_t sum = 0;
    for (const __m512i& a : acc) sum += _mm512_reduce_add_epi32(a);
    return (float)sum;
#else
    return 0;
#endif
}

}  // namespace

// Runs `count` rounds on each of `threads` threads; kind as WeightKind. Returns how many operations a round is, two per
// multiply-add; 0 where the processor has no instruction for the kind.
extern "C" int64_t native_multiply_adds(int64_t kind, int64_t count, int threads, float* out) {
    static const bool has_int8 = int8_rounds(1) != 0;
    parallel_for(threads, threads, [&](int64_t t) {
        out[t] = kind == 0   ? rounds<F32>(count)
                 : kind == 1 ? rounds<BF16>(count)
                 : kind == 2 ? rounds<F16>(count)
                             : int8_rounds(count);
    });
    const int64_t lanes = 2 * 12 * VL;
    return kind == 0 ? lanes * F32::PAIR : kind == 1 ? lanes * BF16::PAIR : kind == 2 ? lanes * F16::PAIR : has_int8 ? lanes * 4 : 0;
}
