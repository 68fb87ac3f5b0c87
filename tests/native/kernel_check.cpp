// Runs the native kernels against plain loops in double precision, for processors on which Python does not run here: built
// with the kernels' sources by test_other_processors.py. Prints what is wrong; the exit status is the number of faults.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "experts.h"
#include "linear.h"
#include "packed_groups.h"
#include "paged_attention.h"
#include "paths.h"
#include "rows.h"

extern "C" {
int64_t linear_padded_rows(const Linear*);
int64_t linear_num_panels(const Linear*);
void linear_pack(const Linear*, const void* weight, void* packed, int threads);
void linear_pack_int8(const Linear*, int64_t dtype, const void* weight, uint8_t* packed, float* scales, int threads);
int64_t linear_packed_bytes(const Linear*);
int linear_widen_rows(const Linear*, int64_t dtype, const int64_t* rows, int64_t num_rows, void* out, int threads);
void linear_pack_int4(const Linear*, int64_t dtype, const void* weight, uint8_t* packed, float* scales, int threads);
}

namespace {

int faults = 0;
std::mt19937 generator(7);

void expect(bool ok, const char* what, double value) {
    if (ok) return;
    faults++;
    printf("wrong: %s (%g)\n", what, value);
}

// Random numbers of type T: as stored, and in double precision.
template <class T> struct Values {
    std::vector<typename T::Elem> stored;
    std::vector<double> exact;
    explicit Values(int64_t count) : stored(count), exact(count) {
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < count; i++) {
            stored[i] = T::from_float(normal(generator));
            exact[i] = Rows<T>::load_one(&stored[i]);
        }
    }
};

double relative_error(const std::vector<double>& ours, const std::vector<double>& exact) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < ours.size(); i++) {
        difference += (ours[i] - exact[i]) * (ours[i] - exact[i]);
        size += exact[i] * exact[i];
    }
    return std::sqrt(difference / size);
}

template <class E> std::vector<E> part(const std::vector<E>& x, int64_t begin, int64_t count) {
    return std::vector<E>(x.begin() + begin, x.begin() + begin + count);
}

template <class T> void check_linear(int64_t dtype, int64_t kind, double tolerance, const char* name) {
    using E = typename T::Elem;
    const int64_t rows = 97, columns = 352, tokens = 23;
    const Values<T> weight(rows * columns), x(tokens * columns);
    Linear l = {};
    l.kind = kind, l.rows = rows, l.columns = columns;
    const int64_t padded = linear_padded_rows(&l);
    std::vector<char> packed(padded * columns * 4);
    std::vector<float> scales(padded);
    l.weight = packed.data();
    if (kind == INT8 || kind == INT4) l.scales = scales.data(), l.chunk = BLOCK_COLUMNS, l.zero = kind == INT8 ? 128 : -1;
    if (kind == INT8)
        linear_pack_int8(&l, dtype, weight.stored.data(), (uint8_t*)packed.data(), scales.data(), 1);
    else if (kind == INT4)
        linear_pack_int4(&l, dtype, weight.stored.data(), (uint8_t*)packed.data(), scales.data(), 1);
    else
        linear_pack(&l, weight.stored.data(), packed.data(), 1);
    std::vector<E> out(tokens * rows), alone(rows);
    linear_forward(l, dtype, x.stored.data(), tokens, out.data(), STORE, 2);
    std::vector<double> ours(tokens * rows), exact(tokens * rows);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            ours[t * rows + r] = Rows<T>::load_one(&out[t * rows + r]);
            for (int64_t k = 0; k < columns; k++) exact[t * rows + r] += x.exact[t * columns + k] * weight.exact[r * columns + k];
        }
    const double error = relative_error(ours, exact);
    expect(error < tolerance, name, error);
    for (int64_t t = 0; t < tokens; t++) {
        linear_forward(l, dtype, x.stored.data() + t * columns, 1, alone.data(), STORE, 1);
        expect(alone == part(out, t * rows, rows), "a row depends on the others", t);
    }
}

