// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels against the CPU's float32 ones, on operands that the 16-bit type holds exactly.
#include "cuda/sibling_prefix_attention.h"

#include <thread>

#include "cpu/sibling_prefix_attention.h"
#include "gpu.h"

using namespace unirl;
using namespace unirl::test;

namespace {

constexpr int64_t kTileRows = 64;  // of a query tile in the scratch buffers
constexpr int64_t kTileKeys = 128;  // of a key tile there
const int kHostThreads = static_cast<int>(std::thread::hardware_concurrency());

struct Case {
  int64_t groups, siblings, query_heads, key_heads, length, prefix, head_size;
  bool ragged;
  bool float16;
  bool token_major;  // [rows, tokens, heads, D] in memory, else [rows, heads, tokens, D]
  float query_size;  // how far the softmax is from uniform

  AttentionShape shape() const {
    return {groups * siblings, groups, query_heads, key_heads, length, prefix, head_size};
  }
  std::vector<int64_t> prefix_lengths() const {
    std::vector<int64_t> lengths;
    for (int64_t group = 0; group < groups; ++group) {
      lengths.push_back(ragged ? std::max<int64_t>(0, prefix - 13 * group - 3) : prefix);
    }
    return lengths;
  }
  // Relative; rounding to the type is half of it.
  double tolerance() const { return float16 ? 8e-4 : 6e-3; }
};

uint16_t to_half(float value, bool float16) { return float16 ? float_to_float16(value) : float_to_bfloat16(value); }
float from_half(uint16_t half, bool float16) { return float16 ? float16_to_float(half) : bfloat16_to_float(half); }

// [rows, heads, tokens, D] of 16-bit floats on the device, with poison between tokens. Values on the host are
// contiguous.
class HalfTensor {
 public:
  HalfTensor(int64_t rows, int64_t heads, int64_t tokens, const Case& c)
      : rows_(rows), heads_(heads), tokens_(tokens), d_(c.head_size), float16_(c.float16),
        token_stride_((c.token_major ? heads * d_ : d_) + 8), head_stride_(c.token_major ? d_ : tokens * token_stride_),
        row_stride_((c.token_major ? tokens * token_stride_ : heads * head_stride_) + 16),
        twin_(2 * rows * row_stride_) {
    twin_.upload();
  }

  int64_t size() const { return rows_ * heads_ * tokens_ * d_; }
  cuda::HeadedTensor tensor() const { return {twin_.device(), row_stride_, head_stride_, token_stride_}; }

  void set(const std::vector<float>& values) {
    for_each([&](int64_t i, int64_t place) { twin_.host<uint16_t>()[place] = to_half(values[i], float16_); });
    twin_.upload();
  }

  // The device's values; what lies between tokens must be as it was.
  std::vector<float> get() {
    std::vector<uint16_t> all = twin_.download<uint16_t>();
    std::vector<float> values(static_cast<size_t>(size()));
    for_each([&](int64_t i, int64_t place) {
      values[i] = from_half(all[place], float16_);
      all[place] = 0xFFFF;
    });
    CHECK(std::all_of(all.begin(), all.end(), [](uint16_t half) { return half == 0xFFFF; }));
    return values;
  }

 private:
  template <typename Visit>
  void for_each(const Visit& visit) const {
    int64_t i = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t head = 0; head < heads_; ++head) {
        for (int64_t token = 0; token < tokens_; ++token) {
          for (int64_t k = 0; k < d_; ++k, ++i) {
            visit(i, row * row_stride_ + head * head_stride_ + token * token_stride_ + k);
          }
        }
      }
    }
  }

  int64_t rows_, heads_, tokens_, d_;
  bool float16_;
  int64_t token_stride_, head_stride_, row_stride_;
  Twin twin_;
};

Headed contiguous(std::vector<float>& data, int64_t heads, int64_t tokens, int64_t d) {
  return {data.data(), heads * tokens * d, tokens * d, d};
}

// Operands on the host and what the CPU makes of them.
struct Problem {
  Case c;
  AttentionShape s;
  std::vector<int64_t> lengths;
  std::vector<float> query, key, value, prefix_key, prefix_value, grad_out;
  std::vector<float> out, lse, grads[5];
  float scale;

