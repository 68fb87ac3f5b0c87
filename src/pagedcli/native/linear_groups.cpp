// Linear layers on weights of 8 and 4 bits (packed_groups.h). Activations are rounded to 8 bits with a scale per
// 32 columns of a token: some of a real model's are 30 times as large as most. The sum of a block is exact; blocks are added in
// ascending order, so a row never depends on the others.

#include "packed_groups.h"
#include "paths.h"

#include <optional>

namespace {

// Rows whose sums registers hold, and whether chunks that are read more than twice are unpacked before. With AVX-512 only those
// of 6 bits are, for many rows: multiplications leave execution units free that unpack meanwhile.
#if defined(USE_AVX512)
constexpr int ROWS_AT_ONCE = 6;
constexpr bool UNPACKS = false;
#elif defined(USE_AVX2)
constexpr int ROWS_AT_ONCE = 2;
constexpr bool UNPACKS = true;
#else
constexpr int ROWS_AT_ONCE = 4;
constexpr bool UNPACKS = true;
#endif

inline bool unpacks_for(const Linear& l, int64_t passes) { return UNPACKS ? passes > 2 : passes > 12 && l.kind == CODES6; }

// Few rows are limited by memory. Processors fetch ahead of what is read in ascending order, as a panel is after its head: to
// fetch more than the head here gets in their way (Zen 4: 19 instead of 31 GB/s).
constexpr int FEW_ROWS = 2;
constexpr int64_t CHUNKS_AT_ONCE = 4;  // for which is fetched together, for more rows

// Activations of all tokens: bytes, and of each 32 columns what 1 is worth, for all tokens side by side. Of each chunk the sums of
// all tokens, in the form that its header needs.
struct Activations {
    int8_t* bytes;
    float* steps;         // [groups of 32 columns][tokens]
    float* sums;          // HAS_MIN: of the rounded activations
    int32_t* starts;      // HAS_ZERO: sums of the bytes times the zero point, and negative
    int16_t* step_sums;   // with Chunks::step_minima: sums in units of sum_steps; of two chunks side by side
    float* sum_steps;     // [steps of 256 columns][tokens]
    int64_t tokens, stride;
};

// sum plus the products of pairs of 16-bit numbers.
inline vi add_products(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(USE_AVX512) && defined(__AVX512BW__)
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(USE_AVX2)
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (a >> 16) * (b >> 16) + ((a << 16) >> 16) * ((b << 16) >> 16);
#endif
}

// sums[R][PANEL] of rows from `row` on begin with the minima of a panel's chunks, which are multiples of steps.
template <int R> void start_with_minima(const Activations& x, int64_t row, const Chunks& chunks, const uint8_t* panel, float* sums) {
    const uint8_t* factors = chunks.minimum_factors(panel);
    const int16_t* of_rows = x.step_sums + row * 2;
    vf acc[R][PANEL_VECTORS] = {};
    for (int64_t step = 0, c = 0; step < chunks.num_steps; step++) {
        vi whole[R][PANEL_VECTORS] = {};
        for (const int64_t end = c + STEP_COLUMNS / chunks.columns; c < end; c += 2, factors += 2 * PANEL, of_rows += 2 * x.tokens)
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vi pair = load_bytes(factors + v * VL) | load_bytes(factors + PANEL + v * VL) << 16;
                for (int r = 0; r < R; r++)
                    whole[r][v] = add_products(whole[r][v], pair, vi{} + load_any<int32_t>(of_rows + 2 * r));
            }
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const vf of_step = loadf(chunks.minimum_steps(panel) + step * PANEL + v * VL);
            for (int r = 0; r < R; r++)
                acc[r][v] -= __builtin_convertvector(whole[r][v], vf) * (of_step * x.sum_steps[step * x.tokens + row + r]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) storef(sums + r * PANEL + v * VL, acc[r][v]);
}

// What is needed next, and how much of it is fetched with each chunk.
struct Next {
    const uint8_t* at;
    int64_t bytes_per_chunk;  // 0: nothing
};

// sums[R][PANEL] of rows from `row` on, continued with chunks [first, end), which begin at `chunk`.
template <int R, class Header, class Codes>  // not inlined into the code of each type of activations: the same for all
__attribute__((noinline)) void multiply(const Activations& x, int64_t row, const Header& header, int64_t blocks,
                                        const uint8_t* chunk, int64_t first, int64_t end, Next next, float* sums) {
    constexpr int64_t COLUMNS = Codes::COLUMNS;
    vf acc[R][PANEL_VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) acc[r][v] = loadf(sums + r * PANEL + v * VL);
    const int8_t* from = x.bytes + row * x.stride + first * blocks * COLUMNS;
    for (int64_t c = first; c < end;) {
        // not in the loop over chunks: gcc would keep the sums in memory
        const int64_t stop = std::min(end, c + CHUNKS_AT_ONCE), bytes = (stop - c) * next.bytes_per_chunk;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next.at + i, 0, 2);
        next.at += bytes;
        for (; c < stop; c++) {
            const uint8_t* block = chunk + Header::BYTES;
            for (int64_t b = 0; b < (Header::HAS_MIN ? blocks : 1); b++, block += Codes::BYTES, from += COLUMNS) {
                typename Codes::Sum whole[R][PANEL_VECTORS];
                if constexpr (Header::HAS_ZERO)
                    for (int r = 0; r < R; r++)
                        for (int v = 0; v < PANEL_VECTORS; v++) whole[r][v].start(x.starts[c * x.tokens + row + r]);
                const float* steps = x.steps + (c * blocks + b) * COLUMNS / BLOCK_COLUMNS * x.tokens + row;
                Reader<Codes> reader(block);
#pragma GCC unroll 8
                for (int i = 0; i < COLUMNS / 4; i++) {
                    vi w[PANEL_VECTORS];
                    for (int v = 0; v < PANEL_VECTORS; v++) w[v] = reader.four(i, v);
                    for (int r = 0; r < R; r++)
                        for (int v = 0; v < PANEL_VECTORS; v++) whole[r][v].add(from + r * x.stride + 4 * i, w[v]);
                }
                for (int v = 0; v < PANEL_VECTORS; v++) {
                    const vf scale = header.scale(chunk, v, c * blocks * COLUMNS);
                    for (int r = 0; r < R; r++) {
                        whole[r][v].end_block();
                        acc[r][v] += __builtin_convertvector(whole[r][v].get(), vf) * (scale * steps[r]);
                    }
                }
            }
            if constexpr (Header::HAS_MIN)
                for (int v = 0; v < PANEL_VECTORS; v++) {
                    const vf min = header.min(chunk, v);
                    for (int r = 0; r < R; r++) acc[r][v] -= x.sums[c * x.tokens + row + r] * min;
                }
            chunk = block;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) storef(sums + r * PANEL + v * VL, acc[r][v]);
}

// Chunks with a byte per weight and floats for scales and minima, which more rows than registers hold read many times: calls
// f(header, blocks) with their types.
template <class F> void with_unpacked(const Linear& l, const F& f) {
    with_packing(l, [&](auto header, auto codes) {
        using Codes = decltype(codes);
        using Unpacked = Bytes<typename Codes::Sum, Codes::COLUMNS>;
        if constexpr (decltype(header)::HAS_MIN) f(FloatHeader{}, Unpacked{});
        else f(ScaleHeader<F32>{}, Unpacked{});
    });
}

constexpr int64_t most_unpacked_bytes() { return MOST_BLOCKS * (FloatHeader::BYTES + PANEL * BLOCK_COLUMNS); }

// Chunks [first, end) of a panel.
template <class Header, class Codes>
void unpack(const Header& header, const Chunks& of_layer, const uint8_t* panel, int64_t first, int64_t end, uint8_t* to) {
    const Chunks chunks = of_layer;  // a copy, as bytes may alias everything: each store would be followed by loads
    const Header own = header;
    const uint8_t* from = panel + chunks.head_bytes + first * chunks.bytes;
    for (int64_t c = first; c < end; c++, from += chunks.bytes) {
        for (int v = 0; v < PANEL_VECTORS; v++) {
            store_any(to + v * VL * 4, own.scale(from, v, c * chunks.columns));
            if constexpr (Header::HAS_MIN) store_any(to + (PANEL + v * VL) * 4, own.min(from, v));
        }
        to += Header::HAS_MIN ? FloatHeader::BYTES : ScaleHeader<F32>::BYTES;
        const uint8_t* block = from + Header::BYTES;
        for (int64_t b = 0; b < chunks.blocks; b++, block += Codes::BYTES) {
            Reader<Codes> reader(block);
#pragma GCC unroll 8
            for (int i = 0; i < Codes::COLUMNS / 4; i++)
                for (int v = 0; v < PANEL_VECTORS; v++, to += VL * GROUP) store_any(to, reader.four(i, v));
        }
        for (int64_t j = 0; j < chunks.bytes; j += 64) __builtin_prefetch(from + chunks.panel_bytes() + j, 0, 2);
    }
}

#if defined(HAS_TILES)
constexpr int64_t TILED_ROWS = 2 * TILE_ROWS;

// What multiply() computes, to the bit, for up to 32 rows and chunks with a byte per weight.
template <class Header>
void multiply_by_tiles(TileRegisters& t, const Activations& x, int64_t row, int64_t rows, const Header& header,
                       int64_t chunk_columns, const uint8_t* chunk, int64_t first, int64_t end, float* sums) {
    const int64_t columns = std::min(chunk_columns, BLOCK_COLUMNS);  // that share a scale of the activations
    const bool two = rows > TILE_ROWS;
    alignas(64) int32_t whole[TILED_ROWS * PANEL];
    const int8_t* left = x.bytes + row * x.stride + first * chunk_columns;
    t.shape((int)std::min<int64_t>(rows, TILE_ROWS), two ? (int)rows - TILE_ROWS : 0, (int)columns, (int)columns / GROUP);
    for (int64_t c = first; c < end; c++) {
        const uint8_t *own = chunk, *block = chunk + Header::BYTES;
        chunk = block + chunk_columns * PANEL;
        const float* steps = x.steps + c * chunk_columns / BLOCK_COLUMNS * x.tokens + row;
        for (; block < chunk; block += columns * PANEL, left += columns, steps += x.tokens) {
            t.zero<0>(), t.zero<1>();
            if (two) t.zero<2>(), t.zero<3>();
            t.load<6>(block, 2 * TILE_BYTES), t.load<7>(block + TILE_BYTES, 2 * TILE_BYTES);
            t.load<4>(left, x.stride);
            t.multiply_codes<0, 4, 6>(), t.multiply_codes<1, 4, 7>();
            t.store<0>(whole, PANEL * 4), t.store<1>(whole + TILE_ROWS, PANEL * 4);
            if (two) {
                t.load<5>(left + TILE_ROWS * x.stride, x.stride);
                t.multiply_codes<2, 5, 6>(), t.multiply_codes<3, 5, 7>();
                t.store<2>(whole + TILE_ROWS * PANEL, PANEL * 4), t.store<3>(whole + (PANEL + 1) * TILE_ROWS, PANEL * 4);
            }
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vf scale = header.scale(own, v, c * chunk_columns);
                for (int64_t r = 0; r < rows; r++) {
                    float* sum = sums + r * PANEL + v * VL;
                    vi exact = load_any<vi>(whole + r * PANEL + v * VL);
                    if constexpr (Header::HAS_ZERO) exact += x.starts[c * x.tokens + row + r];
                    storef(sum, loadf(sum) + __builtin_convertvector(exact, vf) * (scale * steps[r]));
                }
            }
        }
        if constexpr (Header::HAS_MIN)
            for (int v = 0; v < PANEL_VECTORS; v++) {
                const vf min = header.min(own, v);
                for (int64_t r = 0; r < rows; r++) {
                    float* sum = sums + r * PANEL + v * VL;
                    storef(sum, loadf(sum) - x.sums[c * x.tokens + row + r] * min);
                }
            }
    }
}
#endif

