// SPDX-License-Identifier: Apache-2.0
// Mask loaders of the sm_90a kernels: masks, biases, segments and padding per pair, in forward and
// in backward.
//
// Forward. The producer iterates over KV tiles from last to first, restricted by block lists, and
// writes notes about them for consumers, so only one thread of a block reads lists. The bits of
// boolean masks and of partial blocks come with the notes, by TMA (TileNotes). Consumers load what
// else hides or changes pairs during the scores' gemm (MaskLoader). Hidden pairs become bits there:
// for a lane's row r (0 or 1), bit 2 j + e is column e of its two in n-block j. Floating-point
// masks and biases come in tiles by TMA if TMA can address them. Others are loaded in pairs, of
// which a lane holds 16 or 32 words until the scores are complete: 64 or 128 columns in 16 bits,
// half as many in float32. Unpaired ones, and a second one, are loaded element by element.
//
// Backward. Per iteration idle warps of the producer write the tile's visible mask to shared
// memory, one bit per pair, bounds included (BackwardMaskLoader). Consumers load one word per 32
// columns of each of their two rows. Rows and columns are queries and keys as in the accumulators,
// or the reverse in bwd_dkdv; memory is read along its rows in both cases: in bwd_dkdv a lane reads
// four keys of 32 queries. The buffers share the barriers of a ring of tiles: the loading warps are
// writers of the ring, and each consumer warp is a reader.
#pragma once

#include "cuda/attention/sm90/tile.cuh"
#include "cuda/ptx/matrix.cuh"

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

// The forward reads the bits of a block mask, or of a dense boolean mask, whose row is the same for
// all queries if it has one.
PT_DEVICE bool has_bits(const AttentionProblem& p) {
  return p.blocks.bits || p.mask_bits.queries.data;
}
PT_DEVICE bool bits_have_rows(const AttentionProblem& p) {
  return p.blocks.bits || p.mask_bits.queries.row;
}
// Map them in boxes of 128 keys by `rows` queries: (words of 16 bits, rows, heads, sequences).
inline ptx::TensorMap map_bits(const AttentionProblem& p, int rows) {
  const PairBits::Rows& bits = p.mask_bits.queries;
  MappedTensor t{bits.data, DType::f16, 4, {0, 1, 1, 1}, {1, 0, 0, 0}};
  if (p.blocks.bits) {
    t.data = p.blocks.bits;
    t.dim[0] = t.stride[1] = uint64_t(1) << (p.blocks.queries.column_bits - 4);
    t.dim[1] = uint64_t(p.blocks.places) << p.blocks.queries.row_bits;
  } else {
    t.dim[0] = 2 * uint64_t(PairBits::words(p.num_keys + int(p.key_start % 32)));
    if (bits.row) t.dim[1] = uint64_t(p.num_queries), t.stride[1] = 2 * uint64_t(bits.row);
    else rows = 1;
    if (bits.head) t.dim[2] = uint64_t(p.heads), t.stride[2] = 2 * uint64_t(bits.head);
    if (bits.batch) t.dim[3] = uint64_t(p.sequences), t.stride[3] = 2 * uint64_t(bits.batch);
  }
  // without bits, and without a partial block, nothing is loaded
  return t.data && t.dim[1] ? tensor_map(t, uint32_t(rows), kSm90BitColumns) : ptx::TensorMap{};
}

// Map the floating-point mask or bias in `tiles`, 1 or 2, in boxes of 64 keys by `rows` queries.
inline ptx::TensorMap map_dense(const AttentionProblem& p, int tiles, int rows) {
  if (!tiles) return {};
  const Dense& d = tiles == 1 ? p.mask : p.bias;
  const auto dim = [](int64_t stride, int size) { return uint64_t(stride ? size : 1); };
  return tensor_map({d.data,
                     d.type == DenseType::bf16 ? DType::bf16 : DType::f16,
                     4,
                     {uint64_t(p.num_keys), uint64_t(p.num_queries), dim(d.head, p.heads),
                      dim(d.batch, p.sequences)},
                     {1, uint64_t(d.query), uint64_t(d.head), uint64_t(d.batch)}},
                    uint32_t(rows));
}

