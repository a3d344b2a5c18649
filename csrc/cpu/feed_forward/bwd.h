// SPDX-License-Identifier: Apache-2.0
// Feed-forward, backward. Each tile of dh = dy w2 becomes the gradients of pre and gate, and the
// hidden values, which forward does not store. The remaining gemms use these.
#pragma once

#include "cpu/core/column_sums.h"
#include "cpu/feed_forward/fwd.h"

namespace pt {
namespace PT_ISA {

// Convert dh of a tile to h, dpre and dgate. dpre and dgate may alias pre and gate.
template <class T, bool GATED>
struct HiddenGradient {
  using acc = typename T::acc;
  using vec = typename T::vec;
  const FeedForwardProblem& p;
  const FeedForwardBackward& f;
  // h, dpre and dgate leave the caches before the gemms that read them.
  const bool streaming;

  HiddenGradient(const FeedForwardProblem& problem, const FeedForwardBackward& backward)
      : p(problem), f(backward),
        streaming(streamed(f.h) && streamed(f.dpre) && (!GATED || streamed(f.dgate))) {}
  size_t scratch_bytes() const {
    return TileDropout<T>::bytes() + 2 * Arena::bytes_for<acc>(kPanel<T>);
  }
  void fetch(int64_t m0, int64_t rows, int64_t n0, int64_t n) const {
    const int64_t at = m0 * p.hidden + n0;
    for (const void* read : {f.pre, f.gate})
      if (read) fetch_rows(elements<T>(read) + at, p.hidden, rows, n);
    if (streaming) return;
    for (const void* written : {f.h, f.dpre, f.dgate})
      if (written && written != f.pre && written != f.gate)
        fetch_rows(elements<T>(written) + at, p.hidden, rows, n);
  }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t rows, int64_t n0, int64_t n,
                  Arena& arena) const {
    TileDropout<T> dropout(p, n0, arena);
    acc *h = arena.take<acc>(kPanel<T>), *second = arena.take<acc>(kPanel<T>);
    with_activation<T>(p.activation, [&](auto act) {
      for (int64_t r = 0; r < rows; r++) {
        const int64_t row = m0 + r, at = row * p.hidden + n0;
        acc* dh = tiles[0] + r * ld;
        dropout.apply(row, dh, n);
        for (int64_t j = 0; j < n; j += T::width) {
          const vec pre = T::load(elements<T>(f.pre) + at + j, n - j), d = load(dh + j);
          if constexpr (GATED) {
            const auto g = act(T::load(elements<T>(f.gate) + at + j, n - j));
            store(h + j, vec(g.value * pre)), store(dh + j, vec(d * g.value)),
                store(second + j, vec(d * pre * g.slope));
          } else {
            const auto a = act(pre);
            store(h + j, a.value), store(dh + j, vec(d * a.slope));
          }
        }
        dropout.apply(row, h, n);
        write_row<T>(elements<T>(f.h) + at, h, n, streaming);
        write_row<T>(elements<T>(f.dpre) + at, dh, n, streaming);
        if constexpr (GATED) write_row<T>(elements<T>(f.dgate) + at, second, n, streaming);
      }
    });
  }