// Weights of a quantized checkpoint, and activations that rounding leaves as they are: only the order of sums may differ.
void check_codes(int64_t kind, int64_t group) {
    const int64_t rows = 97, columns = 352, tokens = 23, groups = (columns + group - 1) / group, values = kind == CODES8 ? 256 : 16;
    std::vector<uint8_t> codes(rows * columns), zeros(rows * groups);
    std::vector<float> scales(rows * groups), x(tokens * columns), out(tokens * rows), alone(rows);
    for (auto& code : codes) code = generator() % values;
    for (auto& zero : zeros) zero = generator() % values;
    for (auto& scale : scales) scale = kind == LEVELS4 ? std::ldexp(1.f, (int)(generator() % 9) - 4) : 0.5f + generator() % 1000 / 1000.f;
    std::vector<BF16::Elem> halves;
    for (float scale : scales) halves.push_back(BF16::from_float(scale));
    for (auto& each : x) each = 127 * ((float)(generator() % 3) - 1);
    Linear l = {};
    l.kind = kind, l.rows = rows, l.columns = columns, l.chunk = group, l.scale_type = kind == LEVELS4 ? BFLOAT16 : FLOAT32, l.zero = -1;
    std::vector<uint8_t> packed(linear_packed_bytes(&l));
    const Codes bytes = {codes.data()};
    linear_pack_codes(&l, &bytes, kind == LEVELS4 ? (const void*)halves.data() : scales.data(), zeros.data(), group, packed.data(), 1);
    if (kind == CODES4) {  // the same from blocks of 32 codes: the lower halves of 16 bytes, then the upper ones
        std::vector<uint8_t> blocks, again(packed.size());
        for (int64_t i = 0; i < rows * columns; i += 32)
            for (int64_t j = i; j < i + 16; j++) blocks.push_back(codes[j] | codes[j + 16] << 4);
        const Codes planes = {blocks.data(), 16, 32, 0, 1, {{0, 16, 4, 16, 0}}};
        linear_pack_codes(&l, &planes, scales.data(), zeros.data(), group, again.data(), 1);
        expect(again == packed, "codes from blocks", group);
    }
    l.weight = packed.data();
    linear_forward(l, FLOAT32, x.data(), tokens, out.data(), STORE, 2);
    std::vector<double> ours(out.begin(), out.end()), exact(tokens * rows);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < columns; k++) {
                const int64_t at = r * groups + k / group;
                const int number = kind == LEVELS4 ? E2M1[codes[r * columns + k]] : codes[r * columns + k];
                exact[t * rows + r] += x[t * columns + k] * (number - zeros[at]) * (double)scales[at];
            }
    const double error = relative_error(ours, exact);
    expect(error < 1e-6, kind == CODES4 ? "4-bit codes" : kind == CODES8 ? "8-bit codes" : "levels", error);
    for (int64_t t = 0; t < tokens; t++) {
        linear_forward(l, FLOAT32, x.data() + t * columns, 1, alone.data(), STORE, 1);
        expect(alone == part(out, t * rows, rows), "a row of codes depends on the others", t);
    }
}

