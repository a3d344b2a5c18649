// SPDX-License-Identifier: Apache-2.0
// Backward of one tile: a block of queries times a block of keys.
//
//   P = exp2(s2 - m - l), dP = dO V^T, dS = P (dP - delta)
//   dV += P^T dO, dK += dS^T Q, dQ += dS K
//
// Rows are queries and lanes are keys, as in forward. dV and dK sum over queries. With single
// numbers, P^T dO and dS^T Q read the left operand across the tile's rows. Bf16 pairs must join
// queries: P and dS are panels of 64 keys, a packed element being one column of rows 2i and 2i + 1,
// and the gemms are dV^T = dO^T P and dK^T = Q^T dS, with all operands in the layout of AMX tiles.
#pragma once

#include "cpu/attention/score_mod.h"
#include "cpu/core/arena.h"
#include "cpu/core/gemm.h"
#include "cpu/core/phases.h"
#include "cpu/core/philox.h"

namespace pt {
namespace PT_ISA {
namespace bwd {

struct BackwardSizes {
  int64_t BQ, BK;              // block sizes in queries and keys
  int64_t du, dvu;             // packed elements of a row of q, of v, in full steps
  int64_t dw, dvw;             // columns of dQ and dK, of dV: D and Dv rounded up to vectors
  bool dq, dk, dv, terms, ds;  // requested results; ds: any but dv
  bool dropout, softcap, table;
  int64_t query_start;
  double scale, keep_scale;  // keep_scale: 1 / (1 - p)
};

// Packed query rows of a block. For sums over queries, q and d_out are panels [panel][row][column],
// or [column][pair] with pairs.
template <class T>
struct QueryBlock {
  int64_t q0, rows;   // first local row, number of rows
  const Range* seen;  // visible keys per row
  // q and d_out as rows of packed elements, and as operands summed over queries.
  const typename T::packed *Q, *G, *Qs, *Gs;
  // l is 0 unless lse is too large to hold the log of the sum.
  const typename T::acc *m, *l, *delta;
  bool extreme;  // some row has an l
};

// Packed keys of a block and their sums.
template <class T>
struct KeyBlock {
  int64_t k0, n;                           // first local key, number up to the last visible key
  const typename T::packed *Kt, *Vt, *Kj;  // transposed panels of k and v, row-joined panels of k
  typename T::acc *dK, *dV;                // [BK][dw], [BK][dvw]; with pairs [dw][BK], [dvw][BK]
};

template <class T>
class BackwardTile {
 public:
  using acc = typename T::acc;
  using opnd = typename T::opnd;
  using packed = typename T::packed;
  using vec = typename T::vec;
  static constexpr bool kPairs = T::pack > 1;
  static constexpr int64_t kGroup = kRows<T>;           // rows per micro-kernel call
  static constexpr int64_t kStep = T::pack * T::width;  // columns per step of the pointwise pass
  static constexpr int64_t kRowStep = kPairs ? 32 : 1;  // rows of a block are zero-padded to this
  static int64_t padded(int64_t rows) { return round_up(rows, kRowStep); }

  BackwardTile(const BackwardSizes& sizes, Arena& arena) : z(sizes) {
    S = arena.take<acc>(z.BQ * z.BK), dP = arena.take<acc>(z.BQ * z.BK);
    factor = arena.take<acc>(T::pack * z.BK),
    diagonals = arena.take<acc>(Scores<T>::diagonal_size(z.BQ, z.BK));
    bits = arena.take<uint32_t>(T::pack * KeepBits::words(z.BK));
    lo = arena.take<int>(z.BQ), hi = arena.take<int>(z.BQ), glo = arena.take<int>(z.BQ),
    ghi = arena.take<int>(z.BQ);
    if constexpr (kPairs) {
      const int64_t units = z.BQ / T::pack * z.BK;
      dS = arena.take<opnd>(z.BQ * z.BK), Ps = arena.take<packed>(units),
      dSs = arena.take<packed>(units);
    } else {
      dS = dP, Ps = S, dSs = dP;
    }
  }
  static size_t bytes(const BackwardSizes& z) {
    const size_t pairs =
        Arena::bytes_for<opnd>(z.BQ * z.BK) + 2 * Arena::bytes_for<packed>(z.BQ / T::pack * z.BK);
    return 2 * Arena::bytes_for<acc>(z.BQ * z.BK) + Arena::bytes_for<acc>(T::pack * z.BK) +
           Arena::bytes_for<acc>(Scores<T>::diagonal_size(z.BQ, z.BK)) +
           Arena::bytes_for<uint32_t>(T::pack * KeepBits::words(z.BK)) +
           4 * Arena::bytes_for<int>(z.BQ) + (kPairs ? pairs : 0);
  }

