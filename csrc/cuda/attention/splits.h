// SPDX-License-Identifier: Apache-2.0
// How the keys of few queries are split over blocks of threads: pure functions of lengths.
#pragma once

#include <cstdint>

namespace pt::cuda {

// A split has at least so many keys for each tile of 16 rows: in bf16, with equal head sizes, what a split leaves is then a sixteenth of
// the keys and values that it reads. There are so many splits at most, of so many rows.
constexpr int kSplitKeys = 256, kMostSplits = 64, kMostSplitRows = 32;

// What numbers below 2^31 are divided by in three instructions, of some 20 that a division takes: by Granlund and Montgomery, "Division by
// invariant integers using multiplication" (1994).
struct Divisor {
  uint32_t by, factor, shift = 0;

  constexpr explicit Divisor(int of) : by(of > 1 ? uint32_t(of) : 1), factor(0) {
    while ((uint64_t(1) << shift) < by) ++shift;
    factor = uint32_t((((uint64_t(1) << shift) - by) << 32) / by + 1);
  }
  constexpr int quotient(int n) const { return int((uint32_t(uint64_t(uint32_t(n)) * factor >> 32) + uint32_t(n)) >> shift); }
};
static_assert(Divisor(1).quotient(0x7fffffff) == 0x7fffffff && Divisor(7).quotient(0x7fffffff) == 0x7fffffff / 7 &&
              Divisor(7).quotient(48) == 6 && Divisor(64).quotient(127) == 1);

// How a launch numbers its blocks; row_tiles: 1 or 2.
struct SplitGrid {
  int row_tiles;
  Divisor splits, key_heads, group;
};

// Tiles of keys in a split, where the rows see so many: twice as many as often as there would be too many splits. By what the sequence
// itself shows, and by nothing else of the batch.
constexpr int tiles_of_split(int tiles, int columns, int row_tiles) {
  int of_split = kSplitKeys / columns * row_tiles;
  while (tiles > kMostSplits * of_split) of_split *= 2;
  return of_split;
}
// The most splits of a sequence that shows up to so many tiles: one that shows all may have fewer.
constexpr int most_splits(int tiles, int columns, int row_tiles) {
  const int of_split = kSplitKeys / columns * row_tiles, most = (tiles + of_split - 1) / of_split;
  return most < kMostSplits ? most : kMostSplits;
}
static_assert(tiles_of_split(512, 32, 1) == 8 && tiles_of_split(513, 32, 1) == 16 && most_splits(513, 32, 1) == 64);

}  // namespace pt::cuda
