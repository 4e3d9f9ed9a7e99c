// SPDX-License-Identifier: Apache-2.0
// The GPU twins of cpu/packing.h: one launch for up to 512 rows, on the given stream.
#pragma once

#include "cpu/packing.h"

namespace unirl::cuda {

void pad_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames, int64_t bound,
                 int64_t token_bytes, void* stream);

void trim_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames,
                  int64_t token_bytes, void* stream);

}  // namespace unirl::cuda
