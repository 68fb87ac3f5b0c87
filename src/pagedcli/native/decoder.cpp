// One step of a decoder: the loop over its layers.
//
// Rounds where the torch implementation in pagedcli.models.decoder and pagedcli.layers does, so that both give the same
// numbers up to the order of sums. Everything is computed row by row: a token never depends on its neighbours' number.

#include "decoder.h"

#include <cmath>
#include <cstdlib>

#include "arena.h"
#include "decoder_rows.h"

namespace {

// Whether attention and a state mix the tokens of a layer.
bool has_both(const Layer& layer) { return layer.recurrent && layer.qkv.weight; }

template <class E> void keep_rows(E* x, int64_t width, const int64_t* rows, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; r++)
        if (rows[r] != r) memcpy(x + r * width, x + rows[r] * width, width * sizeof(E));
}

// A step on its way through the layers.
template <class T> struct Forward {
    using E = typename T::Elem;
    const Model& m;
    const Step& step;
    int64_t tokens, E_;
    const int64_t* positions;
    int threads;
    bool late = false;  // whether only the late tokens are left
    E *residual, *x, *qkv, *wide;  // [T][E], [T][E], [T][Q + 2G][D], [T][the widest of what lies between products]
    E* inputs;                     // [T][L][P]
    E *routed, *mixed;             // [T][E] each, of experts or attention besides an MLP

    Forward(const Model& m, const Step& step, Arena& arena)
        : m(m), step(step), tokens(step.num_tokens), E_(m.hidden_size),
          positions(step.positions), threads((int)step.threads), residual((E*)step.residual) {
        const int64_t widest = std::max({m.head_size, m.inner_size, E_, m.input_size}), rows = Matrix<E>::size(tokens, 1);
        const int64_t all_inputs = m.num_layers * m.input_size, besides = m.layers[0].router_norm ? E_ : 0;
        const int64_t beside = m.side_by_side || has_both(m.layers[0]) ? E_ : besides;
        // each begins in a line of its own
        arena.reserve((rows * (E_ + widest) + tokens * (m.qkv_size + all_inputs + beside + besides)) * sizeof(E) + 512);
        x = arena.take<E>(rows * E_), qkv = arena.take<E>(tokens * m.qkv_size), wide = arena.take<E>(rows * widest);
        inputs = arena.take<E>(tokens * all_inputs);
        routed = arena.take<E>(tokens * besides), mixed = arena.take<E>(tokens * beside);
    }

    // How x of a layer should lie.
    Order order_for(const Linear& linear) const { return reads_tiles(linear, m.dtype, tokens) ? BY_TILES : BY_ROWS; }

    // The residual after its norm, which is written in `order`.
    Matrix<const E> normed(const void* weight, Order order = BY_ROWS) const {
        if (!weight) return {residual, E_, BY_ROWS};
        norm_residual(weight, tokens, x, order);
        return {x, E_, order};
    }
    void norm_residual(const void* weight, int64_t rows, void* out, Order order = BY_ROWS) const {
        if (m.layer_norm)
            layer_norm_rows<T>(residual, (const float*)weight, m.layer_norm == 2, rows, E_, (float)m.eps, out, threads, order);
        else
            norm_rows<T>(residual, weight, m.float_norms, rows, E_, (float)m.eps, out, threads, order);
    }

    // Adds a projection of `wide` to the residual.
    void add(const Linear& linear, Order order, const void* norm) const {
        const bool plain = !norm && m.residual_multiplier == 1;
        linear_forward(linear, m.dtype, wide, tokens, plain ? residual : x, plain ? ADD : STORE, threads, order);
        if (!plain) add_rows<T>(m, x, norm, tokens, residual, threads);
    }

    // Writes `wide` in `order`, of the late tokens alone if it `ends` with the others. False if the block table names a block
    // that does not exist.
    bool attend(const Layer& layer, bool ends, Order& order) {
        const GroupStep& group = step.groups[layer.group];
        const int64_t D = layer.head_dim, H = layer.num_heads, G = layer.num_kv_heads, width = qkv_width(m, layer);
        const int64_t Q = m.output_gate ? 2 * H : H, head_stride = Q / H * D;  // Q: heads of queries and of their gates
        char* k_cache = (char*)step.k_cache + layer.place * group.layer_bytes;
        char* v_cache = (char*)step.v_cache + layer.place * group.layer_bytes;
        const Matrix<const E> from = normed(layer.input_norm, order_for(layer.qkv));
        linear_forward(layer.qkv, m.dtype, from.base, tokens, qkv, STORE, threads, from.order);
        E* values = qkv + (Q + G) * D;
        int64_t value_stride = width;
        if (layer.keys_as_values) {
            values = wide, value_stride = G * D;  // until attention's result takes the place
            for_rows(threads, tokens, G * D, 8, [&](int64_t t) {
                memcpy(values + t * value_stride, qkv + t * width + Q * D, G * D * sizeof(E));
            });
        }
        norm_and_rotate<T>(m, layer, tokens, positions, qkv, threads);
        if (!layer.reads) {
            if (m.value_norm) norm_heads<T>(values, value_stride, tokens, G, D, (float)m.eps, threads);
            const int64_t strides[4] = {width, D, value_stride, D};
            paged_write((int)m.dtype, group.geometry, tokens, threads, qkv + Q * D, values, strides, k_cache, v_cache,
                        group.slots);
        }
        if (ends) keep_late(qkv, width);
        order = D % VL ? BY_ROWS : order_for(layer.attention_out);
        const StepWork* work = late ? group.late_work : group.work;
        if (tokens && paged_attend((int)m.dtype, group.geometry, work, qkv, width, head_stride, k_cache, v_cache, wide,
                         (float)m.attention_scale, (float)m.soft_cap, layer.sinks, order))
            return false;
        const int64_t gates = layer.gates_per_head;
        if (m.output_gate) gate_heads<T>({wide, H * D, order}, qkv + D, width, 2 * D, D, false, tokens, H, D, threads);
        if (gates)
            gate_heads<T>({wide, H * D, order}, qkv + width - H * gates, width, gates, gates, layer.softplus_gates, tokens, H, D,
                          threads);
        return true;
    }

    // The same over latents: `wide` is by rows.
    bool attend_latents(const Layer& layer, bool ends) {
        const Latent& l = *layer.latent;
        const GroupStep& group = step.groups[layer.group];
        char* cache = (char*)step.k_cache + layer.place * group.layer_bytes;
        const int64_t D = layer.head_dim, H = layer.num_heads, R = layer.rotated, size = l.nope_dim + R, all = H * size;
        const int64_t width = (l.query_rank ? l.query_rank : all) + D;
        E *queries = qkv + tokens * width, *absorbed = queries + (l.query_rank ? tokens * all : 0);
        E* attended = absorbed + tokens * H * D;
        auto turn = [&](E* x, int64_t t) {
            if (!layer.rope_table) return;
            if (layer.interleaved) part_interleaved(x, R);
            rotate<T>(x, (const E*)layer.rope_table + positions[t] * R, R);
        };
        const Matrix<const E> from = normed(layer.input_norm, order_for(layer.qkv));
        linear_forward(layer.qkv, m.dtype, from.base, tokens, qkv, STORE, threads, from.order);
        E* latents = qkv + width - D;
        for_rows(threads, tokens, width, 4, [&](int64_t t) {
            rms_norm<T>(latents + t * width, l.latent_norm, m.float_norms, l.rank, (float)l.eps);
            turn(latents + t * width + l.rank, t);
            if (l.query_rank)
                rms_norm<T>(qkv + t * width, l.query_norm, m.float_norms, l.query_rank, (float)l.eps,
                            [&](int64_t i) { return wide + t * l.query_rank + i; });
        });
        const int64_t strides[4] = {width, D, width, D};
        paged_write((int)m.dtype, group.geometry, tokens, threads, latents, latents, strides, cache, cache, group.slots);
        if (l.query_rank) linear_forward(l.queries, m.dtype, wide, tokens, queries, STORE, threads);
        E* q = l.query_rank ? queries : qkv;
        const int64_t stride = l.query_rank ? all : width;
        if (ends) keep_late(q, stride);
        if (!tokens) return true;
        by_heads(l.key_up, H, q, stride, size, absorbed, H * D, D);
        for_rows(threads, tokens, all, 4, [&](int64_t t) {
            for (int64_t h = 0; h < H; h++) {
                E* rotary = q + t * stride + h * size + l.nope_dim;
                turn(rotary, t);
                memcpy(absorbed + (t * H + h) * D + l.rank, rotary, R * sizeof(E));
            }
        });
        if (paged_attend((int)m.dtype, group.geometry, late ? group.late_work : group.work, absorbed, H * D, D, cache, cache,
                         attended, (float)m.attention_scale, (float)m.soft_cap, nullptr, BY_ROWS))
            return false;
        by_heads(l.value_up, H, attended, H * l.rank, l.rank, wide, H * l.value_dim, l.value_dim);
        return true;
    }

    // A linear layer for each head. Strides in elements, of rows and from head to head.
    void by_heads(const Linear* linears, int64_t H, const E* x, int64_t x_stride, int64_t x_head, E* out, int64_t out_stride,
                  int64_t out_head) const {
        constexpr int64_t ROWS = 256;  // of a piece of work
        const int64_t parts = (tokens + ROWS - 1) / ROWS, columns = linears[0].columns;
        const int most = threads_for(threads, tokens * H * columns * linears[0].rows / 64);
        parallel_for(most, H * parts, [&](int64_t i) {
            static thread_local std::vector<char> room;
            const int64_t h = i / parts, begin = i % parts * ROWS, count = std::min(ROWS, tokens - begin);
            E* rows = (E*)lines_of(room, count * columns * sizeof(E));
            for (int64_t r = 0; r < count; r++)
                memcpy(rows + r * columns, x + (begin + r) * x_stride + h * x_head, columns * sizeof(E));
            Linear linear = linears[h];
            linear.out_stride = out_stride;
            linear_forward(linear, m.dtype, rows, count, out + begin * out_stride + h * out_head, STORE, 1);
        });
    }

    // The late tokens alone, also of x [T][width].
    void keep_late(E* x, int64_t width) {
        keep_rows(x, width, step.late, step.num_late);
        keep_rows(residual, E_, step.late, step.num_late);
        if (m.input_size) keep_rows(inputs, m.num_layers * m.input_size, step.late, step.num_late);
        if (has_both(m.layers[m.last_keeper])) keep_rows(mixed, E_, step.late, step.num_late);
        tokens = step.num_late, positions = step.late_positions, late = true;
    }

    // An MLP and experts, each between norms of its own, then a norm of their sum.
    void mlp_and_experts(const Layer& layer) const {
        auto norm = [&](const void* from, const void* weight, E* to) {
            norm_rows<T>(from, weight, m.float_norms, tokens, E_, (float)m.eps, to, threads);
        };
        norm(residual, layer.router_norm, routed), norm(residual, layer.experts_norm, mixed);
        experts_forward(*layer.experts, m.dtype, mixed, tokens, wide, (Epilogue)m.gate, threads, routed);
        norm(wide, layer.experts_norm_after, mixed);
        const Order order = gate_up(layer, layer.mlp_norm);
        linear_forward(layer.down, m.dtype, wide, tokens, x, STORE, threads, order);
        norm(x, layer.dense_norm_after, x);
        sum_rows<T>(mixed, tokens, E_, x, threads);
        add_rows<T>(m, x, layer.mlp_norm_after, tokens, residual, threads);
    }

    // What each layer gets for each token.
    void compute_inputs() const {
        const int64_t all = m.num_layers * m.input_size;
        linear_forward(m.input_projection, m.dtype, residual, tokens, inputs, STORE, threads);
        for_rows(threads, tokens, all, 4, [&](int64_t t) {
            layer_inputs<T>(m, (const E*)m.input_table + step.ids[t] * all, inputs + t * all);
        });
    }

    // Adds a layer's input to the residual.
    void add_input(const Layer& layer, int64_t index) const {
        const int64_t size = m.input_size;
        linear_forward(layer.input_gate, m.dtype, residual, tokens, wide, STORE, threads);
        for_rows(threads, tokens, size, 8, [&](int64_t t) {
            gelu_times<T>(wide + t * size, inputs + (t * m.num_layers + index) * size, size);
        });
        add(layer.input_out, BY_ROWS, layer.layer_input_after);
    }

    // Writes `wide` in the returned order.
    Order gate_up(const Layer& layer, const void* norm) const {
        const Matrix<const E> from = normed(norm, order_for(layer.gate_up));
        const bool tiles = !layer.xielu && writes_tiles(layer.gate_up, m.dtype, tokens);
        const Order order = tiles ? order_for(layer.down) : BY_ROWS;
        linear_forward(layer.gate_up, m.dtype, from.base, tokens, wide, (Epilogue)m.gate, threads, from.order, order);
        if (layer.xielu) xielu_rows<T>(layer.xielu, tokens, layer.down.columns, wide, threads);
        return order;
    }

    void mlp(const Layer& layer) const {
        if (!layer.experts && !layer.down.weight) return;
        if (layer.router_norm) return mlp_and_experts(layer);
        if (layer.experts) {
            experts_forward(*layer.experts, m.dtype, normed(layer.mlp_norm).base, tokens, wide, (Epilogue)m.gate, threads);
            return add_rows<T>(m, wide, layer.mlp_norm_after, tokens, residual, threads);
        }
        const Order order = gate_up(layer, layer.mlp_norm);
        add(layer.down, order, layer.mlp_norm_after);
    }

    // Adds attention, of which `wide` is in `order`, and what else `mixed` the tokens.
    void add_both(const Layer& layer, Order order) const {
        linear_forward(layer.attention_out, m.dtype, wide, tokens, x, STORE, threads, order);
        sum_rows<T>(mixed, tokens, E_, x, threads);
        add_rows<T>(m, x, layer.input_norm_after, tokens, residual, threads);
    }

    // Adds attention, of which `wide` is in `order`, and the MLP or the experts of the same norm.
    void beside_mlp(const Layer& layer, Order order) const {
        linear_forward(layer.attention_out, m.dtype, wide, tokens, mixed, STORE, threads, order);
        if (layer.experts) {
            const E* from = normed(layer.input_norm).base;
            experts_forward(*layer.experts, m.dtype, from, tokens, wide, (Epilogue)m.gate, threads);
            sum_rows<T>(mixed, tokens, E_, wide, threads);
            return add_rows<T>(m, wide, nullptr, tokens, residual, threads);
        }
        const Order of_wide = gate_up(layer, layer.input_norm);
        linear_forward(layer.down, m.dtype, wide, tokens, x, STORE, threads, of_wide);
        sum_rows<T>(mixed, tokens, E_, x, threads);
        add_rows<T>(m, x, nullptr, tokens, residual, threads);
    }

    int run() {
        if (m.input_size) compute_inputs();
        for (int64_t i = 0; i < m.num_layers; i++) {
            const Layer& layer = m.layers[i];
            const Recurrent* recurrent = layer.recurrent;
            const bool ends = i == m.last_keeper && step.num_late < tokens;
            const bool both = has_both(layer);
            Order order = BY_ROWS;
            if (recurrent) {
                recurrent_forward(*recurrent, m.dtype, normed(layer.input_norm).base, tokens, *step.state_step,
                                  step.states[layer.state_place], wide, threads);
                if (both) linear_forward(recurrent->out, m.dtype, wide, tokens, mixed, STORE, threads);
                else if (ends) keep_late(wide, inner_of(*recurrent));
            }
            if ((!recurrent || both) && !(layer.latent ? attend_latents(layer, ends) : attend(layer, ends, order))) return 1;
            if (!tokens) return 0;
            if (m.side_by_side) {
                beside_mlp(layer, order);
                continue;
            }
            if (both) add_both(layer, order);
            else add(recurrent ? recurrent->out : layer.attention_out, order, layer.input_norm_after);
            mlp(layer);
            if (layer.layer_input_after) add_input(layer, i);
            if (layer.scalar != 1) scale_rows<T>((float)layer.scalar, tokens, E_, residual, threads);
        }
        if (step.num_rows < tokens) keep_rows(residual, E_, step.rows, step.num_rows);
        norm_residual(m.final_norm, step.num_rows, step.out);
        return 0;
    }
};

}  // namespace

extern "C" {

// 0, or 1 if the block table names a block that does not exist.
int decoder_forward(const Model* model, const Step* step) {
    static thread_local Arena arena;
    return with_activations(model->dtype, [&](auto type) { return Forward<decltype(type)>(*model, *step, arena).run(); });
}
}
