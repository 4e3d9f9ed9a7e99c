// SPDX-License-Identifier: Apache-2.0
#include "digest.h"

#include <array>
#include <mutex>

#include "noise.h"

// The compiler does not find the multiplication of 32-bit halves by itself. Under sanitizers the plain loop runs.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(UNIRL_SANITIZED)
#include <immintrin.h>
#define UNIRL_AVX2 __attribute__((target("avx2")))
#endif

namespace unirl {
namespace {

std::array<uint64_t, kNumKeys> make_keys() {
  std::array<uint64_t, kNumKeys> keys;
  for (int64_t i = 0; i < kNumKeys; ++i) keys[i] = mix64(static_cast<uint64_t>(i + 1) * kGolden);
  return keys;
}

constexpr int64_t kBatch = 32;  // tiles that are summed, then mixed together
constexpr int64_t kPrefetchBytes = 1024;

// At most kTileWords words.
struct Tile {
  const char* words;
  int64_t count;
};

// Lanes 0 and 1 of each tile, and its lanes 2 and 3. Lane j sums over the words with the keys shifted by j.
struct Lanes {
  uint64_t left[2 * kBatch];
  uint64_t right[2 * kBatch];
};

void sum_tiles_plain(const Tile* tiles, int64_t num_tiles, const uint64_t* keys, Lanes& lanes) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    uint64_t sums[kDigestLanes] = {};
    for (int64_t i = 0; i < tiles[tile].count; ++i) {
      uint64_t word;
      std::memcpy(&word, tiles[tile].words + 8 * i, 8);
      const uint64_t high = word >> 32;
      for (int64_t j = 0; j < kDigestLanes; ++j) {
        const uint64_t key = keys[i + j];
        // The low half of word + key is the low half's sum; the high half is added on its own, without the carry.
        sums[j] += static_cast<uint64_t>(static_cast<uint32_t>(word + key)) *
                   static_cast<uint64_t>(static_cast<uint32_t>(high + (key >> 32)));
      }
    }
    std::memcpy(lanes.left + 2 * tile, sums, 16);
    std::memcpy(lanes.right + 2 * tile, sums + 2, 16);
  }
}

#ifdef UNIRL_AVX2
UNIRL_INLINE UNIRL_AVX2 __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// Four products of two halves.
UNIRL_INLINE UNIRL_AVX2 __m256i products(__m256i halves) {
  return _mm256_mul_epu32(halves, _mm256_srli_epi64(halves, 32));
}

// Stores the sum of `first` and that of `second`.
UNIRL_INLINE UNIRL_AVX2 void store_sums(__m256i first, __m256i second, uint64_t* to) {
  const __m256i pairs = _mm256_add_epi64(_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
  const __m128i sums = _mm_add_epi64(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums);
}

UNIRL_AVX2 void sum_tiles_avx2(const Tile* tiles, int64_t num_tiles, const uint64_t* keys, Lanes& lanes) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const char* words = tiles[tile].words;
    const int64_t count = tiles[tile].count;
    __m256i sums[kDigestLanes] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      const __m256i word = load(words + 8 * i);
      if (i % 8 == 0) _mm_prefetch(words + 8 * i + kPrefetchBytes, _MM_HINT_T0);
      for (int64_t j = 0; j < kDigestLanes; ++j) {
        sums[j] = _mm256_add_epi64(sums[j], products(_mm256_add_epi32(word, load(keys + i + j))));
      }
    }
    if (i < count) {
      const __m256i present = _mm256_cmpgt_epi64(_mm256_set1_epi64x(count - i), _mm256_setr_epi64x(0, 1, 2, 3));
      const __m256i word = _mm256_maskload_epi64(reinterpret_cast<const long long*>(words + 8 * i), present);
      for (int64_t j = 0; j < kDigestLanes; ++j) {
        const __m256i sum = _mm256_add_epi32(word, load(keys + i + j));
        sums[j] = _mm256_add_epi64(sums[j], products(_mm256_and_si256(sum, present)));
      }
    }
    store_sums(sums[0], sums[1], lanes.left + 2 * tile);
    store_sums(sums[2], sums[3], lanes.right + 2 * tile);
  }
}
#endif

