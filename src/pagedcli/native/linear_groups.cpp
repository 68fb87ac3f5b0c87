// Linear layers on the weights of quantized checkpoints (packed_groups.h). Activations are rounded to 8 bits with a scale per
// token. The sum of a chunk is exact; chunks are added in ascending order, so a row never depends on the others.

#include "packed_groups.h"
#include "paths.h"

#include <optional>

namespace {

#if defined(USE_AVX512)
constexpr int ROWS_AT_ONCE = 5;
#elif defined(USE_AVX2)
constexpr int ROWS_AT_ONCE = 2;
#else
constexpr int ROWS_AT_ONCE = 4;
#endif

// Activations of all tokens: bytes, the sums of their chunks, and what a step of a token is worth.
struct Activations {
    const int8_t* bytes;
    const float *sums, *steps;
    int64_t chunks, stride;
};

// The exact sum of a chunk, added to those before it.
inline vf add_chunk(vf acc, vi whole, vf scale, float sum_of_x, vf min) {
    acc += __builtin_convertvector(whole, vf) * scale;
    acc -= sum_of_x * min;
    return acc;
}

// sums[R][PANEL] of rows from `row` on, continued with chunks [first, end), which begin at `chunk`.
template <int R, class Header, class Codes>  // not inlined into the code of each type of activations: the same for all
__attribute__((noinline)) void multiply(const Activations& x, int64_t row, const Header& header, int64_t blocks,
                                        const uint8_t* chunk, int64_t first, int64_t end, float* sums) {
    constexpr int64_t COLUMNS = Codes::COLUMNS;
    vf acc[R][PANEL_VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = loadf(sums + r * PANEL + v * VL);
    const int8_t* from = x.bytes + row * x.stride + first * blocks * COLUMNS;
    for (int64_t c = first; c < end; c++) {
        typename Codes::Sum whole[R][PANEL_VECTORS];
        const uint8_t* block = chunk + Header::BYTES;
        for (int64_t b = 0; b < blocks; b++, block += Codes::BYTES, from += COLUMNS) {
#pragma GCC unroll 8
            for (int i = 0; i < COLUMNS / 4; i++)
                for (int v = 0; v < PANEL_VECTORS; v++) {
                    const vi w = Codes::four(block, i, v);
                    for (int r = 0; r < R; r++) whole[r][v].add(from + r * x.stride + 4 * i, w);
                }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < PANEL_VECTORS; v++) whole[r][v].end_block();
        }
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const vf scale = header.scale(chunk, v, c), min = header.min(chunk, v, c);
            for (int r = 0; r < R; r++)
                acc[r][v] = add_chunk(acc[r][v], whole[r][v].get(), scale, x.sums[(row + r) * x.chunks + c], min);
        }
        chunk = block;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) storef(sums + r * PANEL + v * VL, acc[r][v]);
}

// `rows` rows from `row` on times chunks [first, end) of a panel, which begin at `chunk`, as they were unpacked.
void multiply_unpacked(const Linear& l, int64_t blocks, const Activations& x, int64_t row, int64_t rows,
                       const uint8_t* chunk, int64_t first, int64_t end, float* sums) {
    with_rows<ROWS_AT_ONCE>(rows, [&](auto R) {
        if (l.kind == LEVELS4) multiply<R(), FloatHeader, Bytes<LevelSum>>(x, row, {}, blocks, chunk, first, end, sums);
        else multiply<R(), FloatHeader, Bytes<NibbleSum>>(x, row, {}, blocks, chunk, first, end, sums);
    });
}

// `rows` rows from `row` on times chunks [first, end) of a panel, as they are packed.
void multiply_packed(const Linear& l, const Chunks& chunks, const Activations& x, int64_t row, int64_t rows,
                     const uint8_t* panel, int64_t first, int64_t end, float* sums) {
    const uint8_t* chunk = panel + chunks.head_bytes + first * chunks.bytes;
    with_packing(l, [&](auto header, auto codes) {
        const auto own = header.at(panel, chunks.of_step());
        with_rows<ROWS_AT_ONCE>(rows, [&](auto R) {
            multiply<R(), decltype(own), decltype(codes)>(x, row, own, chunks.blocks, chunk, first, end, sums);
        });
    });
}

