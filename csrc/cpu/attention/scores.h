// SPDX-License-Identifier: Apache-2.0
// Steps between q.k and the softmax: visibility of pairs, and terms added to their scores.
//
//   Sequence   (sequence.h) a query's visible keys as one interval [lo, hi)
//   DenseRow   (dense.h) one row of a dense mask or bias
//   MaskRow    (tiles.h) one row of the boolean mask: by tiles, and by pairs in partial tiles
//   Scores     everything beyond an interval: dense masks and biases, unsorted segments,
//              ALiBi, T5, softcap
//
// Rows are queries and lanes are keys, forward and backward. All indices here are local; the
// functions add the start offsets.
#pragma once

#include "cpu/attention/live_keys.h"
#include "cpu/core/tanh.h"

namespace pt {
namespace PT_ISA {

// Scores, or dP, of rows of A, each `units` long, times a panel of keys. Each sum runs over equal
// parts of a head, of at most 64 units, because its error grows with its length. With data not
// centered at zero, random cases exceeded their bounds with chains of 96 float products (c 8.04 of
// 8) and 256 (2.7 of 2). Parts cost 1 to 2 % with D 80 to 256.
template <class T>
INLINE void score_products(int64_t rows, int64_t units, const typename T::packed* a,
                           const typename T::packed* b, typename T::acc* sums, int64_t ld) {
  const int64_t piece = T::pack > 1 ? units : ceil_div(units, max<int64_t>(1, ceil_div(units, 64)));
  for (int64_t u = 0; u < units; u += piece)
    pick<T>(rows, kPanel<T>, u ? kAdd : kStore)(min(piece, units - u), a + u, units, 1,
                                                b + u * kPanel<T>, sums, ld, nullptr);
}

template <class T>
class Scores {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;

  Scores(const AttentionProblem& p, const Sequence& s)
      : p_(p), s_(s), mask_alone_(p.tiles.data && !p.bias.data && !p.slopes && !p.table &&
                                  p.softcap == 0 && !s.has_gaps() && !s.unsorted_segments()) {}

  // Return true if scores are scale * q.k with scale > 0 and visible() is exact. The raw products
  // then suffice without row().
  bool plain() const {
    return !p_.mask.data && !p_.tiles.data && !p_.bias.data && !p_.slopes && !p_.table &&
           p_.softcap == 0 && p_.scale > 0 && !s_.has_gaps() && !s_.unsorted_segments();
  }

  // Prefetch dense terms between gemms: a tile reads a short piece of each row, which the hardware
  // does not detect as a stream.
  INLINE void fetch(int64_t h, int64_t i, int64_t k0, int64_t n) const {
    if (p_.mask.stride.l && (!p_.tiles.data || p_.tiles.state(s_.b, h, i, k0) >= 0))
      DenseRow<A>(p_.mask, s_.b, h, i).fetch(k0, n);
    if (p_.bias.stride.l) DenseRow<A>(p_.bias, s_.b, h, i).fetch(k0, n);
  }

  // Trim `range` of query i to its first and last visible key, by its interval, the block mask, or
  // a dense mask's tiles.
  bool trims() const { return p_.tiles.data || s_.has_gaps(); }
  INLINE Range trim(int64_t h, int64_t i, Range range) const {
    range = s_.outside_gap(i, range);
    return p_.tiles.data ? MaskRow<A>(p_, s_.b, h, i).trim(range) : range;
  }