void sum_tiles(const Tile* tiles, int64_t num_tiles, Lanes& lanes) {
#ifdef UNIRL_AVX2
  static const auto best = __builtin_cpu_supports("avx2") ? sum_tiles_avx2 : sum_tiles_plain;
  best(tiles, num_tiles, digest_keys(), lanes);
#else
  sum_tiles_plain(tiles, num_tiles, digest_keys(), lanes);
#endif
}

// salts[2 i], salts[2 i + 1] of tile `first` + i of a row or tensor.
void make_salts(uint64_t first, int64_t num_tiles, uint64_t* salts) {
  for (int64_t i = 0; i < 2 * num_tiles; ++i) salts[i] = kTileSalts[i % 2] * (first + static_cast<uint64_t>(i / 2) + 1);
}

// What each tile adds to the two sums.
UNIRL_CLONES void mix_tiles(const Lanes& lanes, const uint64_t* salts, int64_t num_tiles, uint64_t* mixed) {
  for (int64_t i = 0; i < 2 * num_tiles; ++i) mixed[i] = mix64(mix64(lanes.left[i] + salts[i]) + lanes.right[i]);
}

void add_words(const char* words, int64_t count, uint64_t first_tile, uint64_t* sums) {
  Tile tiles[kBatch];
  Lanes lanes;
  uint64_t salts[2 * kBatch], mixed[2 * kBatch];
  for (int64_t start = 0; start < count;) {
    int64_t num = 0;
    for (; num < kBatch && start < count; ++num, start += kTileWords) {
      tiles[num] = {words + 8 * start, std::min(kTileWords, count - start)};
    }
    sum_tiles(tiles, num, lanes);
    make_salts(first_tile, num, salts);
    mix_tiles(lanes, salts, num, mixed);
    first_tile += static_cast<uint64_t>(num);
    for (int64_t i = 0; i < 2 * num; ++i) sums[i % 2] += mixed[i];
  }
}

UNIRL_CLONES void finish_rows(const uint64_t* sums, const uint64_t* headers, int64_t num_rows, int64_t* out) {
  for (int64_t i = 0; i < 2 * num_rows; ++i) out[i] = static_cast<int64_t>(mix64(sums[i] + headers[i]));
}

void digest_rows(const int64_t* values, int64_t begin, int64_t end, int64_t row_size, int64_t stride,
                 const int64_t* offsets, int64_t* out) {
  Tile tiles[kBatch];
  Lanes lanes;
  int64_t counts[kBatch];
  uint64_t salts[2 * kBatch], sums[2 * kBatch], headers[2 * kBatch];
  for (int64_t i = 0; i < kBatch; ++i) make_salts(0, 1, salts + 2 * i);
  uint64_t header[2] = {0, 0};
  int64_t header_count = -1;
  for (int64_t first = begin; first < end; first += kBatch) {
    const int64_t num = std::min(kBatch, end - first);
    for (int64_t i = 0; i < num; ++i) {
      const int64_t row = first + i;
      const int64_t start = offsets ? offsets[row] : row * stride;
      counts[i] = offsets ? offsets[row + 1] - start : row_size;
      tiles[i] = {reinterpret_cast<const char*>(values + start), std::min(counts[i], kTileWords)};
      if (counts[i] != header_count) {
        header_count = counts[i];
        for (int which = 0; which < 2; ++which) {
          header[which] = mix64(static_cast<uint64_t>(header_count + 1) * kLengthSalts[which]);
        }
      }
      std::memcpy(headers + 2 * i, header, sizeof(header));
    }
    sum_tiles(tiles, num, lanes);
    mix_tiles(lanes, salts, num, sums);
    for (int64_t i = 0; i < num; ++i) {
      if (counts[i] == 0) sums[2 * i] = sums[2 * i + 1] = 0;
      if (counts[i] > kTileWords) add_words(tiles[i].words + 8 * kTileWords, counts[i] - kTileWords, 1, sums + 2 * i);
    }
    finish_rows(sums, headers, num, out + 2 * first);
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
