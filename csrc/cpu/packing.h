// SPDX-License-Identifier: Apache-2.0
// Rows [K, seq_i, C] to [N, K, S, C] with zeros on the right, and back; bytes, whatever the dtype.
#pragma once

#include "common.h"

namespace unirl {

// One row of an unpadded list; strides in bytes, the C values of a token adjacent.
struct PackedRow {
  char* data;
  int64_t frame_stride;
  int64_t token_stride;
  int64_t length;
};

// The padded tensor; strides in bytes, the C values of a token adjacent.
struct PaddedTensor {
  char* data;
  int64_t row_stride;
  int64_t frame_stride;
  int64_t token_stride;
};

void pad_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames,
                 int64_t bound, int64_t token_bytes, int num_threads);

void trim_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames,
                  int64_t token_bytes, int num_threads);

}  // namespace unirl
