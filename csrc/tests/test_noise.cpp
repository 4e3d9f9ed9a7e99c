// SPDX-License-Identifier: Apache-2.0
#include "cpu/noise.h"

#include "check.h"

using namespace unirl;
using namespace unirl::test;

namespace {

void row_bits_do_not_depend_on_batch_length_or_threads() {
  const int64_t keys[5] = {11, -7, 0, 1ll << 62, 42};
  auto whole = filled<float>(5 * 1000, 0);
  keyed_normal({whole.get(), Dtype::kFloat32, 1000}, 5, 1000, 3, keys, 9, 1, 4);
  for (const int64_t length : {1, 4, 10, 16, 64, 255, 256, 257}) {
    for (int row = 0; row < 5; ++row) {
      auto alone = filled<float>(length, 1);
      keyed_normal({alone.get(), Dtype::kFloat32, length}, 1, length, 3, keys + row, 9, 1, 1);
      CHECK(std::memcmp(alone.get(), whole.get() + 1000 * row, sizeof(float) * length) == 0);
    }
  }
}

void values_are_box_muller_in_double() {
  for (uint64_t index = 0; index < 20000; ++index) {
    const uint32_t radius_word = static_cast<uint32_t>(mix64(index)), angle_word = static_cast<uint32_t>(mix64(~index));
    float first, second;
    box_muller(radius_word, angle_word, &first, &second);
    const double radius = std::sqrt(-2.0 * std::log((radius_word + 0.5) / 4294967296.0));
    const double low = static_cast<double>(angle_word & 0x3FFFFFFFu) - 536870912.0 + 0.5;
    const double angle = M_PI / 2 * (static_cast<double>(angle_word >> 30) + low / 1073741824.0);
    CHECK(close(first, radius * std::cos(angle), 1e-6));
    CHECK(close(second, radius * std::sin(angle), 1e-6));
  }
}

void the_extreme_words_are_finite_and_reach_past_six() {
  for (const uint32_t word : {0u, 1u, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFEu, 0xFFFFFFFFu}) {
    for (const uint32_t angle : {0u, 0x3FFFFFFFu, 0x40000000u, 0xFFFFFFFFu}) {
      float first, second;
      box_muller(word, angle, &first, &second);
      CHECK(std::isfinite(first) && std::isfinite(second));
    }
  }
  float first, second;
  box_muller(0u, 0x20000000u, &first, &second);
  CHECK(first > 6.7f && first < 6.8f);
}

}  // namespace

int main() {
  row_bits_do_not_depend_on_batch_length_or_threads();
  values_are_box_muller_in_double();
  the_extreme_words_are_finite_and_reach_past_six();
  return finish();
}