  // Add the tile of head h to k.dK, k.dV, the terms and dQ [BQ][dw] (stored if `first`). Return
  // false without any work if no pair is visible.
  bool run(const Scores<T>& scores, int64_t h, const QueryBlock<T>& q, const KeyBlock<T>& k,
           const KeepBits* keep, acc* dQ, bool first, TermGradients<T>* terms) {
    if (!find_visible(scores, h, q, k)) return false;
    PT_PHASE(scores) products(scores, h, q, k);
    if (terms) terms->begin(q.q0, q.rows, k.k0, k.n);
    const bool general = q.extreme || !scores.plain();
    if (general && z.table) scores.diagonals(h, q.q0, q.rows, k.k0, k.n, diagonals);
    const Context c{scores, h, q, k, keep, terms};
    PT_PHASE(softmax) {
      if (z.dropout) general ? pointwise<true, true>(c) : pointwise<false, true>(c);
      else general ? pointwise<true, false>(c) : pointwise<false, false>(c);
    }
    if (terms) terms->end();
    if (z.dv) PT_PHASE(dv) key_product(q, Ps, q.Gs, z.dvw, k.dV);
    if (z.dk) PT_PHASE(dk) key_product(q, dSs, q.Qs, z.dw, k.dK);
    if (z.dq) PT_PHASE(dq) query_product(q, k, dQ, first);
    return true;
  }

 private:
  struct Context {
    const Scores<T>& scores;
    int64_t h;
    const QueryBlock<T>& q;
    const KeyBlock<T>& k;
    const KeepBits* keep;  // null: everything is dropped
    TermGradients<T>* terms;
  };

  // Compute the visible columns of each row (none: 0, 0), the columns of each group of kRows rows
  // in full steps, and the union over groups.
  bool find_visible(const Scores<T>& scores, int64_t h, const QueryBlock<T>& q,
                    const KeyBlock<T>& k) {
    clo = z.BK, chi = 0, seen = 0;
    for (int64_t r = 0, g = 0; r < q.rows; r += kGroup, g++) {
      int64_t first = z.BK, last = 0;
      for (int64_t i = r; i < min(r + kGroup, q.rows); i++) {
        Range in{max(q.seen[i].lo, k.k0), min(q.seen[i].hi, k.k0 + k.n)};
        if (in.size() > 0) in = scores.visibility.trim(h, q.q0 + i, in);
        const int64_t a = in.lo - k.k0, e = in.hi - k.k0;
        lo[i] = hi[i] = 0;
        if (a < e) lo[i] = int(a), hi[i] = int(e), first = min(first, a), last = max(last, e);
      }
      glo[g] = last ? int(first / kStep * kStep) : 0, ghi[g] = int(round_up(last, kStep));
      if (last)
        clo = min<int64_t>(clo, glo[g]), chi = max<int64_t>(chi, ghi[g]), seen = max(seen, last);
    }
    return chi > 0;
  }

