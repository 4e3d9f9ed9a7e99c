// SPDX-License-Identifier: Apache-2.0
// One task is one (group, key head): it packs the prefix once and goes through the siblings in order. Rows of the
// query (heads of one key head, then tokens) are taken eight at a time against vectors of 16 keys or 16 values.
#include "sibling_prefix_attention.h"

#include <cmath>
#include <limits>

// This file alone fuses multiply and add: attention has no twin in PyTorch whose bits it would have to match.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(UNIRL_SANITIZED)
#define UNIRL_ATTENTION_CLONES __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define UNIRL_ATTENTION_CLONES
#endif

namespace unirl {
namespace {

constexpr int64_t kVector = 16;
constexpr int64_t kRows = 8;
constexpr int64_t kKeyBlock = 64;
typedef float Vector __attribute__((vector_size(64)));
typedef int32_t Bits __attribute__((vector_size(64)));
typedef float Unaligned __attribute__((vector_size(64), aligned(4)));

UNIRL_INLINE Vector load(const float* source) { return *reinterpret_cast<const Unaligned*>(source); }
UNIRL_INLINE void store(float* target, Vector value) { *reinterpret_cast<Unaligned*>(target) = value; }
UNIRL_INLINE Vector splat(float value) { return Vector{} + value; }

UNIRL_INLINE int64_t whole_vectors(int64_t count) { return (count + kVector - 1) / kVector * kVector; }

// exp(x) for x <= 0: 2^k times a polynomial on [-ln2/2, ln2/2]; below -87 the result is 0. NaN stays NaN: the power of
// two, whose bits mean nothing then, is a factor and not added to the polynomial's exponent.
UNIRL_INLINE Vector exponential(Vector x) {
  const Bits lost = x < splat(-87.0f);
  x = lost ? splat(-87.0f) : x;
  const Vector magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector shifted = x * splat(1.44269504f) + magic;
  const Vector k = shifted - magic;
  const Vector r = (x - k * splat(0.693359375f)) - k * splat(-2.12194440e-4f);
  Vector p = splat(1.0f / 5040);
  p = p * r + splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  const Bits exponent = (reinterpret_cast<Bits>(shifted) - reinterpret_cast<Bits>(magic) + 127) << 23;
  const Vector value = p * reinterpret_cast<Vector>(exponent);
  return lost ? Vector{} : value;
}

// Lane i meets lane i + 8, then i + 4, i + 2, i + 1 (modulo 16); lane 0 has met all.
#define UNIRL_ROTATED(v, n)                                                                                        \
  __builtin_shufflevector(v, v, (n), (n) + 1, (n) + 2, (n) + 3, (n) + 4, (n) + 5, (n) + 6, (n) + 7, ((n) + 8) % 16, \
                          ((n) + 9) % 16, ((n) + 10) % 16, ((n) + 11) % 16, ((n) + 12) % 16, ((n) + 13) % 16,       \
                          ((n) + 14) % 16, ((n) + 15) % 16)

UNIRL_INLINE float horizontal_sum(Vector v) {
  v = v + UNIRL_ROTATED(v, 8);
  v = v + UNIRL_ROTATED(v, 4);
  v = v + UNIRL_ROTATED(v, 2);
  v = v + UNIRL_ROTATED(v, 1);
  return v[0];
}

UNIRL_INLINE Vector larger(Vector left, Vector right) { return left > right ? left : right; }

UNIRL_INLINE float horizontal_max(Vector v) {
  v = larger(v, UNIRL_ROTATED(v, 8));
  v = larger(v, UNIRL_ROTATED(v, 4));
  v = larger(v, UNIRL_ROTATED(v, 2));
  v = larger(v, UNIRL_ROTATED(v, 1));
  return v[0];
}

// Memory of one task. "Columns" matrices are [D][keys], "rows" matrices [keys][D], both padded to whole vectors
// with zeros.
struct Scratch {
  int64_t keys, key_width, head_size, head_width;
  std::vector<float> key_columns, value_columns, key_rows, value_rows, query, grad, weights, weight_grads;
  std::vector<float> key_grads, value_grads;

