// SPDX-License-Identifier: Apache-2.0
// Forward attention over a shared prefix and own keys on Hopper's matrix units.
//
// The shape of the computation is FlashAttention-3's (Shah et al. 2024): one warp feeds tiles of keys and values
// through the tensor copy engine, two warpgroups of 64 query rows each take turns on the matrix unit, and each
// overlaps the softmax of one tile with the value product of the tile before.
//
// Rows of a warpgroup are the query heads of one key head, token by token: 64 / ratio tokens of all `ratio` heads,
// so that a key head's tiles are read once for all of them. Keys are the prefix, padded to a multiple of eight, and
// the own keys behind it; both are read in place, through tensor maps of their own, whose zero fill beyond the
// extents also keeps foreign rows out. Only the tile with the padding and the last one are masked.
//
// Which tiles a row sees, in which order, depends on its L and prefix length alone: its bits do not change with
// the number of siblings or groups.
#pragma once

#include "cuda/hopper.cuh"

namespace unirl::cuda {

using namespace hopper;

constexpr int kPanel = 64;             // columns of a shared-memory panel
constexpr int kRowBytes = 2 * kPanel;  // bytes of a panel's row
constexpr int kGroupRows = 64;         // query rows of a warpgroup
constexpr int kChunk = 8;              // keys of a swizzle atom, the unit in which prefix and own keys join
constexpr int kConsumers = 2;          // warpgroups that compute
constexpr int kStages = 2;             // key tiles, and value tiles, in flight
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr uint32_t kTurnBarrier = 1;   // named barriers 1, 2: whose turn it is on the matrix unit
constexpr uint32_t kGroupBarrier = 3;  // named barriers 3, 4: the threads of one warpgroup
constexpr float kLog2E = 1.4426950408889634f;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// A block starts with 168 registers a thread (65536 / 384, in steps of 8); what the feeding warpgroup gives back the
// computing ones take. Asking for more than was given back waits forever.
// The feeding warp spills, which costs nothing beside the copies it waits for.
constexpr int kFeedRegisters = 24;
constexpr int kComputeRegisters = 240;
static_assert(kFeedRegisters + kConsumers * kComputeRegisters <= (kConsumers + 1) * 168);

constexpr int kTileKeys = 128;

// A source of key or value rows: `tile` copies a whole tile, `chunk` eight rows, `row` one.
struct RowMaps {
  CUtensorMap tile;
  CUtensorMap chunk;
  CUtensorMap row;
};

struct ForwardArguments {
  CUtensorMap query;
  CUtensorMap out;
  RowMaps own[2];     // keys, values
  RowMaps prefix[2];
  float* lse;
  const int64_t* prefix_lengths;
  float scale;
  int32_t length;
  int32_t prefix_length;
  int32_t key_heads;
  int32_t ratio;       // query heads of a key head
  int32_t tokens;      // of a warpgroup's tile
  int32_t siblings;
  int32_t units_per_head;
  int32_t num_units;   // of work: a block's query tile each
};

template <typename ElementType, int kHeadSizeValue>
struct ForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadSize = kHeadSizeValue;
  static constexpr int kKeys = kTileKeys;
  static constexpr int kPanels = kHeadSize / kPanel;
  static constexpr int kQueryPanelBytes = kGroupRows * kRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;  // of one warpgroup
  static constexpr int kTilePanelBytes = kKeys * kRowBytes;
  static constexpr int kTileBytes = kPanels * kTilePanelBytes;
  static constexpr int kSharedLimit = 232448;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kQueryOffset = 0;
  static constexpr int kOutputOffset = kConsumers * kQueryBytes;
  static constexpr int kKeyOffset = kOutputOffset + kConsumers * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kTileBytes;
  static constexpr int kBarrierOffset = kValueOffset + kStages * kTileBytes;
  static constexpr int kSharedBytes = kBarrierOffset + kBarrierBytes + 1024;
  static_assert(kSharedBytes <= kSharedLimit);
  static_assert(kKeys % 16 == 0 && kKeys / kChunk <= 32);
};

struct Barriers {
  uint32_t base;
  __device__ uint32_t query_full(int group) const { return base + 8 * group; }
  __device__ uint32_t query_empty(int group) const { return base + 8 * (kConsumers + group); }
  __device__ uint32_t full(int operand, int stage) const {
    return base + 8 * (2 * kConsumers + operand * kStages + stage);
  }
  __device__ uint32_t empty(int operand, int stage) const {
    return base + 8 * (2 * kConsumers + (2 + operand) * kStages + stage);
  }
};

