// Attention backward on sm_90a: what its two passes share.
#pragma once

#include "cuda/attention/bwd_tile.cuh"
#include "cuda/attention/sm90_tile.cuh"

namespace pt::cuda {

struct Sm90Backward {
  ptx::TensorMap q, k, v, d_out;  // (D, rows, heads, sequences)
  AttentionBackward g;
  TileOrder order;
};

// dS = P * (dP - D) of 64 rows as an operand; dp is dP - D. P comes as the operand it has become, rounded: as float32 it would take as many
// registers again as S and dP do. ds may be weights.
template <class T, int R>
PT_DEVICE void pack_gradients(uint32_t (&ds)[R / 8][4], const uint32_t (&weights)[R / 8][4], const float (&dp)[R]) {
  PT_UNROLL
  for (int i = 0; i < R / 2; ++i) {
    const uint32_t w = weights[i / 4][i % 4];
    ds[i / 4][i % 4] =
        Element<T>::pack(ptx::widen(T{uint16_t(w)}) * dp[2 * i], ptx::widen(T{uint16_t(w >> 16)}) * dp[2 * i + 1]);
  }
}

}  // namespace pt::cuda
