// SPDX-License-Identifier: Apache-2.0
// The Hopper instructions that the attention kernels use, as thin functions over PTX: memory barriers, the tensor
// copy engine, warpgroup matrix products, named barriers, register budgets. Names follow the PTX manual.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace unirl::cuda::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- memory barriers -------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase of this parity is over, without waiting.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- named barriers of one block -------------------------------------------------------------------------------

__device__ __forceinline__ void named_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- tensor copies, always of five dimensions ------------------------------------------------------------------

struct Box {
  int32_t x0, x1, x2, x3, x4;
};

__device__ __forceinline__ void copy_to_shared(const CUtensorMap& map, uint32_t target, uint32_t barrier,
                                               const Box& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(at.x0), "r"(at.x1), "r"(at.x2), "r"(at.x3),
      "r"(at.x4)
      : "memory");
}

// `bytes` adjacent bytes, a multiple of 16 as both addresses.
__device__ __forceinline__ void copy_bytes_to_shared(const void* source, uint32_t target, uint32_t barrier,
                                                     uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void copy_from_shared(const CUtensorMap& map, uint32_t source, const Box& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          reinterpret_cast<uint64_t>(&map)),
      "r"(source), "r"(at.x0), "r"(at.x1), "r"(at.x2), "r"(at.x3), "r"(at.x4)
      : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the sources of this thread's committed stores may be overwritten.
__device__ __forceinline__ void copy_wait_sources() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void fence_shared_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                               uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Four 8 x 8 matrices, whose rows the lanes name eight at a time.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                              uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address)
               : "memory");
}

// ---- warpgroup matrix products ---------------------------------------------------------------------------------

// Shared-memory operands are panels of 64 two-byte columns (128 bytes a row, 128-byte swizzle), each panel aligned
// to 1024 bytes. An operand whose reduction runs along the columns: groups of eight rows lie 1024 bytes apart.
__device__ __forceinline__ uint64_t describe_row_panels(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// An operand whose reduction runs along the rows: 1024 bytes between groups of eight rows, `panel_bytes` between
// panels of columns.
__device__ __forceinline__ uint64_t describe_column_panels(uint32_t address, uint32_t panel_bytes) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(panel_bytes >> 4) << 16) |
         (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of accumulators across the asynchronous products.
template <typename T, int kCount>
__device__ __forceinline__ void pin(T (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

#define UNIRL_R8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define UNIRL_REGISTERS_32                                                                        \
  UNIRL_R8(0, 1, 2, 3, 4, 5, 6, 7) ", " UNIRL_R8(8, 9, 10, 11, 12, 13, 14, 15) ", " UNIRL_R8(     \
      16, 17, 18, 19, 20, 21, 22, 23) ", " UNIRL_R8(24, 25, 26, 27, 28, 29, 30, 31)
#define UNIRL_REGISTERS_64                                                                        \
  UNIRL_REGISTERS_32 ", " UNIRL_R8(32, 33, 34, 35, 36, 37, 38, 39) ", " UNIRL_R8(                 \
      40, 41, 42, 43, 44, 45, 46, 47) ", " UNIRL_R8(48, 49, 50, 51, 52, 53, 54, 55) ", " UNIRL_R8(\
      56, 57, 58, 59, 60, 61, 62, 63)

#define UNIRL_D8(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define UNIRL_ACCUMULATORS_32 UNIRL_D8(0), UNIRL_D8(8), UNIRL_D8(16), UNIRL_D8(24)
#define UNIRL_ACCUMULATORS_64 UNIRL_ACCUMULATORS_32, UNIRL_D8(32), UNIRL_D8(40), UNIRL_D8(48), UNIRL_D8(56)

// d[64 x columns] (+)= a b, both operands in shared memory. transpose 0: the reduction runs along the columns of both;
// 1: along the rows of both.
#define UNIRL_PRODUCT_SHARED(columns, type, count, a_operand, b_operand, p_operand, transpose)                             \
  asm volatile(                                                                                               \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " p_operand                                         \
      ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" UNIRL_REGISTERS_##count \
      "}, " a_operand ", " b_operand ", accumulate, 1, 1, " #transpose ", " #transpose ";\n}" \
      : UNIRL_ACCUMULATORS_##count                                                                            \
      : "l"(a), "l"(b), "r"(accumulate))

// d[64 x columns] += a b, a in registers, b in shared memory with the reduction along its rows.
#define UNIRL_PRODUCT_REGISTERS(columns, type, count, a_operands, b_operand)                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                          \
               " {" UNIRL_REGISTERS_##count "}, {" a_operands "}, " b_operand ", 1, 1, 1, 1;"                 \
               : UNIRL_ACCUMULATORS_##count                                                                   \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))

// 64 columns.
template <typename Element>
__device__ __forceinline__ void product_shared(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    UNIRL_PRODUCT_SHARED(64, "bf16", 32, "%32", "%33", "%34", 0);
  } else {
    UNIRL_PRODUCT_SHARED(64, "f16", 32, "%32", "%33", "%34", 0);
  }
}

// The same for operands whose reduction runs along their rows (describe_column_panels), 64 columns.
template <typename Element>
__device__ __forceinline__ void product_shared_columns(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    UNIRL_PRODUCT_SHARED(64, "bf16", 32, "%32", "%33", "%34", 1);
  } else {
    UNIRL_PRODUCT_SHARED(64, "f16", 32, "%32", "%33", "%34", 1);
  }
}

template <typename Element, int kCount>
__device__ __forceinline__ void product_registers(float (&d)[kCount], uint32_t a0, uint32_t a1, uint32_t a2,
                                                  uint32_t a3, uint64_t b) {
  constexpr bool kBfloat16 = std::is_same_v<Element, __nv_bfloat16>;
  static_assert(kCount == 32 || kCount == 64);
  if constexpr (kCount == 32 && kBfloat16)
    UNIRL_PRODUCT_REGISTERS(64, "bf16", 32, "%32, %33, %34, %35", "%36");
  if constexpr (kCount == 32 && !kBfloat16)
    UNIRL_PRODUCT_REGISTERS(64, "f16", 32, "%32, %33, %34, %35", "%36");
  if constexpr (kCount == 64 && kBfloat16)
    UNIRL_PRODUCT_REGISTERS(128, "bf16", 64, "%64, %65, %66, %67", "%68");
  if constexpr (kCount == 64 && !kBfloat16)
    UNIRL_PRODUCT_REGISTERS(128, "f16", 64, "%64, %65, %66, %67", "%68");
}

// d[64 x 128] (+)= a b, a in registers, b in shared memory with the reduction along its columns
// (describe_row_panels).
#define UNIRL_PRODUCT_ROW_PANELS(columns, type, count, a_operands, b_operand, p_operand)                      \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " p_operand                                \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                    \
               " {" UNIRL_REGISTERS_##count "}, {" a_operands "}, " b_operand ", accumulate, 1, 1, 0;\n}"     \
               : UNIRL_ACCUMULATORS_##count                                                                   \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate))

template <typename Element>
__device__ __forceinline__ void product_registers_row_panels(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                                             uint32_t a3, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    UNIRL_PRODUCT_ROW_PANELS(128, "bf16", 64, "%64, %65, %66, %67", "%68", "%69");
  } else {
    UNIRL_PRODUCT_ROW_PANELS(128, "f16", 64, "%64, %65, %66, %67", "%68", "%69");
  }
}

