// The C functions of paged attention, as the library exports them and the decoder calls them.
#pragma once

#include "paged_work.h"

extern "C" {

// The items of one step. geometry: eight int64, as in paged_cache.h.
// window: tokens that a query sees, itself included; 0: all before it.
StepWork* paged_work_new(const Geometry* geometry, int64_t num_sequences, const int32_t* cu_q, const int32_t* num_tokens,
                     const int32_t* table, int64_t table_stride, int64_t window, int threads);
void paged_work_free(StepWork* work);

// 0, or 1 if the block table names a block that does not exist. dtype: 0 float32, 1 bfloat16, 2 float16, of q and out
// and, unless geometry says int8, of the cache. scale is positive; soft_cap 0: scores are not capped.
// sinks [num_heads]: a score of each head that its softmax counts in its sum; null: there are none.
int paged_attend(int dtype, const Geometry* geometry, const StepWork* work, const void* q, int64_t q_token_stride,
                 int64_t q_head_stride, const void* k_cache, const void* v_cache, void* out, float scale, float soft_cap,
                 const float* sinks);

// strides: four int64, k and v, token and head, in elements.
void paged_write(int dtype, const Geometry* geometry, int64_t num_tokens, int threads, const void* k, const void* v,
                 const int64_t* strides, void* k_cache, void* v_cache, const int32_t* slots);
}

// The same, with out [T][H * D] in this order (D of V). BY_TILES only where head_dim is a multiple of 16 and H * D of 32.
int paged_attend(int dtype, const Geometry* geometry, const StepWork* work, const void* q, int64_t q_token_stride,
                 int64_t q_head_stride, const void* k_cache, const void* v_cache, void* out, float scale, float soft_cap,
                 const float* sinks, Order order);
