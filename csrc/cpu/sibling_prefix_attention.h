// SPDX-License-Identifier: Apache-2.0
// Attention over a group's prefix and a sibling's own keys in float32, forward and backward. A row's operations
// depend on its own length and prefix only, so that its bits do not depend on how many siblings or groups there are.
#pragma once

#include "common.h"

namespace unirl {

// [rows, heads, tokens, D] with adjacent values of a head; strides in elements.
struct Headed {
  float* data;
  int64_t row_stride;
  int64_t head_stride;
  int64_t token_stride;
  float* at(int64_t row, int64_t head, int64_t token) const {
    return data + row * row_stride + head * head_stride + token * token_stride;
  }
};

struct AttentionShape {
  int64_t num_rows;
  int64_t groups;
  int64_t query_heads;
  int64_t key_heads;
  int64_t length;
  int64_t prefix_length;
  int64_t head_size;
};

struct AttentionInputs {
  Headed query, key, value, prefix_key, prefix_value;
  const int64_t* prefix_lengths;  // [G], or null for prefix_length everywhere
  AttentionShape shape;
  float scale;
};

// lse is contiguous [N, Hq, L].
void sibling_prefix_attention(const AttentionInputs& inputs, const Headed& out, float* lse, int num_threads);

struct AttentionGradients {
  Headed query, key, value, prefix_key, prefix_value;
};

// Prefix tokens past a group's length get zero.
void sibling_prefix_attention_backward(const AttentionInputs& inputs, const Headed& out, const float* lse,
                                       const Headed& grad_out, const AttentionGradients& gradients,
                                       int num_threads);

}  // namespace unirl
