// SPDX-License-Identifier: Apache-2.0
// Backward of the attention over a shared prefix and own keys on Hopper's matrix units, in one pass.
//
// A block owns 128 keys of one row and key head, two warpgroups 64 keys each, and walks over the query tiles (the
// rows of the forward: all query heads of the key head, token by token). Scores and their gradients are computed
// transposed, keys down and rows across, so that both feed the products for dK and dV from registers. What the
// tile adds to dQ goes through shared memory, because it sums over the keys of both warpgroups.
//
// dQ sums over blocks. They add in the order of their keys: a block waits until the one before it has added to the
// query tile, so that every run gives the same bits. Blocks of one row and key head run side by side, each some tiles
// behind its predecessor, and work is dealt out in that order, so that a block never waits for one that has not
// started. One warp follows the predecessor's progress, two more publish this block's; the warpgroups that compute
// look at counters in shared memory.
//
// When the last round of units leaves most blocks idle, some units are split: one block takes the first half of the
// query tiles before its other units, another the second half after its own. Sums go on from where they were left, so
// that a split changes no bit.
//
// The gradients of a shared prefix are written for each row separately (float32) and summed by the caller.
#pragma once

#include "cuda/sibling_prefix_forward.cuh"

namespace unirl::cuda {

constexpr int kBackwardStages = 3;       // query tiles in flight
constexpr int kTileRows = kGroupRows;    // query rows of a tile
// The feeding warps spill, which costs nothing beside the copies they wait for; the computing ones would spill in the loop.
constexpr int kBackwardFeedRegisters = 24;
constexpr int kBackwardComputeRegisters = 240;
static_assert(kBackwardFeedRegisters + kConsumers * kBackwardComputeRegisters <= (kConsumers + 1) * 168);
constexpr int kAddedSlots = 4;           // query tiles added to dQ and not yet published
constexpr int kRowStatBytes = 2 * kTileRows * 4;

struct BackwardArguments {
  CUtensorMap query;
  CUtensorMap grad_out;
  RowMaps own[2];  // keys, values
  RowMaps prefix[2];
  const float* row_stats;  // [N, Hk, query tiles, 2, 64]: log2-sum-exp, inner product of output and its gradient
  float* partial_query;    // [N, Hk, query tiles, 2, 8, 128, 4]: unscaled dQ, in the order of the registers
  int32_t* progress;       // [N, Hk, key tiles, 2], zero: query tiles to which a unit's warpgroups have added
  float* split_sums;       // [split units, 2, 2, 16, 128, 4]: dK and dV of each warpgroup, in the order of the registers
  int32_t* split_threads;  // [split units], zero: threads that have left their sums
  void* grad_key[2];       // keys, values: [N, Hk, L, D]
  float* grad_prefix[2];   // [N, Hk, P, D], contiguous
  int64_t grad_key_strides[2][3];
  const int64_t* prefix_lengths;
  float scale;
  int32_t length;
  int32_t prefix_length;
  int32_t key_heads;
  int32_t ratio;
  int32_t tokens;       // of a query tile
  int32_t siblings;
  int32_t query_tiles;  // of a row and key head
  int32_t key_tiles;    // of a row with the longest prefix
  int32_t num_units;    // rows * key heads * key_tiles
  int32_t split_units;  // the first so many, at most half the number of blocks
};

struct BackwardBarriers {
  uint32_t base;
  __device__ uint32_t keys_full() const { return base; }
  __device__ uint32_t keys_empty() const { return base + 8; }
  __device__ uint32_t query_full(int stage) const { return base + 8 * (2 + stage); }
  __device__ uint32_t grad_full(int stage) const { return base + 8 * (2 + kBackwardStages + stage); }
  __device__ uint32_t rows_empty(int stage) const { return base + 8 * (2 + 2 * kBackwardStages + stage); }
  __device__ uint32_t score_full(int buffer) const { return base + 8 * (2 + 3 * kBackwardStages + buffer); }
  __device__ uint32_t score_empty(int buffer) const { return base + 8 * (4 + 3 * kBackwardStages + buffer); }
  __device__ uint32_t added(int group, int slot) const {
    return base + 8 * (6 + 3 * kBackwardStages + group * kAddedSlots + slot);
  }
  __device__ uint32_t published(int group, int slot) const {
    return base + 8 * (6 + 3 * kBackwardStages + (2 + group) * kAddedSlots + slot);
  }
  // Not a barrier: query tiles since the start of the block to which a warpgroup may add.
  __device__ uint32_t allowed(int group) const {
    return base + 8 * (6 + 3 * kBackwardStages + 4 * kAddedSlots) + 4 * group;
  }
  static constexpr int kBytes = 8 * (7 + 3 * kBackwardStages + 4 * kAddedSlots);
};

template <typename ElementType>
struct BackwardConfig {
  using Element = ElementType;
  static constexpr int kHeadSize = 128;
  static constexpr int kKeys = 128;
  static constexpr int kPanels = kHeadSize / kPanel;
  static constexpr int kTilePanelBytes = kKeys * kRowBytes;
  static constexpr int kTileBytes = kPanels * kTilePanelBytes;
  static constexpr int kRowPanelBytes = kTileRows * kRowBytes;
  static constexpr int kRowTileBytes = kPanels * kRowPanelBytes;
  static constexpr int kScoreGradBytes = kKeys * kRowBytes;
  static constexpr int kKeyOffset = 0;
  static constexpr int kValueOffset = kKeyOffset + kTileBytes;
  static constexpr int kQueryOffset = kValueOffset + kTileBytes;
  static constexpr int kGradOffset = kQueryOffset + kBackwardStages * kRowTileBytes;
  static constexpr int kScoreGradOffset = kGradOffset + kBackwardStages * kRowTileBytes;
  static constexpr int kStatOffset = kScoreGradOffset + 2 * kScoreGradBytes;
  static constexpr int kBarrierOffset = kStatOffset + kBackwardStages * kRowStatBytes;
  static constexpr int kSharedBytes = kBarrierOffset + BackwardBarriers::kBytes + 1024;
  static_assert(kSharedBytes <= 232448);
};

// A block's units in order: the first half of a split one, whole ones, the second half of a split one. No block has
// halves of both kinds. -1 is the end.
__device__ __forceinline__ int whole_or_last_unit(const BackwardArguments& arguments, int index) {
  if (index < arguments.num_units) return index;
  return max(-1, static_cast<int>(blockIdx.x) - (static_cast<int>(gridDim.x) - arguments.split_units));
}

__device__ __forceinline__ int first_unit(const BackwardArguments& arguments) {
  const int block = static_cast<int>(blockIdx.x), split = arguments.split_units;
  return block < split ? block : whole_or_last_unit(arguments, split + block);
}

__device__ __forceinline__ int next_unit(const BackwardArguments& arguments, int index) {
  const int block = static_cast<int>(blockIdx.x), split = arguments.split_units;
  if (index >= split) return whole_or_last_unit(arguments, index + static_cast<int>(gridDim.x));
  return block < split ? whole_or_last_unit(arguments, split + block) : -1;
}

// One unit of work: a tile of keys of a row and key head, and the query tiles `first` .. `end` - 1 of the head.
struct KeyUnit {
  int head, row, key_head, group, prefix, padded, tile, tiles, first, end;