void start_with_all_minima(const Activations& x, int64_t row, int64_t rows, const Chunks& chunks, const uint8_t* panel, float* sums) {
    for (int64_t done = 0; done < rows; done += ROWS_AT_ONCE)
        with_rows<ROWS_AT_ONCE>(std::min<int64_t>(ROWS_AT_ONCE, rows - done), [&](auto R) {
            start_with_minima<R()>(x, row + done, chunks, panel, sums + done * PANEL);
        });
}

template <class T>
void run_piece(const Linear& l, const Chunks& chunks, const Activations& x, int64_t begin, int64_t end, int64_t first,
               int64_t last, typename T::Elem* out, Epilogue epilogue) {
    const int64_t tokens = end - begin, panels = padded_rows(l) / PANEL;
    int64_t rows_at_once = ROWS_AT_ONCE;
#if defined(HAS_TILES)
    const bool tiles = tokens > ROWS_AT_ONCE && int8_path() == INT8_TILES;
    std::optional<TileRegisters> registers;  // without permission even releasing them would be an illegal instruction
    if (tiles) registers.emplace(), rows_at_once = TILED_ROWS;
#else
    constexpr bool tiles = false;
#endif
    const int64_t passes = (tokens + rows_at_once - 1) / rows_at_once;
    const bool few = tokens <= FEW_ROWS, is_bytes = l.kind == CODES8 || l.kind == INT8;
    const bool unpacks = tiles ? !is_bytes : unpacks_for(l, passes);
    // chunks, whose bytes stay in the L1 cache if they are read several times
    const int64_t part = tiles || unpacks || (UNPACKS && passes > 1) ? MOST_BLOCKS * BLOCK_COLUMNS / chunks.columns : chunks.count;
    // what is fetched with a chunk, in each pass a part of the next panel
    const int64_t share = unpacks || few ? 0 : chunks.panel_bytes() / (passes * chunks.count);
    const Output<T> output(l, out, epilogue);
    alignas(64) uint8_t unpacked[most_unpacked_bytes()];
    static thread_local std::vector<float> room;
    room.resize(tokens * PANEL);
    float* sums = room.data();
    for (int64_t p = first; p < last; p++) {
        const uint8_t* panel = (const uint8_t*)l.weight + p * chunks.panel_bytes();
        for (int64_t i = 0; few && i < chunks.head_bytes; i += 64) __builtin_prefetch(panel + i);
        if (!chunks.step_minima) memset(sums, 0, tokens * PANEL * sizeof(float));
        for (int64_t c = 0; c < chunks.count; c += part) {
            const int64_t stop = std::min(chunks.count, c + part);
            if (unpacks)
                with_packing(l, [&](auto header, auto codes) {
                    unpack<decltype(header), decltype(codes)>(header.at(panel), chunks, panel, c, stop, unpacked);
                });
            const uint8_t* chunk = unpacks ? unpacked : panel + chunks.head_bytes + c * chunks.bytes;
            for (int64_t pass = 0; pass < passes; pass++) {
                const int64_t row = tokens * pass / passes, rows = tokens * (pass + 1) / passes - row;
                float* to = sums + row * PANEL;
                const Next next{panel + chunks.panel_bytes() + (pass * chunks.count + c) * share, p + 1 < panels ? share : 0};
                const auto run = [&](auto header, auto codes) {
                    using Codes = decltype(codes);
                    const auto own = header.at(panel);
#if defined(HAS_TILES)
                    if constexpr (Codes::BYTES == PANEL * Codes::COLUMNS)
                        if (tiles) return multiply_by_tiles(*registers, x, begin + row, rows, own, chunks.columns, chunk, c, stop, to);
#endif
                    with_rows<ROWS_AT_ONCE>(rows, [&](auto R) {
                        multiply<R(), decltype(own), Codes>(x, begin + row, own, chunks.blocks, chunk, c, stop, next, to);
                    });
                };
                if (c == 0 && chunks.step_minima) start_with_all_minima(x, begin + row, rows, chunks, panel, to);
                if (unpacks) with_unpacked(l, run);
                else with_packing(l, run);
            }
        }
        for (float* y = sums; l.scales && y < sums + tokens * PANEL; y += PANEL)
            for (int64_t v = 0; v < PANEL; v += VL) storef(y + v, loadf(y + v) * loadf(l.scales + p * PANEL + v));
        output.put(begin, tokens, p, sums);
    }
}

