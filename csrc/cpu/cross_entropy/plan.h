// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy: chunks of rows, blocks of classes, the products of one with the other, and the scratch that takes.
#pragma once

#include "cpu/core/column_sums.h"
#include "cpu/core/matmul_epilogues.h"
#include "cpu/cross_entropy/problem.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kBlockPanels = 32;                     // panels of classes between two merges of forward
constexpr int64_t kChunkElements = int64_t(1) << 19;     // of x that pass the classes together, about
constexpr int64_t kLeastChunk = 192, kMostChunk = 1024;  // rows of such a chunk
// Of a block of dz, and of the weights that belong to it, about. Threads wait for one another after each of a block's products: with half
// of this backward's products took 51 ms, not 46 (1024 x 512 x 8192 in bfloat16, two threads of a Zen 4).
constexpr int64_t kBlockBytes = int64_t(4) << 20;
constexpr int64_t kLeastBlock = 512;             // classes of a block of backward
constexpr int64_t kSumBytes = int64_t(8) << 20;  // of float sums of dx for 16-bit dtypes, kept at a time

// Rows that pass the classes together: enough to make packing the weights cheap, so few that what is kept for them is small.
INLINE int64_t chunk_rows(const CrossEntropyProblem& p) {
  return min(p.rows, clamp(kChunkElements / max<int64_t>(p.depth, 1) / 48 * 48, kLeastChunk, kMostChunk));
}

// x weight^T of rows [first, first + rows) and classes [c, c + n).
template <class T>
Matmul<T, 1, false> logits_product(const CrossEntropyProblem& p, int64_t first, int64_t rows, int64_t c, int64_t n) {
  const Product<T> logits[1] = {
      {rows_of<T>(elements<T>(p.x) + first * p.depth, p.depth, false), rows_of<T>(elements<T>(p.weight) + c * p.depth, p.depth, false)}};
  return {logits, rows, n, p.depth, p.threads};
}
// dz weight, and dz^T x without the rows that are not live; dz: rows of n classes.
template <class T>
Matmul<T, 1, false> dx_product(const CrossEntropyProblem& p, const typename T::elem* dz, int64_t rows, int64_t c, int64_t n) {
  const Product<T> by_class[1] = {{rows_of<T>(dz, n, false), rows_of<T>(elements<T>(p.weight) + c * p.depth, p.depth, true)}};
  return {by_class, rows, p.depth, n, p.threads};
}
template <class T>
Matmul<T, 1, false> dweight_product(const CrossEntropyProblem& p, const typename T::elem* dz, const uint8_t* live, int64_t first,
                                    int64_t rows, int64_t n) {
  const Product<T> by_row[1] = {{rows_of<T>(dz, n, true), {elements<T>(p.x) + first * p.depth, p.depth, true, live + first}}};
  return {by_row, n, p.depth, rows, p.threads};
}

// A tile of kept logits, as a product would hand it to the epilogue.
template <class T>
size_t kept_tile_bytes() {
  return Arena::bytes_for<typename T::acc>(kPart<T> * kPanel<T>);
}

// What the rows of a chunk know after some of the classes: arrays of `size` numbers, a multiple of the vector.
template <class T>
struct RowSums {
  using acc = typename T::acc;
  int64_t size;
  acc *maximum, *sum, *logits;  // of exp(z - maximum), of z; over classes, or per panel
  static size_t bytes(int64_t size) { return 3 * Arena::bytes_for<acc>(size); }
  RowSums(int64_t n, Arena& arena) : size(n), maximum(arena.take<acc>(n)), sum(arena.take<acc>(n)), logits(arena.take<acc>(n)) {}
};

template <class T>
struct ForwardPlan {
  static constexpr int64_t kStep = kBlockPanels * kPanel<T>;  // classes between two merges
  static size_t arena_bytes(int64_t rows) {
    const int64_t size = round_up(rows, T::width);
    return RowSums<T>::bytes(size) + RowSums<T>::bytes(kBlockPanels * size) + Arena::bytes_for<typename T::acc>(size);
  }
};

