// SPDX-License-Identifier: Apache-2.0
// Python's view of the kernels: addresses, sizes, strides and a stream come in as integers, lists of tensors through
// DLPack. No logic, no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>

#include "cpu/digest.h"
#include "cpu/flow.h"
#include "cpu/guidance.h"
#include "cpu/noise.h"
#include "cpu/packing.h"
#include "cpu/sibling_prefix_attention.h"
#include "dlpack.h"
#ifdef UNIRL_WITH_CUDA
#include "cuda/digest.h"
#include "cuda/packing.h"
#include "cuda/sibling_prefix_attention.h"
#endif

namespace py = pybind11;

namespace {

using Address = uintptr_t;
// (address, dtype, row stride in elements); address 0 means "not given".
using RowsTuple = std::tuple<Address, int, int64_t>;
// (address, bytes, header 0, header 1).
using DigestTuple = std::tuple<Address, int64_t, int64_t, int64_t>;
// Addresses of sigma, sigma_next, sigma_max, noise_level, lengths, and the rule.
using StepTuple = std::tuple<Address, Address, Address, Address, Address, int>;
using ShapeTuple = std::tuple<int64_t, int64_t, int64_t>;

// (address, row stride, head stride, token stride) of [rows, heads, tokens, head size] in elements.
using HeadedTuple = std::tuple<Address, int64_t, int64_t, int64_t>;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

unirl::Rows rows(const RowsTuple& t) {
  return {pointer<const void>(std::get<0>(t)), static_cast<unirl::Dtype>(std::get<1>(t)), std::get<2>(t)};
}

unirl::MutableRows mutable_rows(const RowsTuple& t) {
  return {pointer<void>(std::get<0>(t)), static_cast<unirl::Dtype>(std::get<1>(t)), std::get<2>(t)};
}

int64_t element_bytes(const unirl::dlpack::Tensor& t) { return t.dtype.bits * t.dtype.lanes / 8; }

// Whether every value lies in memory (of a tensor that stands for zeros, or for another one, none does), and the values
// of a token, which is the last axis, are adjacent.
bool lies_in_place(const unirl::dlpack::Tensor& t) {
  const int32_t last = t.num_axes - 1;
  const bool is_empty = std::find(t.shape, t.shape + t.num_axes, 0) != t.shape + t.num_axes;
  return is_empty || (t.data != nullptr && (t.strides[last] == 1 || t.shape[last] == 1));
}

char* data_of(const unirl::dlpack::Tensor& t) { return static_cast<char*>(t.data) + t.byte_offset; }

// Rows [K, seq_i, C] of a list, and the padded tensor [N, K, S, C].
struct Packing {
  Packing(const py::list& tensors, const py::object& padded_tensor) {
    const unirl::dlpack::Reader read(py::type::of(padded_tensor));
    const auto whole = read(padded_tensor);
    const int64_t bytes = element_bytes(whole);
    padded = {data_of(whole), whole.strides[0] * bytes, whole.strides[1] * bytes, whole.strides[2] * bytes};
    num_frames = whole.shape[1];
    bound = whole.shape[2];
    token_bytes = whole.shape[3] * bytes;
    in_place = lies_in_place(whole);
    rows.reserve(tensors.size());
    for (const py::handle tensor : tensors) {
      const auto row = read(tensor);
      rows.push_back({data_of(row), row.strides[0] * bytes, row.strides[1] * bytes, row.shape[1]});
      in_place = in_place && lies_in_place(row);
    }
  }

  std::vector<unirl::PackedRow> rows;
  unirl::PaddedTensor padded;
  int64_t num_frames, bound, token_bytes;
  bool in_place;  // all of them lie so
};

// Runs a kernel on rows and padded tensor. False, and nothing is done, where one does not lie in place.
template <typename Run>
bool run_packing(const py::list& rows, const py::object& padded, const Run& run) {
  const Packing packing(rows, padded);
  if (!packing.in_place) return false;
  const py::gil_scoped_release no_gil_here;
  run(packing);
  return true;
}

// Length of the longest of `rows` [K, seq_i, C]; -1 unless all are tensors with memory and of one K, C, dtype and device.
int64_t longest_row(const py::list& rows, const py::type& tensor_type) {
  const unirl::dlpack::Reader read(tensor_type);
  unirl::dlpack::Tensor first{};
  int64_t longest = -1;
  for (const py::handle row : rows) {
    unirl::dlpack::Tensor t;
    if (!read.can_read(row, t) || t.num_axes != 3) return -1;
    if (longest < 0) first = t;
    const bool alike = t.shape[0] == first.shape[0] && t.shape[2] == first.shape[2] &&
                       std::memcmp(&t.dtype, &first.dtype, sizeof t.dtype) == 0 &&
                       std::memcmp(&t.device, &first.device, sizeof t.device) == 0;
    if (!alike) return -1;
    longest = std::max(longest, t.shape[1]);
  }
  return longest;
}

std::vector<unirl::DigestInput> digest_inputs(const std::vector<DigestTuple>& tuples) {
  std::vector<unirl::DigestInput> result;
  result.reserve(tuples.size());
  for (const auto& [address, bytes, first, second] : tuples) {
    result.push_back({pointer<const void>(address), bytes,
                      {static_cast<uint64_t>(first), static_cast<uint64_t>(second)}});
  }
  return result;
}

unirl::StepRows step_rows(const StepTuple& t) {
  return {pointer<const double>(std::get<0>(t)),  pointer<const double>(std::get<1>(t)),
          pointer<const double>(std::get<2>(t)),  pointer<const double>(std::get<3>(t)),
          pointer<const int64_t>(std::get<4>(t)), static_cast<unirl::Rule>(std::get<5>(t))};
}

unirl::SampleShape sample_shape(const ShapeTuple& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t)}; }