template <int N> int32_t sum_of(const int8_t* bytes) {
    int32_t sum = 0;
    for (int i = 0; i < N; i++) sum += bytes[i];
    return sum;
}

// Token t of the activations, padded and in the order of the weight's columns. Changes: what x points to, of this token.
template <class T>
void round_row(const Linear& l, const Chunks& chunks, const typename T::Elem* row, const Activations& x, int64_t t) {
    static thread_local std::vector<typename T::Elem> ordered;
    if (l.order) {
        ordered.resize(l.columns);
        for (int64_t k = 0; k < l.columns; k++) ordered[k] = row[l.order[k]];
        row = ordered.data();
    }
    int8_t* to = x.bytes + t * x.stride;
    float* steps = x.steps + t;
    memset(to + l.columns, 0, x.stride - l.columns);
    for (int64_t k = 0; k < x.stride; k += BLOCK_COLUMNS, steps += x.tokens) {
        const int64_t columns = std::clamp<int64_t>(l.columns - k, 0, BLOCK_COLUMNS);
        uint8_t* block = (uint8_t*)to + k;
        // a constant number of columns is compiled without loops
        *steps = columns == BLOCK_COLUMNS ? quantize_row<T>(row + k, BLOCK_COLUMNS, block) : quantize_row<T>(row + k, columns, block);
    }
    const int64_t part = std::min(chunks.columns, BLOCK_COLUMNS);
    for (int64_t c = 0; c < chunks.count; c++) {
        float total = 0;
        int32_t whole = 0;
        for (int64_t k = c * chunks.columns; k < (c + 1) * chunks.columns; k += part) {
            whole = part == BLOCK_COLUMNS ? sum_of<BLOCK_COLUMNS>(to + k) : sum_of<BLOCK_COLUMNS / 2>(to + k);
            total += (float)whole * x.steps[k / BLOCK_COLUMNS * x.tokens + t];
        }
        if (chunks.has_zero) x.starts[c * x.tokens + t] = (int32_t)-l.zero * whole;
        else x.sums[c * x.tokens + t] = total;
    }
    if (!chunks.step_minima) return;
    const int64_t per_step = STEP_COLUMNS / chunks.columns;
    for (int64_t s = 0; s < chunks.num_steps; s++) {
        const int64_t first = s * per_step, end = std::min(chunks.count, first + per_step);
        float top = 0;
        for (int64_t c = first; c < end; c++) top = std::max(top, std::fabs(x.sums[c * x.tokens + t]));
        const float inverse = top > 0 ? 32767 / top : 0;
        for (int64_t c = first; c < end; c++)
            x.step_sums[(c / 2 * x.tokens + t) * 2 + c % 2] = (int16_t)std::nearbyint(x.sums[c * x.tokens + t] * inverse);
        x.sum_steps[s * x.tokens + t] = top / 32767;
    }
}

