// SPDX-License-Identifier: Apache-2.0
#include "cpu/common.h"

#include <atomic>
#include <new>

#include "check.h"

using namespace unirl;
using namespace unirl::test;

namespace {

constexpr int64_t kMuchWork = int64_t{1} << 30;  // an item that repays a thread

void every_item_is_run_once() {
  for (const int64_t count : {0, 1, 2, 7, 100}) {
    for (const int threads : {-1, 0, 1, 3, 16}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      parallel_for(count, kMuchWork, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++runs[static_cast<size_t>(i)];
      });
      for (const auto& run : runs) CHECK(run == 1);
    }
  }
}

void what_a_body_throws_comes_out_after_all_threads_ended() {
  for (const int64_t bad : {0, 5, 9}) {
    std::atomic<int> finished{0};
    bool caught = false;
    try {
      parallel_for(10, kMuchWork, 4, [&](int64_t begin, int64_t end) {
        if (begin <= bad && bad < end) throw std::bad_alloc();
        ++finished;
      });
    } catch (const std::bad_alloc&) {
      caught = true;
    }
    CHECK(caught);
    CHECK(finished == 3);
  }
}

// Every half against its definition, and back; floats between two halves go to the nearer, ties to the even one.
void float16_is_exact_and_rounds_to_nearest_even() {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const int exponent = (half >> 10) & 0x1F, mantissa = half & 0x3FF;
    const float value = float16_to_float(half);
    if (exponent == 31 && mantissa != 0) {
      CHECK(std::isnan(value) && std::isnan(float16_to_float(float_to_float16(value))));
      continue;
    }
    const double magnitude = exponent == 31  ? INFINITY
                             : exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1024 + mantissa, exponent - 25);
    CHECK(static_cast<double>(value) == (half & 0x8000 ? -magnitude : magnitude));
    CHECK(float_to_float16(value) == half);
    if ((half & 0x7FFF) < 0x7BFF) {
      const float next = float16_to_float(static_cast<uint16_t>(half + 1));
      const float middle = (value + next) / 2;
      CHECK(float_to_float16(middle) == (half & 1 ? half + 1 : half));
      CHECK(float_to_float16(std::nextafterf(middle, value)) == half);
      CHECK(float_to_float16(std::nextafterf(middle, next)) == half + 1);
    }
  }
  CHECK(float_to_float16(65519.996f) == 0x7BFF);
  CHECK(float_to_float16(65520.0f) == 0x7C00);
}

void bfloat16_rounds_to_nearest_even_and_keeps_nan() {
  for (uint32_t bits = 0; bits < 0x7F80u; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    CHECK(float_to_bfloat16(bfloat16_to_float(half)) == half);
    CHECK(float_to_bfloat16(bits_to_float((bits << 16) | 0x8000u)) == (half & 1 ? half + 1 : half));
    CHECK(float_to_bfloat16(bits_to_float((bits << 16) | 0x7FFFu)) == half);
    CHECK(float_to_bfloat16(bits_to_float((bits << 16) | 0x8001u)) == half + 1);
  }
  for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u}) {
    CHECK(std::isnan(bfloat16_to_float(float_to_bfloat16(bits_to_float(bits)))));
  }
}

}  // namespace

int main() {
  every_item_is_run_once();
  what_a_body_throws_comes_out_after_all_threads_ended();
  float16_is_exact_and_rounds_to_nearest_even();
  bfloat16_rounds_to_nearest_even_and_keeps_nan();
  return finish();
}