  // T5: write table values along the diagonals of the tile (queries [i0, i0 + nq) x keys [k0, k0 +
  // nk)) of head h to the caller's buffer of nq + nk values. Pass it to row() with the same i0 + nq
  // and k0. One walk suffices, because the bucket is monotone in the distance.
  void diagonals(int64_t h, int64_t i0, int64_t nq, int64_t k0, int64_t nk, A* out) const {
    const int64_t half = p_.bidirectional ? p_.buckets / 2 : p_.buckets,
                  first = s_.distance(i0 + nq - 1, k0);
    const A* table = static_cast<const A*>(p_.table) + h;
    int64_t at = 0;
    for (int64_t x = 0; x < nq + nk - 1; x++) {
      const int64_t rel = first + x,
                    d = p_.bidirectional ? (rel < 0 ? -rel : rel) : max<int64_t>(-rel, 0);
      while (at + 1 < half && p_.bucket_starts[at + 1] <= d) at++;
      while (at > 0 && p_.bucket_starts[at] > d) at--;
      out[x] = table[(p_.bidirectional && rel > 0 ? half + at : at) * p_.Hq];
    }
  }

  // Convert raw q.k of query i with keys k0 .. k0 + n - 1 to scores in place, in natural units:
  // scale, softcap, mask, bias, ALiBi, T5. Invisible pairs, and lanes from n up to the next
  // multiple of T::width, are set to -inf. Sums saturate at the largest finite numbers, so a
  // visible score is never -inf; a term of +inf or NaN makes it NaN. Return the maximum per lane
  // (-inf: no visible key); softmax is then exp(s - max). seen: visible(i). diagonal:
  // diagonal_of(), the value of pair (i, k0), or null without a table. slope: n values 1 - tanh^2,
  // the softcap's derivative, or null.
  vec row(int64_t h, int64_t i, int64_t k0, int64_t n, Range seen, const A* diagonal, A* s,
          A* slope = nullptr) const {
    vec row_max = set1<vec>(-kInfinity<A>);
    for (int64_t j = 0; j < n; j += kChunk) {
      const int64_t some = min(kChunk, n - j);
      row_max = vmax(
          row_max, mask_alone_ ? masked(h, i, k0 + j, some, seen, s + j)
                               : chunk(h, i, k0 + j, some, seen, diagonal ? diagonal + j : nullptr,
                                       s + j, slope ? slope + j : nullptr));
    }
    return row_max;
  }
  // Return the value of pair (i, k0) in the output of diagonals(h, i0, nq, k0, ...).
  static const A* diagonal_of(const A* out, int64_t i, int64_t i0, int64_t nq) {
    return out + (i0 + nq - 1 - i);
  }
  // Buffer size of diagonals(): row() reads full vectors.
  static int64_t diagonal_size(int64_t nq, int64_t nk) { return nq + nk + T::width; }

 private:
  static constexpr int kSteps = 64;
  // keys at a time: they remain in L1 over the passes
  static constexpr int64_t kChunk = kSteps * T::width;

  // chunk() for tiles as the only term: a full tile needs no checks. With few visible tiles,
  // chunk() took a tenth of the forward, two thirds of it to compute the visible mask first.
  vec masked(int64_t h, int64_t i, int64_t k0, int64_t n, Range seen, A* s) const {
    const MaskRow<A> row(p_, s_.b, h, i);
    const vec minus_inf = set1<vec>(-kInfinity<A>), lowest = set1<vec>(-highest<A>),
              scale = set1<vec>(A(p_.scale));
    const int64_t last = min(n, seen.hi - k0);
    vec row_max = minus_inf;
    for (int64_t j = 0, end; j < n; j = end) {
      const int32_t tile = row.tile(k0 + j);
      end = min(n, row.tile_end(k0 + j) - k0);
      const int64_t whole = tile == TileMap::kAll && seen.lo <= k0 + j
                                ? j + max<int64_t>(0, min(end, last) - j) / T::width * T::width
                                : j;
      for (; j < whole; j += T::width) {
        const vec x = vmax(lowest, vec(load(s + j) * scale));
        store(s + j, x);
        row_max = vmax(row_max, x);
      }
      for (; j < end; j += T::width) {
        const mask bits = tile >= 0               ? row.bits(k0 + j, n - j)
                          : tile == TileMap::kAll ? mask(~0)
                                                  : mask(0);
        const vec x = select(bits & mask_range<vec>(seen.lo - k0 - j, last - j),
                             vmax(lowest, vec(load(s + j) * scale)), minus_inf);
        store(s + j, x);
        row_max = vmax(row_max, x);
      }
    }
    return row_max;
  }

