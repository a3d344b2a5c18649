// SPDX-License-Identifier: Apache-2.0
// Score modification: the steps between q.k and the softmax.
//
//   Scores         softcap, dense masks and biases, ALiBi, T5, and -inf for hidden pairs (mask.h)
//   TermGradients  their gradients from a tile's score gradients dS
//
// Rows are queries and lanes are keys, forward and backward.
#pragma once

#include "cpu/attention/mask.h"
#include "cpu/core/gemm.h"
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

  const Visibility<A> visibility;

  Scores(const AttentionProblem& p, const Sequence& s)
      : visibility(p, s), p_(p), s_(s),
        mask_alone_(p.tiles.data && !p.bias.data && !p.slopes && !p.table && p.softcap == 0 &&
                    !s.has_gaps() && !s.unsorted_segments()) {}

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
    mask visible[kSteps];
    const bool all = visibility.pairs(h, i, k0, n, seen, visible);
    const vec minus_inf = set1<vec>(-kInfinity<A>), lowest = set1<vec>(-highest<A>);

    vec scale = set1<vec>(A(p_.scale));  // not yet applied to s
    if (p_.softcap != 0) cap(n, s, slope), scale = set1<vec>(1);
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
    if (last >= 0) {
      const int64_t done = all ? add_finite(terms[last], k0, n, scale, s, &row_max) : 0;
      terms[last].each(k0 + done, n - done, [&](int64_t j, vec x) {
        j += done;
        put(s + j, visible[j / T::width] & to_mask(x != minus_inf), sum(load(s + j), scale, x),
            &row_max);
      });
    } else {
      for (int64_t j = 0; j < n; j += T::width)
        put(s + j, visible[j / T::width], vmax(lowest, vec(load(s + j) * scale)), &row_max);
    }
    return row_max;
  }

  // s = softcap tanh(scale s / softcap), and its derivative by scale s.
  INLINE void cap(int64_t n, A* s, A* slope) const {
    const vec cap = set1<vec>(A(p_.softcap)), to_cap = set1<vec>(A(p_.scale / p_.softcap));
    for (int64_t j = 0; j < n; j += T::width) {
      vec t, d;
      tanh_and_slope(vec(load(s + j) * to_cap), &t, &d);
      store(s + j, t * cap);
      if (slope) store(slope + j, d);
    }
  }

  // Add a term to visible scores, a few vectors at a time, until a sum is not finite. Return the
  // number of keys.
  INLINE int64_t add_finite(const DenseRow<A>& term, int64_t k0, int64_t n, vec scale, A* s,
                            vec* row_max) const {
    constexpr int four = DenseRow<A>::kFour;
    const vec minus_inf = set1<vec>(-kInfinity<A>);
    vec maxima[four] = {minus_inf, minus_inf, minus_inf, minus_inf};
    const int64_t done = term.fours(k0, n, [&](int64_t j, const vec* x) {
      vec y[four];
      ivec_of<vec> finite = ~ivec_of<vec>{};
      UNROLL for (int u = 0; u < four; u++) {
        y[u] = fma(load(s + j + u * T::width), scale, x[u]);
        finite = finite & (vabs(y[u]) <= set1<vec>(highest<A>));
      }
      if (to_mask(finite) != mask_n<vec>(T::width)) return false;
      UNROLL for (int u = 0; u < four; u++) store(s + j + u * T::width, y[u]),
          maxima[u] = vmax(maxima[u], y[u]);
      return true;
    });
    *row_max = vmax(*row_max, vmax(vmax(maxima[0], maxima[1]), vmax(maxima[2], maxima[3])));
    return done;
  }

  // Store scores, -inf where the pair is hidden.
  static INLINE void put(A* s, mask on, vec x, vec* row_max) {
    x = select(on, x, set1<vec>(-kInfinity<A>));
    store(s, x);
    *row_max = vmax(*row_max, x);
  }

  // s * scale + t, saturated at the largest finite numbers, but NaN if s or t is not finite.
  static INLINE vec sum(vec s, vec scale, vec t) {
    const vec limit = set1<vec>(highest<A>), y = fma(s, scale, t);
    if (__builtin_expect(to_mask(vabs(y) <= limit) == mask_n<vec>(T::width), 1)) return y;
    const vec x = s * scale;
    return vmin(limit, vmax(vec(-limit), vec(x + t))) + ((t - t) + (x - x));  // x - x: 0, or NaN
  }

  const AttentionProblem& p_;
  const Sequence& s_;
  const bool mask_alone_;
};

// Gradients of dense masks and biases, ALiBi slopes and the T5 table from a tile's dS.
//
//   d_dense[b, h, i, j] = dS[i, j], summed over broadcast dimensions
//   d_slope[h]          = sum over b, i, j of -|j - i - offset| dS[i, j]
//   d_table[u, h]       = sum of dS[i, j] over b and the pairs with bucket(j - i - offset) = u
//
// Scratch is linear in the sizes: a row of columns or diagonals per tile, and a number per query
// row and split.
template <class T>
class TermGradients {
 public:
  using acc = typename T::acc;
  using vec = typename T::vec;
  static constexpr int64_t kDense = 2;

  // Gradients that one (item, split) adds to; null: not requested.
  struct Target {
    DenseGrad dense[kDense];  // data at this batch and head
    acc* row_sums[kDense];    // broadcast keys: a number per query from row0
    int64_t row0;
    double *slope, *table;  // one number; one per bucket
  };

