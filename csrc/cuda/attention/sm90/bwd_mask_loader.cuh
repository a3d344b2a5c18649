// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a: masks, biases and segments, loaded per pair by idle warps of the
// producer.
//
// Per iteration they write the tile's visible mask to shared memory, one bit per pair, bounds
// included. Consumers load one word per 32 columns of each of their two rows. Rows and columns are
// queries and keys as in the accumulators, or the reverse in bwd_dkdv; memory is read along its
// rows in both cases: in bwd_dkdv a lane reads four keys of 32 queries. The buffers share the
// barriers of a ring of tiles: the loading warps are writers of the ring, and each consumer warp is
// a reader.
#pragma once

#include "cuda/attention/sm90/bwd_tile.cuh"

namespace pt::cuda {

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
