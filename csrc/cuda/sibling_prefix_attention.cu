// SPDX-License-Identifier: Apache-2.0
#include "cuda/sibling_prefix_attention.h"

#include <cstring>
#include <stdexcept>

#include "cuda/check.h"
#include "cuda/sibling_prefix_backward.cuh"

namespace unirl::cuda {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// Found at run time, so that the library does not link to the driver and loads on a machine without a GPU.
EncodeFunction encode_function() {
  static const EncodeFunction function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12 or later");
    }
    return reinterpret_cast<EncodeFunction>(entry);
  }();
  return function;
}

// Axes of every map, the innermost first; strides in elements.
struct MapAxes {
  int64_t size[5];
  int64_t stride[5];
  int32_t box[5];
};

CUtensorMap encode(const void* data, bool float16, const MapAxes& axes) {
  cuuint64_t size[5];
  cuuint64_t stride_bytes[4];
  cuuint32_t box[5];
  cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; ++i) {
    size[i] = static_cast<cuuint64_t>(axes.size[i]);
    box[i] = static_cast<cuuint32_t>(axes.box[i]);
    // An axis of one element may carry any stride; the encoder wants multiples of 16 bytes all the same.
    if (i > 0) stride_bytes[i - 1] = axes.size[i] == 1 ? 128 : static_cast<cuuint64_t>(2 * axes.stride[i]);
  }
  CUtensorMap map;
  const CUresult result = encode_function()(
      &map, float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
      const_cast<void*>(data), size, stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("tensor map refused: addresses and strides must be multiples of 16 bytes");
  }
  return map;
}

// Tiles of `tokens` tokens of the `ratio` query heads that share a key head.
CUtensorMap query_map(const SiblingAttention& call, const HeadedTensor& tensor, int ratio, int tokens) {
  return encode(tensor.data, call.float16,
                {{kPanel, call.query_heads, call.length, call.head_size / kPanel, call.num_rows},
                 {1, tensor.head_stride, tensor.token_stride, kPanel, tensor.row_stride},
                 {kPanel, ratio, tokens, 1, 1}});
}

RowMaps key_maps(const SiblingAttention& call, const HeadedTensor& tensor, int64_t rows, int64_t tokens,
                 int tile_keys) {
  const auto map = [&](int box) {
    return encode(tensor.data, call.float16,
                  {{kPanel, tokens, call.head_size / kPanel, call.key_heads, rows},
                   {1, tensor.token_stride, kPanel, tensor.head_stride, tensor.row_stride},
                   {kPanel, box, 1, 1, 1}});
  };
  return {map(tile_keys), map(kChunk), map(1)};
}

template <typename C>
void launch(const SiblingAttention& call, cudaStream_t stream) {
  ForwardArguments arguments;
  std::memset(&arguments, 0, sizeof(arguments));
  const int ratio = static_cast<int>(call.query_heads / call.key_heads);
  const int tokens = kGroupRows / ratio;
  arguments.query = query_map(call, call.query, ratio, tokens);
  arguments.out = query_map(call, call.out, ratio, tokens);
  arguments.own[0] = key_maps(call, call.key, call.num_rows, call.length, C::kKeys);
  arguments.own[1] = key_maps(call, call.value, call.num_rows, call.length, C::kKeys);
  if (call.prefix_length > 0) {
    arguments.prefix[0] = key_maps(call, call.prefix_key, call.num_groups, call.prefix_length, C::kKeys);
    arguments.prefix[1] = key_maps(call, call.prefix_value, call.num_groups, call.prefix_length, C::kKeys);
  }
  arguments.lse = call.lse;
  arguments.prefix_lengths = call.prefix_lengths;
  arguments.scale = call.scale;
  arguments.length = static_cast<int32_t>(call.length);
  arguments.prefix_length = static_cast<int32_t>(call.prefix_length);
  arguments.key_heads = static_cast<int32_t>(call.key_heads);
  arguments.ratio = ratio;
  arguments.tokens = tokens;
  arguments.siblings = static_cast<int32_t>(call.num_rows / call.num_groups);
  const int64_t unit_tokens = static_cast<int64_t>(tokens) * kConsumers;
  const int64_t units_per_head = (call.length + unit_tokens - 1) / unit_tokens;
  const int64_t num_units = units_per_head * call.num_rows * call.key_heads;
  if (num_units > INT32_MAX) throw std::runtime_error("too many query tiles for one launch");
  arguments.units_per_head = static_cast<int32_t>(units_per_head);
  arguments.num_units = static_cast<int32_t>(num_units);

  const auto kernel = sibling_attention_forward_kernel<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
        "cudaFuncSetAttribute");
  const int blocks = static_cast<int>(num_units < multiprocessors() ? num_units : multiprocessors());
  kernel<<<blocks, kThreads, C::kSharedBytes, stream>>>(arguments);
  check(cudaGetLastError(), "sibling_attention_forward");
}