unirl::GuidanceInputs guidance_inputs(const RowsTuple& cond, const RowsTuple& text, const RowsTuple& image,
                                      Address text_scale, Address image_scale, Address lengths, int renorm,
                                      double renorm_min, const ShapeTuple& shape) {
  return {rows(cond),
          rows(text),
          rows(image),
          pointer<const double>(text_scale),
          pointer<const double>(image_scale),
          pointer<const int64_t>(lengths),
          static_cast<unirl::Renorm>(renorm),
          renorm_min,
          std::get<0>(shape),
          std::get<1>(shape),
          std::get<2>(shape)};
}

#ifdef UNIRL_WITH_CUDA
unirl::cuda::HeadedTensor headed(const HeadedTuple& t) {
  return {pointer<const void>(std::get<0>(t)), std::get<1>(t), std::get<2>(t), std::get<3>(t)};
}

unirl::cuda::SiblingAttention sibling_attention(const std::array<HeadedTuple, 6>& tensors, Address lse,
                                                Address prefix_lengths, const std::array<int64_t, 7>& sizes,
                                                bool float16, float scale) {
  return {headed(tensors[0]), headed(tensors[1]), headed(tensors[2]), headed(tensors[3]), headed(tensors[4]),
          headed(tensors[5]), pointer<float>(lse), pointer<const int64_t>(prefix_lengths), sizes[0], sizes[1],
          sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], float16, scale};
}
#endif

// (address, row stride, head stride, token stride) of [rows, heads, tokens, D], strides in elements.
using FloatHeadedTuple = std::tuple<Address, int64_t, int64_t, int64_t>;

unirl::Headed float_headed(const FloatHeadedTuple& t) {
  return {pointer<float>(std::get<0>(t)), std::get<1>(t), std::get<2>(t), std::get<3>(t)};
}

