// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy, backward. Unless forward stored the logits, recompute them for one block of
// classes and one chunk of rows at a time. Each tile becomes dz in cache, and one pass multiplies
// the block of dz with the weights and with x.
#pragma once

#include "cpu/cross_entropy/fwd.h"

namespace pt {
namespace PT_ISA {

// Convert x weight^T of a tile to the gradient of the logits and store it in the block.
template <class T>
struct LogitGradient {
  using acc = typename T::acc;
  using vec = typename T::vec;
  const CrossEntropyProblem& p;
  const CrossEntropyBackward& f;
  int64_t first_row, first_class, columns;
  typename T::elem* dz;  // (rows of the chunk, columns)

  size_t scratch_bytes() const { return 0; }
  void fetch(int64_t m0, int64_t count, int64_t n0, int64_t n) const {
    fetch_rows(dz + m0 * columns + n0, columns, count, n);
  }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t count, int64_t n0, int64_t n,
                  Arena&) const {
    const int64_t c0 = first_class + n0;
    const Bias<T> bias(p.bias, c0, n);
    const acc even = acc(p.label_smoothing / double(p.classes)), rest = acc(1 - p.label_smoothing);
    for (int64_t r = 0; r < count; r++) {
      const int64_t at = first_row + m0 + r, c = p.target[at] - c0;
      acc* row = tiles[0] + r * ld;
      if (p.target[at] == p.ignore_index) {
        for (int64_t j = 0; j < n; j += T::width) store(row + j, vec{});
      } else if (f.p_factor || p.softcap != 0) {
        with_options(row, at, c0, n);
      } else {
        const acc* split_lse = static_cast<const acc*>(f.split_lse);
        const acc row_max = split_lse[at], log_sum = split_lse[p.rows + at],
                  g = static_cast<const acc*>(f.g)[at];
        for (int64_t j = 0; j < n; j += T::width) {
          const vec z = load(row + j) + bias.at(j);
          store(row + j,
                vec(exp_of(vec(z - set1<vec>(row_max) - set1<vec>(log_sum))) - set1<vec>(even)));
        }
        if (c >= 0 && c < n) row[c] -= rest;
        for (int64_t j = 0; j < n; j += T::width) store(row + j, vec(load(row + j) * set1<vec>(g)));
      }
      write_row<T>(dz + (m0 + r) * columns + n0, row, n);
    }
  }

