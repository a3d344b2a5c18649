// SPDX-License-Identifier: Apache-2.0
// A block's work: a Q tile and the KV tiles that it sees, or a KV tile and its Q tiles; the
// addresses of its rows; and which tiles are recomputed.
#pragma once

#include "cuda/attention/mask.cuh"
#include "cuda/attention/plan.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/tile/matrix_tile.cuh"

namespace pt::cuda {

template <class T>
PT_DEVICE const T* head_of(const In& t, int b, int h, int64_t row) {
  return static_cast<const T*>(t.data) + b * t.stride.batch + h * t.stride.head +
         row * t.stride.row;
}
// Return row j of a key head of sequence b in a paged pool; `pool` is the head's address in the
// first page. Uses 64-bit offsets, because pools have any size.
template <class T>
PT_DEVICE const T* row_in_pages(const Pages& pages, const T* pool, const HeadRows& stride, int b,
                                int j) {
  const auto before = [&](int k) {
    return int(pages.shift >= 0 ? uint32_t(k) >> pages.shift : uint32_t(k) / uint32_t(pages.size));
  };
  const int row = j - before(j) * pages.size;
  const int64_t entry = b * pages.width + before(j);
  const int64_t page =
      pages.wide
          ? load_i64(static_cast<const int64_t*>(pages.table) + entry)
          : int64_t(int32_t(ptx::ld_global_u32(static_cast<const int32_t*>(pages.table) + entry)));
  return pool + clamp64(page, 0, pages.count - 1) * stride.batch + row * stride.row;
}
PT_DEVICE int64_t row_stat_at(const PerQuery& at, int b, int h, int64_t row) {
  return b * at.batch + h * at.head + row * at.row;
}

// `Rows` queries of one head, and the tiles of `Streamed` keys that some of them see. Global: there
// may be global keys; some of the range's tiles are then empty: see gap.
template <int Rows, int Streamed, bool Global = false>
struct QueryTile {
  static constexpr int kRows = Rows;

  int b, h, i0, origin;  // i0: first query; origin: start of the KV tiles
  Sequence s;
  Tiles range;

  PT_DEVICE QueryTile(const AttentionProblem& p, const Sequence& s, int b, int h, int tile)
      : QueryTile(p, s, b, h, tile * Rows, Rows) {}

  PT_DEVICE QueryTile(const AttentionProblem& p, const TilePlace& at)
      : QueryTile(p, Sequence(p, at.head / p.heads), at.head / p.heads, at.head % p.heads,
                  at.tile) {}

  static PT_DEVICE int heads(const AttentionProblem& p) { return p.heads; }
  static PT_DEVICE int tiles(const AttentionProblem& p) {
    return (p.num_queries + Rows - 1) / Rows;
  }
  static PT_DEVICE int first_row(const AttentionProblem&, int tile) { return tile * Rows; }
  // Return work item n of all sequences, heads and tiles. With causality, tiles with the most keys
  // come first.
  static PT_DEVICE TilePlace place(const AttentionProblem& p, uint32_t n) {
    const int of_head = tiles(p), tile = int(n) % of_head;
    return {int(n) / of_head, p.causal ? of_head - 1 - tile : tile};
  }

  // Return the key range of query i, empty past the last query. With global keys it includes the
  // gap: see outside_gaps.
  PT_DEVICE Range bounds(const AttentionProblem& p, int i) const {
    return i < s.num_q ? keys_of(p, i) : Range{0, 0};
  }
  PT_DEVICE Range keys_of(const AttentionProblem& p, int i) const {
    return s.template keys_of<Global>(p, i);
  }
  // Return the empty tiles between the global keys and the first window, rounded to groups of
  // `Stages`, so that the tiles before and after alternate stages.
  template <int Stages>
  PT_DEVICE Range gap(const AttentionProblem& p) const {
    if (!Global || !p.global_keys) return {0, 0};
    constexpr int size = Stages * Streamed;
    const int window = i0 + s.diagonal_offset - p.left;
    const int end_of_global = (p.global_keys - origin + size - 1) / size;
    return {end_of_global * Stages, max(0, window - origin) / size * Stages};
  }