// Weights of a GGUF file: of each group a scale and a minimum, in float or as bytes times steps; or a scale, and a zero point of
// the layer (-1: minima).
void check_grouped(int64_t kind, int bits, int64_t group, int64_t scale_type, int64_t zero) {
    const int64_t rows = 97, columns = 512, tokens = 23, groups = columns / group, num_steps = columns / STEP_COLUMNS;
    std::vector<uint8_t> codes(rows * columns), minimum_factors(rows * groups);
    std::vector<int8_t> factors(rows * groups);
    std::vector<float> steps(rows * num_steps), minimum_steps(steps.size()), scales(rows * groups), minima(rows * groups);
    std::vector<float> x(tokens * columns), out(tokens * rows), alone(rows), widened(columns);
    for (auto& code : codes) code = generator() % (1 << bits);
    for (auto& factor : factors) factor = (int8_t)(generator() % 256);
    for (auto& factor : minimum_factors) factor = generator() % 64;
    for (auto& step : steps) step = 0.5f + generator() % 1000 / 1000.f;
    for (auto& step : minimum_steps) step = 0.5f + generator() % 1000 / 1000.f;
    std::vector<uint16_t> halves;
    for (int64_t i = 0; i < rows * groups; i++) {
        const int64_t step = i / groups * num_steps + i % groups * group / STEP_COLUMNS;
        scales[i] = factors[i] * (scale_type == STEPS ? steps[step] : 0.125f);
        minima[i] = zero < 0 ? minimum_factors[i] * minimum_steps[step] : 0;
        const auto half = kind == LEVELS4 ? BF16::from_float(scales[i]) : F16::from_float(scales[i]);
        halves.push_back(0), memcpy(&halves.back(), &half, 2);
    }
    for (auto& each : x) each = 127 * ((float)(generator() % 3) - 1);
    Linear l = {};
    l.kind = kind, l.rows = rows, l.columns = columns, l.chunk = group, l.scale_type = scale_type, l.zero = zero;
    std::vector<uint8_t> packed(linear_packed_bytes(&l));
    const Codes bytes = {codes.data()};
    if (scale_type < MINIMA)
        linear_pack_codes(&l, &bytes, halves.data(), nullptr, group, packed.data(), 1);
    else
        linear_pack_grouped(&l, &bytes, scales.data(), minima.data(), factors.data(), steps.data(), minimum_factors.data(),
                            minimum_steps.data(), packed.data(), 1);
    l.weight = packed.data();
    const auto number = [&](int64_t row, int64_t k) {
        const int64_t at = row * groups + k / group, code = codes[row * columns + k];
        const int level = kind == LEVELS4 ? E2M1[code] : kind == IQ4 ? IQ4_LEVELS[code] : (int)code;
        return (level - std::max<int64_t>(zero, 0)) * (double)scales[at] - minima[at];
    };
    linear_forward(l, FLOAT32, x.data(), tokens, out.data(), STORE, 2);
    std::vector<double> ours(out.begin(), out.end()), exact(tokens * rows);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < columns; k++) exact[t * rows + r] += x[t * columns + k] * number(r, k);
    const double error = relative_error(ours, exact);
    expect(error < 1e-6, scale_type == STEPS ? "groups of steps" : zero < 0 ? "groups with minima" : "groups with scales", error);
    for (const int64_t at_once : {1, 3, 7})
        for (int64_t t = 0; t + at_once <= tokens; t += at_once) {
            alone.resize(at_once * rows);
            linear_forward(l, FLOAT32, x.data() + t * columns, at_once, alone.data(), STORE, 1);
            expect(alone == part(out, t * rows, at_once * rows), "a row of groups depends on the others", t);
        }
    const int64_t row = rows - 1;
    linear_widen_rows(&l, FLOAT32, &row, 1, widened.data(), 1);
    for (int64_t k = 0; k < columns; k++)
        expect(std::fabs(widened[k] - number(row, k)) <= 1e-6 * std::fabs(scales[row * groups + k / group] * 255.0), "a widened row", k);
}

