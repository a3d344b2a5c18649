// SPDX-License-Identifier: Apache-2.0
// Cross entropy, backward: recomputes the logits and turns each into its gradient.
#pragma once

#include "cuda/cross_entropy/sm90/labels.cuh"
#include "cuda/cross_entropy/sm90/softcap.cuh"
#include "cuda/matmul/sm90/row_sums.cuh"

namespace pt::cuda {

// Parameters of backward with softcap, class weights or z-loss; empty without.
template <bool kOptions>
struct DLogitsOptions {};
template <>
struct DLogitsOptions<true> {
  const float* p_factor;
  Softcap<true> softcap;  // cap 0: none
};

// An epilogue (matmul.cuh).
template <bool kOptions>
struct DLogits {
  static constexpr uint32_t kScratch =
      TileBias<1>::kBytes + BiasSums::kBytes + (kOptions ? 5 : 4) * RowStats::kBytes;
  static constexpr int kPanels = 0;
  Bias bias[1];
  Labels labels;
  const float *row_max, *log_sum, *g;
  MatrixOut d_logits;
  float* bias_partials;
  float share;  // on_each / classes
  DLogitsOptions<kOptions> options;

  // Row stats of a lane's row. Without gradient they are not read, because they may be NaN.
  struct Row {
    bool counts;
    float row_max, log_sum, g;
    int64_t target;  // relative to the lane's first column
  };
  PT_DEVICE Row row_of(const MatmulPlace& place, int r) const {
    if (place.own(r) >= place.rows) return {false, 0.0f, 0.0f, 0.0f, -1};
    const int target = int(numbers(place, 0).get(r));
    return {target >= 0, ptx::bits_float(numbers(place, 1).get(r)),
            ptx::bits_float(numbers(place, 2).get(r)), ptx::bits_float(numbers(place, 3).get(r)),
            target - place.column - 2 * (lane_id() % 4)};
  }
  PT_DEVICE float p_factor_of(const MatmulPlace& place, int r) const {
    return place.own(r) < place.rows ? ptx::bits_float(numbers(place, 4).get(r)) : 0.0f;
  }
  // Row stats in shared memory: the target (-1 without gradient), row_max, log_sum, g, p_factor.
  static PT_DEVICE RowStats numbers(const MatmulPlace& place, int which) {
    return {place.scratch + TileBias<1>::kBytes + BiasSums::kBytes +
            uint32_t(which) * RowStats::kBytes};
  }

  PT_DEVICE void begin(const MatmulPlace& place) const {
    int target = 0;
    float m = 0.0f, l = 0.0f, row_g = 0.0f, row_p = 0.0f;
    RowStats::each(place, [&](int, int64_t row) {
      const int64_t class_of = target_of(labels, row);
      target = class_of == labels.ignore_index ? -1 : int(clamped(class_of, place.columns));
      m = load_one(row_max + row), l = load_one(log_sum + row), row_g = load_one(g + row);
      if constexpr (kOptions) row_p = load_one(options.p_factor + row);
    });
    TileBias<1>::bring(bias, place);
    RowStats::each(place, [&](int i, int64_t) {
      numbers(place, 0).put(i, uint32_t(target));
      numbers(place, 1).put(i, ptx::float_bits(m));
      numbers(place, 2).put(i, ptx::float_bits(l));
      numbers(place, 3).put(i, ptx::float_bits(row_g));
      if constexpr (kOptions) numbers(place, 4).put(i, ptx::float_bits(row_p));
    });
  }

  template <class T, int R>
  PT_DEVICE void finish(const MatmulPlace& place, const float (&x)[R], const MatmulPanels&) const {
    const TileBias<1> biases(place);  // also: the previous half's sums have been read
    const Row rows[2] = {row_of(place, 0), row_of(place, 1)};
    float p_factor[2] = {};
    if constexpr (kOptions)
      p_factor[0] = p_factor_of(place, 0), p_factor[1] = p_factor_of(place, 1);
    const StripRows<T> d_rows(d_logits, place);
    const BiasSums sums{place.scratch + TileBias<1>::kBytes};
    PT_UNROLL
    for (int strip = 0; strip < R / 16; ++strip) {
      if (place.column + strip * kStripColumns >= place.columns) continue;
      float b[8], sum[8];
      biases.load(b, 0, strip);
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Row& row = rows[r];
        float v[8];
        if constexpr (kOptions) {
          const int64_t at = row.target - strip * kStripColumns;
          const int hit = at >= 0 && at < kStripColumns ? int(at) : -1;
          PT_UNROLL
          for (int c = 0; c < 8; ++c)
            v[c] = with_options(row, p_factor[r], x[sum_at(strip, r, c)] + b[c],
                                hit == c / 2 * 8 + c % 2);
        } else {
          PT_UNROLL
          for (int c = 0; c < 8; ++c) {
            const float z = x[sum_at(strip, r, c)] + b[c];
            const float p = ptx::exp2((z - row.row_max - row.log_sum) * kLog2e);
            v[c] = p - share;
          }
          const int64_t at = row.target - strip * kStripColumns;
          if (at >= 0 && at < kStripColumns) {
            PT_UNROLL
            for (int c = 0; c < 8; ++c)
              if (int(at) == c / 2 * 8 + c % 2) v[c] -= labels.on_target;
          }
        }
        PT_UNROLL
        for (int c = 0; c < 8; ++c) {
          const float g = kOptions ? 1.0f : row.g;
          v[c] = row.counts ? v[c] * g : 0.0f;
          sum[c] = r == 0 ? v[c] : sum[c] + v[c];
        }
        if (d_logits.data) d_rows.store(strip, r, v);
      }
      if (bias_partials) sums.put(strip, sum);
    }
    if (!bias_partials) return;
    sync_consumer();
    sums.store(bias_partials, place);
  }

 private:
  // Return the gradient of one logit u with softcap, class weights or z-loss.
  PT_DEVICE float with_options(const Row& row, float p_factor, float u, bool is_target) const {
    float z = u, t = 0.0f;
    if (options.softcap.cap != 0.0f) {
      t = tanh_of(u * options.softcap.inverse);
      z = options.softcap.cap * t;
    }
    const float p = ptx::exp2((z - row.row_max - row.log_sum) * kLog2e);
    const float q = is_target ? share + labels.on_target : share;
    return (p_factor * p - row.g * q) * ((1.0f - t) * (1.0f + t));
  }
};

}  // namespace pt::cuda
