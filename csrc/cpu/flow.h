// SPDX-License-Identifier: Apache-2.0
// One flow-matching step with its log-probability, its replay and the replay's gradient; formulas in
// unirl/ops/flow.py.
#pragma once

#include "common.h"

namespace unirl {

enum class Rule : int { kFlow = 0, kCps = 1, kDance = 2 };

// Row arguments, each [N]; lengths may be null.
struct StepRows {
  const double* sigma;
  const double* sigma_next;
  const double* sigma_max;
  const double* noise_level;
  const int64_t* lengths;
  Rule rule;
};

struct StepCoefficients {
  double x_factor;
  double velocity_factor;
  double scale;
  double square_factor;
  double constant;
};

StepCoefficients step_coefficients(const StepRows& rows, int64_t row);

// Sizes of a sample [N, seq, ...].
struct SampleShape {
  int64_t num_rows;
  int64_t seq;
  int64_t per_token;
};

// log_prob is T [N]. T is float, or double for a float64 sample.
template <typename T>
void flow_step(const Rows& sample, const Rows& velocity, const StepRows& rows, const SampleShape& shape,
               uint64_t seed, const int64_t* row_keys, uint32_t step, uint32_t stream, const MutableRows& next,
               T* log_prob, int num_threads);

// mean.data may be null; scale is T [N].
template <typename T>
void flow_log_prob(const Rows& sample, const Rows& velocity, const Rows& next, const StepRows& rows,
                   const SampleShape& shape, T* log_prob, const MutableRows& mean, T* scale, int num_threads);

// grad_mean.data may be null. Writes the gradient of velocity, in one pass over the inputs.
template <typename T>
void flow_log_prob_backward(const T* grad_log_prob, const Rows& grad_mean, const Rows& sample,
                            const Rows& velocity, const Rows& next, const StepRows& rows,
                            const SampleShape& shape, const MutableRows& grad_velocity, int num_threads);

}  // namespace unirl