// A KV tile's note. masked: bits came with it; more: another tile follows.
struct TileNote {
  int tile;
  bool masked, more;
};

// Passes notes, and the bits of tiles of BM queries and BN keys, from the producer to all lanes
// through a separate ring. Each warp releases what its lanes have read, because no thread can do so
// for its warpgroup.
template <int Stages, int BM, int BN>
class TileNotes : public Buffers<Stages, 16> {
  using Base = Buffers<Stages, 16>;

 public:
  using Base::buffer, Base::full;

  // `bits`: a multiple of 128
  PT_DEVICE TileNotes(uint32_t notes, uint32_t barriers, uint32_t bits)
      : Base(notes, barriers), bits_(bits) {}

  // Write tile t's note and load its bits. place: as in TileList; `map`: see map_bits.
  template <class Work>
  PT_DEVICE void put(int n, const AttentionProblem& p, const ptx::TensorMap& map, const Work& w,
                     int t, int place, bool more) const {
    const bool masked = place >= 0 && has_bits(p);
    Base::producer_acquire(n);
    ptx::st_shared_u32(buffer(n), uint32_t(t) << 2 | uint32_t(masked) << 1 | uint32_t(more));
    if (!masked) return Base::producer_commit(n);
    Base::producer_commit(n, sm90_bit_box_bytes(bits_have_rows(p) ? BM : 1));
    const PairBits::Rows& rows = p.mask_bits.queries;
    const BlockLists& lists = p.blocks.queries;
    int column = t * BN, row = rows.row ? w.i0 : 0;
    if (p.blocks.bits) {
      column &= (1 << lists.column_bits) - 1;
      row = (place << lists.row_bits) + (w.i0 & ((1 << lists.row_bits) - 1));
    }
    ptx::tma_load_4d(bits(n), map, full(n), column / 16, row, rows.head ? w.h : 0,
                     rows.batch ? w.b : 0);
  }
  PT_DEVICE TileNote take(int n) const {
    Base::consumer_wait(n);
    const uint32_t note = ptx::ld_shared_u32(buffer(n));
    return {int(note >> 2), bool(note & 2), bool(note & 1)};
  }
  // Return 128 keys of a query that is `row` rows from the tile's first.
  PT_DEVICE ptx::Words4 words(int n, const AttentionProblem& p, int row) const {
    return ptx::ld_shared_v4(bits(n) + (bits_have_rows(p) ? sm90_bit_box_bytes(row) : 0));
  }

 private:
  PT_DEVICE uint32_t bits(int n) const {
    return bits_ + uint32_t(n % Stages) * sm90_bit_box_bytes(BM);
  }

  uint32_t bits_;
};

// Return the bits of the columns below the lane's first column + x.
PT_DEVICE uint32_t columns_below(int x) {
  const int count = x <= 0 ? 0 : x / 8 * 2 + min(x % 8, 2);
  return count >= 32 ? kAllColumns : (1u << count) - 1;
}

// D: the class of head sizes.
template <int D, int BN>
class MaskLoader {
  static_assert(BN % 64 == 0 && BN <= 128);
  // Limited by registers: words of a paired bias; columns with loads in flight together.
  static constexpr int kRawWords = D == 64 ? 32 : D == 128 ? 16 : 8, kPart = D == 64 ? 16 : 8;
  static constexpr bool kEarly = D <= 128;  // registers are left during the scores' gemm

 public:
  static constexpr int kPiece = kEarly ? 4 : 2;  // n-blocks per call of add()
  static constexpr int kTiledRows = 128;         // of a tile
  uint32_t visible[2];

  // tiled: 1 if tiles of the mask, 2 if tiles of the bias are in shared memory
  PT_DEVICE explicit MaskLoader(const AttentionProblem& p, int tiled = 0)
      : p_(p), tiled_(tiled), paired_(tiled            ? tiled
                                      : paired(p.mask) ? 1
                                      : paired(p.bias) ? 2
                                                       : 0) {}

