// Backward of one tile: a block of queries against a block of keys.
//
//   P = exp2(s2 - m - l), dP = dO V^T, dS = P (dP - delta), and then dV += P^T dO, dK += dS^T Q, dQ += dS K
//
// Rows are queries and lanes are keys, as in the forward. dV and dK sum over queries: with bf16 pairs their operands are P and dS with two
// rows joined, where a unit holds one column of rows 2i and 2i + 1.
#pragma once

#include "arena.h"
#include "attention_bwd_terms.h"
#include "attention_scores.h"
#include "gemm.h"
#include "philox.h"

namespace pt {
namespace PT_ISA {
namespace bwd {

struct BackwardSizes {
  int64_t BQ, BK;              // rows of a block of queries, of keys
  int64_t du, dvu;             // units of a row of q, of v
  int64_t dw, dvw;             // columns of dQ and dK, of dV: D and Dv rounded up to whole vectors
  bool dq, dk, dv, terms, ds;  // wanted; ds: any but dv
  bool dropout, softcap, table;
  int64_t query_start;
  double scale, keep_scale;    // keep_scale: 1 / (1 - p)
};

// The packed query rows of a block. Joined panels: [panel][rows / pack][its columns].
template <class T>
struct QueryBlock {
  int64_t q0, rows;                       // first local row, how many
  const Range* seen;                      // the keys each row may see
  const typename T::unit *Q, *G, *Qj, *Gj;  // q and d_out as rows of units and as joined panels
  const typename T::acc *m, *l, *delta;   // l is 0 unless lse is too large to hold the log of the sum
  bool extreme;                           // some row has an l
};

// The packed keys of a block and what is summed for them.
template <class T>
struct KeyBlock {
  int64_t k0, n;                            // first local key, and how many up to the last that any query may see
  const typename T::unit *Kt, *Vt, *Kj;     // transposed panels of k and v, joined panels of k
  typename T::acc *dK, *dV;                 // [BK][dw], [BK][dvw]
};

template <class T>
class BackwardTile {
 public:
  using acc = typename T::acc;
  using opnd = typename T::opnd;
  using unit = typename T::unit;
  using vec = typename T::vec;
  static constexpr int64_t kStep = T::pack * T::width;  // columns of a step of the pointwise pass

  BackwardTile(const BackwardSizes& sizes, Arena& arena) : z(sizes) {
    S = arena.take<acc>(z.BQ * z.BK), dP = arena.take<acc>(z.BQ * z.BK);
    factor = arena.take<acc>(z.BK), diagonals = arena.take<acc>(Scores<T>::diagonal_size(z.BQ, z.BK));
    bits = arena.take<uint32_t>(KeepBits::words(z.BK));
    lo = arena.take<int>(z.BQ), hi = arena.take<int>(z.BQ), glo = arena.take<int>(z.BQ), ghi = arena.take<int>(z.BQ);
    from = arena.take<int>(z.BK), to = arena.take<int>(z.BK);
    if constexpr (T::pack == 1) {
      dS = dP, Pj = S, dSj = dP;
    } else {
      dS = arena.take<opnd>(z.BQ * z.BK), Pj = arena.take<unit>(z.BQ / T::pack * z.BK), dSj = arena.take<unit>(z.BQ / T::pack * z.BK);
    }
  }
  static size_t bytes(const BackwardSizes& z) {
    const size_t joined = Arena::bytes_for<opnd>(z.BQ * z.BK) + 2 * Arena::bytes_for<unit>(z.BQ / T::pack * z.BK);
    return 2 * Arena::bytes_for<acc>(z.BQ * z.BK) + Arena::bytes_for<acc>(z.BK) + Arena::bytes_for<acc>(Scores<T>::diagonal_size(z.BQ, z.BK)) +
           Arena::bytes_for<uint32_t>(KeepBits::words(z.BK)) +
           4 * Arena::bytes_for<int>(z.BQ) + 2 * Arena::bytes_for<int>(z.BK) + (T::pack > 1 ? joined : 0);
  }

