// SPDX-License-Identifier: Apache-2.0
// Dropout of hidden in accumulator layout.
#pragma once

#include "cuda/feed_forward/problem.h"
#include "cuda/matmul/sm90/epilogue.cuh"
#include "cuda/tile/philox.cuh"

namespace pt::cuda {

class StripDropout {
 public:
  PT_DEVICE explicit StripDropout(const HiddenDropout& drop)
      : drops_(drop.threshold > 0), columns_(drops_ ? seed_of(drop) : 0, drop.threshold,
                                             kTagFeedForward, drop.row_start, drop.column_start) {}

  // Apply to the lane's eight columns of a strip in its row r: dropped values become 0 (NaN too),
  // kept values are scaled.
  PT_DEVICE void apply(float (&v)[8], const MatmulPlace& place, int strip, int r) const {
    if (!drops_) return;
    const int64_t row = place.own(r);
    const int first = strip * kStripColumns;
    const uint32_t keep = columns_.keep_fragment(row, uint32_t(place.column) + first);
    const float scale = columns_.scale();
    PT_UNROLL
    for (int c = 0; c < 8; ++c) v[c] = keep >> c & 1 ? v[c] * scale : 0.0f;
  }

 private:
  static PT_DEVICE uint64_t seed_of(const HiddenDropout& drop) {
    return ptx::ld_global_u64(drop.seed);
  }

  bool drops_;
  ColumnDropout columns_;
};

}  // namespace pt::cuda