  template <typename C>
  __device__ static KeyUnit at(const BackwardArguments& arguments, int index) {
    KeyUnit unit;
    unit.head = index / arguments.key_tiles;
    unit.tile = index - unit.head * arguments.key_tiles;
    unit.row = unit.head / arguments.key_heads;
    unit.key_head = unit.head - unit.row * arguments.key_heads;
    unit.group = unit.row / arguments.siblings;
    unit.prefix = arguments.prefix_length;
    if (arguments.prefix_lengths != nullptr) {
      const int64_t asked = arguments.prefix_lengths[unit.group];
      unit.prefix = static_cast<int>(asked < 0 ? 0 : asked < unit.prefix ? asked : unit.prefix);
    }
    unit.padded = (unit.prefix + kChunk - 1) / kChunk * kChunk;
    unit.tiles = (unit.padded + arguments.length + C::kKeys - 1) / C::kKeys;
    const bool is_split = index < arguments.split_units;
    const bool begins = static_cast<int>(blockIdx.x) < arguments.split_units;
    unit.first = is_split && !begins ? arguments.query_tiles / 2 : 0;
    unit.end = is_split && begins ? arguments.query_tiles / 2 : arguments.query_tiles;
    return unit;
  }
};

// ---- the warps that feed and keep order ------------------------------------------------------------------------

template <typename C>
__device__ void feed_backward(const BackwardArguments& arguments, uint32_t shared, const BackwardBarriers& barriers,
                              int lane) {
  uint32_t units = 0;
  uint32_t count = 0;  // query tiles fed
  for (int index = first_unit(arguments); index >= 0; index = next_unit(arguments, index)) {
    const KeyUnit unit = KeyUnit::at<C>(arguments, index);
    if (unit.tile >= unit.tiles) continue;
    barrier_wait(barriers.keys_empty(), (units & 1) ^ 1);
    ++units;
    if (unit.first > 0 && lane == 0) {
      while (load_acquire(arguments.split_threads + index) < 128 * kConsumers) {
      }
    }
    __syncwarp();
    for (int operand = 0; operand < 2; ++operand) {
      feed_tile<C>(arguments, unit, operand, unit.tile * C::kKeys,
                   shared + (operand == 0 ? C::kKeyOffset : C::kValueOffset), barriers.keys_full(), lane);
    }
    __syncwarp();
    if (lane == 0) {
      const uint32_t bytes = C::kPanels * arguments.tokens * arguments.ratio * kRowBytes;
      const float* stats = arguments.row_stats +
                           static_cast<int64_t>(unit.head) * arguments.query_tiles * (2 * kTileRows);
      for (int tile = unit.first; tile < unit.end; ++tile, ++count) {
        const uint32_t stage = count % kBackwardStages;
        barrier_wait(barriers.rows_empty(stage), ((count / kBackwardStages) & 1) ^ 1);
        const Box at{0, unit.key_head * arguments.ratio, tile * arguments.tokens, 0, unit.row};
        barrier_expect(barriers.query_full(stage), bytes + kRowStatBytes);
        barrier_expect(barriers.grad_full(stage), bytes);
        for (int panel = 0; panel < C::kPanels; ++panel) {
          copy_to_shared(arguments.query,
                         shared + C::kQueryOffset + stage * C::kRowTileBytes + panel * C::kRowPanelBytes,
                         barriers.query_full(stage), Box{at.x0, at.x1, at.x2, panel, at.x4});
        }
        copy_bytes_to_shared(stats + tile * (2 * kTileRows), shared + C::kStatOffset + stage * kRowStatBytes,
                             barriers.query_full(stage), kRowStatBytes);
        for (int panel = 0; panel < C::kPanels; ++panel) {
          copy_to_shared(arguments.grad_out,
                         shared + C::kGradOffset + stage * C::kRowTileBytes + panel * C::kRowPanelBytes,
                         barriers.grad_full(stage), Box{at.x0, at.x1, at.x2, panel, at.x4});
        }
      }
    }
    __syncwarp();
  }
}

// One thread: lets both warpgroups add to the query tiles that the block before has added to.
template <typename C>
__device__ void follow_predecessor(const BackwardArguments& arguments, const BackwardBarriers& barriers) {
  int32_t before = 0;
  for (int index = first_unit(arguments); index >= 0; index = next_unit(arguments, index)) {
    const KeyUnit unit = KeyUnit::at<C>(arguments, index);
    if (unit.tile >= unit.tiles) continue;
    int32_t seen[2] = {unit.first, unit.first};
    while (seen[0] < unit.end || seen[1] < unit.end) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        int32_t now = unit.end;
        if (unit.tile > 0) {
          now = min(now, load_acquire(arguments.progress + (static_cast<int64_t>(index) - 1) * 2 + group));
        }
        if (now > seen[group]) {
          store_shared_release(barriers.allowed(group), before + now - unit.first);
          seen[group] = now;
        }
      }
    }
    before += unit.end - unit.first;
  }
}