#undef UNIRL_PRODUCT_ROW_PANELS
#undef UNIRL_PRODUCT_REGISTERS
#undef UNIRL_PRODUCT_SHARED

// The matrix product of one warp alone, at once: d[16 x 8] += a b. Registers of a and d as a warpgroup product has them.
template <typename Element>
__device__ __forceinline__ void product_of_warp(float (&d)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
#define UNIRL_PRODUCT_OF_WARP(type)                                                                          \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                        \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    UNIRL_PRODUCT_OF_WARP("bf16");
  } else {
    UNIRL_PRODUCT_OF_WARP("f16");
  }
#undef UNIRL_PRODUCT_OF_WARP
}

// ---- order between blocks ----------------------------------------------------------------------------------------

__device__ __forceinline__ int32_t load_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(int32_t* address, int32_t value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Adds one, after what this thread has done before.
__device__ __forceinline__ void count_release(int32_t* address) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

// Orders what this thread has seen or done before, other threads' work included, for the whole GPU.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The same between threads of a block, through counters in shared memory.
__device__ __forceinline__ int32_t load_shared_acquire(uint32_t address) {
  int32_t value;
  asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_release(uint32_t address, int32_t value) {
  asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Stores four floats, or adds them to what is there, without a branch.
__device__ __forceinline__ void store_or_add(float* address, bool store, float a, float b, float c, float d) {
  asm volatile(
      "{\n"
      ".reg .pred store;\n"
      "setp.ne.u32 store, %5, 0;\n"
      "@store st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "@!store red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(address),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(static_cast<uint32_t>(store))
      : "memory");
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approximate(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Two floats rounded to nearest, the first in the low half.
template <typename Element>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace unirl::cuda::hopper
