// SPDX-License-Identifier: Apache-2.0
// Backward: gradients of dense masks and biases, ALiBi slopes and the T5 table from a tile's score
// gradients dS.
//
//   d_dense[b, h, i, j] = dS[i, j], summed over broadcast dimensions
//   d_slope[h]          = sum over b, i, j of -|j - i - offset| dS[i, j]
//   d_table[u, h]       = sum of dS[i, j] over b and the pairs with bucket(j - i - offset) = u
//
// Scratch is linear in the sizes: a row of columns or diagonals per tile, and a number per query
// row and split.
#pragma once

#include "cpu/attention/problem.h"
#include "cpu/attention/scores.h"
#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {
namespace bwd {

template <class T>
class TileTerms {
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

  TileTerms(const AttentionProblem& p, const Sequence& sequence, const Target& target, acc* work,
            int64_t block_q, int64_t block_k)
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

}  // namespace bwd
}  // namespace PT_ISA
}  // namespace pt
