// SPDX-License-Identifier: Apache-2.0
#include "guidance.h"

#include "ordered_sum.h"

namespace unirl {
namespace {

constexpr double kNormEpsilon = 1e-8;

// Everything that one row needs. A null branch means a scale of 1: the branch changes nothing.
template <typename T>
struct Row {
  const void* cond;
  const void* text;
  const void* image;
  Dtype cond_dtype, text_dtype, image_dtype;
  T text_scale, image_scale;
  Renorm renorm;  // kNone where the row has no factor
  T renorm_min;
};

template <typename T>
Row<T> make_row(const GuidanceInputs& in, int64_t index) {
  Row<T> row;
  row.cond = in.cond.row(index);
  row.text = in.text_uncond.row(index);
  row.image = in.image_uncond.row(index);
  row.cond_dtype = in.cond.dtype;
  row.text_dtype = in.text_uncond.dtype;
  row.image_dtype = in.image_uncond.dtype;
  row.text_scale = static_cast<T>(in.text_scale[index]);
  row.image_scale = static_cast<T>(in.image_scale[index]);
  if (row.text_scale == T{1}) row.text = nullptr;
  if (row.image_scale == T{1}) row.image = nullptr;
  row.renorm_min = static_cast<T>(in.renorm_min);
  const bool scaled = in.renorm == Renorm::kTextChannel ? row.text != nullptr : row.text || row.image;
  row.renorm = scaled ? in.renorm : Renorm::kNone;
  return row;
}

// One block of a row: its three inputs and what is made of them; zero past the real elements, up to `size`.
template <typename T>
struct Block {
  int64_t size;
  T cond[kBlock], text[kBlock], image[kBlock];
  T after_text[kBlock];  // u + s (v - u)
  T guided[kBlock];      // after the image guidance, before a global or channel factor
};

template <typename T>
UNIRL_INLINE void load_inputs(const Row<T>& row, int64_t first, int64_t count, Block<T>* block) {
  block->size = padded_size(count);
  for (int64_t i = count; i < block->size; ++i) block->cond[i] = block->text[i] = block->image[i] = T{0};
  load_block(row.cond, row.cond_dtype, first, count, block->cond);
  if (row.text) load_block(row.text, row.text_dtype, first, count, block->text);
  if (row.image) load_block(row.image, row.image_dtype, first, count, block->image);
  for (int64_t i = 0; i < block->size; ++i) {
    block->after_text[i] =
        row.text ? block->text[i] + row.text_scale * (block->cond[i] - block->text[i]) : block->cond[i];
  }
}

// `factor` is that of text_channel, 1 otherwise.
template <typename T>
UNIRL_INLINE void apply_image(const Row<T>& row, T factor, Block<T>* block) {
  for (int64_t i = 0; i < block->size; ++i) {
    const T text = row.renorm == Renorm::kTextChannel ? block->after_text[i] * factor : block->after_text[i];
    block->guided[i] = row.image ? block->image[i] + row.image_scale * (text - block->image[i]) : text;
  }
}

template <typename T>
UNIRL_INLINE double sum_of_products(const T* left, const T* right, int64_t size) {
  T products[kBlock];
  for (int64_t i = 0; i < size; ++i) products[i] = left[i] * right[i];
  return static_cast<double>(sum_block(products, size));
}

// A stretch of a row with one factor: a token, or the whole row.
struct Segment {
  int64_t first;
  int64_t size;
};

template <typename T>
struct Norms {
  T plain, scaled, ratio, factor;
};

template <typename T>
UNIRL_INLINE T norm_of(double total) {
  return total > 0.0 ? static_cast<T>(sizeof(T) == 4 ? __builtin_sqrtf(static_cast<float>(total))
                                                     : __builtin_sqrt(total))
                     : T{0};
}

template <typename T>
UNIRL_INLINE Norms<T> segment_norms(const Row<T>& row, const Segment& segment) {
  PairwiseSum plain, scaled;
  Block<T> block;
  for (int64_t start = 0; start < segment.size; start += kBlock) {
    load_inputs(row, segment.first + start, std::min(kBlock, segment.size - start), &block);
    if (row.renorm != Renorm::kTextChannel) apply_image(row, T{1}, &block);
    const T* target = row.renorm == Renorm::kTextChannel ? block.after_text : block.guided;
    plain.add(sum_of_products(block.cond, block.cond, block.size));
    scaled.add(sum_of_products(target, target, block.size));
  }
  Norms<T> norms;
  norms.plain = norm_of<T>(plain.total());
  norms.scaled = norm_of<T>(scaled.total());
  norms.ratio = norms.plain / (norms.scaled + static_cast<T>(kNormEpsilon));
  norms.factor = std::min(std::max(norms.ratio, row.renorm_min), T{1});
  return norms;
}

template <typename T>
UNIRL_INLINE void forward_segment(const Row<T>& row, const Segment& segment, void* out, Dtype dtype) {
  const bool scaled = row.renorm != Renorm::kNone;
  const T factor = scaled ? segment_norms(row, segment).factor : T{1};
  Block<T> block;
  for (int64_t start = 0; start < segment.size; start += kBlock) {
    const int64_t count = std::min(kBlock, segment.size - start);
    load_inputs(row, segment.first + start, count, &block);
    apply_image(row, factor, &block);
    if (scaled && row.renorm != Renorm::kTextChannel) {
      for (int64_t i = 0; i < block.size; ++i) block.guided[i] = block.guided[i] * factor;
    }
    store_block(out, dtype, segment.first + start, count, block.guided);
  }
}

template <typename T>
struct Targets {
  void* cond;
  void* text;
  void* image;
  Dtype cond_dtype, text_dtype, image_dtype;
};

template <typename T>
UNIRL_INLINE void backward_segment(const Row<T>& row, const Segment& segment, const void* grad_out,
                                   Dtype grad_dtype, const Targets<T>& targets) {
  const bool scaled = row.renorm != Renorm::kNone;
  const bool text_channel = row.renorm == Renorm::kTextChannel;
  Norms<T> norms{T{0}, T{0}, T{0}, T{1}};
  T plain_gradient = T{0}, scaled_gradient = T{0};  // of the factor's path, per unit of cond and of the scaled vector
  Block<T> block;
  T grad[kBlock];
  if (scaled) {
    norms = segment_norms(row, segment);
    PairwiseSum dot;
    for (int64_t start = 0; start < segment.size; start += kBlock) {
      const int64_t count = std::min(kBlock, segment.size - start);
      load_inputs(row, segment.first + start, count, &block);
      apply_image(row, norms.factor, &block);
      for (int64_t i = count; i < block.size; ++i) grad[i] = T{0};
      load_block(grad_out, grad_dtype, segment.first + start, count, grad);
      if (text_channel && row.image) {
        for (int64_t i = 0; i < block.size; ++i) grad[i] = row.image_scale * grad[i];
      }
      dot.add(sum_of_products(grad, text_channel ? block.after_text : block.guided, block.size));
    }
    // The factor moves only strictly between its bounds (and at them, as torch.clamp has it).
    if (norms.ratio >= row.renorm_min && norms.ratio <= T{1}) {
      const T grad_factor = static_cast<T>(dot.total());
      const T sum = norms.scaled + static_cast<T>(kNormEpsilon);
      if (norms.plain > T{0}) plain_gradient = grad_factor / sum / norms.plain;
      if (norms.scaled > T{0}) scaled_gradient = -grad_factor * norms.plain / (sum * sum) / norms.scaled;
    }
  }
  for (int64_t start = 0; start < segment.size; start += kBlock) {
    const int64_t first = segment.first + start;
    const int64_t count = std::min(kBlock, segment.size - start);
    load_inputs(row, first, count, &block);
    apply_image(row, norms.factor, &block);
    for (int64_t i = count; i < block.size; ++i) grad[i] = T{0};
    load_block(grad_out, grad_dtype, first, count, grad);
    T grad_text[kBlock], grad_image[kBlock];
    for (int64_t i = 0; i < block.size; ++i) {
      T upstream = grad[i];
      if (scaled && !text_channel) upstream = norms.factor * upstream + scaled_gradient * block.guided[i];
      grad_image[i] = row.image ? (T{1} - row.image_scale) * upstream : T{0};
      if (row.image) upstream = row.image_scale * upstream;
      if (text_channel) upstream = norms.factor * upstream + scaled_gradient * block.after_text[i];
      grad_text[i] = row.text ? (T{1} - row.text_scale) * upstream : T{0};
      if (row.text) upstream = row.text_scale * upstream;
      grad[i] = upstream + plain_gradient * block.cond[i];
    }
    store_block(targets.cond, targets.cond_dtype, first, count, grad);
    if (targets.text) store_block(targets.text, targets.text_dtype, first, count, grad_text);
    if (targets.image) store_block(targets.image, targets.image_dtype, first, count, grad_image);
  }
}

UNIRL_CLONES void forward_one(const Row<float>& row, const Segment& segment, void* out, Dtype dtype) {
  forward_segment(row, segment, out, dtype);
}
UNIRL_CLONES void forward_one(const Row<double>& row, const Segment& segment, void* out, Dtype dtype) {
  forward_segment(row, segment, out, dtype);
}
UNIRL_CLONES void backward_one(const Row<float>& row, const Segment& segment, const void* grad_out, Dtype dtype,
                               const Targets<float>& targets) {
  backward_segment(row, segment, grad_out, dtype, targets);
}
UNIRL_CLONES void backward_one(const Row<double>& row, const Segment& segment, const void* grad_out, Dtype dtype,
                               const Targets<double>& targets) {
  backward_segment(row, segment, grad_out, dtype, targets);
}

int64_t real_tokens(const GuidanceInputs& inputs, int64_t row) {
  if (inputs.lengths == nullptr) return inputs.seq;
  return std::max<int64_t>(0, std::min(inputs.lengths[row], inputs.seq));
}

// Calls body(segment) for the stretches of a row that share a factor.
template <typename Body>
void for_segments(Renorm renorm, int64_t tokens, int64_t channels, const Body& body) {
  if (renorm == Renorm::kChannel || renorm == Renorm::kTextChannel) {
    for (int64_t token = 0; token < tokens; ++token) body(Segment{token * channels, channels});
  } else {
    body(Segment{0, tokens * channels});
  }
}

}  // namespace

template <typename T>
void guided_velocity(const GuidanceInputs& inputs, const MutableRows& out, int num_threads) {
  const int64_t row_size = inputs.seq * inputs.channels;
  parallel_for(inputs.num_rows, row_size, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Row<T> row = make_row<T>(inputs, index);
      const int64_t tokens = real_tokens(inputs, index);
      void* target = out.row(index);
      for_segments(row.renorm, tokens, inputs.channels,
                   [&](const Segment& segment) { forward_one(row, segment, target, out.dtype); });
      zero_block(target, out.dtype, tokens * inputs.channels, row_size - tokens * inputs.channels);
    }
  });
}