// Chunks with a byte per weight and floats for scales and minima, which more rows than registers hold read many times.
constexpr int64_t UNPACKED_BLOCK = Bytes<NibbleSum>::BYTES;
constexpr int64_t unpacked_bytes(int64_t blocks) { return FloatHeader::BYTES + blocks * UNPACKED_BLOCK; }

// Chunk c of a panel.
void unpack(const Linear& l, const Chunks& chunks, const uint8_t* panel, int64_t c, uint8_t* to) {
    const int64_t blocks = chunks.blocks;
    const uint8_t* from = panel + chunks.head_bytes + c * chunks.bytes;
    with_packing(l, [&](auto header, auto codes) {
        const auto own = header.at(panel, chunks.of_step());
        for (int v = 0; v < PANEL_VECTORS; v++) {
            store_any(to + v * VL * 4, own.scale(from, v, c));
            store_any(to + (PANEL + v * VL) * 4, own.min(from, v, c));
        }
        const uint8_t* block = from + header.BYTES;
        to += FloatHeader::BYTES;
        for (int64_t b = 0; b < blocks; b++, block += codes.BYTES, to += UNPACKED_BLOCK)
            for (int i = 0; i < 8; i++)
                for (int v = 0; v < PANEL_VECTORS; v++)
                    store_any(to + (i * PANEL_VECTORS + v) * VL * GROUP, codes.four(block, i, v));
    });
}

#if defined(HAS_TILES)
constexpr int64_t TILED_ROWS = 2 * TILE_ROWS;

// What multiply() computes, to the bit, for up to 32 rows and chunks with a byte per weight.
template <class Header>
void multiply_by_tiles(TileRegisters& t, const Activations& x, int64_t row, int64_t rows, const Header& header,
                       int64_t chunk_columns, const uint8_t* chunk, int64_t first, int64_t end, float* sums) {
    const int64_t columns = chunk_columns % (2 * BLOCK_COLUMNS) ? std::min(chunk_columns, BLOCK_COLUMNS) : 2 * BLOCK_COLUMNS;
    const bool two = rows > TILE_ROWS;
    alignas(64) int32_t whole[TILED_ROWS * PANEL];
    const int8_t* left = x.bytes + row * x.stride + first * chunk_columns;
    t.shape((int)std::min<int64_t>(rows, TILE_ROWS), two ? (int)rows - TILE_ROWS : 0, (int)columns, (int)columns / GROUP);
    for (int64_t c = first; c < end; c++) {
        const uint8_t *own = chunk, *block = chunk + Header::BYTES;
        chunk = block + chunk_columns * PANEL;
        t.zero<0>(), t.zero<1>();
        if (two) t.zero<2>(), t.zero<3>();
        for (; block < chunk; block += columns * PANEL, left += columns) {
            t.load<6>(block, 2 * TILE_BYTES), t.load<7>(block + TILE_BYTES, 2 * TILE_BYTES);
            t.load<4>(left, x.stride);
            t.multiply_codes<0, 4, 6>(), t.multiply_codes<1, 4, 7>();
            if (!two) continue;
            t.load<5>(left + TILE_ROWS * x.stride, x.stride);
            t.multiply_codes<2, 5, 6>(), t.multiply_codes<3, 5, 7>();
        }
        t.store<0>(whole, PANEL * 4), t.store<1>(whole + TILE_ROWS, PANEL * 4);
        if (two) t.store<2>(whole + TILE_ROWS * PANEL, PANEL * 4), t.store<3>(whole + (PANEL + 1) * TILE_ROWS, PANEL * 4);
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const vf scale = header.scale(own, v, c), min = header.min(own, v, c);
            for (int64_t r = 0; r < rows; r++) {
                float* sum = sums + r * PANEL + v * VL;
                const vi exact = load_any<vi>(whole + r * PANEL + v * VL);
                storef(sum, add_chunk(loadf(sum), exact, scale, x.sums[(row + r) * x.chunks + c], min));
            }
        }
    }
}
#endif