  Scratch(int64_t max_keys, int64_t d, bool backward)
      : keys(max_keys), key_width(whole_vectors(max_keys)), head_size(d), head_width(whole_vectors(d)) {
    key_columns.resize(d * key_width);
    value_rows.resize(key_width * head_width);
    query.resize(kRows * head_width);
    grad.resize(kRows * head_width);
    weights.resize(kRows * key_width);
    if (backward) {
      value_columns.resize(d * key_width);
      key_rows.resize(key_width * head_width);
      weight_grads.resize(kRows * key_width);
      key_grads.resize(key_width * head_width);
      value_grads.resize(key_width * head_width);
    }
  }
};

UNIRL_INLINE void pack_columns(const Headed& from, int64_t row, int64_t head, int64_t count, int64_t first, int64_t d,
                               int64_t width, float* columns) {
  for (int64_t token = 0; token < count; ++token) {
    const float* source = from.at(row, head, token);
    for (int64_t i = 0; i < d; ++i) columns[i * width + first + token] = source[i];
  }
}

UNIRL_INLINE void pack_rows(const Headed& from, int64_t row, int64_t head, int64_t count, int64_t d, int64_t width,
                            float* rows) {
  for (int64_t token = 0; token < count; ++token) {
    std::memcpy(rows + token * width, from.at(row, head, token), sizeof(float) * d);
  }
}

// result[r][keys] = left[r][:] . columns[:][keys] for R rows; left rows are head_width apart.
template <int R>
UNIRL_INLINE void times_columns(const float* left, int64_t left_width, const float* columns, int64_t d,
                                int64_t key_width, float* result) {
  for (int64_t key = 0; key < key_width; key += kVector) {
    Vector sums[R] = {};
    for (int64_t i = 0; i < d; ++i) {
      const Vector column = load(columns + i * key_width + key);
      for (int r = 0; r < R; ++r) sums[r] = sums[r] + splat(left[r * left_width + i]) * column;
    }
    for (int r = 0; r < R; ++r) store(result + r * key_width + key, sums[r]);
  }
}

// result[r][D] = weights[r][:] . rows[:][D], in blocks of keys, which keeps the rounding error of long sums small.
template <int R>
UNIRL_INLINE void times_rows(const float* weights, int64_t key_width, const float* rows, int64_t keys,
                             int64_t head_width, float* result) {
  for (int64_t i = 0; i < head_width; i += kVector) {
    Vector totals[R] = {};
    for (int64_t block = 0; block < keys; block += kKeyBlock) {
      Vector sums[R] = {};
      const int64_t end = std::min(keys, block + kKeyBlock);
      for (int64_t key = block; key < end; ++key) {
        const Vector row = load(rows + key * head_width + i);
        for (int r = 0; r < R; ++r) sums[r] = sums[r] + splat(weights[r * key_width + key]) * row;
      }
      for (int r = 0; r < R; ++r) totals[r] = totals[r] + sums[r];
    }
    for (int r = 0; r < R; ++r) store(result + r * head_width + i, totals[r]);
  }
}

// target[key][D] += sum over r of weights[r][key] * rows[r][D].
template <int R>
UNIRL_INLINE void add_outer(const float* weights, int64_t key_width, const float* rows, int64_t keys,
                            int64_t head_width, float* target) {
  for (int64_t i = 0; i < head_width; i += kVector) {
    Vector values[R];
    for (int r = 0; r < R; ++r) values[r] = load(rows + r * head_width + i);
    for (int64_t key = 0; key < keys; ++key) {
      Vector sum = load(target + key * head_width + i);
      for (int r = 0; r < R; ++r) sum = sum + splat(weights[r * key_width + key]) * values[r];
      store(target + key * head_width + i, sum);
    }
  }
}

// What the tasks share of one call.
struct Call {
  const AttentionInputs* in;
  const Headed* out;
  float* lse;
  const Headed* grad_out;
  const AttentionGradients* grads;
};

// Query row `index` of a sibling's fold: heads of the key head one after the other.
struct Fold {
  int64_t head, token;
};

// The folds of R rows from `first` on.
template <int R>
UNIRL_INLINE void fold_rows(const AttentionShape& s, int64_t key_head, int64_t first, Fold* folds) {
  const int64_t heads = s.query_heads / s.key_heads;
  Fold fold{key_head * heads + first / s.length, first % s.length};
  for (int r = 0; r < R; ++r) {
    folds[r] = fold;
    if (++fold.token == s.length) fold = {fold.head + 1, 0};
  }
}

template <int R>
UNIRL_INLINE void load_rows(const Headed& from, int64_t row, const Fold* folds, int64_t d, float scale, int64_t width,
                            float* target) {
  for (int r = 0; r < R; ++r) {
    const float* source = from.at(row, folds[r].head, folds[r].token);
    for (int64_t i = 0; i < d; ++i) target[r * width + i] = source[i] * scale;
  }
}

template <int R>
UNIRL_INLINE void forward_rows(const Call& call, Scratch& m, int64_t row, int64_t key_head, int64_t first,
                               int64_t keys) {
  const AttentionShape& s = call.in->shape;
  Fold folds[R];
  fold_rows<R>(s, key_head, first, folds);
  load_rows<R>(call.in->query, row, folds, s.head_size, call.in->scale, m.head_width, m.query.data());
  times_columns<R>(m.query.data(), m.head_width, m.key_columns.data(), s.head_size, m.key_width, m.weights.data());
  float inverse[R];
  for (int r = 0; r < R; ++r) {
    float* logits = m.weights.data() + r * m.key_width;
    for (int64_t key = keys; key < m.key_width; ++key) logits[key] = -std::numeric_limits<float>::infinity();
    Vector best = load(logits);
    for (int64_t key = kVector; key < m.key_width; key += kVector) {
      best = larger(load(logits + key), best);
    }
    const float top = horizontal_max(best);
    Vector total = {};
    for (int64_t key = 0; key < m.key_width; key += kVector) {
      const Vector weight = exponential(load(logits + key) - splat(top));
      store(logits + key, weight);
      total = total + weight;
    }
    const float sum = horizontal_sum(total);
    inverse[r] = 1.0f / sum;
    const Fold& fold = folds[r];
    call.lse[(row * s.query_heads + fold.head) * s.length + fold.token] = top + std::log(sum);
  }
  times_rows<R>(m.weights.data(), m.key_width, m.value_rows.data(), keys, m.head_width, m.query.data());
  for (int r = 0; r < R; ++r) {
    const Fold& fold = folds[r];
    float* target = call.out->at(row, fold.head, fold.token);
    for (int64_t i = 0; i < s.head_size; ++i) target[i] = m.query[r * m.head_width + i] * inverse[r];
  }
}

template <int R>
UNIRL_INLINE void backward_rows(const Call& call, Scratch& m, int64_t row, int64_t key_head, int64_t first,
                                int64_t keys) {
  const AttentionShape& s = call.in->shape;
  Fold folds[R];
  fold_rows<R>(s, key_head, first, folds);
  load_rows<R>(call.in->query, row, folds, s.head_size, call.in->scale, m.head_width, m.query.data());
  load_rows<R>(*call.grad_out, row, folds, s.head_size, 1.0f, m.head_width, m.grad.data());
  times_columns<R>(m.query.data(), m.head_width, m.key_columns.data(), s.head_size, m.key_width, m.weights.data());
  times_columns<R>(m.grad.data(), m.head_width, m.value_columns.data(), s.head_size, m.key_width,
                   m.weight_grads.data());
  for (int r = 0; r < R; ++r) {
    const Fold& fold = folds[r];
    const float lse = call.lse[(row * s.query_heads + fold.head) * s.length + fold.token];
    const float* out = call.out->at(row, fold.head, fold.token);
    const float* upstream = m.grad.data() + r * m.head_width;
    Vector products = {};
    int64_t i = 0;
    for (; i + kVector <= s.head_size; i += kVector) products = products + load(out + i) * load(upstream + i);
    float dot = horizontal_sum(products);
    for (; i < s.head_size; ++i) dot += out[i] * upstream[i];
    float* logits = m.weights.data() + r * m.key_width;
    float* grads = m.weight_grads.data() + r * m.key_width;
    for (int64_t key = 0; key < m.key_width; key += kVector) {
      const Vector excess = load(logits + key) - splat(lse);
      const Vector weight = exponential(excess > Vector{} ? Vector{} : excess);
      store(logits + key, weight);
      store(grads + key, weight * (load(grads + key) - splat(dot)));
    }
  }
  add_outer<R>(m.weights.data(), m.key_width, m.grad.data(), keys, m.head_width, m.value_grads.data());
  add_outer<R>(m.weight_grads.data(), m.key_width, m.query.data(), keys, m.head_width, m.key_grads.data());
  times_rows<R>(m.weight_grads.data(), m.key_width, m.key_rows.data(), keys, m.head_width, m.grad.data());
  for (int r = 0; r < R; ++r) {
    const Fold& fold = folds[r];
    float* target = call.grads->query.at(row, fold.head, fold.token);
    for (int64_t i = 0; i < s.head_size; ++i) target[i] = m.grad[r * m.head_width + i] * call.in->scale;
  }
}

UNIRL_INLINE void write_rows(const Headed& to, int64_t row, int64_t head, int64_t count, int64_t d, int64_t width,
                             const float* rows) {
  for (int64_t token = 0; token < count; ++token) {
    std::memcpy(to.at(row, head, token), rows + token * width, sizeof(float) * d);
  }
}

UNIRL_INLINE int64_t real_prefix(const AttentionInputs& in, int64_t group) {
  if (in.prefix_lengths == nullptr) return in.shape.prefix_length;
  return std::max<int64_t>(0, std::min(in.prefix_lengths[group], in.shape.prefix_length));
}

UNIRL_ATTENTION_CLONES void forward_task(const Call& call, int64_t group, int64_t head) {
  const AttentionInputs& in = *call.in;
  const AttentionShape& s = in.shape;
  const int64_t prefix = real_prefix(in, group), keys = prefix + s.length, siblings = s.num_rows / s.groups;
  Scratch m(keys, s.head_size, false);
  pack_columns(in.prefix_key, group, head, prefix, 0, s.head_size, m.key_width, m.key_columns.data());
  pack_rows(in.prefix_value, group, head, prefix, s.head_size, m.head_width, m.value_rows.data());
  for (int64_t row = group * siblings; row < (group + 1) * siblings; ++row) {
    pack_columns(in.key, row, head, s.length, prefix, s.head_size, m.key_width, m.key_columns.data());
    pack_rows(in.value, row, head, s.length, s.head_size, m.head_width, m.value_rows.data() + prefix * m.head_width);
    const int64_t rows = s.query_heads / s.key_heads * s.length;
    int64_t first = 0;
    for (; first + kRows <= rows; first += kRows) forward_rows<kRows>(call, m, row, head, first, keys);
    for (; first < rows; ++first) forward_rows<1>(call, m, row, head, first, keys);
  }
}

UNIRL_ATTENTION_CLONES void backward_task(const Call& call, int64_t group, int64_t head) {
  const AttentionInputs& in = *call.in;
  const AttentionShape& s = in.shape;
  const AttentionGradients& grads = *call.grads;
  const int64_t prefix = real_prefix(in, group), keys = prefix + s.length, siblings = s.num_rows / s.groups;
  const int64_t d = s.head_size;
  Scratch m(keys, d, true);
  pack_columns(in.prefix_key, group, head, prefix, 0, d, m.key_width, m.key_columns.data());
  pack_columns(in.prefix_value, group, head, prefix, 0, d, m.key_width, m.value_columns.data());
  pack_rows(in.prefix_key, group, head, prefix, d, m.head_width, m.key_rows.data());
  const int64_t own = prefix * m.head_width, own_size = s.length * m.head_width;
  for (int64_t row = group * siblings; row < (group + 1) * siblings; ++row) {
    pack_columns(in.key, row, head, s.length, prefix, d, m.key_width, m.key_columns.data());
    pack_columns(in.value, row, head, s.length, prefix, d, m.key_width, m.value_columns.data());
    pack_rows(in.key, row, head, s.length, d, m.head_width, m.key_rows.data() + own);
    std::fill_n(m.key_grads.data() + own, own_size, 0.0f);
    std::fill_n(m.value_grads.data() + own, own_size, 0.0f);
    const int64_t rows = s.query_heads / s.key_heads * s.length;
    int64_t first = 0;
    for (; first + kRows <= rows; first += kRows) backward_rows<kRows>(call, m, row, head, first, keys);
    for (; first < rows; ++first) backward_rows<1>(call, m, row, head, first, keys);
    write_rows(grads.key, row, head, s.length, d, m.head_width, m.key_grads.data() + own);
    write_rows(grads.value, row, head, s.length, d, m.head_width, m.value_grads.data() + own);
  }
  write_rows(grads.prefix_key, group, head, prefix, d, m.head_width, m.key_grads.data());
  write_rows(grads.prefix_value, group, head, prefix, d, m.head_width, m.value_grads.data());
  for (int64_t token = prefix; token < s.prefix_length; ++token) {
    std::fill_n(grads.prefix_key.at(group, head, token), d, 0.0f);
    std::fill_n(grads.prefix_value.at(group, head, token), d, 0.0f);
  }
}

template <typename Task>
void for_tasks(const AttentionShape& s, int num_threads, const Task& task) {
  const int64_t work = s.groups == 0 ? 0
                                     : s.num_rows / s.groups * (s.query_heads / std::max<int64_t>(1, s.key_heads)) *
                                           s.length * (s.prefix_length + s.length) * s.head_size / 4;
  parallel_for(s.groups * s.key_heads, work, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) task(index / s.key_heads, index % s.key_heads);
  });
}

}  // namespace

void sibling_prefix_attention(const AttentionInputs& inputs, const Headed& out, float* lse, int num_threads) {
  const Call call{&inputs, &out, lse, nullptr, nullptr};
  for_tasks(inputs.shape, num_threads, [&](int64_t group, int64_t head) { forward_task(call, group, head); });
}

void sibling_prefix_attention_backward(const AttentionInputs& inputs, const Headed& out, const float* lse,
                                       const Headed& grad_out, const AttentionGradients& gradients,
                                       int num_threads) {
  const Call call{&inputs, &out, const_cast<float*>(lse), &grad_out, &gradients};
  for_tasks(inputs.shape, num_threads, [&](int64_t group, int64_t head) { backward_task(call, group, head); });
}

}  // namespace unirl
