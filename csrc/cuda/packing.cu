// SPDX-License-Identifier: Apache-2.0
#include "packing.h"

#include "check.h"

namespace unirl::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

// The row table travels as a kernel parameter: no copy to the device, no synchronisation.
template <int kRows>
struct Table {
  PackedRow rows[kRows];
};

struct Sizes {
  int64_t num_frames;
  int64_t run_words;    // words of a padded run (pad), or of the longest row's run (trim)
  int64_t token_words;
  int64_t chunks;       // blocks a run
};

// Byte offset of word `index` in a run whose tokens lie `stride` bytes apart.
template <typename Word, bool kContiguous>
__device__ int64_t offset_of(int64_t index, int64_t token_words, int64_t stride) {
  if (kContiguous) return index * static_cast<int64_t>(sizeof(Word));
  const int64_t token = index / token_words;
  return token * stride + (index - token * token_words) * static_cast<int64_t>(sizeof(Word));
}

template <typename Word>
__device__ Word zero_word() {
  Word word;
  memset(&word, 0, sizeof(word));
  return word;
}

// kPad: row -> padded with zeros behind; otherwise padded -> row.
template <typename Word, bool kContiguous, bool kPad, int kRows>
__global__ void __launch_bounds__(kThreads)
    move_runs(const __grid_constant__ Table<kRows> table, PaddedTensor padded, Sizes sizes) {
  const int64_t run = blockIdx.x / sizes.chunks;
  const int64_t chunk = blockIdx.x - run * sizes.chunks;
  const int64_t frame = run % sizes.num_frames;
  const PackedRow& row = table.rows[run / sizes.num_frames];
  char* packed_run = row.data + frame * row.frame_stride;
  char* padded_run = padded.data + (run / sizes.num_frames) * padded.row_stride + frame * padded.frame_stride;
  const int64_t real = row.length * sizes.token_words;
  const int64_t end = kPad ? sizes.run_words : real;
  const int64_t first = chunk * kThreads * kUnroll + threadIdx.x;
  Word words[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t index = first + i * kThreads;
    words[i] = zero_word<Word>();
    if (index < real) {
      const char* source = kPad ? packed_run : padded_run;
      const int64_t stride = kPad ? row.token_stride : padded.token_stride;
      words[i] = *reinterpret_cast<const Word*>(source + offset_of<Word, kContiguous>(index, sizes.token_words, stride));
    }
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int64_t index = first + i * kThreads;
    if (index < end) {
      char* target = kPad ? padded_run : packed_run;
      const int64_t stride = kPad ? padded.token_stride : row.token_stride;
      *reinterpret_cast<Word*>(target + offset_of<Word, kContiguous>(index, sizes.token_words, stride)) = words[i];
    }
  }
}

template <typename Word, bool kContiguous, bool kPad, int kRows>
void launch_chunked(const std::vector<PackedRow>& rows, const PaddedTensor& padded, const Sizes& sizes,
                    cudaStream_t stream) {
  for (size_t first = 0; first < rows.size(); first += kRows) {
    Table<kRows> table{};
    const size_t count = std::min(rows.size() - first, static_cast<size_t>(kRows));
    std::copy(rows.begin() + first, rows.begin() + first + count, table.rows);
    PaddedTensor part = padded;
    part.data += static_cast<int64_t>(first) * padded.row_stride;
    const int64_t blocks = static_cast<int64_t>(count) * sizes.num_frames * sizes.chunks;
    if (blocks > 0x7FFFFFFF) throw std::runtime_error("packing: more than 2^31 - 1 blocks in one launch");
    move_runs<Word, kContiguous, kPad, kRows>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(table, part, sizes);
    check(cudaGetLastError(), kPad ? "pad_latents" : "trim_latents");
  }
}

template <typename Word, bool kPad>
void launch_word(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames, int64_t tokens,
                 int64_t token_bytes, bool contiguous, cudaStream_t stream) {
  Sizes sizes;
  sizes.num_frames = num_frames;
  sizes.token_words = token_bytes / static_cast<int64_t>(sizeof(Word));
  sizes.run_words = tokens * sizes.token_words;
  sizes.chunks = (sizes.run_words + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const bool small = rows.size() <= 64;
  if (contiguous) {
    small ? launch_chunked<Word, true, kPad, 64>(rows, padded, sizes, stream)
          : launch_chunked<Word, true, kPad, 512>(rows, padded, sizes, stream);
  } else {
    small ? launch_chunked<Word, false, kPad, 64>(rows, padded, sizes, stream)
          : launch_chunked<Word, false, kPad, 512>(rows, padded, sizes, stream);
  }
}

template <bool kPad>
void launch(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames, int64_t tokens,
            int64_t token_bytes, void* stream_address) {
  if (rows.empty() || num_frames * tokens * token_bytes == 0) return;
  // The widest word that divides every address and stride.
  uint64_t bits = static_cast<uint64_t>(token_bytes) | reinterpret_cast<uint64_t>(padded.data) |
                  static_cast<uint64_t>(padded.row_stride | padded.frame_stride | padded.token_stride);
  bool contiguous = padded.token_stride == token_bytes;
  for (const PackedRow& row : rows) {
    if (row.length == 0) continue;
    bits |= reinterpret_cast<uint64_t>(row.data) | static_cast<uint64_t>(row.frame_stride | row.token_stride);
    contiguous = contiguous && (row.token_stride == token_bytes || row.length == 1);
  }
  const auto stream = static_cast<cudaStream_t>(stream_address);
  if (bits % 16 == 0) {
    launch_word<int4, kPad>(rows, padded, num_frames, tokens, token_bytes, contiguous, stream);
  } else if (bits % 8 == 0) {
    launch_word<int2, kPad>(rows, padded, num_frames, tokens, token_bytes, contiguous, stream);
  } else if (bits % 4 == 0) {
    launch_word<int32_t, kPad>(rows, padded, num_frames, tokens, token_bytes, contiguous, stream);
  } else if (bits % 2 == 0) {
    launch_word<int16_t, kPad>(rows, padded, num_frames, tokens, token_bytes, contiguous, stream);
  } else {
    launch_word<int8_t, kPad>(rows, padded, num_frames, tokens, token_bytes, contiguous, stream);
  }
}

}  // namespace

void pad_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames, int64_t bound,
                 int64_t token_bytes, void* stream) {
  launch<true>(rows, padded, num_frames, bound, token_bytes, stream);
}

void trim_latents(const std::vector<PackedRow>& rows, const PaddedTensor& padded, int64_t num_frames,
                  int64_t token_bytes, void* stream) {
  int64_t longest = 0;
  for (const PackedRow& row : rows) longest = std::max(longest, row.length);
  launch<false>(rows, padded, num_frames, longest, token_bytes, stream);
}

}  // namespace unirl::cuda
