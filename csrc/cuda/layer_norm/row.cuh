// SPDX-License-Identifier: Apache-2.0
// What the norm kernels share: where a row lies, which of its columns a thread has, and dropout.
#pragma once

#include <type_traits>

#include "cuda/layer_norm/config.h"
#include "cuda/layer_norm/problem.h"
#include "cuda/tile/philox.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

template <class K>
using TeamOf = std::conditional_t<K::kernel == LayerNormKernel::Lanes, LaneTeam, BlockTeam>;

// A row's place in each tensor.
struct RowAt {
  int64_t outer, inner;

  PT_DEVICE RowAt(const LayerNormProblem& p, int64_t row) : outer(row / p.inner), inner(row - outer * p.inner) {}
  template <class T>
  PT_DEVICE const T* of(const Rows& t) const {
    return static_cast<const T*>(t.data) + outer * t.outer + inner * t.inner;
  }
  template <class T>
  PT_DEVICE T* of(const RowsOut& t) const {
    return static_cast<T*>(t.data) + outer * t.outer + inner * t.inner;
  }
  // The same where the dtype is known only at run time.
  PT_DEVICE const void* begin(const Rows& t) const {
    return static_cast<const uint8_t*>(t.data) + (outer * t.outer + inner * t.inner) * size_of(t.dtype);
  }
  PT_DEVICE void* begin(const RowsOut& t) const {
    return static_cast<uint8_t*>(t.data) + (outer * t.outer + inner * t.inner) * size_of(t.dtype);
  }
};

// The first of the eight columns that are a thread's vector number v.
template <class Team>
PT_DEVICE int column_of(const Team& team, int v) {
  return kVector * (v * team.size() + team.rank());
}

PT_DEVICE ColumnDropout dropout_of(const LayerNormProblem& p) {
  return {p.drop_threshold > 0 && p.drop_threshold < 65536 ? ptx::ld_global_u64(p.seed) : 0, p.drop_threshold, kTagAddNorm, p.row_start};
}

PT_DEVICE void drop(float (&v)[kVector], uint32_t keep, float scale) {
  PT_UNROLL
  for (int i = 0; i < kVector; ++i) v[i] = keep >> i & 1 ? v[i] * scale : 0.0f;  // select: a dropped NaN is gone
}

// 1 / sqrt(variance + eps); a variance below zero is the rounding of one that is zero.
PT_DEVICE float rstd_of(float variance, float eps) { return ptx::div_rn(1.0f, ptx::sqrt_rn((variance < 0.0f ? 0.0f : variance) + eps)); }

}  // namespace pt::cuda
