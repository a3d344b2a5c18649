// SPDX-License-Identifier: Apache-2.0
// Shared by forward and backward: targets, and row stats that epilogues read without a wait.
#pragma once

#include "cuda/cross_entropy/problem.h"
#include "cuda/matmul/sm90/epilogue.cuh"
#include "cuda/tile/numbers.cuh"

namespace pt::cuda {

PT_DEVICE int64_t target_of(const Labels& labels, int64_t row) {
  return int64_t(ptx::ld_global_u64(labels.target + row));
}

// Clamp to an existing class. The caller checks values; the clamp only keeps addresses in the row.
PT_DEVICE int64_t clamped(int64_t target, int64_t classes) {
  return target < 0 ? 0 : target < classes ? target : classes - 1;
}

// One value per row of a consumer, 64 in all, in its scratch. Loaded during a tile's first gemms,
// so the epilogue does not wait for global memory.
struct RowStats {
  static constexpr uint32_t kBytes = 64 * 4;
  uint32_t at;

  // Call f(i, row) in the thread that loads row i.
  template <class F>
  static PT_DEVICE void each(const MatmulPlace& place, F f) {
    const int i = int(threadIdx.x) % 128;
    if (i < 64 && place.row + i < place.rows) f(i, place.row + i);
  }
  PT_DEVICE void put(int i, uint32_t word) const { ptx::st_shared_u32(at + 4 * uint32_t(i), word); }
  // Return the value of the lane's row r, which exists.
  PT_DEVICE uint32_t get(int r) const {
    const int row = warp_row() % 64 + lane_id() / 4 + 8 * r;
    return ptx::ld_shared_u32(at + 4 * uint32_t(row));
  }
};

}  // namespace pt::cuda
