// SPDX-License-Identifier: Apache-2.0
// The boolean mask by tiles. A tile hides all of its pairs, none, or some. Kernels skip the first
// kind, do not read the mask for the second, and read it only for the third.
//
//   map_tiles()  build the map of a dense mask: one pass over the mask at its strides
//   map_blocks() build the map of a block mask
//   TileRow      one query's row of the map
//   MaskRow      one query's row of the mask, from either source of bits
#pragma once

#include "cpu/attention/dense.h"
#include "cpu/core/arena.h"
#include "cpu/core/parallel.h"

namespace pt {
namespace PT_ISA {

inline thread_local Arena tiles_arena;  // calling thread: the map

// 16 queries per tile: a pass costs 3 instructions per 64 pairs beside reading the mask, and the
// tiles follow a band of keys within 16.
constexpr int kMapRowBits = 4, kMapKeyBits = 6;
typedef uint8_t vbytes __attribute__((vector_size(kVecBytes), may_alias, aligned(1)));

// Return the state of `rows` rows of n <= 64 contiguous bytes. A partial tile usually ends after
// its first row, so 1/16 of such a mask is read.
INLINE int32_t tile_state(const uint8_t* p, int64_t row, int64_t rows, int64_t n) {
  bool any = false, all = true;
  if (n == 64) {
    constexpr int vectors = 64 / kVecBytes;
    constexpr uint64_t ones = 0x0101010101010101;
    vbytes some[vectors] = {}, least[vectors];
    UNROLL for (int v = 0; v < vectors; v++) least[v] = ~vbytes{};
    for (int64_t i = 0, end = 1; i < rows && (all || !any); end = rows) {
      for (; i < min(end, rows); i++) UNROLL for (int v = 0; v < vectors; v++) {
          const vbytes x = *reinterpret_cast<const vbytes*>(p + i * row + v * kVecBytes);
          some[v] |= x, least[v] = x < least[v] ? x : least[v];
        }
      uint64_t words[2][8];
      __builtin_memcpy(words[0], some, 64), __builtin_memcpy(words[1], least, 64);
      // The second test is true if no byte is zero.
      for (int w = 0; w < 8; w++)
        any |= words[0][w] != 0, all &= ((words[1][w] - ones) & ~words[1][w] & (ones << 7)) == 0;
    }
  } else {
    for (int64_t i = 0; i < rows && (all || !any); i++)
      for (int64_t j = 0; j < n; j++) any |= p[i * row + j] != 0, all &= p[i * row + j] != 0;
  }
  return all ? TileMap::kAll : any ? TileMap::kSome : TileMap::kNone;
}
INLINE int32_t strided_state(const uint8_t* p, int64_t row, int64_t key, int64_t rows, int64_t n) {
  bool any = false, all = true;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < n; j++)
      any |= p[i * row + j * key] != 0, all &= p[i * row + j * key] != 0;
  return all ? TileMap::kAll : any ? TileMap::kSome : TileMap::kNone;
}

// Number of tiles of a dense boolean mask. Broadcast dimensions have one.
struct TileCounts {
  int64_t rows, keys, down, across, heads, batch;  // rows, keys: distinct ones in the mask
  explicit TileCounts(const AttentionProblem& p)
      : rows(p.mask.stride.l ? p.Lq : 1), keys(p.mask.stride.d ? p.Lk : 1),
        down(ceil_div(rows, int64_t(1) << kMapRowBits)),
        across(ceil_div(keys, int64_t(1) << kMapKeyBits)), heads(p.mask.stride.h ? p.Hq : 1),
        batch(p.mask.stride.b ? p.B : 1) {}
  explicit TileCounts(const AttentionProblem& p, const BlockMask& m)
      : rows(p.Lq), keys(p.Lk), down(ceil_div(rows, int64_t(1) << m.row_bits)),
        across(ceil_div(keys, int64_t(1) << m.key_bits)), heads(m.H), batch(m.B) {}
  int64_t all() const { return batch * heads * down * across; }
  size_t bytes() const { return Arena::bytes_for<int32_t>(all()); }
};

// Return the map's bytes, or 0 without a mask to map.
inline size_t map_bytes(const AttentionProblem& p) {
  if (p.blocks.offsets) return TileCounts(p, p.blocks).bytes();
  return p.mask.data && p.mask.boolean ? TileCounts(p).bytes() : 0;
}

// Fill in p.tiles for a dense boolean mask, in tiles_arena. The mask is
// not read in tiles without a pair that intervals (causality, window, lengths) leave visible. Drop
// a mask that hides nothing more.
inline void map_tiles(AttentionProblem& p) {
  if (!p.mask.data || !p.mask.boolean) return;
  const Strides& m = p.mask.stride;
  const TileCounts counts(p);
  const int64_t rows = counts.rows, keys = counts.keys, down = counts.down, across = counts.across,
                heads = counts.heads;
  tiles_arena.reset(counts.bytes());
  int32_t* const tiles = tiles_arena.take<int32_t>(counts.all());
  p.tiles.data = tiles, p.tiles.row_bits = kMapRowBits, p.tiles.key_bits = kMapKeyBits;
  p.tiles.stride = {m.b ? heads * down * across : 0, m.h ? down * across : 0, m.l ? across : 0,
                    m.d ? 1 : 0};

  bool hides = false;
  AttentionProblem bare = p;  // intervals only
  bare.query_segments = bare.key_segments = nullptr;
  const auto one_row = [&](int64_t t) {
    const int64_t r = t % down, h = t / down % heads, b = t / down / heads;
    const int64_t first = r << kMapRowBits, n = min(rows - first, int64_t(1) << kMapRowBits);
    Range seen{p.Lk, 0};
    // Visit every sequence that reads this row of the map.
    for (int64_t e = m.b ? b : 0; e < (m.b ? b + 1 : p.B); e++) {
      const Sequence s(bare, e);
      const int64_t last = min(m.l ? first + n : s.rows, s.rows) - 1;
      if (last < first) continue;
      const Range keys = s.keys(first, last);
      seen = {min(seen.lo, keys.lo), max(seen.hi, keys.hi)};
    }
    const auto* at = static_cast<const uint8_t*>(p.mask.data) + b * m.b + h * m.h + first * m.l;
    int32_t* out = tiles + t * across;
    for (int64_t c = 0; c < across; c++) {
      const int64_t j = c << kMapKeyBits, some = min(keys - j, int64_t(1) << kMapKeyBits);
      if (seen.size() <= 0 || (m.d && (j >= seen.hi || j + some <= seen.lo)))
        out[c] = TileMap::kNone;
      else if ((out[c] = m.d == 1
                             ? tile_state(at + j, m.l, n, some)
                             : strided_state(at + j * m.d, m.l, m.d, n, some)) != TileMap::kAll)
        __atomic_store_n(&hides, true, __ATOMIC_RELAXED);
    }
  };
  const int64_t all = counts.batch * heads * down,
                together =
                    max<int64_t>(1, (int64_t(256) << 10) / (across << (kMapRowBits + kMapKeyBits)));
  for_each_task(ceil_div(all, together), p.threads, [&](int64_t task) {
    for (int64_t t = task * together; t < min(all, (task + 1) * together); t++) one_row(t);
  });
  if (!hides) p.mask = {}, p.tiles = {};
}

// Fill in p.tiles for a block mask, whose tiles are its blocks.
inline void map_blocks(AttentionProblem& p) {
  const BlockMask& m = p.blocks;
  const TileCounts counts(p, m);
  const int64_t down = counts.down, across = counts.across;
  tiles_arena.reset(counts.bytes());
  int32_t* const tiles = tiles_arena.take<int32_t>(counts.all());
  p.tiles = {tiles,
             {m.B > 1 ? m.H * down * across : 0, m.H > 1 ? down * across : 0, across, 1},
             m.row_bits,
             m.key_bits,
             m.bits};
  constexpr int64_t together = 64;
  for_each_task(ceil_div(m.B * m.H * down, together), p.threads, [&](int64_t task) {
    for (int64_t t = task * together; t < min(m.B * m.H * down, (task + 1) * together); t++) {
      int32_t* row = tiles + t * across;
      for (int64_t c = 0; c < across; c++) row[c] = TileMap::kNone;
      const int32_t* list = m.offsets + t + t / down;  // one more offset than rows
      for (int64_t e = list[0]; e < list[1]; e++)
        row[m.entries[2 * e]] = m.entries[2 * e + 1] < 0 ? TileMap::kAll : m.entries[2 * e + 1];
    }
  });
}

// One query's row of the map.
class TileRow {
 public:
  TileRow(const TileMap& m, int64_t b, int64_t h, int64_t i)
      : tiles_(m.at(b, h, i)), step_(m.stride.d), key_bits_(m.key_bits) {}
  const int32_t* tiles() const { return tiles_; }
  int32_t tile(int64_t j) const { return tiles_[(j >> key_bits_) * step_]; }
  int64_t tile_start(int64_t j) const { return (j >> key_bits_) << key_bits_; }
  int64_t tile_end(int64_t j) const {
    return step_ ? ((j >> key_bits_) + 1) << key_bits_ : INT64_MAX;
  }
  // Trim a range by fully hidden tiles at its ends; empty as {x, x}.
  INLINE Range trim(Range r) const {
    while (r.lo < r.hi && tile(r.lo) == TileMap::kNone) r.lo = min(r.hi, tile_end(r.lo));
    while (r.lo < r.hi && tile(r.hi - 1) == TileMap::kNone) r.hi = max(r.lo, tile_start(r.hi - 1));
    return r;
  }
  // State of the tiles of keys j .. j + n - 1: all are full, or all are partial.
  struct Alike {
    bool all, some;
  };
  INLINE Alike alike(int64_t j, int64_t n) const {
    Alike found{true, true};
    const int64_t last = ((j + n - 1) >> key_bits_) * step_;
    for (int64_t t = (j >> key_bits_) * step_; t <= last; t++)
      found.all &= tiles_[t] == TileMap::kAll, found.some &= tiles_[t] >= 0;
    return found;
  }

