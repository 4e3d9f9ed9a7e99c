// SPDX-License-Identifier: Apache-2.0
// Attention of sibling sequences over a shared prefix and their own keys, forward, for Hopper (sm_90a);
// semantics in unirl/ops/sibling_prefix_attention.py.
#pragma once

#include <cstdint>

extern "C" {

// A tensor [rows, heads, tokens, head size] of two-byte elements; strides in elements, the last axis adjacent.
struct UnirlStrided {
  const void* data;
  int64_t row_stride;
  int64_t head_stride;
  int64_t token_stride;
};

struct UnirlSiblingAttention {
  UnirlStrided query;         // [N, Hq, L, D]
  UnirlStrided key;           // [N, Hk, L, D]
  UnirlStrided value;         // [N, Hk, L, D]
  UnirlStrided prefix_key;    // [G, Hk, P, D]
  UnirlStrided prefix_value;  // [G, Hk, P, D]
  UnirlStrided out;           // [N, Hq, L, D], written
  float* lse;                 // [N, Hq, L], contiguous, written
  const int64_t* prefix_lengths;  // [G] on the device, or null: P for every group
  int64_t num_rows;
  int64_t num_groups;
  int64_t query_heads;
  int64_t key_heads;
  int64_t length;
  int64_t prefix_length;
  int64_t head_size;
  int32_t float16;         // 1: float16, 0: bfloat16
  int32_t keys_per_tile;   // 128, 160 or 176 (head size 64: 128)
  int32_t blocks_sharing;  // 1, or 2: two blocks of a cluster read each key tile once
  float scale;             // positive
};

// Launches on `stream` of the current device. Returns 0, or -1 with the reason in `message`.
int unirl_sibling_attention_forward(const UnirlSiblingAttention* call, void* stream, char* message,
                                    int message_bytes);
}
