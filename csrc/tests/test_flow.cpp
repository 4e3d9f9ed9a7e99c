// SPDX-License-Identifier: Apache-2.0
#include "cpu/flow.h"

#include "check.h"
#include "cpu/noise.h"

using namespace unirl;
using namespace unirl::test;

namespace {

struct Case {
  double sigma[3] = {1.0, 0.5, 0.25};
  double sigma_next[3] = {0.75, 0.25, 0.0};
  double level[3] = {0.7, 0.7, 0.7};
  int64_t lengths[3] = {5, 3, 0};
  StepRows rows(Rule rule, bool ragged) const {
    return {sigma, sigma_next, sigma_next, level, ragged ? lengths : nullptr, rule};
  }
};

// Mean and scale as the papers write them.
void formula(Rule rule, double s, double s_next, double level, double x, double v, double* mean, double* scale) {
  const double dt = s_next - s;
  if (rule == Rule::kCps) {
    *scale = s_next * level;
    *mean = (x - s * v) * (1 - s_next) + (x + (1 - s) * v) * std::sqrt(s_next * s_next - *scale * *scale);
    return;
  }
  const double std = rule == Rule::kDance ? level : level * std::sqrt(s / (1 - (s == 1.0 ? s_next : s)));
  *mean = x * (1 + std * std / (2 * s) * dt) + v * (1 + std * std * (1 - s) / (2 * s)) * dt;
  *scale = std * std::sqrt(-dt);
}

template <typename T>
void step_and_replay_follow_the_formulas(Rule rule, Dtype dtype, double tolerance, bool ragged) {
  const SampleShape shape{3, 5, 67};
  const int64_t size = shape.seq * shape.per_token;
  const Case rows_case;
  const StepRows rows = rows_case.rows(rule, ragged);
  auto x = filled<T>(3 * size, 1), v = filled<T>(3 * size, 2), next = filled<T>(3 * size, 3);
  auto mean_out = filled<T>(3 * size, 4);
  const int64_t keys[3] = {5, 6, 7};
  T log_prob[3], replayed[3], scale[3];
  flow_step<T>({x.get(), dtype, size}, {v.get(), dtype, size}, rows, shape, 9, keys, 2, 1, {next.get(), dtype, size},
               log_prob, 2);
  flow_log_prob<T>({x.get(), dtype, size}, {v.get(), dtype, size}, {next.get(), dtype, size}, rows, shape, replayed,
                   {mean_out.get(), dtype, size}, scale, 1);
  auto noise = filled<float>(3 * size, 5);
  keyed_normal({noise.get(), Dtype::kFloat32, size}, 3, size, 9, keys, 2, 1, 1);
  for (int row = 0; row < 3; ++row) {
    const int64_t real = ragged ? rows_case.lengths[row] * shape.per_token : size;
    double squares = 0.0, s = 0.0;
    for (int64_t i = row * size; i < (row + 1) * size; ++i) {
      if (i - row * size >= real) {
        CHECK(next[i] == T{0} && mean_out[i] == T{0});
        continue;
      }
      double m;
      formula(rule, rows.sigma[row], rows.sigma_next[row], rows.noise_level[row], x[i], v[i], &m, &s);
      CHECK(close(mean_out[i], m, tolerance));
      CHECK(close(next[i], m + s * noise[i], tolerance));
      squares += (next[i] - m) * (next[i] - m);
    }
    double expected = 0.0;
    if (real > 0 && s > 0) {
      const double average = squares / static_cast<double>(real);
      expected = rule == Rule::kCps ? -average : -average / (2 * s * s) - std::log(s) - 0.5 * std::log(2 * M_PI);
    }
    CHECK(close(log_prob[row], expected, 50 * tolerance));
    CHECK(log_prob[row] == replayed[row]);
  }
}

void gradient_is_the_finite_difference() {
  const SampleShape shape{3, 5, 3};
  const int64_t size = 15;
  const Case rows_case;
  const StepRows rows = rows_case.rows(Rule::kFlow, true);
  auto x = filled<double>(45, 1), v = filled<double>(45, 2), y = filled<double>(45, 3), g = filled<double>(45, 4);
  auto grad = filled<double>(45, 5), mean = filled<double>(45, 6);
  const double upstream[3] = {0.5, -2.0, 1.0};
  const auto operand = [&](double* data) { return Rows{data, Dtype::kFloat64, size}; };
  const auto loss = [&] {
    double log_prob[3], scale[3], total = 0.0;
    flow_log_prob<double>(operand(x.get()), operand(v.get()), operand(y.get()), rows, shape, log_prob,
                          {mean.get(), Dtype::kFloat64, size}, scale, 1);
    for (int row = 0; row < 3; ++row) total += upstream[row] * log_prob[row];
    for (int i = 0; i < 45; ++i) total += g[i] * mean[i];
    return total;
  };
  flow_log_prob_backward<double>(upstream, operand(g.get()), operand(x.get()), operand(v.get()), operand(y.get()), rows,
                                 shape, {grad.get(), Dtype::kFloat64, size}, 1);
  for (int i = 0; i < 45; ++i) {
    const double kept = v[i], step = 1e-6;
    v[i] = kept + step;
    const double above = loss();
    v[i] = kept - step;
    const double below = loss();
    v[i] = kept;
    CHECK(close(grad[i], (above - below) / (2 * step), 1e-7));
  }
}

void sixteen_bit_floats_round_to_nearest_even() {
  CHECK(float_to_bfloat16(1.00390625f) == 0x3F80 && float_to_bfloat16(1.01171875f) == 0x3F82);
  CHECK(float_to_float16(1.00048828125f) == 0x3C00 && float_to_float16(65520.0f) == 0x7C00);
  CHECK(float_to_float16(65519.0f) == 0x7BFF && float_to_float16(5.9604645e-8f) == 1);
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float wide = float16_to_float(static_cast<uint16_t>(half));
    if (!std::isnan(wide)) CHECK(float_to_float16(wide) == half);
    const float other = bfloat16_to_float(static_cast<uint16_t>(half));
    if (!std::isnan(other)) CHECK(float_to_bfloat16(other) == half);
  }
}

}  // namespace

int main() {
  for (const Rule rule : {Rule::kFlow, Rule::kCps, Rule::kDance}) {
    for (const bool ragged : {false, true}) {
      step_and_replay_follow_the_formulas<float>(rule, Dtype::kFloat32, 1e-6, ragged);
      step_and_replay_follow_the_formulas<double>(rule, Dtype::kFloat64, 1e-13, ragged);
    }
  }
  gradient_is_the_finite_difference();
  sixteen_bit_floats_round_to_nearest_even();
  return finish();
}
