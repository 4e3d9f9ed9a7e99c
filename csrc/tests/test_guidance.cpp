// SPDX-License-Identifier: Apache-2.0
#include "cpu/guidance.h"

#include "check.h"

using namespace unirl;
using namespace unirl::test;

namespace {

void each_row_has_its_own_factor() {
  const float cond[4] = {3.0f, 4.0f, 0.3f, 0.4f}, uncond[4] = {};
  const double scale[2] = {4.0, 0.4}, one[2] = {1.0, 1.0};
  float out[4];
  guided_velocity<float>({{cond, Dtype::kFloat32, 2},
                          {uncond, Dtype::kFloat32, 2},
                          {nullptr, Dtype::kFloat32, 0},
                          scale,
                          one,
                          nullptr,
                          Renorm::kGlobal,
                          0.0,
                          2,
                          1,
                          2},
                         {out, Dtype::kFloat32, 2}, 2);
  const float expected[4] = {3.0f, 4.0f, 0.12f, 0.16f};
  for (int i = 0; i < 4; ++i) CHECK(close(out[i], expected[i], 1e-6));
}

void gradient_is_the_finite_difference(Renorm renorm, int64_t channels) {
  const int64_t rows = 3, seq = 4, size = seq * channels, count = rows * size;
  auto cond = filled<double>(count, 1), text = filled<double>(count, 2), image = filled<double>(count, 3);
  auto upstream = filled<double>(count, 4), out = filled<double>(count, 5);
  const double text_scale[3] = {4.0, 0.4, 1.0}, image_scale[3] = {1.5, 1.0, 2.0};
  const int64_t lengths[3] = {4, 2, 3};
  const auto operand = [&](double* data) { return Rows{data, Dtype::kFloat64, size}; };
  const GuidanceInputs inputs{operand(cond.get()), operand(text.get()), operand(image.get()), text_scale, image_scale,
                              lengths,             renorm,              0.1,                  rows,       seq,
                              channels};
  const auto loss = [&] {
    guided_velocity<double>(inputs, {out.get(), Dtype::kFloat64, size}, 1);
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += upstream[i] * out[i];
    return total;
  };
  std::unique_ptr<double[]> grads[3];
  for (auto& grad : grads) grad = filled<double>(count, 6);
  guided_velocity_backward<double>(operand(upstream.get()), inputs, {grads[0].get(), Dtype::kFloat64, size},
                                   {grads[1].get(), Dtype::kFloat64, size}, {grads[2].get(), Dtype::kFloat64, size}, 2);
  double* const branches[3] = {cond.get(), text.get(), image.get()};
  for (int branch = 0; branch < 3; ++branch) {
    for (int64_t i = 0; i < count; i += channels > 8 ? 7 : 1) {
      const double kept = branches[branch][i], step = 1e-6;
      branches[branch][i] = kept + step;
      const double above = loss();
      branches[branch][i] = kept - step;
      const double below = loss();
      branches[branch][i] = kept;
      CHECK(close(grads[branch][i], (above - below) / (2 * step), 1e-6));
    }
  }
}

}  // namespace

int main() {
  each_row_has_its_own_factor();
  for (const Renorm renorm : {Renorm::kNone, Renorm::kGlobal, Renorm::kChannel, Renorm::kTextChannel}) {
    gradient_is_the_finite_difference(renorm, 5);
    gradient_is_the_finite_difference(renorm, 300);
  }
  return finish();
}
