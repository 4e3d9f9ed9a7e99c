// SPDX-License-Identifier: Apache-2.0
// Attention of sibling sequences over a shared prefix and their own keys for Hopper (sm_90a);
// semantics in unirl/ops/sibling_prefix_attention.py.
#pragma once

#include <cstdint>

namespace unirl::cuda {

// A tensor [rows, heads, tokens, head size] of two-byte elements; strides in elements, the last axis adjacent,
// address and strides multiples of 16 bytes.
struct HeadedTensor {
  const void* data;
  int64_t row_stride;
  int64_t head_stride;
  int64_t token_stride;
};

struct SiblingAttention {
  HeadedTensor query;         // [N, Hq, L, D]
  HeadedTensor key;           // [N, Hk, L, D]
  HeadedTensor value;         // [N, Hk, L, D]
  HeadedTensor prefix_key;    // [G, Hk, P, D]
  HeadedTensor prefix_value;  // [G, Hk, P, D]
  HeadedTensor out;           // [N, Hq, L, D], written
  float* lse;                 // [N, Hq, L], contiguous, written
  const int64_t* prefix_lengths;  // [G] on the device, or null: P for every group
  int64_t num_rows;
  int64_t num_groups;
  int64_t query_heads;  // at most 64 for each key head
  int64_t key_heads;
  int64_t length;
  int64_t prefix_length;
  int64_t head_size;  // 64 or 128
  bool float16;       // else bfloat16
  float scale;        // positive
};

// Launches on `stream` of the current device; throws std::runtime_error with the reason when it cannot.
void sibling_attention_forward(const SiblingAttention& call, void* stream);

// Buffers and results of the backward pass; head size 128 alone.
struct SiblingAttentionGradients {
  HeadedTensor grad_out;       // [N, Hq, L, D]
  HeadedTensor grad_query;     // [N, Hq, L, D], written
  HeadedTensor grad_key;       // [N, Hk, L, D], written; even strides
  HeadedTensor grad_value;     // [N, Hk, L, D], written; even strides
  float* grad_prefix_key;      // [N, Hk, P, D], written up to the prefix length: each row's part
  float* grad_prefix_value;    // likewise
  float* row_stats;            // [N, Hk, query tiles, 2, 64], scratch
  float* partial_query;        // [N, Hk, query tiles, 64, D], scratch
  int32_t* progress;           // 2 N Hk key tiles + split units, zero
  float* split_sums;           // [split units, 2, 128, D], scratch
};

// Query and key tiles of each row and key head, which size the scratch buffers.
int64_t sibling_attention_query_tiles(int64_t length, int64_t query_heads, int64_t key_heads);
int64_t sibling_attention_key_tiles(int64_t length, int64_t prefix_length);

// Units of the backward pass (a key tile of a row and key head) that two blocks share, on the current device.
int64_t sibling_attention_split_units(int64_t num_rows, int64_t query_heads, int64_t key_heads, int64_t length,
                                      int64_t prefix_length);

// `call` holds the forward's tensors, `out` and `lse` its results.
void sibling_attention_backward(const SiblingAttention& call, const SiblingAttentionGradients& gradients,
                                void* stream);

}  // namespace unirl::cuda