  explicit Problem(const Case& with) : c(with), s(c.shape()), lengths(c.prefix_lengths()) {
    scale = 1.0f / std::sqrt(static_cast<float>(s.head_size));
    query = random(s.num_rows, s.query_heads, s.length, 1, [&](int64_t) { return c.query_size; });
    // Tiles are taken from the last key to the first: the largest logits come last, and the running maximum moves.
    key = random(s.num_rows, s.key_heads, s.length, 2,
                 [&](int64_t token) { return 0.2f + 1.8f * static_cast<float>(token) / static_cast<float>(s.length); });
    value = random(s.num_rows, s.key_heads, s.length, 3, [](int64_t) { return 1.0f; });
    prefix_key = random(s.groups, s.key_heads, s.prefix_length, 4, [](int64_t) { return 2.5f; });
    prefix_value = random(s.groups, s.key_heads, s.prefix_length, 5, [](int64_t) { return 1.0f; });
    grad_out = random(s.num_rows, s.query_heads, s.length, 6, [](int64_t) { return 1.0f; });
    // Nothing may come from behind a group's prefix.
    for (int64_t i = 0; i < static_cast<int64_t>(prefix_key.size()); ++i) {
      const int64_t token = i / s.head_size % s.prefix_length;
      if (token >= lengths[i / (s.key_heads * s.prefix_length * s.head_size)]) prefix_key[i] = prefix_value[i] = NAN;
    }
    out.resize(query.size());
    lse.resize(static_cast<size_t>(s.num_rows * s.query_heads * s.length));
    sibling_prefix_attention(inputs(), of_query(out), lse.data(), kHostThreads);
  }

  void differentiate() {
    const std::vector<float>* const operands[5] = {&query, &key, &value, &prefix_key, &prefix_value};
    for (int i = 0; i < 5; ++i) grads[i].resize(operands[i]->size());
    sibling_prefix_attention_backward(
        inputs(), of_query(out), lse.data(), of_query(grad_out),
        {of_query(grads[0]), of_own(grads[1]), of_own(grads[2]), of_prefix(grads[3]), of_prefix(grads[4])},
        kHostThreads);
  }

 private:
  template <typename Size>
  std::vector<float> random(int64_t rows, int64_t heads, int64_t tokens, uint64_t seed, const Size& size) const {
    std::vector<float> values(static_cast<size_t>(rows * heads * tokens * s.head_size));
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t token = static_cast<int64_t>(i) / s.head_size % tokens;
      const float exact = static_cast<float>(unirl::test::value(seed * 1000003u + i)) * size(token);
      values[i] = from_half(to_half(exact, c.float16), c.float16);
    }
    return values;
  }

  Headed of_query(std::vector<float>& data) const { return contiguous(data, s.query_heads, s.length, s.head_size); }
  Headed of_own(std::vector<float>& data) const { return contiguous(data, s.key_heads, s.length, s.head_size); }
  Headed of_prefix(std::vector<float>& data) const {
    return contiguous(data, s.key_heads, s.prefix_length, s.head_size);
  }
  AttentionInputs inputs() {
    return {of_query(query), of_own(key), of_own(value), of_prefix(prefix_key), of_prefix(prefix_value),
            lengths.data(),  s,           scale};
  }
};

// The device's tensors of one call and its results.
struct Call {
  HalfTensor query, key, value, prefix_key, prefix_value, out;
  Twin lse, lengths;
  cuda::SiblingAttention call;

  explicit Call(const Problem& p)
      : query(p.s.num_rows, p.s.query_heads, p.s.length, p.c), key(p.s.num_rows, p.s.key_heads, p.s.length, p.c),
        value(p.s.num_rows, p.s.key_heads, p.s.length, p.c),
        prefix_key(p.s.groups, p.s.key_heads, p.s.prefix_length, p.c),
        prefix_value(p.s.groups, p.s.key_heads, p.s.prefix_length, p.c),
        out(p.s.num_rows, p.s.query_heads, p.s.length, p.c), lse(4 * static_cast<int64_t>(p.lse.size())),
        lengths(8 * p.s.groups, kMargin, 0) {
    query.set(p.query);
    key.set(p.key);
    value.set(p.value);
    prefix_key.set(p.prefix_key);
    prefix_value.set(p.prefix_value);
    std::memcpy(lengths.host(), p.lengths.data(), static_cast<size_t>(lengths.bytes()));
    lengths.upload();
    lse.upload();
    call = {query.tensor(), key.tensor(),   value.tensor(), prefix_key.tensor(), prefix_value.tensor(),
            out.tensor(),   lse.device<float>(), p.c.ragged ? lengths.device<int64_t>() : nullptr,
            p.s.num_rows,   p.s.groups,     p.s.query_heads, p.s.key_heads,      p.s.length,
            p.s.prefix_length, p.s.head_size, p.c.float16,  p.scale};
  }

