// SPDX-License-Identifier: Apache-2.0
#include "flow.h"

#include <cmath>

#include "noise.h"
#include "ordered_sum.h"

namespace unirl {
namespace {

constexpr double kHalfLogTwoPi = 0.5 * 1.8378770664093454836;

int64_t real_elements(const StepRows& rows, const SampleShape& shape, int64_t row) {
  if (rows.lengths == nullptr) return shape.seq * shape.per_token;
  return std::max<int64_t>(0, std::min(rows.lengths[row], shape.seq)) * shape.per_token;
}

// mean of a block, zero past `count`.
template <typename T>
UNIRL_INLINE void mean_block(const void* sample, Dtype sample_dtype, const void* velocity, Dtype velocity_dtype,
                             T x_factor, T velocity_factor, int64_t first, int64_t count, T* mean) {
  T x[kBlock] = {}, v[kBlock] = {};
  load_block(sample, sample_dtype, first, count, x);
  load_block(velocity, velocity_dtype, first, count, v);
  for (int64_t i = 0; i < kBlock; ++i) mean[i] = x_factor * x[i] + velocity_factor * v[i];
}

// The block's sum of squared differences between the stored value and the mean.
template <typename T>
UNIRL_INLINE double square_block(const void* next, Dtype dtype, int64_t first, int64_t count, const T* mean) {
  T square[kBlock] = {};
  load_block(next, dtype, first, count, square);
  for (int64_t i = 0; i < kBlock; ++i) {
    const T difference = i < count ? square[i] - mean[i] : T{0};
    square[i] = difference * difference;
  }
  return static_cast<double>(sum_block(square));
}

template <typename T>
T finish_log_prob(const StepCoefficients& c, double total, int64_t count) {
  if (count == 0) return T{0};
  return static_cast<T>(c.square_factor * (total / static_cast<double>(count)) + c.constant);
}

template <typename T>
UNIRL_INLINE void step_row_body(const void* sample, Dtype sample_dtype, const void* velocity, Dtype velocity_dtype,
                                const StepCoefficients& c, int64_t count, int64_t row_size, uint64_t key,
                                uint32_t step, uint32_t stream, void* next, Dtype next_dtype, double* total) {
  const T x_factor = static_cast<T>(c.x_factor), velocity_factor = static_cast<T>(c.velocity_factor);
  const T scale = static_cast<T>(c.scale);
  PairwiseSum sum;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    T mean[kBlock], following[kBlock];
    mean_block(sample, sample_dtype, velocity, velocity_dtype, x_factor, velocity_factor, first, size, mean);
    if (scale == T{0}) {
      for (int64_t i = 0; i < kBlock; ++i) following[i] = mean[i];
    } else {
      float noise[kBlock];
      noise_block(key, static_cast<uint64_t>(first), step, stream, noise);
      for (int64_t i = 0; i < kBlock; ++i) following[i] = mean[i] + scale * static_cast<T>(noise[i]);
    }
    store_block(next, next_dtype, first, size, following);
    sum.add(square_block(next, next_dtype, first, size, mean));
  }
  zero_block(next, next_dtype, count, row_size - count);
  *total = sum.total();
}

template <typename T>
UNIRL_INLINE void log_prob_row_body(const void* sample, Dtype sample_dtype, const void* velocity,
                                    Dtype velocity_dtype, const void* next, Dtype next_dtype,
                                    const StepCoefficients& c, int64_t count, int64_t row_size, void* mean_out,
                                    Dtype mean_dtype, double* total) {
  const T x_factor = static_cast<T>(c.x_factor), velocity_factor = static_cast<T>(c.velocity_factor);
  PairwiseSum sum;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    T mean[kBlock];
    mean_block(sample, sample_dtype, velocity, velocity_dtype, x_factor, velocity_factor, first, size, mean);
    if (mean_out != nullptr) store_block(mean_out, mean_dtype, first, size, mean);
    sum.add(square_block(next, next_dtype, first, size, mean));
  }
  if (mean_out != nullptr) zero_block(mean_out, mean_dtype, count, row_size - count);
  *total = sum.total();
}

