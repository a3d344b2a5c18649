// SPDX-License-Identifier: Apache-2.0
// Backward: an item's query rows, packed for its tasks, and their dQ.
#pragma once

#include "cpu/attention/bwd_plan.h"
#include "cpu/attention/bwd_tile.h"
#include "cpu/core/pack.h"

namespace pt {
namespace PT_ISA {
namespace bwd {

INLINE bool sums_rows(const DenseGrad& d) { return d.data && d.stride.d == 0; }

// Packed operands, row stats and partial sums of an item. Arrays by row start at its row q0.
template <class T>
struct Item : ItemId {
  using acc = typename T::acc;
  using packed = typename T::packed;
  int64_t rows, parts;  // parts: splits that have keys
  const Sequence* sequence;
  packed *Q, *G, *Qs, *Gs;
  Range* seen;
  acc *m, *l, *delta;
  // live [row]: sees a key. extreme [block]. touched [part][block]: this partial dQ was stored.
  uint8_t *live, *extreme, *touched;
  acc* dQ;                // [part][rows][dw]
  acc* row_sums[2];       // [part][rows], of mask and bias
  double *slope, *table;  // [part], [part][buckets]
  double* sink;           // [block]

  Item() = default;
  Item(const ItemId& id, const BackwardPlan& plan)
      : ItemId(id), rows(plan.rows(id)), parts(plan.parts(id.b)) {}

  int64_t blocks(const BackwardSizes& z) const { return ceil_div(rows, z.BQ); }
  int64_t block_rows(const BackwardSizes& z, int64_t i) const { return min(z.BQ, rows - i * z.BQ); }

  // Call take(pointer, count) for every array.
  template <class Take>
  void layout(const BackwardSizes& z, const AttentionGrads& g, int64_t buckets, const Take& take) {
    const int64_t units = BackwardTile<T>::padded(rows) / T::pack, n = blocks(z);
    take(Q, rows * z.du), take(G, z.ds ? rows * z.dvu : 0), take(Qs, z.dk ? units * z.dw : 0),
        take(Gs, z.dv ? units * z.dvw : 0);
    take(seen, rows), take(m, rows), take(l, rows), take(delta, rows), take(live, rows),
        take(extreme, n);
    take(touched, parts * n), take(dQ, z.dq ? parts * rows * z.dw : 0);
    take(row_sums[0], sums_rows(g.d_mask) ? parts * rows : 0),
        take(row_sums[1], sums_rows(g.d_bias) ? parts * rows : 0);
    take(slope, g.d_slopes ? parts : 0), take(table, g.d_table ? parts * buckets : 0);
    take(sink, g.d_sinks ? n : 0);
  }

  // Return block i without the rows past the query length.
  QueryBlock<T> block(const BackwardSizes& z, int64_t i) const {
    const int64_t r = i * z.BQ, units = r / T::pack;
    return {q0 + r,
            clamp<int64_t>(sequence->rows - q0 - r, 0, block_rows(z, i)),
            seen + r,
            Q + r * z.du,
            G + r * z.dvu,
            Qs + units * z.dw,
            Gs + units * z.dvw,
            m + r,
            l + r,
            delta + r,
            extreme[i] != 0};
  }
};

template <class T>
class QueryRows {
 public:
  using elem = typename T::elem;
  using acc = typename T::acc;
  using packed = typename T::packed;
  using vec = typename T::vec;
  // Max |lse| that holds the log of the sum to 2^-14.
  static constexpr double kTrusted = 1024;

  QueryRows(const AttentionProblem& p, const AttentionGrads& g, const BackwardSizes& z,
            const Item<T>& it, int64_t i)
      : p(p), g(g), z(z), it(it), sequence(*it.sequence), i(i), row0(i * z.BQ),
        base(sequence.q_first + it.q0 + row0) {}

