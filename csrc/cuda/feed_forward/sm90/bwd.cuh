// SPDX-License-Identifier: Apache-2.0
// Feed-forward, backward: an epilogue on d_out w2 that writes d_pre, d_gate, recomputed hidden and
// partial bias gradients.
//
// The gemm's ring (matmul.cuh) loads pre and gate as panels during the gemm. Bias gradients are
// summed over 64 rows in a fixed order, one row of partials per consumer, which the caller adds. No
// atomics, so results are deterministic.
#pragma once

#include "cuda/feed_forward/sm90/activations.cuh"
#include "cuda/feed_forward/sm90/dropout.cuh"
#include "cuda/matmul/sm90/row_sums.cuh"

namespace pt::cuda {

// An epilogue. The activation and its derivative use pre and gate as stored.
template <Activation A, bool Gated>
struct DHidden {
  static constexpr int kPanels = Gated ? 2 : 1;  // pre, gate
  static constexpr uint32_t kScratch = kPanels * BiasSums::kBytes;
  HiddenDropout drop;
  MatrixOut d_pre, d_gate, hidden;
  float *b1_partials, *gate_bias_partials;

  PT_DEVICE void begin(const MatmulPlace&) const {}

  template <class T, int R>
  PT_DEVICE void finish(const MatmulPlace& place, const float (&x)[R],
                        const MatmulPanels& panels) const {
    const StripDropout dropout(drop);
    const BiasSums b1{place.scratch}, gate_bias{place.scratch + BiasSums::kBytes};
    const StripRows<T> d_pre_rows(d_pre, place), d_gate_rows(d_gate, place),
        hidden_rows(hidden, place);
    sync_consumer();  // the previous half's sums have been read
    PT_UNROLL
    for (int panel = 0; panel < R / 32; ++panel) {
      if (!place.has_panel(panel)) continue;
      panels.template visit<kPanels>([&](const PanelReader(&readers)[kPanels]) {
        PT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int strip = 2 * panel + half;
          uint32_t pre[2][4], gate[2][4];
          PT_UNROLL
          for (int i = 0; i < 2; ++i) {
            readers[0].load(pre[i], 4 * half + 2 * i);
            if constexpr (Gated) readers[1].load(gate[i], 4 * half + 2 * i);
          }
          float b1_sum[8] = {}, gate_sum[8] = {};
          PT_UNROLL
          for (int r = 0; r < 2; ++r) {
            float d[8], h[8], dg[8];
            PT_UNROLL
            for (int c = 0; c < 8; ++c) d[c] = x[sum_at(strip, r, c)];
            dropout.apply(d, place, strip, r);
            PT_UNROLL
            for (int c = 0; c < 8; ++c) {
              const auto read = [&](const uint32_t (&words)[2][4]) {
                const uint32_t two = words[c / 4][c / 2 % 2 * 2 + r];
                return ptx::widen(T{uint16_t(two >> 16 * (c % 2))});
              };
              const float p = read(pre);
              if constexpr (Gated) {
                const ValueSlope act = activate<A>(read(gate));
                h[c] = act.value * p;
                dg[c] = d[c] * p * act.slope;
                d[c] *= act.value;
                gate_sum[c] += dg[c];
              } else {
                const ValueSlope act = activate<A>(p);
                h[c] = act.value, d[c] *= act.slope;
              }
              b1_sum[c] += d[c];
            }
            if (d_pre.data) d_pre_rows.store(strip, r, d);
            if constexpr (Gated)
              if (d_gate.data) d_gate_rows.store(strip, r, dg);
            if (!hidden.data) continue;
            dropout.apply(h, place, strip, r);
            hidden_rows.store(strip, r, h);
          }
          if (b1_partials) b1.put(strip, b1_sum);
          if constexpr (Gated)
            if (gate_bias_partials) gate_bias.put(strip, gate_sum);
        }
      });
    }
    sync_consumer();
    b1.store(b1_partials, place);
    if constexpr (Gated) gate_bias.store(gate_bias_partials, place);
  }
};

}  // namespace pt::cuda