 private:
  // Convert a row of n classes from c0 with softcap, class weights or z-loss.
  void with_options(acc* row, int64_t at, int64_t c0, int64_t n) const {
    const Bias<T> bias(p.bias, c0, n), weights(p.weights, c0, n);
    const acc* split_lse = static_cast<const acc*>(f.split_lse);
    const acc g = static_cast<const acc*>(f.g)[at], cap = acc(p.softcap);
    const vec row_max = set1<vec>(split_lse[at]), log_sum = set1<vec>(split_lse[p.rows + at]),
              p_factor = set1<vec>(f.p_factor ? static_cast<const acc*>(f.p_factor)[at] : g),
              even = set1<vec>(acc(g * p.label_smoothing / double(p.classes)));
    const int64_t target = p.target[at] - c0;
    acc of_target = 0;
    if (target >= 0 && target < n) {
      const acc w = p.weights ? static_cast<const acc*>(p.weights)[c0 + target] : acc(1);
      of_target = g * acc(1 - p.label_smoothing) * w;
      if (cap != 0) {
        const acc u =
            row[target] + (p.bias ? static_cast<const acc*>(p.bias)[c0 + target] : acc(0));
        vec slope;
        capped(set1<vec>(u), cap, &slope);
        of_target *= slope[0];
      }
    }
    for (int64_t j = 0; j < n; j += T::width) {
      vec z = load(row + j) + bias.at(j), slope = set1<vec>(acc(1));
      if (cap != 0) z = capped(z, cap, &slope);
      const vec q = p.weights ? vec(even * weights.at(j)) : even;
      store(row + j, vec((p_factor * exp_of(vec(z - row_max - log_sum)) - q) * slope));
    }
    if (target >= 0 && target < n) row[target] -= of_target;
  }
};

// Do the same with stored logits: pass their tiles, `rows` x `columns`, to the gemm's epilogue.
template <class T>
void logit_gradients(const LogitGradient<T>& epilogue, const typename T::acc* product, int64_t rows,
                     int64_t columns) {
  using acc = typename T::acc;
  const int64_t panels = ceil_div(columns, kPanel<T>), stride = epilogue.p.classes;
  for_each_task(panels * ceil_div(rows, kPart<T>), epilogue.p.threads, [&](int64_t task) {
    const FlushSubnormals flush;
    const int64_t m = task / panels * kPart<T>, n = task % panels * kPanel<T>;
    const int64_t count = min(kPart<T>, rows - m), width = min<int64_t>(kPanel<T>, columns - n);
    local_arena.reset(kept_tile_bytes<T>());
    acc* tile = local_arena.take<acc>(kPart<T> * kPanel<T>);
    for (int64_t r = 0; r < count; r++)
      for (int64_t j = 0; j < width; j += T::width)
        store(tile + r * kPanel<T> + j,
              VectorOf<T>::load(product + (m + r) * stride + n + j, width - j));
    epilogue(&tile, kPanel<T>, m, count, n, width, local_arena);
  });
}

// Add the gradients of rows [first, first + count): dx of these rows, dweight and dbias, as
// requested. dweight and dbias require all rows in one call.
template <class T>
void cross_entropy_gradients(const CrossEntropyProblem& p, const CrossEntropyBackward& f,
                             const uint8_t* live, int64_t first, int64_t count, bool want_dx,
                             bool want_rest) {
  using acc = typename T::acc;
  using elem = typename T::elem;
  const BackwardPlan<T> plan(p, count, want_dx, want_rest);
  const int64_t step = plan.step, block = plan.block, d = p.depth;
  entropy_arena.reset(plan.arena_bytes);
  elem* dz = entropy_arena.take<elem>(step * block);
  acc *column = entropy_arena.take<acc>(block), *columns = entropy_arena.take<acc>(block);
  acc *dx = nullptr, *dweight = nullptr;
  if (want_dx) {
    if constexpr (BackwardPlan<T>::kSumsInPlace) dx = elements<T>(f.dx) + first * d;
    else dx = entropy_arena.take<acc>(plan.dx_sums);
  }
  if (plan.dweight_sums) dweight = entropy_arena.take<acc>(plan.dweight_sums);

  for (int64_t c = 0; c < p.classes; c += block) {
    const int64_t n = min(block, p.classes - c);
    for (int64_t r = 0; r < count; r += step) {
      const int64_t rows = min(step, count - r), row = first + r;
      const LogitGradient<T> to_dz{p, f, row, c, n, dz};
      if (f.product) {
        logit_gradients<T>(to_dz, static_cast<const acc*>(f.product) + row * p.classes + c, rows,
                           n);
      } else {
        logits_product<T>(p, row, rows, c, n).run(to_dz);
      }
      if (want_dx) dx_product<T>(p, dz, rows, c, n).run(AddEpilogue<T>{dx + r * d, d, c == 0});
      if (want_rest && f.dweight) {
        Matmul<T, 1, false> product = dweight_product<T>(p, dz, live, row, rows, n);
        if (plan.one_chunk) product.run(StoreEpilogue<T>(elements<T>(f.dweight) + c * d, n, d));
        else product.run(AddEpilogue<T>{dweight, d, r == 0});
      }
      if (want_rest && f.dbias) {
        column_sums<T>(dz, rows, n, p.threads, column);
        for (int64_t j = 0; j < n; j++) columns[j] = r ? columns[j] + column[j] : column[j];
      }
    }
    if (want_rest && f.dweight && !plan.one_chunk)
      round_rows<T>(dweight, n, d, p.threads, elements<T>(f.dweight) + c * d);
    if (want_rest && f.dbias)
      for (int64_t j = 0; j < n; j++) static_cast<acc*>(f.dbias)[c + j] = columns[j];
  }
  if (!want_dx) return;
  elem* out = elements<T>(f.dx) + first * d;
  if constexpr (!BackwardPlan<T>::kSumsInPlace) round_rows<T>(dx, count, d, p.threads, out);
  for (int64_t r = 0; r < count; r++)  // 0 times an infinite weight is not 0
    if (!live[first + r])
      for (int64_t j = 0; j < d; j++) out[r * d + j] = elem{};
}

template <class T>
void cross_entropy_backward(const CrossEntropyProblem& p, const CrossEntropyBackward& f) {
  setup_arena.reset(Arena::bytes_for<uint8_t>(p.rows + 2 * T::pack));
  uint8_t* live = setup_arena.take<uint8_t>(p.rows);
  for (int64_t r = 0; r < p.rows; r++) live[r] = p.target[r] != p.ignore_index;
  const bool rest = f.dweight || f.dbias;
  const int64_t at_once = BackwardPlan<T>::rows_at_once(p);
  if (p.rows <= at_once || !f.dx)
    return cross_entropy_gradients<T>(p, f, live, 0, p.rows, f.dx, rest);
  for (int64_t first = 0; first < p.rows; first += at_once)
    cross_entropy_gradients<T>(p, f, live, first, min(at_once, p.rows - first), true, false);
  if (rest) cross_entropy_gradients<T>(p, f, live, 0, p.rows, false, true);
}

}  // namespace PT_ISA
}  // namespace pt
