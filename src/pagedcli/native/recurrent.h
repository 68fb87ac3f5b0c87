// Layers that keep a state per sequence instead of K and V of each token: pagedcli.layers.recurrent has the formulas.
//
// A state is the last kernel - 1 inputs of the convolution, [kernel - 1][channels] of the activations' type, and a float
// matrix [key_dim][value_dim] per head. Every token is one step of the recurrence, with the same operations in the same
// order however a sequence is cut into steps, so no bit depends on chunks, company or threads.
#pragma once

#include "linear.h"

enum RecurrentKind : int64_t { GATED_DELTA, MAMBA2, SHORT_CONV, KIMI_DELTA };

// Mirrored by pagedcli.native.structs, as the next two.
struct Recurrent {
    int64_t kind, kernel, channels;  // of the convolution
    int64_t num_key_heads, num_heads, key_dim, value_dim;  // Mamba-2: groups that share B and C; 0 without a matrix
    int64_t interleaved;      // the projections list key head by key head
    int64_t tiled;            // a key head serves every num_key_heads-th head instead of neighbours
    int64_t norm_group;       // elements that a gated norm of Mamba-2 norms together
    double correction;        // factor of how much a gated delta rule corrects
    double eps, least_step, most_step;
    const float *conv, *conv_bias;           // [kernel][channels]; [channels] or null
    const float *decay, *step_bias, *skip;   // [num_heads]; skip: of Mamba-2; step_bias of Kimi's: [num_heads][key_dim]
    const void* norm;                        // of the activations' type: [value_dim], of Mamba-2 [inner], or null: it only gates
    Linear inner, gates, out;                // gates: of gated delta nets and Kimi's
    // Of Kimi's: E -> key_dim -> num_heads * key_dim, what each channel of a key forgets, and the gates of the result.
    Linear decay_down, decay_up, shares_down, shares_up;
};

// One layer's pools.
struct StatePools {
    void* conv;     // [slots][kernel - 1][channels]
    float* matrix;  // [slots][heads][key_dim][value_dim], or null
};

// Which slots the sequences of a step use.
struct StateStep {
    int64_t num_seqs;
    const int32_t *reads, *writes, *cu_q;  // reads: -1 for a state of zeros
    const int32_t* ends;  // the state written is that before this token; guesses may follow
};

// Width of the result.
inline int64_t inner_of(const Recurrent& r) { return r.kind == SHORT_CONV ? r.channels : r.num_heads * r.value_dim; }

// x [num_tokens][E] -> out [num_tokens][inner], the input of r.out. Changes the pools.
void recurrent_forward(const Recurrent& r, int64_t dtype, const void* x, int64_t num_tokens, const StateStep& step,
                       const StatePools& pools, void* out, int threads);
