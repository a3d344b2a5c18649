// SPDX-License-Identifier: Apache-2.0
// Cross entropy, forward. The first kernel is a gemm whose epilogue reduces each row's logits in a
// class tile; it stores no logits. The second merges a row's partials in order to lse and loss.
#pragma once

#include "cuda/cross_entropy/sm90/labels.cuh"
#include "cuda/cross_entropy/sm90/plan.h"
#include "cuda/cross_entropy/sm90/softcap.cuh"

namespace pt::cuda {

// Online softmax of a row's logits: the maximum, and the sum of exp(logit - maximum).
struct OnlineSoftmax {
  float row_max, sum;

  // Return the value to subtract before exponentials: 0 if every logit is -inf.
  static PT_DEVICE float safe(float row_max) {
    return row_max == minus_infinity() ? 0.0f : row_max;
  }
  PT_DEVICE void add(const OnlineSoftmax& b) {
    const float larger = fmaxf(row_max, b.row_max), base = safe(larger);
    const float alpha = ptx::exp2((row_max - base) * kLog2e);
    sum = sum * alpha + b.sum * ptx::exp2((b.row_max - base) * kLog2e);
    row_max = larger;
  }
};

// Reduce over the four lanes that share a row.
PT_DEVICE float sum_over_quad(float x) {
  x += ptx::shfl_xor(x, 1);
  return x + ptx::shfl_xor(x, 2);
}
PT_DEVICE float quad_max(float x) {
  x = fmaxf(x, ptx::shfl_xor(x, 1));
  return fmaxf(x, ptx::shfl_xor(x, 2));
}

// Base of the epilogue; empty if it stores no exponentials.
template <bool kStores>
struct Exponentials {};
template <>
struct Exponentials<true> {
  MatrixOut exponentials;
};

// An epilogue (matmul.cuh).
template <bool kSoftcap, bool kStores>
struct RowPartials : Softcap<kSoftcap>, Exponentials<kStores> {
  static constexpr uint32_t kScratch = TileBias<1>::kBytes + RowStats::kBytes;
  static constexpr int kPanels = 0;
  Bias bias[1];
  Labels labels;
  float *partials, *picked;
  int64_t tiles;  // number of class tiles

  PT_DEVICE void begin(const MatmulPlace& place) const {
    uint32_t target = 0;
    RowStats::each(place, [&](int, int64_t row) {
      target = uint32_t(clamped(target_of(labels, row), place.columns));
    });
    if (bias[0].data) TileBias<1>::bring(bias, place);  // language models seldom have one
    else sync_consumer();                               // the previous targets were read
    RowStats::each(place, [&](int i, int64_t) { targets(place).put(i, target); });
  }

  template <class T, int R>
  PT_DEVICE void finish(const MatmulPlace& place, const float (&x)[R], const MatmulPanels&) const {
    const TileBias<1> biases(place);
    const int64_t left = place.columns - place.column;
    // classes, from the lane's first column on
    const int end = int(left < 2 * R ? left : 2 * R) - 2 * (lane_id() % 4);
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      float z[R / 2];  // in the registers of the accumulators
      PT_UNROLL
      for (int strip = 0; strip < R / 16; ++strip) {
        PT_UNROLL
        for (int c = 0; c < 8; ++c) z[8 * strip + c] = x[sum_at(strip, r, c)];
      }
      if (bias[0].data) {
        PT_UNROLL
        for (int strip = 0; strip < R / 16; ++strip) {
          float b[8];
          biases.load(b, 0, strip);
          PT_UNROLL
          for (int c = 0; c < 8; ++c) z[8 * strip + c] += b[c];
        }
      }
      if constexpr (kSoftcap) {
        PT_UNROLL
        for (int i = 0; i < R / 2; ++i) z[i] = this->capped(z[i]);
      }
      finish_row(place, z, end, r);
      if constexpr (kStores) {
        const StripRows<T> rows(this->exponentials, place);
        PT_UNROLL
        for (int strip = 0; strip < R / 16; ++strip)
          rows.store(strip, r, reinterpret_cast<const float (&)[8]>(z[8 * strip]));
      }
    }
  }

 private:
  static PT_DEVICE RowStats targets(const MatmulPlace& place) {
    return {place.scratch + TileBias<1>::kBytes};
  }
  // Column of the lane's element i, relative to its first column.
  static PT_HOST_DEVICE constexpr int column_of(int i) { return i / 2 * 8 + i % 2; }

