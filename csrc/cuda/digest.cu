// SPDX-License-Identifier: Apache-2.0
#include "digest.h"

#include <cuda_pipeline.h>

#include <algorithm>

#include "check.h"
#include "cpu/digest.h"

namespace unirl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// Device code sees constants, but not constant arrays, of the host.
__device__ uint64_t tile_salt(int lane) {
  constexpr uint64_t first = kTileSalts[0], second = kTileSalts[1];
  return lane == 0 ? first : second;
}

__device__ uint64_t length_salt(int lane) {
  constexpr uint64_t first = kLengthSalts[0], second = kLengthSalts[1];
  return lane == 0 ? first : second;
}

__device__ uint64_t key_at(int index) { return mix(static_cast<uint64_t>(index + 1) * kGolden); }

__device__ uint64_t product(uint64_t word, uint64_t key) {
  const uint32_t low = static_cast<uint32_t>(word) + static_cast<uint32_t>(key);
  const uint32_t high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(key >> 32);
  return static_cast<uint64_t>(low) * high;
}

__device__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// ---- rows of integers: a warp a row -------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    digest_rows(const int64_t* values, int64_t num_rows, int64_t row_size, int64_t stride, const int64_t* offsets,
                int64_t* out) {
  __shared__ uint64_t keys[kNumKeys];
  for (int i = threadIdx.x; i < kNumKeys; i += kThreads) keys[i] = key_at(i);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (int64_t row = first_row; row < num_rows; row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t start = offsets ? offsets[row] : row * stride;
    const int64_t count = offsets ? offsets[row + 1] - start : row_size;
    uint64_t sums[2] = {0, 0};
    for (int64_t tile = 0; tile * kTileWords < count; ++tile) {
      const int64_t words = min(kTileWords, count - tile * kTileWords);
      uint64_t lanes[kDigestLanes] = {};
      for (int64_t i = lane; i < words; i += 32) {
        const uint64_t word = static_cast<uint64_t>(values[start + tile * kTileWords + i]);
#pragma unroll
        for (int j = 0; j < kDigestLanes; ++j) lanes[j] += product(word, keys[i + j]);
      }
#pragma unroll
      for (int j = 0; j < kDigestLanes; ++j) lanes[j] = warp_sum(lanes[j]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[j] += mix(mix(lanes[j] + tile_salt(j) * static_cast<uint64_t>(tile + 1)) + lanes[j + 2]);
      }
    }
    if (lane < 2) {
      const uint64_t header = mix(static_cast<uint64_t>(count + 1) * length_salt(lane));
      out[2 * row + lane] = static_cast<int64_t>(mix((lane == 0 ? sums[0] : sums[1]) + header));
    }
  }
}

// ---- tensors: a warp takes four tiles at a time -------------------------------------------------------------------

// Sixteen lanes share a tile: lane l has the words 2 (l + 16 i) and 2 (l + 16 i) + 1, i < 4. Half a warp has the even
// tiles of a batch, the other half the odd ones. Words come through shared memory, a batch ahead, so that memory
// is busy while the sums are made; each lane reads back what it copied itself, which needs no barrier.
constexpr int kTileLanes = 16;
constexpr int kPieces = 4;                                     // 16-byte pieces of a tile that a lane has
constexpr int kTilePieces = kTileLanes * kPieces;
constexpr int kLaneTiles = static_cast<int>(kTilesPerBatch) / 2;
constexpr int kStages = 2;
constexpr int kBatchPieces = 32 * kPieces * kLaneTiles;        // of a warp
// More than run at once, so that a slow one does not hold up the end.
constexpr int64_t kBlocksPerMultiprocessor = 32;
constexpr int kTensorSharedBytes = 16 * kStages * kWarps * kBatchPieces;
static_assert(16 * kTilePieces == 8 * kTileWords && kTilesPerBatch % 2 == 0);

// Word `index` of a tensor, whatever its alignment; bytes past the end are zero.
__device__ uint64_t careful_word(const char* data, int64_t num_bytes, int64_t index) {
  uint64_t word = 0;
  const int64_t first = 8 * index;
  for (int i = 0; i < 8 && first + i < num_bytes; ++i) {
    word |= static_cast<uint64_t>(static_cast<unsigned char>(data[first + i])) << (8 * i);
  }
  return word;
}

