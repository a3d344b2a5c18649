// SPDX-License-Identifier: Apache-2.0
// How the keys of few queries are split over blocks of threads: pure functions of lengths.
#pragma once

namespace pt::cuda {

// A split has at least so many keys for each tile of 16 rows: in bf16, with equal head sizes, what a split leaves is then a sixteenth of
// the keys and values that it reads. There are so many splits at most, of so many rows.
constexpr int kSplitKeys = 256, kMostSplits = 64, kMostSplitRows = 32;

// Tiles of keys in a split, where the rows see so many: twice as many as often as there would be too many splits. By what the sequence
// itself shows, and by nothing else of the batch.
constexpr int tiles_of_split(int tiles, int columns, int row_tiles) {
  int of_split = kSplitKeys / columns * row_tiles;
  while ((tiles + of_split - 1) / of_split > kMostSplits) of_split *= 2;
  return of_split;
}
// The most splits of a sequence that shows up to so many tiles: one that shows all may have fewer.
constexpr int most_splits(int tiles, int columns, int row_tiles) {
  const int of_split = kSplitKeys / columns * row_tiles, most = (tiles + of_split - 1) / of_split;
  return most < kMostSplits ? most : kMostSplits;
}
static_assert(tiles_of_split(512, 32, 1) == 8 && tiles_of_split(513, 32, 1) == 16 && most_splits(513, 32, 1) == 64);

}  // namespace pt::cuda
