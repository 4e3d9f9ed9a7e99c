// SPDX-License-Identifier: Apache-2.0
// What the tests of the CUDA kernels share: a device or the reason to skip, and buffers that exist on both sides.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/digest.h"
#include "cpu/noise.h"
#include "cuda/check.h"

namespace unirl::test {

constexpr int kSkipped = 77;          // SKIP_RETURN_CODE of csrc/CMakeLists.txt
constexpr int64_t kMargin = 256;      // bytes, as cudaMalloc aligns
constexpr unsigned char kPoison = 0xFF;  // all of it is a NaN in every float format

// Why the kernels cannot run here, or nothing. Those of sm_90a need exactly that.
inline std::string why_no_device(bool hopper) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return std::string("no CUDA device: ") + cudaGetErrorString(status);
  if (count == 0) return "no CUDA device";
  int major = 0, minor = 0;
  cuda::check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "compute capability");
  cuda::check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "compute capability");
  if (hopper && (major != 9 || minor != 0)) {
    return "compute capability " + std::to_string(major) + "." + std::to_string(minor) + "; the kernels need 9.0";
  }
  return "";
}

// main's return value.
template <typename Tests>
int run_on_device(bool hopper, const Tests& tests) {
  try {
    const std::string reason = why_no_device(hopper);
    if (!reason.empty()) {
      std::printf("skipped: %s\n", reason.c_str());
      return kSkipped;
    }
    tests();
  } catch (const std::exception& error) {
    ++failures;
    std::printf("%s\n", error.what());
  }
  return finish();
}

// The same bytes on the host and on the device, poisoned, with poisoned margins around them. A margin of zero bytes
// behind lets memcheck see a read past the end.
class Twin {
 public:
  explicit Twin(int64_t bytes, int64_t before = kMargin, int64_t behind = kMargin)
      : bytes_(bytes), before_(before),
        host_(static_cast<size_t>(before + bytes + behind), static_cast<char>(kPoison)) {
    cuda::check(cudaMalloc(&device_, host_.size()), "cudaMalloc");
    copy_to_device(0, before);
    copy_to_device(before + bytes, behind);
  }
  ~Twin() { cudaFree(device_); }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  int64_t bytes() const { return bytes_; }

  template <typename T = char>
  T* host() {
    return reinterpret_cast<T*>(host_.data() + before_);
  }
  // Uninitialised but for the margins until upload(), so that initcheck sees what is read too early.
  template <typename T = char>
  T* device() const {
    return reinterpret_cast<T*>(static_cast<char*>(device_) + before_);
  }

  void upload() { copy_to_device(before_, bytes_); }

  // Random bytes in host()[from .. from + count).
  void fill(uint64_t seed, int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) {
      const uint64_t word = mix64(seed * kGolden + static_cast<uint64_t>(i));
      std::memcpy(host() + from + i, &word, static_cast<size_t>(std::min<int64_t>(8, count - i)));
    }
  }
  void fill(uint64_t seed) { fill(seed, 0, bytes_); }

  // The device's bytes without the margins, which must be as they were.
  template <typename T = char>
  std::vector<T> download() {
    const std::vector<char> all = copy_from_device();
    const auto poisoned = [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        if (static_cast<unsigned char>(all[static_cast<size_t>(i)]) != kPoison) return false;
      }
      return true;
    };
    CHECK(poisoned(0, before_));
    CHECK(poisoned(before_ + bytes_, static_cast<int64_t>(all.size())));
    std::vector<T> result(static_cast<size_t>(bytes_) / sizeof(T));
    if (bytes_ > 0) std::memcpy(result.data(), all.data() + before_, static_cast<size_t>(bytes_));
    return result;
  }

  // Whether host and device hold the same bytes, margins included.
  bool same() const { return copy_from_device() == host_; }

 private:
  void copy_to_device(int64_t from, int64_t count) {
    if (count == 0) return;
    cuda::check(cudaMemcpy(static_cast<char*>(device_) + from, host_.data() + from, static_cast<size_t>(count),
                           cudaMemcpyHostToDevice),
                "copy to the device");
  }
  std::vector<char> copy_from_device() const {
    std::vector<char> result(host_.size());
    cuda::check(cudaMemcpy(result.data(), device_, result.size(), cudaMemcpyDeviceToHost), "copy from the device");
    return result;
  }

  int64_t bytes_, before_;
  std::vector<char> host_;
  void* device_ = nullptr;
};

}  // namespace unirl::test
