// SPDX-License-Identifier: Apache-2.0
#include "cuda/packing.h"

#include "gpu.h"

using namespace unirl;
using namespace unirl::test;

namespace {

struct Case {
  int64_t num_rows, num_frames, bound, token_bytes;
  int64_t gap;    // bytes between tokens where they need not be adjacent, behind frames and behind rows
  int64_t shift;  // of the addresses from a 16-byte boundary
};

// The first row is full, the second empty, the last one full.
std::vector<int64_t> lengths_of(const Case& c) {
  std::vector<int64_t> lengths;
  for (int64_t row = 0; row < c.num_rows; ++row) {
    lengths.push_back(static_cast<int64_t>(mix64(static_cast<uint64_t>(row)) % static_cast<uint64_t>(c.bound + 1)));
  }
  if (c.num_rows > 1) lengths[1] = 0;
  lengths.front() = lengths.back() = c.bound;
  return lengths;
}

// Rows one behind another from `base` on, each on a 16-byte boundary plus shift; sets `bytes` to where the last ends.
std::vector<PackedRow> packed_rows(const Case& c, char* base, int64_t* bytes) {
  std::vector<PackedRow> rows;
  int64_t at = 0;
  const int64_t token_stride = c.token_bytes + c.gap;
  for (const int64_t length : lengths_of(c)) {
    const int64_t frame_stride = length * token_stride + c.gap;
    rows.push_back({base + at, frame_stride, token_stride, length});
    *bytes = at + (c.num_frames - 1) * frame_stride + length * token_stride - c.gap;
    at = (at + c.num_frames * frame_stride + 31) / 16 * 16;
  }
  return rows;
}

PaddedTensor padded_tensor(const Case& c, char* base, int64_t token_gap) {
  const int64_t token_stride = c.token_bytes + token_gap;
  const int64_t frame_stride = c.bound * token_stride + c.gap;
  return {base, c.num_frames * frame_stride + c.gap, frame_stride, token_stride};
}

int64_t padded_bytes(const Case& c, const PaddedTensor& padded) {
  return c.num_rows * padded.row_stride - 2 * c.gap - (padded.token_stride - c.token_bytes);
}

void pad_has_the_bytes_of_the_cpu(const Case& c) {
  int64_t bytes = 0;
  packed_rows(c, nullptr, &bytes);
  Twin source(bytes, kMargin + c.shift, 0), target(padded_bytes(c, padded_tensor(c, nullptr, 0)), kMargin + c.shift);
  source.fill(1);
  source.upload();
  target.upload();
  cuda::pad_latents(packed_rows(c, source.device(), &bytes), padded_tensor(c, target.device(), 0), c.num_frames,
                    c.bound, c.token_bytes, nullptr);
  pad_latents(packed_rows(c, source.host(), &bytes), padded_tensor(c, target.host(), 0), c.num_frames, c.bound,
              c.token_bytes, 1);
  cuda::check(cudaDeviceSynchronize(), "pad_latents");
  CHECK(target.same());
  CHECK(source.same());
}

void trim_has_the_bytes_of_the_cpu(const Case& c) {
  int64_t bytes = 0;
  packed_rows(c, nullptr, &bytes);
  Twin source(padded_bytes(c, padded_tensor(c, nullptr, c.gap)), kMargin + c.shift, 0);
  Twin target(bytes, kMargin + c.shift);
  source.fill(2);
  source.upload();
  target.upload();
  cuda::trim_latents(packed_rows(c, target.device(), &bytes), padded_tensor(c, source.device(), c.gap), c.num_frames,
                     c.token_bytes, nullptr);
  trim_latents(packed_rows(c, target.host(), &bytes), padded_tensor(c, source.host(), c.gap), c.num_frames,
               c.token_bytes, 1);
  cuda::check(cudaDeviceSynchronize(), "trim_latents");
  CHECK(target.same());
  CHECK(source.same());
}

}  // namespace

int main() {
  return run_on_device(false, [] {
    std::vector<Case> cases;
    // Token sizes and alignments that lead to words of 1, 2, 4, 8 and 16 bytes, adjacent tokens and strided ones.
    for (const int64_t token_bytes : {1, 2, 3, 4, 6, 8, 16, 20, 24, 48, 128}) {
      for (const int64_t gap : {int64_t{0}, token_bytes}) {
        for (const int64_t shift : {0, 1, 2, 4, 8}) cases.push_back({5, 3, 9, token_bytes, gap, shift});
      }
    }
    cases.push_back({3, 2, 701, 48, 0, 0});  // several blocks a run
    cases.push_back({3, 2, 701, 48, 16, 0});
    cases.push_back({2, 1, 2500, 2, 2, 0});
    cases.push_back({1, 1, 1, 1, 0, 0});
    for (const int64_t num_rows : {64, 65, 512, 513}) {  // tables of 64 and 512 rows, and two launches
      cases.push_back({num_rows, 2, 5, 16, 0, 0});
      cases.push_back({num_rows, 1, 7, 4, 4, 0});
    }
    for (const Case& c : cases) {
      const int before = failures;
      pad_has_the_bytes_of_the_cpu(c);
      trim_has_the_bytes_of_the_cpu(c);
      if (failures > before) {
        std::printf("  rows %d, frames %d, bound %d, bytes %d, gap %d, shift %d\n", static_cast<int>(c.num_rows),
                    static_cast<int>(c.num_frames), static_cast<int>(c.bound), static_cast<int>(c.token_bytes),
                    static_cast<int>(c.gap), static_cast<int>(c.shift));
      }
    }
    cuda::pad_latents({}, {}, 3, 9, 16, nullptr);
    cuda::trim_latents({}, {}, 3, 16, nullptr);
    cuda::check(cudaDeviceSynchronize(), "no rows");
  });
}
