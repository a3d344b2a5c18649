// SPDX-License-Identifier: Apache-2.0
// Column sums of an epilogue's results, for bias gradients: over 64 rows each, in a fixed order.
#pragma once

#include "cuda/matmul/sm90/epilogue.cuh"

namespace pt::cuda {

// Return the sum over the warp's 16 rows of column 8 (k / 2) + 2 (lane % 4) + k % 2 of 32, k = lane
// / 4. At each step a lane sends half of its columns to the lane with the other rows.
PT_DEVICE float sum_over_rows(const float (&v)[8]) {
  const bool upper = lane_id() & 16, middle = lane_id() & 8, odd = lane_id() & 4;
  float four[4], two[2];
  PT_UNROLL
  for (int i = 0; i < 4; ++i)
    four[i] = (upper ? v[4 + i] : v[i]) + ptx::shfl_xor(upper ? v[i] : v[4 + i], 16);
  PT_UNROLL
  for (int i = 0; i < 2; ++i)
    two[i] = (middle ? four[2 + i] : four[i]) + ptx::shfl_xor(middle ? four[i] : four[2 + i], 8);
  return (odd ? two[1] : two[0]) + ptx::shfl_xor(odd ? two[0] : two[1], 4);
}

// Sums of one bias per consumer: per warp in shared memory, (4, 128), then their total.
struct BiasSums {
  static constexpr int kColumns = kHalfColumns;
  static constexpr uint32_t kBytes = 4 * kColumns * sizeof(float);
  uint32_t at;

  PT_DEVICE void put(int strip, const float (&v)[8]) const {
    const int k = lane_id() / 4,
              column = strip * kStripColumns + 8 * (k / 2) + 2 * (lane_id() % 4) + k % 2;
    ptx::st_shared_f32(at + 4 * uint32_t(warp_row() % 64 / 16 * kColumns + column),
                       sum_over_rows(v));
  }
  // Called after a barrier of the consumer.
  PT_DEVICE void store(float* partials, const MatmulPlace& place) const {
    if (!partials || place.row >= place.rows) return;
    static_assert(kColumns == 128);  // one column per thread
    const int column = int(threadIdx.x) % 128;
    if (place.column + column >= place.columns) return;
    float sum = 0.0f;
    PT_UNROLL
    for (int warp = 0; warp < 4; ++warp)
      sum += ptx::ld_shared_f32(at + 4 * uint32_t(warp * kColumns + column));
    store_one(partials + place.row / kRowsOfAPart * place.columns + place.column + column, sum);
  }
};

}  // namespace pt::cuda