  // Adds the tile of head h to k.dK, k.dV, the terms and dQ [BQ][dw] (which is stored the first time). False: no pair is visible, nothing was done.
  bool run(const Scores<T>& scores, int64_t h, const QueryBlock<T>& q, const KeyBlock<T>& k, const KeepBits* keep, acc* dQ, bool first, TileTerms<T>* terms) {
    if (!find_visible(q, k)) return false;
    score_products(q, k);
    if (terms) terms->begin(q.q0, q.rows, k.k0, k.n);
    const bool general = q.extreme || !scores.plain();
    if (general && z.table) scores.diagonals(h, q.q0, q.rows, k.k0, k.n, diagonals);
    const Context c{scores, h, q, k, keep, terms};
    if (z.dropout) general ? pointwise<true, true>(c) : pointwise<false, true>(c);
    else general ? pointwise<true, false>(c) : pointwise<false, false>(c);
    if (terms) terms->end();
    find_rows(q);
    if (z.dv) key_product(q, Pj, q.Gj, z.dvw, k.dV);
    if (z.dk) key_product(q, dSj, q.Qj, z.dw, k.dK);
    if (z.dq) query_product(q, k, dQ, first);
    return true;
  }

 private:
  struct Context {
    const Scores<T>& scores;
    int64_t h;
    const QueryBlock<T>& q;
    const KeyBlock<T>& k;
    const KeepBits* keep;  // null: everything is dropped
    TileTerms<T>* terms;
  };

  static void fill(acc* x, int64_t n) {
    for (int64_t i = 0; i < n; i += T::width) store(x + i, vec{});
  }

  // Columns that each row sees (none: 0, 0), those that a group of kMR rows reads, in whole steps, and those of all groups.
  bool find_visible(const QueryBlock<T>& q, const KeyBlock<T>& k) {
    clo = z.BK, chi = 0, seen = 0;
    for (int64_t r = 0, g = 0; r < q.rows; r += kMR, g++) {
      int64_t first = z.BK, last = 0;
      for (int64_t i = r; i < least(r + kMR, q.rows); i++) {
        const int64_t a = most<int64_t>(q.seen[i].lo - k.k0, 0), e = least(q.seen[i].hi - k.k0, k.n);
        lo[i] = hi[i] = 0;
        if (a < e) lo[i] = int(a), hi[i] = int(e), first = least(first, a), last = most(last, e);
      }
      glo[g] = last ? int(first / kStep * kStep) : 0, ghi[g] = int(round_up(last, kStep));
      if (last) clo = least<int64_t>(clo, glo[g]), chi = most<int64_t>(chi, ghi[g]), seen = most(seen, last);
    }
    return chi > 0;
  }

  // S = Q K^T and dP = dO V^T; a panel of keys stays in the first cache over all rows.
  void score_products(const QueryBlock<T>& q, const KeyBlock<T>& k) {
    constexpr int64_t panel = kPanel<T>;
    for (int64_t j = clo / panel * panel; j < chi; j += panel)
      for (int64_t r = 0, g = 0; r < q.rows; r += kMR, g++) {
        if (glo[g] >= j + panel || ghi[g] <= j) continue;
        const auto f = pick<T>(least<int64_t>(kMR, q.rows - r), panel, kStore);
        f(z.du, q.Q + r * z.du, z.du, 1, k.Kt + j * z.du, S + r * z.BK + j, z.BK, nullptr);
        if (z.ds) f(z.dvu, q.G + r * z.dvu, z.dvu, 1, k.Vt + j * z.dvu, dP + r * z.BK + j, z.BK, nullptr);
      }
  }