  void forward() {
    cuda::sibling_attention_forward(call, nullptr);
    cuda::check(cudaDeviceSynchronize(), "sibling_attention_forward");
  }
};

// Gradients of query, key, value, and each row's part of those of prefix key and value.
std::vector<float> backward(const Problem& p, Call& on, bool poison, std::vector<float> (&grads)[5]) {
  const AttentionShape& s = p.s;
  HalfTensor grad_out(s.num_rows, s.query_heads, s.length, p.c), grad_query(s.num_rows, s.query_heads, s.length, p.c),
      grad_key(s.num_rows, s.key_heads, s.length, p.c), grad_value(s.num_rows, s.key_heads, s.length, p.c);
  const int64_t heads = s.num_rows * s.key_heads;
  const int64_t query_tiles = cuda::sibling_attention_query_tiles(s.length, s.query_heads, s.key_heads);
  const int64_t key_tiles = cuda::sibling_attention_key_tiles(s.length, s.prefix_length);
  Twin grad_prefix_key(4 * heads * s.prefix_length * s.head_size), grad_prefix_value(grad_prefix_key.bytes());
  const int64_t split = cuda::sibling_attention_split_units(s.num_rows, s.query_heads, s.key_heads, s.length,
                                                            s.prefix_length);
  Twin row_stats(4 * heads * query_tiles * 2 * kTileRows), progress(4 * (heads * key_tiles * 2 + split));
  Twin split_sums(4 * split * 2 * kTileKeys * s.head_size);
  Twin partial_query(4 * heads * query_tiles * kTileRows * s.head_size);
  grad_out.set(p.grad_out);
  grad_prefix_key.upload();
  grad_prefix_value.upload();
  std::memset(progress.host(), 0, static_cast<size_t>(progress.bytes()));
  progress.upload();
  if (poison) {
    row_stats.upload();
    partial_query.upload();
    split_sums.upload();
  }
  cuda::sibling_attention_backward(
      on.call,
      {grad_out.tensor(), grad_query.tensor(), grad_key.tensor(), grad_value.tensor(), grad_prefix_key.device<float>(),
       grad_prefix_value.device<float>(), row_stats.device<float>(), partial_query.device<float>(),
       progress.device<int32_t>(), split_sums.device<float>()},
      nullptr);
  cuda::check(cudaDeviceSynchronize(), "sibling_attention_backward");
  for (Twin* scratch : {&row_stats, &partial_query, &progress, &split_sums}) scratch->download();
  grads[0] = grad_query.get();
  grads[1] = grad_key.get();
  grads[2] = grad_value.get();
  grads[3] = grad_prefix_key.download<float>();
  grads[4] = grad_prefix_value.download<float>();
  return grad_out.get();
}

bool same_bits(const std::vector<float>& left, const std::vector<float>& right) {
  return left.size() == right.size() &&
         (left.empty() || std::memcmp(left.data(), right.data(), sizeof(float) * left.size()) == 0);
}

// Every element finite and near, and all of them nearer on the whole.
void check_near(const char* what, const std::vector<float>& got, const std::vector<float>& wanted, double tolerance) {
  const int before = failures;
  CHECK(got.size() == wanted.size());
  double squares = 0.0, wanted_squares = 0.0, largest = 0.0, wanted_largest = 0.0;
  bool finite = true;
  for (size_t i = 0; i < wanted.size() && failures == before; ++i) {
    finite = finite && std::isfinite(got[i]);
    const double difference = double{got[i]} - wanted[i];
    squares += difference * difference;
    wanted_squares += double{wanted[i]} * wanted[i];
    largest = std::fmax(largest, std::fabs(difference));
    wanted_largest = std::fmax(wanted_largest, std::fabs(double{wanted[i]}));
  }
  CHECK(finite);
  CHECK(squares <= tolerance * tolerance * wanted_squares);
  CHECK(largest <= 2 * tolerance * wanted_largest);
  if (failures > before) {
    std::printf("  %s: relative error %.2e, of the largest difference %.2e; allowed %.0e\n", what,
                std::sqrt(squares / wanted_squares), largest / wanted_largest, tolerance);
  }
}

void check_log_sums(const std::vector<float>& got, const std::vector<float>& wanted) {
  bool near = got.size() == wanted.size();
  for (size_t i = 0; i < got.size() && near; ++i) {
    near = std::fabs(double{got[i]} - wanted[i]) <= 2e-5 * (1 + std::fabs(double{wanted[i]}));
  }
  CHECK(near);
}