// tensors: query, key, value, prefix_key, prefix_value; sizes: N, G, Hq, Hk, L, P, D.
unirl::AttentionInputs attention_inputs(const std::vector<FloatHeadedTuple>& tensors, Address prefix_lengths,
                                        const std::vector<int64_t>& sizes, float scale) {
  return {float_headed(tensors[0]),
          float_headed(tensors[1]),
          float_headed(tensors[2]),
          float_headed(tensors[3]),
          float_headed(tensors[4]),
          pointer<const int64_t>(prefix_lengths),
          {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]},
          scale};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ and CUDA kernels of unirl.ops; use them through unirl.ops.";
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  m.def(
      "keyed_normal",
      [](const RowsTuple& out, int64_t num_rows, int64_t row_size, int64_t seed, Address row_keys, uint32_t step,
         uint32_t stream, int num_threads) {
        unirl::keyed_normal(mutable_rows(out), num_rows, row_size, static_cast<uint64_t>(seed),
                            pointer<const int64_t>(row_keys), step, stream, num_threads);
      },
      no_gil);

  m.def(
      "flow_step",
      [](bool wide, const RowsTuple& sample, const RowsTuple& velocity, const StepTuple& step_arguments,
         const ShapeTuple& shape, int64_t seed, Address row_keys, uint32_t step, uint32_t stream,
         const RowsTuple& next, Address log_prob, int num_threads) {
        const auto run = [&](auto* target) {
          unirl::flow_step(rows(sample), rows(velocity), step_rows(step_arguments), sample_shape(shape),
                           static_cast<uint64_t>(seed), pointer<const int64_t>(row_keys), step, stream,
                           mutable_rows(next), target, num_threads);
        };
        wide ? run(pointer<double>(log_prob)) : run(pointer<float>(log_prob));
      },
      no_gil);

  m.def(
      "flow_log_prob",
      [](bool wide, const RowsTuple& sample, const RowsTuple& velocity, const RowsTuple& next,
         const StepTuple& step_arguments, const ShapeTuple& shape, Address log_prob, const RowsTuple& mean,
         Address scale, int num_threads) {
        const auto run = [&](auto* target, auto* scales) {
          unirl::flow_log_prob(rows(sample), rows(velocity), rows(next), step_rows(step_arguments),
                               sample_shape(shape), target, mutable_rows(mean), scales, num_threads);
        };
        wide ? run(pointer<double>(log_prob), pointer<double>(scale))
             : run(pointer<float>(log_prob), pointer<float>(scale));
      },
      no_gil);

  m.def(
      "flow_log_prob_backward",
      [](bool wide, Address grad_log_prob, const RowsTuple& grad_mean, const RowsTuple& sample,
         const RowsTuple& velocity, const RowsTuple& next, const StepTuple& step_arguments, const ShapeTuple& shape,
         const RowsTuple& grad_velocity, int num_threads) {
        const auto run = [&](const auto* upstream) {
          unirl::flow_log_prob_backward(upstream, rows(grad_mean), rows(sample), rows(velocity), rows(next),
                                        step_rows(step_arguments), sample_shape(shape), mutable_rows(grad_velocity),
                                        num_threads);
        };
        wide ? run(pointer<const double>(grad_log_prob)) : run(pointer<const float>(grad_log_prob));
      },
      no_gil);

  m.def(
      "guided_velocity",
      [](bool wide, const RowsTuple& cond, const RowsTuple& text, const RowsTuple& image, Address text_scale,
         Address image_scale, Address lengths, int renorm, double renorm_min, const ShapeTuple& shape,
         const RowsTuple& out, int num_threads) {
        const auto inputs =
            guidance_inputs(cond, text, image, text_scale, image_scale, lengths, renorm, renorm_min, shape);
        wide ? unirl::guided_velocity<double>(inputs, mutable_rows(out), num_threads)
             : unirl::guided_velocity<float>(inputs, mutable_rows(out), num_threads);
      },
      no_gil);

  m.def(
      "guided_velocity_backward",
      [](bool wide, const RowsTuple& grad_out, const RowsTuple& cond, const RowsTuple& text, const RowsTuple& image,
         Address text_scale, Address image_scale, Address lengths, int renorm, double renorm_min,
         const ShapeTuple& shape, const RowsTuple& grad_cond, const RowsTuple& grad_text,
         const RowsTuple& grad_image, int num_threads) {
        const auto inputs =
            guidance_inputs(cond, text, image, text_scale, image_scale, lengths, renorm, renorm_min, shape);
        const auto run = [&](auto function) {
          function(rows(grad_out), inputs, mutable_rows(grad_cond), mutable_rows(grad_text), mutable_rows(grad_image),
                   num_threads);
        };
        wide ? run(unirl::guided_velocity_backward<double>) : run(unirl::guided_velocity_backward<float>);
      },
      no_gil);

  m.def("longest_row", longest_row);

  // rows: list of [K, seq_i, C]; padded: [N, K, S, C].
  m.def("pad_latents", [](const py::list& rows, const py::object& padded, int num_threads) {
    return run_packing(rows, padded, [&](const Packing& p) {
      unirl::pad_latents(p.rows, p.padded, p.num_frames, p.bound, p.token_bytes, num_threads);
    });
  });

  m.def("trim_latents", [](const py::object& padded, const py::list& rows, int num_threads) {
    return run_packing(rows, padded, [&](const Packing& p) {
      unirl::trim_latents(p.rows, p.padded, p.num_frames, p.token_bytes, num_threads);
    });
  });

  m.def(
      "layout_digest",
      [](Address values, int64_t num_rows, int64_t row_size, int64_t stride, Address offsets, Address out,
         int num_threads) {
        unirl::layout_digest(pointer<const int64_t>(values), num_rows, row_size, stride,
                             pointer<const int64_t>(offsets), pointer<int64_t>(out), num_threads);
      },
      no_gil);

  m.def(
      "tensor_digest",
      [](const std::vector<DigestTuple>& inputs, Address out, int num_threads) {
        unirl::tensor_digest(digest_inputs(inputs), pointer<int64_t>(out), num_threads);
      },
      no_gil);

  m.def(
      "sibling_prefix_attention",
      [](const std::vector<FloatHeadedTuple>& tensors, Address prefix_lengths, const std::vector<int64_t>& sizes,
         float scale, const FloatHeadedTuple& out, Address lse, int num_threads) {
        unirl::sibling_prefix_attention(attention_inputs(tensors, prefix_lengths, sizes, scale), float_headed(out),
                                        pointer<float>(lse), num_threads);
      },
      no_gil);

  // gradients: of query, key, value, prefix_key, prefix_value.
  m.def(
      "sibling_prefix_attention_backward",
      [](const std::vector<FloatHeadedTuple>& tensors, Address prefix_lengths, const std::vector<int64_t>& sizes,
         float scale, const FloatHeadedTuple& out, Address lse, const FloatHeadedTuple& grad_out,
         const std::vector<FloatHeadedTuple>& gradients, int num_threads) {
        const unirl::AttentionGradients targets{float_headed(gradients[0]), float_headed(gradients[1]),
                                                float_headed(gradients[2]), float_headed(gradients[3]),
                                                float_headed(gradients[4])};
        unirl::sibling_prefix_attention_backward(attention_inputs(tensors, prefix_lengths, sizes, scale),
                                                 float_headed(out), pointer<const float>(lse), float_headed(grad_out),
                                                 targets, num_threads);
      },
      no_gil);

