// What a decoder's step is given. The structs are mirrored by pagedcli.native.structs.
#pragma once

#include "experts.h"
#include "linear.h"
#include "paged_attention.h"
#include "recurrent.h"

// Norms are [E], or null: the layer does not have it.
struct Layer {
    const void *input_norm, *input_norm_after, *mlp_norm, *mlp_norm_after;
    const void *q_norm, *k_norm;  // of each head [D], or of all heads [H * D], [G * D]; or null
    const float* sinks;           // [H], or null
    const void* rope_table;       // [P][rotated]: cosines, then sines; null: no rotary embedding
    const void* query_scales;     // [P], of queries after they are rotated; or null
    int64_t rotated;              // elements of a head that are rotated, its first
    int64_t neighbours;           // pairs are (2i, 2i + 1) instead of (i, i + rotated / 2)
    int64_t group, place;         // of layers that share blocks; among that group's layers, or those with a state
    Linear qkv, attention_out;
    Linear gate_up, down;    // not read in a layer with experts; without weights: the layer has no MLP
    const Experts* experts;  // null: a gated MLP
    const Recurrent* recurrent;  // in place of attention; null: the layer attends
};

struct Model {
    int64_t dtype, num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    int64_t inner_size;   // the largest width of a gated MLP
    int64_t output_gate;  // qkv lists after the query of each head a gate of its result
    int64_t norms_heads;  // q_norm and k_norm are of all heads
    int64_t float_norms;  // the weights of norms are float32 and applied before rounding
    int64_t gate;         // Epilogue of gate_up
    double eps, attention_scale, soft_cap, residual_multiplier;  // soft_cap 0: none
    const Layer* layers;
    const void* final_norm;
};

// A step as the layers of one group see it.
struct GroupStep {
    const int32_t* slots;
    const StepWork* work;
};

struct Step {
    int64_t num_tokens, threads;
    void* residual;  // [T][E], the embeddings; overwritten
    const int64_t* positions;
    const Geometry* geometry;
    const GroupStep* groups;
    void *k_cache, *v_cache;  // of the first place
    int64_t layer_bytes;      // from one place's cache to the next
    const int64_t* rows;      // which tokens' hidden states are wanted, ascending; not read if all are
    int64_t num_rows;
    void* out;  // [num_rows][E]
    const StateStep* state_step;
    const StatePools* states;  // of each layer with one
};
