// Rounds weights to 8 bits, symmetric around zero, with a float per output feature: kind INT8, whose zero point is 128.

#include "packed_groups.h"

namespace {

// One feature, whose codes are q, into its lane of a panel.
void put_feature(const std::vector<uint8_t>& q, int64_t lane, uint8_t* panel) {
    for (size_t k = 0; k < q.size(); k += GROUP) memcpy(panel + k * PANEL + lane * GROUP, q.data() + k, GROUP);
}

// Packs all features; code_of(row, q) fills q with the codes of a row that exists and returns its scale.
template <class F> void pack(const Linear& l, uint8_t* packed, float* scales, int threads, const F& code_of) {
    const int64_t stride = Chunks(l).padded_columns();
    for_panels(threads, padded_rows(l) / PANEL, PANEL * stride, [&](int64_t p) {
        std::vector<uint8_t> q(stride);
        for (int64_t i = 0; i < PANEL; i++) {
            const int64_t row = source_row(l, p * PANEL + i);
            std::fill(q.begin(), q.end(), 128);
            scales[p * PANEL + i] = row < 0 ? 0 : code_of(row, q.data());
            put_feature(q, i, packed + p * PANEL * stride);
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
        pack(l, packed, scales, threads, [&](int64_t row, uint8_t* q) {
            const E* from = (const E*)weight + row * l.columns;
            const float top = largest_of<T>(from, l.columns), inverse = top > 0 ? 127 / top : 0;
            for (int64_t k = 0; k < l.columns; k++) q[k] = (uint8_t)(128 + std::nearbyint(Rows<T>::load_one(from + k) * inverse));
            return top / 127;
        });
    });
}

// The same from codes [rows][columns], 128 more than their numbers, and the scales of the rows.
void linear_pack_int8_codes(const Linear* linear, const uint8_t* codes, const float* row_scales, uint8_t* packed, float* scales,
                            int threads) {
    const Linear& l = *linear;
    pack(l, packed, scales, threads, [&](int64_t row, uint8_t* q) {
        std::copy_n(codes + row * l.columns, l.columns, q);
        return row_scales[row];
    });
}
}
