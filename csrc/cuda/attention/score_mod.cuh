// SPDX-License-Identifier: Apache-2.0
// score_mod on the fragments of one tile, between q.k and the softmax: softcap, segments, masks,
// biases, ALiBi, T5, dropout.
//
// A fragment's rows are queries and its columns are keys; Transposed, the reverse. Bit 4 n + r of a
// mask belongs to element r of n-block n.
#pragma once

#include "cuda/attention/pair_bits.cuh"
#include "cuda/attention/work.cuh"
#include "cuda/tile/numbers.cuh"

namespace pt::cuda {

// tanh to 2e-7 relative: a fitted odd polynomial below 0.6, 1 - 2 / (1 + e^2x) above.
PT_DEVICE float tanh_of(float x) {
  const float z = x * x, size = x < 0 ? -x : x;
  float p = ptx::fma_rn(z, -0.005894480914075617f, 0.020795446692862346f);
  p = ptx::fma_rn(p, z, -0.05378369286235975f);
  p = ptx::fma_rn(p, z, 0.1333192275238217f);
  p = ptx::fma_rn(p, z, -0.3333329796161276f);
  const float large = 1.0f - ptx::div_rn(2.0f, 1.0f + ptx::exp2(size * (2 * kLog2e)));
  return size < 0.6f ? ptx::fma_rn(x * z, p, x) : x < 0 ? -large : large;
}

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

// The head and ALiBi slope of a fragment's rows: one for all rows, or one per row of a GroupTile.
struct OneHead {
  int head;
  float slope;
  PT_DEVICE OneHead(const AttentionProblem& p, int h, int)
      : head(h), slope(p.slopes ? load_one(p.slopes + h) : 0.0f) {}
  PT_DEVICE int of(int) const { return head; }
  PT_DEVICE float slope_of(int) const { return slope; }
};
struct HeadsOfGroup {
  int head[2];
  float slope[2];
  PT_DEVICE HeadsOfGroup(const AttentionProblem& p, int first_head, int first_row) {
    PT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane_id() / 4 + 8 * half;
      head[half] = first_head + row % p.group;
      slope[half] = p.slopes ? load_one(p.slopes + head[half]) : 0.0f;
    }
  }
  PT_DEVICE int of(int r) const { return head[r / 2]; }
  PT_DEVICE float slope_of(int r) const { return slope[r / 2]; }
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

// A finite value stays finite: float64's finfo.min is valid data for float32 scores.
PT_DEVICE float narrow_f64(uint64_t bits) {
#if defined(PT_EMULATE)
  double x;
  std::memcpy(&x, &bits, 8);
#else
  const double x = __longlong_as_double((long long)bits);
#endif
  const float y = float(x);
  const bool finite = (bits >> 52 & 0x7ff) != 0x7ff;
  return finite && y > kFloatMax ? kFloatMax : finite && y < -kFloatMax ? -kFloatMax : y;
}

// Call f with a function that reads element `at` of a floating-point mask or bias.
template <class F>
PT_DEVICE void with_reader(const Dense& d, F f) {
  switch (d.type) {
    case DenseType::f32:
      return f([&](int64_t at) { return load_one(static_cast<const float*>(d.data) + at); });
    case DenseType::bf16:
      return f([&](int64_t at) { return load_one(static_cast<const ptx::bf16*>(d.data) + at); });
    case DenseType::f16:
      return f([&](int64_t at) { return load_one(static_cast<const ptx::f16*>(d.data) + at); });
    default:
      return f([&](int64_t at) {
        return narrow_f64(ptx::ld_global_u64(static_cast<const uint64_t*>(d.data) + at));
      });
  }
}

// score_mod of one sequence and one head or, from row `row` of a GroupTile on, the heads of its
// rows. ElementwiseMask: masks, dense biases and segments are possible.
template <bool Transposed, bool ElementwiseMask = true, class Heads = OneHead>
class ScoreMod {
 public:
  PT_DEVICE ScoreMod(const AttentionProblem& p, const Sequence& s, int b, int h, int row = 0)
      : p_(p), s_(s), b_(b), heads_(p, h, row),
        seed_(p.drop_threshold ? ptx::ld_global_u64(p.seed) : 0) {}