// One sequence of `total` tokens, of which the last `num_new` attend, each to `window` tokens (0: all before it).
template <class T>
void check_attention(int64_t dtype, int64_t block_size, int64_t head_dim, int32_t total, int32_t num_new, int64_t window, bool int8_cache, double tolerance) {
    using E = typename T::Elem;
    const int64_t heads = 6, kv_heads = 2, blocks = (total + block_size - 1) / block_size, head_bytes = int8_cache ? head_dim + 4 : head_dim * sizeof(E);
    const int64_t block_stride = kv_heads * block_size * (int8_cache ? head_dim + 4 : head_dim);
    const Geometry geometry{blocks, block_size, heads, kv_heads, head_dim, int8_cache, block_stride};
    const Values<T> q(num_new * heads * head_dim), k(total * kv_heads * head_dim), v(total * kv_heads * head_dim);
    std::vector<char> k_cache(blocks * kv_heads * block_size * head_bytes), v_cache(k_cache.size());
    std::vector<int32_t> slots(total), table(blocks);
    for (int64_t b = 0; b < blocks; b++) table[b] = (int32_t)(blocks - 1 - b);
    for (int32_t t = 0; t < total; t++) slots[t] = (int32_t)(table[t / block_size] * block_size + t % block_size);
    const int64_t strides[4] = {kv_heads * head_dim, head_dim, kv_heads * head_dim, head_dim};
    paged_write((int)dtype, &geometry, total, 1, k.stored.data(), v.stored.data(), strides, k_cache.data(), v_cache.data(), slots.data());
    for (int64_t b = 0; window && (b + 1) * block_size <= total - num_new + 1 - window; b++) table[b] = (int32_t)blocks;
    const int32_t cu_q[2] = {0, num_new};
    StepWork* work = paged_work_new(&geometry, 1, cu_q, &total, table.data(), blocks, window, 2);
    std::vector<E> out(q.stored.size());
    const float scale = 1 / std::sqrt((float)head_dim);
    const std::vector<float> sinks = {-2, -1, 0, 1, 2, 30};
    expect(paged_attend((int)dtype, &geometry, work, q.stored.data(), heads * head_dim, head_dim, k_cache.data(), v_cache.data(), out.data(), scale, 0, sinks.data()) == 0, "a block is missing", 0);
    paged_work_free(work);
    std::vector<double> ours, exact;
    for (int64_t t = 0; t < num_new; t++)
        for (int64_t h = 0; h < heads; h++) {
            const double* query = &q.exact[(t * heads + h) * head_dim];
            const int64_t head = h / (heads / kv_heads), seen = total - num_new + t + 1;
            const int64_t first = window ? std::max<int64_t>(0, seen - window) : 0;
            std::vector<double> weights(seen), sum(head_dim);
            double all = std::exp(sinks[h]);
            for (int64_t i = first; i < seen; i++) {
                for (int64_t d = 0; d < head_dim; d++) weights[i] += query[d] * k.exact[(i * kv_heads + head) * head_dim + d];
                all += weights[i] = std::exp(weights[i] * scale);
            }
            for (int64_t i = first; i < seen; i++)
                for (int64_t d = 0; d < head_dim; d++) sum[d] += weights[i] / all * v.exact[(i * kv_heads + head) * head_dim + d];
            exact.insert(exact.end(), sum.begin(), sum.end());
        }
    for (const E& each : out) ours.push_back(Rows<T>::load_one(&each));
    const double error = relative_error(ours, exact);
    expect(error < tolerance, int8_cache ? "attention over int8" : "attention", error);
}

// A packed layer and its weights.
template <class T> struct PackedLinear {
    Values<T> weight;
    std::vector<char> packed;
    Linear l = {};
    PackedLinear(int64_t dtype, int64_t rows, int64_t columns, bool gated) : weight(rows * columns) {
        l.kind = dtype, l.rows = rows, l.columns = columns, l.gated = gated;
        packed.resize(linear_padded_rows(&l) * columns * sizeof(typename T::Elem));
        linear_pack(&l, weight.stored.data(), packed.data(), 1);
        l.weight = packed.data(), l.panel_bytes = packed.size() / linear_num_panels(&l);
    }
    std::vector<double> times(const double* x) const {
        std::vector<double> y(l.rows);
        for (int64_t r = 0; r < l.rows; r++)
            for (int64_t k = 0; k < l.columns; k++) y[r] += weight.exact[r * l.columns + k] * x[k];
        return y;
    }
};