  // S = Q K^T and dP = dO V^T. A panel of keys remains in L1 for all rows.
  void products(const Scores<T>& scores, int64_t h, const QueryBlock<T>& q, const KeyBlock<T>& k) {
    constexpr int64_t panel = kPanel<T>;
    const bool plain = scores.plain();
    for (int64_t j = clo / panel * panel; j < chi; j += panel)
      for (int64_t r = 0, g = 0; r < q.rows; r += kGroup, g++) {
        if (glo[g] >= j + panel || ghi[g] <= j) continue;
        const int64_t rows = min(kGroup, q.rows - r);
        for (int64_t i = r; i < r + rows && !plain; i++)
          scores.fetch(h, q.q0 + i, k.k0 + j, min(panel, k.n - j));
        score_products<T>(rows, z.du, q.Q + r * z.du, k.Kt + j * z.du, S + r * z.BK + j, z.BK);
        if (z.ds)
          score_products<T>(rows, z.dvu, q.G + r * z.dvu, k.Vt + j * z.dvu, dP + r * z.BK + j,
                            z.BK);
      }
  }

  template <bool GENERAL, bool DROPOUT>
  void pointwise(const Context& x) {
    const int64_t rows = x.q.rows, end = padded(rows);
    for (int64_t i = rows; i < end; i++) lo[i] = hi[i] = 0;
    for (int64_t r = 0; r < end; r += T::pack) {
      const int64_t c0 = r < rows ? glo[r / kGroup] : 0, c1 = r < rows ? ghi[r / kGroup] : 0;
      if (c0 < c1) softmax_rows<GENERAL, DROPOUT>(x, r, c0, c1);
      if constexpr (kPairs) {
        constexpr int64_t panel = kPanel<T>;
        fill_units(r, clo / panel * panel, c0),
            fill_units(r, max(c1, clo / panel * panel), round_up(chi, panel));
      } else {
        fill(S + r * z.BK, clo, c0), fill(S + r * z.BK, max(c1, clo), chi);
        fill(dP + r * z.BK, clo, c0), fill(dP + r * z.BK, max(c1, clo), chi);
      }
    }
  }

  // Modify the scores of row r, the i-th of its packed element, and draw its keep bits.
  template <bool GENERAL, bool DROPOUT>
  INLINE void prepare_row(const Context& x, int64_t r, int i, int64_t c0, int64_t c1) {
    const QueryBlock<T>& q = x.q;
    const int64_t row = q.q0 + r;
    if constexpr (GENERAL) {
      const acc* diagonal =
          z.table ? Scores<T>::diagonal_of(diagonals, row, q.q0, q.rows) + c0 : nullptr;
      x.scores.row(x.h, row, x.k.k0 + c0, min(c1, x.k.n) - c0, q.seen[r], diagonal,
                   S + r * z.BK + c0, z.softcap ? factor + i * z.BK + c0 : nullptr);
    }
    if constexpr (DROPOUT)
      if (x.keep) x.keep->row(uint32_t(row + z.query_start), bits + i * KeepBits::words(z.BK));
  }

