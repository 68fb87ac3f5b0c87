// Packs the codes of a quantized checkpoint (packed_groups.h).

#include "packed_groups.h"

#include <vector>

namespace {

constexpr uint64_t EACH = 0x0101010101010101;

// A byte for each bit, the lowest first.
inline uint64_t spread(uint8_t bits) { return ((bits * EACH & 0x8040201008040201) + 0x7f * EACH) >> 7 & EACH; }

// The bits of a plane into the codes of a block; of the first one with those that are flipped.
void add_plane(const Plane& plane, const uint8_t* block, bool first, int64_t flipped, uint8_t* codes) {
    const uint64_t mask = ((1 << plane.bits) - 1) * EACH;
    const auto add = [&](uint64_t bits) {
        uint64_t eight = flipped * EACH;
        if (!first) memcpy(&eight, codes, 8);
        eight ^= bits << plane.shift;
        memcpy(codes, &eight, 8), codes += 8;
    };
    for (int64_t at = plane.first; at < plane.end; at += plane.width) {
        if (plane.width == 1) add(spread(block[at]));
        else
            for (int64_t down = 0; down < 8; down += plane.bits)
                for (int64_t i = 0; i < plane.width; i += 8) {
                    uint64_t eight;
                    memcpy(&eight, block + at + i, 8);
                    add(eight >> down & mask);
                }
    }
}

// The codes of a row, a byte each.
void read_row(const Linear& l, const Codes& codes, int64_t row, uint8_t* to) {
    if (!codes.num_planes) {
        memcpy(to, codes.bytes + row * l.columns, l.columns);
        return;
    }
    const int64_t blocks = l.columns / codes.block_columns;
    const uint8_t* block = codes.bytes + row * blocks * codes.block_bytes;
    for (int64_t b = 0; b < blocks; b++, block += codes.block_bytes, to += codes.block_columns)
        for (int64_t i = 0; i < codes.num_planes; i++) add_plane(codes.planes[i], block, i == 0, codes.flipped, to);
}

// The codes [VL][stride] of the features of vector v into a panel's blocks.
template <class Layout> void pack_vector(const Chunks& chunks, Layout, const uint8_t* codes, int64_t stride, int v, uint8_t* panel) {
    uint8_t* chunk = panel + chunks.head_bytes;
    for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes) {
        uint8_t* block = chunk + chunks.bytes - chunks.blocks * chunks.block_bytes;
        for (int64_t b = 0; b < chunks.blocks; b++, block += Layout::BYTES, codes += Layout::COLUMNS) {
            alignas(64) int32_t fours[Layout::COLUMNS / GROUP][VL];
            for (int lane = 0; lane < VL; lane++)
                for (int i = 0; i < Layout::COLUMNS / GROUP; i++) memcpy(&fours[i][lane], codes + lane * stride + i * GROUP, GROUP);
            Layout::store(block, v, (const vi*)fours);
        }
    }
}

// Packs all codes, and calls put_header(panel, lane, row) for each feature of each panel, whose headers are zeros.
template <class F> void pack_panels(const Linear& l, const Chunks& chunks, const Codes& codes, uint8_t* packed, int threads, const F& put_header) {
    const int64_t stride = chunks.padded_columns() + 64;  // else the codes of all lanes would compete for the same lines of a cache
    for_panels(threads, padded_rows(l) / PANEL, chunks.panel_bytes(), [&](int64_t p) {
        uint8_t* panel = packed + p * chunks.panel_bytes();
        memset(panel, 0, chunks.panel_bytes());
        std::vector<uint8_t> room(VL * stride);
        for (int v = 0; v < PANEL_VECTORS; v++) {
            for (int64_t lane = 0; lane < VL; lane++) {
                const int64_t row = source_row(l, p * PANEL + v * VL + lane);
                if (row >= 0) read_row(l, codes, row, &room[lane * stride]), put_header(panel, v * VL + lane, row);
                else memset(&room[lane * stride], 0, stride);
            }
            with_packing(l, [&](auto, auto layout) { pack_vector(chunks, layout, room.data(), stride, v, panel); });
        }
    });
}

}  // namespace

extern "C" {

// Bytes of a packed weight of 8 or 4 bits.
int64_t linear_packed_bytes(const Linear* linear) {
    const Linear& l = *linear;
    return padded_rows(l) / PANEL * Chunks(l).panel_bytes();
}

// codes in the order of columns; scales [rows][groups] of scale_type; zeros [rows][groups], or null if the layer has one: what
// group_columns neighbours share -> packed. linear->chunk divides group_columns, or there is one group.
void linear_pack_codes(const Linear* linear, const Codes* codes, const void* scales, const uint8_t* zeros,
                       int64_t group_columns, uint8_t* packed, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    const int64_t groups = (l.columns + group_columns - 1) / group_columns, scale_bytes = l.scale_type == FLOAT32 ? 4 : 2;
    pack_panels(l, chunks, *codes, packed, threads, [&](uint8_t* chunk, int64_t lane, int64_t row) {
        for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes) {
            const int64_t group = row * groups + c * chunks.columns / group_columns;
            memcpy(chunk + lane * scale_bytes, (const char*)scales + group * scale_bytes, scale_bytes);
            if (zeros) chunk[PANEL * scale_bytes + lane] = zeros[group];
        }
    });
}

// The same with a scale and a minimum per chunk, both [rows][chunks] in float32; or, of scale_type STEPS, as bytes
// [rows][chunks] times steps [rows][columns / 256]. Without minima the layer has a zero point.
void linear_pack_grouped(const Linear* linear, const Codes* codes, const float* scales, const float* minima,
                         const int8_t* factors, const float* steps, const uint8_t* minimum_factors, const float* minimum_steps,
                         uint8_t* packed, int threads) {
    const Linear& l = *linear;
    const Chunks chunks(l);
    pack_panels(l, chunks, *codes, packed, threads, [&](uint8_t* panel, int64_t lane, int64_t row) {
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
        }
    });
}
}