template <class T>
void run_piece(const Linear& l, const Chunks& chunks, const Activations& x, int64_t begin, int64_t end, int64_t first,
               int64_t last, typename T::Elem* out, Epilogue epilogue) {
    const int64_t tokens = end - begin, blocks = chunks.blocks;
    int64_t rows_at_once = ROWS_AT_ONCE;
#if defined(HAS_TILES)
    const bool tiles = tokens > ROWS_AT_ONCE && int8_path() == INT8_TILES;
    std::optional<TileRegisters> registers;  // without permission even releasing them would be an illegal instruction
    if (tiles) registers.emplace(), rows_at_once = TILED_ROWS;
#else
    constexpr bool tiles = false;
#endif
    const int64_t passes = (tokens + rows_at_once - 1) / rows_at_once;
    const bool unpacks = (passes > 1 || tiles) && l.kind != CODES8;
    const int64_t part = unpacks ? MOST_BLOCKS / blocks : chunks.count;  // chunks, whose bytes stay in the L1 cache
    const Output<T> output(l, out, epilogue);
    alignas(64) uint8_t unpacked[MOST_BLOCKS * unpacked_bytes(1)];
    static thread_local std::vector<float> room;
    room.resize(tokens * PANEL);
    float* sums = room.data();
    for (int64_t p = first; p < last; p++) {
        const uint8_t* panel = (const uint8_t*)l.weight + p * chunks.panel_bytes();
        memset(sums, 0, tokens * PANEL * sizeof(float));
        for (int64_t c = 0; c < chunks.count; c += part) {
            const int64_t stop = std::min(chunks.count, c + part);
            for (int64_t i = c; unpacks && i < stop; i++) {
                const uint8_t* from = panel + chunks.head_bytes + i * chunks.bytes;
                unpack(l, chunks, panel, i, unpacked + (i - c) * unpacked_bytes(blocks));
                for (int64_t j = 0; j < chunks.bytes; j += 64) __builtin_prefetch(from + chunks.panel_bytes() + j, 0, 2);
            }
            for (int64_t pass = 0; pass < passes; pass++) {
                const int64_t row = tokens * pass / passes, rows = tokens * (pass + 1) / passes - row;
                float* to = sums + row * PANEL;
#if defined(HAS_TILES)
                if (tiles) {
                    if (unpacks)
                        multiply_by_tiles(*registers, x, begin + row, rows, FloatHeader{}, chunks.columns, unpacked, c, stop, to);
                    else
                        with_packing(l, [&](auto header, auto) {
                            const uint8_t* chunk = panel + chunks.head_bytes + c * chunks.bytes;
                            const auto own = header.at(panel, chunks.of_step());
                            multiply_by_tiles(*registers, x, begin + row, rows, own, chunks.columns, chunk, c, stop, to);
                        });
                    continue;
                }
#endif
                if (!unpacks)
                    multiply_packed(l, chunks, x, begin + row, rows, panel, c, stop, to);
                else
                    multiply_unpacked(l, blocks, x, begin + row, rows, unpacked, c, stop, to);
            }
        }
        for (int64_t r = 0; r < tokens; r++) {
            float* y = sums + r * PANEL;
            for (int64_t v = 0; v < PANEL; v += VL) storef(y + v, loadf(y + v) * x.steps[begin + r]);
            output.put(begin + r, p, y);
        }
    }
}

