// SPDX-License-Identifier: Apache-2.0
// The online softmax over tiles of keys:
//
//   m' = max(m, max S)    P = exp(S - m')    alpha = exp(m - m')    l = alpha l + sum P
//
//   WeightRow      one row of a tile: P from S
//   OnlineSoftmax  m, l and alpha of a block of rows, a step per tile; merges KV splits
//   add_to_stats() m and l of one row without P, for the backward
//
// A sink is one more term of l, added once at the end for any number of splits, so that l = 0 still
// marks a row without visible keys. m is the maximum of S, or near it: see first_maximum().
#pragma once

#include "cpu/attention/mask.h"
#include "cpu/core/arena.h"
#include "cpu/core/philox.h"

namespace pt {
namespace PT_ISA {

// Return a head's sink, or -inf without one. +inf is clamped to half of the largest number.
template <class A>
INLINE A sink_of(const AttentionProblem& p, int64_t h) {
  const A sink = p.sinks ? static_cast<const A*>(p.sinks)[h] : -kInfinity<A>, most = highest<A> / 2;
  return sink > most ? most : sink;  // preserves NaN
}
// Return the min lse of a query that sees a key, one or two ulp above its sink, so that lse shows
// which queries see none.
template <class A>
INLINE A above_sink(A sink) {
  constexpr bool wide = sizeof(A) == 8;
  const A ulp = (sink < 0 ? -sink : sink) * A(wide ? 0x1p-52 : 0x1p-23),
          tiny = A(wide ? 0x1p-1022 : 0x1p-126);
  return sink + max(ulp, tiny);
}

// Return the lanes of keys from j that are in v.
template <class T>
INLINE mask lanes_in(Range v, int64_t j) {
  return mask_range<typename T::vec>(v.lo - j, v.hi - j);
}

// Return lane-wise maxima of s[v.lo, v.hi).
template <class T>
INLINE typename T::vec row_maximum(const typename T::acc* s, Range v) {
  using vec = typename T::vec;
  vec x0 = set1<vec>(-kInfinity<typename T::acc>), x1 = x0;
  int64_t j = v.lo / T::width * T::width;
  const auto masked = [&] {
    x0 = select(lanes_in<T>(v, j), vmax(x0, load(s + j)), x0), j += T::width;
  };
  if (j < v.lo) masked();
  for (; j + 2 * T::width <= v.hi; j += 2 * T::width)
    x0 = vmax(x0, load(s + j)), x1 = vmax(x1, load(s + j + T::width));
  while (j < v.hi) masked();
  return vmax(x0, x1);
}

// One row of a tile's scores and the destination of its weights.
template <class T>
struct WeightRow {
  using A = typename T::acc;
  using vec = typename T::vec;

  const A* s;
  typename T::opnd* p;
  // reach: keys to write, from a full step on. valid: visible keys; hidden ones become 0.
  Range reach, valid;
  A c;  // weights are 2^((s - m) c)
  // Dropout's keep bits, with the tile's first at first_bit; null: no dropout.
  const uint32_t* keep;
  int64_t first_bit;
  // Scales of 8-bit values, applied to the weights after their sum; or null.
  const float* v_scale;

  // Return the lane-wise sum, with exponentials of degree 5: lse is exact to float32 for any dtype.
  // *top: the largest scores, for pairs only.
  INLINE vec weights(A m, vec* top) const {
    return keep ? pass<true>(m, top) : pass<false>(m, top);
  }

