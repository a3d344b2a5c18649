// SPDX-License-Identifier: Apache-2.0
// What forward and backward share: where a row's target is, and numbers of rows that epilogues do not wait for.
#pragma once

#include "cuda/cross_entropy/problem.h"
#include "cuda/matmul/sm90/epilogue.cuh"
#include "cuda/tile/numbers.cuh"

namespace pt::cuda {

PT_DEVICE int64_t target_of(const Labels& labels, int64_t row) { return int64_t(ptx::ld_global_u64(labels.target + row)); }

// The class as one that exists: values are checked elsewhere, here no address leaves the row.
PT_DEVICE int64_t clamped(int64_t target, int64_t classes) { return target < 0 ? 0 : target < classes ? target : classes - 1; }

// A number for each of a consumer's 64 rows, in its scratch from a tile's first products on: what an epilogue would have to wait for.
struct RowStats {
  static constexpr uint32_t kBytes = 64 * 4;
  uint32_t at;

  // f(i, row) of the thread that has row i.
  template <class F>
  static PT_DEVICE void each(const MatmulPlace& place, F f) {
    const int i = int(threadIdx.x) % 128;
    if (i < 64 && place.row + i < place.rows) f(i, place.row + i);
  }
  PT_DEVICE void put(int i, uint32_t word) const { ptx::st_shared_u32(at + 4 * uint32_t(i), word); }
  // Of the lane's row r, which exists.
  PT_DEVICE uint32_t get(int r) const {
    const int row = warp_row() % 64 + lane_id() / 4 + 8 * r;
    return ptx::ld_shared_u32(at + 4 * uint32_t(row));
  }
};

}  // namespace pt::cuda