  template <bool GENERAL, bool DROPOUT>
  void pointwise(const Context& x) {
    const QueryBlock<T>& q = x.q;
    for (int64_t r = 0; r < q.rows; r += T::pack) {
      const int64_t c0 = glo[r / kMR], c1 = ghi[r / kMR];
      for (int64_t i = r; i < least(r + T::pack, q.rows); i++) {
        acc *s = S + i * z.BK, *dp = dP + i * z.BK;
        if (c0 < c1) {
          if constexpr (GENERAL) {
            const acc* diagonal = z.table ? Scores<T>::diagonal_of(diagonals, q.q0 + i, q.q0, q.rows) + c0 : nullptr;
            x.scores.row(x.h, q.q0 + i, x.k.k0 + c0, least(c1, x.k.n) - c0, q.seen[i], diagonal, s + c0, z.softcap ? factor + c0 : nullptr);
          }
          if constexpr (DROPOUT) {
            if (x.keep) x.keep->row(uint32_t(q.q0 + i + z.query_start), bits);
          }
          softmax_row<GENERAL, DROPOUT>(x, i, c0, c1);
          if (x.terms) x.terms->row(i, dp, c0, c1);
          if constexpr (GENERAL) {
            if (z.softcap)
              for (int64_t c = c0; c < c1; c += T::width) store(dp + c, load(dp + c) * load(factor + c));
          }
        }
        if constexpr (T::pack == 1) {
          fill(s + clo, c0 - clo), fill(dp + clo, c0 - clo);
          fill(s + c1, chi - c1), fill(dp + c1, chi - c1);
        }
      }
      if constexpr (T::pack == 2) join(r, r + 1 < q.rows, c0, c1);
    }
  }

  // S becomes P and dP becomes dS in row i; zero at invisible pairs, whatever stood there.
  template <bool GENERAL, bool DROPOUT>
  void softmax_row(const Context& x, int64_t i, int64_t c0, int64_t c1) {
    const QueryBlock<T>& q = x.q;
    acc *s = S + i * z.BK, *dp = dP + i * z.BK;
    const vec scale = set1<vec>(acc(GENERAL ? kLog2e : z.scale * kLog2e)), m = set1<vec>(q.m[i]), l = set1<vec>(q.l[i]), delta = set1<vec>(q.delta[i]);
    const vec keep_scale = set1<vec>(acc(z.keep_scale)), none = set1<vec>(-kInfinity<acc>);
    const auto step = [&](int64_t j, auto masked) {
      const vec t = load(s + j), d = load(dp + j);
      vec p = exp2v<T::exp_degree>(GENERAL ? fma(vmin(vec{}, t - m), scale, -l) : fma(t, scale, -m)), ds;
      mask on = mask_n<vec>(T::width);
      if constexpr (decltype(masked)::value) on = mask_range<vec>(lo[i] - j, hi[i] - j);
      if constexpr (GENERAL) on &= to_mask(t != none);
      if constexpr (DROPOUT) {
        const mask keep = x.keep ? bits_at(bits, x.keep->offset() + j) : mask(0);
        ds = p * fma(select(keep, d, vec{}), keep_scale, -delta);
        p = select(mask(keep & on), p, vec{});
      } else {
        ds = p * (d - delta);
        if constexpr (GENERAL || decltype(masked)::value) p = select(on, p, vec{});
      }
      if constexpr (GENERAL || decltype(masked)::value) ds = select(on, ds, vec{});
      store(s + j, p), store(dp + j, ds);
    };
    int64_t j = c0;
    if constexpr (!GENERAL) {
      for (; j < lo[i]; j += T::width) step(j, std::true_type());
      for (; j + T::width <= hi[i]; j += T::width) step(j, std::false_type());
    }
    for (; j < c1; j += T::width) step(j, std::true_type());
  }