  // Return true if pairs of tile t may be in a gap; tile t must be partial, because keys past the
  // range are not zeros.
  PT_DEVICE bool may_have_gaps(const AttentionProblem& p, int t) const {
    return Global && p.global_keys && range.cut(t);
  }

  // Start to copy the queries' rows of a tensor of `columns`, and the rows of KV tile t; rows
  // without a visible pair become zeros.
  template <class T, int RowBytes>
  PT_DEVICE void copy_queries(SmemTile<RowBytes> to, const In& from, int columns) const {
    copy_rows<Rows>(to, head_of<T>(from, b, h, s.row_q), from.stride.row, i0, 0, s.num_q, columns,
                    Products<T>::chunks(columns));
  }
  template <class T, int RowBytes>
  PT_DEVICE void copy_keys(SmemTile<RowBytes> to, const In& from, int columns, int t,
                           int group) const {
    copy_rows<Streamed>(to, head_of<T>(from, b, h / group, s.row_k), from.stride.row,
                        origin + t * Streamed, range.start, range.end, columns,
                        Products<T>::chunks(columns));
  }
  // Like copy_keys, for keys that may be paged (forward only).
  template <class T, int RowBytes>
  PT_DEVICE void copy_any_keys(const AttentionProblem& p, SmemTile<RowBytes> to, const In& from,
                               int columns, int t) const {
    if (!p.pages.table) return copy_keys<T>(to, from, columns, t, p.group);
    const T* const pool = static_cast<const T*>(from.data) + h / p.group * from.stride.head;
    const auto row = [&](int j) { return row_in_pages(p.pages, pool, from.stride, b, j); };
    copy_rows_at<Streamed>(to, pool, row, origin + t * Streamed, range.start, range.end, columns,
                           Products<T>::chunks(columns));
  }

  // Return the scale of key j's row; 0 without visible pairs, where it is not read.
  PT_DEVICE float scale_of(const AttentionProblem& p, const In& from, int j) const {
    if (j < range.start || j >= range.end) return 0.0f;
    return load_one(row_of_key<float>(p, from, h / p.group, j));
  }

 protected:
  template <class T>
  PT_DEVICE const T* row_of_key(const AttentionProblem& p, const In& from, int key_head,
                                int j) const {
    if (!p.pages.table) return head_of<T>(from, b, key_head, s.row_k) + j * from.stride.row;
    return row_in_pages(p.pages, static_cast<const T*>(from.data) + key_head * from.stride.head,
                        from.stride, b, j);
  }
  // `queries` queries from i0 on.
  PT_DEVICE QueryTile(const AttentionProblem& p, const Sequence& s, int b, int h, int i0,
                      int queries)
      : b(b), h(h), i0(i0), origin(key_origin(p)), s(s),
        range(min(queries, s.num_q - i0), keys_of(p, i0),
              window_of(p, min(i0 + queries, s.num_q) - 1), origin, Streamed) {}

 private:
  // Like keys_of, from the start of the query's window: all queries see the keys after the last
  // query's start.
  PT_DEVICE Range window_of(const AttentionProblem& p, int i) const {
    return {s.keys_of(p, i).lo, keys_of(p, i).hi};
  }
};

// Position of a block in split KV: row tiles vary fastest, so blocks that read the same keys run
// concurrently.
struct SplitPlace {
  int b, key_head, split, tile;