// One unit of work: which row and key head, where the prefix ends, how many key tiles.
struct Unit {
  int row, key_head, group, first_token, prefix, padded, tiles;

  template <typename C>
  __device__ static Unit at(const ForwardArguments& arguments, int index) {
    Unit unit;
    const int head = index / arguments.units_per_head;
    const int position = index - head * arguments.units_per_head;
    unit.first_token = position * kConsumers * arguments.tokens;
    unit.row = head / arguments.key_heads;
    unit.key_head = head - unit.row * arguments.key_heads;
    unit.group = unit.row / arguments.siblings;
    unit.prefix = arguments.prefix_length;
    if (arguments.prefix_lengths != nullptr) {
      const int64_t asked = arguments.prefix_lengths[unit.group];
      unit.prefix = static_cast<int>(asked < 0 ? 0 : asked < unit.prefix ? asked : unit.prefix);
    }
    unit.padded = (unit.prefix + kChunk - 1) / kChunk * kChunk;
    unit.tiles = (unit.padded + arguments.length + C::kKeys - 1) / C::kKeys;
    return unit;
  }
};

// ---- the warp that feeds ---------------------------------------------------------------------------------------

// Copies a tile of keys (operand 0) or values (1); all lanes take part.
template <typename C, typename Arguments, typename Unit>
__device__ void feed_tile(const Arguments& arguments, const Unit& unit, int operand, int first_key,
                          uint32_t target, uint32_t barrier, int lane) {
  if (lane == 0) barrier_expect(barrier, C::kTileBytes);
  __syncwarp();
  const RowMaps& own = arguments.own[operand];
  const RowMaps& prefix = arguments.prefix[operand];
  // Rows behind the tensor's end are filled with zeros; rows behind a shorter group's prefix are not.
  const bool zero_filled = unit.prefix == arguments.prefix_length;
  if (first_key >= unit.padded) {
    if (lane < C::kPanels) {
      copy_to_shared(own.tile, target + lane * C::kTilePanelBytes, barrier,
                     Box{0, first_key - unit.padded, lane, unit.key_head, unit.row});
    }
  } else if (first_key + C::kKeys <= (zero_filled ? unit.padded : unit.prefix)) {
    if (lane < C::kPanels) {
      copy_to_shared(prefix.tile, target + lane * C::kTilePanelBytes, barrier,
                     Box{0, first_key, lane, unit.key_head, unit.group});
    }
  } else if (lane < C::kKeys / kChunk) {
    const int key = first_key + lane * kChunk;
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const uint32_t chunk = target + panel * C::kTilePanelBytes + lane * kChunk * kRowBytes;
      if (key >= unit.padded) {
        copy_to_shared(own.chunk, chunk, barrier, Box{0, key - unit.padded, panel, unit.key_head, unit.row});
      } else if (zero_filled || key + kChunk <= unit.prefix) {
        copy_to_shared(prefix.chunk, chunk, barrier, Box{0, key, panel, unit.key_head, unit.group});
      } else {
        for (int i = 0; i < kChunk; ++i) {
          const int token = key + i < unit.prefix ? key + i : arguments.prefix_length;
          copy_to_shared(prefix.row, chunk + i * kRowBytes, barrier,
                         Box{0, token, panel, unit.key_head, unit.group});
        }
      }
    }
  }
}

template <typename C>
__device__ void feed(const ForwardArguments& arguments, uint32_t shared, const Barriers& barriers, int lane) {
  uint32_t count[2] = {0, 0};  // tiles fed so far, of keys and of values
  uint32_t units = 0;
  for (int index = blockIdx.x; index < arguments.num_units; index += gridDim.x, ++units) {
    const Unit unit = Unit::at<C>(arguments, index);
    auto feed_next = [&](int operand, int tile) {
      const uint32_t stage = count[operand] % kStages;
      const uint32_t round = count[operand] / kStages;
      ++count[operand];
      barrier_wait(barriers.empty(operand, stage), (round & 1) ^ 1);
      const uint32_t base = shared + (operand == 0 ? C::kKeyOffset : C::kValueOffset);
      feed_tile<C>(arguments, unit, operand, tile * C::kKeys, base + stage * C::kTileBytes,
                   barriers.full(operand, stage), lane);
    };
    feed_next(0, unit.tiles - 1);
    if (lane == 0) {
      for (int group = 0; group < kConsumers; ++group) {
        barrier_wait(barriers.query_empty(group), (units & 1) ^ 1);
        const int bytes = C::kPanels * arguments.tokens * arguments.ratio * kRowBytes;
        barrier_expect(barriers.query_full(group), bytes);
        for (int panel = 0; panel < C::kPanels; ++panel) {
          copy_to_shared(arguments.query,
                         shared + C::kQueryOffset + group * C::kQueryBytes + panel * C::kQueryPanelBytes,
                         barriers.query_full(group),
                         Box{0, unit.key_head * arguments.ratio, unit.first_token + group * arguments.tokens,
                             panel, unit.row});
        }
      }
    }
    __syncwarp();
    for (int tile = unit.tiles - 2; tile >= 0; --tile) {
      feed_next(0, tile);
      feed_next(1, tile + 1);
    }
    feed_next(1, 0);
  }
}

