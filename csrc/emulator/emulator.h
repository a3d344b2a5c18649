// SPDX-License-Identifier: Apache-2.0
// Host emulation of the part of PTX that the kernels use (csrc/cuda/ptx).
//
// A few thread blocks run at a time. Their threads are fibers that a seeded scheduler interleaves
// at random. Asynchronous engines (TMA, tensor cores) are events at a random time between issue and
// completion. Every device-side function emulates one PTX instruction.
//
// The emulator is deliberately stricter than a GPU: it stops with a message at the first operation
// that the PTX ISA leaves undefined, instead of computing a plausible result. See
// docs/cuda/emulator.md for its checks and limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "emulator/numbers.h"
#include "emulator/sites.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// CUDA's built-in variables. The scheduler sets them whenever it resumes a fiber.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {

// Host side.

enum class Swizzle { None = 0, B32 = 1, B64 = 2, B128 = 3 };

// Stand-in for CUtensorMap. Dimension 0 is the innermost one; stride[0] is unused.
struct TensorMap {
  const uint8_t* base = nullptr;
  int elem_bytes = 0;
  int rank = 0;
  uint64_t dim[5] = {};
  uint64_t stride[5] = {};  // bytes
  uint32_t box[5] = {};
  Swizzle swizzle = Swizzle::None;
};

// Scope in which kernels may access a range of global memory; other addresses are out of bounds.
class GlobalMemory {
 public:
  GlobalMemory(const void* base, size_t bytes, std::string name);
  GlobalMemory(const GlobalMemory&) = delete;
  ~GlobalMemory();

 private:
  int number_;
};

struct Options {
  uint64_t seed = 1;
  bool race_check = true;  // happens-before checks, beyond the data-based ones
  int resident = 3;        // concurrent blocks (at most 4)
  // Fail if two blocks' bulk reductions add to the same place in an order that no counter enforces.
  // Places are compared by their first element.
  bool ordered_reductions = false;
  size_t smem_limit = 232448;  // max bytes of dynamic shared memory per block
};

struct Report {
  std::string error;  // empty: the launch completed
  uint64_t switches = 0, products = 0, warpgroup_products = 0, copies = 0;
};

Report launch(dim3 grid, dim3 block, size_t smem_bytes, const std::function<void()>& kernel,
              const Options& options);

// Device side: called by the fibers.

[[noreturn]] void fail(const std::string& message);

// The last argument is the call's site (sites.h), for planted faults.

// Shared memory.
uint32_t dynamic_smem();
void st_shared(uint32_t addr, const void* value, int bytes, const Site& site);
void ld_shared(uint32_t addr, void* value, int bytes, const Site& site);
void fence_proxy_async(const Site& site);

// Global memory.
void ld_global(const void* p, void* value, int bytes, const Site& site);
void st_global(void* p, const void* value, int bytes, const Site& site);
void red_add_f32(float* dst, const float* value, int n, const Site& site);
uint32_t atomic_add(uint32_t* p, uint32_t value, bool release, const Site& site);
uint64_t acq_rel_add(uint64_t* p, uint64_t value, const Site& site);
uint64_t atomic_cas(uint64_t* p, uint64_t expected, uint64_t value, const Site& site);
void wait_equal(const uint32_t* p, uint32_t value, const Site& site);  // acquires

// Barriers.
void bar_sync(int id, int threads, const Site& site);
void bar_arrive(int id, int threads, const Site& site);
void name_barrier(uint32_t bar, const char* name, int index);
void mbarrier_init(uint32_t bar, uint32_t count, const Site& site);
void mbarrier_arrive(uint32_t bar, const Site& site);
void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes, const Site& site);
// returns once the result is true
bool mbarrier_try_wait(uint32_t bar, uint32_t parity, const Site& site);
void fence_mbarrier_init(const Site& site);

// Copies.
void cp_async(uint32_t dst, const void* src, uint32_t bytes, const Site& site);
void cp_async_commit(const Site& site);
void cp_async_wait(int pending_groups, const Site& site);
void tma_load(uint32_t dst, const TensorMap& map, uint32_t bar, int rank, const int32_t* coord,
              const Site& site);
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, const Site& site);
void bulk_store(void* dst, uint32_t src, uint32_t bytes, const Site& site);
void bulk_reduce_add_f32(float* dst, uint32_t src, uint32_t bytes, const Site& site);
void bulk_commit(const Site& site);
void bulk_wait(int pending_groups, bool only_read, const Site& site);

// Warps.
void syncwarp(const Site& site);
uint32_t shfl(uint32_t value, int lane, const Site& site);
uint32_t shfl_xor(uint32_t value, int lane_mask, const Site& site);
void ldmatrix_x4(uint32_t row_addr, uint32_t* matrices, bool transposed, const Site& site);
void stmatrix_x4(uint32_t row_addr, const uint32_t* matrices, const Site& site);
void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, bool f16, const Site& site);

// Warpgroups.
void setmaxnreg(bool increase, int registers, const Site& site);
void wgmma_fence(const Site& site);
void wgmma_commit(const Site& site);
void wgmma_wait(int pending_groups, const Site& site);
// a_regs != nullptr: A comes from registers, and desc_a is ignored.
void wgmma(int n, bool f16, float* acc, const uint32_t* a_regs, uint64_t desc_a, bool trans_a,
           uint64_t desc_b, bool trans_b, bool scale_d, const Site& site);

}  // namespace emu
