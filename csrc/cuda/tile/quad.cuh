// SPDX-License-Identifier: Apache-2.0
// A quad: four lanes whose numbers differ only in the last two bits. They share rows of an
// accumulator.
#pragma once

#include "cuda/ptx/barrier.cuh"

namespace pt::cuda {

// Transpose: w[t] of lane m becomes w[m] of lane t. Swaps neighbors, then the two halves. Every
// lane of the warp calls it.
PT_DEVICE void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t s0 = ptx::shfl_xor_u32(odd ? w[0] : w[1], 1),
                 s1 = ptx::shfl_xor_u32(odd ? w[2] : w[3], 1);
  // pairs 2 (m / 2) + {0, 1} of word odd
  const uint32_t a0 = odd ? s0 : w[0], a1 = odd ? w[1] : s0;
  const uint32_t b0 = odd ? s1 : w[2], b1 = odd ? w[3] : s1;  // pairs of word 2 + odd
  const uint32_t t0 = ptx::shfl_xor_u32(upper ? a0 : b0, 2),
                 t1 = ptx::shfl_xor_u32(upper ? a1 : b1, 2);
  w[0] = upper ? t0 : a0, w[1] = upper ? t1 : a1, w[2] = upper ? b0 : t0, w[3] = upper ? b1 : t1;
}

}  // namespace pt::cuda
