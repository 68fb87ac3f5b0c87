// The order of output features in a packed weight, and what becomes of a row of sums (see Epilogue in linear.h).
#pragma once

#include "linear.h"
#include "rows.h"

#if defined(USE_AVX512) || defined(EMULATE_TILES)
constexpr int MAX_ROWS = 11;  // 22 sums, 2 vectors of weights and an operand of 32 registers; 32 tokens are 11 + 11 + 10
#elif defined(USE_AVX2)
constexpr int MAX_ROWS = 5;
#else
constexpr int MAX_ROWS = 8;
#endif
constexpr int PANEL_VECTORS = 2, PANEL = PANEL_VECTORS * VL;  // output features of a panel

// How often a panel is read for this many tokens. With two passes, the second one leaves time to fetch the next panel.
constexpr int64_t FEW_TOKENS = 6;  // are one pass, where the registers suffice
static inline int64_t num_passes(int64_t tokens) {
    const int64_t needed = (tokens + MAX_ROWS - 1) / MAX_ROWS;
    return tokens > FEW_TOKENS ? std::max<int64_t>(2, needed) : needed;
}

static inline int64_t padded_rows(const Linear& l) {
    const int64_t unit = l.gated ? VL : PANEL, rows = l.gated ? l.rows / 2 : l.rows;
    return (rows + unit - 1) / unit * PANEL;
}

static inline int64_t num_panels(const Linear& l) { return padded_rows(l) / PANEL; }

// Panels [first, end) of a layer as a layer of their own, whose results lie where they lie in the whole layer's: from
// element first * panel_width(l) of a row on.
static inline int64_t panel_width(const Linear& l) { return l.gated ? VL : PANEL; }
static inline Linear panels_of(const Linear& l, int64_t first, int64_t end) {
    Linear part = l;
    const int64_t width = l.gated ? l.rows / 2 : l.rows, unit = panel_width(l);
    part.rows = (std::min(width, end * unit) - first * unit) * (l.gated ? 2 : 1);
    part.weight = (const char*)l.weight + first * l.panel_bytes;
    if (l.bias) part.bias += first * unit;
    if (l.scales) part.scales += first * PANEL;
    part.out_stride = width;
    return part;
}

// Calls work(panel) for all panels of a weight that is being packed. Neighbours are one thread's, nearly: a huge page that two
// threads are the first to touch is cleared twice by the system.
template <class Work> static void for_panels(int threads, int64_t panels, int64_t panel_bytes, const Work& work) {
    constexpr int64_t PIECES = 8;  // of each thread at least, if there are as many panels
    const int64_t each = std::max<int64_t>(1, std::min((2 << 20) / panel_bytes, panels / (PIECES * threads)));
    parallel_ranges(threads, (panels + each - 1) / each, [&](int64_t i) {
        for (int64_t p = i * each; p < std::min(panels, (i + 1) * each); p++) work(p);
    });
}

// Row of the checkpoint's weight at a place of the packed order; -1 for padding. Gated: VL gates, then their VL ups.
static inline int64_t source_row(const Linear& l, int64_t place) {
    if (!l.gated) return place < l.rows ? place : -1;
    const int64_t inner = l.rows / 2, row = place / PANEL * VL + place % VL;
    return row >= inner ? -1 : place % PANEL < VL ? row : inner + row;
}

template <class T> struct Output {
    using Elem = typename T::Elem;
    const Linear& l;
    Epilogue epilogue;
    int64_t width;     // elements of a row
    Matrix<Elem> out;  // whose rows may be longer

    Output(const Linear& l, Elem* to, Epilogue epilogue, Order order = BY_ROWS)
        : l(l), epilogue(epilogue), width(l.gated ? l.rows / 2 : l.rows), out{to, l.out_stride ? l.out_stride : width, order} {}

    // Element `at` of a row of out and those after it, plus their biases, which lie from bias[first] on.
    inline vf biased(vf y, int64_t at, int64_t first = 0) const {
        if (!l.bias) return y;
        if (at + VL <= width) return y + loadf(l.bias + first + at);
        float b[VL] = {};
        for (int i = 0; i < VL && at + i < width; i++) b[i] = l.bias[first + at + i];
        return y + loadf(b);
    }

    // The sums of one panel, [rows][PANEL], of the tokens from `token` on. Each epilogue has a loop of its own, so that a processor
    // works on several rows at once.
    void put(int64_t token, int64_t rows, int64_t panel, const float* sums) const {
        switch (epilogue) {
            case STORE: return put_rows<STORE>(token, rows, panel, sums);
            case STORE_FLOAT: return put_rows<STORE_FLOAT>(token, rows, panel, sums);
            case ADD: return put_rows<ADD>(token, rows, panel, sums);
            case RELU2: return put_rows<RELU2>(token, rows, panel, sums);
            case GELU: return put_rows<GELU>(token, rows, panel, sums);
            case GATE_SILU: return put_rows<GATE_SILU>(token, rows, panel, sums);
            case GATE_GELU: return put_rows<GATE_GELU>(token, rows, panel, sums);
            case GATE_CLAMPED: return put_rows<GATE_CLAMPED>(token, rows, panel, sums);
        }
    }

  private:
    template <Epilogue E> inline vf gated(vf gate, vf up) const {
        if constexpr (E == GATE_CLAMPED) return clamped_gate<T>(gate, up);
        return Rows<T>::round(E == GATE_SILU ? silu_of(gate) : gelu_of(gate)) * up;
    }

    template <Epilogue E> void put_rows(int64_t token, int64_t rows, int64_t panel, const float* sums) const {
        for (int64_t r = 0; r < rows; r++) put_row<E>(token + r, panel, sums + r * PANEL);
    }

    template <Epilogue E> inline void put_row(int64_t token, int64_t panel, const float* y) const {
        if constexpr (E >= GATE_SILU) {
            const int64_t at = panel * VL;
            // a row of out has as many elements as the whole layer has gates, whose biases precede those of the ups
            const vf gate = Rows<T>::round(biased(loadf(y), at)), up = Rows<T>::round(biased(loadf(y + VL), at, out.width));
            return store_some<T>(out.at(token, at), gated<E>(gate, up), width - at);
        }
        if (E == STORE && !l.bias && (panel + 1) * PANEL <= width)
            return store_both<T>(out.at(token, panel * PANEL), loadf(y), loadf(y + VL));
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const int64_t at = panel * PANEL + v * VL;
            if (at >= width) return;
            vf value = biased(loadf(y + v * VL), at);
            if constexpr (E == STORE_FLOAT) {
                store_some<F32>((float*)out.base + token * out.width + at, value, width - at);
                continue;
            }
            Elem* to = out.at(token, at);
            if constexpr (E == RELU2) value = squared_relu(Rows<T>::round(value));
            if constexpr (E == GELU) value = gelu_of(Rows<T>::round(value));
            if constexpr (E == ADD) value = Rows<T>::round(value) + load_some<T>(to, width - at);
            store_some<T>(to, value, width - at);
        }
    }
};
