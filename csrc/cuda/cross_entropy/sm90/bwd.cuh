// SPDX-License-Identifier: Apache-2.0
// Cross entropy, backward: the logits again, and from each what its gradient is.
#pragma once

#include "cuda/cross_entropy/sm90/labels.cuh"
#include "cuda/matmul/sm90/row_sums.cuh"

namespace pt::cuda {

// An epilogue (matmul.cuh).
struct DLogits {
  static constexpr uint32_t kScratch = TileBias<1>::kBytes + BiasSums::kBytes + 4 * RowStats::kBytes;
  static constexpr int kPanels = 0;
  Bias bias[1];
  Labels labels;
  const float *row_max, *log_sum, *g;
  MatrixOut d_logits;
  float* bias_partials;
  float share;  // on_each / classes

  // A lane's row. One without gradient has no other number: what it holds may be NaN.
  struct Row {
    bool counts;
    float row_max, log_sum, g;
    int64_t target;  // from the lane's first column on
  };
  PT_DEVICE Row row_of(const MatmulPlace& place, int r) const {
    if (place.own(r) >= place.rows) return {false, 0.0f, 0.0f, 0.0f, -1};
    const int target = int(numbers(place, 0).get(r));
    return {target >= 0, ptx::bits_float(numbers(place, 1).get(r)), ptx::bits_float(numbers(place, 2).get(r)),
            ptx::bits_float(numbers(place, 3 - PT_FAULT(lse_for_the_upstream_gradient)).get(r)),
            target - place.column - 2 * (lane_id() % 4)};
  }
  // Row stats in shared memory: the target (-1 without gradient), row_max, log_sum, g.
  static PT_DEVICE RowStats numbers(const MatmulPlace& place, int which) {
    return {place.scratch + TileBias<1>::kBytes + BiasSums::kBytes +
            uint32_t(PT_FAULT(a_rows_stats_in_one_place) ? 0 : which) * RowStats::kBytes};
  }

  PT_DEVICE void begin(const MatmulPlace& place) const {
    int target = 0;
    float m = 0.0f, l = 0.0f, row_g = 0.0f;
    RowStats::each(place, [&](int, int64_t row) {
      const int64_t class_of = target_of(labels, row);
      target = class_of == labels.ignore_index ? -1 : int(clamped(class_of, place.columns));
      m = load_one(row_max + row), l = load_one(log_sum + row), row_g = load_one(g + row);
    });
    TileBias<1>::bring(bias, place);
    RowStats::each(place, [&](int i, int64_t) {
      numbers(place, 0).put(i, uint32_t(target));
      numbers(place, 1).put(i, ptx::float_bits(m));
      numbers(place, 2).put(i, ptx::float_bits(l));
      numbers(place, 3).put(i, ptx::float_bits(row_g));
    });
  }

  template <class T, int R>
  PT_DEVICE void finish(const MatmulPlace& place, const float (&x)[R], const MatmulPanels&) const {
    const TileBias<1> biases(place);  // and the sums of the half before have been read
    const Row rows[2] = {row_of(place, 0), row_of(place, 1)};
    const StripRows<T> d_rows(d_logits, place);
    const BiasSums sums{place.scratch + TileBias<1>::kBytes};
    PT_UNROLL
    for (int strip = 0; strip < R / 16 - PT_FAULT(the_last_strip_left_out); ++strip) {
      if (place.column + strip * kStripColumns >= place.columns) continue;
      float b[8], sum[8];
      biases.load(b, 0, strip);
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Row& row = rows[r ^ PT_FAULT(the_gradient_of_the_other_row)];
        float v[8];
        PT_UNROLL
        for (int c = 0; c < 8; ++c) {
          const float z = x[sum_at(strip, r, c)] + (PT_FAULT(the_gradient_without_the_bias) ? 0.0f : b[c]);
          const float p = ptx::exp2((z - row.row_max - row.log_sum) * (PT_FAULT(exponentials_to_base_two) ? 1.0f : kLog2e));
          v[c] = p - (PT_FAULT(the_gradients_smoothing_left_out) ? 0.0f : share);
        }
        const int64_t at = row.target - strip * kStripColumns;
        if (at >= 0 && at < (PT_FAULT(targets_of_the_first_eight_columns) ? 8 : kStripColumns)) {
          PT_UNROLL
          for (int c = 0; c < 8; ++c)
            if (int(at) == c / 2 * 8 + (c % 2 ^ PT_FAULT(the_column_beside_the_target)))
              v[c] -= PT_FAULT(the_targets_gradient_keeps_its_share) ? 1.0f : labels.on_target;
        }
        PT_UNROLL
        for (int c = 0; c < 8; ++c) {
          const float g = PT_FAULT(the_upstream_gradient_left_out) ? 1.0f : row.g;
          v[c] = row.counts || PT_FAULT(ignored_rows_have_a_gradient) ? v[c] * g : 0.0f;
          sum[c] = r == 0 || PT_FAULT(class_bias_sums_of_one_row_of_two) ? v[c] : sum[c] + v[c];
        }
        if (d_logits.data) d_rows.store(strip, r, v);
      }
      if (bias_partials) sums.put(strip, sum);
    }
    if (!bias_partials) return;
    if (!PT_FAULT(class_bias_sums_read_before_they_are_there)) sync_consumer();
    sums.store(bias_partials, place);
  }
};

}  // namespace pt::cuda
