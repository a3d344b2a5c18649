// SPDX-License-Identifier: Apache-2.0
// Feed-forward, forward: hidden from x w1^T and, gated, x gate_weight^T in the same tile.
#pragma once

#include "cuda/feed_forward/sm90/activations.cuh"
#include "cuda/feed_forward/sm90/dropout.cuh"
#include "cuda/matmul/sm90/epilogue.cuh"

namespace pt::cuda {

// An epilogue (matmul.cuh). The activation uses the unrounded sums.
template <Activation A, bool Gated>
struct Hidden {
  static constexpr int kProducts = Gated ? 2 : 1;
  static constexpr uint32_t kScratch = TileBias<kProducts>::kBytes;
  static constexpr int kPanels = 0;
  HiddenDropout drop;
  Bias bias[kProducts];  // b1, gate_bias
  MatrixOut hidden, pre, gate;

  PT_DEVICE void begin(const MatmulPlace& place) const { TileBias<kProducts>::bring(bias, place); }

  template <class T, int R>
  PT_DEVICE void finish(const MatmulPlace& place, const float (&x)[R], const MatmulPanels&) const {
    constexpr int kOf = R / kProducts;  // accumulators of one product
    const StripDropout dropout(drop);
    const TileBias<kProducts> biases(place);
    const StripRows<T> hidden_rows(hidden, place), pre_rows(pre, place), gate_rows(gate, place);
    PT_UNROLL
    for (int strip = 0; strip < kOf / 16; ++strip) {
      if (place.column + strip * kStripColumns >= place.columns) continue;
      float b[8], g[8];
      biases.load(b, 0, strip);
      if constexpr (Gated) biases.load(g, 1, strip);
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        float v[8], u[8];
        PT_UNROLL
        for (int c = 0; c < 8; ++c) {
          const int at = sum_at(strip, r, c);
          v[c] = x[at] + b[c];
          if constexpr (Gated) u[c] = x[kOf + at] + g[c];
        }
        if (pre.data) pre_rows.store(strip, r, v);
        if constexpr (Gated)
          if (gate.data) gate_rows.store(strip, r, u);
        if (!hidden.data) continue;
        PT_UNROLL
        for (int c = 0; c < 8; ++c) {
          if constexpr (Gated) {
            v[c] *= activate<A>(u[c]).value;
          } else {
            v[c] = activate<A>(v[c]).value;
          }
        }
        dropout.apply(v, place, strip, r);
        hidden_rows.store(strip, r, v);
      }
    }
  }
};

}  // namespace pt::cuda