// One thread for each warpgroup: tells the block behind to which query tiles all four warps have added. What is ready
// at once is published at once: a fence for the whole GPU takes long.
template <typename C>
__device__ void publish_progress(const BackwardArguments& arguments, const BackwardBarriers& barriers, int group) {
  uint32_t count = 0;
  for (int index = first_unit(arguments); index >= 0; index = next_unit(arguments, index)) {
    const KeyUnit unit = KeyUnit::at<C>(arguments, index);
    if (unit.tile >= unit.tiles) continue;
    for (int tile = unit.first; tile < unit.end;) {
      const auto parity = [](uint32_t at) { return (at / kAddedSlots) & 1; };
      barrier_wait(barriers.added(group, count % kAddedSlots), parity(count));
      int ready = 1;
      while (ready < kAddedSlots && tile + ready < unit.end &&
             barrier_test(barriers.added(group, (count + ready) % kAddedSlots), parity(count + ready))) {
        ++ready;
      }
      tile += ready;
      if (unit.tile + 1 < unit.tiles) {
        fence_gpu();
        store_relaxed(arguments.progress + static_cast<int64_t>(index) * 2 + group, tile);
      }
      for (; ready > 0; --ready, ++count) barrier_arrive(barriers.published(group, count % kAddedSlots));
    }
  }
}

