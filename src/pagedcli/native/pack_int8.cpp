// Rounds weights to 8 bits, symmetric around zero: kind INT8, a float per output feature and a factor of a byte per 32 columns.

#include "packed_groups.h"

namespace {

constexpr int MOST_FACTOR = 255;

// Packs all features; code_of(row, q, factors) fills the codes of a row that exists and the factors of its chunks, and returns
// its scale.
template <class F> void pack(const Linear& l, uint8_t* packed, float* scales, int threads, const F& code_of) {
    const Chunks chunks(l);
    for_panels(threads, padded_rows(l) / PANEL, chunks.panel_bytes(), [&](int64_t p) {
        std::vector<uint8_t> q(chunks.padded_columns()), factors(chunks.count);
        for (int64_t lane = 0; lane < PANEL; lane++) {
            const int64_t row = source_row(l, p * PANEL + lane);
            std::fill(q.begin(), q.end(), 128);
            scales[p * PANEL + lane] = row < 0 ? 0 : code_of(row, q.data(), factors.data());
            for (int64_t c = 0; c < chunks.count; c++) {
                uint8_t* chunk = packed + p * chunks.panel_bytes() + c * chunks.bytes;
                chunk[lane] = factors[c];
                for (int64_t k = 0; k < BLOCK_COLUMNS; k += GROUP)
                    memcpy(chunk + PANEL + k * PANEL + lane * GROUP, &q[c * BLOCK_COLUMNS + k], GROUP);
            }
        }
    });
}

}  // namespace

extern "C" {

// weight [rows][columns] of dtype -> packed bytes and scales of the padded rows.
void linear_pack_int8(const Linear* linear, int64_t dtype, const void* weight, uint8_t* packed, float* scales, int threads) {
    const Linear& l = *linear;
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        pack(l, packed, scales, threads, [&](int64_t row, uint8_t* q, uint8_t* factors) {
            const E* from = (const E*)weight + row * l.columns;
            const float scale = largest_of<T>(from, l.columns) / 127 / MOST_FACTOR, inverse = scale > SMALLEST ? 1 / scale : 0;
            for (int64_t begin = 0; begin < l.columns; begin += BLOCK_COLUMNS) {
                const int64_t end = std::min(l.columns, begin + BLOCK_COLUMNS);
                const float top = largest_of<T>(from + begin, end - begin) * inverse;
                const int factor = std::clamp((int)std::ceil(top / 127), 1, MOST_FACTOR);
                for (int64_t k = begin; k < end; k++)
                    q[k] = (uint8_t)(128 + std::nearbyint(std::min(127.f, std::max(-127.f, Rows<T>::load_one(from + k) * inverse / factor))));
                factors[begin / BLOCK_COLUMNS] = (uint8_t)factor;
            }
            return scale;
        });
    });
}

// The same from codes [rows][columns], 128 more than their numbers, and the scales of the rows.
void linear_pack_int8_codes(const Linear* linear, const uint8_t* codes, const float* row_scales, uint8_t* packed, float* scales,
                            int threads) {
    const Linear& l = *linear;
    pack(l, packed, scales, threads, [&](int64_t row, uint8_t* q, uint8_t* factors) {
        std::copy_n(codes + row * l.columns, l.columns, q);
        std::fill_n(factors, (l.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, 1);
        return row_scales[row];
    });
}
}