// Halves the number of values a lane holds: lanes whose bit `mask` is set keep the upper half, the others the lower.
template <int kCount>
__device__ void exchange(uint64_t* values, int lane, int mask) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const uint64_t lower = values[i], upper = values[i + kCount / 2];
    const bool keep_upper = (lane & mask) != 0;
    const uint64_t received = __shfl_xor_sync(kAllLanes, keep_upper ? lower : upper, mask);
    values[i] = (keep_upper ? upper : lower) + received;
  }
}

// The keys of a lane's words: keys[i][j] and keys[i][j + 1] belong to digest lane j and the two words of piece i.
using LaneKeys = uint64_t[kPieces][kDigestLanes + 1];

// The tensor that a batch is of; found again when batches move on to another one.
struct Cursor {
  int64_t tensor = -1;
  DigestEntry entry{};

  __device__ bool holds(int64_t batch) const { return tensor >= 0 && batch < entry.first_batch + entry.num_batches; }

  // The last tensor whose first batch is not after this one (empty tensors have no batches).
  __device__ void move_to(int64_t batch, const DigestEntry* table, int64_t num_tensors) {
    int64_t low = 0, high = num_tensors - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (table[middle].first_batch <= batch) low = middle; else high = middle - 1;
    }
    tensor = low;
    entry = table[low];
  }

  // Where a batch of whole tiles on a 16-byte boundary lies; null for others.
  __device__ const char* whole(int64_t batch) const {
    const int64_t start = 8 * kTileWords * kTilesPerBatch * (batch - entry.first_batch);
    const bool fits = start + 8 * kTileWords * kTilesPerBatch <= entry.num_bytes && entry.address % 16 == 0;
    return fits ? reinterpret_cast<const char*>(entry.address) + start : nullptr;
  }
};

// Position in its batch, in pieces, of piece `i` of the lane's tile `tile`.
__device__ int piece_at(int lane, int tile, int i) {
  return (2 * tile + lane / kTileLanes) * kTilePieces + kTileLanes * i + lane % kTileLanes;
}

