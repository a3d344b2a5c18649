// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy, forward. Reduce each tile of logits in cache to the maximum and the sum of
// exponentials of its rows, and merge these panel by panel in order. Only the targets' logits are
// stored, unless backward needs all of them.
#pragma once

#include <cmath>

#include "cpu/core/stream.h"
#include "cpu/core/tanh.h"
#include "cpu/cross_entropy/plan.h"

namespace pt {
namespace PT_ISA {

inline thread_local Arena entropy_arena;  // calling thread: running sums of the rows

template <class V>
INLINE V exp_of(V x) {
  return exp2v<5>(V(x * set1<V>(scalar_of<V>(kLog2e))));
}

// Return z of u, and its derivative by u if slope is not null.
template <class V>
INLINE V capped(V u, scalar_of<V> cap, V* slope = nullptr) {
  V t, d;
  tanh_and_slope(V(u * set1<V>(1 / cap)), &t, &d);
  if (slope) *slope = d;
  return t * set1<V>(cap);
}

// Reduce z of a tile to each row's maximum, sum of exponentials and sum; pick z of the target.
template <class T>
struct LogitEpilogue {
  using acc = typename T::acc;
  using vec = typename T::vec;
  const CrossEntropyProblem& p;
  const RowSums<T>& panels;  // rows of a panel at panel * rows
  int64_t first_row, rows, first_class;
  acc* picked;     // (rows,)
  acc* product;    // (rows, classes), or null
  bool streaming;  // product bypasses the caches: full aligned vectors

  // Stream the logits, which backward reads much later: a plain store first reads the line it
  // overwrites. 1024 x 8192: 2.4 ms of 24 with plain stores, 0.9 streamed (Zen 4).
  static bool streams(const acc* product, int64_t rows, int64_t classes) {
    return product && rows * classes * int64_t(sizeof(acc)) >= kStreamBytes &&
           classes % T::width == 0 && reinterpret_cast<uintptr_t>(product) % kVecBytes == 0;
  }
  size_t scratch_bytes() const { return 0; }
  void fetch(int64_t m0, int64_t count, int64_t n0, int64_t n) const {
    if (product && !streaming)
      fetch_rows(product + m0 * p.classes + first_class + n0, p.classes, count, n);
  }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t count, int64_t n0, int64_t n,
                  Arena&) const {
    const int64_t c0 = first_class + n0;
    if (n == kPanel<T> && p.label_smoothing == 0 && p.softcap == 0)
      summarize<true>(tiles[0], ld, m0, count, n0, std::integral_constant<int64_t, kPanel<T>>());
    else summarize<false>(tiles[0], ld, m0, count, n0, n);
    for (int64_t r = 0; r < count; r++) {
      const int64_t c = p.target[first_row + m0 + r] - c0;
      if (p.target[first_row + m0 + r] != p.ignore_index && c >= 0 && c < n)
        picked[m0 + r] = tiles[0][r * ld + c];
    }
    if (!panels.best) return;
    const int64_t at = n0 / kPanel<T> * panels_rows() + m0;
    for (int64_t r = 0; r < count; r++) {
      int64_t c = 0;
      while (c + 1 < n && tiles[0][r * ld + c] != panels.maximum[at + r]) c++;
      panels.best[at + r] = c0 + c;
    }
  }

