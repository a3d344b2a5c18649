// SPDX-License-Identifier: Apache-2.0
// Rings of buffers in shared memory that one thread fills by TMA and warpgroups empty.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"

namespace pt::cuda {

PT_DEVICE void mbarrier_wait(uint32_t bar, uint32_t parity) {
  while (!ptx::mbarrier_try_wait(bar, parity)) {}
}

// Uses are numbered from 0 on by both sides; use n takes buffer n % Stages, of `Bytes`, each with a barrier "full" and one "empty".
template <int Stages, uint32_t Bytes>
class Buffers {
 public:
  static constexpr uint32_t kBytes = Bytes, kBufferBytes = Stages * kBytes, kBarrierBytes = Stages * 16;

  PT_DEVICE Buffers(uint32_t buffers, uint32_t barriers) : buffers_(buffers), barriers_(barriers) {}

  // By one thread of the block, before a fence and a barrier. Of each use: `writers` announce it, and `readers` call release().
  PT_DEVICE void init(int writers, int readers, const char* name_full, const char* name_empty) const {
    PT_UNROLL
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(full(s), uint32_t(writers));
      ptx::mbarrier_init(empty(s), uint32_t(PT_FAULT(a_reader_too_many) ? readers + 1 : readers));
      ptx::mbarrier_name(full(s), name_full, s);
      ptx::mbarrier_name(empty(s), name_empty, s);
    }
  }

  PT_DEVICE uint32_t buffer(int n) const { return buffers_ + uint32_t(PT_FAULT(stages_share_their_buffers) ? 0 : n % Stages) * kBytes; }
  PT_DEVICE uint32_t full(int n) const { return barriers_ + uint32_t(PT_FAULT(stages_share_their_barriers) ? 0 : n % Stages) * 16; }

  // A writer announces so many bytes, which copies that name full(n) bring, or what it wrote itself.
  PT_DEVICE void producer_commit(int n, uint32_t bytes) const { ptx::mbarrier_arrive_expect_tx(full(n), bytes); }
  PT_DEVICE void producer_commit(int n) const { ptx::mbarrier_arrive(full(n)); }
  PT_DEVICE void producer_acquire(int n) const { mbarrier_wait(empty(n), parity(n) ^ (PT_FAULT(phase_of_empty_flipped) ? 0 : 1)); }
  PT_DEVICE void consumer_wait(int n) const { mbarrier_wait(full(n), parity(n) ^ (PT_FAULT(phase_of_full_flipped) ? 1 : 0)); }
  PT_DEVICE void consumer_release(int n) const { ptx::mbarrier_arrive(empty(n)); }

 private:
  PT_DEVICE uint32_t empty(int n) const { return full(n) + 8; }
  static PT_DEVICE uint32_t parity(int n) { return uint32_t(PT_FAULT(a_phase_a_use) ? n : n / Stages) & 1; }

  uint32_t buffers_, barriers_;
};

// Each buffer is `Panels` panels of `Rows` rows of 128 bytes, swizzled, of a tensor with 64 columns a panel, and begins at a multiple of
// 1024. Of a tensor with fewer columns the other panels are boxes wholly outside: TMA writes zeros, and counts their bytes.
template <int Stages, int Rows, int Panels>
class Ring : public Buffers<Stages, Panels * Rows * 128> {
  using Base = Buffers<Stages, Panels * Rows * 128>;

 public:
  static constexpr int kRows = Rows;
  static constexpr uint32_t kPanelBytes = Rows * 128;
  using Base::producer_commit, Base::producer_acquire, Base::Base, Base::buffer, Base::full, Base::kBytes;

  // The producing thread, one of the writers: waits for the buffer, then loads rows [row, row + Rows) of a head.
  PT_DEVICE void load(int n, const ptx::TensorMap& map, int row, int head, int batch) const {
    if (!PT_FAULT(loaded_before_it_is_empty)) producer_acquire(n);
    producer_commit(n, PT_FAULT(half_the_bytes_expected) ? kBytes / 2 : kBytes);
    PT_UNROLL
    for (int p = 0; p < (PT_FAULT(panels_left_out) ? (Panels + 1) / 2 : Panels); ++p) {
      const uint32_t panel = PT_FAULT(ring_panels_on_top_of_each_other) ? buffer(n) : buffer(n) + p * kPanelBytes;
      ptx::tma_load_4d(panel, map, full(n), PT_FAULT(the_first_panel_twice) ? 0 : p * 64, row, head, batch);
    }
  }
};

}  // namespace pt::cuda
