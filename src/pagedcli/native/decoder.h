// What a decoder's step is given. The structs are mirrored by pagedcli.native.structs.
#pragma once

#include "linear.h"
#include "paged_attention.h"

struct Layer {
    const void *input_norm, *mlp_norm;
    const void *q_norm, *k_norm;  // [D], or null
    Linear qkv, attention_out, gate_up, down;
};

struct Model {
    int64_t dtype, num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    double eps;
    const Layer* layers;
    const void *final_norm, *rope_table;  // [P][D]: cosines, then sines
};

struct Step {
    int64_t num_tokens, threads;
    void* residual;  // [T][E], the embeddings; overwritten
    const int64_t* positions;
    const int32_t* slots;
    const Geometry* geometry;
    const StepWork* work;
    void *k_cache, *v_cache;  // of the first layer
    int64_t layer_bytes;      // from one layer's cache to the next
    const int64_t* rows;      // which tokens' hidden states are wanted, ascending; not read if all are
    int64_t num_rows;
    void* out;  // [num_rows][E]
};