// Adds this lane's words of the last tiles of a tensor, or of one that lies on no 16-byte boundary. A word past the
// end adds nothing, unlike a word of zeros.
__device__ void hash_partial_batch(const DigestEntry& entry, int64_t batch, int lane, const LaneKeys& keys,
                                   uint64_t* values) {
  const char* data = reinterpret_cast<const char*>(entry.address);
  const int64_t first_word = kTileWords * kTilesPerBatch * (batch - entry.first_batch);
  const int64_t present = (entry.num_bytes + 7) / 8 - first_word;
#pragma unroll
  for (int tile = 0; tile < kLaneTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i) {
      const int64_t index = 2 * piece_at(lane, tile, i / 2) + i % 2;
      if (index >= present) continue;
      const uint64_t word = careful_word(data, entry.num_bytes, first_word + index);
#pragma unroll
      for (int j = 0; j < kDigestLanes; ++j) {
        values[tile * kDigestLanes + j] += product(word, keys[i / 2][i % 2 + j]);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    digest_tensors(const DigestEntry* table, int64_t num_tensors, int64_t num_batches, uint64_t* sums, int64_t* out) {
  extern __shared__ ulonglong2 ring[];
  const int lane = threadIdx.x % 32;
  ulonglong2* const slots = ring + threadIdx.x / 32 * (kStages * kBatchPieces) + lane;
  LaneKeys keys;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int j = 0; j <= kDigestLanes; ++j) keys[i][j] = key_at(2 * (kTileLanes * i + lane % kTileLanes) + j);
  }
  // A block takes a contiguous range of batches, its warps take turns in it.
  const int64_t begin = num_batches * blockIdx.x / gridDim.x + threadIdx.x / 32;
  const int64_t end = num_batches * (blockIdx.x + 1) / gridDim.x;

  Cursor ahead;
  const auto fetch = [&](int64_t batch, int stage) {
    if (batch < end) {
      if (!ahead.holds(batch)) ahead.move_to(batch, table, num_tensors);
      if (const char* data = ahead.whole(batch)) {
        const auto* pieces = reinterpret_cast<const ulonglong2*>(data);
#pragma unroll
        for (int i = 0; i < kLaneTiles * kPieces; ++i) {
          __pipeline_memcpy_async(slots + stage * kBatchPieces + 32 * i,
                                  pieces + piece_at(lane, i / kPieces, i % kPieces), 16);
        }
      }
    }
    __pipeline_commit();
  };

  Cursor current;
  uint64_t total = 0;  // this lane's mixed sums: of digest word `lane_word` of the current tensor
  // After the exchanges lane l holds digest lane (l / 2) % 4 of tile 2 ((l / 8) % 2) + l / 16, as does lane l ^ 1.
  const int lane_word = lane / 2 % kDigestLanes;
  const int tile_of_lane = 2 * (lane / 8 % 2) + lane / kTileLanes;
  const auto flush = [&] {
    if (current.tensor < 0) return;
    uint64_t first = lane % 2 == 0 && lane_word == 0 ? total : 0;
    uint64_t second = lane % 2 == 0 && lane_word == 1 ? total : 0;
    first = warp_sum(first);
    second = warp_sum(second);
    if (lane == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(sums + 2 * current.tensor), first);
      atomicAdd(reinterpret_cast<unsigned long long*>(sums + 2 * current.tensor + 1), second);
    }
    total = 0;
  };

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(begin + stage * kWarps, stage);
  int stage = 0;
  for (int64_t batch = begin; batch < end; batch += kWarps) {
    fetch(batch + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1);
    __pipeline_wait_prior(kStages - 1);
    if (!current.holds(batch)) {
      flush();
      current.move_to(batch, table, num_tensors);
    }
    uint64_t values[kLaneTiles * kDigestLanes] = {};
    if (current.whole(batch) != nullptr) {
#pragma unroll
      for (int i = 0; i < kLaneTiles * kPieces; ++i) {
        const ulonglong2 words = slots[stage * kBatchPieces + 32 * i];
        const uint64_t* key = keys[i % kPieces];
#pragma unroll
        for (int j = 0; j < kDigestLanes; ++j) {
          values[i / kPieces * kDigestLanes + j] += product(words.x, key[j]) + product(words.y, key[j + 1]);
        }
      }
    } else {
      hash_partial_batch(current.entry, batch, lane, keys, values);
    }
    exchange<8>(values, lane, 8);
    exchange<4>(values, lane, 4);
    exchange<2>(values, lane, 2);
    const uint64_t sum = values[0] + __shfl_xor_sync(kAllLanes, values[0], 1);
    // Digest lanes 2 and 3 of a tile are four lanes further on.
    const uint64_t partner = __shfl_down_sync(kAllLanes, sum, 4);
    const int64_t tile = kTilesPerBatch * (batch - current.entry.first_batch) + tile_of_lane;
    if (lane_word < 2 && 8 * kTileWords * tile < current.entry.num_bytes) {
      total += mix(mix(sum + tile_salt(lane_word) * static_cast<uint64_t>(tile + 1)) + partner);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  flush();
  // The last block to finish mixes the headers in.
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* finished = reinterpret_cast<unsigned long long*>(sums + 2 * num_tensors);
    last = atomicAdd(finished, 1ull) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int64_t i = threadIdx.x; i < 2 * num_tensors; i += kThreads) {
    const uint64_t sum = __ldcg(reinterpret_cast<const unsigned long long*>(sums) + i);
    out[i] = static_cast<int64_t>(mix(sum + table[i / 2].header[i % 2]));
  }
}

}  // namespace

void layout_digest(const int64_t* values, int64_t num_rows, int64_t row_size, int64_t stride, const int64_t* offsets,
                   int64_t* out, void* stream) {
  if (num_rows == 0) return;
  const int64_t blocks = std::min<int64_t>((num_rows + kWarps - 1) / kWarps, 32LL * multiprocessors());
  digest_rows<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      values, num_rows, row_size, stride, offsets, out);
  check(cudaGetLastError(), "layout_digest");
}

void tensor_digest(const DigestEntry* table, int64_t num_tensors, int64_t num_batches, uint64_t* sums, int64_t* out,
                   void* stream) {
  const int64_t useful = std::max<int64_t>(1, (num_batches + kWarps - 1) / kWarps);
  const int64_t blocks = std::min<int64_t>(useful, kBlocksPerMultiprocessor * multiprocessors());
  check(cudaFuncSetAttribute(digest_tensors, cudaFuncAttributeMaxDynamicSharedMemorySize, kTensorSharedBytes),
        "cudaFuncSetAttribute");
  digest_tensors<<<static_cast<unsigned>(blocks), kThreads, kTensorSharedBytes, static_cast<cudaStream_t>(stream)>>>(
      table, num_tensors, num_batches, sums, out);
  check(cudaGetLastError(), "tensor_digest");
}

}  // namespace unirl::cuda
