// SPDX-License-Identifier: Apache-2.0
// Cross entropy with gradients in forward. One kernel turns the exponentials that forward's gemm
// stored into d_logits, so that the gemm of the logits does not run again. Another scales the
// gradients in backward. Both read and write each number once.
#pragma once

#include "cuda/cross_entropy/sm90/labels.cuh"
#include "cuda/cross_entropy/sm90/plan.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

// A row's values in shared memory, which the block's first threads load.
struct DLogitsRow {
  float row_max, log_sum, p_factor;
  float share;      // g on_each / classes
  float at_target;  // d_logits of the target
  int target;       // -1 without gradient

  static constexpr uint32_t kBytes = 6 * 4;
  PT_DEVICE void put(uint32_t at) const {
    ptx::st_shared_f32(at, row_max), ptx::st_shared_f32(at + 4, log_sum);
    ptx::st_shared_f32(at + 8, p_factor), ptx::st_shared_f32(at + 12, share);
    ptx::st_shared_f32(at + 16, at_target), ptx::st_shared_u32(at + 20, uint32_t(target));
  }
  static PT_DEVICE DLogitsRow get(uint32_t at) {
    return {ptx::ld_shared_f32(at),      ptx::ld_shared_f32(at + 4),
            ptx::ld_shared_f32(at + 8),  ptx::ld_shared_f32(at + 12),
            ptx::ld_shared_f32(at + 16), int(ptx::ld_shared_u32(at + 20))};
  }
  // Return the probability of an exponential with this maximum, times p_factor.
  PT_DEVICE float scaled(float maximum) const {
    return p_factor * ptx::exp2((maximum - row_max - log_sum) * kLog2e);
  }
};

PT_DEVICE DLogitsRow load_row(const ExponentialsProblem& f, int64_t row) {
  const int64_t target = target_of(f.labels, row);
  const float g = load_one(f.g + row), share = g * f.labels.on_each / float(f.classes);
  DLogitsRow found{load_one(f.row_max + row),
                   load_one(f.log_sum + row),
                   f.p_factor ? load_one(f.p_factor + row) : g,
                   share,
                   0.0f,
                   target == f.labels.ignore_index ? -1 : int(clamped(target, f.classes))};
  found.at_target = found.scaled(load_one(f.picked + row)) - g * f.labels.on_target - share;
  return found;
}

// A block has 64 rows, the rows of a part of the bias gradient, and 8 classes per thread.
__global__ void __launch_bounds__(kInPlaceThreads)
    cross_entropy_d_logits_kernel(const __grid_constant__ ExponentialsProblem f) {
  const uint32_t shared = ptx::dynamic_smem();
  const int64_t first = int64_t(blockIdx.x) * kRowsOfAPart, left = f.rows - first;
  const int rows = left < kRowsOfAPart ? int(left) : kRowsOfAPart;
  if (int(threadIdx.x) < rows)
    load_row(f, first + threadIdx.x).put(shared + threadIdx.x * DLogitsRow::kBytes);
  ptx::syncthreads();
  const int64_t column = (int64_t(blockIdx.y) * kInPlaceThreads + threadIdx.x) * kVector;
  if (column >= f.classes) return;
  const float* maxima = f.maxima + column / kClassTile * f.rows + first;
  ptx::bf16* at = static_cast<ptx::bf16*>(f.d_logits.data) + first * f.d_logits.stride + column;
  float sums[kVector] = {};
  constexpr int kAtOnce = 4;  // rows in flight
  for (int start = 0; start < rows; start += kAtOnce) {
    Raw<ptx::bf16> e[kAtOnce];
    float maximum[kAtOnce];
    PT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = start + i < rows ? start + i : rows - 1;
      e[i].load<false>(at + row * f.d_logits.stride);
      maximum[i] = load_one(maxima + row);
    }
    PT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i >= rows) break;
      const DLogitsRow row = DLogitsRow::get(shared + uint32_t(start + i) * DLogitsRow::kBytes);
      const float scale = row.scaled(maximum[i]);
      const int64_t target = row.target - column;
      float v[kVector];
      PT_UNROLL
      for (int c = 0; c < kVector; ++c) {
        v[c] = target == c ? row.at_target : e[i][c] * scale - row.share;
        v[c] = row.target < 0 ? 0.0f : v[c];  // not a product: the row may hold NaN
        sums[c] += v[c];
      }
      e[i].set(v);
      e[i].store(at + (start + i) * f.d_logits.stride);
    }
  }
  if (!f.bias_partials) return;
  float* const part = f.bias_partials + int64_t(blockIdx.x) * f.classes + column;
  PT_UNROLL
  for (int c = 0; c < kVector; ++c)
    if (column + c < f.classes) store_one(part + c, sums[c]);
}

// A block scales kInPlaceThreads vectors of 8 at a time; the last one may be partial.
__global__ void __launch_bounds__(kInPlaceThreads)
    cross_entropy_scale_kernel(const __grid_constant__ ScaleProblem f) {
  const float g = load_one(f.g);
  if (f.from == f.out && g == 1.0f) return;
  const auto* from = static_cast<const ptx::bf16*>(f.from);
  auto* out = static_cast<ptx::bf16*>(f.out);
  const int64_t first = (int64_t(blockIdx.x) * kScaledVectors * kInPlaceThreads + threadIdx.x) * 8;
  Raw<ptx::bf16> v[kScaledVectors];
  PT_UNROLL
  for (int i = 0; i < kScaledVectors; ++i) {
    const int64_t at = first + int64_t(i) * kInPlaceThreads * kVector;
    if (at + kVector <= f.count) v[i].load<false>(from + at);
  }
  PT_UNROLL
  for (int i = 0; i < kScaledVectors; ++i) {
    const int64_t at = first + int64_t(i) * kInPlaceThreads * kVector;
    if (at + kVector <= f.count) {
      float x[kVector];
      PT_UNROLL
      for (int c = 0; c < kVector; ++c) x[c] = v[i][c] * g;
      v[i].set(x);
      v[i].store(out + at);
    } else {
      for (int64_t c = at; c < f.count; ++c) store_one(out + c, load_one(from + c) * g);
    }
  }
}

}  // namespace pt::cuda
