// SPDX-License-Identifier: Apache-2.0
#include "cpu/digest.h"

#include <set>
#include <utility>

#include "check.h"

using namespace unirl;
using namespace unirl::test;

namespace {

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
  ragged_rows_equal_matrix_rows();
  every_byte_count_is_read_exactly_and_told_apart();
  threads_do_not_change_a_large_digest();
  return finish();
}