void copy_strides(int64_t (&target)[3], const HeadedTensor& tensor) {
  target[0] = tensor.row_stride;
  target[1] = tensor.head_stride;
  target[2] = tensor.token_stride;
}

template <typename Element>
void launch_backward(const SiblingAttention& call, const SiblingAttentionGradients& gradients, cudaStream_t stream) {
  using C = BackwardConfig<Element>;
  const int ratio = static_cast<int>(call.query_heads / call.key_heads);
  const int tokens = kGroupRows / ratio;
  const int64_t query_tiles = sibling_attention_query_tiles(call.length, call.query_heads, call.key_heads);
  const int64_t heads = call.num_rows * call.key_heads;
  const int64_t key_tiles = sibling_attention_key_tiles(call.length, call.prefix_length);
  if (heads * key_tiles > INT32_MAX || heads * query_tiles > INT32_MAX) {
    throw std::runtime_error("too many tiles for one launch");
  }

  RowStatArguments stats;
  stats.out = call.out.data;
  stats.grad_out = gradients.grad_out.data;
  stats.lse = call.lse;
  stats.row_stats = gradients.row_stats;
  copy_strides(stats.out_strides, call.out);
  copy_strides(stats.grad_strides, gradients.grad_out);
  stats.length = static_cast<int32_t>(call.length);
  stats.key_heads = static_cast<int32_t>(call.key_heads);
  stats.ratio = ratio;
  stats.tokens = tokens;
  stats.query_tiles = static_cast<int32_t>(query_tiles);
  row_stats_kernel<Element, C::kHeadSize><<<static_cast<unsigned>(heads * query_tiles), 256, 0, stream>>>(stats);
  check(cudaGetLastError(), "row_stats");

  BackwardArguments arguments;
  std::memset(&arguments, 0, sizeof(arguments));
  arguments.query = query_map(call, call.query, ratio, tokens);
  arguments.grad_out = query_map(call, gradients.grad_out, ratio, tokens);
  arguments.own[0] = key_maps(call, call.key, call.num_rows, call.length, C::kKeys);
  arguments.own[1] = key_maps(call, call.value, call.num_rows, call.length, C::kKeys);
  if (call.prefix_length > 0) {
    arguments.prefix[0] = key_maps(call, call.prefix_key, call.num_groups, call.prefix_length, C::kKeys);
    arguments.prefix[1] = key_maps(call, call.prefix_value, call.num_groups, call.prefix_length, C::kKeys);
  }
  arguments.row_stats = gradients.row_stats;
  arguments.partial_query = gradients.partial_query;
  arguments.progress = gradients.progress;
  arguments.split_sums = gradients.split_sums;
  arguments.grad_key[0] = const_cast<void*>(gradients.grad_key.data);
  arguments.grad_key[1] = const_cast<void*>(gradients.grad_value.data);
  arguments.grad_prefix[0] = gradients.grad_prefix_key;
  arguments.grad_prefix[1] = gradients.grad_prefix_value;
  copy_strides(arguments.grad_key_strides[0], gradients.grad_key);
  copy_strides(arguments.grad_key_strides[1], gradients.grad_value);
  arguments.prefix_lengths = call.prefix_lengths;
  arguments.scale = call.scale;
  arguments.length = static_cast<int32_t>(call.length);
  arguments.prefix_length = static_cast<int32_t>(call.prefix_length);
  arguments.key_heads = static_cast<int32_t>(call.key_heads);
  arguments.ratio = ratio;
  arguments.tokens = tokens;
  arguments.siblings = static_cast<int32_t>(call.num_rows / call.num_groups);
  arguments.query_tiles = static_cast<int32_t>(query_tiles);
  arguments.key_tiles = static_cast<int32_t>(key_tiles);
  arguments.num_units = static_cast<int32_t>(heads * key_tiles);
  arguments.split_units = static_cast<int32_t>(sibling_attention_split_units(
      call.num_rows, call.query_heads, call.key_heads, call.length, call.prefix_length));
  arguments.split_threads = gradients.progress + 2 * static_cast<int64_t>(arguments.num_units);

  const auto kernel = sibling_attention_backward_kernel<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
        "cudaFuncSetAttribute");
  // No more blocks than run at once: they wait for one another.
  const int blocks = arguments.num_units < multiprocessors() ? arguments.num_units : multiprocessors();
  kernel<<<blocks, kThreads, C::kSharedBytes, stream>>>(arguments);
  check(cudaGetLastError(), "sibling_attention_backward");

  QueryGradArguments finish;
  finish.partial_query = gradients.partial_query;
  finish.grad_query = const_cast<void*>(gradients.grad_query.data);
  copy_strides(finish.strides, gradients.grad_query);
  finish.scale = call.scale;
  finish.length = stats.length;
  finish.key_heads = stats.key_heads;
  finish.ratio = ratio;
  finish.tokens = tokens;
  finish.query_tiles = stats.query_tiles;
  query_grad_kernel<Element, C::kHeadSize><<<static_cast<unsigned>(heads * query_tiles), 256, 0, stream>>>(finish);
  check(cudaGetLastError(), "query_grad");
}