  PT_DEVICE SplitPlace(const SplitGrid& grid, int n) {
    const int last = grid.row_tiles - 1, part = n >> last, of_head = grid.splits.quotient(part);
    tile = n & last, split = part - of_head * int(grid.splits.by);
    b = grid.key_heads.quotient(of_head), key_head = of_head - b * int(grid.key_heads.by);
  }
};

// `Rows` rows of the heads that share a key head: row r is query r / group of the group's head r %
// group, so keys are read once for all heads. Covers one split of the visible KV tiles and, of
// these, this thread's stream. h is the first head. Global: there may be global keys.
template <int Rows, int Streamed, bool Global>
struct GroupTile : QueryTile<Rows, Streamed, Global> {
  using Queries = QueryTile<Rows, Streamed, Global>;
  static_assert(kMostSplitRows <= 2 * Rows);
  const SplitGrid& grid;
  int r0, key_head;
  bool empty;  // the full split is empty

  PT_DEVICE GroupTile(const AttentionProblem& p, const SplitGrid& grid, const SplitPlace& at,
                      int stream = 0, int streams = 1)
      : Queries(p, Sequence(p, at.b), at.b, at.key_head * p.group,
                grid.group.quotient(at.tile * Rows),
                grid.group.quotient(at.tile * Rows + Rows - 1) -
                    grid.group.quotient(at.tile * Rows) + 1),
        grid(grid), r0(at.tile * Rows), key_head(at.key_head) {
    Tiles& range = this->range;
    const int tiles = 1 << log2_tiles_of_split(range.count(), Streamed, grid.row_tiles);
    range.first += at.split * tiles;
    range.last = min(range.last, range.first + tiles);
    empty = range.count() <= 0;
    range.first += stream * (tiles / streams);
    range.last = min(range.last, range.first + tiles / streams);
  }

  // Return the number of splits that are not empty, or 1. From the range of keys: held across the
  // loop, the number spilled.
  PT_DEVICE int splits() const {
    const int tiles = (this->range.end - this->origin + Streamed - 1) / Streamed -
                      (this->range.start - this->origin) / Streamed;
    const int log2 = log2_tiles_of_split(tiles, Streamed, grid.row_tiles);
    return max(1, (tiles + (1 << log2) - 1) >> log2);
  }

  PT_DEVICE Range bounds(const AttentionProblem& p, int row) const {
    return Queries::bounds(p, grid.group.quotient(row));
  }

  // Copy with 128 threads.
  template <class T, int RowBytes>
  PT_DEVICE void copy_queries(SmemTile<RowBytes> to, const In& from, int columns) const {
    const int group = int(grid.group.by);
    const T* const first = head_of<T>(from, this->b, this->h, this->s.row_q);
    const auto row = [&](int r) {
      const int i = grid.group.quotient(r);
      return first + uint32_t(r - i * group) * from.stride.head + uint32_t(i) * from.stride.row;
    };
    copy_rows_at<Rows, 128>(to, first, row, r0, 0, this->s.num_q * group, columns,
                            Products<T>::chunks(columns));
  }

  // Copy with one warp; with pages, each lane looks up the row of one key.
  template <class T, int RowBytes>
  PT_DEVICE void copy_keys_by_warp(const AttentionProblem& p, SmemTile<RowBytes> to, const In& from,
                                   int columns, int t) const {
    static_assert(Streamed == 32);
    const Tiles& range = this->range;
    const int first = this->origin + t * Streamed, lo = range.start - first, hi = range.end - first,
              used = Products<T>::chunks(columns);
    if (!Global && !p.pages.table) {  // with score_mod the addresses spilled
      const T* const head = head_of<T>(from, this->b, key_head, this->s.row_k);
      return copy_rows_by_warp(to, head + first * from.stride.row, from.stride.row, lo, hi, columns,
                               used);
    }
    const bool there = lane_id() >= lo && lane_id() < hi;
    const T* const row = there ? this->template row_of_key<T>(p, from, key_head, first + lane_id())
                               : static_cast<const T*>(from.data);
    copy_rows_of_lanes(to, row, lo, hi, columns, used);
  }
};

// `Rows` keys from j0 on of one key head, and the tiles of `Streamed` queries, in each of its query
// heads, that see some of them. j0 is negative if dropout's groups start before the first key.
// Global: there may be global keys.
template <int Rows, int Streamed, bool Global = false>
struct KeyTile {
  static constexpr int kRows = Rows;

