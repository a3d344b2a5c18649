// SPDX-License-Identifier: Apache-2.0
// The mask: which pairs of queries and keys are visible.
//
//   bounds        one key range per query: lengths, causality, window, prefix (Sequence)
//   key padding   bounds, and a bitmap of the keys between them (KeyPaddingBitmap)
//   pair bits     one bit per pair of a dense boolean mask or of dropout, for the sm_90a kernels
//   block lists   the blocks with a visible pair, of a block mask or of a dense mask (TileList)
//
// Kernels iterate over the tiles that bounds and lists select (Tiles, TileList) and compute the
// visible mask of a partial tile (visible_in_tile; sm90/mask_loader.cuh for sm_90a).
// attention_mask_kernel packs dense masks once per call. Dense masks, biases and segments of the
// portable kernels are applied element by element: see score_mod.cuh.
//
// A fragment's rows are queries and its columns are keys; Transposed, the reverse. Bit 4 n + r of a
// mask belongs to element r of n-block n.
#pragma once

#include "cuda/attention/dropout.cuh"
#include "cuda/attention/params.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/matrix_tile.cuh"

namespace pt::cuda {

PT_DEVICE int min(int a, int b) { return a < b ? a : b; }
PT_DEVICE int max(int a, int b) { return a > b ? a : b; }
PT_DEVICE int64_t clamp64(int64_t x, int64_t lo, int64_t hi) {
  return x < lo ? lo : x > hi ? hi : x;
}
PT_DEVICE int64_t load_i64(const int64_t* p) { return int64_t(ptx::ld_global_u64(p)); }

struct Range {
  int lo, hi;
  PT_DEVICE bool has(int x) const { return x >= lo && x < hi; }
  PT_DEVICE bool empty() const { return lo >= hi; }
};

struct Sequence {
  int64_t row_q = 0, row_k = 0;  // first rows in the tensors
  int num_q, num_k, diagonal_offset, prefix;
  int first_k = 0;  // earlier keys are visible to no query
  // some keys between first_k and num_k are hidden: see KeyPaddingBitmap
  bool padding_gaps = false;

  // Clamps lengths to the tensors.
  PT_DEVICE Sequence(const AttentionProblem& p, int b) {
    int64_t end_q = p.query_start + p.num_queries, end_k = p.key_start + p.num_keys;
    if (p.cu_queries) {
      row_q = clamp64(load_i64(p.cu_queries + b), 0, p.total_queries),
      row_k = clamp64(load_i64(p.cu_keys + b), 0, p.total_keys);
      end_q = clamp64(load_i64(p.cu_queries + b + 1), row_q, p.total_queries) - row_q;
      end_k = clamp64(load_i64(p.cu_keys + b + 1), row_k, p.total_keys) - row_k;
      if (end_q > p.num_queries) end_q = p.num_queries;
      if (end_k > p.num_keys) end_k = p.num_keys;
    }
    if (p.query_lengths) end_q = clamp64(load_i64(p.query_lengths + b), 0, end_q);
    if (p.key_lengths) end_k = clamp64(load_i64(p.key_lengths + b), 0, end_k);
    prefix = p.prefix_lengths
                 ? int(clamp64(load_i64(p.prefix_lengths + b) - p.key_start, 0, p.num_keys))
                 : 0;
    diagonal_offset = int(p.query_start - p.key_start) + (p.bottom_right ? int(end_k - end_q) : 0);
    num_q = int(clamp64(end_q - p.query_start, 0, p.num_queries));
    num_k = int(clamp64(end_k - p.key_start, 0, p.num_keys));
    if (p.key_padding.data) {
      const ptx::Words4 head = ptx::ld_global_v4(p.key_padding.data + b * p.key_padding.batch);
      first_k = int(head.w[0]);
      num_k = min(num_k, int(head.w[1]));
      padding_gaps = head.w[2] != 0;
    }
  }