 protected:
  const int32_t* tiles_;
  int64_t step_;
  int key_bits_;
};

// TileRow::trim for successive queries. Queries of one block share a row of tiles, whose empty ends
// are walked once: at 65,536 keys there are a thousand tiles, and a walk per query took two thirds
// of a forward.
class TileTrim {
 public:
  TileTrim(const AttentionProblem& p, int64_t b) : p_(p), b_(b) {}
  INLINE Range operator()(int64_t h, int64_t i, Range r) {
    if (!p_.tiles.data || r.size() <= 0) return r;
    const TileRow row(p_.tiles, b_, h, i);
    if (row.tiles() != tiles_) tiles_ = row.tiles(), ends_ = row.trim({0, p_.Lk});
    const Range within{max(r.lo, ends_.lo), min(r.hi, ends_.hi)};
    return within.size() > 0 ? row.trim(within) : Range{r.lo, r.lo};
  }

 private:
  const AttentionProblem& p_;
  int64_t b_;
  const int32_t* tiles_ = nullptr;
  Range ends_{};
};

// One query's row of the boolean mask, from either source of bits. p.tiles.data is not null.
template <class A>
class MaskRow : public TileRow {
 public:
  MaskRow(const AttentionProblem& p, int64_t b, int64_t h, int64_t i)
      : TileRow(p.tiles, b, h, i), dense_(p.tiles.bits ? Dense{} : p.mask, b, h, i) {
    if (p.tiles.bits)
      bits_ = p.tiles.bits + (i & ((int64_t(1) << p.tiles.row_bits) - 1)) * words(),
      tile_words_ = words() << p.tiles.row_bits;
  }
  // Return keys j .. j + n - 1 of a partial tile. With bits, j is a multiple of the vector width.
  INLINE mask bits(int64_t j, int64_t n) const {
    return bits_ ? mask(word(tile(j), j) >> (j & 31)) : dense_.bits(j, n);
  }
  // Trim a range by hidden keys at its ends: by pairs with bits, else by tiles.
  INLINE Range trim(Range r) const {
    if (!bits_) return TileRow::trim(r);
    while (r.lo < r.hi) {
      const int32_t t = tile(r.lo);
      if (t == TileMap::kAll) break;
      const uint32_t ahead = t == TileMap::kNone ? 0 : word(t, r.lo) >> (r.lo & 31);
      r.lo = min(r.hi, ahead                 ? r.lo + __builtin_ctz(ahead)
                       : t == TileMap::kNone ? tile_end(r.lo)
                                             : (r.lo | 31) + 1);
      if (ahead) break;
    }
    while (r.lo < r.hi) {
      const int64_t last = r.hi - 1;
      const int32_t t = tile(last);
      if (t == TileMap::kAll) break;
      const uint32_t behind = t == TileMap::kNone ? 0 : word(t, last) << (31 - (last & 31));
      r.hi = max(r.lo, behind                ? r.hi - __builtin_clz(behind)
                       : t == TileMap::kNone ? tile_start(last)
                                             : last & ~int64_t(31));
      if (behind) break;
    }
    return r;
  }
  bool visible(int64_t j) const {
    const int32_t t = tile(j);
    return t == TileMap::kAll || (t != TileMap::kNone && (bits(j, 1) & 1));
  }

 private:
  int64_t words() const { return (int64_t(1) << key_bits_) / 32; }
  // Return 32 bits around key j, from a multiple of 32, in the tile with state t.
  INLINE uint32_t word(int32_t t, int64_t j) const {
    return bits_[t * tile_words_ + ((j & ((int64_t(1) << key_bits_) - 1)) >> 5)];
  }
  const DenseRow<A> dense_;
  const uint32_t* bits_ = nullptr;
  int64_t tile_words_ = 0;
};

}  // namespace PT_ISA
}  // namespace pt