  int b, hk, j0;
  Sequence s;
  Tiles range;

  PT_DEVICE KeyTile(const AttentionProblem& p, int b, int hk, int j0)
      : b(b), hk(hk), j0(j0), s(p, b),
        range(tiles_seeing(p, max(j0, s.first_k), min(j0 + Rows, s.num_k))) {}

  PT_DEVICE KeyTile(const AttentionProblem& p, const TilePlace& at)
      : KeyTile(p, at.head / heads(p), at.head % heads(p), key_origin(p) + at.tile * Rows) {}

  // Divisors are recomputed per tile: held across tiles, they spilled in the kernel with score_mod.
  static PT_DEVICE int heads(const AttentionProblem& p) { return p.heads / ptx::opaque(p.group); }
  static PT_DEVICE int tiles(const AttentionProblem& p) {
    return (ptx::opaque(p.num_keys) - key_origin(p) + Rows - 1) / Rows;
  }
  // Return a tile's first row as Recompute counts: from the tiles' start or, without score_mod,
  // from the first key.
  static PT_DEVICE int first_row(const AttentionProblem& p, int tile) {
    return tile * Rows + (p.has_score_mod() ? 0 : key_origin(p));
  }
  static PT_DEVICE TilePlace place(const AttentionProblem& p, uint32_t n) {
    const int of_head = tiles(p);
    return {int(n) / of_head, int(n) % of_head};
  }

  // Return the query range of key j; empty if the key is absent or padding.
  PT_DEVICE Range bounds(const AttentionProblem& p, int j) const {
    return j >= s.first_k && (!s.padding_gaps || j >= s.num_k || KeyPaddingBitmap(p, b).visible(j))
               ? unhidden_bounds(p, j)
               : Range{0, 0};
  }
  // Like bounds, without key padding: results of a hidden row stay in that row.
  PT_DEVICE Range unhidden_bounds(const AttentionProblem& p, int j) const {
    return j >= 0 && j < s.num_k ? s.template queries_of<Global>(p, j) : Range{0, 0};
  }

  template <class T, int RowBytes>
  PT_DEVICE void copy_keys(SmemTile<RowBytes> to, const In& from, int columns) const {
    copy_rows<Rows>(to, head_of<T>(from, b, hk, s.row_k), from.stride.row, j0, 0, s.num_k, columns,
                    Products<T>::chunks(columns));
  }
  template <class T, int RowBytes>
  PT_DEVICE void copy_queries(SmemTile<RowBytes> to, const In& from, int columns, int t, int h,
                              const Tiles& range) const {
    copy_rows<Streamed>(to, head_of<T>(from, b, h, s.row_q), from.stride.row, t * Streamed,
                        range.start, range.end, columns, Products<T>::chunks(columns));
  }

 private:
  // Return the Q tiles in which some query sees one of the keys first .. end - 1.
  PT_DEVICE Tiles tiles_seeing(const AttentionProblem& p, int first, int end) const {
    Range of_first = s.template queries_of<Global>(p, first),
          of_last = s.template queries_of<Global>(p, end - 1);
    // global keys have the last query ends; the first key of a window has the first
    if (Global && first < p.global_keys) {
      of_last.hi = of_first.hi;
      of_first.hi = s.template queries_of<Global>(p, min(p.global_keys, end - 1)).hi;
    }
    return Tiles(end - first, of_first, of_last, 0, Streamed);
  }
};

// One element group of a mask's or bias's gradient: the range of sequences, heads, Q tiles and KV
// tiles that it sums over, in dimensions that the mask or bias broadcasts. Numbered with keys
// fastest.
struct DbiasPart {
  Range of[4];