void check_call(const SiblingAttention& call) {
  if (call.num_groups <= 0 || call.key_heads <= 0 || call.num_rows % call.num_groups != 0 ||
      call.query_heads % call.key_heads != 0 || call.query_heads / call.key_heads > kGroupRows) {
    throw std::runtime_error("rows must be a multiple of groups, query heads 1 to 64 for each key head");
  }
  if (call.length > (1 << 29) || call.prefix_length > (1 << 29)) throw std::runtime_error("over 2^29 tokens");
  if (!(call.scale > 0.0f)) throw std::runtime_error("scale must be positive");
}

template <typename Element>
void dispatch(const SiblingAttention& call, cudaStream_t stream) {
  if (call.head_size == 128) {
    launch<ForwardConfig<Element, 128>>(call, stream);
  } else if (call.head_size == 64) {
    launch<ForwardConfig<Element, 64>>(call, stream);
  } else {
    throw std::runtime_error("no kernel for this head size; allowed: 64, 128");
  }
}

}  // namespace

void sibling_attention_forward(const SiblingAttention& call, void* stream) {
  if (call.num_rows <= 0 || call.length <= 0) return;
  check_call(call);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  call.float16 ? dispatch<__half>(call, cuda_stream) : dispatch<__nv_bfloat16>(call, cuda_stream);
}

int64_t sibling_attention_query_tiles(int64_t length, int64_t query_heads, int64_t key_heads) {
  const int64_t tokens = kGroupRows / (query_heads / key_heads);
  return (length + tokens - 1) / tokens;
}

int64_t sibling_attention_key_tiles(int64_t length, int64_t prefix_length) {
  constexpr int kKeys = BackwardConfig<__nv_bfloat16>::kKeys;
  return ((prefix_length + kChunk - 1) / kChunk * kChunk + length + kKeys - 1) / kKeys;
}

// Whole rounds of units keep every block busy. What the last round would leave over, rounded up to whole heads because
// the tiles of a head wait for one another, is split when each block needs to take one half at most.
int64_t sibling_attention_split_units(int64_t num_rows, int64_t query_heads, int64_t key_heads, int64_t length,
                                      int64_t prefix_length) {
  const int64_t blocks = multiprocessors();
  const int64_t key_tiles = sibling_attention_key_tiles(length, prefix_length);
  const int64_t units = num_rows * key_heads * key_tiles;
  if (units < blocks || sibling_attention_query_tiles(length, query_heads, key_heads) < 2) return 0;
  const int64_t split = (units % blocks + key_tiles - 1) / key_tiles * key_tiles;
  return 2 * split <= blocks ? split : 0;
}

void sibling_attention_backward(const SiblingAttention& call, const SiblingAttentionGradients& gradients,
                                void* stream) {
  if (call.num_rows <= 0 || call.length <= 0) return;
  check_call(call);
  if (call.head_size != 128) throw std::runtime_error("no backward kernel for this head size; allowed: 128");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  call.float16 ? launch_backward<__half>(call, gradients, cuda_stream)
               : launch_backward<__nv_bfloat16>(call, gradients, cuda_stream);
}

}  // namespace unirl::cuda