  // Run one pass per term: a loop that only adds is several times faster than one with a branch per
  // term.
  vec chunk(int64_t h, int64_t i, int64_t k0, int64_t n, Range seen, const A* diagonal, A* s,
            A* slope) const {
    const DenseRow<A> terms[] = {DenseRow<A>(p_.tiles.data ? Dense{} : p_.mask, s_.b, h, i),
                                 DenseRow<A>(p_.bias, s_.b, h, i)};
    const vec minus_inf = set1<vec>(-kInfinity<A>), lowest = set1<vec>(-highest<A>);
    mask visible[kSteps];
    for (int64_t j = 0; j < n; j += T::width)
      visible[j / T::width] = mask_range<vec>(seen.lo - k0 - j, min(seen.hi - k0, n) - j);
    if (s_.unsorted_segments())
      for (int64_t j = 0; j < n; j += T::width)
        visible[j / T::width] &=
            same_segment(s_.query_segments()[i], s_.key_segments() + k0 + j, n - j);
    bool hides = p_.tiles.data && hide(h, i, k0, n, visible);
    if (const Range gap = s_.has_gaps() ? s_.gap(i) : Range{0, 0}; gap.lo < k0 + n && gap.hi > k0) {
      hides = true;
      for (int64_t j = 0; j < n; j += T::width)
        visible[j / T::width] &= ~mask_range<vec>(gap.lo - k0 - j, gap.hi - k0 - j);
    }

    vec scale = set1<vec>(A(p_.scale));  // not yet applied to s
    if (p_.softcap != 0) {
      const vec cap = set1<vec>(A(p_.softcap)), to_cap = set1<vec>(A(p_.scale / p_.softcap));
      for (int64_t j = 0; j < n; j += T::width) {
        vec t, d;
        tanh_and_slope(vec(load(s + j) * to_cap), &t, &d);
        store(s + j, t * cap);
        if (slope) store(slope + j, d);
      }
      scale = set1<vec>(1);
    }
    // Add the last dense term in the final pass if no other term follows it.
    const int last = p_.slopes || diagonal ? -1
                     : terms[1].additive() ? 1
                     : terms[0].additive() ? 0
                                           : -1;
    for (int t = 0; t < 2; t++) {
      const DenseRow<A>& term = terms[t];
      if (term.present() && t != last) {
        term.each(k0, n, [&](int64_t j, vec x) {
          visible[j / T::width] &= to_mask(x != minus_inf);
          store(s + j, sum(load(s + j), scale, x));
        });
        scale = set1<vec>(1);
      }
    }
    if (p_.slopes) {
      const vec lanes = __builtin_convertvector(iota<vec>(), vec),
                alibi = set1<vec>(static_cast<const A*>(p_.slopes)[h]);
      for (int64_t j = 0; j < n; j += T::width) {
        const vec distance = vabs(vec(lanes + A(s_.distance(i, k0 + j))));
        store(s + j, load(s + j) * scale - alibi * distance);
      }
      scale = set1<vec>(1);
    }
    if (diagonal) {
      for (int64_t j = 0; j < n; j += T::width)
        store(s + j, fma(load(s + j), scale, loadu(diagonal + j)));
      scale = set1<vec>(1);
    }
    vec row_max = minus_inf;
    const auto finish = [&](int64_t j, mask on, vec x) {
      x = select(on, x, minus_inf);
      store(s + j, x);
      row_max = vmax(row_max, x);
    };
    if (last >= 0) {
      const auto one = [&](int64_t j, vec x) {
        finish(j, visible[j / T::width] & to_mask(x != minus_inf), sum(load(s + j), scale, x));
      };
      int64_t done = 0;
      if (seen.lo <= k0 && seen.hi >= k0 + n && !s_.unsorted_segments() && !hides) {
        // All pairs are visible if the term's values are finite: check a few vectors at a time.
        vec row_maxima[DenseRow<A>::kFour] = {minus_inf, minus_inf, minus_inf, minus_inf};
        done = terms[last].fours(k0, n, [&](int64_t j, const vec* x) {
          vec y[DenseRow<A>::kFour];
          ivec_of<vec> finite = ~ivec_of<vec>{};
          UNROLL for (int u = 0; u < DenseRow<A>::kFour; u++) {
            y[u] = fma(load(s + j + u * T::width), scale, x[u]);
            finite = finite & (vabs(y[u]) <= set1<vec>(highest<A>));
          }
          if (to_mask(finite) != mask_n<vec>(T::width)) return false;
          UNROLL for (int u = 0; u < DenseRow<A>::kFour; u++) store(s + j + u * T::width, y[u]),
              row_maxima[u] = vmax(row_maxima[u], y[u]);
          return true;
        });
        row_max = vmax(
            row_max, vmax(vmax(row_maxima[0], row_maxima[1]), vmax(row_maxima[2], row_maxima[3])));
      }
      terms[last].each(k0 + done, n - done, [&](int64_t j, vec x) { one(done + j, x); });
    } else {
      for (int64_t j = 0; j < n; j += T::width)
        finish(j, visible[j / T::width], vmax(lowest, vec(load(s + j) * scale)));
    }
    return row_max;
  }