  PT_DEVICE DbiasPart(const AttentionDbias& f, int query_tiles, int key_tiles, int n) {
    const int all[4] = {f.b.p.sequences, f.b.p.heads, query_tiles, key_tiles};
    PT_UNROLL
    for (int d = 3; d >= 0; --d) {
      const bool shared = f.sizes[d] == 1;
      of[d] = shared ? Range{0, all[d]} : Range{n % all[d], n % all[d] + 1};
      if (!shared) n /= all[d];
    }
  }
  // Return the offset of the gradient's element of query i and key j.
  PT_DEVICE int64_t at(const AttentionDbias& f, int i, int j) const {
    return of[0].lo * f.batch + of[1].lo * f.head + i * f.query + j * f.key;
  }
};

// Like Place, for the rows of a GroupTile, with `group` heads per query.
struct GroupPlace : Place {
  int query[2];
  PT_DEVICE GroupPlace(int first_row, int first_column, const Divisor& group)
      : Place(first_row, first_column) {
    query[0] = group.quotient(row), query[1] = group.quotient(row + 8);
  }
  PT_DEVICE int row_of(int r) const { return query[r / 2]; }
  PT_DEVICE GroupPlace after(int columns) const {
    GroupPlace place = *this;
    place.column += columns;
    return place;
  }
};

// Recomputation of results of kernels that do not mask hidden rows: see Recompute in params.h.
// Exact and deterministic.

// Flag the tile of row `row` of a head (b * heads + h) for recomputation.
PT_DEVICE void flag_nonfinite(const Recompute& recompute, int64_t head, int row) {
  ptx::st_global_u32(recompute.flags + head * recompute.tiles + row / recompute.rows, 1);
}

// Return true if rows [first, end) of a head (b * heads + h) must be recomputed.
PT_DEVICE bool is_flagged(const Recompute& recompute, int64_t head, int first, int end) {
  for (int tile = max(first, 0) / recompute.rows;
       tile < recompute.tiles && tile * recompute.rows < end; ++tile)
    if (ptx::ld_global_u32(recompute.flags + head * recompute.tiles + tile)) return true;
  return false;
}

// Call make for this block's tile, a Work; or, if there are flags, for the flagged ones of tiles
// blockIdx.x, blockIdx.x + gridDim.x, ... Each lane reads the flags of one tile, so few blocks
// cover all tiles and wait once per 32 of them.
template <class Work, class K, class Make>
PT_DEVICE void recompute_tiles(const AttentionProblem& p, const Recompute& recompute, Make make) {
  const auto make_one = [&](uint32_t n) { make(Work(p, Work::place(p, n))); };
  if constexpr (!K::has_score_mod) return make_one(blockIdx.x);
  const uint32_t all = uint32_t(p.sequences * Work::heads(p) * Work::tiles(p));
  const auto must = [&](uint32_t n) {
    const TilePlace at = Work::place(p, n);
    const int first = Work::first_row(p, at.tile);
    return is_flagged(recompute, at.head, first, first + Work::kRows);
  };
  for (uint32_t n = blockIdx.x; n < all;) {
    uint32_t found = n;
    if (recompute.flags) {
      const uint32_t own = n + uint32_t(lane_id()) * gridDim.x;
      found = own < all && must(own) ? own : all;
      PT_UNROLL
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t other = ptx::shfl_xor_u32(found, d);
        found = other < found ? other : found;
      }
    }
    n = found < all ? found + gridDim.x : n + 32 * gridDim.x;
    if (found == all) continue;
    make_one(found);
    ptx::syncthreads();  // all reads of its shared memory are done
  }
}

// Return true if an accumulator of the lane's two rows is NaN or infinite; rows with factor 0 do
// not count.
template <int N>
PT_DEVICE bool not_finite(const float (&x)[N], const float (&factor)[2]) {
  float zero = 0.0f;
  PT_UNROLL
  for (int i = 0; i < N; ++i)
    zero = ptx::fma_rn(factor[i / 2 % 2] == 0.0f ? 0.0f : x[i], 0.0f, zero);
  return zero != 0.0f;  // NaN
}

}  // namespace pt::cuda