  // Convert S to P and dP to dS in T::pack rows from r, columns [c0, c1). Invisible pairs become
  // zero, whatever they contained.
  template <bool GENERAL, bool DROPOUT>
  void softmax_rows(const Context& x, int64_t r, int64_t c0, int64_t c1) {
    constexpr int n = T::pack;
    const QueryBlock<T>& q = x.q;
    vec m[n], l[n], delta[n];
    int64_t from = 0, to = c1;  // columns visible to all rows
    UNROLL for (int i = 0; i < n; i++) {
      const bool padding = r + i >= q.rows;
      m[i] = set1<vec>(padding ? 0 : q.m[r + i]), l[i] = set1<vec>(padding ? 0 : q.l[r + i]);
      delta[i] = set1<vec>(padding ? 0 : q.delta[r + i]);
      from = max<int64_t>(from, lo[r + i]), to = min<int64_t>(to, hi[r + i]);
      if (padding) continue;
      prepare_row<GENERAL, DROPOUT>(x, r + i, i, c0, c1);
    }
    const vec scale = set1<vec>(acc(GENERAL ? kLog2e : z.scale * kLog2e)),
              none = set1<vec>(-kInfinity<acc>);
    const vec keep_scale = set1<vec>(acc(z.keep_scale));
    const auto step = [&](int64_t c, auto vectors, auto masked) {
      constexpr int w = decltype(vectors)::value;  // vectors per row
      vec p[n * w], ds[n * w];
      UNROLL for (int i = 0; i < n; i++) UNROLL for (int j = 0; j < w; j++) {
        const vec t = load(S + (r + i) * z.BK + c + j * T::width);
        p[i * w + j] = GENERAL ? fma(vmin(vec{}, t - m[i]), scale, -l[i]) : fma(t, scale, -m[i]);
      }
      exp2_each<T::exp_degree, true>(p);
      UNROLL for (int i = 0; i < n; i++) UNROLL for (int j = 0; j < w; j++) {
        const int64_t at = c + j * T::width, e = (r + i) * z.BK + at;
        const vec d = load(dP + e);
        vec weight = p[i * w + j], g;
        mask on = mask_n<vec>(T::width);
        if constexpr (decltype(masked)::value) on = mask_range<vec>(lo[r + i] - at, hi[r + i] - at);
        if constexpr (GENERAL) on &= to_mask(load(S + e) != none);
        if constexpr (DROPOUT) {
          const mask keep =
              x.keep ? bits_at(bits + i * KeepBits::words(z.BK), x.keep->offset() + at) : mask(0);
          g = weight * fma(select(keep, d, vec{}), keep_scale, -delta[i]);
          weight = select(mask(keep & on), weight, vec{});
        } else {
          g = weight * (d - delta[i]);
          if constexpr (GENERAL || decltype(masked)::value) weight = select(on, weight, vec{});
        }
        if constexpr (GENERAL || decltype(masked)::value) g = select(on, g, vec{});
        if (kPairs && x.terms) store(dP + e, g);
        if constexpr (GENERAL)
          // factor is undefined where no key is visible.
          if (kPairs && z.softcap) g = select(on, vec(g * load(factor + i * z.BK + at)), vec{});
        p[i * w + j] = weight, ds[i * w + j] = g;
      }
      if constexpr (kPairs) {
        store_units(r, c, T::pair(p[0], p[1]), T::pair(p[2], p[3]), Ps);
        if (!z.ds) return;
        const auto d0 = T::pair(ds[0], ds[1]), d1 = T::pair(ds[2], ds[3]);
        store_units(r, c, d0, d1, dSs);
        put(dS + r * z.BK + c, d0), put(dS + (r + 1) * z.BK + c, d1);
      } else {
        UNROLL for (int j = 0; j < w; j++) store(S + r * z.BK + c + j * T::width, p[j]),
            store(dP + r * z.BK + c + j * T::width, ds[j]);
      }
    };
    constexpr std::integral_constant<int, n> one;
    constexpr std::integral_constant<int, kPairs ? n : 4> more;
    int64_t c = c0;
    for (; c < from && c < c1; c += kStep) step(c, one, std::true_type());
    for (; c + more * T::width <= to; c += more * T::width) step(c, more, std::false_type());
    for (; c + kStep <= to; c += kStep) step(c, one, std::false_type());
    for (; c < c1; c += kStep) step(c, one, std::true_type());
    for (int64_t i = r; x.terms && i < min(r + n, q.rows); i++)
      x.terms->row(i, dP + i * z.BK, c0, c1);
    if constexpr (GENERAL && !kPairs)
      for (c = c0; z.softcap && c < c1; c += T::width) {
        const vec g = load(dP + r * z.BK + c);
        // factor is undefined where no key is visible.
        store(dP + r * z.BK + c, select(to_mask(g != vec{}), vec(g * load(factor + c)), g));
      }
  }

  static void fill(acc* row, int64_t c, int64_t end) {
    for (; c < end; c += T::width) store(row + c, vec{});
  }
  static INLINE void put(void* p, typename T::uvec v) { *static_cast<typename T::uvec*>(p) = v; }
  // Return the position of column c, rows r and r + 1, in a panel of packed elements.
  int64_t unit_at(int64_t r, int64_t c) const {
    constexpr int64_t panel = kPanel<T>;
    return (c / panel * (z.BQ / T::pack) + r / T::pack) * panel + c % panel;
  }
  // Store kStep columns of two rows as packed elements.
  INLINE void store_units(int64_t r, int64_t c, typename T::uvec row0, typename T::uvec row1,
                          packed* to) const {
    typename T::uvec a, b;
    interleave(row0, row1, &a, &b);
    to += unit_at(r, c);
    put(to, a), put(to + T::width, b);
  }
  void fill_units(int64_t r, int64_t c, int64_t end) const {
    for (; c < end; c += T::width)
      put(Ps + unit_at(r, c), typename T::uvec{}), put(dSs + unit_at(r, c), typename T::uvec{});
  }

