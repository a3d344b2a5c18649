// SPDX-License-Identifier: Apache-2.0
// Dropout's keep mask. One Philox call, of a group, decides eight keys of a query. Its four words
// belong to keys 8 apart, and the 16-bit halves of a word to two neighbors.
//
//   key j  -> group 4 * (j / 32) + j % 8 / 2, word j % 32 / 8, half j % 2
//     j =  0 -> group 0, word 0, half 0        j =  8 -> group 0, word 1, half 0
//     j =  1 -> group 0, word 0, half 1        j = 33 -> group 4, word 0, half 1
#pragma once

#include "cuda/attention/params.h"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/philox.cuh"

namespace pt::cuda {

// Return the keep mask of query i of head h for a group of 32 keys. One Philox call decides two of
// each eight (see above). 16-bit draws are compared in place, as the upper halves of words.
PT_DEVICE uint32_t kept_keys(const AttentionPairBits::Dropout& f, int b, int h, int i,
                             uint32_t group, uint64_t seed) {
  const uint32_t threshold = f.threshold << 16, head = f.head_start + uint32_t(h);
  const uint32_t sequence = f.batch_start + uint32_t(b);
  uint32_t kept = 0;
  PT_UNROLL
  for (uint32_t c = 0; c < 4; ++c) {
    const Draws d = philox(4 * group + c, f.query_start + uint32_t(i), head, sequence, seed);
    PT_UNROLL
    for (int m = 0; m < 4; ++m) {
      if (d.w[m] << 16 >= threshold) kept |= 1u << (8 * m + 2 * c);
      if (d.w[m] >= threshold) kept |= 2u << (8 * m + 2 * c);
    }
  }
  return f.threshold < 65536 ? kept : 0;
}

}  // namespace pt::cuda
