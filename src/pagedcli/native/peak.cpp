// The rate of multiply-adds that live in registers, by path: what no kernel of this processor can exceed.

#include "int8_dot.h"
#include "parallel.h"
#include "paths.h"

namespace {

// As in a kernel: a few rows times two blocks, and enough independent sums to hide the latency of the instruction.
constexpr int ROWS_AT_ONCE = 6, BLOCKS = 2, SUMS = ROWS_AT_ONCE * BLOCKS;

// The compiler must not see that the sums are equal, nor that the operands stay the same.
template <class V> inline void hide(V& value) { __asm__ volatile("" : "+m"(value)); }
inline void may_change(const void* operands) { __asm__ volatile("" ::"r"(operands) : "memory"); }

// step(sum, row, block) for all sums, count times. All loops over sums are unrolled: gcc keeps sums in memory otherwise.
template <class V, class Step> float rounds(int64_t count, const void* operands, const Step& step) {
    V start = {}, total = {}, sums[SUMS];
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) {
        hide(start);  // not the sum itself, which has to stay in a register
        sums[i] = start;
    }
    for (int64_t n = 0; n < count; n++) {
        may_change(operands);
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) step(sums[i], i / BLOCKS, i % BLOCKS);
    }
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) total += sums[i];
    return (float)total[0];
}

template <class T> float vector_rounds(int64_t count) {
    typename T::Elem data[BLOCKS][VL * T::PAIR] = {};
    hide(data);
    const typename T::Block blocks[BLOCKS] = {T::load(data[0]), T::load(data[1])};
    typename T::Op ops[ROWS_AT_ONCE][T::OPS] = {};
    return rounds<vf>(count, ops, [&](vf& sum, int r, int b) { T::madd(sum, ops[r], blocks[b]); });
}

float int8_rounds(int64_t count) {
    vi blocks[BLOCKS] = {};
    hide(blocks);
    const vi first = blocks[0], second = blocks[1];
    const int8_t x[ROWS_AT_ONCE][GROUP] = {};
    return rounds<vi>(count, x, [&](vi& sum, int r, int b) {
        LevelSum whole{sum};
        whole.add(x[r], b ? second : first);
        sum = whole.get();
    });
}

#if defined(HAS_TILES)
float tile_rounds(int64_t count, bool int8) {
    TileRegisters t;
    t.shape(TILE_ROWS, TILE_ROWS, TILE_BYTES, TILE_ROWS);
    float sums[TILE_ROWS * TILE_ROWS];
    t.zero<0>(), t.zero<1>(), t.zero<2>(), t.zero<3>(), t.zero<4>(), t.zero<5>(), t.zero<6>(), t.zero<7>();
    for (int64_t i = 0; i < count && int8; i++)
        t.multiply_codes<0, 4, 6>(), t.multiply_codes<1, 4, 7>(), t.multiply_codes<2, 5, 6>(), t.multiply_codes<3, 5, 7>();
    for (int64_t i = 0; i < count && !int8; i++)
        t.multiply_bf16<0, 4, 6>(), t.multiply_bf16<1, 4, 7>(), t.multiply_bf16<2, 5, 6>(), t.multiply_bf16<3, 5, 7>();
    t.store<0>(sums, TILE_BYTES);
    return sums[0];
}
#endif

}  // namespace

// Runs `count` rounds of a path on each of `threads` threads. Returns how many operations a round is, two per multiply-add;
// 0 where the processor does not have the path.
extern "C" int64_t native_path_rounds(int64_t path, int64_t count, int threads, float* out) {
    if (!path_available((Path)path)) return 0;
    const int64_t lanes = 2 * SUMS * VL;
    int64_t operations = 0;
    parallel_for(threads, threads, [&](int64_t t) {
        switch (path) {
            case FMA: out[t] = vector_rounds<F32>(count); break;
#if defined(HAS_BF16_DOT)
            case BF16_DOT: out[t] = vector_rounds<BF16Dot>(count); break;
#endif
#if defined(HAS_TILES)
            case BF16_TILES: out[t] = tile_rounds(count, false); break;
            case INT8_TILES: out[t] = tile_rounds(count, true); break;
#endif
            default: out[t] = int8_rounds(count);
        }
    });
    switch (path) {
        case FMA: operations = lanes; break;
        case BF16_DOT: operations = lanes * 2; break;
        case INT8_VECTOR: operations = lanes * GROUP; break;
#if defined(HAS_TILES)
        case BF16_TILES: operations = 2 * 4 * TILE_ROWS * TILE_ROWS * TILE_BYTES / 2; break;
        case INT8_TILES: operations = 2 * 4 * TILE_ROWS * TILE_ROWS * TILE_BYTES; break;
#endif
        default: break;
    }
    return operations;
}