// Sums rows' parts over siblings. Behind a group's prefix nothing may have been written, and the sum is zero.
std::vector<float> sum_of_siblings(const Problem& p, const std::vector<float>& parts) {
  const AttentionShape& s = p.s;
  const int64_t size = s.key_heads * s.prefix_length * s.head_size;
  std::vector<double> sums(static_cast<size_t>(s.groups * size));
  bool untouched = true;
  for (int64_t row = 0; row < s.num_rows; ++row) {
    const int64_t group = row / p.c.siblings;
    for (int64_t i = 0; i < size; ++i) {
      const float part = parts[row * size + i];
      if (i / s.head_size % s.prefix_length < p.lengths[group]) {
        sums[group * size + i] += part;
      } else {
        untouched = untouched && float_to_bits(part) == 0xFFFFFFFFu;
      }
    }
  }
  CHECK(untouched);
  return {sums.begin(), sums.end()};
}

void kernels_equal_the_cpu_and_repeat_their_bits(const Case& c) {
  Problem p(c);
  Call first(p), second(p);
  first.forward();
  second.forward();
  const std::vector<float> out = first.out.get(), lse = first.lse.download<float>();
  check_near("out", out, p.out, c.tolerance());
  check_log_sums(lse, p.lse);
  CHECK(same_bits(out, second.out.get()));
  CHECK(same_bits(lse, second.lse.download<float>()));
  if (c.head_size == 128) {
    p.differentiate();
    std::vector<float> grads[5], again[5];
    // In the first run initcheck sees what is read of the scratch buffers too early, in the second it is a NaN.
    CHECK(same_bits(backward(p, first, false, grads), p.grad_out));
    backward(p, second, true, again);
    for (int i = 0; i < 5; ++i) CHECK(same_bits(grads[i], again[i]));
    const char* const names[5] = {"grad_query", "grad_key", "grad_value", "grad_prefix_key", "grad_prefix_value"};
    for (int i = 0; i < 5; ++i) {
      check_near(names[i], i < 3 ? grads[i] : sum_of_siblings(p, grads[i]), p.grads[i], 2 * c.tolerance());
    }
    CHECK(same_bits(first.out.get(), out));
    CHECK(same_bits(first.lse.download<float>(), lse));
  }
  CHECK(same_bits(first.query.get(), p.query));
  CHECK(same_bits(first.key.get(), p.key));
  CHECK(same_bits(first.value.get(), p.value));
  CHECK(first.lengths.same());
}

}  // namespace

int main() {
  return run_on_device(true, [] {
    // groups, siblings, query heads, key heads, L, P, head size, ragged, float16, token-major, size of the query
    const Case cases[] = {
        {2, 2, 14, 2, 129, 300, 128, true, false, true, 2},   // several tiles of keys, nine tokens a query tile
        {1, 2, 8, 8, 65, 77, 128, false, true, false, 1},     // one query head a key head
        {1, 1, 8, 1, 1, 1, 128, false, false, true, 1},       // one key of each kind
        {3, 1, 5, 1, 7, 13, 128, true, true, true, 3},        // prefixes of 10, 0 and 0 keys
        {1, 1, 64, 1, 150, 0, 128, false, false, false, 1},   // no prefix, one token a query tile
        {5, 3, 18, 6, 51, 100, 128, true, false, true, 1},    // more units than an H100 has multiprocessors, some split
        {1, 2, 7, 1, 33, 515, 128, false, true, true, 4},     // a long prefix
        {1, 2, 8, 2, 257, 77, 64, false, true, true, 3},
        {2, 2, 6, 2, 100, 150, 64, true, false, false, 1},
        {1, 2, 8, 2, 257, 277, 64, false, false, true, 60},   // scores that outgrow those of the first tile
        {5, 4, 7, 7, 129, 1, 64, false, false, true, 1},
    };
    for (const Case& c : cases) {
      const int before = failures;
      kernels_equal_the_cpu_and_repeat_their_bits(c);
      if (failures > before) {
        std::printf("  in case %d: groups %d, siblings %d, heads %d/%d, L %d, P %d, head size %d\n",
                    static_cast<int>(&c - cases), static_cast<int>(c.groups), static_cast<int>(c.siblings),
                    static_cast<int>(c.query_heads), static_cast<int>(c.key_heads), static_cast<int>(c.length),
                    static_cast<int>(c.prefix), static_cast<int>(c.head_size));
      }
    }
  });
}