// A row of a packed weight as numbers, with room for three more.
void widen_row(const Linear& l, const Chunks& chunks, int64_t row, float* numbers) {
    const uint8_t* panel = (const uint8_t*)l.weight + row / PANEL * chunks.panel_bytes();
    const int v = (int)(row % PANEL / VL), lane = (int)(row % VL), zero = (int)std::max<int64_t>(0, l.zero);
    with_packing(l, [&](auto header, auto codes) {
        const auto own = header.at(panel);
        const uint8_t* chunk = panel + chunks.head_bytes;
        for (int64_t c = 0; c < chunks.count; c++, chunk += chunks.bytes) {
            const int64_t first = c * chunks.columns;
            const float scale = own.scale(chunk, v, first)[lane];
            float min = 0;
            if constexpr (header.HAS_MIN) min = own.min(chunk, v)[lane];
            if (chunks.step_minima) {
                const float step = chunks.minimum_steps(panel)[first / STEP_COLUMNS * PANEL + row % PANEL];
                min = step * chunks.minimum_factors(panel)[c * PANEL + row % PANEL];
            }
            for (int64_t k = 0; k < chunks.columns && first + k < l.columns; k += 4) {
                const uint8_t* block = chunk + header.BYTES + k / codes.COLUMNS * codes.BYTES;
                const int32_t four = codes.four(block, (int)(k % codes.COLUMNS / 4), v)[lane];
                for (int i = 0; i < 4; i++) {
                    const float whole = scale * (float)((four >> (8 * i) & 255) - zero);
                    numbers[first + k + i] = whole - min;
                }
            }
        }
    });
}

}  // namespace