#ifdef UNIRL_WITH_CUDA
  m.attr("cuda_architectures") = UNIRL_CUDA_ARCHITECTURES;

  m.def("cuda_pad_latents", [](const py::list& rows, const py::object& padded, Address stream) {
    return run_packing(rows, padded, [&](const Packing& p) {
      unirl::cuda::pad_latents(p.rows, p.padded, p.num_frames, p.bound, p.token_bytes, pointer<void>(stream));
    });
  });

  m.def("cuda_trim_latents", [](const py::object& padded, const py::list& rows, Address stream) {
    return run_packing(rows, padded, [&](const Packing& p) {
      unirl::cuda::trim_latents(p.rows, p.padded, p.num_frames, p.token_bytes, pointer<void>(stream));
    });
  });

  m.def(
      "cuda_layout_digest",
      [](Address values, int64_t num_rows, int64_t row_size, int64_t stride, Address offsets, Address out,
         Address stream) {
        unirl::cuda::layout_digest(pointer<const int64_t>(values), num_rows, row_size, stride,
                                   pointer<const int64_t>(offsets), pointer<int64_t>(out), pointer<void>(stream));
      },
      no_gil);

  // tensors: query, key, value, prefix_key, prefix_value, out; sizes: N, G, Hq, Hk, L, P, D.
  m.def(
      "cuda_sibling_attention_forward",
      [](const std::array<HeadedTuple, 6>& tensors, Address lse, Address prefix_lengths,
         const std::array<int64_t, 7>& sizes, bool float16, float scale, Address stream) {
        unirl::cuda::sibling_attention_forward(
            sibling_attention(tensors, lse, prefix_lengths, sizes, float16, scale), pointer<void>(stream));
      },
      no_gil);

  m.def("cuda_sibling_attention_query_tiles", unirl::cuda::sibling_attention_query_tiles);
  m.def("cuda_sibling_attention_key_tiles", unirl::cuda::sibling_attention_key_tiles);
  m.def("cuda_sibling_attention_split_units", unirl::cuda::sibling_attention_split_units);

  // gradients: of out (given), query, key, value; buffers: prefix_key's and prefix_value's gradients of each row,
  // row_stats, partial_query, progress, split_sums, see cuda/sibling_prefix_attention.h.
  m.def(
      "cuda_sibling_attention_backward",
      [](const std::array<HeadedTuple, 6>& tensors, Address lse, Address prefix_lengths,
         const std::array<int64_t, 7>& sizes, bool float16, float scale, const std::array<HeadedTuple, 4>& gradients,
         const std::array<Address, 6>& buffers, Address stream) {
        unirl::cuda::sibling_attention_backward(
            sibling_attention(tensors, lse, prefix_lengths, sizes, float16, scale),
            {headed(gradients[0]), headed(gradients[1]), headed(gradients[2]), headed(gradients[3]),
             pointer<float>(buffers[0]), pointer<float>(buffers[1]), pointer<float>(buffers[2]),
             pointer<float>(buffers[3]), pointer<int32_t>(buffers[4]), pointer<float>(buffers[5])},
            pointer<void>(stream));
      },
      no_gil);

  // table: device copy of [M, 6] int64 rows, see cuda/digest.h; sums: 2 M + 1 zeroed words.
  m.def(
      "cuda_tensor_digest",
      [](Address table, int64_t num_tensors, int64_t num_batches, Address sums, Address out, Address stream) {
        unirl::cuda::tensor_digest(pointer<const unirl::cuda::DigestEntry>(table), num_tensors, num_batches,
                                   pointer<uint64_t>(sums), pointer<int64_t>(out), pointer<void>(stream));
      },
      no_gil);
#else
  m.attr("cuda_architectures") = py::none();
#endif
}
