// Writing K and V of new tokens into the cache.

#include <cmath>
#include <cstring>

#include "paged_attention.h"
#include "parallel.h"

namespace {

// K or V [D] of one token and head as elements and scale of the cache type T. A scale is infinite where an
// element is or is no number: the result is then none, either.
template <class T> inline float whole_row(const float* from, int64_t head_dim, typename T::Elem* to) {
    Largest largest;
    for (int64_t d = 0; d < head_dim; d += VL) largest.put(loadf(from + d));
    const float top = largest.get(), inverse = steps_per_unit(top, 127.f);
    for (int64_t d = 0; d < head_dim; d += VL) store_whole(to + d, loadf(from + d) * inverse);
    return top < INFINITY ? top / 127.f : INFINITY;
}

// One token and head of a cache: its elements and, if SCALED, its scale. `head`: where the head's slots begin.
template <class T>
inline void write_row(const Geometry& g, const typename T::Elem* x, float scale, typename T::Elem* head, int64_t offset, bool is_key) {
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
        alignas(64) float numbers[T::SCALED ? MAX_INT8_HEAD : 1];
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
                    mix<A>(from, g.head_dim, is_key ? g.mixed() : 1, 1, numbers);
                    const float scale = whole_row<T>(numbers, g.head_dim, whole);
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
