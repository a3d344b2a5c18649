// Dropout of hidden where its sums are.
#pragma once

#include "cuda/feed_forward/problem.h"
#include "cuda/matmul/epilogue.cuh"
#include "cuda/tile/philox.cuh"

namespace pt::cuda {

class StripDropout {
 public:
  PT_DEVICE explicit StripDropout(const HiddenDropout& drop)
      : drops_(drop.threshold > 0), columns_(drops_ ? ptx::ld_global_u64(drop.seed) : 0, drop.threshold, kTagFeedForward) {}

  // The lane's eight columns of a strip in its row r: dropped ones become 0 (a NaN too), others are scaled.
  PT_DEVICE void apply(float (&v)[8], const MatmulPlace& place, int strip, int r) const {
    if (!drops_) return;
    const uint32_t keep = columns_.keep_fragment(place.own(r), uint32_t(place.column) + strip * kStripColumns);
    const float scale = columns_.scale();
    PT_UNROLL
    for (int c = 0; c < 8; ++c) v[c] = keep >> c & 1 ? v[c] * scale : 0.0f;
  }

 private:
  bool drops_;
  ColumnDropout columns_;
};

}  // namespace pt::cuda
