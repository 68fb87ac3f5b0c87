// Linear layers on weights that were packed once: y = x W^T + b, with what follows it done while y is in registers.
//
// Packed weight: panels of PANEL output features, in each [K / PAIR][PANEL][PAIR]: the right-hand side as the registers
// want it. An output is one sum over k in ascending order, so a row does not depend, in any bit, on the other rows, on
// their number or on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "caches.h"
#include "parallel.h"
#include "rows.h"

// What becomes of y. Each of these rounds where separate torch operations would.
enum Epilogue : int {
    STORE,         // out = y
    STORE_FLOAT,   // out = y in float32, whatever the activations' type
    ADD,           // out = out + y
    RELU2,         // out = max(y, 0)^2
    GELU,          // out = gelu(y)
    GATE_SILU,     // out = silu(y_gate) * y_up, for a weight packed with its gate and up features side by side
    GATE_GELU,     // out = gelu(y_gate) * y_up
    GATE_CLAMPED,  // out = clamped_gate(y_gate, y_up)
};

// The first three are also the types of activations. INT8 and INT4 have a float per output feature; the others are those of
// checkpoints: whole numbers, and with LEVELS4 and IQ4 the numbers of the levels in packed_groups.h.
enum WeightKind : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, CODES4, CODES8, LEVELS4, CODES5, CODES6, IQ4 };

// Mirrored by pagedcli.native.structs.
struct Linear {
    int64_t kind, rows, columns, gated;  // rows: output features, of gate and up together; columns: input features
    const void* weight;                  // packed
    const float* bias;                   // [rows], or null
    const float* scales;                 // INT8, INT4: [padded rows] of a feature, in packed order; otherwise null
    const int32_t* order;                // codes: [columns] which column of x comes first, second, ...; null: as they are
    int64_t chunk, scale_type;           // codes: columns that share a scale and a zero point, and the scales' type
    int64_t zero;                        // codes: the zero point of all; -1: each chunk has its own, or a minimum
    int64_t panel_bytes;                 // of a panel of the packed weight
    int64_t out_stride;                  // elements from one row of out to the next; 0: a row follows the other
    const Linear* next;                  // whose output features follow, of another kind; null: none
};

// x [num_tokens][columns] -> out [num_tokens][rows] (rows / 2 when gated). dtype: of x and out, but for STORE_FLOAT. x may lie BY_TILES where
// reads_tiles says so, out where writes_tiles does.
void linear_forward(const Linear& linear, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                    int threads, Order x_order = BY_ROWS, Order out_order = BY_ROWS);
void linear_forward_groups(const Linear& linear, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue epilogue,
                           int threads);

// Whether this many tokens are multiplied by tile registers that want x BY_TILES, and whether the result can lie so, too. Few
// tokens are read as they are.
bool reads_tiles(const Linear& linear, int64_t dtype, int64_t num_tokens);
bool writes_tiles(const Linear& linear, int64_t dtype, int64_t num_tokens);

// Calls f(integral constant R) for the compile-time R that equals r, 1 <= r <= MAX.
template <int MAX, class F> inline void with_rows(int64_t r, const F& f) {
    if constexpr (MAX > 1)
        if (r < MAX) return with_rows<MAX - 1>(r, f);
    f(std::integral_constant<int, MAX>{});
}

// How one call is cut into pieces: blocks of tokens whose x stays in the L2 cache times groups of panels. Each thread
// walks through neighbouring panels, so that memory is read in long streams, and helps the others when it is done.
struct Cut {
    int64_t blocks, groups, panels_per_group, panels, unit;

    // Units: bytes of one panel and of one row of x; ns_per_row of one panel on one core. Blocks begin at multiples of
    // `unit` tokens.
    Cut(int64_t num_tokens, int64_t num_panels, int64_t panel_bytes, int64_t row_bytes, double ns_per_row, int& threads,
        int64_t unit = 1)
        : panels(num_panels), unit(unit) {
        constexpr double NS_PER_BYTE = 0.025, PIECE_NS = 20e3, WORTH_A_THREAD_NS = 4e3;
        const int64_t most = native_rows_per_block(row_bytes, unit);
        blocks = (num_tokens + most - 1) / most;
        const double panel_ns = std::max(panel_bytes * NS_PER_BYTE, ns_per_row * num_tokens);
        // for less, waking a thread and waiting for its last piece would take longer
        threads = (int)std::clamp<int64_t>(panel_ns * panels / WORTH_A_THREAD_NS, 1, threads);
        const int64_t wanted = (int64_t)(PIECE_NS * blocks / panel_ns) + 1;
        panels_per_group = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, panels / (8 * threads)));
        groups = (panels + panels_per_group - 1) / panels_per_group;
    }

    // work(first token, end, first panel, end)
    template <class Work> void run(int threads, int64_t num_tokens, const Work& work) const {
        const int64_t units = (num_tokens + unit - 1) / unit;
        auto piece = [&](int64_t i) {
            const int64_t group = i / blocks, block = i % blocks;
            work(units * block / blocks * unit, std::min(num_tokens, units * (block + 1) / blocks * unit),
                 group * panels_per_group, std::min(panels, (group + 1) * panels_per_group));
        };
        parallel_ranges(threads, groups * blocks, piece);
    }
};
