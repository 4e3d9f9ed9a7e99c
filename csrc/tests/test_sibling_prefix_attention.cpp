// SPDX-License-Identifier: Apache-2.0
#include "cpu/sibling_prefix_attention.h"

#include "check.h"

using namespace unirl;
using namespace unirl::test;

namespace {

Headed contiguous(float* data, int64_t heads, int64_t tokens, int64_t d) {
  return {data, heads * tokens * d, tokens * d, d};
}

// Random operands of one call, each on the heap in its exact size.
struct Operands {
  AttentionShape shape;
  std::unique_ptr<float[]> query, key, value, prefix_key, prefix_value, out, lse, grad_out;
  std::unique_ptr<float[]> grads[5];
  std::unique_ptr<int64_t[]> lengths;

  explicit Operands(const AttentionShape& s) : shape(s) {
    query = filled<float>(query_size(), 1);
    key = filled<float>(own_size(), 2);
    value = filled<float>(own_size(), 3);
    prefix_key = filled<float>(prefix_size(), 4);
    prefix_value = filled<float>(prefix_size(), 5);
    out = filled<float>(query_size(), 6);
    grad_out = filled<float>(query_size(), 7);
    lse = filled<float>(s.num_rows * s.query_heads * s.length, 8);
    const int64_t sizes[5] = {query_size(), own_size(), own_size(), prefix_size(), prefix_size()};
    for (int i = 0; i < 5; ++i) grads[i] = filled<float>(sizes[i], 9);
    lengths.reset(new int64_t[s.groups]);
    for (int64_t group = 0; group < s.groups; ++group) lengths[group] = std::max<int64_t>(0, s.prefix_length - group);
  }

  int64_t query_size() const { return shape.num_rows * shape.query_heads * shape.length * shape.head_size; }
  int64_t own_size() const { return shape.num_rows * shape.key_heads * shape.length * shape.head_size; }
  int64_t prefix_size() const { return shape.groups * shape.key_heads * shape.prefix_length * shape.head_size; }

  Headed of_query(float* data) const { return contiguous(data, shape.query_heads, shape.length, shape.head_size); }
  Headed of_own(float* data) const { return contiguous(data, shape.key_heads, shape.length, shape.head_size); }
  Headed of_prefix(float* data) const {
    return contiguous(data, shape.key_heads, shape.prefix_length, shape.head_size);
  }

  AttentionInputs inputs() const {
    return {of_query(query.get()),         of_own(key.get()),
            of_own(value.get()),           of_prefix(prefix_key.get()),
            of_prefix(prefix_value.get()), lengths.get(),
            shape,                         0.5f};
  }

  void run(int threads) { sibling_prefix_attention(inputs(), of_query(out.get()), lse.get(), threads); }

