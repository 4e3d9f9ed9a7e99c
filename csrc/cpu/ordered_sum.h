// SPDX-License-Identifier: Apache-2.0
// A sum of fixed order: blocks of 256, 16 lanes a block, lanes halved, blocks added pairwise in double. Trailing
// zeros change nothing, so that a padded row gives the bits of the unpadded one. unirl/ops/_reduction.py is the
// same order in PyTorch.
#pragma once

#include "common.h"

namespace unirl {

constexpr int64_t kLanes = 16;

// A short block's size, rounded up to whole lanes: what has to be filled with zeros before it is summed.
UNIRL_INLINE int64_t padded_size(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Sum of the first `size` values of a block, `size` a positive multiple of kLanes.
template <typename T>
UNIRL_INLINE T sum_block(const T* values, int64_t size = kBlock) {
  T lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = values[lane];
  for (int64_t step = 1; step < size / kLanes; ++step) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lanes[lane] + values[step * kLanes + lane];
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
  }
  return lanes[0];
}

// Adds block sums in a balanced binary tree of neighbours, as they arrive: slot l holds the sum of 2^l blocks.
class PairwiseSum {
 public:
  void add(double value) {
    int level = 0;
    for (uint64_t full = count_; full & 1u; full >>= 1) value = slots_[level++] + value;
    slots_[level] = value;
    ++count_;
  }

  // The tree completed with zeros; adding a zero leaves a sum as it is.
  double total() const {
    double sum = 0.0;
    int level = 0;
    for (uint64_t full = count_; full != 0; full >>= 1, ++level) {
      if (full & 1u) sum = slots_[level] + sum;
    }
    return sum;
  }

 private:
  double slots_[64] = {};
  uint64_t count_ = 0;
};

}  // namespace unirl
