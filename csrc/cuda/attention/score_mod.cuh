// SPDX-License-Identifier: Apache-2.0
// score_mod on the fragments of one tile, between q.k and the softmax: softcap, segments, masks,
// biases, ALiBi, T5, dropout; and its gradient in the portable kernels.
//
//   P = e^(s - lse),  D = rows of (out * d_out) - d_lse
//   dP = keep * keep_scale * (d_out @ value^T),  dS = P * (dP - D)
//   dX = dS * (1 - tanh^2) with softcap, else dS
//   d_value = (keep * keep_scale * P)^T @ d_out
//   d_query = scale * dX @ key;  d_key = scale * dX^T @ query
//   d_mask, d_bias, d_slopes, d_table: sums of dS
//
// One block owns each sum of backward and adds in a fixed order: no atomics.
#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/tile/numbers.cuh"
#include "cuda/tile/tanh.cuh"

namespace pt::cuda {

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

// Store the sums of dS for distances before the range of T5's table and after it.
PT_DEVICE void store_far(float* sums, const AttentionProblem& p, float below, float above) {
  store_one(sums, below);
  if (p.before + p.after > 0) store_one(sums + p.before + p.after, above);
  else store_one(sums, below + above);
}

// Compute dX from x (= q.k) and dS from dp (= d_out.v), in place; weights becomes P after dropout,
// unscaled. row_stats(n, r) returns the stats of an element's query; ask_mask() is as in ScoreMod.
// Returns the visible mask.
template <class K, bool Transposed, int NB, class A, class F>
PT_DEVICE uint32_t gradients(const AttentionProblem& p, const ScoreMod<Transposed>& score_mod,
                             float (&x)[NB][4], float (&dp)[NB][4], float (&weights)[NB][4],
                             const Place& at, uint32_t visible, bool cut, A ask_mask, F row_stats) {
  if constexpr (K::has_score_mod) {
    float slope[NB][4];
    visible = score_mod.apply(x, slope, at, visible, ask_mask);
    const uint32_t keep_mask =
        p.drop_threshold ? score_mod.template keep_mask<NB>(at) : 0xffffffffu;
    each<NB>([&](int n, int r, uint32_t bit) {
      const RowStats row = row_stats(n, r);
      const float w = visible & bit
                          ? ptx::exp2(ptx::fma_rn(x[n][r] - row.row_max, kLog2e, -row.log2_sum))
                          : 0.0f;
      const float down = keep_mask & bit ? dp[n][r] * p.keep_scale : 0.0f;
      const float ds = visible & bit ? w * (down - row.delta) : 0.0f;
      weights[n][r] = keep_mask & bit ? w : 0.0f;
      dp[n][r] = ds;
      x[n][r] = p.softcap != 0.0f && visible & bit ? ds * slope[n][r] : ds;
    });
  } else {
    const float scale_log2 = p.scale * kLog2e;
    each<NB>([&](int n, int r, uint32_t bit) {
      const RowStats row = row_stats(n, r);
      float w = ptx::exp2(ptx::fma_rn(x[n][r], scale_log2, -row.row_max * kLog2e));
      float ds = w * (dp[n][r] - row.delta);
      if (cut && !(visible & bit)) w = ds = 0.0f;
      weights[n][r] = w;
      x[n][r] = ds;
    });
  }
  return visible;
}

}  // namespace pt::cuda
