// A mixture of experts: gated MLPs of which a router picks some for each token. Mirrored by pagedcli.native.structs.
#pragma once

#include "linear.h"

struct Experts {
    int64_t num_experts, num_per_token;
    int64_t renormalize;           // the picked scores are divided by their sum
    int64_t sigmoid;               // scores are sigmoids of the logits instead of their softmax
    // Groups that experts form, up to 64, how many of them stay for a token, and how many scores of a group's best count for
    // it, 1 or 2; 0: there are none.
    int64_t num_groups, num_kept_groups, num_best;
    double scale;                  // of the picked scores
    double least_sum;              // added to their sum before they are divided by it
    double nearness;               // if not 0, each picked expert is weighted among those left that are at most so much smaller
    const float* router_bias;       // [num_experts], added to the scores for picking alone; null: nothing is
    const float* expert_scales;            // [num_experts], multiply the weights of the picked; null: nothing does
    Linear router;                 // E -> num_experts
    const Linear *gate_up, *down;  // [num_experts]
    const Linear *shared_gate_up, *shared_down, *shared_gate;  // of an expert for every token; null: there is none, or no gate
};

// The weighted sum of each token's experts: x [num_tokens][E] -> out [num_tokens][E]. gate: Epilogue of gate_up.
// routed [num_tokens][E]: what the router sees; null: x.
void experts_forward(const Experts& experts, int64_t dtype, const void* x, int64_t num_tokens, void* out, Epilogue gate,
                     int threads, const void* routed = nullptr);
