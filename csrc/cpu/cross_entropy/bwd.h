// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy, backward. The logits are computed again unless forward kept them, a block of classes times a chunk of rows at a
// time; a tile of them turns into dz in cache, and the block of dz is multiplied with the weights and with x at once.
#pragma once

#include "cpu/core/column_sums.h"
#include "cpu/cross_entropy/fwd.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kBlockBytes = int64_t(4) << 20;  // of a block of dz and of the weights that belong to it, in acc, about
constexpr int64_t kLeastBlock = 512;               // classes of a block
constexpr int64_t kSumBytes = int64_t(8) << 20;    // of float sums of dx for 16-bit dtypes, kept at a time

// Classes of a block. Few blocks: at the end of each of its products all threads wait for one another.
template <class T>
int64_t block_classes(const CrossEntropyProblem& p, int64_t rows) {
  const int64_t fit = kBlockBytes / (max(rows, p.depth) * int64_t(sizeof(typename T::acc)));
  return min(max(fit / kPanel<T> * kPanel<T>, kLeastBlock), round_up(p.classes, kPanel<T>));
}

// z of a tile -> dz, stored in the block.
template <class T>
struct LogitGradient {
  using acc = typename T::acc;
  using vec = typename T::vec;
  const CrossEntropyProblem& p;
  const CrossEntropyBackward& f;
  int64_t first_row, first_class, columns;
  typename T::elem* dz;  // (rows of the chunk, columns)

  size_t scratch_bytes() const { return 0; }
  void fetch(int64_t m0, int64_t count, int64_t n0, int64_t n) const { fetch_rows(dz + m0 * columns + n0, columns, count, n); }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t count, int64_t n0, int64_t n, Arena&) const {
    const int64_t c0 = first_class + n0;
    const Bias<T> bias(p.bias, c0, n);
    const acc even = acc(p.label_smoothing / double(p.classes)), rest = acc(1 - p.label_smoothing);
    for (int64_t r = 0; r < count; r++) {
      const int64_t at = first_row + m0 + r, c = p.target[at] - c0;
      acc* row = tiles[0] + r * ld;
      if (p.target[at] == p.ignore_index) {
        for (int64_t j = 0; j < n; j += T::width) store(row + j, vec{});
      } else {
        const acc lse = static_cast<const acc*>(f.lse)[at], g = static_cast<const acc*>(f.upstream)[at];
        for (int64_t j = 0; j < n; j += T::width) {
          const vec z = load(row + j) + bias.at(j);
          store(row + j, vec(exp_of(vec(z - set1<vec>(lse))) - set1<vec>(even)));
        }
        if (c >= 0 && c < n) row[c] -= rest;
        for (int64_t j = 0; j < n; j += T::width) store(row + j, vec(load(row + j) * set1<vec>(g)));
      }
      write_row<T>(dz + (m0 + r) * columns + n0, row, n);
    }
  }
};

// The same from what forward kept: tiles of it, `rows` x `columns`, to the epilogue that a product would hand them to.
template <class T>
void logit_gradients(const LogitGradient<T>& epilogue, const typename T::acc* product, int64_t rows, int64_t columns) {
  using acc = typename T::acc;
  const int64_t panels = ceil_div(columns, kPanel<T>), stride = epilogue.p.classes;
  for_each_task(panels * ceil_div(rows, kPart), epilogue.p.threads, [&](int64_t task) {
    const FlushSubnormals flush;
    const int64_t m = task / panels * kPart, n = task % panels * kPanel<T>;
    const int64_t count = min(kPart, rows - m), width = min<int64_t>(kPanel<T>, columns - n);
    local_arena.reset(Arena::bytes_for<acc>(kPart * kPanel<T>));
    acc* tile = local_arena.take<acc>(kPart * kPanel<T>);
    for (int64_t r = 0; r < count; r++)
      for (int64_t j = 0; j < width; j += T::width)
        store(tile + r * kPanel<T> + j, VectorOf<T>::load(product + (m + r) * stride + n + j, width - j));
    epilogue(&tile, kPanel<T>, m, count, n, width, local_arena);
  });
}