// Of `count` rows of backward that keep their sums of dx, if it is wanted, in acc; want_rest: dweight or dbias too.
template <class T>
struct BackwardPlan {
  using elem = typename T::elem;
  using acc = typename T::acc;
  static constexpr bool kSumsInPlace = std::is_same_v<elem, acc>;
  int64_t step, block;  // rows of a chunk; classes of a block. Few blocks: at the end of each product all threads wait for one another
  bool one_chunk;
  int64_t dx_sums, dweight_sums;  // numbers kept apart from the gradients
  size_t arena_bytes;

  BackwardPlan(const CrossEntropyProblem& p, int64_t count, bool want_dx, bool want_rest) : step(min(count, chunk_rows(p))) {
    const int64_t fit = kBlockBytes / (max(step, p.depth) * int64_t(sizeof(elem)));
    block = min(max(fit / kPanel<T> * kPanel<T>, kLeastBlock), round_up(p.classes, kPanel<T>));
    one_chunk = count <= step;
    dx_sums = want_dx && !kSumsInPlace ? count * p.depth : 0, dweight_sums = want_rest && !one_chunk ? block * p.depth : 0;
    arena_bytes = Arena::bytes_for<elem>(step * block) + 2 * Arena::bytes_for<acc>(block) + (dx_sums ? Arena::bytes_for<acc>(dx_sums) : 0) +
                  (dweight_sums ? Arena::bytes_for<acc>(dweight_sums) : 0);
  }
  // Rows whose sums of dx in float beside 16-bit ones are kept at a time: beyond, rows take one more product of logits.
  static int64_t rows_at_once(const CrossEntropyProblem& p) {
    return sizeof(elem) == 2 ? max(chunk_rows(p), kSumBytes / (p.depth * int64_t(sizeof(float)))) : p.rows;
  }
};

// What forward and backward take with all gradients, of the sizes alone. kept: backward reads the logits that forward left.
template <class T>
Scratch cross_entropy_scratch(const CrossEntropyProblem& p, bool kept) {
  using Backward = BackwardPlan<T>;
  const uint8_t live = 1;  // that rows are told apart changes a product's form
  Scratch s;
  const auto edges = [](int64_t all, int64_t step, const auto& f) { f(min(all, step)), f((all - 1) % step + 1); };
  const auto measure = [&](const auto& product) { s.include(product.scratch(StoreEpilogue<T>(nullptr, 0, 0))); };
  edges(p.rows, chunk_rows(p), [&](int64_t rows) {
    s.own = max(s.own, ForwardPlan<T>::arena_bytes(rows));
    edges(p.classes, ForwardPlan<T>::kStep, [&](int64_t n) { measure(logits_product<T>(p, 0, rows, 0, n)); });
  });
  s.setup = Arena::bytes_for<uint8_t>(p.rows + 2 * T::pack);
  // As cross_entropy_backward() calls cross_entropy_gradients(): the last rows of a split may take larger blocks of classes than the
  // others.
  const auto gradients = [&](int64_t count, bool want_dx, bool want_rest) {
    const Backward plan(p, count, want_dx, want_rest);
    s.own = max(s.own, plan.arena_bytes);
    edges(count, plan.step, [&](int64_t rows) {
      edges(p.classes, plan.block, [&](int64_t n) {
        if (kept) s.local = max(s.local, kept_tile_bytes<T>());
        else measure(logits_product<T>(p, 0, rows, 0, n));
        if (want_dx) measure(dx_product<T>(p, nullptr, rows, 0, n));
        if (want_rest) measure(dweight_product<T>(p, nullptr, &live, 0, rows, n)), s.include(ColumnSumsPlan<T>(rows, n).scratch);
      });
    });
  };
  const int64_t at_once = Backward::rows_at_once(p);
  const bool split = p.rows > at_once;
  edges(p.rows, at_once, [&](int64_t count) { gradients(count, true, !split); });
  if (split) gradients(p.rows, false, true);
  return s;
}

}  // namespace PT_ISA
}  // namespace pt
