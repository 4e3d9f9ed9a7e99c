// SPDX-License-Identifier: Apache-2.0
#include "packing.h"

namespace unirl {
namespace {

void copy_tokens(char* target, int64_t target_stride, const char* source, int64_t source_stride, int64_t count,
                 int64_t token_bytes) {
  if (count == 0 || token_bytes == 0) return;
  if (target_stride == token_bytes && source_stride == token_bytes) {
    std::memcpy(target, source, static_cast<size_t>(count * token_bytes));
    return;
  }
  for (int64_t token = 0; token < count; ++token) {
    std::memcpy(target + token * target_stride, source + token * source_stride,
                static_cast<size_t>(token_bytes));
  }
}

}  // namespace

void pad_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames,
                 int64_t bound, int64_t token_bytes, int num_threads) {
  const int64_t runs = static_cast<int64_t>(rows.size()) * num_frames;
  parallel_for(runs, bound * token_bytes / 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      const PackedRow& row = rows[run / num_frames];
      const int64_t frame = run % num_frames;
      char* target = padded.data + (run / num_frames) * padded.row_stride + frame * padded.frame_stride;
      copy_tokens(target, padded.token_stride, row.data + frame * row.frame_stride, row.token_stride, row.length,
                  token_bytes);
      const int64_t tail = (bound - row.length) * token_bytes;
      if (tail > 0) std::memset(target + row.length * token_bytes, 0, static_cast<size_t>(tail));
    }
  });
}

void trim_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames,
                  int64_t token_bytes, int num_threads) {
  int64_t longest = 0;
  for (const PackedRow& row : rows) longest = std::max(longest, row.length);
  const int64_t runs = static_cast<int64_t>(rows.size()) * num_frames;
  parallel_for(runs, longest * token_bytes / 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      const PackedRow& row = rows[run / num_frames];
      const int64_t frame = run % num_frames;
      const char* source = padded.data + (run / num_frames) * padded.row_stride + frame * padded.frame_stride;
      copy_tokens(row.data + frame * row.frame_stride, row.token_stride, source, padded.token_stride, row.length,
                  token_bytes);
    }
  });
}

}  // namespace unirl