// Experts wide enough to be cut into pieces of their features.
template <class T> void check_experts(int64_t dtype, bool renormalize, double tolerance) {
    using E = typename T::Elem;
    const int64_t width = 544, inner = 320, count = 5, picked = 2, tokens = 7;
    const PackedLinear<T> router(dtype, count, width, false);
    std::vector<PackedLinear<T>> gate_up, down;
    std::vector<Linear> all_gate_up, all_down;
    for (int64_t e = 0; e < count; e++) {
        gate_up.emplace_back(dtype, 2 * inner, width, true), down.emplace_back(dtype, width, inner, false);
        all_gate_up.push_back(gate_up[e].l), all_down.push_back(down[e].l);
    }
    Values<T> x(tokens * width);
    for (int64_t i = 0; i < tokens * width; i++) {  // small, so that no expert has all of a token's probability
        x.stored[i] = T::from_float((float)x.exact[i] / 32);
        x.exact[i] = Rows<T>::load_one(&x.stored[i]);
    }
    Experts experts = {count, picked, renormalize};
    experts.scale = 1, experts.router = router.l, experts.gate_up = all_gate_up.data(), experts.down = all_down.data();
    std::vector<E> out(tokens * width), alone(width);
    experts_forward(experts, dtype, x.stored.data(), tokens, out.data(), GATE_SILU, 1);
    std::vector<double> ours, exact(tokens * width);
    for (const E& each : out) ours.push_back(Rows<T>::load_one(&each));
    for (int64_t t = 0; t < tokens; t++) {
        std::vector<double> shares = router.times(&x.exact[t * width]);
        double sum = 0, kept = 0;
        for (double& share : shares) sum += share = std::exp(share);
        std::vector<int64_t> order{0, 1, 2, 3, 4};
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return shares[a] > shares[b]; });
        for (int64_t k = 0; k < picked; k++) kept += shares[order[k]];
        for (int64_t k = 0; k < picked; k++) {
            const std::vector<double> both = gate_up[order[k]].times(&x.exact[t * width]);
            std::vector<double> hidden(inner);
            for (int64_t i = 0; i < inner; i++) hidden[i] = both[i] / (1 + std::exp(-both[i])) * both[inner + i];
            const std::vector<double> result = down[order[k]].times(hidden.data());
            for (int64_t i = 0; i < width; i++) exact[t * width + i] += result[i] * shares[order[k]] / (renormalize ? kept : sum);
        }
        for (const int threads : {1, 2, 16}) {
            experts_forward(experts, dtype, x.stored.data() + t * width, 1, alone.data(), GATE_SILU, threads);
            expect(alone == part(out, t * width, width), "a token's experts depend on the others or on the threads", t);
        }
    }
    const double error = relative_error(ours, exact);
    expect(error < tolerance, "experts", error);
}

template <class T> void check(int64_t dtype, double tolerance, const char* name) {
    printf("%s\n", name);
    check_linear<T>(dtype, dtype, tolerance, "linear");
    check_linear<T>(dtype, INT8, 0.02, "int8 linear");
    check_linear<T>(dtype, INT4, 0.09, "int4 linear");
    for (const bool renormalize : {false, true}) check_experts<T>(dtype, renormalize, 2 * tolerance);
    for (const auto& [total, num_new] : {std::pair<int32_t, int32_t>{1, 1}, {300, 1}, {37, 37}, {290, 20}}) {
        for (const int64_t window : {0, 5, 40}) {
            check_attention<T>(dtype, 16, 64, total, num_new, window, false, tolerance);
            check_attention<T>(dtype, 3, 20, total, num_new, window, false, tolerance);
            check_attention<T>(dtype, 16, 64, total, num_new, window, true, 0.03);
        }
    }
}

}  // namespace

int main() {
    for (const int64_t kind : {CODES4, CODES8, LEVELS4}) check_codes(kind, 32), check_codes(kind, 128);
    for (const int64_t scale_type : {MINIMA, STEPS}) check_grouped(CODES4, 4, 32, scale_type, -1), check_grouped(CODES5, 5, 32, scale_type, -1);
    check_grouped(CODES4, 4, 16, STEPS, -1), check_grouped(CODES4, 3, 16, STEPS, 4), check_grouped(CODES6, 6, 16, STEPS, 32);
    check_grouped(CODES8, 8, 32, FLOAT16, 128), check_grouped(CODES5, 5, 32, FLOAT16, 16), check_grouped(CODES4, 4, 32, FLOAT16, 8);
    check_grouped(LEVELS4, 4, 32, BFLOAT16, 12), check_grouped(IQ4, 4, 32, FLOAT16, 128), check_grouped(IQ4, 4, 32, STEPS, 128);
    printf("bf16 path %lld, int8 path %lld\n", (long long)bf16_path(), (long long)int8_path());
    check<F32>(0, 1e-5, "float32");
    check<BF16>(1, 0.01, "bfloat16");
    check<F16>(2, 0.002, "float16");
    return faults;
}
