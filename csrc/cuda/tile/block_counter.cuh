// SPDX-License-Identifier: Apache-2.0
// Finds the last of the blocks that share a result, which then completes it. Blocks count in a word
// of memory with any content, so no launch clears it. The host gives every call its own numbers
// first, ..., first + Most, from a random start:
//
//   first + Most - n, n > 0   n blocks of this call are missing
//   any other number           no block of this call has arrived; the first one writes its start
//
// Foreign content counts as blocks with probability 2^-58. A complete call leaves first + Most, so
// a CUDA graph may replay it, also with another number of blocks.
#pragma once

#include "cuda/ptx/memory.cuh"

namespace pt::cuda {

template <uint64_t Most>
struct BlockCounter {
  uint64_t* word;
  uint64_t first;

  // Write the start for up to Most blocks, if no other block has. The word returns to a number out
  // of range only after this block has arrived, so an exchange that fails was another block's.
  PT_DEVICE void begin(int blocks) const {
    uint64_t now = first + Most, expected;
    do expected = now, now = ptx::atomic_cas_u64(word, expected, first + Most - uint32_t(blocks));
    while (now - first > Most && now != expected);
  }
  // Publish the block's stores, which a barrier orders before. Return true in the last block, which
  // sees the stores of all.
  PT_DEVICE bool arrive() const { return ptx::acq_rel_add_u64(word, 1) == first + Most - 1; }
};

}  // namespace pt::cuda