  // Reduce the logits z of a row and replace them by their exponentials.
  template <int N>
  PT_DEVICE void finish_row(const MatmulPlace& place, float (&z)[N], int end, int r) const {
    const int64_t row = place.own(r);
    if (row < place.rows) pick(place, z, r);
    float total = 0.0f;
    if (labels.on_each > 0.0f) {
      PT_UNROLL
      for (int i = 0; i < N; ++i) total += column_of(i) < end ? z[i] : 0.0f;
    }
    if (end < 4 * N - 6) {  // some columns are past the last class
      PT_UNROLL
      for (int i = 0; i < N; ++i) z[i] = column_of(i) < end ? z[i] : minus_infinity();
    }
    float row_max = minus_infinity(), sum = 0.0f;
    PT_UNROLL
    for (int i = 0; i < N; ++i) row_max = fmaxf(row_max, z[i]);
    row_max = quad_max(row_max);
    const float base = OnlineSoftmax::safe(row_max);
    PT_UNROLL
    for (int i = 0; i < N; ++i) sum += z[i] = ptx::exp2((z[i] - base) * kLog2e);
    sum = sum_over_quad(sum);
    if (labels.on_each > 0.0f) total = sum_over_quad(total);
    // Store each partial with a different lane.
    const int kind = lane_id() % 4;
    if (row < place.rows && kind < (labels.on_each > 0.0f ? 3 : 2)) {
      float* const part = partials + (kind * tiles + place.column / kClassTile) * place.rows;
      store_one(part + row, kind == 0 ? row_max : kind == 1 ? sum : total);
    }
  }

  // Store the target's logit. Few rows have their target in this tile.
  template <int N>
  PT_DEVICE void pick(const MatmulPlace& place, const float (&z)[N], int r) const {
    const int64_t at = int64_t(targets(place).get(r)) - place.column - 2 * (lane_id() % 4);
    if (at < 0 || at >= 4 * N || at % 8 > 1) return;
    float found = 0.0f;
    PT_UNROLL
    for (int i = 0; i < N; ++i)
      if (column_of(i) == int(at)) found = z[i];
    store_one(picked + place.own(r), found);
  }
};

// 32 rows per block: warp w merges the tiles w, w + 8, ..., then the first warp merges the warps.
__global__ void __launch_bounds__(32 * kLossWarps)
    cross_entropy_loss_kernel(const __grid_constant__ LossProblem f) {
  const int warp = int(threadIdx.x) / 32;
  const int64_t row = int64_t(blockIdx.x) * 32 + lane_id();
  const bool here = row < f.rows, smooth = f.labels.on_each > 0.0f;
  const uint32_t shared = ptx::dynamic_smem();
  const auto at = [&](int kind, int of) {
    return shared + 4 * uint32_t((kind * kLossWarps + of) * 32 + lane_id());
  };
  OnlineSoftmax all{minus_infinity(), 0.0f};
  float total = 0.0f;
  if (here) {
    for (int64_t tile = warp; tile < f.tiles; tile += kLossWarps) {
      const float* p = f.partials + tile * f.rows + row;
      const int64_t kind = f.tiles * f.rows;
      all.add({load_one(p), load_one(p + kind)});
      if (smooth) total += load_one(p + 2 * kind);
    }
  }
  ptx::st_shared_f32(at(0, warp), all.row_max);
  ptx::st_shared_f32(at(1, warp), all.sum);
  ptx::st_shared_f32(at(2, warp), total);
  ptx::syncthreads();
  if (warp != 0 || !here) return;
  for (int w = 1; w < kLossWarps; ++w) {
    all.add({ptx::ld_shared_f32(at(0, w)), ptx::ld_shared_f32(at(1, w))});
    total += ptx::ld_shared_f32(at(2, w));
  }
  const float log_sum = ptx::log2(all.sum) * kLn2;
  const float picked = load_one(f.picked + row) - all.row_max;
  float loss = log_sum - f.labels.on_target * picked;
  const float classes = float(f.classes);
  if (smooth) loss -= f.labels.on_each * (total / classes - all.row_max);
  store_one(f.row_max + row, all.row_max), store_one(f.log_sum + row, log_sum);
  store_one(f.loss + row, target_of(f.labels, row) == f.labels.ignore_index ? 0.0f : loss);
}

}  // namespace pt::cuda
