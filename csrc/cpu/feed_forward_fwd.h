// Feed-forward, forward: two matrix products; bias, activation, gate and dropout happen on each tile while it is in cache.
#pragma once

#include "activations.h"
#include "column_dropout.h"
#include "feed_forward.h"
#include "matmul.h"

namespace pt {
namespace PT_ISA {

template <class T>
INLINE const typename T::elem* elements(const void* p) {
  return static_cast<const typename T::elem*>(p);
}
template <class T>
INLINE typename T::elem* elements(void* p) {
  return static_cast<typename T::elem*>(p);
}

// Row-major matrix as an operand.
template <class T>
INLINE Operand<T> rows_of(const void* p, int64_t columns, bool along_k) {
  return {elements<T>(p), columns, along_k};
}

// row[0, n) = f(j, row[j ...]); rows of a tile are padded to whole vectors.
template <class T, class F>
INLINE void update_row(typename T::acc* row, int64_t n, const F& f) {
  for (int64_t j = 0; j < n; j += T::width) store(row + j, f(j, load(row + j)));
}
template <class T>
INLINE void add_bias(typename T::acc* row, const typename T::acc* bias, int64_t n) {
  using Bias = std::conditional_t<std::is_same_v<typename T::acc, double>, Double, Float<float>>;
  if (bias) update_row<T>(row, n, [&](int64_t j, typename T::vec v) { return v + Bias::load(bias + j, n - j); });
}
template <class T>
INLINE void write_row(typename T::elem* out, const typename T::acc* row, int64_t n) {
  for (int64_t j = 0; j < n; j += T::width) T::store(out + j, n - j, load(row + j));
}

// Dropout of a tile's rows.
template <class T>
class TileDropout {
 public:
  static size_t bytes() { return ColumnKeep::bytes(kPanel<T>); }
  TileDropout(const FeedForwardProblem& p, int64_t n0, Arena& arena)
      : active_(p.drop_threshold > 0),
        scale_(typename T::acc(keep_scale(p.drop_threshold))),
        keep_(p.seed, p.drop_threshold, kTagFeedForward, n0, kPanel<T>, arena) {}
  INLINE void apply(int64_t row, typename T::acc* values, int64_t n) {
    using vec = typename T::vec;
    if (!active_) return;
    keep_.row(uint64_t(row));
    update_row<T>(values, n, [&](int64_t j, vec v) { return select(keep_.at(j), V(v * set1<vec>(scale_)), vec{}); });
  }

 private:
  using V = typename T::vec;
  bool active_;
  typename T::acc scale_;
  ColumnKeep keep_;
};

// pre (and gate) of a tile, stored where wanted; then hidden.
template <class T, bool GATED>
struct HiddenEpilogue {
  using acc = typename T::acc;
  using vec = typename T::vec;
  const FeedForwardProblem& p;
  const FeedForwardForward& f;
  int64_t first_row;  // of h, among all rows

  size_t scratch_bytes() const { return TileDropout<T>::bytes(); }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t rows, int64_t n0, int64_t n, bool, Arena& arena) const {
    TileDropout<T> dropout(p, n0, arena);
    const auto *b1 = static_cast<const acc*>(p.b1), *bg = static_cast<const acc*>(p.gate_bias);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t row = first_row + m0 + r, at = row * p.hidden + n0;
      acc *pre = tiles[0] + r * ld, *gate = GATED ? tiles[GATED] + r * ld : nullptr;
      add_bias<T>(pre, b1 ? b1 + n0 : nullptr, n);
      if (f.pre) write_row<T>(elements<T>(f.pre) + at, pre, n);
      if constexpr (GATED) {
        add_bias<T>(gate, bg ? bg + n0 : nullptr, n);
        if (f.gate) write_row<T>(elements<T>(f.gate) + at, gate, n);
      }
      if (!f.h) continue;
      with_activation(p.activation, [&](auto act) {
        update_row<T>(pre, n, [&](int64_t j, vec v) { return GATED ? vec(act(load(gate + j)).value * v) : act(v).value; });
      });
      dropout.apply(row, pre, n);
      write_row<T>(elements<T>(f.h) + (m0 + r) * p.hidden + n0, pre, n);
    }
  }
};

// A finished tile, plus a bias, to a matrix.
template <class T>
struct StoreEpilogue {
  using acc = typename T::acc;
  typename T::elem* out;
  int64_t columns;
  const acc* bias;

  size_t scratch_bytes() const { return 0; }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t rows, int64_t n0, int64_t n, bool, Arena&) const {
    for (int64_t r = 0; r < rows; r++) {
      add_bias<T>(tiles[0] + r * ld, bias ? bias + n0 : nullptr, n);
      write_row<T>(out + (m0 + r) * columns + n0, tiles[0] + r * ld, n);
    }
  }
};

template <class T>
void feed_forward_forward(const FeedForwardProblem& p, const FeedForwardForward& f) {
  for (int64_t first = 0; first < p.rows; first += f.h_rows) {
    const int64_t rows = least(f.h_rows, p.rows - first);
    const auto x = rows_of<T>(elements<T>(p.x) + first * p.in, p.in, false);
    const Product<T> up{x, rows_of<T>(p.w1, p.in, false)};
    if (p.gate_weight) {
      const Product<T> both[2] = {up, {x, rows_of<T>(p.gate_weight, p.in, false)}};
      Matmul<T, 2, false>(both, rows, p.hidden, p.in, p.threads).run(HiddenEpilogue<T, true>{p, f, first});
    } else {
      const Product<T> one[1] = {up};
      Matmul<T, 1, false>(one, rows, p.hidden, p.in, p.threads).run(HiddenEpilogue<T, false>{p, f, first});
    }
    if (!f.h) continue;
    const Product<T> down[1] = {{rows_of<T>(f.h, p.hidden, false), rows_of<T>(p.w2, p.hidden, false)}};
    Matmul<T, 1, false>(down, rows, p.out, p.hidden, p.threads)
        .run(StoreEpilogue<T>{elements<T>(f.y) + first * p.out, p.out, static_cast<const typename T::acc*>(p.b2)});
  }
}

}  // namespace PT_ISA
}  // namespace pt