  // Return the key range of query i. Both ends increase with i. Global: there may be global keys;
  // the range then has a gap from their end to the start of the query's window.
  template <bool Global = false>
  PT_DEVICE Range keys_of(const AttentionProblem& p, int i) const {
    Range r{max(first_k, i + diagonal_offset - p.left),
            min(num_k, i + diagonal_offset + p.right + 1)};
    if (Global && p.global_keys) r = {first_k, max(r.hi, min(num_k, p.global_keys))};
    if (p.causal) r.hi = min(r.hi, max(i + diagonal_offset + 1, prefix));
    return r;
  }
  // Return the query range of key j. Global keys leave no gap here.
  template <bool Global = false>
  PT_DEVICE Range queries_of(const AttentionProblem& p, int j) const {
    Range r{max(0, j - diagonal_offset - p.right), min(num_q, j - diagonal_offset + p.left + 1)};
    if (Global && j < p.global_keys) r = {0, num_q};
    if (p.causal && j >= prefix) r.lo = max(r.lo, j - diagonal_offset);
    return r;
  }
};

// Tiles of `size` columns from `origin` on: tiles [first, last) have a visible pair, and tiles
// [whole, whole_end) are full. Columns outside [start, end) are visible to no row.
struct Tiles {
  int first = 0, whole = 0, whole_end = 0, last = 0, start = 0, end = 0;

  Tiles() = default;
  // For `rows` rows with the bounds of the first and the last row; both ends increase from row to
  // row.
  PT_DEVICE Tiles(int rows, Range of_first, Range of_last, int origin, int size) {
    start = of_first.lo, end = of_last.hi;
    if (rows <= 0 || start >= end) {
      start = end = 0;
      return;
    }
    first = (start - origin) / size, last = (end - origin + size - 1) / size;
    whole = min((of_last.lo - origin + size - 1) / size, last);
    whole_end =
        of_first.hi <= origin ? whole : min(max((of_first.hi - origin) / size, whole), last);
  }
  PT_DEVICE int count() const { return last - first; }
  PT_DEVICE bool cut(int tile) const { return tile < whole || tile >= whole_end; }
};

// Return the start of the first KV tile: at or before key 0, at an absolute multiple of 32, the
// size of dropout's groups.
PT_DEVICE int key_origin(const AttentionProblem& p) { return -int(p.key_start % 32); }

// Bitmap of the visible keys of sequence b.
struct KeyPaddingBitmap {
  const uint32_t* words;
  int origin;

  PT_DEVICE KeyPaddingBitmap(const AttentionProblem& p, int b)
      : words(p.key_padding.data + b * p.key_padding.batch + KeyPadding::kHead),
        origin(key_origin(p)) {}

