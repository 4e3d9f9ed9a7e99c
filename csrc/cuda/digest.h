// SPDX-License-Identifier: Apache-2.0
// The GPU twins of cpu/digest.h; the same bits as there.
#pragma once

#include <cstdint>

namespace unirl::cuda {

// Tiles of one tensor are handled four at a time; `first_batch` counts those of the tensors before it.
constexpr int64_t kTilesPerBatch = 4;

// One row of the device table that tensor_digest reads.
struct DigestEntry {
  int64_t address;
  int64_t num_bytes;
  uint64_t header[2];
  int64_t first_batch;
  int64_t num_batches;
};

void layout_digest(const int64_t* values, int64_t num_rows, int64_t row_size, int64_t stride,
                   const int64_t* offsets, int64_t* out, void* stream);

// `sums` is zeroed device memory of 2 * num_tensors + 1 words (the last one counts finished blocks).
void tensor_digest(const DigestEntry* table, int64_t num_tensors, int64_t num_batches, uint64_t* sums, int64_t* out,
                   void* stream);

}  // namespace unirl::cuda