// ---- the warpgroups that compute -------------------------------------------------------------------------------

// The warp's 16 query rows, as the products take them from registers: shared memory, which two warpgroups read keys
// and values from at once, is left alone by them.
template <typename C>
__device__ __forceinline__ void load_query(uint32_t (&query)[C::kHeadSize / 4], uint32_t panels, int warp, int lane) {
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < C::kHeadSize / 16; ++k) {
    const int columns = 2 * k + lane / 16;
    load_matrices(panels + (columns / 8) * C::kQueryPanelBytes + row * kRowBytes + ((columns % 8) ^ (row % 8)) * 16,
                  query[4 * k], query[4 * k + 1], query[4 * k + 2], query[4 * k + 3]);
  }
}

template <typename C>
__device__ __forceinline__ void score_product(float (&scores)[C::kKeys / 2], uint32_t (&query)[C::kHeadSize / 4],
                                              uint32_t keys) {
  const uint64_t b = describe_row_panels(keys);
#pragma unroll
  for (int k = 0; k < C::kHeadSize / 16; ++k) {
    product_registers_row_panels<typename C::Element>(
        scores, query[4 * k], query[4 * k + 1], query[4 * k + 2], query[4 * k + 3],
        b + (k / 4 * C::kTilePanelBytes + k % 4 * 32) / 16, k > 0);
  }
}

template <typename C>
__device__ __forceinline__ void value_product(float (&out)[C::kHeadSize / 2], uint32_t (&weights)[C::kKeys / 4],
                                              uint32_t values) {
  const uint64_t b = describe_column_panels(values, C::kTilePanelBytes);
#pragma unroll
  for (int k = 0; k < C::kKeys / 16; ++k) {
    product_registers<typename C::Element>(out, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                                           weights[4 * k + 3], b + k * 16 * kRowBytes / 16);
  }
}

// Sets the scores of keys `from` .. `to` - 1, counted from the tile's first, to minus infinity.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&scores)[kCount], int from, int to, int lane) {
  const uint32_t width = to > from ? to - from : 0;
  uint32_t offset = (lane % 4) * 2 - from;
  // Opaque, so that comparisons stay in the branches that need them instead of holding registers in the loop.
  asm volatile("" : "+r"(offset));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (offset + (i / 4) * 8 + i % 2 < width) scores[i] = -INFINITY;
  }
}

// Keeps the assembler from moving a wait above the softmax that is meant to run while the matrix unit does: a store
// that depends on both sums, never taken because sums are not negative.
__device__ __forceinline__ void hold_back(float first, float second, uint32_t address) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      ".reg .f32 least;\n"
      "min.f32 least, %0, %1;\n"
      "setp.lt.f32 never, least, 0f00000000;\n"
      "@never st.shared.f32 [%2], least;\n"
      "}" ::"f"(first),
      "f"(second), "r"(address)
      : "memory");
}

// The running softmax of the two rows that a thread holds a quarter of. Weights are 2^(scaled score - scaled
// reference). The reference is the largest score of the row's first tile, and stays: to find every tile's largest would
// hold up the matrix unit. float32 sums and floating-point weights keep their precision far from 1, so that a later
// score may exceed the reference. Where a thread's sum of a tile grows beyond kLargestSum, the row follows: the tile's
// scores are computed once more, and earlier results are multiplied by 2^(old reference - new one). Each row follows or
// not by its own scores alone.
template <typename Element>
constexpr float kLargestSum = std::is_same_v<Element, __nv_bfloat16> ? 0x1p64f : 0x1p14f;  // float16 ends at 2^16