  // Return the bits from `key` to the end of its word of 32 keys; bit i is `key` + i.
  PT_DEVICE uint32_t from(int key) const {
    const auto at = uint32_t(key - origin);
    const uint32_t word = ptx::ld_global_u32(words + at / 32);
    return word >> at % 32;
  }
  // Return the bits of 32 keys from `key` on.
  PT_DEVICE uint32_t across(int key) const {
    const int ahead = int(uint32_t(key - origin) % 32);
    return from(key) | (ahead ? from(key - ahead + 32) << (32 - ahead) : 0);
  }
  PT_DEVICE bool visible(int key) const { return from(key) & 1; }
};

// Position of a fragment: the lane's rows are row and row + 8, its columns column + 8 n + {0, 1}.
struct Place {
  int row, column;
  PT_DEVICE Place(int first_row, int first_column, int lane = lane_id())
      : row(first_row + lane / 4), column(first_column + 2 * (lane % 4)) {}
  PT_DEVICE int row_of(int r) const { return row + 8 * (r / 2); }
  PT_DEVICE int column_of(int n, int r) const { return column + 8 * n + r % 2; }
  PT_DEVICE Place after(int columns) const {
    Place place = *this;
    place.column += columns;
    return place;
  }
};

// Call f(n, r, bit) for each element of a fragment of 8 NB columns.
template <int NB, class F>
PT_DEVICE void each(F f) {
  PT_UNROLL
  for (int n = 0; n < NB; ++n) {
    PT_UNROLL
    for (int r = 0; r < 4; ++r) f(n, r, 1u << (4 * n + r));
  }
}

// Return the pairs within the rows' bounds.
template <int NB>
PT_DEVICE uint32_t within(const Place& at, const Range (&bounds)[2]) {
  uint32_t visible = 0;
  each<NB>([&](int n, int r, uint32_t bit) {
    visible |= bounds[r / 2].has(at.column_of(n, r)) ? bit : 0;
  });
  return visible;
}

// Return the pairs whose keys (columns) are not padding. The columns start at a multiple of 32, or
// of 16 if there are 16.
template <int NB>
PT_DEVICE uint32_t visible_columns(const Place& at, const KeyPaddingBitmap& keys) {
  uint32_t visible = 0;
  PT_UNROLL
  for (int n = 0; n < NB; n += 4) {
    const uint32_t word = keys.from(at.column_of(n, 0));
    PT_UNROLL
    for (int m = n; m < min(n + 4, NB); ++m) {
      const uint32_t two = word >> 8 * (m - n) & 3;
      visible |= two * 5 << 4 * m;  // two rows
    }
  }
  return visible;
}

// Return bits 2 n + e of the columns that some row of the warp's 16 attends to.
template <int NB>
PT_DEVICE uint32_t columns_visible_to_warp(uint32_t visible) {
  uint32_t columns = 0;
  each<NB>(
      [&](int n, int r, uint32_t bit) { columns |= visible & bit ? 1u << (2 * n + r % 2) : 0; });
  for (int d = 4; d < 32; d *= 2) columns |= ptx::shfl_xor_u32(columns, d);
  return columns;
}

// Block masks. A kernel's tile lies within one block, as in FlexAttention (Dong et al., 2024), so a
// thread block has one list for its rows, and a tile of columns has one entry. Tiles outside the
// rows' bounds are skipped. Values from memory are clamped: wrong lists give wrong results but no
// address outside the tensors.
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

// Pack KeyPadding of one mask with one block: a thread packs a word of 32 keys at a time.
PT_DEVICE void make_key_padding(const AttentionKeyPadding& f) {
  const int count = KeyPadding::words(f.num_keys, f.before);
  const uint8_t* const mask = static_cast<const uint8_t*>(f.mask.data) + blockIdx.x * f.mask.batch;
  uint32_t* const bits = f.bits + int64_t(blockIdx.x) * (KeyPadding::kHead + count);
  int first = f.num_keys, end = 0, visible = 0;
  for (int w = int(threadIdx.x); w < count; w += kMaskThreads) {
    uint8_t bytes[32];
    uint32_t word = 0;
    PT_UNROLL
    for (int i = 0; i < 32; ++i) {  // separate from their use, so all loads are in flight at once
      const int key = 32 * w + i - f.before;
      bytes[i] = key >= 0 && key < f.num_keys ? ptx::ld_global_u8(mask + key * f.mask.key) : 0;
    }
    PT_UNROLL
    for (int i = 0; i < 32; ++i) {
      if (!bytes[i]) continue;
      const int key = 32 * w + i - f.before;
      word |= 1u << i;
      first = min(first, key), end = key + 1, ++visible;
    }
    ptx::st_global_u32(bits + KeyPadding::kHead + w, word);
  }
  const auto take = [&](int theirs_first, int theirs_end, int theirs_visible) {
    first = min(first, theirs_first), end = max(end, theirs_end), visible += theirs_visible;
  };
  const auto across = [](int x, int d) { return int(ptx::shfl_xor_u32(uint32_t(x), d)); };
  for (int d = 1; d < 32; d *= 2) take(across(first, d), across(end, d), across(visible, d));

  const uint32_t found = ptx::dynamic_smem();  // 16 bytes per warp
  const auto word_of = [&](int warp, int i) { return found + warp * 16 + i * 4; };
  const int own = int(threadIdx.x) / 32;
  if (lane_id() == 0) {
    ptx::st_shared_u32(word_of(own, 0), uint32_t(first));
    ptx::st_shared_u32(word_of(own, 1), uint32_t(end));
    ptx::st_shared_u32(word_of(own, 2), uint32_t(visible));
  }
  ptx::syncthreads();
  if (threadIdx.x != 0) return;
  const auto of_warp = [&](int warp, int i) { return int(ptx::ld_shared_u32(word_of(warp, i))); };
  for (int warp = 1; warp < kMaskThreads / 32; ++warp)
    take(of_warp(warp, 0), of_warp(warp, 1), of_warp(warp, 2));
  const int padding_gaps = max(end - first, 0) - visible;
  ptx::st_global_v4(bits, {{uint32_t(first), uint32_t(end), uint32_t(padding_gaps), 0}});
}

// Pair bits: see PairBits in params.h. Without them the sm_90a kernels read each pair's byte per
// head and draw each pair's random number per pass. On an H100 (2 x 16 heads of 64 columns, 2,048
// keys) backward then took 270 + 545 us with a mask and 372 + 465 us with dropout; with bits it
// takes 166 + 216 and 198 + 269.

// Return one bit per byte, each 0 or 1.
PT_DEVICE uint32_t bits_of_bytes(const ptx::Words4& bytes) {
  uint32_t bits = 0;
  PT_UNROLL
  for (int w = 3; w >= 0; --w) bits = bits << 4 | bytes.w[w] * 0x10204080u >> 28;
  return bits;
}

// Transpose 32 x 32 bits: lane i passes row i and receives column i. Each step exchanges quarters
// of squares (Warren, "Hacker's Delight", 7-3).
PT_DEVICE uint32_t transpose_bits(uint32_t row) {
  constexpr uint32_t kLow[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
  PT_UNROLL
  for (int step = 4; step >= 0; --step) {
    const int d = 1 << step;
    const uint32_t other = ptx::shfl_xor_u32(row, d), low = kLow[step];
    row = lane_id() & d ? (row & ~low) | (other >> d & low) : (row & low) | (other & low) << d;
  }
  return row;
}

// Return the visible mask of one query and the 32 keys from `key` on. Keys outside are not visible.
PT_DEVICE uint32_t visible_keys(const AttentionPairBits& f, const uint8_t* query, int key) {
  const auto there = [&](int j) { return uint32_t(j) < uint32_t(f.num_keys); };
  if (f.mask.vector_width == 16) {
    ptx::Words4 bytes[2];
    PT_UNROLL
    for (int c = 0; c < 2; ++c)
      bytes[c] = there(key + 16 * c) ? ptx::ld_global_v4(query + key + 16 * c) : ptx::Words4{};
    return bits_of_bytes(bytes[0]) | bits_of_bytes(bytes[1]) << 16;
  }
  uint32_t visible = 0, bytes[32];
  PT_UNROLL
  // all loads in flight at once
  for (int c = 0; c < 32; ++c)
    bytes[c] = there(key + c) ? ptx::ld_global_u8(query + (key + c) * f.mask.key) : 0;
  PT_UNROLL
  for (int c = 0; c < 32; ++c) visible |= uint32_t(bytes[c] != 0) << c;
  return visible;
}

// Return the bits of the 32 keys from `key` on that share the segment of query i of sequence b.
PT_DEVICE uint32_t same_segment(const AttentionPairBits& f, int b, int i, int key) {
  const int64_t segment = load_i64(f.query_segments + int64_t(b) * f.num_queries + i);
  const int64_t* const keys = f.key_segments + int64_t(b) * f.num_keys;
  uint32_t same = 0;
  PT_NO_UNROLL
  for (int c = 0; c < 32; c += 8) {
    PT_UNROLL
    for (int e = 0; e < 8; ++e)
      same |= uint32_t(load_i64(keys + min(key + c + e, f.num_keys - 1)) == segment) << (c + e);
  }
  return same;
}

// Return word `word` of query i.
PT_DEVICE uint32_t word_of_query(const AttentionPairBits& f, int b, int h, int i, int word) {
  if (i >= f.num_queries) return 0;
  if (f.dropout.threshold)
    return kept_keys(f.dropout, b, h, i, f.dropout.first_group + uint32_t(word),
                     ptx::ld_global_u64(f.dropout.seed));
  const uint8_t* const query = static_cast<const uint8_t*>(f.mask.data) + b * f.mask.batch +
                               h * f.mask.head + i * f.mask.query;
  const int key = 32 * word - f.before;
  return (f.mask.data ? visible_keys(f, query, key) : kAllColumns) &
         (f.query_segments ? same_segment(f, b, i, key) : kAllColumns);
}

// Transpose 8 x 8 bits: bit j of byte i becomes bit i of byte j (Warren, "Hacker's Delight", 7-3).
PT_DEVICE void transpose_bytes(uint32_t& low, uint32_t& high) {
  const auto exchange = [](uint32_t& x, int d, uint32_t bits) {
    const uint32_t differ = (x ^ x >> d) & bits;
    x ^= differ ^ differ << d;
  };
  exchange(low, 7, 0x00aa00aau), exchange(high, 7, 0x00aa00aau);
  exchange(low, 14, 0x0000ccccu), exchange(high, 14, 0x0000ccccu);
  const uint32_t differ = (low ^ high << 4) & 0xf0f0f0f0u;
  low ^= differ, high ^= differ >> 4;
}

// Pack a unit in lane order with one warp: a lane packs 32 keys of two queries, then has one key.
// Two lanes share the words of keys 8 apart, and write two threads' words each.
PT_DEVICE void make_lane_bits(const AttentionPairBits& f, int64_t n) {
  const int of_head = f.down() * f.across(), tile = int(n % of_head), lane = lane_id();
  const int64_t m = n / of_head;
  const int b = int(m / f.heads), h = int(m % f.heads);
  const int i = tile % f.down() * PairBits::kUnitQueries + lane, word = tile / f.down() * 4;
  const bool upper = lane & 8;
  uint32_t* const unit = f.lanes + n * PairBits::kUnitWords;
  PT_NO_UNROLL  // short code, because a Philox call is long
  for (int c = 0; c < 4; ++c) {
    uint32_t low = transpose_bits(word_of_query(f, b, h, i, word + c)),
             high = transpose_bits(word_of_query(f, b, h, i + 32, word + c));
    transpose_bytes(low, high);
    const uint32_t other = ptx::shfl_xor_u32(upper ? low : high, 8);
    const uint32_t first = upper ? other : low, second = upper ? high : other;
    const uint32_t even = (first & 0xffff) | second << 16,
                   odd = first >> 16 | (second & 0xffff0000u);
    const int key = 32 * c + lane;
    ptx::st_global_u64(unit + key / 16 * 32 + key % 8 * 4 + (upper ? 2 : 0),
                       uint64_t(odd) << 32 | even);
  }
}

// Pack a warp's 32 queries and 128 keys: a lane packs a query, then one key of each 32.
PT_DEVICE void make_pair_bits(const AttentionPairBits& f) {
  const int64_t n = int64_t(blockIdx.x) * (kMaskThreads / 32) + int(threadIdx.x) / 32;
  if (n >= f.tiles()) return;
  if (f.lanes) return make_lane_bits(f, n);
  const int of_head = f.down() * f.across(), tile = int(n % of_head), lane = lane_id();
  const int64_t m = n / of_head;
  const int b = int(m / f.heads), h = int(m % f.heads);
  const int i0 = tile / f.across() * 32, word = tile % f.across() * 4, i = i0 + lane;
  ptx::Words4 bits;
  PT_UNROLL
  for (int c = 0; c < 4; ++c) bits.w[c] = word_of_query(f, b, h, i, word + c);
  if (f.queries && i < f.rows(false))
    ptx::st_global_v4(f.queries + (m * f.rows(false) + i) * f.words(false) + word, bits);
  if (!f.keys) return;
  PT_UNROLL
  for (int c = 0; c < 4; ++c) {
    const uint32_t column = transpose_bits(bits.w[c]);
    const int j = 32 * (word + c) - f.before + lane;
    if (j >= 0 && j < f.rows(true))
      ptx::st_global_u32(f.keys + (m * f.rows(true) + j) * f.words(true) + i0 / 32, column);
  }
}

// Return the words of query or key i of sequence b and head h, from the first on.
PT_DEVICE const uint32_t* words_of(const PairBits::Rows& rows, int b, int h, int i) {
  return rows.data + b * rows.batch + h * rows.head + i * rows.row;
}

// Return the 32 bits of a row from column `at` on. Whole: `at` is a multiple of 32.
template <bool Whole>
PT_DEVICE uint32_t word_from(const uint32_t* row, int at) {
  const uint32_t word = ptx::ld_global_u32(row + at / 32);
  if constexpr (Whole) {
    return word;
  } else {
    const int ahead = at % 32;
    if (!ahead) return word;
    return word >> ahead | ptx::ld_global_u32(row + at / 32 + 1) << (32 - ahead);
  }
}

// Select a lane's bits of 32 columns in accumulator layout (fragments.cuh): bit 8 m + 2 (lane % 4)
// + e becomes 4 m + e.
PT_DEVICE uint32_t lanes_bits(uint32_t word) {
  word = word >> lane_id() % 4 * 2 & 0x03030303u;
  word = (word | word >> 4) & 0x00ff00ffu;
  return (word | word >> 8) & 0xffff;
}

// Block lists of a dense boolean mask. The first pass reads the mask with its strides, a broadcast
// dimension once: one thread block reports if none, some or all of kListedBlock x kListedBlock
// pairs are visible. The second pass, on 1/16384 of the data, writes lists. Both use the mask
// alone; lengths and causality bound the lists later, as they bound ranges of tiles.

struct Visible {
  bool some = false, all = true;
  PT_DEVICE void take(bool theirs_some, bool theirs_all) { some |= theirs_some, all &= theirs_all; }
  PT_DEVICE void take(uint8_t pair) { take(pair != 0, pair != 0); }
  // all: no byte is zero
  PT_DEVICE void take(uint32_t four) {
    take(four != 0, ((four - 0x01010101u) & ~four & 0x80808080u) == 0);
  }
};

// Reduce this thread's share of the block of pairs from (i0, j0) on: 16 aligned keys of every 32nd
// query.
PT_DEVICE Visible visible_by_sixteens(const AttentionMaskLists& f, const uint8_t* mask, int i0,
                                      int j0) {
  constexpr int kChunks = kListedBlock / 16, kRows = kMaskThreads / kChunks;
  Visible found;
  const int x = int(threadIdx.x), j = j0 + 16 * (x % kChunks);
  if (j >= f.num_keys) return found;
  const int last = min(f.num_queries - i0, kListedBlock) - 1;
  ptx::Words4 keys[kListedBlock / kRows];
  PT_UNROLL
  // Load separately from the use, so all loads are in flight at once; past the last row, load it
  // again.
  for (int n = 0; n < kListedBlock / kRows; ++n)
    keys[n] =
        ptx::ld_global_v4(mask + (i0 + min(x / kChunks + n * kRows, last)) * f.mask.query + j);
  PT_UNROLL
  for (int n = 0; n < 4 * (kListedBlock / kRows); ++n) found.take(keys[n / 4].w[n % 4]);
  return found;
}

// Like above, pair by pair: threads run along keys, or along queries if these are contiguous.
PT_DEVICE Visible visible_by_pairs(const AttentionMaskLists& f, const uint8_t* mask, int i0,
                                   int j0) {
  constexpr int kAbreast = kMaskThreads / kListedBlock, kInFlight = 16;
  const bool by_queries = f.mask.query == 1 && f.mask.key != 1;
  const int across =
      by_queries ? min(f.num_queries - i0, kListedBlock) : min(f.num_keys - j0, kListedBlock);
  const int last =
      (by_queries ? min(f.num_keys - j0, kListedBlock) : min(f.num_queries - i0, kListedBlock)) - 1;
  const int64_t to_next = by_queries ? f.mask.query : f.mask.key,
                step = by_queries ? f.mask.key : f.mask.query;
  const int x = int(threadIdx.x) % kListedBlock;
  Visible found;
  if (x >= across) return found;
  const uint8_t* const first = mask + i0 * f.mask.query + j0 * f.mask.key + x * to_next;
  for (int y = int(threadIdx.x) / kListedBlock; y <= last; y += kAbreast * kInFlight) {
    uint8_t pairs[kInFlight];
    PT_UNROLL
    for (int n = 0; n < kInFlight; ++n)
      pairs[n] = ptx::ld_global_u8(first + min(y + n * kAbreast, last) * step);
    PT_UNROLL
    for (int n = 0; n < kInFlight; ++n) found.take(pairs[n]);
  }
  return found;
}

// Compute the state of block blockIdx.x of all masks.
PT_DEVICE void make_block_state(const AttentionMaskLists& f) {
  const int of_mask = f.down() * f.across(), n = int(blockIdx.x), m = n / of_mask,
            block = n % of_mask;
  const int i0 = block / f.across() * kListedBlock, j0 = block % f.across() * kListedBlock;
  const int64_t sequence = m / f.heads, head = m % f.heads;
  const uint8_t* const mask =
      static_cast<const uint8_t*>(f.mask.data) + sequence * f.mask.batch + head * f.mask.head;
  const bool wide = f.mask.vector_width == 16 && f.mask.key == 1;
  const Visible own =
      wide ? visible_by_sixteens(f, mask, i0, j0) : visible_by_pairs(f, mask, i0, j0);

  // bit 0: some are visible; bit 1: some are hidden
  uint32_t bits = uint32_t(own.some) | uint32_t(!own.all) << 1;
  PT_UNROLL
  for (int d = 1; d < 32; d *= 2) bits |= ptx::shfl_xor_u32(bits, d);
  const uint32_t found = ptx::dynamic_smem();  // one word per warp
  if (lane_id() == 0) ptx::st_shared_u32(found + int(threadIdx.x) / 32 * 4, bits);
  ptx::syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kMaskThreads / 32; ++warp) bits |= ptx::ld_shared_u32(found + warp * 4);
  ptx::st_global_u32(f.states + n, !(bits & 1) ? kNonePairs : bits & 2 ? kSomePairs : kAllPairs);
}

// Write this thread's list: its blocks in ascending order, its start and its end. It has space for
// all blocks.
PT_DEVICE void make_list(const AttentionMaskLists& f) {
  constexpr int kInFlight = 16;
  const int64_t n = int64_t(blockIdx.x) * kMaskThreads + threadIdx.x;
  if (n >= int64_t(f.masks) * f.lists()) return;
  const int list = int(n % f.lists()), room = f.room(), start = int(n * room);
  const bool transposed = f.by_keys;
  const int step = transposed ? f.across() : 1;
  const uint32_t* const states =
      f.states + n / f.lists() * f.down() * f.across() + list * (transposed ? 1 : room);
  int end = start;
  for (int first = 0; first < room; first += kInFlight) {
    uint32_t state[kInFlight];
    PT_UNROLL
    for (int i = 0; i < kInFlight; ++i)
      state[i] = first + i < room ? ptx::ld_global_u32(states + int64_t(first + i) * step)
                                  : uint32_t(kNonePairs);
    PT_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (state[i] == kNonePairs) continue;
      ptx::st_global_u32(f.entries + 2 * int64_t(end), uint32_t(first + i));
      ptx::st_global_u32(f.entries + 2 * int64_t(end) + 1,
                         state[i] == kAllPairs ? uint32_t(-1) : 0);
      ++end;
    }
  }
  ptx::st_global_u32(f.offsets + 2 * n, uint32_t(start));
  ptx::st_global_u32(f.offsets + 2 * n + 1, uint32_t(end));
}

// One kernel for all, because docs/design/cuda.md limits the number of kernels.
template <class K>
__global__ void __launch_bounds__(kMaskThreads)
    attention_mask_kernel(const __grid_constant__ AttentionMask f) {
  if (f.padding.mask.data) make_key_padding(f.padding);
  else if (f.bits.sequences) make_pair_bits(f.bits);
  else if (!f.lists.offsets) make_block_state(f.lists);
  else make_list(f.lists);
}

}  // namespace pt::cuda