// ---- the warpgroups that compute -------------------------------------------------------------------------------

// keys x rows: 64 of this warpgroup's keys (of `left`, a tile of keys or values) with the 64 rows of `right`.
template <typename C>
__device__ __forceinline__ void transposed_scores(float (&scores)[kTileRows / 2], uint32_t left, uint32_t right) {
  const uint64_t a = describe_row_panels(left);
  const uint64_t b = describe_row_panels(right);
#pragma unroll
  for (int k = 0; k < C::kHeadSize / 16; ++k) {
    const int panel = k / 4;
    const int step = k % 4;
    product_shared<typename C::Element>(scores, a + (panel * C::kTilePanelBytes + step * 32) / 16,
                                        b + (panel * C::kRowPanelBytes + step * 32) / 16, k > 0);
  }
}

// keys x head size, summed over the 64 rows of `rows`.
template <typename C>
__device__ __forceinline__ void sum_over_rows(float (&sum)[C::kHeadSize / 2], uint32_t (&weights)[kTileRows / 4],
                                              uint32_t rows) {
  const uint64_t b = describe_column_panels(rows, C::kRowPanelBytes);
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k) {
    product_registers<typename C::Element>(sum, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                                           weights[4 * k + 3], b + k * 16 * kRowBytes / 16);
  }
}

// rows x 64 columns of the head, summed over the 128 keys of the tile.
template <typename C>
__device__ __forceinline__ void sum_over_keys(float (&sum)[kTileRows / 2], uint32_t score_grads, uint32_t key_panel) {
  const uint64_t a = describe_column_panels(score_grads, C::kScoreGradBytes);
  const uint64_t b = describe_column_panels(key_panel, C::kTilePanelBytes);
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k) {
    product_shared_columns<typename C::Element>(sum, a + k * 16 * kRowBytes / 16, b + k * 16 * kRowBytes / 16, k > 0);
  }
}

__device__ __forceinline__ void load_pair(uint32_t address, float& first, float& second) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address));
}

// Where a thread of a warpgroup leaves its sums of dK and dV of a split unit.
__device__ __forceinline__ float4* place_of_sums(const BackwardArguments& arguments, int index, int group, int thread) {
  return reinterpret_cast<float4*>(arguments.split_sums) + (static_cast<int64_t>(index) * 2 + group) * (2 * 16 * 128) +
         thread;
}

// Leaves a thread's sums for the block that has the unit's second half.
template <int kCount>
__device__ __forceinline__ void leave_sums(const BackwardArguments& arguments, int index, int group, int thread,
                                           const float (&key_grad)[kCount], const float (&value_grad)[kCount]) {
  float4* place = place_of_sums(arguments, index, group, thread);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float* key = key_grad + 4 * i;
    const float* value = value_grad + 4 * i;
    __stcg(place + i * 128, make_float4(key[0], key[1], key[2], key[3]));
    __stcg(place + (kCount / 4 + i) * 128, make_float4(value[0], value[1], value[2], value[3]));
  }
  // Each thread for itself: where one speaks for its warp, the compiler no longer knows that the warp's threads go
  // together, and addresses of the loop move from uniform registers to those of the sums.
  count_release(arguments.split_threads + index);
}

