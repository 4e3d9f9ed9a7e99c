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
#include "sibling_prefix_attention.h"

#include <cstdio>
#include <cstring>

#include "hopper.cuh"

namespace unirl {
namespace {

using namespace hopper;

constexpr int kPanel = 64;               // columns of a shared-memory panel
constexpr int kRowBytes = 2 * kPanel;    // bytes of a panel's row
constexpr int kGroupRows = 64;           // query rows of a warpgroup
constexpr int kChunk = 8;                // keys of a swizzle atom, the unit in which prefix and own keys join
constexpr int kConsumers = 2;            // warpgroups that compute
constexpr int kStages = 2;               // key tiles, and value tiles, in flight
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr uint32_t kTurnBarrier = 1;     // named barriers 1, 2: whose turn it is on the matrix unit
constexpr uint32_t kGroupBarrier = 3;    // named barriers 3, 4: the threads of one warpgroup
constexpr float kLog2E = 1.4426950408889634f;

// A source of key or value rows: `tile` copies a block's share of a tile, `chunk` eight rows.
struct RowMaps {
  CUtensorMap tile;
  CUtensorMap chunk;
};

struct ForwardArguments {
  CUtensorMap query;
  CUtensorMap out;
  RowMaps own[2];     // keys, values
  RowMaps prefix[2];
  CUtensorMap prefix_row[2];  // one row
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
  int32_t num_units;   // of work: query tiles of a cluster of blocks
};

template <typename ElementType, int kHeadSizeValue, int kKeysValue, int kClusterValue>
struct Config {
  using Element = ElementType;
  static constexpr int kHeadSize = kHeadSizeValue;
  static constexpr int kKeys = kKeysValue;
  static constexpr int kCluster = kClusterValue;
  static constexpr int kPanels = kHeadSize / kPanel;
  static constexpr int kQueryPanelBytes = kGroupRows * kRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;  // of one warpgroup
  static constexpr int kTilePanelBytes = kKeys * kRowBytes;
  static constexpr int kTileBytes = kPanels * kTilePanelBytes;
  static constexpr int kSharedLimit = 232448;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kTilesBytes = 2 * kStages * kTileBytes;
  // Results leave through their own buffer where it fits, else through the queries'.
  static constexpr bool kOwnOutput =
      2 * kConsumers * kQueryBytes + kTilesBytes + kBarrierBytes + 1024 <= kSharedLimit;
  static constexpr int kQueryOffset = 0;
  static constexpr int kOutputOffset = kOwnOutput ? kConsumers * kQueryBytes : 0;
  static constexpr int kKeyOffset = kOutputOffset + kConsumers * kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kTileBytes;
  static constexpr int kBarrierOffset = kValueOffset + kStages * kTileBytes;
  static constexpr int kSharedBytes = kBarrierOffset + kBarrierBytes + 1024;
  static_assert(kSharedBytes <= kSharedLimit);
  static_assert(kKeys % (kChunk * kCluster) == 0 && kKeys / kChunk / kCluster <= 32);
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
  __device__ static Unit at(const ForwardArguments& arguments, int index, int rank) {
    Unit unit;
    const int head = index / arguments.units_per_head;
    const int position = index - head * arguments.units_per_head;
    unit.first_token = (position * C::kCluster + rank) * kConsumers * arguments.tokens;
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

template <typename C>
__device__ __forceinline__ void copy_rows(const CUtensorMap& map, uint32_t target, uint32_t barrier, int token,
                                          int panel, int head, int row) {
  const Box at{0, token, panel, head, row};
  if constexpr (C::kCluster == 1) {
    copy_to_shared(map, target, barrier, at);
  } else {
    copy_to_cluster(map, target, barrier, at, (1u << C::kCluster) - 1);
  }
}

// Copies this block's share of a tile of keys (operand 0) or values (1); all lanes take part.
template <typename C>
__device__ void feed_tile(const ForwardArguments& arguments, const Unit& unit, int operand, int first_key,
                          uint32_t target, uint32_t barrier, int rank, int lane) {
  constexpr int kShare = C::kKeys / C::kCluster;
  if (lane == 0) barrier_expect(barrier, C::kTileBytes);
  __syncwarp();
  const int start = first_key + rank * kShare;
  const uint32_t place = target + rank * kShare * kRowBytes;
  const RowMaps& own = arguments.own[operand];
  const RowMaps& prefix = arguments.prefix[operand];
  // Rows behind the tensor's end are filled with zeros; rows behind a shorter group's prefix are not.
  const bool zero_filled = unit.prefix == arguments.prefix_length;
  if (start >= unit.padded) {
    if (lane < C::kPanels) {
      copy_rows<C>(own.tile, place + lane * C::kTilePanelBytes, barrier, start - unit.padded, lane,
                   unit.key_head, unit.row);
    }
  } else if (start + kShare <= (zero_filled ? unit.padded : unit.prefix)) {
    if (lane < C::kPanels) {
      copy_rows<C>(prefix.tile, place + lane * C::kTilePanelBytes, barrier, start, lane, unit.key_head,
                   unit.group);
    }
  } else if (lane < kShare / kChunk) {
    const int key = start + lane * kChunk;
    const uint32_t chunk = place + lane * kChunk * kRowBytes;
#pragma unroll
    for (int panel = 0; panel < C::kPanels; ++panel) {
      const uint32_t there = chunk + panel * C::kTilePanelBytes;
      if (key >= unit.padded) {
        copy_rows<C>(own.chunk, there, barrier, key - unit.padded, panel, unit.key_head, unit.row);
      } else if (zero_filled || key + kChunk <= unit.prefix) {
        copy_rows<C>(prefix.chunk, there, barrier, key, panel, unit.key_head, unit.group);
      } else {
        for (int i = 0; i < kChunk; ++i) {
          const int token = key + i < unit.prefix ? key + i : arguments.prefix_length;
          copy_rows<C>(arguments.prefix_row[operand], there + i * kRowBytes, barrier, token, panel,
                       unit.key_head, unit.group);
        }
      }
    }
  }
}

template <typename C>
__device__ void feed(const ForwardArguments& arguments, uint32_t shared, const Barriers& barriers, int rank,
                     int lane) {
  uint32_t count[2] = {0, 0};  // tiles fed so far, of keys and of values
  uint32_t units = 0;
  const int first = blockIdx.x / C::kCluster;
  const int step = gridDim.x / C::kCluster;
  for (int index = first; index < arguments.num_units; index += step, ++units) {
    const Unit unit = Unit::at<C>(arguments, index, rank);
    auto feed_next = [&](int operand, int tile) {
      const uint32_t stage = count[operand] % kStages;
      const uint32_t round = count[operand] / kStages;
      ++count[operand];
      const uint32_t empty = barriers.empty(operand, stage);
      if constexpr (C::kCluster == 1) {
        barrier_wait(empty, (round & 1) ^ 1);
      } else {
        barrier_wait_cluster(empty, (round & 1) ^ 1);
      }
      const uint32_t base = shared + (operand == 0 ? C::kKeyOffset : C::kValueOffset);
      feed_tile<C>(arguments, unit, operand, tile * C::kKeys, base + stage * C::kTileBytes,
                   barriers.full(operand, stage), rank, lane);
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

template <typename C>
__device__ __forceinline__ void score_product(float (&scores)[C::kKeys / 2], uint32_t query, uint32_t keys) {
  const uint64_t a = describe_row_panels(query);
  const uint64_t b = describe_row_panels(keys);
#pragma unroll
  for (int k = 0; k < C::kHeadSize / 16; ++k) {
    const int panel = k / 4;
    const int step = k % 4;
    product_shared<typename C::Element>(scores, a + (panel * C::kQueryPanelBytes + step * 32) / 16,
                                        b + (panel * C::kTilePanelBytes + step * 32) / 16, k > 0);
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

// Sets the scores of padding and of keys behind the end to minus infinity.
template <typename C>
__device__ __forceinline__ void mask_scores(float (&scores)[C::kKeys / 2], const Unit& unit, int length,
                                            int first_key, int lane) {
  const int column = first_key + (lane % 4) * 2;
  const int end = unit.padded + length;
#pragma unroll
  for (int i = 0; i < C::kKeys / 2; ++i) {
    const int key = column + (i / 4) * 8 + i % 2;
    if (key >= end || (key >= unit.prefix && key < unit.padded)) scores[i] = -INFINITY;
  }
}

// The running softmax of the two rows that a thread holds a quarter of.
struct RowState {
  float largest[2];
  float sum[2];  // of this thread's columns
};

// Turns scores into weights 2^(scaled score - scaled largest); returns what earlier results are multiplied by.
template <int kCount, bool kFirst>
__device__ __forceinline__ void softmax_tile(float (&scores)[kCount], RowState& state, float scale_log2,
                                             float (&rescale)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = scores[2 * row];
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      largest = fmaxf(largest, fmaxf(scores[i + 2 * row], scores[i + 2 * row + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    if constexpr (!kFirst) {
      largest = fmaxf(largest, state.largest[row]);
      rescale[row] = exp2_approximate((state.largest[row] - largest) * scale_log2);
    }
    state.largest[row] = largest;
    const float shift = largest * scale_log2;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[i + 2 * row + j];
        score = exp2_approximate(fmaf(score, scale_log2, -shift));
        sum += score;
      }
    }
    state.sum[row] = kFirst ? sum : fmaf(state.sum[row], rescale[row], sum);
  }
}

template <typename C>
__device__ __forceinline__ void pack_weights(const float (&scores)[C::kKeys / 2],
                                             uint32_t (&weights)[C::kKeys / 4]) {
#pragma unroll
  for (int i = 0; i < C::kKeys / 4; ++i) {
    weights[i] = pack_pair<typename C::Element>(scores[2 * i], scores[2 * i + 1]);
  }
}

// The owner of a stage's bytes is every block that copies into it.
template <typename C>
__device__ __forceinline__ void release(uint32_t barrier, int lane) {
  if constexpr (C::kCluster == 1) {
    if (lane == 0) barrier_arrive(barrier);
  } else {
    if (lane < C::kCluster) barrier_arrive_cluster(barrier, lane);
  }
}

template <typename C>
__device__ void compute(const ForwardArguments& arguments, uint32_t shared, const Barriers& barriers, int rank,
                        int group, int thread) {
  const int lane = thread % 32;
  const int warp = thread / 32;
  const float scale_log2 = arguments.scale * kLog2E;
  const uint32_t query = shared + C::kQueryOffset + group * C::kQueryBytes;
  const uint32_t output = shared + C::kOutputOffset + group * C::kQueryBytes;
  const uint32_t keys = shared + C::kKeyOffset;
  const uint32_t values = shared + C::kValueOffset;
  const uint32_t my_turn = kTurnBarrier + group;
  const uint32_t other_turn = kTurnBarrier + (group ^ 1);

  float scores[C::kKeys / 2];
  float out[C::kHeadSize / 2];
  uint32_t weights[C::kKeys / 4];
  RowState state;
  float rescale[2];

  if (group == 1) named_arrive(other_turn, 256);
  uint32_t count = 0;  // tiles before the one whose values come next
  uint32_t units = 0;
  const int first = blockIdx.x / C::kCluster;
  const int step = gridDim.x / C::kCluster;
  for (int index = first; index < arguments.num_units; index += step, ++units) {
    const Unit unit = Unit::at<C>(arguments, index, rank);
    const int padding_tile = unit.padded > unit.prefix ? (unit.padded - 1) / C::kKeys : -1;

    barrier_wait(barriers.query_full(group), units & 1);
    barrier_wait(barriers.full(0, count % kStages), (count / kStages) & 1);
    pin(scores);
    product_begin();
    score_product<C>(scores, query, keys + (count % kStages) * C::kTileBytes);
    product_commit();
    product_wait<0>();
    pin(scores);
    release<C>(barriers.empty(0, count % kStages), lane);
    mask_scores<C>(scores, unit, arguments.length, (unit.tiles - 1) * C::kKeys, lane);
    softmax_tile<C::kKeys / 2, true>(scores, state, scale_log2, rescale);
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
      release<C>(barriers.empty(0, next % kStages), lane);
      if (tile == padding_tile) mask_scores<C>(scores, unit, arguments.length, tile * C::kKeys, lane);
      softmax_tile<C::kKeys / 2, false>(scores, state, scale_log2, rescale);
      product_wait<0>();
      pin(out);
      pin(weights);
      release<C>(barriers.empty(1, count % kStages), lane);
      pack_weights<C>(scores, weights);
#pragma unroll
      for (int i = 0; i < C::kHeadSize / 2; ++i) out[i] *= rescale[(i / 2) % 2];
    }

    if constexpr (C::kOwnOutput) {
      if (lane == 0) barrier_arrive(barriers.query_empty(group));
    }
    barrier_wait(barriers.full(1, count % kStages), (count / kStages) & 1);
    pin(out);
    pin(weights);
    product_begin();
    value_product<C>(out, weights, values + (count % kStages) * C::kTileBytes);
    product_commit();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      state.sum[row] += __shfl_xor_sync(0xFFFFFFFFu, state.sum[row], 1);
      state.sum[row] += __shfl_xor_sync(0xFFFFFFFFu, state.sum[row], 2);
    }
    product_wait<0>();
    pin(out);
    release<C>(barriers.empty(1, count % kStages), lane);
    ++count;

    // Normalised rows go to shared memory in the copy engine's swizzle, and from there out, clipped to L.
    if constexpr (C::kOwnOutput) {
      if (thread == 0) copy_wait_sources();
    }
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
    if constexpr (!C::kOwnOutput) {
      if (thread == 0) copy_wait_sources();
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.query_empty(group));
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
              fmaf(state.largest[row], arguments.scale, logf(state.sum[row]));
        }
      }
    }
  }
  if (thread == 0) copy_wait_all();
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    sibling_attention_forward(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ uint8_t raw[];
  const uint32_t shared = (shared_address(raw) + 1023u) & ~1023u;
  const Barriers barriers{shared + C::kBarrierOffset};
  const int rank = C::kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
  if (threadIdx.x == 0) {
    for (int group = 0; group < kConsumers; ++group) {
      barrier_init(barriers.query_full(group), 1);
      barrier_init(barriers.query_empty(group), 4);
    }
    for (int operand = 0; operand < 2; ++operand) {
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(barriers.full(operand, stage), 1);
        barrier_init(barriers.empty(operand, stage), 4 * kConsumers * C::kCluster);
      }
    }
    barrier_init_fence();
  }
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }

  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    lower_registers<40>();
    if (threadIdx.x < 32) feed<C>(arguments, shared, barriers, rank, static_cast<int>(threadIdx.x));
  } else {
    raise_registers<232>();
    compute<C>(arguments, shared, barriers, rank, group - 1, static_cast<int>(threadIdx.x) % 128);
  }
  // A block may not leave while its neighbour still copies to it or arrives on its barriers.
  if constexpr (C::kCluster > 1) cluster_sync();
}

// ---- host ------------------------------------------------------------------------------------------------------

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

EncodeFunction encode_function() {
  static const EncodeFunction function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeFunction>(entry)
                                                                        : nullptr;
  }();
  return function;
}

// Axes of every map: 64 columns, two token or head axes, panels of columns, one more.
struct MapAxes {
  int64_t size[5];
  int64_t stride[5];  // elements
  int32_t box[5];
};

// An axis of one element may carry any stride; the encoder wants multiples of 16 bytes all the same.
bool encode(CUtensorMap* map, const void* data, bool float16, const MapAxes& axes) {
  cuuint64_t size[5];
  cuuint64_t stride_bytes[4];
  cuuint32_t box[5];
  cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; ++i) {
    size[i] = static_cast<cuuint64_t>(axes.size[i]);
    box[i] = static_cast<cuuint32_t>(axes.box[i]);
    if (i > 0) stride_bytes[i - 1] = axes.size[i] == 1 ? 128 : static_cast<cuuint64_t>(2 * axes.stride[i]);
  }
  return encode_function()(map, float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
                           const_cast<void*>(data), size, stride_bytes, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

MapAxes query_axes(const UnirlSiblingAttention& call, const UnirlStrided& tensor, int ratio, int tokens) {
  return MapAxes{{kPanel, call.query_heads, call.length, call.head_size / kPanel, call.num_rows},
                 {1, tensor.head_stride, tensor.token_stride, kPanel, tensor.row_stride},
                 {kPanel, ratio, tokens, 1, 1}};
}

MapAxes key_axes(const UnirlSiblingAttention& call, const UnirlStrided& tensor, int64_t rows, int64_t tokens,
                 int box_tokens) {
  return MapAxes{{kPanel, tokens, call.head_size / kPanel, call.key_heads, rows},
                 {1, tensor.token_stride, kPanel, tensor.head_stride, tensor.row_stride},
                 {kPanel, box_tokens, 1, 1, 1}};
}

template <typename C>
const char* launch(const UnirlSiblingAttention& call, cudaStream_t stream) {
  ForwardArguments arguments;
  std::memset(&arguments, 0, sizeof(arguments));
  const bool float16 = call.float16 != 0;
  const int ratio = static_cast<int>(call.query_heads / call.key_heads);
  const int tokens = kGroupRows / ratio;
  bool encoded = encode(&arguments.query, call.query.data, float16, query_axes(call, call.query, ratio, tokens)) &&
                 encode(&arguments.out, call.out.data, float16, query_axes(call, call.out, ratio, tokens));
  const UnirlStrided* own[2] = {&call.key, &call.value};
  const UnirlStrided* prefix[2] = {&call.prefix_key, &call.prefix_value};
  for (int operand = 0; operand < 2; ++operand) {
    auto encode_own = [&](CUtensorMap* map, int box) {
      return encode(map, own[operand]->data, float16,
                    key_axes(call, *own[operand], call.num_rows, call.length, box));
    };
    auto encode_prefix = [&](CUtensorMap* map, int box) {
      return call.prefix_length == 0 ||
             encode(map, prefix[operand]->data, float16,
                    key_axes(call, *prefix[operand], call.num_groups, call.prefix_length, box));
    };
    encoded = encoded && encode_own(&arguments.own[operand].tile, C::kKeys / C::kCluster) &&
              encode_own(&arguments.own[operand].chunk, kChunk) &&
              encode_prefix(&arguments.prefix[operand].tile, C::kKeys / C::kCluster) &&
              encode_prefix(&arguments.prefix[operand].chunk, kChunk) &&
              encode_prefix(&arguments.prefix_row[operand], 1);
  }
  if (!encoded) return "a tensor map was refused: addresses and strides must be multiples of 16 bytes";

  arguments.lse = call.lse;
  arguments.prefix_lengths = call.prefix_lengths;
  arguments.scale = call.scale;
  arguments.length = static_cast<int32_t>(call.length);
  arguments.prefix_length = static_cast<int32_t>(call.prefix_length);
  arguments.key_heads = static_cast<int32_t>(call.key_heads);
  arguments.ratio = ratio;
  arguments.tokens = tokens;
  arguments.siblings = static_cast<int32_t>(call.num_rows / call.num_groups);
  const int64_t unit_tokens = static_cast<int64_t>(tokens) * kConsumers * C::kCluster;
  const int64_t units_per_head = (call.length + unit_tokens - 1) / unit_tokens;
  const int64_t num_units = units_per_head * call.num_rows * call.key_heads;
  if (num_units > INT32_MAX) return "too many rows for one launch";
  arguments.units_per_head = static_cast<int32_t>(units_per_head);
  arguments.num_units = static_cast<int32_t>(num_units);

  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = sibling_attention_forward<C>;
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const int64_t clusters = num_units < processors / C::kCluster ? num_units : processors / C::kCluster;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * C::kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = C::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = C::kCluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = C::kCluster > 1 ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kernel, arguments);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename Element>
const char* dispatch(const UnirlSiblingAttention& call, cudaStream_t stream) {
  if (call.head_size == 64 && call.keys_per_tile == 128 && call.blocks_sharing == 1)
    return launch<Config<Element, 64, 128, 1>>(call, stream);
  if (call.head_size == 128) {
    if (call.keys_per_tile == 128 && call.blocks_sharing == 1)
      return launch<Config<Element, 128, 128, 1>>(call, stream);
    if (call.keys_per_tile == 128 && call.blocks_sharing == 2)
      return launch<Config<Element, 128, 128, 2>>(call, stream);
    if (call.keys_per_tile == 160 && call.blocks_sharing == 1)
      return launch<Config<Element, 128, 160, 1>>(call, stream);
    if (call.keys_per_tile == 160 && call.blocks_sharing == 2)
      return launch<Config<Element, 128, 160, 2>>(call, stream);
    if (call.keys_per_tile == 176 && call.blocks_sharing == 1)
      return launch<Config<Element, 128, 176, 1>>(call, stream);
    if (call.keys_per_tile == 176 && call.blocks_sharing == 2)
      return launch<Config<Element, 128, 176, 2>>(call, stream);
  }
  return "no kernel for this head size, tile width and number of blocks that share";
}

const char* forward(const UnirlSiblingAttention& call, cudaStream_t stream) {
  if (call.num_rows <= 0 || call.length <= 0) return nullptr;
  if (call.num_groups <= 0 || call.key_heads <= 0 || call.num_rows % call.num_groups != 0 ||
      call.query_heads % call.key_heads != 0) {
    return "rows must be a multiple of groups, query heads of key heads";
  }
  if (call.query_heads / call.key_heads > kGroupRows) return "at most 64 query heads share a key head";
  if (call.length > (1 << 29) || call.prefix_length > (1 << 29)) return "at most 2^29 tokens";
  if (!(call.scale > 0.0f)) return "scale must be positive";
  if (encode_function() == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  return call.float16 != 0 ? dispatch<__half>(call, stream) : dispatch<__nv_bfloat16>(call, stream);
}

}  // namespace
}  // namespace unirl

extern "C" int unirl_sibling_attention_forward(const UnirlSiblingAttention* call, void* stream, char* message,
                                               int message_bytes) {
  const char* problem = unirl::forward(*call, static_cast<cudaStream_t>(stream));
  if (problem == nullptr) return 0;
  std::snprintf(message, static_cast<size_t>(message_bytes), "%s", problem);
  return -1;
}
