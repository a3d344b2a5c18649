// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a: what its passes share.
#pragma once

#include <type_traits>

#include "cuda/attention/bwd_tile.cuh"
#include "cuda/attention/sm90/tile.cuh"

namespace pt::cuda {

// What every pass copies, in boxes of a tile's rows.
struct Sm90Operands {
  ptx::TensorMap q, k, v, d_out;  // (D, rows, heads, sequences)

  PT_DEVICE void prefetch() const {
    for (const ptx::TensorMap* map : {&q, &k, &v, &d_out}) ptx::prefetch_tensor_map(*map);
  }
};

struct Sm90Backward : Sm90Operands {
  AttentionBackward g;
  TileOrder order;
};

// As float16 a weight below 2^-24 would be none, though times a large dP it is not: weights are 2^14 times P there. They are at most 1, or
// what lse's rounding makes of it.
template <class T>
constexpr int kWeightBits = std::is_same_v<T, ptx::f16> ? 14 : 0;
template <class T>
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits<T>);  // takes that back

// dP - D, times that unit; d_scaled is D times it.
template <class T>
PT_DEVICE float less_delta(float dp, float d_scaled) {
  return kWeightBits<T> ? ptx::fma_rn(dp, kWeightUnit<T>, -d_scaled) : dp - d_scaled;
}
// A row's maximum, of which exp2(score - maximum) is a weight.
template <class T>
PT_DEVICE float in_base_2(float row_max) {
  return kWeightBits<T> ? ptx::fma_rn(row_max, kLog2e, -float(kWeightBits<T>)) : row_max * kLog2e;
}
// dP of weights that dropout keeps or drops.
template <int R>
PT_DEVICE void drop(float (&dp)[R], const Pairs<R>& given, float keep_scale) {
  const Pairs<R> keep_mask = given.packed_until_here();
  PT_UNROLL
  for (int i = 0; i < R; ++i) dp[i] = keep_mask.has(i) ? dp[i] * keep_scale : 0.0f;
}
// Weights, as an operand, that dropout keeps.
template <int S>
PT_DEVICE void drop_packed(uint32_t (&weights)[S][4], const Pairs<8 * S>& given) {
  const Pairs<8 * S> keep_mask = given.packed_until_here();
  PT_UNROLL
  for (int i = 0; i < 4 * S; ++i)
    weights[i / 4][i % 4] &= (keep_mask.has(2 * i) ? 0xffffu : 0u) | (keep_mask.has(2 * i + 1) ? 0xffff0000u : 0u);
}
// The weight of a score, of a row with this maximum.
template <class T>
PT_DEVICE float weight_of(float score, float row_max) {
  return ptx::exp2(kWeightBits<T> ? ptx::fma_rn(score - row_max, kLog2e, float(kWeightBits<T>)) : (score - row_max) * kLog2e);
}
// And with this log2 of the sum, less kWeightBits.
PT_DEVICE float weight_of(float score, float row_max, float log2_sum) { return ptx::exp2(ptx::fma_rn(score - row_max, kLog2e, -log2_sum)); }

// P of 64 rows as an operand, where it is exp2 of a difference from lse. Of scores beyond 10^7 lse is so coarse that this may be more than
// 1; 2^14 times that, an infinity in float16, stays finite: what is made of an infinity would be NaN, also in the sums of other rows.
template <class T, int R>
PT_DEVICE void pack_recomputed(uint32_t (&weights)[R / 8][4], const float (&x)[R]) {
  if constexpr (kWeightBits<T> == 0) {
    pack_weights<T>(weights, x);
  } else {
    PT_UNROLL
    for (int i = 0; i < R / 2; ++i) {
      const float low = x[2 * i], high = x[2 * i + 1];
      weights[i / 4][i % 4] = ptx::pack_f16_finite(low, high);
    }
  }
}

// dS = P * (dP - D) of 64 rows as an operand; dp is dP - D. P comes as the operand it has become, rounded: as float32 it would take as many
// registers again as S and dP do. ds may be weights.
template <class T, int R>
PT_DEVICE void pack_gradients(uint32_t (&ds)[R / 8][4], const uint32_t (&weights)[R / 8][4], const float (&dp)[R]) {
  PT_UNROLL
  for (int i = 0; i < R / 2; ++i) {
    const uint32_t w = weights[i / 4][i % 4];
    ds[i / 4][i % 4] = Element<T>::pack(ptx::widen(T{uint16_t(w)}) * dp[2 * i], ptx::widen(T{uint16_t(w >> 16)}) * dp[2 * i + 1]);
  }
}

// Kernels with score_mod go through the scores in pieces of 16 columns, an operand's step: what a piece needs beside the scores takes few
// registers.
constexpr int kPiece = 2;

// Where the rows of this warp of a tile with first row `row` lie. The compiler does not know that it could be kept in registers.
PT_DEVICE Place place_again(int row, int column) {
  const int thread = ptx::opaque(int(threadIdx.x));
  return Place(row + thread / 32 * 16 - 64, column, thread % 32);
}

template <class T>
PT_DEVICE void pack_piece(uint32_t (&operand)[4], const float (&x)[kPiece][4]) {
  PT_UNROLL
  for (int i = 0; i < 4; ++i) operand[i] = Element<T>::pack(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}

}  // namespace pt::cuda
