// Packs the codes of a quantized checkpoint (packed_groups.h).

#include "packed_groups.h"
#include "packed_int4.h"

namespace {

// One feature's codes of a chunk's columns into its lane of the blocks, which are zeros.
void pack_lane(const Linear& l, const Chunks& chunks, const uint8_t* codes, int64_t first, int64_t lane, uint8_t* blocks) {
    const int64_t columns = std::min(chunks.columns, BLOCK_COLUMNS);  // of a block
    const int64_t end = std::min(l.columns, first + chunks.columns);
    for (int64_t k = first; k < end; k++) {
        const int64_t at = (k - first) % columns;
        uint8_t* block = blocks + (k - first) / columns * chunks.block_bytes;
        if (l.kind == CODES8)
            block[(at / GROUP * PANEL + lane) * GROUP + at % GROUP] = codes[k];
        else
            Nibbles::put(block, at, lane, codes[k]);
    }
}

}  // namespace

extern "C" {

// Bytes of a packed weight of 8 or 4 bits.
int64_t linear_packed_bytes(const Linear* linear) {
    const Linear& l = *linear;
    return padded_rows(l) / PANEL * (l.kind == INT8 || l.kind == INT4 ? packed_panel_bytes(l) : Chunks(l).panel_bytes());
}

// codes [rows][columns], a byte each, in the order of columns; scales [rows][groups] of scale_type; zeros [rows][groups]: what
// group_columns neighbours share -> packed. linear->chunk divides group_columns, or there is one group.
void linear_pack_codes(const Linear* linear, const uint8_t* codes, const void* scales, const uint8_t* zeros,
                       int64_t group_columns, uint8_t* packed, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    const int64_t groups = (l.columns + group_columns - 1) / group_columns;
    for_panels(threads, padded_rows(l) / PANEL, chunks.panel_bytes(), [&](int64_t p) {
        uint8_t* chunk = packed + p * chunks.panel_bytes();
        memset(chunk, 0, chunks.panel_bytes());
        for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes)
            with_activations(l.scale_type, [&](auto type) {
                using E = typename decltype(type)::Elem;
                uint8_t* blocks = chunk + chunks.bytes - chunks.blocks * chunks.block_bytes;
                for (int64_t lane = 0; lane < PANEL; lane++) {
                    const int64_t row = source_row(l, p * PANEL + lane);
                    if (row < 0) continue;
                    const int64_t group = row * groups + c * chunks.columns / group_columns;
                    ((E*)chunk)[lane] = ((const E*)scales)[group];
                    chunk[PANEL * sizeof(E) + lane] = zeros[group];
                    pack_lane(l, chunks, codes + row * l.columns, c * chunks.columns, lane, blocks);
                }
            });
    });
}

// The same with a scale and a minimum per chunk, both [rows][chunks] in float32; or, of scale_type STEPS, as bytes
// [rows][chunks][2] times steps [rows][columns / 256][2].
void linear_pack_grouped(const Linear* linear, const uint8_t* codes, const float* scales, const float* minima,
                         const int8_t* factors, const float* steps, uint8_t* packed, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    const int64_t num_steps = l.scale_type == STEPS ? l.columns / STEP_COLUMNS : 0;
    for_panels(threads, padded_rows(l) / PANEL, chunks.panel_bytes(), [&](int64_t p) {
        uint8_t* panel = packed + p * chunks.panel_bytes();
        memset(panel, 0, chunks.panel_bytes());
        for (int64_t lane = 0; lane < PANEL; lane++) {
            const int64_t row = source_row(l, p * PANEL + lane);
            if (row < 0) continue;
            for (int64_t i = 0; i < num_steps * 2; i++) ((float*)panel)[i * PANEL + lane] = steps[row * num_steps * 2 + i];
            uint8_t* chunk = panel + chunks.head_bytes;
            for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes) {
                const int64_t group = row * chunks.count + c;
                if (l.scale_type == STEPS) {
                    chunk[lane] = factors[group * 2], chunk[PANEL + lane] = factors[group * 2 + 1];
                } else {
                    ((float*)chunk)[lane] = scales[group], ((float*)chunk)[PANEL + lane] = minima[group];
                }
                uint8_t* blocks = chunk + chunks.bytes - chunks.blocks * chunks.block_bytes;
                pack_lane(l, chunks, codes + row * l.columns, c * chunks.columns, lane, blocks);
            }
        }
    });
}
}
