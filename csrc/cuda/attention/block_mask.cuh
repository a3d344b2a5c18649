// SPDX-License-Identifier: Apache-2.0
// Block masks: the tiles of a range that a block list contains, and the visible pairs of a partial
// block.
//
// A kernel's tile lies within one block, as in FlexAttention (Dong et al., 2024), so a thread block
// has one list for its rows, and a tile of columns has one entry. Tiles outside the rows' bounds
// are skipped. Values from memory are clamped: wrong lists give wrong results but no address
// outside the tensors.
#pragma once

#include "cuda/attention/score_mod.cuh"

namespace pt::cuda {

constexpr int kNoTile = 1 << 30;  // past every range

// Iterates in order over the tiles of `Streamed` columns that are in a range and in the blocks of a
// list, but not in the gap.
//
//   TileList<true, 32> tiles(lists, ...);
//   for (int t = tiles.first(range); t < range.last; t = tiles.leave(t)) ...
//
// Listed: there may be a block mask or a gap. Without a mask, one block holds all tiles.
template <bool Listed, int Streamed>
class TileList {
 public:
  // For sequence b, head h and the rows from `row` on.
  PT_DEVICE TileList(const BlockLists& lists, int b, int h, int row, Range gap = {0, 0})
      : lists_(lists), gap_(gap) {
    if (!Listed || !lists.offsets) return;
    const int32_t* const at =
        lists.offsets + b * lists.batch + h * lists.head + (row >> lists.row_bits) * lists.list;
    entry_ = max(0, min(int(ptx::ld_global_u32(at)), lists.num_entries)),
    end_ = min(int(ptx::ld_global_u32(at + 1)), lists.num_entries);
  }

  // Resume at another list's entry() and end().
  PT_DEVICE TileList(const BlockLists& lists, int entry, int end)
      : lists_(lists), entry_(entry), end_(end) {}
  PT_DEVICE int entry() const { return entry_; }
  PT_DEVICE int end() const { return end_; }

  // Return the range's first tile.
  PT_DEVICE int first(const Tiles& range) {
    if (!Listed || range.count() <= 0) return range.first;
    const int t = seek(range.first);
    return gap_.has(t) ? seek(gap_.hi) : t;
  }
  // Return the tile after tile t of the current block.
  PT_DEVICE int after(int t) const { return TileList(*this).leave(t); }
  // Like after(), and advance to that tile.
  PT_DEVICE int leave(int t) {
    if (!Listed) return t + 1;
    int next = t + 1;
    if (ends_block(t)) next = ++entry_ < end_ ? block(entry_) * tiles_of_block() : kNoTile;
    if (!gap_.has(next)) return next;
    return seek(gap_.hi);
  }
  // Return the index of the current block's bits, 0 if the dense mask is read instead, or a
  // negative number if the mask hides no pair of the block.
  PT_DEVICE int place(const AttentionProblem& p) const {
    if (!Listed) return -1;
    if (!lists_.offsets) return p.mask.data ? 0 : -1;
    return min(int(ptx::ld_global_u32(lists_.entries + 2 * int64_t(entry_) + 1)),
               p.blocks.places - 1);
  }

 protected:
  // Return the list's first tile from t on; advance to its block.
  PT_DEVICE int seek(int t) {
    if (!lists_.offsets) return t;
    for (int end = end_; entry_ < end;) {  // binary search for the first block that ends after t
      const int middle = (entry_ + end) / 2;
      if ((block(middle) + 1) * tiles_of_block() > t) end = middle;
      else entry_ = middle + 1;
    }
    return entry_ < end_ ? max(block(entry_) * tiles_of_block(), t) : kNoTile;
  }
  PT_DEVICE int tiles_of_block() const { return (1 << lists_.column_bits) / Streamed; }
  PT_DEVICE bool ends_block(int t) const { return ((t + 1) & (tiles_of_block() - 1)) == 0; }
  PT_DEVICE int block(int entry) const {
    const int block = int(ptx::ld_global_u32(lists_.entries + 2 * int64_t(entry)));
    return max(0, min(block, lists_.columns - 1));
  }

  const BlockLists& lists_;
  Range gap_{0, 0};
  int entry_ = 0, end_ = 0;
};

// Return the pairs of `visible` outside the gap between the global keys and a query's window.
template <int NB, class P>
PT_DEVICE uint32_t outside_gaps(const AttentionProblem& p, const Sequence& s, const P& at,
                                uint32_t visible) {
  if (!p.global_keys) return visible;
  uint32_t outside = 0;
  each<NB>([&](int n, int r, uint32_t bit) {
    const int j = at.column_of(n, r);
    outside |= j < p.global_keys || j >= at.row_of(r) + s.diagonal_offset - p.left ? bit : 0;
  });
  return visible & outside;
}

// Return the visible pairs of a fragment in the partial block with bits at `place`; 16 or 32 keys,
// starting at a multiple of their number.
template <bool Transposed, int NB>
PT_DEVICE uint32_t visible_in_block(const BlockMask& mask, int place, const Place& at) {
  const int query_bits = mask.queries.row_bits, key_bits = mask.queries.column_bits;
  const int i = (Transposed ? at.column : at.row) & ((1 << query_bits) - 1),
            j = (Transposed ? at.row : at.column) & ((1 << key_bits) - 1);
  const int to_next_query = key_bits - 5;  // in words, as a shift
  const uint32_t* const first =
      mask.bits + (((int64_t(place) << query_bits) + i) << to_next_query) + j / 32;
  uint32_t visible = 0;
  if constexpr (Transposed) {
    PT_UNROLL
    for (int n = 0; n < NB; ++n) {
      PT_UNROLL
      for (int e = 0; e < 2; ++e) {
        const uint32_t word = ptx::ld_global_u32(first + ((8 * n + e) << to_next_query)) >> j % 32;
        visible |= ((word & 1) | (word >> 8 & 1) << 2) << (4 * n + e);  // two keys, 8 apart
      }
    }
  } else {
    PT_UNROLL
    for (int half = 0; half < 2; ++half) {
      PT_UNROLL
      for (int n = 0; n < NB; n += 4) {
        const uint32_t word =
            ptx::ld_global_u32(first + ((8 * half) << to_next_query) + n / 4) >> j % 32;
        PT_UNROLL
        for (int m = n; m < min(n + 4, NB); ++m)
          visible |= (word >> 8 * (m - n) & 3) << (4 * m + 2 * half);
      }
    }
  }
  return visible;
}

// Return a tile's visible mask: bounds and global keys (if `cut`), padding gaps (keys are columns),
// and its block.
template <class K, bool Transposed, int NB, class P>
PT_DEVICE uint32_t visible_in_tile(const AttentionProblem& p, const Sequence& s, int b, const P& at,
                                   const Range (&bounds)[2], bool cut, int place) {
  uint32_t visible = cut ? within<NB>(at, bounds) : kAllColumns;
  if (K::has_score_mod && !Transposed && cut) visible = outside_gaps<NB>(p, s, at, visible);
  if (K::has_score_mod && !Transposed && s.padding_gaps)
    visible &= visible_columns<NB>(at, KeyPaddingBitmap(p, b));
  if (K::has_blocks && p.blocks.bits && place >= 0)
    visible &= visible_in_block<Transposed, NB>(p.blocks, place, at);
  return visible;
}

}  // namespace pt::cuda
