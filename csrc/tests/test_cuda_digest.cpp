// SPDX-License-Identifier: Apache-2.0
#include "cuda/digest.h"

#include "cpu/digest.h"
#include "gpu.h"

using namespace unirl;
using namespace unirl::test;

namespace {

constexpr int64_t kBatchBytes = 8 * kTileWords * cuda::kTilesPerBatch;

// A tensor's size, and the distance of its address from a 256-byte boundary.
struct Placed {
  int64_t bytes;
  int64_t shift;
};

// All tensors lie in one buffer, poison between them; the last one ends where the buffer ends.
void tensors_have_the_bits_of_the_cpu(const std::vector<Placed>& tensors) {
  const int64_t count = static_cast<int64_t>(tensors.size());
  std::vector<int64_t> starts;
  int64_t end = 0;
  for (const Placed& tensor : tensors) {
    starts.push_back((end + 255) / 256 * 256 + tensor.shift);
    end = starts.back() + tensor.bytes;
  }
  Twin data(end, kMargin, 0), table(count * static_cast<int64_t>(sizeof(cuda::DigestEntry))), out(16 * count);
  std::vector<DigestInput> inputs;
  int64_t num_batches = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto [bytes, shift] = tensors[i];
    data.fill(static_cast<uint64_t>(i), starts[i], bytes);
    const uint64_t header[2] = {mix64(2 * i), mix64(2 * i + 1)};
    inputs.push_back({data.host() + starts[i], bytes, {header[0], header[1]}});
    const int64_t batches = (bytes + kBatchBytes - 1) / kBatchBytes;
    table.host<cuda::DigestEntry>()[i] = {
        reinterpret_cast<int64_t>(data.device() + starts[i]), bytes, {header[0], header[1]}, num_batches, batches};
    num_batches += batches;
  }
  data.upload();
  table.upload();
  tensor_digest(inputs, out.host<int64_t>(), 1);
  const int before = failures;
  for (int run = 0; run < 2; ++run) {
    Twin sums(8 * (2 * count + 1)), got(out.bytes());
    std::memset(sums.host(), 0, static_cast<size_t>(sums.bytes()));
    sums.upload();
    cuda::tensor_digest(table.device<cuda::DigestEntry>(), count, num_batches, sums.device<uint64_t>(),
                        got.device<int64_t>(), nullptr);
    cuda::check(cudaDeviceSynchronize(), "tensor_digest");
    std::memcpy(got.host(), out.host(), static_cast<size_t>(out.bytes()));
    CHECK(got.same());
    sums.download();
    CHECK(data.same());
  }
  if (failures > before) {
    std::printf("  tensors: %d, the first of %d bytes, %d behind a boundary\n", static_cast<int>(count),
                static_cast<int>(tensors[0].bytes), static_cast<int>(tensors[0].shift));
  }
}

void every_size_and_alignment() {
  const int64_t sizes[] = {0,    1,    7,    8,    9,    1016, 1023, 1024, 1025, 2047, 4088,
                           4095, 4096, 4097, 4104, 8192, 8200, 12287, 40961};
  for (const int64_t shift : {0, 1, 2, 4, 8, 15, 16}) {
    std::vector<Placed> together;
    for (const int64_t bytes : sizes) {
      tensors_have_the_bits_of_the_cpu({{bytes, shift}});
      together.push_back({bytes, shift});
    }
    tensors_have_the_bits_of_the_cpu(together);
  }
}

void many_tensors_and_empty_ones_among_them() {
  std::vector<Placed> tensors;
  for (uint64_t i = 0; i < 700; ++i) {
    const int64_t bytes = static_cast<int64_t>(mix64(i) % 3 == 0 ? 0 : mix64(i) % 6000);
    tensors.push_back({bytes, static_cast<int64_t>(mix64(~i) % 4 * 4)});
  }
  tensors_have_the_bits_of_the_cpu(tensors);
  tensors_have_the_bits_of_the_cpu({{0, 0}, {0, 0}, {0, 0}});
}

// The second time far more batches than there are warps: a warp takes several, of one tensor and of two.
void large_tensors() {
  tensors_have_the_bits_of_the_cpu({{(5 << 20) + 24, 0}, {3, 0}, {(3 << 20) - 1, 0}, {(2 << 20) + 8, 8}});
  tensors_have_the_bits_of_the_cpu({{384 << 20, 0}, {(24 << 20) + 4, 0}});
}

void rows_have_the_bits_of_the_cpu(int64_t num_rows, int64_t row_size, int64_t stride) {
  Twin values(num_rows == 0 ? 0 : 8 * ((num_rows - 1) * stride + row_size), kMargin, 0), out(16 * num_rows);
  values.fill(static_cast<uint64_t>(num_rows + 1000 * row_size));
  values.upload();
  layout_digest(values.host<int64_t>(), num_rows, row_size, stride, nullptr, out.host<int64_t>(), 1);
  const int before = failures;
  for (int run = 0; run < 2; ++run) {
    Twin got(out.bytes());
    cuda::layout_digest(values.device<int64_t>(), num_rows, row_size, stride, nullptr, got.device<int64_t>(), nullptr);
    cuda::check(cudaDeviceSynchronize(), "layout_digest");
    std::memcpy(got.host(), out.host(), static_cast<size_t>(out.bytes()));
    CHECK(got.same());
  }
  CHECK(values.same());
  if (failures > before) {
    std::printf("  rows: %d of %d words, %d apart\n", static_cast<int>(num_rows), static_cast<int>(row_size),
                static_cast<int>(stride));
  }
}

void ragged_rows_have_the_bits_of_the_cpu() {
  const int64_t sizes[] = {0, 1, 0, 0, 129, 16, 128, 127, 2, 300, 33, 0, 1000, 0};
  const int64_t num_rows = sizeof(sizes) / sizeof(sizes[0]);
  Twin offsets(8 * (num_rows + 1), kMargin, 0), out(16 * num_rows);
  int64_t total = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    offsets.host<int64_t>()[row] = total;
    total += sizes[row];
  }
  offsets.host<int64_t>()[num_rows] = total;
  Twin values(8 * total, kMargin, 0);
  values.fill(17);
  values.upload();
  offsets.upload();
  layout_digest(values.host<int64_t>(), num_rows, 0, 0, offsets.host<int64_t>(), out.host<int64_t>(), 1);
  Twin got(out.bytes());
  cuda::layout_digest(values.device<int64_t>(), num_rows, 0, 0, offsets.device<int64_t>(), got.device<int64_t>(),
                      nullptr);
  cuda::check(cudaDeviceSynchronize(), "layout_digest");
  std::memcpy(got.host(), out.host(), static_cast<size_t>(out.bytes()));
  CHECK(got.same());
}

}  // namespace

int main() {
  return run_on_device(false, [] {
    every_size_and_alignment();
    many_tensors_and_empty_ones_among_them();
    large_tensors();
    for (const int64_t row_size : {0, 1, 7, 16, 31, 32, 33, 127, 128, 129, 300}) {
      for (const int64_t num_rows : {0, 1, 9, 70}) {
        rows_have_the_bits_of_the_cpu(num_rows, row_size, row_size);
        rows_have_the_bits_of_the_cpu(num_rows, row_size, row_size + 3);
      }
    }
    rows_have_the_bits_of_the_cpu(50000, 16, 16);  // a warp takes several
    ragged_rows_have_the_bits_of_the_cpu();
  });
}
