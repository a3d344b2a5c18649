// SPDX-License-Identifier: Apache-2.0
// Feed-forward, forward: two gemms, with bias, activation, gate and dropout on each tile in cache.
#pragma once

#include "cpu/core/column_dropout.h"
#include "cpu/core/few_rows_along_k.h"
#include "cpu/core/matmul_epilogues.h"
#include "cpu/feed_forward/activations.h"
#include "cpu/feed_forward/problem.h"

namespace pt {
namespace PT_ISA {

inline thread_local Arena hidden_arena;  // calling thread: hidden rows between the two gemms

// Dropout of a tile's rows.
template <class T>
class TileDropout {
 public:
  static size_t bytes() { return ColumnKeep::bytes(kPanel<T>); }
  TileDropout(const FeedForwardProblem& p, int64_t n0, Arena& arena)
      : active_(p.drop_threshold > 0), scale_(typename T::acc(keep_scale(p.drop_threshold))),
        keep_(p.seed, p.drop_threshold, kTagFeedForward, p.column_start + n0, kPanel<T>, arena),
        row_start_(p.row_start) {}
  INLINE void apply(int64_t row, typename T::acc* values, int64_t n) {
    using vec = typename T::vec;
    if (!active_) return;
    keep_.row(uint64_t(row + row_start_));
    update_row<T>(values, n, [&](int64_t j, vec v) {
      return select(keep_.at(j), V(v * set1<vec>(scale_)), vec{});
    });
  }

 private:
  using V = typename T::vec;
  bool active_;
  typename T::acc scale_;
  ColumnKeep keep_;
  int64_t row_start_;
};

// Store pre (and gate) of a tile if requested, then hidden.
template <class T, bool GATED>
struct HiddenEpilogue {
  using acc = typename T::acc;
  using vec = typename T::vec;
  const FeedForwardProblem& p;
  const FeedForwardForward& f;
  typename T::elem* h;  // rows of hidden from first_row
  int64_t first_row;

  size_t scratch_bytes() const { return TileDropout<T>::bytes(); }
  void fetch(int64_t m0, int64_t rows, int64_t n0, int64_t n) const {
    const int64_t at = (first_row + m0) * p.hidden + n0;
    if (f.y) fetch_rows(h + m0 * p.hidden + n0, p.hidden, rows, n);
    for (void* kept : {f.pre, f.gate})
      if (kept) fetch_rows(elements<T>(kept) + at, p.hidden, rows, n);
  }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t rows, int64_t n0, int64_t n,
                  Arena& arena) const {
    TileDropout<T> dropout(p, n0, arena);
    const Bias<T> b1(p.b1, n0, n), bg(p.gate_bias, n0, n);
    with_activation<T>(p.activation, [&](auto act) {
      for (int64_t r = 0; r < rows; r++) {
        const int64_t row = first_row + m0 + r, at = row * p.hidden + n0;
        acc *pre = tiles[0] + r * ld, *gate = GATED ? tiles[GATED] + r * ld : nullptr;
        for (int64_t j = 0; j < n; j += T::width) {
          const vec v = load(pre + j) + b1.at(j);
          if (f.pre) T::store(elements<T>(f.pre) + at + j, n - j, v);
          if constexpr (GATED) {
            const vec g = load(gate + j) + bg.at(j);
            if (f.gate) T::store(elements<T>(f.gate) + at + j, n - j, g);
            store(pre + j, vec(act(g).value * v));
          } else {
            store(pre + j, act(v).value);
          }
        }
        if (!f.y) continue;
        dropout.apply(row, pre, n);
        write_row<T>(h + (m0 + r) * p.hidden + n0, pre, n);
      }
    });
  }
};

// Forward stores about 32 MB of hidden at a time, with enough rows to make packing the weights
// cheap: with 1,536 rows, packing was 5 % of the time in float32.
constexpr int64_t kHiddenBytes = int64_t(32) << 20, kLeastHiddenRows = 2048;
template <class T>
int64_t hidden_rows(const FeedForwardProblem& p) {
  return min(p.rows,
             max(kLeastHiddenRows, kHiddenBytes / (p.hidden * int64_t(sizeof(typename T::elem)))));
}

// Visit the gemms of rows [first, first + rows), each with its epilogue: visit(gemm, epilogue) runs
// or measures it. h: hidden of these rows.
template <class T, class Visit>
void forward_products(const FeedForwardProblem& p, const FeedForwardForward& f, typename T::elem* h,
                      int64_t first, int64_t rows, const Visit& visit) {
  const auto x = rows_of<T>(elements<T>(p.x) + first * p.in, p.in, false);
  const Product<T> up{x, rows_of<T>(p.w1, p.in, false)};
  if (p.gate_weight) {
    const Product<T> both[2] = {up, {x, rows_of<T>(p.gate_weight, p.in, false)}};
    visit_product<T, 2>(both, rows, p.hidden, p.in, p.threads,
                        HiddenEpilogue<T, true>{p, f, h, first}, visit);
  } else {
    const Product<T> one[1] = {up};
    visit_product<T, 1>(one, rows, p.hidden, p.in, p.threads,
                        HiddenEpilogue<T, false>{p, f, h, first}, visit);
  }
  if (!f.y) return;
  const Product<T> down[1] = {{rows_of<T>(h, p.hidden, false), rows_of<T>(p.w2, p.hidden, false)}};
  const StoreEpilogue<T> store(elements<T>(f.y) + first * p.out, rows, p.out, p.b2);
  visit_product<T, 1>(down, rows, p.out, p.hidden, p.threads, store, visit);
}

// Linear: the last gemm alone, on x.
template <class T>
Product<T> linear_product(const FeedForwardProblem& p, const LinearWeight& weight) {
  Operand<T> w = rows_of<T>(p.w2, weight.along_k ? p.out : p.hidden, weight.along_k);
  w.panels = static_cast<const typename T::packed*>(weight.panels);
  return {rows_of<T>(p.x, p.hidden, false), w};
}
template <class T>
void linear_forward(const FeedForwardProblem& p, const LinearWeight& weight, void* y) {
  const Product<T> one[1] = {linear_product<T>(p, weight)};
  const StoreEpilogue<T> store(elements<T>(y), p.rows, p.out, p.b2);
  if (FewRowsAlongK<T>::pays(one[0], p.rows))
    FewRowsAlongK<T>(one[0], p.rows, p.out, p.hidden, p.threads).run(store);
  else visit_product<T, 1>(one, p.rows, p.out, p.hidden, p.threads, store, RunProduct());
}
template <class T>
void linear_pack(const FeedForwardProblem& p, const LinearWeight& weight, void* panels) {
  Matmul<T, 1, false>::pack_panels(linear_product<T>(p, weight).b, p.out, p.hidden, p.threads,
                                   static_cast<typename T::packed*>(panels));
}
template <class T>
int64_t linear_panels_bytes(const FeedForwardProblem& p) {
  return Matmul<T, 1, false>::panels_size(p.out, p.hidden) * int64_t(sizeof(typename T::packed));
}

template <class T>
void feed_forward_forward(const FeedForwardProblem& p, const FeedForwardForward& f) {
  using elem = typename T::elem;
  const int64_t step = hidden_rows<T>(p);
  elem* h = nullptr;
  if (f.y) {
    hidden_arena.reset(Arena::bytes_for<elem>(step * p.hidden));
    h = hidden_arena.take<elem>(step * p.hidden);
  }
  for (int64_t first = 0; first < p.rows; first += step)
    forward_products<T>(p, f, h, first, min(step, p.rows - first), RunProduct());
}

}  // namespace PT_ISA
}  // namespace pt