  // Start with the bounds of the keys from `first` on; every row sees the keys in `whole`. Work:
  // QueryWork.
  template <class Work>
  PT_DEVICE void start(const Work& w, const Range& whole, int first) {
    const int column = first + 2 * (lane_id() % 4);
    const bool cut = first < whole.lo || first + BN > whole.hi;
    visible[0] = visible[1] = kAllColumns;
    if (cut) {
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const Range bounds = w.own_bounds(p_, r);
        visible[r] = columns_below(bounds.hi - column) & ~columns_below(bounds.lo - column);
      }
    }
    partial_ = cut;
  }

  // Hide pairs by bits: words(r) has 32 keys of the lane's row r per word.
  template <class F>
  PT_DEVICE void hide_bits(F words) {
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const ptx::Words4 row = words(r);
      uint32_t shown = 0;
      PT_UNROLL
      for (int c = 0; c < BN / 32; ++c) shown |= own_bits(row.w[c] >> lane_id() % 4 * 2) << 8 * c;
      visible[r] &= shown;
    }
    partial_ = true;
  }
  // Return these words of a dense mask, from global memory.
  template <class Work>
  PT_DEVICE ptx::Words4 words(const Work& w, int first, int r) const {
    const uint32_t* const row =
        words_of(p_.mask_bits.queries, w.b, w.h, query(w, r)) + (first - w.origin) / 32;
    ptx::Words4 words;
    PT_UNROLL
    for (int c = 0; c < BN / 32; ++c) words.w[c] = ptx::ld_global_u32(row + c);
    return words;
  }

  // Load what else hides or changes pairs. `adds`: floating-point masks and biases too.
  template <class Work>
  PT_DEVICE void load(const Work& w, int first, bool adds) {
    const int column = first + 2 * (lane_id() % 4);
    if (kEarly && adds && paired_ && !tiled_)
      load_pairs(w, paired_ == 1 ? p_.mask : p_.bias, column, 0);
    if (p_.query_segments) hide_segments(w, column), partial_ = true;
    if (w.s.padding_gaps) hide_keys(w, column);
  }

  // Add floating-point masks and biases to x, scores in natural units of the columns from n-block c
  // of the tile on, whose first key is `first`; -inf for hidden pairs. Call it for all pieces in
  // order. `tile`: shared memory with the tile of what is tiled.
  template <class Work>
  PT_DEVICE void add(const Work& w, float (&x)[kPiece][4], int first, int c, uint32_t tile = 0) {
    const int column = first + 2 * (lane_id() % 4);
    if (paired_) {
      const Dense& d = paired_ == 1 ? p_.mask : p_.bias;
      if (d.type == DenseType::f32) {
        if ((c > 0 || !kEarly) && c % (kRawWords / 4) == 0) load_pairs(w, d, column, c);
        add_each(
            x, [&](int n, int r) { return ptx::bits_float(raw_[(4 * (c + n) + r) % kRawWords]); });
      } else {
        if (c % (kRawWords / 2) == 0) {
          if (tiled_) load_tile(tile, c);
          else if (c > 0 || !kEarly) load_pairs(w, d, column, c);
        }
        const auto pair = [&](int n, int r) {
          return uint16_t(raw_[(2 * (c + n) + r / 2) % kRawWords] >> 16 * (r % 2));
        };
        if (d.type == DenseType::bf16)
          add_each(x, [&](int n, int r) { return ptx::widen(ptx::bf16{pair(n, r)}); });
        else add_each(x, [&](int n, int r) { return ptx::widen(ptx::f16{pair(n, r)}); });
      }
    }
    PT_NO_UNROLL
    for (int which = 1; which <= 2; ++which) {
      const Dense& d = which == 1 ? p_.mask : p_.bias;
      if (!d.data || d.type == DenseType::boolean || which == paired_) continue;
      with_reader(d, [&](auto read) {
        add_each(x, [&](int n, int r) {
          return read(head(w, d) + int64_t(query(w, r / 2)) * d.query +
                      clamped(column + 8 * (c + n) + r % 2) * d.key);
        });
      });
    }
  }

  PT_DEVICE void hide(float (&s)[BN / 2]) const {
    if (!partial_) return;
    PT_UNROLL
    for (int i = 0; i < BN / 2; ++i)
      s[i] = visible[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1 ? s[i] : minus_infinity();
  }

 private:
  static PT_DEVICE bool paired(const Dense& d) {
    return d.data && d.vector_width > 1 &&
           (d.type == DenseType::f32 || d.type == DenseType::bf16 || d.type == DenseType::f16);
  }
  template <class Work>
  static PT_DEVICE int64_t head(const Work& w, const Dense& d) {
    return w.b * d.batch + w.h * d.head;
  }
  // Clamp to existing rows and keys: absent ones are hidden by bounds or not written.
  template <class Work>
  PT_DEVICE int query(const Work& w, int r) const {
    return min(w.i0 + own_row(r), p_.num_queries - 1);
  }
  PT_DEVICE int clamped(int key) const { return max(0, min(key, p_.num_keys - 1)); }
  PT_DEVICE bool there(int key) const { return uint32_t(key) < uint32_t(p_.num_keys); }

  // x + bias, or -inf if either is; otherwise clamped to -finfo.max, which two large terms could
  // exceed.
  template <class F>
  static PT_DEVICE void add_each(float (&x)[kPiece][4], F term) {
    each<kPiece>([&](int n, int r, uint32_t) {
      const float t = term(n, r), sum = x[n][r] + t;
      const bool hidden = t == minus_infinity() || x[n][r] == minus_infinity();
      x[n][r] = hidden ? minus_infinity() : sum < -kFloatMax ? -kFloatMax : sum;
    });
  }

  // Load the lane's pairs of columns from n-block c on, as many as are held, from a tile of panels.
  // One ldmatrix loads n-blocks n and n + 1 of the warp's 16 rows; n is even, so a xor swizzles it.
  PT_DEVICE void load_tile(uint32_t tile, int c) {
    tile += swizzle128(warp_row() + lane_id() % 16, lane_id() / 16);
    PT_UNROLL
    for (int i = 0; i < kRawWords; i += 4) {
      const int n = c + i / 2, panel = n / 8 * kTiledRows * kSwizzleRow;
      uint32_t words[4];
      ptx::ldmatrix_x4((tile ^ n % 8 << 4) + panel, words);
      PT_UNROLL
      for (int j = 0; j < 4; ++j) raw_[i + j] = words[j];
    }
  }
  // Load them from global memory, the first at `column`.
  template <class Work>
  PT_DEVICE void load_pairs(const Work& w, const Dense& d, int column, int c) {
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int64_t at = head(w, d) + int64_t(query(w, r)) * d.query + column + 8 * c;
      if (d.type == DenseType::f32) {
        PT_UNROLL
        for (int n = 0; n < kRawWords / 4; ++n) {
          const uint64_t pair =
              there(column + 8 * (c + n))
                  ? ptx::ld_global_u64(static_cast<const float*>(d.data) + at + 8 * n)
                  : 0;
          raw_[4 * n + 2 * r] = uint32_t(pair), raw_[4 * n + 2 * r + 1] = uint32_t(pair >> 32);
        }
      } else {
        PT_UNROLL
        for (int n = 0; n < kRawWords / 2; ++n)
          raw_[2 * n + r] =
              there(column + 8 * (c + n))
                  ? ptx::ld_global_u32(static_cast<const uint16_t*>(d.data) + at + 8 * n)
                  : 0;
      }
    }
  }

  // Select a lane's bits of a word's 32 keys, from its first column on: bit 8 n + e becomes 2 n +
  // e.
  static PT_DEVICE uint32_t own_bits(uint32_t word) {
    return (word & 0x03030303u) * 0x01041040u >> 24;
  }

  template <class Work>
  PT_DEVICE void hide_keys(const Work& w, int column) {
    const KeyPaddingBitmap keys(p_, w.b);
    uint32_t shown = 0;
    PT_UNROLL
    for (int c = 0; c < BN / 32; ++c) shown |= own_bits(keys.from(column + 32 * c)) << 8 * c;
    visible[0] &= shown, visible[1] &= shown;
  }

  template <class Work>
  PT_DEVICE void hide_segments(const Work& w, int column) {
    int64_t own[2];
    PT_UNROLL
    for (int r = 0; r < 2; ++r)
      own[r] = load_i64(p_.query_segments + int64_t(w.b) * p_.num_queries + query(w, r));
    const int64_t* const keys = p_.key_segments + int64_t(w.b) * p_.num_keys;
    if (int64_t one; one_segment<BN>(keys, column - 2 * (lane_id() % 4), p_.num_keys, one)) {
      PT_UNROLL
      for (int r = 0; r < 2; ++r) visible[r] = own[r] == one ? visible[r] : 0;
      return;
    }
    hide_each([&](int k) { return load_i64(keys + clamped(column + k)); },
              [&](int64_t segment, int r) { return segment == own[r]; });
  }

  // Keep the pairs with show(key(k), r), where k counts from the lane's first column. A loop, so
  // only one part uses registers.
  template <class Key, class Show>
  PT_DEVICE void hide_each(Key key, Show show) {
    uint32_t shown[2] = {0, 0};
    PT_NO_UNROLL
    for (int part = 0; part < BN / 4; part += kPart) {
      PT_UNROLL
      for (int k = 0; k < kPart; ++k) {
        const int64_t of_key = key(4 * part + k / 2 * 8 + k % 2);
        PT_UNROLL
        for (int r = 0; r < 2; ++r) shown[r] |= show(of_key, r) ? 1u << k << part : 0;
      }
    }
    visible[0] &= shown[0], visible[1] &= shown[1];
  }

  const AttentionProblem& p_;
  int tiled_;
  int paired_;    // loaded in pairs: 1 the mask, 2 the bias, 0 none
  bool partial_;  // some pair may be hidden by bits
  uint32_t raw_[kRawWords];
};

