// SPDX-License-Identifier: Apache-2.0
// Forward's mask loader on sm_90a: masks, dense biases, segments and padding, per pair of a
// consumer's tile of BN keys.
//
// Loads are issued during the scores' gemm. Hidden pairs become bits there: for a lane's row r (0
// or 1), bit 2 j + e is column e of its two in n-block j. Boolean masks are already bits.
// Floating-point masks and biases are loaded in pairs, of which a lane holds 16 or 32 words until
// the scores are complete: 64 or 128 columns in 16 bits, half as many in float32. Unpaired ones,
// and a second one, are loaded element by element.
#pragma once

#include "cuda/attention/sm90/tile.cuh"

namespace pt::cuda {

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
  uint32_t visible[2];

  PT_DEVICE explicit MaskLoader(const AttentionProblem& p)
      : p_(p), paired_(paired(p.mask)   ? 1
                       : paired(p.bias) ? 2
                                        : 0) {}

  // Load for the keys from `first` on. `adds`: floating-point masks and biases too; place: index of
  // the tile's bits, as in TileList. Work: QueryWork.
  template <class Work>
  PT_DEVICE void load(const Work& w, int first, bool adds, int place = 0) {
    const int column = first + 2 * (lane_id() % 4);
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const Range bounds = w.own_bounds(p_, r);
      visible[r] = columns_below(bounds.hi - column) & ~columns_below(bounds.lo - column);
    }
    if (kEarly && adds && paired_) load_pairs(w, paired_ == 1 ? p_.mask : p_.bias, column, 0);
    if (p_.blocks.bits && place >= 0) hide_block(w, first, place);
    if (p_.mask_bits.queries.data && place >= 0) hide_bits(w, first);
    if (p_.query_segments) hide_segments(w, column);
    if (w.s.padding_gaps) hide_keys(w, column);
  }

  // Add floating-point masks and biases to x, scores in natural units of the columns from n-block c
  // of the tile on, whose first key is `first`; -inf for hidden pairs. Call it for all pieces in
  // order.
  template <class Work>
  PT_DEVICE void add(const Work& w, float (&x)[kPiece][4], int first, int c) {
    const int column = first + 2 * (lane_id() % 4);
    if (paired_) {
      const Dense& d = paired_ == 1 ? p_.mask : p_.bias;
      if (d.type == DenseType::f32) {
        if ((c > 0 || !kEarly) && c % (kRawWords / 4) == 0) load_pairs(w, d, column, c);
        add_each(
            x, [&](int n, int r) { return ptx::bits_float(raw_[(4 * (c + n) + r) % kRawWords]); });
      } else {
        if ((c > 0 || !kEarly) && c % (kRawWords / 2) == 0) load_pairs(w, d, column, c);
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

  // Load the lane's pairs of columns, the first at `column`, from n-block c on, as many as are
  // held.
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

  // Hide keys by the words of a boolean mask.
  template <class Work>
  PT_DEVICE void hide_bits(const Work& w, int first) {
    uint32_t words[2][BN / 32];
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint32_t* const row =
          words_of(p_.mask_bits.queries, w.b, w.h, query(w, r)) + (first - w.origin) / 32;
      if constexpr (BN == 128) {
        const ptx::Words4 four = ptx::ld_global_v4(row);
        PT_UNROLL
        for (int c = 0; c < 4; ++c) words[r][c] = four.w[c];
      } else {
        PT_UNROLL
        for (int c = 0; c < BN / 32; ++c) words[r][c] = ptx::ld_global_u32(row + c);
      }
    }
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t shown = 0;
      PT_UNROLL
      for (int c = 0; c < BN / 32; ++c)
        shown |= own_bits(words[r][c] >> lane_id() % 4 * 2) << 8 * c;
      visible[r] &= shown;
    }
  }

  template <class Work>
  PT_DEVICE void hide_keys(const Work& w, int column) {
    const KeyPaddingBitmap keys(p_, w.b);
    uint32_t shown = 0;
    PT_UNROLL
    for (int c = 0; c < BN / 32; ++c) shown |= own_bits(keys.from(column + 32 * c)) << 8 * c;
    visible[0] &= shown, visible[1] &= shown;
  }

  // Hide pairs of a partial block of a block mask: a word holds 32 keys of a query.
  template <class Work>
  PT_DEVICE void hide_block(const Work& w, int first, int place) {
    const BlockLists& lists = p_.blocks.queries;
    const int to_next_query = lists.column_bits - 5;  // in words, as a shift
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int i = query(w, r) & ((1 << lists.row_bits) - 1);
      const uint32_t* const words = p_.blocks.bits +
                                    (((int64_t(place) << lists.row_bits) + i) << to_next_query) +
                                    (first & ((1 << lists.column_bits) - 1)) / 32;
      uint32_t shown = 0;
      PT_UNROLL
      for (int c = 0; c < BN / 32; ++c)
        shown |= own_bits(ptx::ld_global_u32(words + c) >> lane_id() % 4 * 2) << 8 * c;
      visible[r] &= shown;
    }
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
  int paired_;  // loaded in pairs: 1 the mask, 2 the bias, 0 none
  uint32_t raw_[kRawWords];
};

}  // namespace pt::cuda
