// Writing K and V of new tokens into the cache.

#include <cmath>
#include <cstring>

#include "paged_attention.h"
#include "parallel.h"

namespace {

// Numbers of one token and head as whole steps; returns the step's bits, of which the upper 16 are enough where `in_half`. It is
// infinite where a number is or is none: the result is then none, either.
template <class Elem> inline uint32_t whole_row(const float* from, int64_t size, bool in_half, Elem* to) {
    Largest largest;
    for (int64_t d = 0; d < size; d += VL) largest.put(loadf(from + d));
    const float top = largest.get(), step = top < INFINITY ? top / 127.f : INFINITY;
    uint32_t bits = load_any<uint32_t>(&step);
    float inverse = steps_per_unit(top, 127.f);
    if (in_half) {
        bits = (bits + 0xffff) & 0xffff0000;
        inverse = steps_per_unit(load_any<float>(&bits), 1);
    }
    for (int64_t d = 0; d < size; d += VL) store_whole(to + d, loadf(from + d) * inverse);
    return bits;
}

// K or V of one token and head as elements of an int8 cache; returns what is kept of its steps.
template <class A, class Elem> inline uint32_t whole_head(const Geometry& g, const typename A::Elem* from, bool is_key, Elem* to) {
    alignas(64) float numbers[MAX_INT8_HEAD];
    const int64_t D = g.head_dim, fast = is_key ? g.fast() : D;
    if (is_key) mix<A>(g, from, 1, numbers);
    else
        for (int64_t d = 0; d < D; d += VL) storef(numbers + d, load_some<A>(from + d, D - d));
    if (fast == D) return whole_row(numbers, D, false, to);
    return whole_row(numbers, fast, true, to) >> 16 | whole_row(numbers + fast, D - fast, true, to + fast);
}

// One token and head of a cache: its elements and, if SCALED, its scale. `head`: where the head's slots begin.
template <class T>
inline void write_row(const Geometry& g, const typename T::Elem* x, uint32_t scale, typename T::Elem* head, int64_t offset, bool is_key) {
    using Elem = typename T::Elem;
    constexpr int P = T::PAIR;
    const int64_t S = g.block_size, D = g.head_dim, lane = offset % VL;
    if (g.packed()) {
        memcpy(head + offset * SCALE<T>, &scale, SCALE<T>);
        memcpy(head + S * SCALE<T> + offset * D, x, D * sizeof(Elem));
        return;
    }
    Elem* tile = head + (offset - lane) * (D + SCALE<T>);
    memcpy(tile + lane * SCALE<T>, &scale, SCALE<T>);
    tile += HEADER<T>;
    if (is_key)
        for (int64_t d = 0; d < D; d += P) memcpy(tile + (d / P * VL + lane) * P, x + d, P * sizeof(Elem));
    else
        for (int64_t d = 0; d < D; d++) tile[(lane / P * D + d) * P + lane % P] = x[d];
}

template <class A, class T>
void write_cache(const Geometry& g, int64_t num_tokens, int threads, const void* k, const void* v,
                 const int64_t* strides, void* k_cache, void* v_cache, const int32_t* slots) {
    using Elem = typename T::Elem;
    using Row = typename A::Elem;
    const int64_t S = g.block_size;
    constexpr int64_t CHUNK = 16;  // tokens per piece of work
    // K and V in turn: of two neighbouring pieces each is the first to touch its part of a new page. Were it the same page,
    // the system would clear it twice.
    parallel_for(num_tokens <= CHUNK ? 1 : threads, (num_tokens + CHUNK - 1) / CHUNK * 2, [&](int64_t piece) {
        alignas(64) Elem whole[T::SCALED ? MAX_INT8_HEAD : 1];
        const int64_t begin = piece / 2 * CHUNK, end = std::min(num_tokens, begin + CHUNK);
        const bool is_key = piece % 2 == 0;
        if (!is_key && g.value_dim) return;
        const Row* rows = (const Row*)(is_key ? k : v);
        const int64_t token_stride = strides[is_key ? 0 : 2], head_stride = strides[is_key ? 1 : 3];
        for (int64_t i = begin; i < end; i++) {
            if (slots[i] < 0) continue;
            const int64_t block = slots[i] / S, offset = slots[i] % S;
            for (int64_t h = 0; h < g.num_kv_heads; h++) {
                const Row* from = rows + i * token_stride + h * head_stride;
                Elem* to = (Elem*)(is_key ? k_cache : v_cache) + block * g.block_stride + h * S * (g.head_dim + SCALE<T>);
                if constexpr (T::SCALED) {
                    const uint32_t scale = whole_head<A>(g, from, is_key, whole);
                    write_row<T>(g, whole, scale, to, offset, is_key);
                } else {
                    write_row<T>(g, from, 0, to, offset, is_key);
                }
            }
        }
    });
}

}  // namespace

extern "C" {

void paged_write(int dtype, const Geometry* geometry, int64_t num_tokens, int threads, const void* k, const void* v,
                 const int64_t* strides, void* k_cache, void* v_cache, const int32_t* slots) {
    with_types(dtype, *geometry, [&](auto type, auto cache_type) {
        write_cache<decltype(type), decltype(cache_type)>(*geometry, num_tokens, threads, k, v, strides, k_cache, v_cache,
                                                          slots);
        return 0;
    });
}
}