  // Rows r and r + 1 of P and dS as units, and of dS as rows; zero where [clo, chi) exceeds [c0, c1).
  void join(int64_t r, bool pair, int64_t c0, int64_t c1) {
    using uvec = typename T::uvec;
    const auto put = [](void* p, uvec v) { *static_cast<uvec*>(p) = v; };
    const auto row = [&](const acc* p, int64_t c, bool in) { return in ? T::pair(load(p + c), load(p + c + T::width)) : uvec{}; };
    const acc *p = S + r * z.BK, *d = dP + r * z.BK;
    unit *pj = Pj + r / 2 * z.BK, *dj = dSj + r / 2 * z.BK;
    for (int64_t c = clo; c < chi; c += kStep) {
      const bool in = c0 <= c && c < c1;
      uvec x, y;
      interleave(row(p, c, in), row(p + z.BK, c, in && pair), &x, &y);
      put(pj + c, x), put(pj + c + T::width, y);
      if (!z.ds) continue;
      const uvec d0 = row(d, c, in), d1 = row(d + z.BK, c, in && pair);
      interleave(d0, d1, &x, &y);
      put(dj + c, x), put(dj + c + T::width, y);
      put(dS + r * z.BK + c, d0), put(dS + (r + 1) * z.BK + c, d1);
    }
  }

  // The queries [from, to) that see any of kMR keys.
  void find_rows(const QueryBlock<T>& q) {
    const int64_t groups = ceil_div(q.rows, kMR);
    for (int64_t r = clo, i = 0; r < seen; r += kMR, i++) {
      const auto sees = [&](int64_t g) { return glo[g] < r + kMR && ghi[g] > r; };
      int64_t a = 0, e = groups;
      while (a < e && !sees(a)) a++;
      while (a < e && !sees(e - 1)) e--;
      from[i] = int(a * kMR), to[i] = int(least(e * kMR, q.rows));
    }
  }

  // out += A^T B: dV += P^T dO, dK += dS^T Q
  void key_product(const QueryBlock<T>& q, const unit* A, const unit* B, int64_t columns, acc* out) {
    const int64_t ld = ceil_div(q.rows, T::pack);
    for (int64_t col = 0; col < columns; col += kPanel<T>) {
      const int64_t w = least<int64_t>(kPanel<T>, columns - col);
      for (int64_t r = clo, i = 0; r < seen; r += kMR, i++) {
        const int64_t a = from[i] / T::pack, n = ceil_div(to[i], T::pack) - a;
        if (n <= 0) continue;
        pick<T>(least<int64_t>(kMR, seen - r), w, kAdd)(n, A + a * z.BK + r, 1, z.BK, B + col * ld + a * w, out + r * columns + col, columns, nullptr);
      }
    }
  }

  // dQ += dS K
  void query_product(const QueryBlock<T>& q, const KeyBlock<T>& k, acc* dQ, bool first) {
    for (int64_t col = 0; col < z.dw; col += kPanel<T>) {
      const int64_t w = least<int64_t>(kPanel<T>, z.dw - col);
      for (int64_t r = 0, g = 0; r < q.rows; r += kMR, g++) {
        const int64_t a = glo[g] / T::pack, n = most<int64_t>(ceil_div(least<int64_t>(ghi[g], seen), T::pack) - a, 0);
        if (n > 0 || first)
          pick<T>(least<int64_t>(kMR, q.rows - r), w, first ? kStore : kAdd)(n, reinterpret_cast<const unit*>(dS + r * z.BK) + a, z.BK / T::pack, 1,
                                                                            k.Kj + col * (z.BK / T::pack) + a * w, dQ + r * z.dw + col, z.dw, nullptr);
      }
    }
  }

  const BackwardSizes& z;
  acc *S, *dP, *factor, *diagonals;
  opnd* dS;
  unit *Pj, *dSj;
  uint32_t* bits;
  int *lo, *hi, *glo, *ghi, *from, *to;
  int64_t clo = 0, chi = 0, seen = 0;  // columns of the tile: in whole steps, and the last visible
};

}  // namespace bwd
}  // namespace PT_ISA
}  // namespace pt