// The visible mask of a lane's two rows in a tile of `Columns`: four bits per n-block as in the
// accumulators; columns 8 n on are in byte n % 4.
template <int Columns>
struct VisiblePairs {
  uint32_t words[(Columns + 63) / 64] = {};
  PT_DEVICE void hide(int i, bool hidden) {
    if (hidden) words[i / 32] &= ~(1u << (i / 4 % 4 * 8 + i / 16 % 2 * 4 + i % 4));
  }
  PT_DEVICE bool has(int i) const {
    return words[i / 32] >> (i / 4 % 4 * 8 + i / 16 % 2 * 4 + i % 4) & 1;
  }

  // Return the same bits, unpacked only after this point: unpacked bits use a register each.
  PT_DEVICE VisiblePairs opaque() const {
    VisiblePairs same;
    PT_UNROLL
    for (int w = 0; w < (Columns + 63) / 64; ++w)
      same.words[w] = uint32_t(ptx::opaque(int(words[w])));
    return same;
  }

  // Set columns 32 w to 32 w + 31, one word for each of the lane's rows.
  PT_DEVICE void put(int w, uint32_t upper, uint32_t lower) {
    const int pair = 2 * (lane_id() % 4);
    const int half = w % 2;
    words[w / 2] |= ((upper >> pair & 0x03030303u) | (lower >> pair & 0x03030303u) << 2)
                    << 4 * half;
  }
};

