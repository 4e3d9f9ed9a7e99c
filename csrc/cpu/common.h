// SPDX-License-Identifier: Apache-2.0
// What the CPU kernels share: inlining and multiversioning macros, threads, element types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#define UNIRL_INLINE inline __attribute__((always_inline))

// One body, compiled for AVX2 and for the baseline, chosen when the library is loaded. Contraction is off in the
// whole build, so that both give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(UNIRL_SANITIZED)
#define UNIRL_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define UNIRL_CLONES
#endif

namespace unirl {

// Elements are handled in blocks of this many; sums are defined in these blocks (see ordered_sum.h).
constexpr int64_t kBlock = 256;

enum class Dtype : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Calls body(begin, end) on disjoint ranges that cover [0, count). Ranges never change results: every row (or
// word tile) is computed in one call, whatever the number of threads. A range whose thread cannot be started runs
// here, and what a body throws comes out of the call: neither ends the process.
template <typename Body>
void parallel_for(int64_t count, int64_t work_per_item, int num_threads, const Body& body) {
  constexpr int64_t kLeastWork = 1 << 15;  // elements that repay the start of a thread
  const int64_t useful = std::max<int64_t>(1, count * std::max<int64_t>(work_per_item, 1) / kLeastWork);
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>({num_threads, count, useful}));
  if (threads == 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  std::vector<std::exception_ptr> errors(static_cast<size_t>(threads));
  const auto run = [&](int64_t part) noexcept {
    try {
      body(count * part / threads, count * (part + 1) / threads);
    } catch (...) {
      errors[static_cast<size_t>(part)] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(threads - 1));
  for (int64_t part = 1; part < threads; ++part) {
    try {
      others.emplace_back(run, part);
    } catch (const std::system_error&) {
      run(part);
    }
  }
  run(0);
  for (auto& thread : others) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

UNIRL_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

UNIRL_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

UNIRL_INLINE float bfloat16_to_float(uint16_t half) { return bits_to_float(uint32_t{half} << 16); }

// Round to nearest, ties to even; NaN stays NaN.
UNIRL_INLINE uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline float float16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu;
  const uint32_t mantissa = half & 0x3FFu;
  if (exponent == 0x1F) return bits_to_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {
    const float subnormal = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return bits_to_float(sign | float_to_bits(subnormal));
  }
  return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest, ties to even; overflow gives infinity.
inline uint16_t float_to_float16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the spacing is 2^-24: adding 1/2 leaves the rounded count of it in the low mantissa bits.
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

// Reads count elements, starting at element `first` of `source`, as T.
template <typename T>
UNIRL_INLINE void load_block(const void* source, Dtype dtype, int64_t first, int64_t count, T* out) {
  switch (dtype) {
    case Dtype::kFloat32: {
      const float* in = static_cast<const float*>(source) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(in[i]);
      break;
    }
    case Dtype::kFloat64: {
      const double* in = static_cast<const double*>(source) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(in[i]);
      break;
    }
    case Dtype::kBFloat16: {
      const uint16_t* in = static_cast<const uint16_t*>(source) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(bfloat16_to_float(in[i]));
      break;
    }
    case Dtype::kFloat16: {
      const uint16_t* in = static_cast<const uint16_t*>(source) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(float16_to_float(in[i]));
      break;
    }
  }
}

// Writes count elements from T, rounded to dtype, starting at element `first` of `target`.
template <typename T>
UNIRL_INLINE void store_block(void* target, Dtype dtype, int64_t first, int64_t count, const T* in) {
  switch (dtype) {
    case Dtype::kFloat32: {
      float* out = static_cast<float*>(target) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
      break;
    }
    case Dtype::kFloat64: {
      double* out = static_cast<double*>(target) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<double>(in[i]);
      break;
    }
    case Dtype::kBFloat16: {
      uint16_t* out = static_cast<uint16_t*>(target) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = float_to_bfloat16(static_cast<float>(in[i]));
      break;
    }
    case Dtype::kFloat16: {
      uint16_t* out = static_cast<uint16_t*>(target) + first;
      for (int64_t i = 0; i < count; ++i) out[i] = float_to_float16(static_cast<float>(in[i]));
      break;
    }
  }
}

inline void zero_block(void* target, Dtype dtype, int64_t first, int64_t count) {
  if (count > 0) std::memset(static_cast<char*>(target) + first * size_of(dtype), 0, count * size_of(dtype));
}

// A [N, row] operand whose rows are contiguous; stride in elements.
struct Rows {
  const void* data;
  Dtype dtype;
  int64_t stride;
  const void* row(int64_t index) const {
    return data == nullptr ? nullptr : static_cast<const char*>(data) + index * stride * size_of(dtype);
  }
};

struct MutableRows {
  void* data;
  Dtype dtype;
  int64_t stride;
  void* row(int64_t index) const {
    return data == nullptr ? nullptr : static_cast<char*>(data) + index * stride * size_of(dtype);
  }
};

}  // namespace unirl
