// SPDX-License-Identifier: Apache-2.0
// Teams of threads that share a row, and their sums. Every member gets the same sum, added in a
// fixed order.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/memory.cuh"

namespace pt::cuda {

struct Sum2 {
  float a, b;
};
PT_DEVICE Sum2 operator+(Sum2 x, Sum2 y) { return {x.a + y.a, x.b + y.b}; }

PT_DEVICE float shfl_sum(float x, int d) { return ptx::shfl_xor(x, d); }
PT_DEVICE Sum2 shfl_sum(Sum2 x, int d) { return {ptx::shfl_xor(x.a, d), ptx::shfl_xor(x.b, d)}; }
PT_DEVICE void st_shared_sum(uint32_t addr, float x) { ptx::st_shared_f32(addr, x); }
PT_DEVICE void st_shared_sum(uint32_t addr, Sum2 x) { ptx::st_shared_v2_f32(addr, x.a, x.b); }
PT_DEVICE void ld_shared_sum(uint32_t addr, float& x) { x = ptx::ld_shared_f32(addr); }
PT_DEVICE void ld_shared_sum(uint32_t addr, Sum2& x) { ptx::ld_shared_v2_f32(addr, x.a, x.b); }

// `lanes` (4, 8, 16 or 32) neighboring lanes of a warp. Every lane of the warp calls sum().
struct LaneTeam {
  int lanes;

  PT_DEVICE explicit LaneTeam(int lanes_) : lanes(lanes_) {}
  PT_DEVICE int size() const { return lanes; }
  PT_DEVICE int rank() const { return int(threadIdx.x) % lanes; }
  PT_DEVICE int team() const { return int(threadIdx.x) / lanes; }  // index within the block
  PT_DEVICE int teams() const { return int(blockDim.x) / lanes; }
  PT_DEVICE int first_of_warp() const { return int(threadIdx.x) / 32 * 32 / lanes; }
  // dynamic shared memory used by sums, from its start
  PT_DEVICE uint32_t smem_bytes() const { return 0; }

  PT_DEVICE float sum(float x) { return sum_of(x); }
  PT_DEVICE Sum2 sum(Sum2 x) { return sum_of(x); }
  PT_DEVICE uint32_t max(uint32_t x) {
    PT_UNROLL
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = ptx::shfl_xor_u32(x, d);
      if (d < lanes && other > x) x = other;
    }
    return x;
  }

 private:
  template <class X>
  PT_DEVICE X sum_of(X x) {
    PT_UNROLL
    for (int d = 1; d < 32; d *= 2)
      if (d < lanes) x = x + shfl_sum(x, d);
    return x;
  }
};

// The full block, at most 32 warps. Two alternating buffers need only one barrier per sum: a thread
// that rewrites a buffer has passed the barrier of the sum in between, which no thread reaches
// before its reads.
struct BlockTeam {
  uint32_t buffer;
  int turn = 0;
  // Size of one buffer: full 16-byte pieces, the granularity of the emulator's checks.
  static constexpr uint32_t buffer_bytes(int threads) {
    return (threads / 32 * sizeof(Sum2) + 15) / 16 * 16;
  }

  PT_DEVICE explicit BlockTeam(int) : buffer(ptx::dynamic_smem()) {}
  PT_DEVICE int size() const { return int(blockDim.x); }
  PT_DEVICE int rank() const { return int(threadIdx.x); }
  PT_DEVICE int team() const { return 0; }
  PT_DEVICE int teams() const { return 1; }
  PT_DEVICE int first_of_warp() const { return 0; }
  PT_DEVICE uint32_t smem_bytes() const { return 2 * buffer_bytes(int(blockDim.x)); }

  PT_DEVICE float sum(float x) { return sum_of(x); }
  PT_DEVICE Sum2 sum(Sum2 x) { return sum_of(x); }

 private:
  template <class X>
  PT_DEVICE X sum_of(X x) {
    x = LaneTeam(32).sum(x);
    const int warps = int(blockDim.x) / 32;
    const uint32_t at = buffer + turn * buffer_bytes(int(blockDim.x));
    turn ^= 1;
    if (threadIdx.x % 32 == 0) st_shared_sum(at + threadIdx.x / 32 * sizeof(Sum2), x);
    ptx::syncthreads();
    X total{};
    for (int w = 0; w < warps; ++w) {
      X one;
      ld_shared_sum(at + w * sizeof(Sum2), one);
      total = total + one;
    }
    return total;
  }
};

}  // namespace pt::cuda