  static int64_t workspace(int64_t block_q, int64_t block_k) {
    return kDense * block_k + block_q + block_k + 2 * T::width;
  }

  TermGradients(const AttentionProblem& p, const Sequence& sequence, const Target& target,
                acc* work, int64_t block_q, int64_t block_k)
      : p_(p), sequence_(sequence), target_(target), block_q_(block_q), block_k_(block_k),
        columns_(work), diagonals_(work + kDense * block_k) {}

  // Begin the tile of `rows` queries from q0 and `keys` keys from k0.
  void begin(int64_t q0, int64_t rows, int64_t k0, int64_t keys) {
    q0_ = q0, rows_ = rows, k0_ = k0, keys_ = keys;
    for (int t = 0; t < kDense; t++)
      if (kind(t) == Kind::columns) clear(columns_ + t * block_k_, block_k_);
    far_ = target_.table && one_bucket(first_distance(), last_distance());
    if (target_.table && !far_) clear(diagonals_, block_q_ + block_k_);
  }

  // Add row r of dS, zero outside the visible pairs. Columns [c0, c1) are multiples of the vector
  // width and may extend past the keys.
  void row(int64_t r, const acc* ds, int64_t c0, int64_t c1) {
    const bool sums = kind(0) == Kind::rows || kind(1) == Kind::rows || far_;
    const acc total = sums ? sum_row(ds, c0, c1) : acc(0);
    for (int t = 0; t < kDense; t++) {
      const DenseGrad& d = target_.dense[t];
      switch (kind(t)) {
        case Kind::none: break;
        case Kind::rows: target_.row_sums[t][q0_ - target_.row0 + r] += total; break;
        case Kind::columns: add_row(columns_ + t * block_k_, ds, c0, c1, c1); break;
        case Kind::full:
          add_row(static_cast<acc*>(d.data) + (q0_ + r) * d.stride.l + k0_, ds, c0, c1, keys_);
          break;
      }
    }
    if (target_.slope) *target_.slope -= distance_row(ds, sequence_.distance(q0_ + r, k0_), c0, c1);
    if (far_) target_.table[bucket(first_distance())] += total;
    else if (target_.table) add_row(diagonals_ + block_q_ - 1 - r, ds, c0, c1, c1);
  }

  void end() {
    for (int t = 0; t < kDense; t++)
      if (kind(t) == Kind::columns)
        add_row(static_cast<acc*>(target_.dense[t].data) + k0_, columns_ + t * block_k_, 0, keys_,
                keys_);
    if (!target_.table || far_) return;
    const acc* sum = diagonals_ + block_q_ - rows_;
    for (int64_t d = first_distance(); d <= last_distance(); d++)
      target_.table[bucket(d)] += double(*sum++);
  }

 private:
  enum class Kind { none, full, columns, rows };
  Kind kind(int t) const {
    const DenseGrad& d = target_.dense[t];
    return !d.data           ? Kind::none
           : d.stride.d == 0 ? Kind::rows
           : d.stride.l == 0 ? Kind::columns
                             : Kind::full;
  }
  int64_t bucket(int64_t distance) const {
    const int64_t n = p_.bidirectional ? p_.buckets / 2 : p_.buckets;
    const int64_t d = p_.bidirectional && distance > 0 ? distance : max<int64_t>(-distance, 0);
    int64_t u = n - 1;
    while (u > 0 && p_.bucket_starts[u] > d) u--;
    return u + (p_.bidirectional && distance > 0 ? n : 0);
  }
  // Return true if all distances share a bucket. Buckets are monotone on each side of distance 0.
  bool one_bucket(int64_t first, int64_t last) const {
    return (first > 0 || last <= 0) && bucket(first) == bucket(last);
  }
  int64_t first_distance() const { return sequence_.distance(q0_ + rows_ - 1, k0_); }
  int64_t last_distance() const { return sequence_.distance(q0_, k0_ + keys_ - 1); }

  static void clear(acc* x, int64_t n) {
    for (int64_t i = 0; i < n; i += T::width) store(x + i, vec{});
  }
  static acc sum_row(const acc* ds, int64_t c0, int64_t c1) {
    vec s{};
    for (int64_t c = c0; c < c1; c += T::width) s = s + load(ds + c);
    return reduce(s, op_add);
  }
  // Return the sum of |distance| dS. Distances in a vector are exact up to 2^24.
  static double distance_row(const acc* ds, int64_t d0, int64_t c0, int64_t c1) {
    const vec index = __builtin_convertvector(iota<vec>(), vec);
    vec s{};
    for (int64_t c = c0; c < c1; c += T::width)
      s = fma(vabs(index + set1<vec>(acc(d0 + c))), load(ds + c), s);
    return reduce(s, op_add);
  }
  // y[c] += x[c] for c0 <= c < min(c1, n).
  static void add_row(acc* y, const acc* x, int64_t c0, int64_t c1, int64_t n) {
    int64_t c = c0;
    for (; c + T::width <= n && c < c1; c += T::width) storeu(y + c, loadu(y + c) + load(x + c));
    for (; c < n && c < c1; c++) y[c] += x[c];
  }

  const AttentionProblem& p_;
  const Sequence& sequence_;
  Target target_;
  int64_t block_q_, block_k_, q0_ = 0, rows_ = 0, k0_ = 0, keys_ = 0;
  acc *columns_, *diagonals_;
  bool far_ = false;
};

}  // namespace PT_ISA
}  // namespace pt
