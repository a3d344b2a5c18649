// SPDX-License-Identifier: Apache-2.0
// Rings of buffers in shared memory: one thread fills them by TMA, and warpgroups consume them.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"

namespace pt::cuda {

PT_DEVICE void mbarrier_wait(uint32_t bar, uint32_t parity PT_SITE) {
  while (!ptx::mbarrier_try_wait(bar, parity PT_HERE)) {}
}

// Both sides number uses from 0. Use n occupies buffer n % Stages of `Bytes`, which has a "full"
// and an "empty" barrier.
template <int Stages, uint32_t Bytes>
class Buffers {
 public:
  static constexpr uint32_t kBytes = Bytes, kBufferBytes = Stages * kBytes,
                            kBarrierBytes = Stages * 16;

  PT_DEVICE Buffers(uint32_t buffers, uint32_t barriers) : buffers_(buffers), barriers_(barriers) {}

  // One thread of the block calls this before a fence and a barrier. Per use, `writers` commits and
  // `readers` releases complete a phase.
  PT_DEVICE void init(int writers, int readers, const char* name_full,
                      const char* name_empty PT_SITE) const {
    PT_UNROLL
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(full(s), uint32_t(writers) PT_HERE);
      ptx::mbarrier_init(empty(s), uint32_t(readers) PT_HERE);
      ptx::mbarrier_name(full(s), name_full, s);
      ptx::mbarrier_name(empty(s), name_empty, s);
    }
  }

  PT_DEVICE uint32_t buffer(int n) const { return buffers_ + uint32_t(n % Stages) * kBytes; }
  PT_DEVICE uint32_t full(int n) const { return barriers_ + uint32_t(n % Stages) * 16; }

  // Arrive at the full barrier; the first form also expects `bytes` of copies that signal full(n).
  PT_DEVICE void producer_commit(int n, uint32_t bytes PT_SITE) const {
    ptx::mbarrier_arrive_expect_tx(full(n), bytes PT_HERE);
  }
  PT_DEVICE void producer_commit(int n PT_SITE) const { ptx::mbarrier_arrive(full(n) PT_HERE); }
  PT_DEVICE void producer_acquire(int n PT_SITE) const {
    mbarrier_wait(empty(n), parity(n) ^ 1 PT_HERE);
  }
  PT_DEVICE void consumer_wait(int n PT_SITE) const { mbarrier_wait(full(n), parity(n) PT_HERE); }
  PT_DEVICE void consumer_release(int n PT_SITE) const { ptx::mbarrier_arrive(empty(n) PT_HERE); }

 private:
  PT_DEVICE uint32_t empty(int n) const { return full(n) + 8; }
  static PT_DEVICE uint32_t parity(int n) { return uint32_t(n / Stages) & 1; }

  uint32_t buffers_, barriers_;
};

// Each buffer has `Panels` panels of `Rows` rows of 128 bytes, swizzled, 64 columns per panel, and
// starts at a multiple of 1024. For a tensor with fewer columns, TMA writes zeros to the panels
// outside and counts their bytes.
template <int Stages, int Rows, int Panels>
class Ring : public Buffers<Stages, Panels * Rows * 128> {
  using Base = Buffers<Stages, Panels * Rows * 128>;

 public:
  static constexpr int kRows = Rows;
  static constexpr uint32_t kPanelBytes = Rows * 128;
  using Base::producer_commit, Base::producer_acquire, Base::Base, Base::buffer, Base::full,
      Base::kBytes;

  // Called by the producer thread, one of the writers: wait for the buffer, then load rows [row,
  // row + Rows) of a head. more: bytes of further copies that signal full(n).
  PT_DEVICE void load(int n, const ptx::TensorMap& map, int row, int head, int batch,
                      uint32_t more = 0 PT_SITE) const {
    producer_acquire(n PT_HERE);
    producer_commit(n, kBytes + more PT_HERE);
    PT_UNROLL
    for (int p = 0; p < Panels; ++p) {
      const uint32_t panel = buffer(n) + p * kPanelBytes;
      ptx::tma_load_4d(panel, map, full(n), p * 64, row, head, batch PT_HERE);
    }
  }
};

}  // namespace pt::cuda
