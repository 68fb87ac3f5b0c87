// Routing, and the experts' products, all of a layer cut into pieces for the threads at once.
//
// A row's result never depends on the others: routing looks at one token, the linear layers keep the promise of linear.h
// however they are cut, and each token adds up its own experts in their order.

#include "experts.h"

#include "arena.h"
#include "decoder_rows.h"
#include "epilogue.h"

namespace {

constexpr int64_t MOST_TOKENS = 2048;  // computed at a time: the results of all their experts take memory
constexpr int64_t MOST_ROWS = 128;     // of a piece: what they read and write stays in the L2 cache
constexpr int64_t PIECES_PER_THREAD = 12;
constexpr int64_t LEAST_FEATURES = 256;  // of a piece: for each piece, activations are converted or rounded again

struct Choice {
    int64_t expert;
    float weight;
};

// The scores of one token's experts, up to the factor that is returned.
template <class T> float score(const Experts& e, const typename T::Elem* logits, float* probabilities) {
    const int64_t X = e.num_experts;
    if (e.sigmoid) {
        for (int64_t i = 0; i < X; i += VL)
            storef(probabilities + i, Rows<T>::round(sigmoid_of(load_some<T>(logits + i, X - i))));
        return 1;
    }
    vf top = splat(-INFINITY), sum = {};
    for (int64_t i = 0; i < X; i += VL) {
        const vi inside = iota() < (vi{} + (int32_t)(X - i));
        const vf logit = select_of(inside, load_some<T>(logits + i, X - i), splat(-INFINITY));
        storef(probabilities + i, logit);
        top = max_of(top, logit);
    }
    const float largest = max_in(top);
    for (int64_t i = 0; i < X; i += VL) {
        const vf p = exp2_of((loadf(probabilities + i) - largest) * LOG2E);
        storef(probabilities + i, p);
        sum += p;
    }
    return 1.f / sum_of(sum);
}

// The groups that stay, as bits: those with the largest sums of their best scores; of equals, the first.
template <class Score> uint64_t kept_groups(const Experts& e, const Score& score) {
    const int64_t each = e.num_experts / e.num_groups;
    float of_groups[64];
    for (int64_t g = 0; g < e.num_groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t i = g * each; i < (g + 1) * each; i++) {
            const float p = score(i);
            if (p > best) second = best, best = p;
            else if (p > second) second = p;
        }
        of_groups[g] = e.num_best == 2 ? best + second : best;
    }
    uint64_t kept = 0;
    for (int64_t n = 0; n < e.num_kept_groups; n++) {
        int64_t best = -1;
        for (int64_t g = 0; g < e.num_groups; g++)
            if (!(kept >> g & 1) && (best < 0 || of_groups[g] > of_groups[best])) best = g;
        kept |= uint64_t(1) << best;
    }
    return kept;
}

