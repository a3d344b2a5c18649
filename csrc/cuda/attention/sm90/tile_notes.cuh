// SPDX-License-Identifier: Apache-2.0
// KV tiles from last to first, restricted by block lists, and the producer's notes about them for
// consumers, so only one thread of a block reads lists.
#pragma once

#include "cuda/attention/block_mask.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warpgroup.cuh"

namespace pt::cuda {

// Like TileList, in reverse: the range's tiles of `Streamed` keys in the blocks of a list, or all
// of them.
//
//   TileListBack<128> tiles(lists, ...);
//   for (int t = tiles.last(range); t >= range.first; t = tiles.back(t)) ...
template <int Streamed>
class TileListBack : public TileList<true, Streamed> {
  using Base = TileList<true, Streamed>;
  using Base::lists_, Base::entry_, Base::end_, Base::tiles_of_block, Base::block;

 public:
  // For sequence b, head h and the rows from `row` on.
  PT_DEVICE TileListBack(const BlockLists& lists, int b, int h, int row)
      : Base(lists, b, h, row), first_(entry_) {}

  // Return the range's last tile; less than range.first if the list has none.
  PT_DEVICE int last(const Tiles& range) {
    if (!lists_.offsets) return range.last - 1;
    // binary search for the first block that starts at the range's end or later
    for (int end = end_; entry_ < end;) {
      const int middle = (entry_ + end) / 2;
      if (block(middle) * tiles_of_block() >= range.last) end = middle;
      else entry_ = middle + 1;
    }
    return min(previous_block(), range.last - 1);
  }
  // Return the tile before t, which is the current tile; less than range.first if there is none.
  PT_DEVICE int back(int t) {
    const bool begins_block = (t & (tiles_of_block() - 1)) == 0;
    return lists_.offsets && begins_block ? previous_block() : t - 1;
  }

 private:
  // Advance to the previous entry and return its last tile.
  PT_DEVICE int previous_block() {
    return --entry_ >= first_ ? (block(entry_) + 1) * tiles_of_block() - 1 : -1;
  }

  int first_;
};

// A KV tile's note. place: as in TileList; more: another tile follows.
struct TileNote {
  int tile, place;
  bool more;
};

// Passes notes from the producer to all lanes through a separate ring. Each warp releases what its
// lanes have read, because no thread can do so for its warpgroup.
template <int Stages>
class TileNotes : public Buffers<Stages, 16> {
  using Base = Buffers<Stages, 16>;

 public:
  using Base::Base, Base::buffer;

  PT_DEVICE void put(int n, const TileNote& note) const {
    Base::producer_acquire(n);
    ptx::st_shared_u32(buffer(n), uint32_t(note.tile) << 1 | uint32_t(note.more));
    ptx::st_shared_u32(buffer(n) + 4, uint32_t(note.place));
    Base::producer_commit(n);
  }
  PT_DEVICE TileNote take(int n) const {
    Base::consumer_wait(n);  // short: the note precedes K
    const uint32_t tile = ptx::ld_shared_u32(buffer(n)), place = ptx::ld_shared_u32(buffer(n) + 4);
    consumer_release_warp(*this, n);
    return {int(tile >> 1), int(place), bool(tile & 1)};
  }
};

}  // namespace pt::cuda