void linear_forward_groups(const Linear& l, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                           int threads) {
    const Chunks chunks(l);
    const int64_t stride = chunks.padded_columns(), panels = padded_rows(l) / PANEL;
    // what lies side by side for many tokens are lines of 64 bytes, an odd number: those of one token's groups lie in different
    // sets of a cache
    const int64_t num_places = num_tokens > 16 ? ((num_tokens + 15) / 16 | 1) * 16 : num_tokens;
    const int64_t num_sums = num_places * chunks.count, num_groups = (stride + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    static thread_local std::vector<int8_t> bytes;
    static thread_local std::vector<float> floats;
    static thread_local std::vector<int32_t> of_zero;
    static thread_local std::vector<int16_t> of_steps;
    bytes.resize(num_tokens * stride), floats.resize(num_places * (num_groups + chunks.num_steps) + num_sums);
    of_zero.resize(num_sums), of_steps.resize(num_sums + num_places);
    float *steps = floats.data(), *sums = steps + num_places * num_groups, *sum_steps = sums + num_sums;
    const Activations activations{bytes.data(), steps, sums, of_zero.data(), of_steps.data(), sum_steps, num_places, stride};
    const double ns_per_row = 2.0 * PANEL * l.columns / (VL * 2 * 2 * 4.0) / GROUP * 1.2;
    Cut cut(num_tokens, panels, chunks.panel_bytes(), stride, ns_per_row, threads);
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        // neighbours on one thread, as what belongs to a chunk lies side by side for them
        for_rows(num_tokens > 16 ? threads : 1, num_tokens, 16, [&](int64_t t) {
            round_row<T>(l, chunks, (const E*)x + t * l.columns, activations, t);
        });
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
            std::vector<float> numbers(l.columns + VL);
            widen_row(l, chunks, rows[r], numbers.data());
            E* to = (E*)out + r * l.columns;
            for (int64_t k = 0; k < l.columns; k += VL) store_some<T>(to + k, loadf(&numbers[k]), l.columns - k);
        });
    });
    return 0;
}
}