// A token's activations as bytes, padded and in the order of the weight's columns; the sums of their chunks. Returns the
// value of a step.
template <class T>
float round_row(const Linear& l, const Chunks& chunks, const typename T::Elem* x, int8_t* to, float* sums) {
    static thread_local std::vector<typename T::Elem> ordered;
    if (l.order) {
        ordered.resize(l.columns);
        for (int64_t k = 0; k < l.columns; k++) ordered[k] = x[l.order[k]];
        x = ordered.data();
    }
    memset(to + l.columns, 0, chunks.padded_columns() - l.columns);
    const float step = quantize_row<T>(x, l.columns, 0, (uint8_t*)to);
    for (int64_t c = 0; c < chunks.count; c++, to += chunks.columns) {
        int32_t sum = 0;
        for (int64_t k = 0; k < chunks.columns; k++) sum += to[k];
        sums[c] = (float)sum;
    }
    return step;
}

}  // namespace

void linear_forward_groups(const Linear& l, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                           int threads) {
    const Chunks chunks(l);
    const int64_t stride = chunks.padded_columns(), panels = padded_rows(l) / PANEL;
    static thread_local std::vector<int8_t> bytes;
    static thread_local std::vector<float> floats;
    bytes.resize(num_tokens * stride);
    floats.resize(num_tokens * (chunks.count + 1));
    int8_t* quantized = bytes.data();
    float *steps = floats.data(), *sums = steps + num_tokens;
    const double ns_per_row = 2.0 * PANEL * l.columns / (VL * 2 * 2 * 4.0) / GROUP * 1.5;
    Cut cut(num_tokens, panels, chunks.panel_bytes(), stride, ns_per_row, threads);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        parallel_for(num_tokens > 16 ? threads : 1, num_tokens, [&](int64_t t) {
            const E* row = (const E*)x + t * l.columns;
            steps[t] = round_row<T>(l, chunks, row, quantized + t * stride, sums + t * chunks.count);
        });
        const Activations activations{quantized, sums, steps, chunks.count, stride};
        cut.run(threads, num_tokens, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
            run_piece<T>(l, chunks, activations, begin, end, first, last, (E*)out, epilogue);
        });
    });
}

extern "C" {

// Rows of a packed weight as numbers, computed in float: the embedding of a model that shares it with its output layer.
// 0, or 1 if a row does not exist; then nothing is read.
int linear_widen_rows(const Linear* linear, int64_t dtype, const int64_t* rows, int64_t num_rows, void* out, int threads) {
    const Linear& l = *linear;
    for (int64_t r = 0; r < num_rows; r++)
        if (rows[r] < 0 || rows[r] >= l.rows) return 1;
    const Chunks chunks(l);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        parallel_for(num_rows > 8 ? threads : 1, num_rows, [&](int64_t r) {
            const uint8_t* panel = (const uint8_t*)l.weight + rows[r] / PANEL * chunks.panel_bytes();
            const int v = (int)(rows[r] % PANEL / VL), lane = (int)(rows[r] % VL);
            std::vector<float> numbers(l.columns + VL);
            with_packing(l, [&](auto header, auto codes) {
                const auto own = header.at(panel, chunks.of_step());
                const uint8_t* chunk = panel + chunks.head_bytes;
                for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes) {
                    const float scale = own.scale(chunk, v, c)[lane], min = own.min(chunk, v, c)[lane];
                    for (int64_t k = 0; k < chunks.columns && c * chunks.columns + k < l.columns; k += 4) {
                        const uint8_t* block = chunk + header.BYTES + k / codes.COLUMNS * codes.BYTES;
                        const int32_t four = codes.four(block, (int)(k % codes.COLUMNS / 4), v)[lane];
                        for (int i = 0; i < 4; i++) {
                            const float whole = scale * (float)(four >> (8 * i) & 255);
                            numbers[c * chunks.columns + k + i] = whole - min;
                        }
                    }
                }
            });
            E* to = (E*)out + r * l.columns;
            for (int64_t k = 0; k < l.columns; k += VL) store_some<T>(to + k, loadf(&numbers[k]), l.columns - k);
        });
    });
    return 0;
}
}