// Return the bits of the columns below x, of 32.
PT_DEVICE uint32_t bits_below(int x) { return x <= 0 ? 0 : x >= 32 ? kAllColumns : (1u << x) - 1; }
// For kernels without an elementwise mask.
struct NoBackwardMaskLoader {
  static constexpr uint32_t kBytes = 0;
  static constexpr int kWriters = 0;
  PT_DEVICE explicit NoBackwardMaskLoader(uint32_t = 0) {}
};

// Keys: rows are keys (bwd_dkdv).
template <class K, bool Keys>
class BackwardMaskLoader {
  static constexpr Sm90Tile kTile = Keys ? sm90_bwd_dkdv_tile(K::head_dim, K::has_score_mod, true)
                                         : sm90_bwd_dq_tile(K::head_dim, K::has_score_mod, true);
  static constexpr int kColumns = kTile.streamed, kWords = (kColumns + 31) / 32,
                       kPitch = sm90_bit_words(kTile);
  static constexpr int kFirstWarp = Keys ? 2 : 1, kWarps = 4 - kFirstWarp;
  static constexpr int kRows = kTile.rows();
  // True: a warp's lanes have the same columns and check together if these share one segment.
  // bwd_dq with score_mod has no registers for that: neighboring lanes have the words of a row.
  static constexpr bool kDown = Keys || !K::has_score_mod;
  static_assert(kRows % 32 == 0);
  // Load a word before the previous one is processed: two warps have six words each during a tile's
  // gemms.
  static constexpr bool kAhead = Keys;

