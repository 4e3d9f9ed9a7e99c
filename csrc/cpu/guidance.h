// SPDX-License-Identifier: Apache-2.0
// Classifier-free guidance and renormalisation row by row; formulas in unirl/ops/guidance.py.
#pragma once

#include "common.h"

namespace unirl {

enum class Renorm : int { kNone = 0, kGlobal = 1, kChannel = 2, kTextChannel = 3 };

// Branch operands may have null data for "not given". Scales are double [N]; lengths may be null.
struct GuidanceInputs {
  Rows cond;
  Rows text_uncond;
  Rows image_uncond;
  const double* text_scale;
  const double* image_scale;
  const int64_t* lengths;
  Renorm renorm;
  double renorm_min;
  int64_t num_rows;
  int64_t seq;
  int64_t channels;
};

template <typename T>
void guided_velocity(const GuidanceInputs& inputs, const MutableRows& out, int num_threads);

// Gradients of the branches that are given; the others' targets have null data.
template <typename T>
void guided_velocity_backward(const Rows& grad_out, const GuidanceInputs& inputs, const MutableRows& grad_cond,
                              const MutableRows& grad_text, const MutableRows& grad_image, int num_threads);

}  // namespace unirl
