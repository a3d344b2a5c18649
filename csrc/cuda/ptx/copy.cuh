// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies between global and shared memory.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::ptx {

// Copies by the thread itself: sm_80 and later, generic proxy.

// "Data Movement and Conversion Instructions: cp.async", 16 bytes, bypassing L1. Copies `bytes` (0
// to 16) from src and fills the rest with zeros.
PT_DEVICE void cp_async_16(uint32_t dst, const void* src, uint32_t bytes PT_SITE) {
#if defined(PT_EMULATE)
  emu::cp_async(dst, src, bytes, site);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.async.commit_group".
PT_DEVICE void cp_async_commit(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::cp_async_commit(site);
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.async.wait_group". Waits until all but the last
// `Pending` groups of this thread are complete and visible to it; other threads see them after a
// barrier.
template <int Pending>
PT_DEVICE void cp_async_wait(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::cp_async_wait(Pending, site);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// Copies by the tensor memory accelerator (TMA): sm_90 and later, async proxy.

// "Data Movement and Conversion Instructions: prefetch, prefetchu".
PT_DEVICE void prefetch_tensor_map([[maybe_unused]] const TensorMap& map) {
#if !defined(PT_EMULATE)
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.async.bulk.tensor".
PT_DEVICE void tma_load_2d(uint32_t dst, const TensorMap& map, uint32_t bar, int x, int y PT_SITE) {
#if defined(PT_EMULATE)
  const int32_t coord[] = {x, y};
  emu::tma_load(dst, map, bar, 2, coord, site);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
      "l"(&map), "r"(bar), "r"(x), "r"(y)
      : "memory");
#endif
}
PT_DEVICE void tma_load_3d(uint32_t dst, const TensorMap& map, uint32_t bar, int x, int y,
                           int z PT_SITE) {
#if defined(PT_EMULATE)
  const int32_t coord[] = {x, y, z};
  emu::tma_load(dst, map, bar, 3, coord, site);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z)
      : "memory");
#endif
}
PT_DEVICE void tma_load_4d(uint32_t dst, const TensorMap& map, uint32_t bar, int x, int y, int z,
                           int w PT_SITE) {
#if defined(PT_EMULATE)
  const int32_t coord[] = {x, y, z, w};
  emu::tma_load(dst, map, bar, 4, coord, site);
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.async.bulk". Addresses and sizes are multiples of
// 16 bytes.
PT_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar PT_SITE) {
#if defined(PT_EMULATE)
  emu::bulk_load(dst, src, bytes, bar, site);
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.async.bulk", global[i] = shared[i].
PT_DEVICE void bulk_store(void* dst, uint32_t src, uint32_t bytes PT_SITE) {
#if defined(PT_EMULATE)
  emu::bulk_store(dst, src, bytes, site);
#else
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.reduce.async.bulk". global[i] += shared[i], each
// element atomically, in no order.
PT_DEVICE void bulk_reduce_add_f32(float* dst, uint32_t src, uint32_t bytes PT_SITE) {
#if defined(PT_EMULATE)
  emu::bulk_reduce_add_f32(dst, src, bytes, site);
#else
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.async.bulk.commit_group".
PT_DEVICE void bulk_commit(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::bulk_commit(site);
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// "Data Movement and Conversion Instructions: cp.async.bulk.wait_group". Waits until all but the
// last `Pending` groups of this thread have finished reading shared memory.
template <int Pending>
PT_DEVICE void bulk_wait_read(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::bulk_wait(Pending, true, site);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
#endif
}

// Like bulk_wait_read, but waits until their results are in global memory.
template <int Pending>
PT_DEVICE void bulk_wait(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::bulk_wait(Pending, false, site);
#else
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

}  // namespace pt::ptx
