// SPDX-License-Identifier: Apache-2.0
// Synchronization: warps, named barriers, mbarriers, fences and setmaxnreg.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::ptx {

// Warps: every lane takes part. These functions use CUDA's intrinsics where they exist, because the
// compiler knows that it must not move such a call into a branch.

// "Parallel Synchronization and Communication Instructions: bar.warp.sync".
PT_DEVICE void syncwarp(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::syncwarp(site);
#else
  __syncwarp();
#endif
}

// "Data Movement and Conversion Instructions: shfl.sync", mode bfly. Does not order memory
// accesses.
PT_DEVICE uint32_t shfl_xor_u32(uint32_t value, int lane_mask PT_SITE) {
#if defined(PT_EMULATE)
  return emu::shfl_xor(value, lane_mask, site);
#else
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
#endif
}
// "Data Movement and Conversion Instructions: shfl.sync", mode idx: returns the value of `lane`.
PT_DEVICE uint32_t shfl_u32(uint32_t value, int lane PT_SITE) {
#if defined(PT_EMULATE)
  return emu::shfl(value, lane, site);
#else
  return __shfl_sync(0xffffffffu, value, lane);
#endif
}
PT_DEVICE float shfl(float value, int lane PT_SITE) {
  return bits_float(shfl_u32(float_bits(value), lane PT_HERE));
}
template <class T>
PT_DEVICE const T* shfl(const T* p, int lane PT_SITE) {
  const auto bits = uint64_t(uintptr_t(p));
  const uint64_t low = shfl_u32(uint32_t(bits), lane PT_HERE),
                 high = shfl_u32(uint32_t(bits >> 32), lane PT_HERE);
  return reinterpret_cast<const T*>(uintptr_t(high << 32 | low));
}
// Mark a value that is equal in all lanes as warp-uniform. The compiler computes expressions of it
// once per warp, and wgmma reads descriptors from uniform registers.
PT_DEVICE uint32_t uniform(uint32_t value) {
#if defined(PT_EMULATE)
  return value;
#else
  return __shfl_sync(0xffffffffu, value, 0);
#endif
}
PT_DEVICE float shfl_xor(float value, int lane_mask PT_SITE) {
  return bits_float(shfl_xor_u32(float_bits(value), lane_mask PT_HERE));
}

// "Parallel Synchronization and Communication Instructions: bar", number 0, all threads of the
// block.
PT_DEVICE void syncthreads(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::bar_sync(0, int(blockDim.x), site);
#else
  __syncthreads();
#endif
}

// "Parallel Synchronization and Communication Instructions: bar", numbers 1 to 15. Pass a constant
// number: with a number in a register, ptxas reserves all 16 barriers.
PT_DEVICE void bar_sync(int id, int threads PT_SITE) {
#if defined(PT_EMULATE)
  emu::bar_sync(id, threads, site);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
PT_DEVICE void bar_arrive(int id, int threads PT_SITE) {
#if defined(PT_EMULATE)
  emu::bar_arrive(id, threads, site);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Mbarriers: 8 bytes of shared memory each.

// Name a barrier in the emulator's messages; does nothing on a GPU.
PT_DEVICE void mbarrier_name([[maybe_unused]] uint32_t bar, [[maybe_unused]] const char* name,
                             [[maybe_unused]] int index) {
#if defined(PT_EMULATE)
  emu::name_barrier(bar, name, index);
#endif
}

// "Parallel Synchronization and Communication Instructions: mbarrier.init".
PT_DEVICE void mbarrier_init(uint32_t bar, uint32_t count PT_SITE) {
#if defined(PT_EMULATE)
  emu::mbarrier_init(bar, count, site);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
#endif
}

// "Parallel Synchronization and Communication Instructions: mbarrier.arrive".
PT_DEVICE void mbarrier_arrive(uint32_t bar PT_SITE) {
#if defined(PT_EMULATE)
  emu::mbarrier_arrive(bar, site);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}

// "Parallel Synchronization and Communication Instructions: mbarrier.arrive", with .expect_tx.
PT_DEVICE void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes PT_SITE) {
#if defined(PT_EMULATE)
  emu::mbarrier_arrive_expect_tx(bar, bytes, site);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
#endif
}

// "Parallel Synchronization and Communication Instructions: mbarrier.test_wait, mbarrier.try_wait".
// Returns true once the phase of the given parity is complete; may return false early, so call it
// in a loop.
PT_DEVICE bool mbarrier_try_wait(uint32_t bar, uint32_t parity PT_SITE) {
#if defined(PT_EMULATE)
  return emu::mbarrier_try_wait(bar, parity, site);
#else
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(complete)
      : "r"(bar), "r"(parity)
      : "memory");
  return complete != 0;
#endif
}

// "Parallel Synchronization and Communication Instructions: membar / fence". Makes mbarrier
// initializations visible to the async proxy.
PT_DEVICE void fence_mbarrier_init(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::fence_mbarrier_init(site);
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// "Parallel Synchronization and Communication Instructions: membar / fence". Orders this thread's
// generic accesses to shared memory before later TMA or wgmma accesses.
PT_DEVICE void fence_proxy_async(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::fence_proxy_async(site);
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// "Miscellaneous Instructions: setmaxnreg". The count is a multiple of 8 from 24 to 256; every warp
// of the warpgroup executes it.
template <int Registers>
PT_DEVICE void setmaxnreg_inc(PT_ONLY_SITE) {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
#if defined(PT_EMULATE)
  emu::setmaxnreg(true, Registers, site);
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}
template <int Registers>
PT_DEVICE void setmaxnreg_dec(PT_ONLY_SITE) {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
#if defined(PT_EMULATE)
  emu::setmaxnreg(false, Registers, site);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

}  // namespace pt::ptx