  void pack() const {
    for (int t = 0; t < 2; t++)
      if (sums_rows(t ? g.d_bias : g.d_mask))
        for (int64_t s = 0; s < it.parts; s++)
          for (int64_t r = 0; r < it.block_rows(z, i); r++)
            it.row_sums[t][s * it.rows + row0 + r] = 0;
    it.extreme[i] = 0;
    const Scores<T> scores(p, sequence);
    const bool plain = scores.plain();
    const int64_t n = it.block(z, i).rows, ld = BackwardTile<T>::padded(n);
    const elem *q = at<elem>(p.q, p.qs), *d_out = at<elem>(g.d_out, g.dos),
               *out = at<elem>(p.out, p.os);
    const acc *lse = at<acc>(p.lse, p.lse_s),
              *d_lse = g.d_lse ? at<acc>(g.d_lse, g.d_lse_s) : nullptr;
    acc *m = it.m + row0, *l = it.l + row0, *delta = it.delta + row0;
    uint8_t* live = it.live + row0;
    const acc sink = sink_of<acc>(p, it.h);
    TileTrim trim(p, sequence.b);
    for (int64_t r = 0; r < n; r++) {
      const Range v = it.seen[row0 + r] =
          trim(it.h, it.q0 + row0 + r, sequence.visible(it.q0 + row0 + r));
      acc e = lse[r * p.lse_s.l];
      live[r] = !(e <= sink) || (plain && v.size() > 0 && sink == -kInfinity<acc>);
      // every product is -inf: NaN, as in forward
      if (live[r] && e == -kInfinity<acc>) e = acc(__builtin_nan(""));
      m[r] = e, l[r] = 0;
      it.extreme[i] |= huge(e);
      vec sum{};
      if (live[r] && (z.ds || g.d_sinks))
        for (int64_t c = 0; c < p.Dv; c += T::width)
          sum = fma(T::load(d_out + r * g.dos.l + c, p.Dv - c),
                    T::load(out + r * p.os.l + c, p.Dv - c), sum);
      delta[r] = reduce(sum, op_add) - (live[r] && d_lse ? d_lse[r * g.d_lse_s.l] : acc(0));
    }
    const int64_t units = row0 / T::pack;
    copy_rows<T>(q, p.qs.l, n, n, p.D, it.Q + row0 * z.du, live, z.du);
    if (z.ds) copy_rows<T>(d_out, g.dos.l, n, n, p.Dv, it.G + row0 * z.dvu, live, z.dvu);
    if (z.dk) pack_sum(q, p.qs.l, n, ld, p.D, it.Qs + units * z.dw, live);
    if (z.dv) pack_sum(d_out, g.dos.l, n, ld, p.Dv, it.Gs + units * z.dvw, live);
    if (it.extreme[i]) split_lse(sink);
    if (g.d_sinks) it.sink[i] = sink_gradient(n, sink, d_lse);
    if (it.extreme[i]) return;
    if (plain)
      for (int64_t r = 0; r < n; r++) m[r] = acc(m[r] * kLog2e);
  }

  // Return the max scratch of pack().
  static size_t bytes(const BackwardSizes& z) {
    constexpr int64_t panel = kPanel<T>;
    return Arena::bytes_for<packed>(panel * z.du) + Arena::bytes_for<acc>(kRows<T> * panel) +
           Arena::bytes_for<acc>(Scores<T>::diagonal_size(kRows<T>, panel)) +
           Arena::bytes_for<uint8_t>(z.BQ) + Arena::bytes_for<uint8_t>(panel);
  }

  // Reduce the partials of dQ in order.
  void write() const {
    const vec scale = set1<vec>(acc(p.scale));
    for (int64_t r = 0; r < it.block_rows(z, i); r++) {
      elem* out = const_cast<elem*>(at<elem>(g.dq, g.dqs)) + r * g.dqs.l;
      for (int64_t c = 0; c < p.D; c += T::width) {
        vec x{};
        for (int64_t s = 0; s < it.parts; s++)
          if (it.touched[s * it.blocks(z) + i])
            x = x + load(it.dQ + (s * it.rows + row0 + r) * z.dw + c);
        T::store(out + c, p.D - c, x * scale);
      }
    }
  }

 private:
  template <class E>
  const E* at(const void* data, const Strides& s) const {
    return static_cast<const E*>(data) + it.b * s.b + it.h * s.h + base * s.l;
  }
  // Pack the operand of QueryBlock that is summed over queries.
  static void pack_sum(const elem* src, int64_t stride, int64_t n, int64_t ld, int64_t d,
                       packed* dst, const uint8_t* live) {
    if constexpr (T::pack == 1) {
      pack_rows<T>(src, stride, n, ld, d, ld, dst, live);
    } else {
      using uvec = typename T::uvec;
      constexpr int64_t w = T::width;
      const int64_t columns = round_up(d, w), pairs = ld / 2;
      for (int64_t u = 0; u < pairs; u += w)
        for (int64_t c = 0; c < columns; c += 2 * w) {
          vec a[w], b[w];
          const auto row = [&](int64_t r) {
            return r < n && live[r] ? T::load_units(src + r * stride + c, d - c) : uvec{};
          };
          for (int64_t i = 0; i < w; i++) {
            uvec lo, hi;
            interleave(row(2 * (u + i)), row(2 * (u + i) + 1), &lo, &hi);
            a[i] = (vec)lo, b[i] = (vec)hi;
          }
          transpose(a), transpose(b);
          for (int64_t i = 0; i < w; i++) {
            store(reinterpret_cast<acc*>(dst + (c + i) * pairs + u), a[i]);
            if (c + w < columns) store(reinterpret_cast<acc*>(dst + (c + w + i) * pairs + u), b[i]);
          }
        }
    }
  }
  static bool huge(acc lse) {
    return lse != -kInfinity<acc> && (lse > acc(kTrusted) || lse < acc(-kTrusted));
  }