 private:
  template <bool DROP>
  INLINE vec pass(A m, vec* top) const {
    constexpr bool tops = T::pack > 1;
    const vec vm = set1<vec>(m), vc = set1<vec>(c), none = set1<vec>(-kInfinity<A>);
    vec sums[2] = {}, largest[2] = {none, none};
    constexpr int pair = 2 * T::width, side = 4;  // vectors, a multiple of two
    const auto some = [&](int64_t j, auto count, auto masked) {
      constexpr int n = decltype(count)::value;
      vec x[n];
      mask lanes[n];
      UNROLL for (int i = 0; i < n; i++) x[i] = load(s + j + i * T::width);
      if constexpr (masked)
        UNROLL for (int i = 0; i < n; i++) lanes[i] = lanes_in<T>(valid, j + i * T::width);
      if constexpr (tops)
        UNROLL for (int i = 0; i < n; i++) largest[i % 2] =
            vmax(largest[i % 2], masked ? select(lanes[i], x[i], none) : x[i]);
      UNROLL for (int i = 0; i < n; i++) x[i] = (x[i] - vm) * vc;
      exp2_each<5, !tops>(x);
      if constexpr (masked) UNROLL for (int i = 0; i < n; i++) x[i] = select(lanes[i], x[i], vec{});
      UNROLL for (int i = 0; i < n; i++) sums[i % 2] = sums[i % 2] + x[i];
      if constexpr (DROP)
        UNROLL for (int i = 0; i < n; i++) x[i] =
            select(bits_at(keep, first_bit + j + i * T::width), x[i], vec{});
      if constexpr (sizeof(A) == 4)
        if (v_scale)
          UNROLL for (int i = 0; i < n; i++) x[i] = x[i] * load(v_scale + j + i * T::width);
      UNROLL for (int i = 0; i < n; i += 2) T::store_pair(p + j + i * T::width, x[i], x[i + 1]);
    };
    constexpr std::integral_constant<int, 2> two;
    int64_t j = reach.lo;
    for (; j < valid.lo && j < reach.hi; j += pair) some(j, two, std::true_type());
    for (; j + side * T::width <= valid.hi; j += side * T::width)
      some(j, std::integral_constant<int, side>(), std::false_type());
    for (; j + pair <= valid.hi; j += pair) some(j, two, std::false_type());
    for (; j < reach.hi; j += pair) some(j, two, std::true_type());
    *top = vmax(largest[0], largest[1]);
    return sums[0] + sums[1];
  }
};

template <class T>
class OnlineSoftmax {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;

  // raw: scores are products without their scale, which the exponents then contain. Memory comes
  // from local_arena.
  OnlineSoftmax(int64_t rows, bool raw, double scale)
      : raw_(raw), scale_(raw ? scale : 1), c_(A(scale_ * kLog2e)) {
    const int64_t padded = round_up(rows, T::width);
    m_ = local_arena.take<A>(padded), l_ = local_arena.take<A>(padded),
    alpha_ = local_arena.take<A>(padded);
    for (int64_t r = 0; r < padded; r++) m_[r] = -kInfinity<A>, l_[r] = 0;
  }
  static size_t bytes(int64_t rows) { return 3 * Arena::bytes_for<A>(round_up(rows, T::width)); }

  // Weights are 2^((s - m) c).
  A c() const { return c_; }
  // Return the factors of the rows' outputs from the last step.
  const A* alpha() const { return alpha_; }

  // Update the stats of n <= T::width rows from r0 by a tile. maximum(i) returns the maxima of row
  // r0 + i by lane, or -inf. weights(i, m, &top) writes the row's weights, and returns their sum by
  // lane and the largest scores.
  template <class Maximum, class Weights>
  INLINE void step(int64_t r0, int64_t n, const Maximum& maximum, const Weights& weights) {
    const vec none = set1<vec>(-kInfinity<A>);
    vec row_max[T::width], sums[T::width], tops[T::width];
    for (int64_t i = 0; i < T::width; i++) row_max[i] = i < n ? maximum(i) : none;
    const vec m_old = load(m_ + r0);
    vec m_new = vmax(m_old, reduce_rows(row_max, op_max));
    vec m = m_new == -kInfinity<A> ? vec{} : m_new;  // no visible key yet: any number works
    for (int64_t i = 0; i < T::width; i++) {
      sums[i] = vec{}, tops[i] = none;
      if (i < n) sums[i] = weights(i, m[i], &tops[i]);
    }
    if constexpr (kLags) {
      const vec top = reduce_rows(tops, op_max);
      for (mask grown = raw_ ? to_mask((top - m) * c_ > A(kMostAbove)) : mask(0); grown;
           grown &= grown - 1) {
        const int i = __builtin_ctz(grown);
        m[i] = m_new[i] = top[i];
        sums[i] = weights(i, m[i], &tops[i]);
      }
    }
    store(m_ + r0, m_new);
    const vec alpha = exp2v<5>(vec((m_old - m) * c_));
    store(alpha_ + r0, alpha);
    store(l_ + r0, fma(load(l_ + r0), alpha, reduce_rows(sums, op_add)));
  }