 public:
  static constexpr uint32_t kBytes = sm90_mask_loader_smem(kTile, Keys, K::has_score_mod);
  static constexpr int kWriters = kWarps;

  PT_DEVICE explicit BackwardMaskLoader(uint32_t base) : base_(base) {}
  static PT_DEVICE bool has_warp(int warp) { return warp >= kFirstWarp; }

  // Load an iteration of query head h, in those warps. The tile's first row is `own`, its first
  // column `first`; bounds(row) are a row's bounds.
  template <class R, class F>
  PT_DEVICE void produce(const R& ring, const AttentionProblem& p, int b, int h, int own, int first,
                         int stream_iter, F bounds) const {
    ring.producer_acquire(stream_iter);
    if constexpr (K::has_score_mod)
      copy_bias(p, b, h, Keys ? first : own, Keys ? own : first, stream_iter);
    const auto row_of = [](int x) { return kDown ? x % kRows : x / kWords; };
    const auto word_of = [](int x) { return kDown ? x / kRows : x % kWords; };
    const auto ask = [&](int x) {
      return x < kRows * kWords ? shown(p, b, h, own + row_of(x), first + 32 * word_of(x)) : 0;
    };
    int x = int(threadIdx.x) - 32 * kFirstWarp;
    uint32_t next = kAhead ? ask(x) : 0;
    PT_NO_UNROLL
    for (; x < kRows * kWords; x += 32 * kWarps) {
      const int row = row_of(x), column = first + 32 * word_of(x);
      uint32_t visible = kAhead ? next : ask(x);
      if (kAhead) next = ask(x + 32 * kWarps);
      if (p.query_segments) visible &= alike(p, b, own + row, column);
      // If rows are keys they need no bits: results of hidden keys are not written.
      if (!Keys && p.key_padding.data) {
        const KeyPaddingBitmap keys(p, ptx::opaque(b));
        const bool across = kColumns % 32;
        const uint32_t unpadded = across ? keys.across(column) : keys.from(column);
        visible &= unpadded;
      }
      const Range visible_to = bounds(own + row);
      const uint32_t within_bounds =
          bits_below(visible_to.hi - column) & ~bits_below(visible_to.lo - column);
      visible &= within_bounds;
      ptx::st_shared_u32(buffer(stream_iter) + 4 * (row * kPitch + word_of(x)), visible);
    }
    if (K::has_score_mod) ptx::cp_async_wait<0>();
    ptx::syncwarp();
    if (lane_id() == 0) ring.producer_commit(stream_iter);
  }

