// SPDX-License-Identifier: Apache-2.0
// The smallest test harness: CHECK counts failures, finish() is main's return value.
#pragma once

#include <cmath>
#include <cstdio>
#include <memory>

namespace unirl::test {

inline int failures = 0;

inline int finish() {
  if (failures == 0) std::puts("ok");
  return failures == 0 ? 0 : 1;
}

inline bool close(double left, double right, double tolerance) {
  return std::fabs(left - right) <= tolerance * std::fmax(1.0, std::fmax(std::fabs(left), std::fabs(right)));
}

// A deterministic value in [-1, 1).
inline double value(uint64_t index) {
  index = (index + 1) * 0x9E3779B97F4A7C15ull;
  index ^= index >> 29;
  index *= 0xBF58476D1CE4E5B9ull;
  return static_cast<double>(static_cast<int64_t>(index)) / 9223372036854775808.0;
}

// Exactly `count` values on the heap, so that AddressSanitizer sees a read or write past the end.
template <typename T>
std::unique_ptr<T[]> filled(int64_t count, uint64_t seed) {
  std::unique_ptr<T[]> result(new T[count]);
  for (int64_t i = 0; i < count; ++i) result[i] = static_cast<T>(value(seed * 1000003u + i));
  return result;
}

}  // namespace unirl::test

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      ++unirl::test::failures;                                                 \
      std::printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
    }                                                                          \
  } while (false)