// The experts of one token with the largest scores and their weights, in the order of the experts; of equals, the first.
template <class T> void route(const Experts& e, const typename T::Elem* logits, float* probabilities, Choice* chosen) {
    const int64_t X = e.num_experts, K = e.num_per_token;
    const float factor = score<T>(e, logits, probabilities);
    float total = (float)e.least_sum;
    auto wanted = [&](int64_t i) { return probabilities[i] * factor + (e.router_bias ? e.router_bias[i] : 0); };
    const int64_t each = e.num_groups ? X / e.num_groups : X;
    const uint64_t kept = e.num_groups ? kept_groups(e, wanted) : 1;
    for (int64_t i = 0, seen = 0; i < X; i++) {
        if (!(kept >> i / each & 1)) continue;
        const float p = wanted(i);
        if (seen >= K && !(p > chosen[K - 1].weight)) continue;
        int64_t place = std::min(seen++, K - 1);
        for (; place > 0 && p > chosen[place - 1].weight; place--) chosen[place] = chosen[place - 1];
        chosen[place] = {i, p};
    }
    for (int64_t k = 0; k < K; k++) {
        chosen[k].weight = probabilities[chosen[k].expert] * factor;
        total += chosen[k].weight;
    }
    for (int64_t k = 0; k < K; k++) {
        float weight = e.renormalize ? chosen[k].weight / total : chosen[k].weight;
        if (e.expert_scales) weight *= e.expert_scales[chosen[k].expert];
        const typename T::Elem rounded = T::from_float(weight * (float)e.scale);
        chosen[k].weight = Rows<T>::load_one(&rounded);
    }
    std::sort(chosen, chosen + K, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
}

// The experts of one token, each weighted by a softmax over those left whose logits are near its own.
// Source: Liu et al., GRIN: GRadient-INformed MoE, 2024.
template <class T> void route_among_near(const Experts& e, const typename T::Elem* logits, float* left, Choice* chosen) {
    const int64_t X = e.num_experts, K = e.num_per_token;
    for (int64_t i = 0; i < X; i++) left[i] = Rows<T>::load_one(logits + i);
    for (int64_t k = 0; k < K; k++) {
        int64_t best = 0;
        for (int64_t i = 1; i < X; i++)
            if (left[i] > left[best]) best = i;
        float sum = 0;
        for (int64_t i = 0; i < X; i++) {
            const float less = left[best] - left[i];
            if (!(less / std::max(std::fabs(left[i]), left[best]) > (float)e.nearness)) sum += std::exp(-less);
        }
        const typename T::Elem rounded = T::from_float(1.f / sum);
        chosen[k] = {best, Rows<T>::load_one(&rounded)};
        left[best] = -INFINITY;
    }
    std::sort(chosen, chosen + K, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
}

// Some rows of one expert. Rows of all experts lie one after the other, in the order of experts, then of tokens.
struct Piece {
    int64_t expert, begin, end;
    int64_t place;  // row of `hidden` where it begins
    Order order;    // of its hidden rows
};

// Some tokens on their way through a mixture.
template <class T> struct Mixture {
    using E = typename T::Elem;
    const Experts& e;
    int64_t dtype, tokens, K, E_, inner;
    const E* x;
    Epilogue gate;
    int threads;
    float* probabilities;  // [T][experts, padded]
    Choice* chosen;        // [T][K]
    int64_t *places, *sources;  // row of each choice [T][K]; token of each row [T * K]
    E *logits, *hidden, *results;  // [T][experts]; [T * K, and what fills tiles][inner]; [T * K][E]
    std::vector<Piece> pieces;

    Mixture(const Experts& e, int64_t dtype, const E* x, int64_t tokens, Epilogue gate, int threads, Arena& arena)
        : e(e), dtype(dtype), tokens(tokens), K(e.num_per_token), E_(e.router.columns), inner(e.down[0].columns), x(x),
          gate(gate), threads(threads) {
        const int64_t rows = tokens * K, padded = (e.num_experts + VL - 1) / VL * VL;
        const int64_t hidden_rows = rows + rows / 2;  // pieces in the order of tiles have over 32 rows, and end up to 15 after them
        arena.reserve(tokens * (padded * sizeof(float) + e.num_experts * sizeof(E)) +
                      rows * (sizeof(Choice) + 2 * sizeof(int64_t) + E_ * sizeof(E)) + hidden_rows * inner * sizeof(E) + 7 * 64);
        probabilities = arena.take<float>(tokens * padded);
        chosen = arena.take<Choice>(rows);
        places = arena.take<int64_t>(rows), sources = arena.take<int64_t>(rows);
        logits = arena.take<E>(tokens * e.num_experts), hidden = arena.take<E>(hidden_rows * inner), results = arena.take<E>(rows * E_);
    }

    void route_all(const E* routed) const {
        const int64_t padded = (e.num_experts + VL - 1) / VL * VL;
        linear_forward(e.router, dtype, routed, tokens, logits, STORE, threads);
        for_rows(threads, tokens, 8 * e.num_experts, 8, [&](int64_t t) {
            (e.nearness ? route_among_near<T> : route<T>)(e, logits + t * e.num_experts, probabilities + t * padded,
                                                          chosen + t * K);
        });
    }

    // Sorts the choices by expert, and cuts each expert's rows.
    void group() {
        std::vector<int64_t> next(e.num_experts + 1);
        int64_t place = 0;
        for (int64_t i = 0; i < tokens * K; i++) next[chosen[i].expert + 1]++;
        for (int64_t expert = 0; expert < e.num_experts; expert++) {
            const int64_t begin = next[expert], count = next[expert + 1], parts = (count + MOST_ROWS - 1) / MOST_ROWS;
            next[expert + 1] += begin;
            for (int64_t i = 0; i < parts; i++) {
                const int64_t first = begin + count * i / parts, rows = begin + count * (i + 1) / parts - first;
                const bool tiles = writes_tiles(e.gate_up[expert], dtype, rows) && reads_tiles(e.down[expert], dtype, rows);
                pieces.push_back({expert, first, first + rows, place, tiles ? BY_TILES : BY_ROWS});
                place += tiles ? Matrix<E>::size(rows, 1) : rows;
            }
        }
        for (int64_t i = 0; i < tokens * K; i++) {
            places[i] = next[chosen[i].expert]++;
            sources[places[i]] = i / K;
        }
        // the largest first, so that the threads end together
        std::stable_sort(pieces.begin(), pieces.end(),
                         [](const Piece& a, const Piece& b) { return a.end - a.begin > b.end - b.begin; });
    }

    // Calls work(piece, panels of its layer) for all pieces times as many groups of panels as keep the threads busy. Groups
    // begin where 64 bytes of a row do.
    template <class Work> void for_panels_of(const Linear* layers, const Work& work) const {
        const int64_t panels = num_panels(layers[0]), most = std::max<int64_t>(1, panels * PANEL / LEAST_FEATURES);
        const int64_t wanted = (PIECES_PER_THREAD * threads + pieces.size() - 1) / pieces.size();
        const int64_t groups = threads == 1 ? 1 : std::min(most, wanted), width = panel_width(layers[0]);
        const int64_t unit = std::max<int64_t>(1, Matrix<E>::COLUMNS / width);
        auto begin = [&](int64_t g) { return g == groups ? panels : panels * g / groups / unit * unit; };
        parallel_for(threads, pieces.size() * groups, [&](int64_t i) {
            const Piece& piece = pieces[i / groups];
            const int64_t g = i % groups, first = begin(g);
            work(piece, panels_of(layers[piece.expert], first, begin(g + 1)), first * width);
        });
    }

    void compute() const {
        for_panels_of(e.gate_up, [&](const Piece& piece, const Linear& part, int64_t offset) {
            static thread_local std::vector<char> room;
            const int64_t rows = piece.end - piece.begin;
            const Order order = reads_tiles(part, dtype, rows) ? BY_TILES : BY_ROWS;
            const Matrix<E> gathered{(E*)lines_of(room, Matrix<E>::size(rows, E_) * sizeof(E)), E_, order};
            const int64_t together = order == BY_TILES ? Matrix<E>::COLUMNS : E_;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t k = 0; k < E_; k += together)
                    memcpy(gathered.at(r, k), x + sources[piece.begin + r] * E_ + k, together * sizeof(E));
            const Matrix<E> out{hidden + piece.place * inner, inner, piece.order};
            linear_forward(part, dtype, gathered.base, rows, out.at(0, offset), gate, 1, order, piece.order);
        });
        for_panels_of(e.down, [&](const Piece& piece, const Linear& part, int64_t offset) {
            linear_forward(part, dtype, hidden + piece.place * inner, piece.end - piece.begin,
                           results + piece.begin * E_ + offset, STORE, 1, piece.order);
        });
    }

    // Each product and each sum is rounded, as in torch.
    void add_up(E* out) const {
        for_rows(threads, tokens, K * E_, 4, [&](int64_t t) {
            for (int64_t i = 0; i < E_; i += VL) {
                vf sum = {};
                for (int64_t k = t * K; k < (t + 1) * K; k++) {
                    const vf result = load_some<T>(results + places[k] * E_ + i, E_ - i);
                    sum = Rows<T>::round(sum + Rows<T>::round(result * chosen[k].weight));
                }
                store_some<T>(out + t * E_ + i, sum, E_ - i);
            }
        });
    }
};

// out + sigmoid(gate) * the expert for every token, in out.
template <class T> void add_shared(const Experts& e, int64_t dtype, const typename T::Elem* x, int64_t tokens,
                                   typename T::Elem* out, Epilogue gate, int threads, Arena& arena) {
    using E = typename T::Elem;
    const int64_t inner = e.shared_down->columns, width = e.shared_down->rows;
    arena.reserve(tokens * (inner + width + 1) * sizeof(E) + 3 * 64);
    E *hidden = arena.take<E>(tokens * inner), *result = arena.take<E>(tokens * width), *logits = arena.take<E>(tokens);
    linear_forward(*e.shared_gate_up, dtype, x, tokens, hidden, gate, threads);
    linear_forward(*e.shared_down, dtype, hidden, tokens, result, STORE, threads);
    if (e.shared_gate) linear_forward(*e.shared_gate, dtype, x, tokens, logits, STORE, threads);
    for_rows(threads, tokens, width, 8, [&](int64_t t) {
        const vf share = e.shared_gate ? Rows<T>::round(sigmoid_of(splat(Rows<T>::load_one(logits + t)))) : splat(1.f);
        const E* from = result + t * width;
        E* to = out + t * width;
        for (int64_t i = 0; i < width; i += VL) {
            const vf added = Rows<T>::round(load_some<T>(from + i, width - i) * share);
            store_some<T>(to + i, load_some<T>(to + i, width - i) + added, width - i);
        }
    });
}

}  // namespace

void experts_forward(const Experts& experts, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue gate,
                     int threads, const void* routed) {
    static thread_local Arena arena;
    with_activations(dtype, [&](auto type) {
        using T = decltype(type);
        using E = typename T::Elem;
        const int64_t width = experts.router.columns;
        for (int64_t begin = 0; begin < num_tokens; begin += MOST_TOKENS) {
            const int64_t count = std::min(MOST_TOKENS, num_tokens - begin);
            const E* from = (const E*)x + begin * width;
            E* to = (E*)out + begin * width;
            Mixture<T> mixture(experts, dtype, from, count, gate, threads, arena);
            mixture.route_all(routed ? (const E*)routed + begin * width : from);
            mixture.group();
            mixture.compute();
            mixture.add_up(to);
            if (experts.shared_down) add_shared<T>(experts, dtype, from, count, to, gate, threads, arena);
        }
    });
}