// Takes up the sums that the same thread of another block has left; the warp that feeds has waited for them.
template <int kCount>
__device__ __forceinline__ void take_sums(const BackwardArguments& arguments, int index, int group, int thread,
                                          float (&key_grad)[kCount], float (&value_grad)[kCount]) {
  const float4* place = place_of_sums(arguments, index, group, thread);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 key = __ldcg(place + i * 128);
    const float4 value = __ldcg(place + (kCount / 4 + i) * 128);
    key_grad[4 * i] = key.x;
    key_grad[4 * i + 1] = key.y;
    key_grad[4 * i + 2] = key.z;
    key_grad[4 * i + 3] = key.w;
    value_grad[4 * i] = value.x;
    value_grad[4 * i + 1] = value.y;
    value_grad[4 * i + 2] = value.z;
    value_grad[4 * i + 3] = value.w;
  }
}

// Adds a half tile's part of dQ to those of the blocks before, or stores it as the first.
__device__ __forceinline__ void add_query_grad(float* partial, bool first, const float (&part)[kTileRows / 2]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    store_or_add(partial + i * 512, first, part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]);
  }
}

// Writes this thread's two keys of dK (operand 0) or dV (1).
template <typename C>
__device__ __forceinline__ void write_key_grad(const BackwardArguments& arguments, const KeyUnit& unit,
                                               const float (&grad)[C::kHeadSize / 2], int operand, int group,
                                               int thread, float factor) {
  using Element = typename C::Element;
  const int lane = thread % 32;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int key = unit.tile * C::kKeys + group * 64 + thread / 32 * 16 + lane / 4 + 8 * row;
    if (key < unit.prefix) {
      float* target = arguments.grad_prefix[operand] +
                      (static_cast<int64_t>(unit.head) * arguments.prefix_length + key) * C::kHeadSize +
                      (lane % 4) * 2;
#pragma unroll
      for (int i = 0; i < C::kHeadSize / 8; ++i) {
        *reinterpret_cast<float2*>(target + 8 * i) =
            make_float2(grad[4 * i + 2 * row] * factor, grad[4 * i + 2 * row + 1] * factor);
      }
    } else if (key >= unit.padded && key < unit.padded + arguments.length) {
      const int64_t* strides = arguments.grad_key_strides[operand];
      Element* target = static_cast<Element*>(arguments.grad_key[operand]) + unit.row * strides[0] +
                        unit.key_head * strides[1] + (key - unit.padded) * strides[2] + (lane % 4) * 2;
#pragma unroll
      for (int i = 0; i < C::kHeadSize / 8; ++i) {
        *reinterpret_cast<uint32_t*>(target + 8 * i) =
            pack_pair<Element>(grad[4 * i + 2 * row] * factor, grad[4 * i + 2 * row + 1] * factor);
      }
    }
  }
}

