// SPDX-License-Identifier: Apache-2.0
// Tiles of keys from last to first, but for those that lists of blocks leave out, and what the producer tells consumers of each: so only
// one thread of a block reads lists.
#pragma once

#include "cuda/attention/block_mask.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warpgroup.cuh"

namespace pt::cuda {

// As TileList, the other way: of a range, the tiles of `Streamed` keys in the blocks of a list, or all of them.
//
//   TileListBack<128> tiles(lists, ...);
//   for (int t = tiles.last(range); t >= range.first; t = tiles.back(t)) ...
template <int Streamed>
class TileListBack : public TileList<true, Streamed> {
  using Base = TileList<true, Streamed>;
  using Base::lists_, Base::entry_, Base::end_, Base::tiles_of_block, Base::block;

 public:
  // Of sequence b, head h and the rows from `row` on.
  PT_DEVICE TileListBack(const BlockLists& lists, int b, int h, int row) : Base(lists, b, h, row), first_(entry_) {}

  // The last tile of the range; before its first if the list has none.
  PT_DEVICE int last(const Tiles& range) {
    if (!lists_.offsets) return range.last - 1;
    for (int end = end_; entry_ < end;) {  // the first block that begins at the range's end or behind
      const int middle = (entry_ + end) / 2;
      if (block(middle) * tiles_of_block() >= range.last) end = middle;
      else entry_ = middle + 1;
    }
    return min(previous_block(), range.last - 1);
  }
  // The one before tile t, which was the last given; before the range's first if there is none.
  PT_DEVICE int back(int t) {
    const bool begins_block = (t & (tiles_of_block() - 1)) == 0;
    return lists_.offsets && begins_block ? previous_block() : t - 1;
  }

 private:
  // The last tile of the entry before the current one; goes on to it.
  PT_DEVICE int previous_block() { return --entry_ >= first_ ? (block(entry_) + 1) * tiles_of_block() - 1 : -1; }

  int first_;
};

// A tile of keys, as consumers need it. place: as TileList has it; more: another one follows.
struct TileNote {
  int tile, place;
  bool more;
};

// From the producer to all lanes, in a ring of its own: each warp releases what its lanes have read, as no thread can for its warpgroup.
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
    Base::consumer_wait(n);  // no longer than for the tile's keys, which the producer asks for behind the note
    const uint32_t tile = ptx::ld_shared_u32(buffer(n)), place = ptx::ld_shared_u32(buffer(n) + 4);
    consumer_release_warp(*this, n);
    return {int(tile >> 1), int(place), bool(tile & 1)};
  }
};

}  // namespace pt::cuda