  // Turn s (= q.k) into scores in natural units, -inf if not visible; return the pairs of `visible`
  // that stay visible. With softcap, slope receives the derivative 1 - tanh^2. ask_mask() returns
  // if the mask may hide pairs; it is called at the read, because an earlier result cost registers.
  template <int NB, class P, class F>
  PT_DEVICE uint32_t apply(float (&s)[NB][4], float (&slope)[NB][4], const P& at, uint32_t visible,
                           F ask_mask) const {
    if (p_.softcap != 0.0f) {
      const float to_cap = p_.scale / p_.softcap;
      each<NB>([&](int n, int r, uint32_t) {
        const float t = tanh_of(s[n][r] * to_cap);
        s[n][r] = t * p_.softcap;
        slope[n][r] = 1.0f - t * t;
      });
    } else {
      each<NB>([&](int n, int r, uint32_t) { s[n][r] *= p_.scale; });
    }
    if (ElementwiseMask && p_.query_segments)
      each<NB>([&](int n, int r, uint32_t bit) {
        if (!(visible & bit)) return;
        const int64_t q =
            load_i64(p_.query_segments + int64_t(b_) * p_.num_queries + query(at, n, r));
        if (q != load_i64(p_.key_segments + int64_t(b_) * p_.num_keys + key(at, n, r)))
          visible &= ~bit;
      });
    if (ElementwiseMask && p_.mask.data && ask_mask()) add(p_.mask, s, at, visible);
    if (ElementwiseMask && p_.bias.data) add(p_.bias, s, at, visible);
    if (p_.slopes)
      each<NB>([&](int n, int r, uint32_t) { s[n][r] -= heads_.slope_of(r) * distance(at, n, r); });
    if (p_.diagonals) {
      const auto row = [&](int r) {
        return p_.diagonals + int64_t(heads_.of(r)) * (p_.before + p_.after + 1);
      };
      // A tile fully beyond the range of the table has one bias.
      const int lowest = relative(at, Transposed ? NB - 1 : 0, Transposed ? 1 : 2);
      const int highest = relative(at, Transposed ? 0 : NB - 1, Transposed ? 2 : 1);
      if (!ElementwiseMask && (lowest >= p_.after || highest <= -p_.before)) {
        const float beyond = load_one(row(0) + cell(lowest));
        each<NB>([&](int n, int r, uint32_t) { s[n][r] += beyond; });
      } else {
        each<NB>([&](int n, int r, uint32_t) {
          s[n][r] += load_one(row(r) + cell(relative(at, n, r)));
        });
      }
    }
    each<NB>(
        [&](int n, int r, uint32_t bit) { s[n][r] = visible & bit ? s[n][r] : minus_infinity(); });
    return visible;
  }

  template <int NB, class P>
  PT_DEVICE uint32_t apply(float (&s)[NB][4], float (&slope)[NB][4], const P& at,
                           uint32_t visible) const {
    return apply(s, slope, at, visible, [] { return true; });
  }

  // Return dropout's keep mask.
  template <int NB, class P>
  PT_DEVICE uint32_t keep_mask(const P& at) const {
    if (p_.drop_threshold >= 65536) return 0;
    if constexpr (Transposed) return keep_mask_transposed<NB>(at);
    else return keep_mask_rows<NB>(at);
  }