// What the rows [first, first + count) add to: dx of theirs, if wanted, and dweight and dbias, if wanted, which they must be all of.
template <class T>
void cross_entropy_gradients(const CrossEntropyProblem& p, const CrossEntropyBackward& f, const uint8_t* live, int64_t first, int64_t count,
                             bool want_dx, bool want_rest) {
  using acc = typename T::acc;
  using elem = typename T::elem;
  constexpr bool sums_in_place = std::is_same_v<elem, acc>;
  const int64_t step = min(count, chunk_rows(p)), d = p.depth;
  const int64_t block = block_classes<T>(p, step);
  const bool one_chunk = count <= step;
  size_t bytes = Arena::bytes_for<elem>(step * block) + 2 * Arena::bytes_for<acc>(block);
  if (want_dx && !sums_in_place) bytes += Arena::bytes_for<acc>(count * d);
  if (want_rest && !one_chunk) bytes += Arena::bytes_for<acc>(block * d);
  entropy_arena.reset(bytes);
  elem* dz = entropy_arena.take<elem>(step * block);
  acc *column = entropy_arena.take<acc>(block), *columns = entropy_arena.take<acc>(block);
  acc *dx = nullptr, *dweight = nullptr;
  if (want_dx) {
    if constexpr (sums_in_place) dx = elements<T>(f.dx) + first * d;
    else dx = entropy_arena.take<acc>(count * d);
  }
  if (want_rest && !one_chunk) dweight = entropy_arena.take<acc>(block * d);

  for (int64_t c = 0; c < p.classes; c += block) {
    const int64_t n = min(block, p.classes - c);
    const elem* weight = elements<T>(p.weight) + c * d;
    for (int64_t r = 0; r < count; r += step) {
      const int64_t rows = min(step, count - r), row = first + r;
      const elem* x = elements<T>(p.x) + row * d;
      const LogitGradient<T> to_dz{p, f, row, c, n, dz};
      if (f.product) {
        logit_gradients<T>(to_dz, static_cast<const acc*>(f.product) + row * p.classes + c, rows, n);
      } else {
        const Product<T> logits[1] = {{rows_of<T>(x, d, false), rows_of<T>(weight, d, false)}};
        Matmul<T, 1, false>(logits, rows, n, d, p.threads).run(to_dz);
      }
      if (want_dx) {
        const Product<T> by_class[1] = {{rows_of<T>(dz, n, false), rows_of<T>(weight, d, true)}};
        Matmul<T, 1, false>(by_class, rows, d, n, p.threads).run(AddEpilogue<T>{dx + r * d, d, c == 0});
      }
      if (want_rest && f.dweight) {
        const Product<T> by_row[1] = {{rows_of<T>(dz, n, true), {x, d, true, live + row}}};
        Matmul<T, 1, false> product(by_row, n, d, rows, p.threads);
        if (one_chunk) product.run(StoreEpilogue<T>(elements<T>(f.dweight) + c * d, n, d));
        else product.run(AddEpilogue<T>{dweight, d, r == 0});
      }
      if (want_rest && f.dbias) {
        column_sums<T>(dz, rows, n, p.threads, column);
        for (int64_t j = 0; j < n; j++) columns[j] = r ? columns[j] + column[j] : column[j];
      }
    }
    if (want_rest && f.dweight && !one_chunk) round_rows<T>(dweight, n, d, p.threads, elements<T>(f.dweight) + c * d);
    if (want_rest && f.dbias)
      for (int64_t j = 0; j < n; j++) static_cast<acc*>(f.dbias)[c + j] = columns[j];
  }
  if (!want_dx) return;
  elem* out = elements<T>(f.dx) + first * d;
  if constexpr (!sums_in_place) round_rows<T>(dx, count, d, p.threads, out);
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
  // Sums of dx in float beside 16-bit ones are bounded: rows beyond take one more product of logits.
  const int64_t at_once = sizeof(typename T::elem) == 2 ? max(chunk_rows(p), kSumBytes / (p.depth * int64_t(sizeof(float)))) : p.rows;
  if (p.rows <= at_once || !f.dx) return cross_entropy_gradients<T>(p, f, live, 0, p.rows, f.dx, rest);
  for (int64_t first = 0; first < p.rows; first += at_once)
    cross_entropy_gradients<T>(p, f, live, first, min(at_once, p.rows - first), true, false);
  if (rest) cross_entropy_gradients<T>(p, f, live, 0, p.rows, false, true);
}

}  // namespace PT_ISA
}  // namespace pt