  void run_backward(int threads) {
    const AttentionGradients targets{of_query(grads[0].get()), of_own(grads[1].get()), of_own(grads[2].get()),
                                     of_prefix(grads[3].get()), of_prefix(grads[4].get())};
    sibling_prefix_attention_backward(inputs(), of_query(out.get()), lse.get(), of_query(grad_out.get()), targets,
                                      threads);
  }
};

// Sum over all outputs of grad_out times the attention, in double, from the definition.
double exact_loss(const Operands& o) {
  const AttentionShape& s = o.shape;
  const AttentionInputs in = o.inputs();
  double loss = 0.0;
  for (int64_t row = 0; row < s.num_rows; ++row) {
    const int64_t group = row / (s.num_rows / s.groups), prefix = o.lengths[group], keys = prefix + s.length;
    for (int64_t head = 0; head < s.query_heads; ++head) {
      const int64_t key_head = head / (s.query_heads / s.key_heads);
      for (int64_t token = 0; token < s.length; ++token) {
        std::vector<double> weights(keys);
        double top = -1e300, total = 0.0;
        const auto place = [&](const Headed& prefixed, const Headed& own, int64_t index) {
          return index < prefix ? prefixed.at(group, key_head, index) : own.at(row, key_head, index - prefix);
        };
        for (int64_t k = 0; k < keys; ++k) {
          const float* key = place(in.prefix_key, in.key, k);
          double logit = 0.0;
          for (int64_t i = 0; i < s.head_size; ++i) logit += double(in.query.at(row, head, token)[i]) * key[i];
          weights[k] = logit * in.scale;
          top = std::max(top, weights[k]);
        }
        for (double& weight : weights) total += weight = std::exp(weight - top);
        const float* upstream = o.of_query(o.grad_out.get()).at(row, head, token);
        for (int64_t k = 0; k < keys; ++k) {
          const float* value = place(in.prefix_value, in.value, k);
          for (int64_t i = 0; i < s.head_size; ++i) loss += upstream[i] * weights[k] / total * value[i];
        }
      }
    }
  }
  return loss;
}

void forward_and_gradients_follow_the_definition(const AttentionShape& shape) {
  Operands o(shape);
  o.run(2);
  double loss = 0.0;
  for (int64_t i = 0; i < o.query_size(); ++i) loss += double(o.out[i]) * o.grad_out[i];
  CHECK(close(loss, exact_loss(o), 1e-5));
  o.run_backward(2);
  float* const operands[5] = {o.query.get(), o.key.get(), o.value.get(), o.prefix_key.get(), o.prefix_value.get()};
  const int64_t sizes[5] = {o.query_size(), o.own_size(), o.own_size(), o.prefix_size(), o.prefix_size()};
  for (int which = 0; which < 5; ++which) {
    for (int64_t i = 0; i < sizes[which]; i += 1 + sizes[which] / 20) {
      const float kept = operands[which][i];
      const float above = kept + 0.0009765625f, below = kept - 0.0009765625f;
      operands[which][i] = above;
      const double upper = exact_loss(o);
      operands[which][i] = below;
      const double lower = exact_loss(o);
      operands[which][i] = kept;
      CHECK(close(o.grads[which][i], (upper - lower) / (double(above) - double(below)), 1e-4));
    }
  }
}

void a_row_and_its_gradients_have_the_bits_they_have_alone() {
  Operands all({6, 2, 4, 2, 9, 5, 20});
  all.run(3);
  all.run_backward(3);
  Operands one({1, 1, 4, 2, 9, 5, 20});
  const int64_t query = one.query_size(), own = one.own_size(), row = 2;
  std::memcpy(one.query.get(), all.query.get() + row * query, sizeof(float) * query);
  std::memcpy(one.grad_out.get(), all.grad_out.get() + row * query, sizeof(float) * query);
  std::memcpy(one.key.get(), all.key.get() + row * own, sizeof(float) * own);
  std::memcpy(one.value.get(), all.value.get() + row * own, sizeof(float) * own);
  std::memcpy(one.prefix_key.get(), all.prefix_key.get(), sizeof(float) * one.prefix_size());
  std::memcpy(one.prefix_value.get(), all.prefix_value.get(), sizeof(float) * one.prefix_size());
  one.run(1);
  one.run_backward(1);
  CHECK(std::memcmp(one.out.get(), all.out.get() + row * query, sizeof(float) * query) == 0);
  CHECK(std::memcmp(one.grads[0].get(), all.grads[0].get() + row * query, sizeof(float) * query) == 0);
  CHECK(std::memcmp(one.grads[1].get(), all.grads[1].get() + row * own, sizeof(float) * own) == 0);
}

void threads_do_not_change_a_bit() {
  Operands one({8, 4, 4, 2, 40, 20, 32}), many({8, 4, 4, 2, 40, 20, 32});
  one.run(1);
  one.run_backward(1);
  many.run(4);
  many.run_backward(4);
  CHECK(std::memcmp(one.out.get(), many.out.get(), sizeof(float) * one.query_size()) == 0);
  const int64_t sizes[5] = {one.query_size(), one.own_size(), one.own_size(), one.prefix_size(), one.prefix_size()};
  for (int i = 0; i < 5; ++i) {
    CHECK(std::memcmp(one.grads[i].get(), many.grads[i].get(), sizeof(float) * sizes[i]) == 0);
  }
}

void a_nan_of_any_payload_stays_nan() {
  for (const uint32_t bits : {0x7FC00000u, 0x7FC00001u, 0x7FC00155u, 0xFFFFFFFFu, 0x7F800001u}) {
    Operands o({1, 1, 2, 1, 3, 4, 5});
    std::memcpy(o.key.get(), &bits, sizeof(bits));
    o.run(1);
    for (int64_t i = 0; i < o.query_size(); ++i) CHECK(std::isnan(o.out[i]));
    Operands row({1, 1, 2, 1, 3, 4, 5});
    std::memcpy(row.query.get() + 5, &bits, sizeof(bits));  // token 1 of head 0
    row.run(1);
    for (int64_t i = 0; i < row.query_size(); ++i) CHECK(std::isnan(row.out[i]) == (i >= 5 && i < 10));
  }
}

}  // namespace

int main() {
  for (const AttentionShape& shape :
       {AttentionShape{4, 2, 4, 2, 3, 4, 5}, AttentionShape{2, 2, 1, 1, 1, 0, 16}, AttentionShape{3, 1, 3, 1, 6, 30, 33}}) {
    forward_and_gradients_follow_the_definition(shape);
  }
  a_row_and_its_gradients_have_the_bits_they_have_alone();
  threads_do_not_change_a_bit();
  a_nan_of_any_payload_stays_nan();
  Operands none({0, 0, 2, 1, 3, 0, 4});
  none.run(2);
  none.run_backward(2);
  return finish();
}