template <typename T>
UNIRL_INLINE void backward_row_body(T factor, const void* grad_mean, Dtype grad_mean_dtype, const void* sample,
                                    Dtype sample_dtype, const void* velocity, Dtype velocity_dtype,
                                    const void* next, Dtype next_dtype, const StepCoefficients& c, int64_t count,
                                    int64_t row_size, void* grad_velocity, Dtype grad_dtype) {
  const T x_factor = static_cast<T>(c.x_factor), velocity_factor = static_cast<T>(c.velocity_factor);
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    T mean[kBlock], stored[kBlock] = {}, upstream[kBlock] = {};
    mean_block(sample, sample_dtype, velocity, velocity_dtype, x_factor, velocity_factor, first, size, mean);
    load_block(next, next_dtype, first, size, stored);
    if (grad_mean != nullptr) load_block(grad_mean, grad_mean_dtype, first, size, upstream);
    for (int64_t i = 0; i < kBlock; ++i) {
      upstream[i] = velocity_factor * (upstream[i] + factor * (stored[i] - mean[i]));
    }
    store_block(grad_velocity, grad_dtype, first, size, upstream);
  }
  zero_block(grad_velocity, grad_dtype, count, row_size - count);
}

// Multiversioned entry points: templates cannot be cloned, so that each body has one function a type.
#define UNIRL_FLOW_ROWS(T)                                                                                          \
  UNIRL_CLONES void step_row(const void* sample, Dtype sample_dtype, const void* velocity, Dtype velocity_dtype,    \
                             const StepCoefficients& c, int64_t count, int64_t row_size, uint64_t key,              \
                             uint32_t step, uint32_t stream, void* next, Dtype next_dtype, double* total, T) {      \
    step_row_body<T>(sample, sample_dtype, velocity, velocity_dtype, c, count, row_size, key, step, stream, next,   \
                     next_dtype, total);                                                                            \
  }                                                                                                                 \
  UNIRL_CLONES void log_prob_row(const void* sample, Dtype sample_dtype, const void* velocity,                      \
                                 Dtype velocity_dtype, const void* next, Dtype next_dtype,                          \
                                 const StepCoefficients& c, int64_t count, int64_t row_size, void* mean,            \
                                 Dtype mean_dtype, double* total, T) {                                              \
    log_prob_row_body<T>(sample, sample_dtype, velocity, velocity_dtype, next, next_dtype, c, count, row_size,      \
                         mean, mean_dtype, total);                                                                  \
  }                                                                                                                 \
  UNIRL_CLONES void backward_row(const void* grad_mean, Dtype grad_mean_dtype, const void* sample,                  \
                                 Dtype sample_dtype, const void* velocity, Dtype velocity_dtype, const void* next,  \
                                 Dtype next_dtype, const StepCoefficients& c, int64_t count, int64_t row_size,      \
                                 void* grad_velocity, Dtype grad_dtype, T factor) {                                 \
    backward_row_body<T>(factor, grad_mean, grad_mean_dtype, sample, sample_dtype, velocity, velocity_dtype, next,  \
                         next_dtype, c, count, row_size, grad_velocity, grad_dtype);                                \
  }

UNIRL_FLOW_ROWS(float)
UNIRL_FLOW_ROWS(double)
#undef UNIRL_FLOW_ROWS

}  // namespace

StepCoefficients step_coefficients(const StepRows& rows, int64_t row) {
  const double sigma = rows.sigma[row], sigma_next = rows.sigma_next[row], level = rows.noise_level[row];
  const double dt = sigma_next - sigma;
  StepCoefficients c;
  if (rows.rule == Rule::kCps) {
    c.scale = sigma_next * level;
    const double kept = std::sqrt(std::max(sigma_next * sigma_next - c.scale * c.scale, 0.0));
    c.x_factor = (1.0 - sigma_next) + kept;
    c.velocity_factor = (1.0 - sigma) * kept - sigma * (1.0 - sigma_next);
    c.square_factor = -1.0;
    c.constant = 0.0;
  } else {
    double variance = level * level;
    if (rows.rule == Rule::kFlow) {
      variance = variance * (sigma / (1.0 - (sigma == 1.0 ? rows.sigma_max[row] : sigma)));
    }
    c.x_factor = 1.0 + variance / (2.0 * sigma) * dt;
    c.velocity_factor = (1.0 + variance * (1.0 - sigma) / (2.0 * sigma)) * dt;
    c.scale = std::sqrt(variance * -dt);
    const double safe = c.scale > 0.0 ? c.scale : 1.0;
    c.square_factor = -0.5 / (safe * safe);
    c.constant = -std::log(safe) - kHalfLogTwoPi;
  }
  if (level == 0.0) {
    c.x_factor = 1.0;
    c.velocity_factor = dt;
  }
  if (c.scale == 0.0) c.square_factor = c.constant = 0.0;
  return c;
}

