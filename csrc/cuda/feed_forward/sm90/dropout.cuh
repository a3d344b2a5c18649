// SPDX-License-Identifier: Apache-2.0
// Dropout of hidden where its sums are.
#pragma once

#include "cuda/feed_forward/problem.h"
#include "cuda/matmul/sm90/epilogue.cuh"
#include "cuda/tile/philox.cuh"

namespace pt::cuda {

class StripDropout {
 public:
  PT_DEVICE explicit StripDropout(const HiddenDropout& drop)
      : drops_(drop.threshold > 0), columns_(drops_ ? seed_of(drop) : 0, drop.threshold, kTagFeedForward + PT_FAULT(dropout_of_another_tag),
                                             drop.row_start, drop.column_start) {}

  // The lane's eight columns of a strip in its row r: dropped ones become 0 (a NaN too), others are scaled.
  PT_DEVICE void apply(float (&v)[8], const MatmulPlace& place, int strip, int r) const {
    if (!drops_) return;
    const int64_t row = place.own(r ^ PT_FAULT(dropout_of_the_lanes_other_row));
    const int first = (strip ^ PT_FAULT(dropout_of_the_strip_before)) * kStripColumns;
    const uint32_t keep = columns_.keep_fragment(row, uint32_t(place.column) + first);
    const float scale = PT_FAULT(kept_values_not_scaled) ? 1.0f : columns_.scale();
    PT_UNROLL
    for (int c = 0; c < 8; ++c) v[c] = keep >> c & 1 ? v[c] * scale : 0.0f;
  }

 private:
  static PT_DEVICE uint64_t seed_of(const HiddenDropout& drop) {
    return PT_FAULT(half_the_seed) ? ptx::ld_global_u32(drop.seed) : ptx::ld_global_u64(drop.seed);
  }

  bool drops_;
  ColumnDropout columns_;
};

}  // namespace pt::cuda
