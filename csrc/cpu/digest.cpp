// SPDX-License-Identifier: Apache-2.0
#include "digest.h"

#include <array>
#include <mutex>

#include "noise.h"

namespace unirl {
namespace {

std::array<uint64_t, kNumKeys> make_keys() {
  std::array<uint64_t, kNumKeys> keys;
  for (int64_t i = 0; i < kNumKeys; ++i) keys[i] = mix64(static_cast<uint64_t>(i + 1) * kGolden);
  return keys;
}

// The two mixed sums of one tile of `count` words, added to sums.
UNIRL_INLINE void add_tile(const char* words, int64_t count, uint64_t tile, const uint64_t* keys, uint64_t* sums) {
  uint64_t lane0 = 0, lane1 = 0, lane2 = 0, lane3 = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t word;
    std::memcpy(&word, words + 8 * i, 8);
    const uint64_t high = word >> 32;
    // The low half of word + key is the low half's sum; the high half is added on its own, without the carry.
    auto product = [&](uint64_t key) {
      return static_cast<uint64_t>(static_cast<uint32_t>(word + key)) *
             static_cast<uint64_t>(static_cast<uint32_t>(high + (key >> 32)));
    };
    lane0 += product(keys[i]);
    lane1 += product(keys[i + 1]);
    lane2 += product(keys[i + 2]);
    lane3 += product(keys[i + 3]);
  }
  sums[0] += mix64(mix64(lane0 + kTileSalts[0] * (tile + 1)) + lane2);
  sums[1] += mix64(mix64(lane1 + kTileSalts[1] * (tile + 1)) + lane3);
}

UNIRL_CLONES void add_words(const char* words, int64_t count, uint64_t first_tile, uint64_t* sums) {
  const uint64_t* keys = digest_keys();
  for (int64_t start = 0; start < count; start += kTileWords) {
    add_tile(words + 8 * start, std::min(kTileWords, count - start),
             first_tile + static_cast<uint64_t>(start / kTileWords), keys, sums);
  }
}

UNIRL_CLONES void digest_rows(const int64_t* values, int64_t begin, int64_t end, int64_t row_size, int64_t stride,
                              const int64_t* offsets, int64_t* out) {
  const uint64_t* keys = digest_keys();
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = offsets ? offsets[row] : row * stride;
    const int64_t count = offsets ? offsets[row + 1] - first : row_size;
    const char* words = reinterpret_cast<const char*>(values + first);
    uint64_t sums[2] = {0, 0};
    for (int64_t start = 0; start < count; start += kTileWords) {
      add_tile(words + 8 * start, std::min(kTileWords, count - start), static_cast<uint64_t>(start / kTileWords),
               keys, sums);
    }
    for (int lane = 0; lane < 2; ++lane) {
      const uint64_t header = mix64(static_cast<uint64_t>(count + 1) * kLengthSalts[lane]);
      out[2 * row + lane] = static_cast<int64_t>(mix64(sums[lane] + header));
    }
  }
}

}  // namespace

const uint64_t* digest_keys() {
  static const std::array<uint64_t, kNumKeys> keys = make_keys();
  return keys.data();
}

void layout_digest(const int64_t* values, int64_t num_rows, int64_t row_size, int64_t stride,
                   const int64_t* offsets, int64_t* out, int num_threads) {
  parallel_for(num_rows, offsets ? 64 : row_size, num_threads, [&](int64_t begin, int64_t end) {
    digest_rows(values, begin, end, row_size, stride, offsets, out);
  });
}

void tensor_digest(const std::vector<DigestInput>& inputs, int64_t* out, int num_threads) {
  for (size_t index = 0; index < inputs.size(); ++index) {
    const DigestInput& input = inputs[index];
    const char* bytes = static_cast<const char*>(input.data);
    const int64_t full_words = input.num_bytes / 8;
    const int64_t full_tiles = full_words / kTileWords;
    uint64_t sums[2] = {0, 0};
    std::mutex lock;
    parallel_for(full_tiles, kTileWords, num_threads, [&](int64_t begin, int64_t end) {
      uint64_t part[2] = {0, 0};
      add_words(bytes + 8 * kTileWords * begin, kTileWords * (end - begin), static_cast<uint64_t>(begin), part);
      const std::lock_guard<std::mutex> guard(lock);
      sums[0] += part[0];
      sums[1] += part[1];
    });
    // The last tile, with the last word filled up with zero bytes.
    const int64_t done = 8 * kTileWords * full_tiles;
    const int64_t rest = input.num_bytes - done;
    if (rest > 0) {
      char tile[8 * kTileWords] = {};
      std::memcpy(tile, bytes + done, static_cast<size_t>(rest));
      add_words(tile, (rest + 7) / 8, static_cast<uint64_t>(full_tiles), sums);
    }
    for (int lane = 0; lane < 2; ++lane) {
      out[2 * index + lane] = static_cast<int64_t>(mix64(sums[lane] + input.header[lane]));
    }
  }
}

}  // namespace unirl