struct RowState {
  float reference[2];
  float sum[2];  // of this thread's columns
};

template <int kCount>
__device__ __forceinline__ float largest_of_row(const float (&scores)[kCount], int row) {
  float even = scores[2 * row];
  float odd = scores[2 * row + 1];
#pragma unroll
  for (int i = 4; i < kCount; i += 4) {
    even = fmaxf(even, scores[i + 2 * row]);
    odd = fmaxf(odd, scores[i + 2 * row + 1]);
  }
  return fmaxf(even, odd);
}

// The largest of the four threads that share a row.
__device__ __forceinline__ float largest_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

// Turns a row's scores into weights and returns their sum.
template <int kCount>
__device__ __forceinline__ float weigh_row(float (&scores)[kCount], int row, float reference, float scale_log2) {
  const float shift = reference * scale_log2;
  float sum = 0.0f;
#pragma unroll
  for (int i = 2 * row; i < kCount; i += 4) {
#pragma unroll
    for (int n = i; n < i + 2; ++n) {
      scores[n] = exp2_approximate(fmaf(scores[n], scale_log2, -shift));
      sum += scores[n];
    }
  }
  return sum;
}

template <int kCount>
__device__ __forceinline__ void begin_softmax(float (&scores)[kCount], RowState& state, float scale_log2) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    state.reference[row] = largest_of_quad(largest_of_row(scores, row));
    state.sum[row] = weigh_row(scores, row, state.reference[row], scale_log2);
  }
}

// Scores of the rows that follow once more, their weights being lost; keys `from` .. `to` - 1 count minus infinity.
template <typename C>
__device__ __forceinline__ void restore_scores(float (&scores)[C::kKeys / 2], const bool (&follows)[2],
                                               const uint32_t (&query)[C::kHeadSize / 4], uint32_t keys, int from,
                                               int to, int lane) {
#pragma unroll
  for (int j = 0; j < C::kKeys / 8; ++j) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < C::kHeadSize / 32; ++k) {
      const int columns = 4 * k + lane / 8;
      uint32_t b[4];
      load_matrices(keys + (columns / 8) * C::kTilePanelBytes + (8 * j + lane % 8) * kRowBytes +
                        ((columns % 8) ^ (lane % 8)) * 16,
                    b[0], b[1], b[2], b[3]);
      product_of_warp<typename C::Element>(part, query + 8 * k, b[0], b[1]);
      product_of_warp<typename C::Element>(part, query + 8 * k + 4, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 8 * j + 2 * (lane % 4) + i % 2;
      if (follows[i / 2]) scores[4 * j + i] = key >= from && key < to ? -INFINITY : part[i];
    }
  }
}

// The softmax of a later tile, all 32 lanes together: scores become weights. Returns whether a row of this warp
// follows; `rescale` then holds what earlier results are multiplied by. The keys and the query must still be there.
// Warps of a warpgroup may differ in this, so nothing in the branch may be an instruction of the warpgroup.
template <typename C>
__device__ __forceinline__ bool continue_softmax(float (&scores)[C::kKeys / 2], RowState& state, float scale_log2,
                                                 const uint32_t (&query)[C::kHeadSize / 4], uint32_t keys, int from,
                                                 int to, int lane, float (&rescale)[2]) {
  constexpr float kLargest = kLargestSum<typename C::Element>;
  float sums[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) sums[row] = weigh_row(scores, row, state.reference[row], scale_log2);
  const bool moved = __any_sync(kAllLanes, sums[0] > kLargest || sums[1] > kLargest) != 0;
  if (moved) {
    bool follows[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      follows[row] = (__ballot_sync(kAllLanes, sums[row] > kLargest) >> (lane & ~3) & 0xFu) != 0;
    }
    restore_scores<C>(scores, follows, query, keys, from, to, lane);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float reference = largest_of_quad(largest_of_row(scores, row));
      rescale[row] = follows[row] ? exp2_approximate((state.reference[row] - reference) * scale_log2) : 1.0f;
      if (follows[row]) {
        state.reference[row] = reference;
        sums[row] = weigh_row(scores, row, reference, scale_log2);
      }
      state.sum[row] *= rescale[row];
    }
  }
  state.sum[0] += sums[0];
  state.sum[1] += sums[1];
  return moved;
}