  // Clear the keys k0 .. k0 + n - 1 that the boolean mask hides in visible[]. Return false if none
  // is hidden.
  bool hide(int64_t h, int64_t i, int64_t k0, int64_t n, mask* visible) const {
    const auto [all, some] = TileRow(p_.tiles, s_.b, h, i).alike(k0, n);
    if (all) return false;
    // One loop for partial tiles: a check per tile cost 6 % of a call whose mask has no empty tile.
    if (some && !p_.tiles.bits) {
      const DenseRow<A> row(p_.mask, s_.b, h, i);
      for (int64_t j = 0; j < n; j += T::width) visible[j / T::width] &= row.bits(k0 + j, n - j);
      return true;
    }
    const MaskRow<A> row(p_, s_.b, h, i);
    bool hides = false;
    for (int64_t j = 0; j < n;) {
      const int64_t end = min(n, row.tile_end(k0 + j) - k0);
      const int32_t tile = row.tile(k0 + j);
      hides |= tile != TileMap::kAll;
      if (tile >= 0)
        for (; j < end; j += T::width) visible[j / T::width] &= row.bits(k0 + j, n - j);
      else if (tile == TileMap::kNone)
        for (; j < end; j += T::width) visible[j / T::width] = 0;
      j = end;
    }
    return hides;
  }

  // s * scale + t, saturated at the largest finite numbers, but NaN if s or t is not finite.
  static INLINE vec sum(vec s, vec scale, vec t) {
    const vec limit = set1<vec>(highest<A>), y = fma(s, scale, t);
    if (__builtin_expect(to_mask(vabs(y) <= limit) == mask_n<vec>(T::width), 1)) return y;
    const vec x = s * scale;
    return vmin(limit, vmax(vec(-limit), vec(x + t))) + ((t - t) + (x - x));  // x - x: 0, or NaN
  }

  static INLINE mask same_segment(int64_t q, const int64_t* keys, int64_t n) {
    mask m = 0;
    if (n >= T::width) {
      UNROLL for (int i = 0; i < T::width; i++) m |= mask(keys[i] == q) << i;
    } else {
      for (int64_t i = 0; i < n; i++) m |= mask(keys[i] == q) << i;
    }
    return m;
  }
  const AttentionProblem& p_;
  const Sequence& s_;
  const bool mask_alone_;
};

}  // namespace PT_ISA
}  // namespace pt