 private:
  // Reduce the tile's rows into panels. PLAIN: a full panel without softcap and sums of logits.
  template <bool PLAIN, class Columns>
  INLINE void summarize(acc* tile, int64_t ld, int64_t m0, int64_t count, int64_t n0,
                        Columns n) const {
    constexpr int64_t vectors = kPanel<T> / T::width;
    const int64_t c0 = first_class + n0;
    const Bias<T> bias(p.bias, c0, n), weights(p.weights, c0, n);
    const vec lowest = set1<vec>(-kInfinity<acc>);
    const acc cap = acc(p.softcap);
    acc* at[3] = {panels.maximum, panels.sum, panels.logits};
    for (acc*& a : at) a += n0 / kPanel<T> * panels_rows() + m0;
    for (int64_t r0 = 0; r0 < count; r0 += T::width) {
      vec top[T::width], sum[T::width], plain[T::width];
      // Rows at or past count have an earlier tile's values and are not stored.
      for (int i = 0; i < T::width; i++) {
        acc* row = tile + (r0 + i) * ld;
        acc* kept = product && r0 + i < count ? product + (m0 + r0 + i) * p.classes + c0 : nullptr;
        top[i] = lowest, plain[i] = vec{};
        for (int64_t j = 0; j < vectors; j++) {
          const vec xw = load(row + j * T::width);
          vec z = xw + bias.at(j * T::width);
          if (kept && !streaming) VectorOf<T>::store(kept + j * T::width, n - j * T::width, xw);
          else if (kept && j * T::width < n) stream(kept + j * T::width, (vi32)xw);
          if constexpr (!PLAIN) {
            const mask in = mask_n<vec>(n - j * T::width);
            if (cap != 0) z = capped(z, cap);
            const vec weighted = p.weights ? vec(z * weights.at(j * T::width)) : z;
            plain[i] = plain[i] + select(in, weighted, vec{});
            z = select(in, z, lowest);
          }
          store(row + j * T::width, z);
          top[i] = vmax(top[i], z);
        }
      }
      const vec m = reduce_rows(top, op_max);
      // All -inf: exp(-inf - 0) = 0. NaN: the sum is NaN anyway.
      const vec base = m > lowest ? m : vec{};
      for (int i = 0; i < T::width; i++) {
        const acc* row = tile + (r0 + i) * ld;
        sum[i] = vec{};
        for (int64_t j = 0; j < vectors; j++)
          sum[i] = sum[i] + exp_of(vec(load(row + j * T::width) - set1<vec>(base[i])));
      }
      VectorOf<T>::store(at[0] + r0, count - r0, m);
      VectorOf<T>::store(at[1] + r0, count - r0, reduce_rows(sum, op_add));
      if constexpr (!PLAIN) VectorOf<T>::store(at[2] + r0, count - r0, reduce_rows(plain, op_add));
    }
  }
  int64_t panels_rows() const { return round_up(rows, T::width); }
};

// Merge the sums of `count` panels into the rows' sums, in order.
template <class T>
void merge(const RowSums<T>& panels, int64_t count, const RowSums<T>& rows, int threads) {
  using vec = typename T::vec;
  const vec lowest = set1<vec>(-kInfinity<typename T::acc>);
  for_each_task(ceil_div(rows.size, 16 * T::width), threads, [&](int64_t task) {
    for (int64_t r = task * 16 * T::width; r < min(rows.size, (task + 1) * 16 * T::width);
         r += T::width) {
      vec m = load(rows.maximum + r), s = load(rows.sum + r), z = load(rows.logits + r);
      for (int64_t panel = 0; panel < count; panel++) {
        const int64_t at = panel * rows.size + r;
        const vec other = load(panels.maximum + at), top = vmax(m, other),
                  base = top > lowest ? top : vec{};
        s = s * exp_of(vec(m - base)) + load(panels.sum + at) * exp_of(vec(other - base));
        z = z + load(panels.logits + at);
        m = top;
      }
      store(rows.maximum + r, m), store(rows.sum + r, s), store(rows.logits + r, z);
    }
  });
}

// Merge the first largest classes of `count` panels into the rows', in order, before merge().
template <class T>
void merge_best(const RowSums<T>& panels, int64_t count, const RowSums<T>& rows, int threads) {
  for_each_task(ceil_div(rows.size, 16 * T::width), threads, [&](int64_t task) {
    for (int64_t r = task * 16 * T::width; r < min(rows.size, (task + 1) * 16 * T::width); r++) {
      typename T::acc top = rows.maximum[r];
      for (int64_t at = r; at < count * rows.size; at += rows.size)
        if (panels.maximum[at] > top) top = panels.maximum[at], rows.best[r] = panels.best[at];
    }
  });
}

// Return the mean of the class weights, 1 without.
template <class T>
double mean_weight(const CrossEntropyProblem& p) {
  if (!p.weights) return 1;
  double sum = 0;
  for (int64_t c = 0; c < p.classes; c++) sum += static_cast<const typename T::acc*>(p.weights)[c];
  return sum / double(p.classes);
}

// Write the loss and the split lse of the rows [first, first + count).
template <class T>
void cross_entropy_chunk(const CrossEntropyProblem& p, const CrossEntropyForward& f, int64_t first,
                         int64_t count) {
  using acc = typename T::acc;
  const int64_t size = round_up(count, T::width), step = ForwardPlan<T>::kStep;
  entropy_arena.reset(ForwardPlan<T>::arena_bytes(count, f.correct));
  const RowSums<T> rows(size, f.correct, entropy_arena),
      panels(kBlockPanels * size, f.correct, entropy_arena);
  acc* picked = entropy_arena.take<acc>(size);
  acc* product = f.product ? static_cast<acc*>(f.product) + first * p.classes : nullptr;
  const bool streaming = LogitEpilogue<T>::streams(product, p.rows, p.classes);
  for (int64_t r = 0; r < size; r++) picked[r] = 0;

  for (int64_t c = 0; c < p.classes; c += step) {
    const int64_t n = min(step, p.classes - c);
    logits_product<T>(p, first, count, c, n)
        .run(LogitEpilogue<T>{p, panels, first, count, c, picked, product, streaming});
    if (f.correct) merge_best<T>(panels, ceil_div(n, kPanel<T>), rows, p.threads);
    merge<T>(panels, ceil_div(n, kPanel<T>), rows, p.threads);
  }

  const double smoothing = p.label_smoothing, mean = mean_weight<T>(p);
  acc *loss = static_cast<acc*>(f.loss) + first, *row_max = static_cast<acc*>(f.split_lse) + first,
      *log_sum = row_max + p.rows;
  for (int64_t r = 0; r < count; r++) {
    const double top = double(rows.maximum[r]), log = std::log(double(rows.sum[r]));
    row_max[r] = rows.maximum[r], log_sum[r] = acc(log);
    const int64_t target = p.target[first + r];
    const bool ignored = target == p.ignore_index;
    if (f.correct) static_cast<acc*>(f.correct)[first + r] = !ignored && rows.best[r] == target;
    const double w = p.weights && !ignored ? static_cast<const acc*>(p.weights)[target] : 1;
    double value = (1 - smoothing) * w * (log - (double(picked[r]) - top));
    if (smoothing > 0)
      value += smoothing * (mean * log - (double(rows.logits[r]) / double(p.classes) - mean * top));
    loss[r] = ignored ? acc(0) : acc(value);
  }
}

template <class T>
void cross_entropy_forward(const CrossEntropyProblem& p, const CrossEntropyForward& f) {
  const int64_t step = chunk_rows(p);
  for (int64_t first = 0; first < p.rows; first += step)
    cross_entropy_chunk<T>(p, f, first, min(step, p.rows - first));
}

}  // namespace PT_ISA
}  // namespace pt