template <typename C>
__device__ __forceinline__ void pack_weights(const float (&scores)[C::kKeys / 2],
                                             uint32_t (&weights)[C::kKeys / 4]) {
#pragma unroll
  for (int i = 0; i < C::kKeys / 4; ++i) {
    weights[i] = pack_pair<typename C::Element>(scores[2 * i], scores[2 * i + 1]);
  }
}

// By all threads of a block, before a barrier of theirs; `bytes` is a multiple of 16.
__device__ __forceinline__ void zero_shared(uint32_t address, uint32_t bytes) {
  for (uint32_t at = threadIdx.x * 16; at < bytes; at += kThreads * 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address + at), "r"(0) : "memory");
  }
  fence_shared_for_copies();
}

// One arrival a warp.
__device__ __forceinline__ void release(uint32_t barrier, int lane) {
  if (lane == 0) barrier_arrive(barrier);
}

template <typename C>
__device__ void compute(const ForwardArguments& arguments, uint32_t shared, const Barriers& barriers, int group,
                        int thread) {
  const int lane = thread % 32;
  const int warp = thread / 32;
  const float scale_log2 = arguments.scale * kLog2E;
  const uint32_t query_panels = shared + C::kQueryOffset + group * C::kQueryBytes;
  const uint32_t output = shared + C::kOutputOffset + group * C::kQueryBytes;
  const uint32_t keys = shared + C::kKeyOffset;
  const uint32_t values = shared + C::kValueOffset;
  const uint32_t my_turn = kTurnBarrier + group;
  const uint32_t other_turn = kTurnBarrier + (group ^ 1);

  uint32_t query[C::kHeadSize / 4];
  float scores[C::kKeys / 2];
  float out[C::kHeadSize / 2];
  uint32_t weights[C::kKeys / 4];
  RowState state;
  float rescale[2];

  if (group == 1) named_arrive(other_turn, 256);
  uint32_t count = 0;  // tiles before the one whose values come next
  uint32_t units = 0;
  for (int index = blockIdx.x; index < arguments.num_units; index += gridDim.x, ++units) {
    const Unit unit = Unit::at<C>(arguments, index);
    const int padding_tile = unit.padded > unit.prefix ? (unit.padded - 1) / C::kKeys : -1;

    barrier_wait(barriers.query_full(group), units & 1);
    load_query<C>(query, query_panels, warp, lane);
    __syncwarp();
    release(barriers.query_empty(group), lane);
    barrier_wait(barriers.full(0, count % kStages), (count / kStages) & 1);
    pin(scores);
    pin(query);
    product_begin();
    score_product<C>(scores, query, keys + (count % kStages) * C::kTileBytes);
    product_commit();
    product_wait<0>();
    pin(scores);
    release(barriers.empty(0, count % kStages), lane);
    const int last_key = (unit.tiles - 1) * C::kKeys;
    mask_scores(scores, unit.padded + arguments.length - last_key, C::kKeys, lane);
    if (padding_tile == unit.tiles - 1) mask_scores(scores, unit.prefix - last_key, unit.padded - last_key, lane);
    begin_softmax(scores, state, scale_log2);
    pack_weights<C>(scores, weights);
#pragma unroll
    for (int i = 0; i < C::kHeadSize / 2; ++i) out[i] = 0.0f;

#pragma unroll 1
    for (int tile = unit.tiles - 2; tile >= 0; --tile, ++count) {
      const uint32_t next = count + 1;
      barrier_wait(barriers.full(0, next % kStages), (next / kStages) & 1);
      named_sync(my_turn, 256);
      pin(scores);
      pin(out);
      pin(weights);
      product_begin();
      score_product<C>(scores, query, keys + (next % kStages) * C::kTileBytes);
      product_commit();
      barrier_wait(barriers.full(1, count % kStages), (count / kStages) & 1);
      value_product<C>(out, weights, values + (count % kStages) * C::kTileBytes);
      product_commit();
      named_arrive(other_turn, 256);
      product_wait<1>();
      pin(scores);
      const int from = tile == padding_tile ? unit.prefix - tile * C::kKeys : 0;
      const int to = tile == padding_tile ? unit.padded - tile * C::kKeys : 0;
      if (tile == padding_tile) mask_scores(scores, from, to, lane);
      const bool moved = continue_softmax<C>(scores, state, scale_log2, query,
                                             keys + (next % kStages) * C::kTileBytes, from, to, lane, rescale);
      __syncwarp();
      release(barriers.empty(0, next % kStages), lane);
      hold_back(state.sum[0], state.sum[1], values);
      product_wait<0>();
      pin(out);
      pin(weights);
      release(barriers.empty(1, count % kStages), lane);
      pack_weights<C>(scores, weights);
      if (moved) {
#pragma unroll
        for (int i = 0; i < C::kHeadSize / 2; ++i) out[i] *= rescale[(i / 2) % 2];
      }
    }

    barrier_wait(barriers.full(1, count % kStages), (count / kStages) & 1);
    pin(out);
    pin(weights);
    product_begin();
    value_product<C>(out, weights, values + (count % kStages) * C::kTileBytes);
    product_commit();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      state.sum[row] += __shfl_xor_sync(kAllLanes, state.sum[row], 1);
      state.sum[row] += __shfl_xor_sync(kAllLanes, state.sum[row], 2);
    }
    product_wait<0>();
    pin(out);
    release(barriers.empty(1, count % kStages), lane);
    ++count;

    // Normalised rows go to shared memory in the copy engine's swizzle, and from there out, clipped to L.
    if (thread == 0) copy_wait_sources();
    named_sync(kGroupBarrier + group, 128);
    const float inverse[2] = {1.0f / state.sum[0], 1.0f / state.sum[1]};
    const int matrix_row = warp * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < C::kHeadSize / 8; j += 2) {
      const int columns = j + lane / 16;
      const uint32_t address = output + (columns / 8) * C::kQueryPanelBytes + matrix_row * kRowBytes +
                               (((columns % 8) ^ (matrix_row % 8)) * 16);
      store_matrices(
          address, pack_pair<typename C::Element>(out[4 * j] * inverse[0], out[4 * j + 1] * inverse[0]),
          pack_pair<typename C::Element>(out[4 * j + 2] * inverse[1], out[4 * j + 3] * inverse[1]),
          pack_pair<typename C::Element>(out[4 * j + 4] * inverse[0], out[4 * j + 5] * inverse[0]),
          pack_pair<typename C::Element>(out[4 * j + 6] * inverse[1], out[4 * j + 7] * inverse[1]));
    }
    fence_shared_for_copies();
    named_sync(kGroupBarrier + group, 128);
    const int first_token = unit.first_token + group * arguments.tokens;
    if (thread == 0 && first_token < arguments.length) {
      for (int panel = 0; panel < C::kPanels; ++panel) {
        copy_from_shared(arguments.out, output + panel * C::kQueryPanelBytes,
                         Box{0, unit.key_head * arguments.ratio, first_token, panel, unit.row});
      }
      copy_commit();
    }
    if (lane % 4 == 0) {
      const int query_heads = arguments.key_heads * arguments.ratio;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int position = warp * 16 + lane / 4 + 8 * row;
        const int token = first_token + position / arguments.ratio;
        const int head = unit.key_head * arguments.ratio + position % arguments.ratio;
        if (position < arguments.tokens * arguments.ratio && token < arguments.length) {
          arguments.lse[(static_cast<int64_t>(unit.row) * query_heads + head) * arguments.length + token] =
              fmaf(state.reference[row], arguments.scale, logf(state.sum[row]));
        }
      }
    }
  }
  if (thread == 0) copy_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    sibling_attention_forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ uint8_t raw[];
  const uint32_t shared = (shared_address(raw) + 1023u) & ~1023u;
  const Barriers barriers{shared + C::kBarrierOffset};
  if (threadIdx.x == 0) {
    for (int group = 0; group < kConsumers; ++group) {
      barrier_init(barriers.query_full(group), 1);
      barrier_init(barriers.query_empty(group), 4);
    }
    for (int operand = 0; operand < 2; ++operand) {
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(barriers.full(operand, stage), 1);
        barrier_init(barriers.empty(operand, stage), 4 * kConsumers);
      }
    }
    barrier_init_fence();
  }
  // Rows of a tile that hold no query are never copied to. What an earlier kernel left there could outgrow any reference
  // and send the warp that has them the long way, tile after tile.
  zero_shared(shared + C::kQueryOffset, kConsumers * C::kQueryBytes);
  __syncthreads();

  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    lower_registers<kFeedRegisters>();
    if (threadIdx.x < 32) feed<C>(arguments, shared, barriers, static_cast<int>(threadIdx.x));
  } else {
    raise_registers<kComputeRegisters>();
    compute<C>(arguments, shared, barriers, group - 1, static_cast<int>(threadIdx.x) % 128);
  }
}

}  // namespace unirl::cuda