template <typename T>
void guided_velocity_backward(const Rows& grad_out, const GuidanceInputs& inputs, const MutableRows& grad_cond,
                              const MutableRows& grad_text, const MutableRows& grad_image, int num_threads) {
  const int64_t row_size = inputs.seq * inputs.channels;
  parallel_for(inputs.num_rows, row_size, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Row<T> row = make_row<T>(inputs, index);
      const int64_t tokens = real_tokens(inputs, index);
      const Targets<T> targets{grad_cond.row(index), grad_text.row(index), grad_image.row(index),
                               grad_cond.dtype,      grad_text.dtype,      grad_image.dtype};
      for_segments(row.renorm, tokens, inputs.channels, [&](const Segment& segment) {
        backward_one(row, segment, grad_out.row(index), grad_out.dtype, targets);
      });
      const int64_t real = tokens * inputs.channels;
      for (const MutableRows* grad : {&grad_cond, &grad_text, &grad_image}) {
        if (grad->data) zero_block(grad->row(index), grad->dtype, real, row_size - real);
      }
    }
  });
}

#define UNIRL_INSTANTIATE(T)                                                                                    \
  template void guided_velocity<T>(const GuidanceInputs&, const MutableRows&, int);                             \
  template void guided_velocity_backward<T>(const Rows&, const GuidanceInputs&, const MutableRows&,             \
                                            const MutableRows&, const MutableRows&, int);
UNIRL_INSTANTIATE(float)
UNIRL_INSTANTIATE(double)
#undef UNIRL_INSTANTIATE

}  // namespace unirl