  // Like keep_mask, from precomputed bits if there are any: the 32 columns from at.column + `ahead`
  // on, in accumulator layout.
  PT_DEVICE bool has_keep_bits() const { return keep_rows().data; }
  template <bool Whole>
  PT_DEVICE uint32_t keep_bits(const Place& at, int ahead) const {
    const int column = at.column - lane_id() % 4 * 2 + ahead - (Transposed ? 0 : key_origin(p_));
    uint32_t bits = 0;
    PT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = at.row_of(2 * half), last = (Transposed ? p_.num_keys : p_.num_queries) - 1;
      const int own = max(0, min(row, last));
      const uint32_t* const words = words_of(keep_rows(), b_, heads_.of(0), own);
      bits |= lanes_bits(word_from<Whole>(words, column)) << 2 * half;
    }
    return bits;
  }

  template <class P>
  PT_DEVICE int relative(const P& at, int n, int r) const {
    return key(at, n, r) - query(at, n, r) - s_.diagonal_offset;
  }
  template <class P>
  PT_DEVICE float distance(const P& at, int n, int r) const {
    if constexpr (ElementwiseMask) {
      const int d = relative(at, n, r);
      return float(d < 0 ? -d : d);
    } else {
      // Convert once per row, because conversions are slow. Exact to 2^24.
      const float d =
          float(relative(at, 0, r / 2 * 2)) + float((8 * n + r % 2) * (Transposed ? -1 : 1));
      return d < 0 ? -d : d;
    }
  }
  // Return the index of T5's bias for j - i - offset.
  PT_DEVICE int cell(int relative) const {
    return max(-p_.before, min(relative, p_.after)) + p_.before;
  }

 private:
  PT_DEVICE const PairBits::Rows& keep_rows() const {
    return Transposed ? p_.keep_bits.keys : p_.keep_bits.queries;
  }

  template <class P>
  static PT_DEVICE int query(const P& at, int n, int r) {
    return Transposed ? at.column_of(n, r) : at.row_of(r);
  }
  template <class P>
  static PT_DEVICE int key(const P& at, int n, int r) {
    return Transposed ? at.row_of(r) : at.column_of(n, r);
  }

  // Apply a mask or bias; hidden pairs are not read.
  template <int NB, class P>
  PT_DEVICE void add(const Dense& d, float (&s)[NB][4], const P& at, uint32_t& visible) const {
    const auto head = [&](int r) { return b_ * d.batch + heads_.of(r) * d.head; };
    const auto index = [&](int n, int r) {
      return head(r) + query(at, n, r) * d.query + key(at, n, r) * d.key;
    };
    if (d.type == DenseType::boolean) {
      each<NB>([&](int n, int r, uint32_t bit) {
        if (visible & bit && !ptx::ld_global_u8(static_cast<const uint8_t*>(d.data) + index(n, r)))
          visible &= ~bit;
      });
      return;
    }
    with_reader(d, [&](auto read) {
      each<NB>([&](int n, int r, uint32_t bit) {
        if (!(visible & bit)) return;
        const float term = read(index(n, r)), sum = s[n][r] + term;
        if (term == minus_infinity()) visible &= ~bit;
        s[n][r] = sum < -kFloatMax ? -kFloatMax : sum;  // a sum of two finfo.min stays finite
      });
    });
  }

  // draws of key j's group for query i of head h
  PT_DEVICE Draws draws(int h, int i, int j) const {
    const uint32_t key = uint32_t(p_.key_start + j);
    const uint32_t head = p_.head_start + uint32_t(h);
    const uint32_t batch = p_.batch_start + uint32_t(b_);
    return philox(4 * (key / 32) + key % 8 / 2, uint32_t(p_.query_start + i), head, batch, seed_);
  }
  PT_DEVICE bool keeps(uint32_t word, int half) const {
    return (word >> 16 * half & 0xffff) >= p_.drop_threshold;
  }

