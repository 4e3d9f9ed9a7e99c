// SPDX-License-Identifier: Apache-2.0
#include "cpu/digest.h"

#include <set>
#include <utility>

#include "check.h"

using namespace unirl;
using namespace unirl::test;

namespace {

uint64_t split_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// The two sums over the tiles of a row or tensor, from the definition in unirl/ops/digest.py.
std::pair<uint64_t, uint64_t> defined_sums(const std::vector<uint64_t>& words) {
  uint64_t sums[2] = {0, 0};
  for (uint64_t tile = 0; 128 * tile < words.size(); ++tile) {
    uint64_t lanes[4] = {};
    for (uint64_t i = 0; i < 128 && 128 * tile + i < words.size(); ++i) {
      for (uint64_t lane = 0; lane < 4; ++lane) {
        const uint64_t word = words[128 * tile + i], key = split_mix((i + lane + 1) * 0x9E3779B97F4A7C15ull);
        const uint64_t low = (word % (1ull << 32) + key % (1ull << 32)) % (1ull << 32);
        const uint64_t high = (word / (1ull << 32) + key / (1ull << 32)) % (1ull << 32);
        lanes[lane] += low * high;
      }
    }
    sums[0] += split_mix(split_mix(lanes[0] + 0xD6E8FEB86659FD93ull * (tile + 1)) + lanes[2]);
    sums[1] += split_mix(split_mix(lanes[1] + 0xA0761D6478BD642Full * (tile + 1)) + lanes[3]);
  }
  return {sums[0], sums[1]};
}

// Rows of every size, ragged and of one size, and the same words as tensors.
void digests_follow_the_definition() {
  std::vector<int64_t> offsets{0};
  for (int64_t size = 0; size <= 300; ++size) offsets.push_back(offsets.back() + size);
  std::unique_ptr<int64_t[]> values(new int64_t[offsets.back()]);
  for (int64_t i = 0; i < offsets.back(); ++i) values[i] = static_cast<int64_t>(split_mix(static_cast<uint64_t>(i)));
  const int64_t rows = static_cast<int64_t>(offsets.size()) - 1;
  std::vector<int64_t> ragged(2 * rows);
  layout_digest(values.get(), rows, 0, 0, offsets.data(), ragged.data(), 1);
  for (int64_t size = 0; size < rows; ++size) {
    const int64_t* row = values.get() + offsets[size];
    const auto [first, second] = defined_sums({row, row + size});
    const uint64_t count = static_cast<uint64_t>(size) + 1;
    CHECK(static_cast<uint64_t>(ragged[2 * size]) == split_mix(first + split_mix(count * 0xE7037ED1A0B428DBull)));
    CHECK(static_cast<uint64_t>(ragged[2 * size + 1]) == split_mix(second + split_mix(count * 0x8EBC6AF09C88C6E3ull)));
    int64_t alone[2], tensor[2];
    layout_digest(row, 1, size, size, nullptr, alone, 1);
    CHECK(alone[0] == ragged[2 * size] && alone[1] == ragged[2 * size + 1]);
    tensor_digest({{row, 8 * size, {3, 4}}}, tensor, 1);
    CHECK(static_cast<uint64_t>(tensor[0]) == split_mix(first + 3));
    CHECK(static_cast<uint64_t>(tensor[1]) == split_mix(second + 4));
  }
}

void ragged_rows_equal_matrix_rows() {
  const int64_t rows = 7, size = 131;
  std::unique_ptr<int64_t[]> values(new int64_t[rows * size]), offsets(new int64_t[rows + 1]);
  for (int64_t i = 0; i < rows * size; ++i) values[i] = i * i - 3;
  for (int64_t i = 0; i <= rows; ++i) offsets[i] = i * size;
  int64_t matrix[2 * rows], ragged[2 * rows];
  layout_digest(values.get(), rows, size, size, nullptr, matrix, 1);
  layout_digest(values.get(), rows, 0, 0, offsets.get(), ragged, 3);
  CHECK(std::memcmp(matrix, ragged, sizeof(matrix)) == 0);
}

void every_byte_count_is_read_exactly_and_told_apart() {
  std::set<std::pair<int64_t, int64_t>> seen;
  for (int64_t bytes = 0; bytes <= 2100; bytes += bytes < 40 ? 1 : 97) {
    std::unique_ptr<char[]> data(new char[bytes]);
    for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i + 1);
    int64_t one[2], three[2];
    tensor_digest({{data.get(), bytes, {static_cast<uint64_t>(bytes), 5}}}, one, 1);
    tensor_digest({{data.get(), bytes, {static_cast<uint64_t>(bytes), 5}}}, three, 3);
    CHECK(one[0] == three[0] && one[1] == three[1]);
    CHECK(seen.insert({one[0], one[1]}).second);
  }
}

void threads_do_not_change_a_large_digest() {
  const int64_t count = 1 << 20;
  auto data = filled<float>(count + 1, 4);
  int64_t one[2], many[2], shifted[2];
  tensor_digest({{data.get(), 4 * count, {1, 2}}}, one, 1);
  tensor_digest({{data.get(), 4 * count, {1, 2}}}, many, 4);
  tensor_digest({{data.get() + 1, 4 * count, {1, 2}}}, shifted, 4);
  CHECK(one[0] == many[0] && one[1] == many[1]);
  CHECK(one[0] != shifted[0] && one[1] != shifted[1]);
}

}  // namespace

int main() {
  digests_follow_the_definition();
  ragged_rows_equal_matrix_rows();
  every_byte_count_is_read_exactly_and_told_apart();
  threads_do_not_change_a_large_digest();
  return finish();
}