  // Return the rows [lo, hi) of the groups that see any of the columns [c, end).
  Range rows_that_see(int64_t rows, int64_t c, int64_t end) const {
    const auto sees = [&](int64_t g) { return glo[g] < end && ghi[g] > c; };
    int64_t a = 0, e = ceil_div(rows, kGroup);
    while (a < e && !sees(a)) a++;
    while (a < e && !sees(e - 1)) e--;
    return {a * kGroup, min(e * kGroup, rows)};
  }

  // out += A^T B over queries with A of this tile: dV += P^T dO, dK += dS^T Q, or with pairs dV^T
  // += dO^T P, dK^T += Q^T dS.
  void key_product(const QueryBlock<T>& q, const packed* A, const packed* B, int64_t columns,
                   acc* out) {
    constexpr int64_t panel = kPanel<T>;
    if constexpr (kPairs) {
      const int64_t ld = padded(q.rows) / T::pack;
      for (int64_t c = clo / panel * panel; c < chi; c += panel) {
        const Range r = rows_that_see(q.rows, c, c + panel);
        const int64_t a = r.lo / kRowStep * kRowStep / T::pack, n = padded(r.hi) / T::pack - a;
        for (int64_t d = 0; d < columns && r.size() > 0; d += kGroup)
          pick<T>(min(kGroup, columns - d), panel, kAdd)(n, B + d * ld + a, ld, 1,
                                                         A + unit_at(T::pack * a, c),
                                                         out + d * z.BK + c, z.BK, nullptr);
      }
    } else {
      for (int64_t col = 0; col < columns; col += panel) {
        const int64_t w = min(panel, columns - col);
        for (int64_t c = clo; c < seen; c += kGroup) {
          const Range r = rows_that_see(q.rows, c, c + kGroup);
          if (r.size() > 0)
            pick<T>(min(kGroup, seen - c), w, kAdd)(r.size(), A + r.lo * z.BK + c, 1, z.BK,
                                                    B + col * q.rows + r.lo * w,
                                                    out + c * columns + col, columns, nullptr);
        }
      }
    }
  }

  // dQ += dS K over the keys visible to any query of a group.
  void query_product(const QueryBlock<T>& q, const KeyBlock<T>& k, acc* dQ, bool first) {
    for (int64_t col = 0; col < z.dw; col += kPanel<T>) {
      const int64_t w = min<int64_t>(kPanel<T>, z.dw - col);
      for (int64_t r = 0, g = 0; r < q.rows; r += kGroup, g++) {
        const int64_t a = glo[g] / T::pack,
                      n = (kPairs ? ghi[g] : min<int64_t>(ghi[g], seen)) / T::pack - a;
        if (n > 0 || first)
          pick<T>(min(kGroup, q.rows - r), w, first ? kStore : kAdd)(
              max<int64_t>(n, 0), reinterpret_cast<const packed*>(dS + r * z.BK) + a,
              z.BK / T::pack, 1, k.Kj + col * (z.BK / T::pack) + a * w, dQ + r * z.dw + col, z.dw,
              nullptr);
      }
    }
  }

  const BackwardSizes& z;
  acc *S, *dP, *factor, *diagonals;
  opnd* dS;
  packed *Ps, *dSs;  // P and dS in the layout for sums over queries
  uint32_t* bits;
  int *lo, *hi, *glo, *ghi;            // visible columns per row; columns per group of rows
  int64_t clo = 0, chi = 0, seen = 0;  // columns of the tile: in full steps; last visible
};

}  // namespace bwd
}  // namespace PT_ISA
}  // namespace pt
