// SPDX-License-Identifier: Apache-2.0
// One batch element or packed sequence: its sizes, and a query's visible keys as one interval [lo,
// hi), with a gap between global keys and a window. Indices are local; the functions add the start
// offsets.
#pragma once

#include "cpu/attention/problem.h"
#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {

struct Range {
  int64_t lo, hi;
  INLINE int64_t size() const { return hi - lo; }
};

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

class Sequence {
 public:
  Sequence() = default;
  Sequence(const AttentionProblem& p, int64_t b) : b(b) {
    const auto take = [&](const int64_t* cu, int64_t padded, int64_t& first) {
      first = cu ? cu[b] : 0;
      return cu ? cu[b + 1] - cu[b] : padded;
    };
    Lq = take(p.cu_q, p.Lq, q_first), Lk = take(p.cu_k, p.Lk, k_first);
    query_start_ = p.query_start, key_start_ = p.key_start;
    const int64_t q_end = p.query_lengths ? p.query_lengths[b] : query_start_ + Lq;
    key_end_ = p.key_lengths ? p.key_lengths[b] : key_start_ + Lk;
    rows = clamp<int64_t>(q_end - query_start_, 0, Lq);
    cols = clamp<int64_t>(key_end_ - key_start_, 0, Lk);
    offset = p.align == Align::bottom_right ? key_end_ - q_end : 0;
    // Use a bound beyond any index for "unbounded", with headroom for the sums below.
    constexpr int64_t far = int64_t(1) << 60;
    left_ = p.left < 0 ? far : min(p.left, far);
    right_ = p.right < 0 ? far : min(p.right, far);
    causal_ = p.align != Align::none;
    prefix_ = p.prefix_lengths ? p.prefix_lengths[b] : 0;
    global_ = max<int64_t>(0, min(p.global_keys, key_end_) - key_start_);
    if (p.query_segments) {
      query_segments_ = p.query_segments + b * p.Lq, key_segments_ = p.key_segments + b * p.Lk;
      sorted_ = true;
      for (int64_t j = 1; j < Lk && sorted_; j++)
        sorted_ = key_segments_[j - 1] <= key_segments_[j];
    }
  }

  // Return the keys visible to query i < rows; empty as {x, x}. Exact unless has_gaps() or
  // unsorted_segments().
  INLINE Range visible(int64_t i) const {
    Range r = reach(i);
    if (query_segments_ && sorted_) {
      const int64_t s = query_segments_[i];
      r.lo = max(r.lo, first_not_below(s));
      r.hi = min(r.hi, s == INT64_MAX ? Lk : first_not_below(s + 1));
    }
    r.hi = max(r.hi, r.lo);
    return r;
  }
  // Return a range with every key that any query, or one of first .. last, sees: both ends of the
  // interval rise with i, and so do the global keys.
  Range keys() const { return rows == 0 ? Range{0, 0} : keys(0, rows - 1); }
  Range keys(int64_t first, int64_t last) const {
    const int64_t end = globals(last);
    const Range r{end ? 0 : interval(first).lo, max(end, interval(last).hi)};
    return {r.lo, max(r.lo, r.hi)};
  }
  // Return the keys of visible(i) hidden from query i, between the global keys and its window. Both
  // ends rise with i.
  bool has_gaps() const { return global_ > 0; }
  INLINE Range gap(int64_t i) const {
    const Range window = interval(i);
    const int64_t end = globals(i);
    return {end, window.lo < window.hi ? max(end, window.lo) : end};
  }
  // Return the keys of keys() that no query sees.
  Range common_gap() const {
    return rows == 0 || !has_gaps() ? Range{0, 0} : Range{gap(rows - 1).lo, gap(0).hi};
  }
  // Trim a range of keys at both ends by the gap of query i; empty as {x, x}.
  INLINE Range outside_gap(int64_t i, Range r) const {
    if (!has_gaps()) return r;
    const Range out = gap(i);
    if (r.lo >= out.lo) r.lo = max(r.lo, out.hi);
    if (r.hi <= out.hi) r.hi = min(r.hi, out.lo);
    r.hi = max(r.hi, r.lo);
    return r;
  }
  // Scores then compares segments pair by pair, and visible() is only a bound.
  bool unsorted_segments() const { return query_segments_ && !sorted_; }
  // Return false if no key and query of these ranges can share a segment. For unsorted segments.
  bool may_meet(Range queries, Range keys) const {
    const auto bounds = [](const int64_t* x, Range r) {
      Range b{INT64_MAX, INT64_MIN};
      for (int64_t i = r.lo; i < r.hi; i++) b = {min(b.lo, x[i]), max(b.hi, x[i])};
      return b;
    };
    const Range q = bounds(query_segments_, queries), k = bounds(key_segments_, keys);
    return k.lo <= q.hi && k.hi >= q.lo;
  }
  // Trim `keys` by panels at both ends that cannot meet the queries; empty if none can.
  Range meeting(Range queries, Range keys, int64_t panel) const {
    const auto meets = [&](int64_t j) { return may_meet(queries, {j, min(j + panel, Lk)}); };
    while (keys.lo < keys.hi && !meets(keys.lo)) keys.lo += panel;
    int64_t last = keys.lo;
    for (int64_t j = keys.lo; j < keys.hi; j += panel)
      if (meets(j)) last = j + panel;
    return {keys.lo, min(last, keys.hi)};
  }
  const int64_t* query_segments() const { return query_segments_; }
  const int64_t* key_segments() const { return key_segments_; }

  // Return j - i - offset in absolute indices: the distance for ALiBi and T5.
  INLINE int64_t distance(int64_t i, int64_t j) const {
    return j + key_start_ - i - query_start_ - offset;
  }

  int64_t b = 0;
  int64_t Lq = 0, Lk = 0;            // local sizes
  int64_t q_first = 0, k_first = 0;  // first row of this sequence in packed tensors
  int64_t rows = 0;                  // queries [rows, Lq) are padding
  int64_t cols = 0;                  // keys [cols, Lk) are padding
  int64_t offset = 0;                // diagonal offset
  int64_t task = 0;                  // tasks of the previous sequences, set by the caller

 private:
  INLINE Range interval(int64_t i) const {
    const int64_t diagonal = i + query_start_ + offset;
    int64_t lo = diagonal - left_, hi = min(key_end_, diagonal + right_ + 1);
    if (causal_) hi = min(hi, max(diagonal + 1, prefix_));
    return {clamp<int64_t>(lo - key_start_, 0, Lk), clamp<int64_t>(hi - key_start_, 0, Lk)};
  }
  // Return the end of the global keys that query i sees.
  INLINE int64_t globals(int64_t i) const {
    if (!causal_) return global_;
    return clamp<int64_t>(max(i + query_start_ + offset + 1, prefix_) - key_start_, 0, global_);
  }
  INLINE Range reach(int64_t i) const {
    const Range window = interval(i);
    if (!has_gaps()) return window;
    const int64_t end = globals(i);
    return end ? Range{0, window.lo < window.hi ? max(end, window.hi) : end} : window;
  }
  int64_t first_not_below(int64_t s) const {
    int64_t lo = 0, hi = Lk;
    while (lo < hi) {
      const int64_t mid = lo + (hi - lo) / 2;
      if (key_segments_[mid] < s) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  }
  int64_t query_start_ = 0, key_start_ = 0, key_end_ = 0, left_ = 0, right_ = 0, prefix_ = 0,
          global_ = 0;
  const int64_t *query_segments_ = nullptr, *key_segments_ = nullptr;
  bool causal_ = false, sorted_ = false;
};

}  // namespace PT_ISA
}  // namespace pt