  // Return the block's part of d_sink = -sum of P delta, with the sink's weight P = exp(sink - m) /
  // 2^l. P = 1 in a row without visible keys, where delta is -d_lse. m is in natural units.
  double sink_gradient(int64_t n, acc sink, const acc* d_lse) const {
    double sum = 0;
    if (sink == -kInfinity<acc>) return sum;
    for (int64_t r = row0; r < row0 + n; r++) {
      if (it.live[r])
        sum -= __builtin_exp(double(sink) - double(it.m[r])) * __builtin_exp2(-double(it.l[r])) *
               double(it.delta[r]);
      else if (d_lse) sum += double(d_lse[(r - row0) * g.d_lse_s.l]);
    }
    return sum;
  }

  // Recompute row stats if lse is too large to hold the log of the sum: m = row maximum, l = log2
  // of the sum of exp(s - m).
  void split_lse(acc sink) const {
    constexpr int64_t panel = kPanel<T>;
    const QueryBlock<T> x = it.block(z, i);
    const Scores<T> scores(p, sequence);
    acc *m = it.m + row0, *l = it.l + row0;
    Arena& arena = local_arena;
    arena.reset(bytes(z));
    packed* Kt = arena.take<packed>(panel * z.du);
    acc *S = arena.take<acc>(kRows<T> * panel),
        *diagonals = arena.take<acc>(Scores<T>::diagonal_size(kRows<T>, panel));
    uint8_t *wanted = arena.take<uint8_t>(z.BQ), *live = arena.take<uint8_t>(panel);
    for (int64_t r = 0; r < x.rows; r++)
      if ((wanted[r] = huge(m[r]))) m[r] = sink, l[r] = sink != -kInfinity<acc>;
    const Range keys = sequence.keys();
    const int64_t kv_head = it.h / (p.Hq / p.Hkv);
    const elem* k = static_cast<const elem*>(p.k) + it.b * p.ks.b + kv_head * p.ks.h +
                    sequence.k_first * p.ks.l;
    for (int64_t j = keys.lo / panel * panel; j < keys.hi; j += panel) {
      const int64_t n = min(panel, keys.hi - j);
      const bool all = !mark_live_keys<T>(p, sequence, kv_head, j, n, live);
      pack_transposed<T>(k + j * p.ks.l, p.ks.l, n, p.D, Kt, all ? nullptr : live, panel, z.du);
      for (int64_t r = 0; r < x.rows; r += kRows<T>) {
        const int64_t rows = min<int64_t>(kRows<T>, x.rows - r);
        score_products<T>(rows, z.du, x.Q + r * z.du, Kt, S, panel);
        if (z.table) scores.diagonals(it.h, x.q0 + r, rows, j, n, diagonals);
        for (int64_t e = 0; e < rows; e++) {
          if (!wanted[r + e]) continue;
          acc* s = S + e * panel;
          const vec top = scores.row(
              it.h, x.q0 + r + e, j, n, x.seen[r + e],
              z.table ? Scores<T>::diagonal_of(diagonals, x.q0 + r + e, x.q0 + r, rows) : nullptr,
              s);
          const acc now = max(m[r + e], reduce(top, op_max));
          if (now == -kInfinity<acc>) continue;
          const auto exponential = [&](vec d) { return exp2v<5>(vec(d * acc(kLog2e))); };
          vec sum{};
          for (int64_t c = 0; c < n; c += T::width) sum = sum + exponential(load(s + c) - now);
          l[r + e] = l[r + e] * exponential(set1<vec>(m[r + e] - now))[0] + reduce(sum, op_add),
                m[r + e] = now;
        }
      }
    }
    for (int64_t r = 0; r < x.rows; r++)
      if (wanted[r]) l[r] = acc(__builtin_log2(double(l[r])));
  }

  const AttentionProblem& p;
  const AttentionGrads& g;
  const BackwardSizes& z;
  const Item<T>& it;
  const Sequence& sequence;
  int64_t i, row0, base;
};

}  // namespace bwd
}  // namespace PT_ISA
}  // namespace pt