template <typename C>
__device__ void compute_backward(const BackwardArguments& arguments, uint32_t shared,
                                 const BackwardBarriers& barriers, int group, int thread) {
  using Element = typename C::Element;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const float scale_log2 = arguments.scale * kLog2E;
  const uint32_t score_grads = shared + C::kScoreGradOffset;
  const int matrix_row = group * 64 + warp * 16 + lane % 16;
  const uint32_t matrix_place = matrix_row * kRowBytes + ((lane / 16) ^ (matrix_row % 8)) * 16;

  float key_grad[C::kHeadSize / 2];
  float value_grad[C::kHeadSize / 2];
  float scores[kTileRows / 2];
  float grads[kTileRows / 2];
  uint32_t weights[kTileRows / 4];
  uint32_t packed_grads[kTileRows / 4];
  uint32_t units = 0;
  uint32_t count = 0;  // query tiles seen
  uint32_t sums = 0;   // query tiles added to dQ
  int32_t allowed = 0; // query tiles to which it may add, as last seen

  for (int index = first_unit(arguments); index >= 0; index = next_unit(arguments, index)) {
    KeyUnit unit = KeyUnit::at<C>(arguments, index);
    if (unit.tile >= unit.tiles) continue;
    const int first_key = unit.tile * C::kKeys;
    const int end = unit.padded + arguments.length;
    const bool all_exist = first_key + C::kKeys <= end && (first_key + C::kKeys <= unit.prefix || first_key >= unit.padded ||
                                                           unit.prefix == unit.padded);
    bool exists[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int key = first_key + group * 64 + warp * 16 + lane / 4 + 8 * row;
      exists[row] = key < unit.prefix || (key >= unit.padded && key < end);
    }
    const bool first_to_add = unit.tile == 0;
    float* partial = arguments.partial_query + thread * 4 +
                     ((static_cast<int64_t>(unit.head) * arguments.query_tiles + unit.first) * 2 + group) *
                         (kTileRows * kPanel);

    const auto begin_query_grad = [&](uint32_t at) {
      uint32_t panel_offset = group * C::kTilePanelBytes;
      asm volatile("" : "+r"(panel_offset));
      barrier_wait(barriers.score_full(at % 2), (at / 2) & 1);
      pin(grads);
      product_begin();
      sum_over_keys<C>(grads, score_grads + (at % 2) * C::kScoreGradBytes, shared + C::kKeyOffset + panel_offset);
      product_commit();
    };
    const auto add_next_query_grad = [&] {
      while (allowed <= static_cast<int32_t>(sums)) allowed = load_shared_acquire(barriers.allowed(group));
      add_query_grad(partial, first_to_add, grads);
      partial += 2 * kTileRows * kPanel;
      const int slot = sums % kAddedSlots;
      barrier_wait(barriers.published(group, slot), ((sums / kAddedSlots) & 1) ^ 1);
      __syncwarp();
      release(barriers.added(group, slot), lane);
      ++sums;
    };

    barrier_wait(barriers.keys_full(), units & 1);
    ++units;
    if (unit.first == 0) {
#pragma unroll
      for (int i = 0; i < C::kHeadSize / 2; ++i) key_grad[i] = value_grad[i] = 0.0f;
    } else {
      take_sums(arguments, index, group, thread, key_grad, value_grad);
    }
#pragma unroll 1
    for (int step = 0; step < unit.end - unit.first; ++step, ++count) {
      const uint32_t stage = count % kBackwardStages;
      const uint32_t buffer = count % 2;
      const uint32_t parity = (count / kBackwardStages) & 1;
      const uint32_t rows = shared + C::kQueryOffset + stage * C::kRowTileBytes;
      const uint32_t row_grads = shared + C::kGradOffset + stage * C::kRowTileBytes;
      const uint32_t stats = shared + C::kStatOffset + stage * kRowStatBytes + (lane % 4) * 8;
      // Opaque, so that descriptors are made anew instead of holding registers through the loop.
      uint32_t group_offset = group * 64 * kRowBytes;
      asm volatile("" : "+r"(group_offset));

      barrier_wait(barriers.query_full(stage), parity);
      pin(scores);
      product_begin();
      transposed_scores<C>(scores, shared + C::kKeyOffset + group_offset, rows);
      product_commit();
      float row_stats[kTileRows / 4];
#pragma unroll
      for (int i = 0; i < kTileRows / 8; ++i) load_pair(stats + 32 * i, row_stats[2 * i], row_stats[2 * i + 1]);
      barrier_wait(barriers.grad_full(stage), parity);
      pin(grads);
      product_begin();
      transposed_scores<C>(grads, shared + C::kValueOffset + group_offset, row_grads);
      product_commit();

      product_wait<1>();
      pin(scores);
#pragma unroll
      for (int i = 0; i < kTileRows / 2; ++i) {
        scores[i] = exp2_approximate(fmaf(scores[i], scale_log2, -row_stats[i / 4 * 2 + i % 2]));
      }
      if (!all_exist) {
#pragma unroll
        for (int i = 0; i < kTileRows / 2; ++i) {
          if (!exists[(i / 2) % 2]) scores[i] = 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kTileRows / 4; ++i) weights[i] = pack_pair<Element>(scores[2 * i], scores[2 * i + 1]);
#pragma unroll
      for (int i = 0; i < kTileRows / 8; ++i) {
        load_pair(stats + kTileRows * 4 + 32 * i, row_stats[2 * i], row_stats[2 * i + 1]);
      }
      product_wait<0>();
      pin(grads);
#pragma unroll
      for (int i = 0; i < kTileRows / 2; ++i) scores[i] *= grads[i] - row_stats[i / 4 * 2 + i % 2];
#pragma unroll
      for (int i = 0; i < kTileRows / 4; ++i) packed_grads[i] = pack_pair<Element>(scores[2 * i], scores[2 * i + 1]);

      // Rows across, in the copy engine's swizzle; read by both warpgroups.
      barrier_wait(barriers.score_empty(buffer), ((count / 2) & 1) ^ 1);
#pragma unroll
      for (int j = 0; j < kTileRows / 8; j += 2) {
        const uint32_t address = score_grads + buffer * C::kScoreGradBytes + (matrix_place ^ (j * 16));
        store_matrices(address, packed_grads[2 * j], packed_grads[2 * j + 1], packed_grads[2 * j + 2],
                       packed_grads[2 * j + 3]);
      }
      fence_shared_for_copies();
      __syncwarp();
      release(barriers.score_full(buffer), lane);

      pin(value_grad);
      pin(key_grad);
      pin(weights);
      pin(packed_grads);
      product_begin();
      sum_over_rows<C>(value_grad, weights, row_grads);
      sum_over_rows<C>(key_grad, packed_grads, rows);
      product_commit();
      // dQ of the tile before, for which the other warpgroup has had time.
      if (step > 0) begin_query_grad(count - 1);
      product_wait<0>();
      pin(grads);
      pin(value_grad);
      pin(key_grad);
      pin(weights);
      pin(packed_grads);
      release(barriers.rows_empty(stage), lane);
      if (step > 0) {
        release(barriers.score_empty(buffer ^ 1), lane);
        add_next_query_grad();
      }
    }
    begin_query_grad(count - 1);
    product_wait<0>();
    pin(grads);
    release(barriers.score_empty((count - 1) % 2), lane);
    release(barriers.keys_empty(), lane);
    add_next_query_grad();
    // Made anew: through the loop it would hold registers.
    int same_index = index;
    asm volatile("" : "+r"(same_index));
    unit = KeyUnit::at<C>(arguments, same_index);
    if (unit.end < arguments.query_tiles) {
      leave_sums(arguments, same_index, group, thread, key_grad, value_grad);
    } else {
      write_key_grad<C>(arguments, unit, key_grad, 0, group, thread, arguments.scale);
      write_key_grad<C>(arguments, unit, value_grad, 1, group, thread, 1.0f);
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    sibling_attention_backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ uint8_t raw[];
  const uint32_t shared = (shared_address(raw) + 1023u) & ~1023u;
  const BackwardBarriers barriers{shared + C::kBarrierOffset};
  if (threadIdx.x == 0) {
    barrier_init(barriers.keys_full(), 2);
    barrier_init(barriers.keys_empty(), 4 * kConsumers);
    for (int stage = 0; stage < kBackwardStages; ++stage) {
      barrier_init(barriers.query_full(stage), 1);
      barrier_init(barriers.grad_full(stage), 1);
      barrier_init(barriers.rows_empty(stage), 4 * kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(barriers.score_full(i), 4 * kConsumers);
      barrier_init(barriers.score_empty(i), 4 * kConsumers);
      store_shared_release(barriers.allowed(i), 0);
      for (int slot = 0; slot < kAddedSlots; ++slot) {
        barrier_init(barriers.added(i, slot), 4);
        barrier_init(barriers.published(i, slot), 1);
      }
    }
    barrier_init_fence();
  }
  // Rows of a tile that hold no query are never copied to; as zeros they add nothing.
  zero_shared(shared + C::kQueryOffset, 2 * kBackwardStages * C::kRowTileBytes);
  __syncthreads();

  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    lower_registers<kBackwardFeedRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == 0) {
      feed_backward<C>(arguments, shared, barriers, lane);
    } else if (warp == 1 && lane == 0) {
      follow_predecessor<C>(arguments, barriers);
    } else if (warp >= 2 && lane == 0) {
      publish_progress<C>(arguments, barriers, warp - 2);
    }
  } else {
    raise_registers<kBackwardComputeRegisters>();
    compute_backward<C>(arguments, shared, barriers, group - 1, static_cast<int>(threadIdx.x) % 128);
  }
}

// ---- dQ from the order of the registers ------------------------------------------------------------------------

struct QueryGradArguments {
  const float* partial_query;
  void* grad_query;
  int64_t strides[3];
  float scale;
  int32_t length, key_heads, ratio, tokens, query_tiles;
};

// A block a query tile. The sums pass through shared memory: read in the order of the registers, written by rows.
template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(256) query_grad_kernel(const QueryGradArguments arguments) {
  static_assert(kHeadSize == 2 * kPanel);
  constexpr int kPitch = kHeadSize + 4;
  __shared__ float rows[kTileRows * kPitch];
  const int64_t tile = blockIdx.x;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const float* partial = arguments.partial_query + (tile * 2 + group) * (kTileRows * kPanel) + thread * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 part = __ldcs(reinterpret_cast<const float4*>(partial + i * 512));
    float* at = rows + (thread / 32 * 16 + thread % 32 / 4) * kPitch + group * kPanel + 8 * i + thread % 4 * 2;
    *reinterpret_cast<float2*>(at) = make_float2(part.x, part.y);
    *reinterpret_cast<float2*>(at + 8 * kPitch) = make_float2(part.z, part.w);
  }
  __syncthreads();
  const int head = static_cast<int>(tile / arguments.query_tiles);
  const int first_token = static_cast<int>(tile % arguments.query_tiles) * arguments.tokens;
  const int64_t row = head / arguments.key_heads;
  const int key_head = head % arguments.key_heads;
  const int column = static_cast<int>(threadIdx.x) % 16 * 8;
  for (int position = static_cast<int>(threadIdx.x) / 16; position < kTileRows; position += 16) {
    const int token = first_token + position / arguments.ratio;
    const int query_head = key_head * arguments.ratio + position % arguments.ratio;
    if (position >= arguments.tokens * arguments.ratio || token >= arguments.length) continue;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* value = rows + position * kPitch + column + 2 * i;
      packed[i] = pack_pair<Element>(value[0] * arguments.scale, value[1] * arguments.scale);
    }
    Element* target = static_cast<Element*>(arguments.grad_query) + row * arguments.strides[0] +
                      query_head * arguments.strides[1] + token * arguments.strides[2] + column;
    *reinterpret_cast<uint4*>(target) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
}

// ---- what is known of each row beforehand ----------------------------------------------------------------------

struct RowStatArguments {
  const void* out;
  const void* grad_out;
  const float* lse;  // [N, Hq, L]
  float* row_stats;
  int64_t out_strides[3];
  int64_t grad_strides[3];
  int32_t length, key_heads, ratio, tokens, query_tiles;
};

// Sixteen threads a query row of a tile; rows that hold no query get an infinite log2-sum-exp, hence weights of zero.
template <typename Element, int kHeadSize>
__global__ void __launch_bounds__(256) row_stats_kernel(const RowStatArguments arguments) {
  static_assert(kHeadSize == 128);
  const int64_t tile = blockIdx.x;
  const int head = static_cast<int>(tile / arguments.query_tiles);
  const int tile_in_head = static_cast<int>(tile % arguments.query_tiles);
  const int64_t row = head / arguments.key_heads;
  const int key_head = head % arguments.key_heads;
  const int part = threadIdx.x % 16;
  for (int position = threadIdx.x / 16; position < kTileRows; position += 16) {
    const int token = tile_in_head * arguments.tokens + position / arguments.ratio;
    const int query_head = key_head * arguments.ratio + position % arguments.ratio;
    const bool exists = position < arguments.tokens * arguments.ratio && token < arguments.length;
    float delta = 0.0f;
    if (exists) {
      const Element* out = static_cast<const Element*>(arguments.out) + row * arguments.out_strides[0] +
                           query_head * arguments.out_strides[1] + token * arguments.out_strides[2] + part * 8;
      const Element* grad = static_cast<const Element*>(arguments.grad_out) + row * arguments.grad_strides[0] +
                            query_head * arguments.grad_strides[1] + token * arguments.grad_strides[2] + part * 8;
      const uint4 left = *reinterpret_cast<const uint4*>(out);
      const uint4 right = *reinterpret_cast<const uint4*>(grad);
      const Element* a = reinterpret_cast<const Element*>(&left);
      const Element* b = reinterpret_cast<const Element*>(&right);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), delta);
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) delta += __shfl_xor_sync(0xFFFFFFFFu, delta, step);
    if (part == 0) {
      const int query_heads = arguments.key_heads * arguments.ratio;
      float* stats = arguments.row_stats + tile * (2 * kTileRows) + position;
      stats[0] = exists ? arguments.lse[(row * query_heads + query_head) * arguments.length + token] * kLog2E : INFINITY;
      stats[kTileRows] = delta;
    }
  }
}

}  // namespace unirl::cuda