 private:
  bool streamed(const void* to) const { return streams<T>(to, p.rows, p.hidden); }
};

// out (m, n) = a^T b for contiguous matrices a (rows, m) and b (rows, n).
template <class T, class Visit>
void transposed_product(const void* a, int64_t m, const void* b, int64_t n,
                        const FeedForwardProblem& p, void* out, const Visit& visit) {
  if (!out) return;
  const Product<T> product[1] = {{rows_of<T>(a, m, true), rows_of<T>(b, n, true)}};
  visit(Matmul<T, 1, false>(product, m, n, p.rows, p.threads),
        StoreEpilogue<T>(elements<T>(out), m, n));
}

// Visit the gemms in order, each with its epilogue: visit(gemm, epilogue) runs or measures it.
template <class T, class Visit>
void backward_products(const FeedForwardProblem& p, const FeedForwardBackward& f,
                       const Visit& visit) {
  const Product<T> dh[1] = {{rows_of<T>(f.dy, p.out, false), rows_of<T>(p.w2, p.hidden, true)}};
  const Matmul<T, 1, false> hidden(dh, p.rows, p.hidden, p.out, p.threads);
  if (p.gate_weight) visit(hidden, HiddenGradient<T, true>(p, f));
  else visit(hidden, HiddenGradient<T, false>(p, f));

  if (f.dx) {
    const StoreEpilogue<T> to_dx(elements<T>(f.dx), p.rows, p.in);
    const Product<T> by_pre{rows_of<T>(f.dpre, p.hidden, false), rows_of<T>(p.w1, p.in, true)};
    if (p.gate_weight) {
      const Product<T> both[2] = {
          by_pre, {rows_of<T>(f.dgate, p.hidden, false), rows_of<T>(p.gate_weight, p.in, true)}};
      visit(Matmul<T, 2, true>(both, p.rows, p.in, p.hidden, p.threads), to_dx);
    } else {
      const Product<T> one[1] = {by_pre};
      visit(Matmul<T, 1, true>(one, p.rows, p.in, p.hidden, p.threads), to_dx);
    }
  }
  transposed_product<T>(f.dy, p.out, f.h, p.hidden, p, f.dw2, visit);
  transposed_product<T>(f.dpre, p.hidden, p.x, p.in, p, f.dw1, visit);
  transposed_product<T>(f.dgate, p.hidden, p.x, p.in, p, f.dgate_weight, visit);
}

template <class T>
void feed_forward_backward(const FeedForwardProblem& p, const FeedForwardBackward& f) {
  using acc = typename T::acc;
  backward_products<T>(p, f, RunProduct());
  if (f.db2) column_sums<T>(elements<T>(f.dy), p.rows, p.out, p.threads, static_cast<acc*>(f.db2));
  if (f.db1)
    column_sums<T>(elements<T>(f.dpre), p.rows, p.hidden, p.threads, static_cast<acc*>(f.db1));
  if (f.dgate_bias)
    column_sums<T>(elements<T>(f.dgate), p.rows, p.hidden, p.threads,
                   static_cast<acc*>(f.dgate_bias));
}

// Linear, backward: dx = dy w2, dw2 = dy^T x or its transpose, db2.
template <class T>
void linear_backward(const FeedForwardProblem& p, const LinearWeight& weight,
                     const LinearBackward& f) {
  if (f.dx) {
    const Product<T> one[1] = {
        {rows_of<T>(f.dy, p.out, false),
         rows_of<T>(p.w2, weight.along_k ? p.out : p.hidden, !weight.along_k)}};
    Matmul<T, 1, false>(one, p.rows, p.hidden, p.out, p.threads)
        .run(StoreEpilogue<T>(elements<T>(f.dx), p.rows, p.hidden));
  }
  if (weight.along_k) transposed_product<T>(p.x, p.hidden, f.dy, p.out, p, f.dw2, RunProduct());
  else transposed_product<T>(f.dy, p.out, p.x, p.hidden, p, f.dw2, RunProduct());
  if (f.db2)
    column_sums<T>(elements<T>(f.dy), p.rows, p.out, p.threads,
                   static_cast<typename T::acc*>(f.db2));
}

// Return the scratch of both directions from the sizes only. The pointers of p and f only mark the
// requested results.
template <class T>
Scratch feed_forward_scratch(const FeedForwardProblem& p, const FeedForwardForward& f,
                             const FeedForwardBackward& g) {
  Scratch s;
  const int64_t step = hidden_rows<T>(p);
  s.own = Arena::bytes_for<typename T::elem>(step * p.hidden);
  for (int64_t rows : {step, (p.rows - 1) % step + 1})
    forward_products<T>(p, f, nullptr, 0, rows, MeasureProduct{s});
  backward_products<T>(p, g, MeasureProduct{s});
  for (int64_t columns : {p.out, p.hidden}) s.include(ColumnSumsPlan<T>(p.rows, columns).scratch);
  return s;
}

}  // namespace PT_ISA
}  // namespace pt