  // Use an approximate maximum if P does not overwrite S: any number near the row maximum works. m
  // is the maximum of the first keys until a score exceeds it by 8 powers of two. A separate pass
  // of maxima took a tenth of a softmax on AMX, and O then needs no multiplication by alpha = 1.
  vec first_maximum(int64_t r, const A* s, Range valid) const {
    if constexpr (kLags) {
      if (m_[r] > -kInfinity<A>) return set1<vec>(-kInfinity<A>);
      const vec some = row_maximum<T>(s, {valid.lo, min(valid.hi, valid.lo + kFirstKeys)});
      if (to_mask(some != -kInfinity<A>)) return some;
    }
    return row_maximum<T>(s, valid);
  }

  // Partial results of one KV split: m and l of each row, then its output o, unnormalized, in rows
  // of dv numbers.
  static int64_t partial_size(int64_t rows, int64_t dv) { return partial_head(rows) + rows * dv; }
  void save(int64_t rows, int64_t dv, const A* o, A* to) const {
    for (int64_t r = 0; r < rows; r++) to[r] = m_[r], to[rows + r] = l_[r];
    to += partial_head(rows);
    for (int64_t i = 0; i < rows * dv; i += T::width) store(to + i, load(o + i));
  }
  // Reduce the partial results of n splits in order.
  void merge(const A* partials, int64_t n, int64_t rows, int64_t dv, A* o) {
    const int64_t size = partial_size(rows, dv);
    for (int64_t r = 0; r < rows; r++, o += dv) {
      for (int64_t i = 0; i < n; i++) m_[r] = max(m_[r], partials[i * size + r]);
      for (int64_t d = 0; d < dv; d += T::width) store(o + d, vec{});
      for (int64_t i = 0; i < n; i++) {
        const A *part = partials + i * size, m = part[r];
        if (m == -kInfinity<A> && part[rows + r] == 0) continue;  // no visible key
        const vec w = exp2v<5>(set1<vec>((m - m_[r]) * c_));
        l_[r] += part[rows + r] * w[0];
        for (int64_t d = 0; d < dv; d += T::width)
          store(o + d, fma(w, load(part + partial_head(rows) + r * dv + d), load(o + d)));
      }
    }
  }

  struct Result {
    A inv, lse;  // inv: factor of the row's output
  };
  // Return the result of a row. rescale: 1 / (1 - dropout_p). dead: inv of a row without visible
  // keys; such a row's lse is the sink, but -inf for padding.
  Result result(int64_t r, A sink, bool padding, double rescale, A dead) const {
    const bool has_sink = sink != -kInfinity<A>;
    if (l_[r] == 0)
      return has_sink ? Result{A(0), padding ? -kInfinity<A> : sink} : Result{dead, -kInfinity<A>};
    const double m = m_[r] * scale_, l = l_[r];
    if (!has_sink) return {A(rescale / l_[r]), A(m + __builtin_log(l))};
    const double top = max(m, double(sink)), alpha = __builtin_exp(m - top),
                 sum = l * alpha + __builtin_exp(sink - top);
    const A lse = A(top + __builtin_log(sum)), least = above_sink(sink);
    return {A(rescale * alpha / sum), lse < least ? least : lse};  // preserves NaN
  }

 private:
  static constexpr bool kLags = T::pack > 1;
  static constexpr int64_t kFirstKeys = 64, kMostAbove = 8;
  static int64_t partial_head(int64_t rows) { return round_up(2 * rows, 64); }

  const bool raw_;
  const double scale_;  // of m
  const A c_;
  A *m_, *l_, *alpha_;  // per row, padded to full vectors
};

// Add n scores with this maximum to a row's m and l. s is padded to full vectors with -inf.
template <class T>
INLINE void add_to_stats(const typename T::acc* s, int64_t n, typename T::acc maximum,
                         typename T::acc* m, typename T::acc* l) {
  using A = typename T::acc;
  using vec = typename T::vec;
  const A now = max(*m, maximum);
  if (now == -kInfinity<A>) return;
  const auto exponential = [&](vec d) { return exp2v<5>(vec(d * A(kLog2e))); };
  vec sum{};
  for (int64_t c = 0; c < n; c += T::width) sum = sum + exponential(load(s + c) - now);
  *l = *l * exponential(set1<vec>(*m - now))[0] + reduce(sum, op_add), *m = now;
}

}  // namespace PT_ISA
}  // namespace pt
