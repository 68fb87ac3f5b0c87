// What a decoder's step is given. The structs are mirrored by pagedcli.native.structs.
#pragma once

#include "experts.h"
#include "linear.h"
#include "paged_attention.h"
#include "recurrent.h"

// Multi-head latent attention: qkv makes what queries are made of, a latent and a rotary key.
struct Latent {
    int64_t query_rank;  // 0: qkv makes the queries themselves
    int64_t rank, nope_dim, value_dim;
    const void *query_norm, *latent_norm;
    double eps;
    Linear queries;                    // query_rank -> H * (nope_dim + rotated)
    const Linear *key_up, *value_up;  // of each head: nope_dim -> rank, rank -> value_dim
};

// Norms are [E], or null: the layer does not have it.
struct Layer {
    const void *input_norm, *input_norm_after, *mlp_norm, *mlp_norm_after;
    const void *q_norm, *k_norm;  // of each head [D], or of all heads [H * D], [G * D]; or null
    const float* sinks;           // [H], or null
    const void* rope_table;       // [P][rotated]: cosines, then sines; null: no rotary embedding
    const void* query_scales;     // [P], of queries after they are rotated; or null
    int64_t rotated;              // elements of a head that are rotated, its first; of latents also if there is no table
    int64_t interleaved;           // pairs are (2i, 2i + 1) instead of (i, i + rotated / 2)
    int64_t group, place;         // its GroupStep; among the layers that share blocks with it
    int64_t state_place;          // among the layers with a state
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t reads;                // it attends over the K and V at its group and place, and has none of its own
    int64_t keys_as_values;       // qkv has no V: K, before it is normed and rotated, is V
    int64_t gates_per_head;       // numbers at the end of qkv that gate the result of a head: D, 1, or 0
    int64_t softplus_gates;       // their softplus does, instead of their sigmoid
    Linear qkv, attention_out;
    Linear gate_up, down;    // not read in a layer with experts alone; without weights: the layer has no MLP
    const float* xielu;      // [4] numbers of xielu_of, in place of Model::gate; or null
    const Experts* experts;  // null: a gated MLP
    // Of experts besides a gated MLP: norms [E] of what the router sees and of the experts, and those after both.
    const void *router_norm, *experts_norm, *experts_norm_after, *dense_norm_after;  // null: experts alone
    Linear input_gate, input_out;    // E -> P, P -> E: adds the layer's input, gated by the residual
    const void* layer_input_after;   // [E]; null: it has no input
    double scalar;                   // multiplies the residual after the layer
    const Recurrent* recurrent;  // in place of attention or, if the layer has qkv, besides it; null: it only attends
    const Latent* latent;        // null: K and V of qkv
};

struct Model {
    int64_t dtype, num_layers, hidden_size;
    int64_t last_keeper;          // the last layer with K and V of its own or a state: see Step::late
    // The largest widths of a layer's qkv, with what lies between it and the result of a layer with latents, and of all its
    // query heads.
    int64_t qkv_size, head_size;
    int64_t inner_size;   // the largest width of a gated MLP
    int64_t output_gate;  // qkv lists after the query of each head a gate of its result
    int64_t norms_heads;  // q_norm and k_norm are of all heads
    int64_t value_norm;   // each head of V is normed, by no weights
    int64_t float_norms;  // the weights of norms are float32 and applied before rounding
    int64_t gate;         // Epilogue of gate_up
    int64_t layer_norm;  // norms of the residual subtract the mean, too; 2: biases follow their weights
    int64_t side_by_side;   // attention and MLP see the same norm of the residual, and are added to it together
    int64_t norms_last;     // q_norm and k_norm come after the rotary embedding
    // added_eps: of norms of what is added to the residual. soft_cap 0: none.
    double eps, added_eps, attention_scale, soft_cap, residual_multiplier;
    const Layer* layers;
    const void* final_norm;
    // What gives each layer an input of P elements for a token: a row of a table [V][L * P], and a projection of the token's
    // embedding, E -> L * P, each part of which is normed.
    int64_t input_size;  // P; 0: layers have no inputs
    const void* input_table;
    Linear input_projection;
    const void* input_norm;  // [P]
};

// Elements of a token's row of qkv.
inline int64_t qkv_width(const Model& m, const Layer& layer) {
    const int64_t kept = layer.reads ? 0 : layer.keys_as_values ? 1 : 2;  // K, or K and V
    return ((m.output_gate ? 2 : 1) * layer.num_heads + kept * layer.num_kv_heads) * layer.head_dim +
           layer.gates_per_head * layer.num_heads;
}

// A step as those layers of a group see it that have as many query heads.
struct GroupStep {
    const int32_t* slots;
    const StepWork *work, *late_work;  // of all tokens, of Step::late alone
    const Geometry* geometry;
    int64_t layer_bytes;  // from one place's cache to the next
};

struct Step {
    int64_t num_tokens, threads;
    void* residual;  // [T][E], the embeddings; overwritten
    const int64_t *positions, *ids;
    const GroupStep* groups;
    void *k_cache, *v_cache;  // of the first place
    // Tokens from the first one of their sequence whose hidden state is wanted on, ascending, and their positions. No other
    // goes further than the K and V of the last layer that keeps any: nobody looks at it. Not read if all are.
    const int64_t *late, *late_positions;
    int64_t num_late;
    const int64_t* rows;  // which of these tokens' hidden states are wanted, ascending; not read if all are
    int64_t num_rows;
    void* out;  // [num_rows][E]
    const StateStep* state_step;
    const StatePools* states;  // of each layer with one
};
