// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a, shared by its kernels.
#pragma once

#include <type_traits>

#include "cuda/attention/bwd_tile.cuh"
#include "cuda/attention/sm90/tile.cuh"

namespace pt::cuda {

// TMA maps of the operands, in boxes of a tile's rows.
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

// Scale of weights. In float16 a weight below 2^-24 would become zero, although its product with a
// large dP is not; so weights are 2^14 P there. P is at most 1, or slightly more by lse's rounding.
template <class T>
constexpr int kWeightBits = std::is_same_v<T, ptx::f16> ? 14 : 0;
template <class T>
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits<T>);  // inverse scale

// Return (dP - delta) / 2^kWeightBits; d_scaled is delta times the same factor.
template <class T>
PT_DEVICE float less_delta(float dp, float d_scaled) {
  return kWeightBits<T> ? ptx::fma_rn(dp, kWeightUnit<T>, -d_scaled) : dp - d_scaled;
}
// Return a row's maximum in base 2: a weight is exp2(score - maximum).
template <class T>
PT_DEVICE float in_base_2(float row_max) {
  return kWeightBits<T> ? ptx::fma_rn(row_max, kLog2e, -float(kWeightBits<T>)) : row_max * kLog2e;
}
// Apply dropout to dP.
template <int R>
PT_DEVICE void drop(float (&dp)[R], const Pairs<R>& given, float keep_scale) {
  const Pairs<R> keep_mask = given.packed_until_here();
  PT_UNROLL
  for (int i = 0; i < R; ++i) dp[i] = keep_mask.has(i) ? dp[i] * keep_scale : 0.0f;
}
// Apply dropout to packed weights.
template <int S>
PT_DEVICE void drop_packed(uint32_t (&weights)[S][4], const Pairs<8 * S>& given) {
  const Pairs<8 * S> keep_mask = given.packed_until_here();
  PT_UNROLL
  for (int i = 0; i < 4 * S; ++i)
    weights[i / 4][i % 4] &=
        (keep_mask.has(2 * i) ? 0xffffu : 0u) | (keep_mask.has(2 * i + 1) ? 0xffff0000u : 0u);
}
// Return the weight of a score of a row with this maximum.
template <class T>
PT_DEVICE float weight_of(float score, float row_max) {
  return ptx::exp2(kWeightBits<T> ? ptx::fma_rn(score - row_max, kLog2e, float(kWeightBits<T>))
                                  : (score - row_max) * kLog2e);
}
// Like above, with log2 of the sum, minus kWeightBits.
PT_DEVICE float weight_of(float score, float row_max, float log2_sum) {
  return ptx::exp2(ptx::fma_rn(score - row_max, kLog2e, -log2_sum));
}

// Pack P of 64 rows, computed as exp2 of a difference from lse. For scores beyond 10^7 lse is so
// coarse that P may exceed 1; 2^14 P must not become an infinity in float16, because it would turn
// into NaN, also in the sums of other rows.
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

// Pack dS = P * (dP - delta) of 64 rows; dp is dP - delta. P is the rounded operand: in float32 it
// would use as many more registers as S and dP do. ds may alias weights.
template <class T, int R>
PT_DEVICE void pack_gradients(uint32_t (&ds)[R / 8][4], const uint32_t (&weights)[R / 8][4],
                              const float (&dp)[R]) {
  PT_UNROLL
  for (int i = 0; i < R / 2; ++i) {
    const uint32_t w = weights[i / 4][i % 4];
    ds[i / 4][i % 4] = Element<T>::pack(ptx::widen(T{uint16_t(w)}) * dp[2 * i],
                                        ptx::widen(T{uint16_t(w >> 16)}) * dp[2 * i + 1]);
  }
}

// Kernels with score_mod process scores in pieces of 16 columns, an operand's step, so a piece's
// temporaries use few registers.
constexpr int kPiece = 2;

// Return the position of this warp's rows in a tile with first row `row`. Opaque, so the compiler
// does not hold it in registers.
PT_DEVICE Place place_again(int row, int column) {
  const int thread = ptx::opaque(int(threadIdx.x));
  return Place(row + thread / 32 * 16 - 64, column, thread % 32);
}

template <class T>
PT_DEVICE void pack_piece(uint32_t (&operand)[4], const float (&x)[kPiece][4]) {
  PT_UNROLL
  for (int i = 0; i < 4; ++i)
    operand[i] = Element<T>::pack(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}

}  // namespace pt::cuda
