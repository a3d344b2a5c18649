// SPDX-License-Identifier: Apache-2.0
// Split sizes of split KV. Pure functions of lengths.
#pragma once

#include <cstdint>

namespace pt::cuda {

// kSplitKeys is a split's minimum number of keys per tile of 16 rows: in bf16, with equal head
// sizes, its partials are then 1/16 of the keys and values that it reads. The rest are upper
// limits.
constexpr int kSplitKeys = 256, kMostSplits = 64, kMostSplitRows = 32;

// Divides numbers below 2^31 in three instructions; a division takes some 20. Granlund and
// Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
  uint32_t by, factor, shift = 0;

  constexpr explicit Divisor(int of) : by(of > 1 ? uint32_t(of) : 1), factor(0) {
    while ((uint64_t(1) << shift) < by) ++shift;
    factor = uint32_t((((uint64_t(1) << shift) - by) << 32) / by + 1);
  }
  constexpr int quotient(int n) const {
    return int((uint32_t(uint64_t(uint32_t(n)) * factor >> 32) + uint32_t(n)) >> shift);
  }
};
static_assert(Divisor(1).quotient(0x7fffffff) == 0x7fffffff &&
              Divisor(7).quotient(0x7fffffff) == 0x7fffffff / 7 && Divisor(7).quotient(48) == 6 &&
              Divisor(64).quotient(127) == 1);

// Numbering of a launch's blocks; row_tiles is 1 or 2.
struct SplitGrid {
  int row_tiles;
  Divisor splits, key_heads, group;
};

// Return the number of KV tiles per split: doubled until there are at most kMostSplits. Depends
// only on the sequence's visible tiles, not on the rest of the batch.
constexpr int tiles_of_split(int tiles, int columns, int row_tiles) {
  int of_split = kSplitKeys / columns * row_tiles;
  while (tiles > kMostSplits * of_split) of_split *= 2;
  return of_split;
}
// Return the maximum number of splits of a sequence with up to `tiles` visible tiles; a sequence
// with all of them may have fewer.
constexpr int most_splits(int tiles, int columns, int row_tiles) {
  const int of_split = kSplitKeys / columns * row_tiles, most = (tiles + of_split - 1) / of_split;
  return most < kMostSplits ? most : kMostSplits;
}
static_assert(tiles_of_split(512, 32, 1) == 8 && tiles_of_split(513, 32, 1) == 16 &&
              most_splits(513, 32, 1) == 64);

}  // namespace pt::cuda
