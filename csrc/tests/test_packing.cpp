// SPDX-License-Identifier: Apache-2.0
#include "cpu/packing.h"

#include "check.h"

using namespace unirl;
using namespace unirl::test;

namespace {

void trim_undoes_pad(int64_t token_bytes, int threads) {
  const int64_t frames = 3, bound = 9;
  const int64_t lengths[4] = {4, 0, 9, 1};
  std::unique_ptr<char[]> sources[4], targets[4];
  std::vector<PackedRow> in, out;
  for (int row = 0; row < 4; ++row) {
    const int64_t bytes = frames * lengths[row] * token_bytes;
    sources[row] = filled<char>(bytes, row);
    for (int64_t i = 0; i < bytes; ++i) sources[row][i] = static_cast<char>(i % 251 + 1);
    targets[row].reset(new char[bytes]);
    const int64_t stride = lengths[row] * token_bytes;
    in.push_back({sources[row].get(), stride, token_bytes, lengths[row]});
    out.push_back({targets[row].get(), stride, token_bytes, lengths[row]});
  }
  std::unique_ptr<char[]> padded(new char[4 * frames * bound * token_bytes]);
  const PaddedTensor tensor{padded.get(), frames * bound * token_bytes, bound * token_bytes, token_bytes};
  pad_latents(in, tensor, frames, bound, token_bytes, threads);
  trim_latents(out, tensor, frames, token_bytes, threads);
  for (int row = 0; row < 4; ++row) {
    const int64_t run = lengths[row] * token_bytes;
    CHECK(std::memcmp(sources[row].get(), targets[row].get(), frames * run) == 0);
    for (int64_t frame = 0; frame < frames; ++frame) {
      for (int64_t i = run; i < bound * token_bytes; ++i) {
        CHECK(padded[((row * frames + frame) * bound) * token_bytes + i] == 0);
      }
    }
  }
}

void strided_tokens_are_gathered() {
  const int64_t token_bytes = 4;
  auto source = filled<float>(2 * 5, 3);
  std::vector<PackedRow> rows{{reinterpret_cast<char*>(source.get()), 0, 2 * token_bytes, 5}};
  float padded[6];
  pad_latents(rows, {reinterpret_cast<char*>(padded), 24, 24, token_bytes}, 1, 6, token_bytes, 1);
  for (int i = 0; i < 5; ++i) CHECK(padded[i] == source[2 * i]);
  CHECK(padded[5] == 0.0f);
}

}  // namespace

int main() {
  for (const int64_t token_bytes : {1, 2, 3, 4, 8, 16, 20}) {
    trim_undoes_pad(token_bytes, 1);
    trim_undoes_pad(token_bytes, 3);
  }
  strided_tokens_are_gathered();
  return finish();
}
