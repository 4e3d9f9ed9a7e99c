// SPDX-License-Identifier: Apache-2.0
// Keyed normal noise, see unirl/ops/noise.py for the definition and its sources.
#pragma once

#include "common.h"

namespace unirl {

constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9ull;
constexpr uint64_t kMix2 = 0x94D049BB133111EBull;

// The SplitMix64 finaliser.
UNIRL_INLINE uint64_t mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * kMix1;
  value = (value ^ (value >> 27)) * kMix2;
  return value ^ (value >> 31);
}

UNIRL_INLINE uint64_t noise_key(uint64_t seed, uint64_t row_key) { return mix64(mix64(seed) ^ row_key); }

// ln((word + 1/2) / 2^32), by exponent and mantissa in [2/3, 4/3) and an atanh series. Above 2/3 the series starts from
// the distance to 1, which keeps its digits where the uniform itself rounds to 1.
UNIRL_INLINE float log_of_uniform(uint32_t word) {
  const float uniform = (static_cast<float>(word) + 0.5f) * (1.0f / 4294967296.0f);
  const int32_t bits = static_cast<int32_t>(float_to_bits(uniform));
  const int32_t exponent = (bits - 0x3F2AAAAB) >> 23;
  const float mantissa = bits_to_float(static_cast<uint32_t>(bits) - (static_cast<uint32_t>(exponent) << 23));
  const float distance = (static_cast<float>(~word) + 0.5f) * (1.0f / 4294967296.0f);
  const bool near_one = exponent == 0;
  const float ratio = (near_one ? -distance : mantissa - 1.0f) / (near_one ? 2.0f - distance : mantissa + 1.0f);
  const float square = ratio * ratio;
  float series = static_cast<float>(2.0 / 11);
  series = series * square + static_cast<float>(2.0 / 9);
  series = series * square + static_cast<float>(2.0 / 7);
  series = series * square + static_cast<float>(2.0 / 5);
  series = series * square + static_cast<float>(2.0 / 3);
  series = series * square + 2.0f;
  return static_cast<float>(exponent) * static_cast<float>(0.693147180559945309417) + series * ratio;
}

// Two normals by Box and Muller: the top two bits of the angle word choose the quadrant, the low 30 an angle in
// (-pi/4, pi/4).
UNIRL_INLINE void box_muller(uint32_t radius_word, uint32_t angle_word, float* first, float* second) {
  const float radius = __builtin_sqrtf(-2.0f * log_of_uniform(radius_word));
  const uint32_t quadrant = angle_word >> 30;
  const float centred = static_cast<float>(static_cast<int32_t>(angle_word & 0x3FFFFFFFu) - (1 << 29));
  const float angle = (centred + 0.5f) * static_cast<float>(1.57079632679489661923 / 1073741824.0);
  const float square = angle * angle;
  float sine = static_cast<float>(1.0 / 362880);
  sine = sine * square + static_cast<float>(-1.0 / 5040);
  sine = sine * square + static_cast<float>(1.0 / 120);
  sine = sine * square + static_cast<float>(-1.0 / 6);
  sine = (sine * square + 1.0f) * angle;
  float cosine = static_cast<float>(-1.0 / 3628800);
  cosine = cosine * square + static_cast<float>(1.0 / 40320);
  cosine = cosine * square + static_cast<float>(-1.0 / 720);
  cosine = cosine * square + static_cast<float>(1.0 / 24);
  cosine = cosine * square + -0.5f;
  cosine = cosine * square + 1.0f;
  const bool odd = quadrant & 1u;
  float c = odd ? sine : cosine;
  float s = odd ? cosine : sine;
  c = (quadrant == 1u || quadrant == 2u) ? -c : c;
  s = quadrant >= 2u ? -s : s;
  *first = radius * c;
  *second = radius * s;
}

// Elements first .. first + kBlock - 1 of a row, `first` a multiple of 4.
UNIRL_INLINE void noise_block(uint64_t key, uint64_t first, uint32_t step, uint32_t stream, float* out) {
  constexpr int kCount = kBlock / 4;
  uint32_t c0[kCount], c1[kCount], c2[kCount], c3[kCount];
  for (int i = 0; i < kCount; ++i) {
    const uint64_t block = first / 4 + static_cast<uint64_t>(i);
    c0[i] = static_cast<uint32_t>(block);
    c1[i] = static_cast<uint32_t>(block >> 32);
    c2[i] = step;
    c3[i] = stream;
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCount; ++i) {
      const uint64_t product0 = static_cast<uint64_t>(c0[i]) * 0xD2511F53u;
      const uint64_t product1 = static_cast<uint64_t>(c2[i]) * 0xCD9E8D57u;
      c0[i] = static_cast<uint32_t>(product1 >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(product1);
      c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(product0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kCount; ++i) {
    box_muller(c0[i], c1[i], &out[4 * i], &out[4 * i + 1]);
    box_muller(c2[i], c3[i], &out[4 * i + 2], &out[4 * i + 3]);
  }
}

// Fills out [N, row_size] (contiguous rows) with the noise of row_keys [N].
void keyed_normal(const MutableRows& out, int64_t num_rows, int64_t row_size, uint64_t seed,
                  const int64_t* row_keys, uint32_t step, uint32_t stream, int num_threads);

}  // namespace unirl
