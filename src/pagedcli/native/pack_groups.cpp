// Packs the codes of a quantized checkpoint (packed_groups.h).

#include "packed_groups.h"
#include "packed_int4.h"

namespace {

// One feature's codes of a chunk's columns into its lane of the blocks, which are zeros.
template <class Codes>
void pack_lane(const Linear& l, const Chunks& chunks, Codes, const uint8_t* codes, int64_t first, int64_t lane, uint8_t* blocks) {
    const int64_t count = std::min(l.columns - first, chunks.columns);
    for (int64_t k = 0; k < count; k += GROUP) {
        uint32_t four = 0;
        memcpy(&four, codes + first + k, std::min<int64_t>(GROUP, count - k));
        Codes::put_four(blocks + k / Codes::COLUMNS * Codes::BYTES, k % Codes::COLUMNS / GROUP, lane, four);
    }
}

// Calls f(panel, lane, row, with_packing's codes) for each feature of each panel, whose bytes are zeros.
template <class F> void pack_panels(const Linear& l, const Chunks& chunks, uint8_t* packed, int threads, const F& f) {
    for_panels(threads, padded_rows(l) / PANEL, chunks.panel_bytes(), [&](int64_t p) {
        uint8_t* panel = packed + p * chunks.panel_bytes();
        memset(panel, 0, chunks.panel_bytes());
        with_packing(l, [&](auto, auto codes) {
            for (int64_t lane = 0; lane < PANEL; lane++)
                if (const int64_t row = source_row(l, p * PANEL + lane); row >= 0) f(panel, lane, row, codes);
        });
    });
}

}  // namespace

extern "C" {

// Bytes of a packed weight of 8 or 4 bits.
int64_t linear_packed_bytes(const Linear* linear) {
    const Linear& l = *linear;
    return padded_rows(l) / PANEL * (l.kind == INT8 || l.kind == INT4 ? packed_panel_bytes(l) : Chunks(l).panel_bytes());
}

// codes [rows][columns], a byte each, in the order of columns; scales [rows][groups] of scale_type; zeros [rows][groups], or
// null if the layer has one: what group_columns neighbours share -> packed. linear->chunk divides group_columns, or there is
// one group.
void linear_pack_codes(const Linear* linear, const uint8_t* codes, const void* scales, const uint8_t* zeros,
                       int64_t group_columns, uint8_t* packed, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    const int64_t groups = (l.columns + group_columns - 1) / group_columns, scale_bytes = l.scale_type == FLOAT32 ? 4 : 2;
    pack_panels(l, chunks, packed, threads, [&](uint8_t* chunk, int64_t lane, int64_t row, auto layout) {
        for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes) {
            const int64_t group = row * groups + c * chunks.columns / group_columns;
            memcpy(chunk + lane * scale_bytes, (const char*)scales + group * scale_bytes, scale_bytes);
            if (zeros) chunk[PANEL * scale_bytes + lane] = zeros[group];
            uint8_t* blocks = chunk + chunks.bytes - chunks.blocks * chunks.block_bytes;
            pack_lane(l, chunks, layout, codes + row * l.columns, c * chunks.columns, lane, blocks);
        }
    });
}

// The same with a scale and a minimum per chunk, both [rows][chunks] in float32; or, of scale_type STEPS, as bytes
// [rows][chunks] times steps [rows][columns / 256]. Without minima the layer has a zero point.
void linear_pack_grouped(const Linear* linear, const uint8_t* codes, const float* scales, const float* minima,
                         const int8_t* factors, const float* steps, const uint8_t* minimum_factors, const float* minimum_steps,
                         uint8_t* packed, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    pack_panels(l, chunks, packed, threads, [&](uint8_t* panel, int64_t lane, int64_t row, auto layout) {
        for (int64_t i = 0; i < chunks.num_steps; i++) {
            float* own = (float*)panel + i * PANEL + lane;
            own[0] = steps[row * chunks.num_steps + i];
            if (chunks.step_minima) own[chunks.num_steps * PANEL] = minimum_steps[row * chunks.num_steps + i];
        }
        uint8_t* chunk = panel + chunks.head_bytes;
        for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes) {
            const int64_t group = row * chunks.count + c;
            if (l.scale_type == STEPS)
                chunk[lane] = factors[group];
            else
                ((float*)chunk)[lane] = scales[group], ((float*)chunk)[PANEL + lane] = minima[group];
            if (chunks.step_minima)
                ((uint8_t*)chunks.minimum_factors(panel))[c * PANEL + lane] = minimum_factors[group];
            uint8_t* blocks = chunk + chunks.bytes - chunks.blocks * chunks.block_bytes;
            pack_lane(l, chunks, layout, codes + row * l.columns, c * chunks.columns, lane, blocks);
        }
    });
}
}
