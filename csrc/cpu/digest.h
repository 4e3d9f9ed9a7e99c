// SPDX-License-Identifier: Apache-2.0
// 128-bit digests, see unirl/ops/digest.py for the definition and its sources.
#pragma once

#include "common.h"

namespace unirl {

constexpr int64_t kTileWords = 128;
constexpr int64_t kDigestLanes = 4;
constexpr int64_t kNumKeys = kTileWords + kDigestLanes - 1;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kTileSalts[2] = {0xD6E8FEB86659FD93ull, 0xA0761D6478BD642Full};
constexpr uint64_t kLengthSalts[2] = {0xE7037ED1A0B428DBull, 0x8EBC6AF09C88C6E3ull};

// The kNumKeys key words that every tile uses.
const uint64_t* digest_keys();

// Row i is values[offsets[i] .. offsets[i + 1]) when offsets is given, else row_size words from values + i * stride.
// out is [N, 2].
void layout_digest(const int64_t* values, int64_t num_rows, int64_t row_size, int64_t stride,
                   const int64_t* offsets, int64_t* out, int num_threads);

// A contiguous tensor's bytes and its two header words.
struct DigestInput {
  const void* data;
  int64_t num_bytes;
  uint64_t header[2];
};

// out is [M, 2].
void tensor_digest(const std::vector<DigestInput>& inputs, int64_t* out, int num_threads);

}  // namespace unirl
