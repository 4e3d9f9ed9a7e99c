// SPDX-License-Identifier: Apache-2.0
#include "noise.h"

namespace unirl {
namespace {

UNIRL_CLONES void fill_row(void* row, Dtype dtype, int64_t row_size, uint64_t key, uint32_t step,
                           uint32_t stream) {
  float block[kBlock];
  for (int64_t first = 0; first < row_size; first += kBlock) {
    noise_block(key, static_cast<uint64_t>(first), step, stream, block);
    store_block(row, dtype, first, std::min(kBlock, row_size - first), block);
  }
}

}  // namespace

void keyed_normal(const MutableRows& out, int64_t num_rows, int64_t row_size, uint64_t seed,
                  const int64_t* row_keys, uint32_t step, uint32_t stream, int num_threads) {
  parallel_for(num_rows, row_size * 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint64_t key = noise_key(seed, static_cast<uint64_t>(row_keys[row]));
      fill_row(out.row(row), out.dtype, row_size, key, step, stream);
    }
  });
}

}  // namespace unirl