  // Called by consumers once the ring's buffer is full.
  PT_DEVICE VisiblePairs<kColumns> visible(int stream_iter) const {
    VisiblePairs<kColumns> visible;
    const uint32_t at =
        buffer(stream_iter) + 4 * kPitch * (kTile.split ? own_row(0) % 64 : own_row(0));
    PT_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const int lower = 8 * kPitch + w;
      visible.put(w, ptx::ld_shared_u32(at + 4 * w), ptx::ld_shared_u32(at + 4 * lower));
    }
    return visible;
  }

  // Add the floating-point mask or bias to x, scores in natural units of 16 columns from n-block c
  // of the tile on; clear the bits of `visible` that it hides.
  PT_DEVICE void add(const AttentionProblem& p, float (&x)[kPiece][4], int stream_iter, int c,
                     VisiblePairs<kColumns>& visible) const {
    const DenseType type = adds(p.mask)   ? p.mask.type
                           : adds(p.bias) ? p.bias.type
                                          : DenseType::boolean;
    if (type == DenseType::boolean) return;
    const int size = type == DenseType::f32 ? 4 : 2, row = own_row(0), column = 2 * (lane_id() % 4);
    // Return the address of the lane's element in its first row and column e, shifted like its
    // query's row. One shift covers the lane's elements: in bwd_dq they are in one row and the row
    // eight further, in bwd_dkdv in rows eight queries apart.
    const auto at = [&](int e) {
      const uint32_t element = Keys ? (8 * c + column + e) * kBiasPitch + row * size
                                    : row * kBiasPitch + (8 * c + column + e) * size;
      const int shifted = Keys ? column + e : row % 8;
      return bias_tile(stream_iter) + element +
             ptx::ld_shared_u32(shifts(stream_iter) + 4 * shifted);
    };
    const uint32_t first = at(0), second = !Keys ? first + size : at(1);
    const auto add = [&](auto read) {
      each<kPiece>([&](int n, int r, uint32_t) {
        const float term = read(n, r), sum = x[n][r] + term;
        visible.hide(4 * (c + n) + r, term == minus_infinity());
        x[n][r] = sum < -kFloatMax ? -kFloatMax : sum;  // a sum of two finfo.min stays finite
      });
    };
    const auto word = [&](int n, int r) {
      const int half = r / 2 * 8, rows = Keys ? 8 * n : half, columns = Keys ? half : 8 * n;
      const uint32_t element = (r % 2 ? second : first) + rows * kBiasPitch + columns * size;
      return type == DenseType::f32 ? ptx::ld_shared_u32(element)
                                    : ptx::ld_shared_u32(element & ~3u) >> 8 * (element & 2);
    };
    if (type == DenseType::f32) add([&](int n, int r) { return ptx::bits_float(word(n, r)); });
    else if (type == DenseType::bf16)
      add([&](int n, int r) { return ptx::widen(ptx::bf16{uint16_t(word(n, r))}); });
    else add([&](int n, int r) { return ptx::widen(ptx::f16{uint16_t(word(n, r))}); });
  }

 private:
  static constexpr int kBiasPitch = sm90_bias_pitch(kTile, Keys);
  // per tile
  static constexpr int kQueries = Keys ? kColumns : kTile.rows(),
                       kKeys = Keys ? kTile.rows() : kColumns;
  static PT_DEVICE bool adds(const Dense& d) { return d.data && d.type != DenseType::boolean; }
  PT_DEVICE uint32_t bias_tile(int stream_iter) const {
    return buffer(stream_iter) + 4 * kTile.rows() * kPitch;
  }
  PT_DEVICE uint32_t shifts(int stream_iter) const {
    return bias_tile(stream_iter) + kQueries * kBiasPitch;
  }

  // Start to copy the tile of a floating-point mask or bias unchanged; copied() reports if that is
  // possible. The copy starts at a multiple of 16 bytes, not always at the tile's first key: a row
  // is shifted by the bytes before it, and the row eight further by the same number. No copy passes
  // the row's last key.
  template <int Size>  // bytes per element
  PT_DEVICE void copy_rows(const Dense& d, const AttentionProblem& p, int b, int h, int query,
                           int key, int stream_iter) const {
    constexpr int kPer = 16 / Size, kChunks = kKeys / kPer;
    const auto row = [&](int i) {
      return ptx::opaque(b) * d.batch + ptx::opaque(h) * d.head + (query + i) * d.query;
    };
    // elements
    const auto before = [&](int64_t row) {
      return int(uint32_t(row) + uint32_t(key)) & (kPer - 1);
    };
    const auto copy = [&](int i, int c) {
      const int64_t from = row(within(query + i, p.num_queries) - query);
      const int j = key + c * kPer - before(from);
      // if 0, nothing is read from any address
      const int there = j > -kPer ? max(0, min(kPer, p.num_keys - j)) : 0;
      ptx::cp_async_16(bias_tile(stream_iter) + i * kBiasPitch + c * 16,
                       static_cast<const uint8_t*>(d.data) + (from + j) * Size,
                       uint32_t(there * Size));
    };
    const int own = int(threadIdx.x) - 32 * kFirstWarp;
    if (own < 8)
      ptx::st_shared_u32(shifts(stream_iter) + 4 * own, uint32_t(before(row(own)) * Size));
    PT_NO_UNROLL
    for (int x = own; x < kQueries * kChunks; x += 32 * kWarps) copy(x / kChunks, x % kChunks);
    if (d.vector_width == kPer) return;
    PT_NO_UNROLL
    for (int i = own; i < kQueries; i += 32 * kWarps) copy(i, kChunks);
  }
  PT_DEVICE void copy_bias(const AttentionProblem& p, int b, int h, int query, int key,
                           int stream_iter) const {
    const auto copy = [&](const Dense& d) {
      if (d.type == DenseType::f32) copy_rows<4>(d, p, b, h, query, key, stream_iter);
      else copy_rows<2>(d, p, b, h, query, key, stream_iter);
    };
    if (adds(p.mask)) copy(p.mask);
    else if (adds(p.bias)) copy(p.bias);
    ptx::cp_async_commit();
  }

  PT_DEVICE uint32_t buffer(int stream_iter) const {
    return base_ + uint32_t(stream_iter % kTile.stages) * (kBytes / kTile.stages);
  }
  static PT_DEVICE int within(int x, int count) { return max(0, min(x, count - 1)); }

  static PT_DEVICE const int64_t* segments(const AttentionProblem& p, int b, bool of_queries) {
    b = ptx::opaque(b);  // recomputes the addresses
    return of_queries ? p.query_segments + int64_t(b) * p.num_queries
                      : p.key_segments + int64_t(b) * p.num_keys;
  }
  // Return the pairs of a row and 32 columns that share a segment.
  static PT_DEVICE uint32_t alike(const AttentionProblem& p, int b, int row, int column) {
    const int rows = Keys ? p.num_keys : p.num_queries, columns = Keys ? p.num_queries : p.num_keys;
    int64_t one = 0;
    const bool all_alike = kDown && one_segment<32>(segments(p, b, Keys), column, columns, one);
    const int64_t own = load_i64(segments(p, b, !Keys) + within(row, rows));
    const bool of_one = own == one;
    return all_alike ? 0u - uint32_t(of_one)
                     : same_segment(own, segments(p, b, Keys), column, columns);
  }
  // Return the columns, of 32, in a segment.
  static PT_DEVICE uint32_t same_segment(int64_t segment, const int64_t* others, int column,
                                         int columns) {
    constexpr int kLoads = 2;  // in flight together
    uint32_t same = 0;
    PT_NO_UNROLL
    for (int c = 0; c < min(32, kColumns); c += kLoads) {
      int64_t found[kLoads];
      PT_UNROLL
      for (int e = 0; e < kLoads; ++e)
        found[e] = load_i64(others + within(column + c + e, columns));
      PT_UNROLL
      for (int e = 0; e < kLoads; ++e) {
        const bool equal = found[e] == segment;
        same |= uint32_t(equal) << (c + e);
      }
    }
    return same;
  }

  // Return the visible mask of a row and 32 columns by the boolean mask, if there is one.
  static PT_DEVICE uint32_t shown(const AttentionProblem& p, int b, int h, int row, int column) {
    const PairBits::Rows& bits = Keys ? p.mask_bits.keys : p.mask_bits.queries;
    if (!bits.data) return kAllColumns;
    const int own = within(row, Keys ? p.num_keys : p.num_queries);
    return word_from<kColumns % 32 == 0>(words_of(bits, ptx::opaque(b), ptx::opaque(h), own),
                                         Keys ? column : column - key_origin(p));
  }

  uint32_t base_;
};

}  // namespace pt::cuda