  // One Philox call decides a lane's eight keys of each 32.
  template <int NB, class P>
  PT_DEVICE uint32_t keep_mask_rows(const P& at) const {
    static_assert(NB % 4 == 0);
    uint32_t bits = 0;
    PT_UNROLL
    for (int n = 0; n < NB; n += 4) {
      PT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Draws d = draws(heads_.of(2 * half), at.row_of(2 * half), at.column + 8 * n);
        PT_UNROLL
        for (int m = 0; m < 4; ++m) {
          PT_UNROLL
          for (int e = 0; e < 2; ++e)
            bits |= keeps(d.w[m], e) ? 1u << (4 * (n + m) + 2 * half + e) : 0;
        }
      }
    }
    return bits;
  }

  // Keys j and j + 8 of a lane are in one group, as are those of the lane 4 further, whose key is j
  // ^ 1. Each of both lanes makes the call for one of their two queries, and they exchange words.
  template <int NB>
  PT_DEVICE uint32_t keep_mask_transposed(const Place& at) const {
    const uint32_t key = uint32_t(p_.key_start + at.row);
    const int odd = key & 1;
    const bool upper = key % 32 / 16;
    uint32_t bits = 0;
    PT_UNROLL
    for (int n = 0; n < NB; ++n) {
      const Draws d = draws(heads_.of(0), at.column_of(n, odd), at.row);
      const uint32_t mine[2] = {upper ? d.w[2] : d.w[0], upper ? d.w[3] : d.w[1]};
      PT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint32_t theirs = ptx::shfl_xor_u32(mine[half], 4);
        bits |= keeps(mine[half], odd) ? 1u << (4 * n + 2 * half + odd) : 0;
        bits |= keeps(theirs, odd) ? 1u << (4 * n + 2 * half + 1 - odd) : 0;
      }
    }
    return bits;
  }

  const AttentionProblem& p_;
  const Sequence& s_;
  int b_;
  Heads heads_;
  uint64_t seed_;
};

// score_mod of a bounds-only kernel.
struct NoScoreMod {
  PT_DEVICE NoScoreMod(const AttentionProblem&, const Sequence&, int, int, int) {}
};

// Return bits 2 n + e of the columns that some row of the warp's 16 attends to.
template <int NB>
PT_DEVICE uint32_t columns_visible_to_warp(uint32_t visible) {
  uint32_t columns = 0;
  each<NB>(
      [&](int n, int r, uint32_t bit) { columns |= visible & bit ? 1u << (2 * n + r % 2) : 0; });
  for (int d = 4; d < 32; d *= 2) columns |= ptx::shfl_xor_u32(columns, d);
  return columns;
}

// Store two columns of a result's row, if they exist.
template <class T>
PT_DEVICE void store_two(const Out& out, T* row, int column, float x, float y) {
  if constexpr (sizeof(T) == 2) {
    if (out.pairs && column < out.columns)
      return ptx::st_global_u32(row + column, Element<T>::pack(x, y));
  }
  if (column < out.columns) store_one(row + column, x);
  if (column + 1 < out.columns) store_one(row + column + 1, y);
}

// Store the warp's 16 rows of a result times `factor[half]`, columns from 8 first on, to the
// tensor's rows row_index[half], if not negative.
template <class T, int DB>
PT_DEVICE void store_rows(const Out& out, int b, int h, const float (&acc)[DB][4],
                          const float (&factor)[2], const int64_t (&row_index)[2], int first) {
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (row_index[half] < 0) continue;
    T* row = static_cast<T*>(out.data) + b * out.stride.batch + h * out.stride.head +
             row_index[half] * out.stride.row;
    PT_UNROLL
    for (int d = 0; d < DB; ++d) {
      const int column = 8 * (first + d) + 2 * (lane_id() % 4);
      // A factor of 0 marks a row without visible keys; its sums are ignored.
      const float x = factor[half] == 0.0f ? 0.0f : acc[d][2 * half] * factor[half];
      const float y = factor[half] == 0.0f ? 0.0f : acc[d][2 * half + 1] * factor[half];
      store_two(out, row, column, x, y);
    }
  }
}

}  // namespace pt::cuda