template <typename T>
void flow_step(const Rows& sample, const Rows& velocity, const StepRows& rows, const SampleShape& shape,
               uint64_t seed, const int64_t* row_keys, uint32_t step, uint32_t stream, const MutableRows& next,
               T* log_prob, int num_threads) {
  const int64_t row_size = shape.seq * shape.per_token;
  parallel_for(shape.num_rows, row_size * 8, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const StepCoefficients c = step_coefficients(rows, row);
      const int64_t count = real_elements(rows, shape, row);
      double total = 0.0;
      step_row(sample.row(row), sample.dtype, velocity.row(row), velocity.dtype, c, count, row_size,
               noise_key(seed, static_cast<uint64_t>(row_keys[row])), step, stream, next.row(row), next.dtype, &total,
               T{});
      log_prob[row] = finish_log_prob<T>(c, total, count);
    }
  });
}

template <typename T>
void flow_log_prob(const Rows& sample, const Rows& velocity, const Rows& next, const StepRows& rows,
                   const SampleShape& shape, T* log_prob, const MutableRows& mean, T* scale, int num_threads) {
  const int64_t row_size = shape.seq * shape.per_token;
  parallel_for(shape.num_rows, row_size, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const StepCoefficients c = step_coefficients(rows, row);
      const int64_t count = real_elements(rows, shape, row);
      double total = 0.0;
      log_prob_row(sample.row(row), sample.dtype, velocity.row(row), velocity.dtype, next.row(row), next.dtype, c,
                   count, row_size, mean.row(row), mean.dtype, &total, T{});
      log_prob[row] = finish_log_prob<T>(c, total, count);
      scale[row] = static_cast<T>(c.scale);
    }
  });
}

template <typename T>
void flow_log_prob_backward(const T* grad_log_prob, const Rows& grad_mean, const Rows& sample,
                            const Rows& velocity, const Rows& next, const StepRows& rows,
                            const SampleShape& shape, const MutableRows& grad_velocity, int num_threads) {
  const int64_t row_size = shape.seq * shape.per_token;
  parallel_for(shape.num_rows, row_size, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const StepCoefficients c = step_coefficients(rows, row);
      const int64_t count = real_elements(rows, shape, row);
      // d log_prob / d mean_i = -2 square_factor (x'_i - mean_i) / count.
      const double factor = -2.0 * c.square_factor * static_cast<double>(grad_log_prob[row]) /
                            static_cast<double>(std::max<int64_t>(count, 1));
      backward_row(grad_mean.row(row), grad_mean.dtype, sample.row(row), sample.dtype, velocity.row(row),
                   velocity.dtype, next.row(row), next.dtype, c, count, row_size, grad_velocity.row(row),
                   grad_velocity.dtype, static_cast<T>(factor));
    }
  });
}

#define UNIRL_INSTANTIATE(T)                                                                                       \
  template void flow_step<T>(const Rows&, const Rows&, const StepRows&, const SampleShape&, uint64_t,              \
                             const int64_t*, uint32_t, uint32_t, const MutableRows&, T*, int);                     \
  template void flow_log_prob<T>(const Rows&, const Rows&, const Rows&, const StepRows&, const SampleShape&, T*,   \
                                 const MutableRows&, T*, int);                                                     \
  template void flow_log_prob_backward<T>(const T*, const Rows&, const Rows&, const Rows&, const Rows&,            \
                                          const StepRows&, const SampleShape&, const MutableRows&, int);
UNIRL_INSTANTIATE(float)
UNIRL_INSTANTIATE(double)
#undef UNIRL_INSTANTIATE

}  // namespace unirl
