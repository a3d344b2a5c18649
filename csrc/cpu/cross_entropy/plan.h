// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy: chunks of rows, blocks of classes, their gemms, and the scratch.
#pragma once

#include "cpu/core/column_sums.h"
#include "cpu/core/matmul_epilogues.h"
#include "cpu/cross_entropy/problem.h"

namespace pt {
namespace PT_ISA {

// Panels of classes between two merges of forward.
constexpr int64_t kBlockPanels = 32;
constexpr int64_t kChunkElements = int64_t(1) << 19;     // elements of x per chunk, about
constexpr int64_t kLeastChunk = 192, kMostChunk = 1024;  // rows per chunk
// Bytes of a block of dz, and of its weights, about. All threads wait at the end of each gemm of a
// block: with half the size, backward's gemms took 51 ms instead of 46 (1024 x 512 x 8192 in
// bfloat16, two threads of a Zen 4).
constexpr int64_t kBlockBytes = int64_t(4) << 20;
constexpr int64_t kLeastBlock = 512;             // classes per block of backward
constexpr int64_t kSumBytes = int64_t(8) << 20;  // float sums of dx for 16-bit dtypes at a time

// Return the rows per chunk: enough to make packing the weights cheap, with little stored per
// chunk.
INLINE int64_t chunk_rows(const CrossEntropyProblem& p) {
  return min(p.rows,
             clamp(kChunkElements / max<int64_t>(p.depth, 1) / 48 * 48, kLeastChunk, kMostChunk));
}

// Return the gemm x weight^T of rows [first, first + rows) and classes [c, c + n).
template <class T>
Matmul<T, 1, false> logits_product(const CrossEntropyProblem& p, int64_t first, int64_t rows,
                                   int64_t c, int64_t n) {
  const Product<T> logits[1] = {{rows_of<T>(elements<T>(p.x) + first * p.depth, p.depth, false),
                                 rows_of<T>(elements<T>(p.weight) + c * p.depth, p.depth, false)}};
  return {logits, rows, n, p.depth, p.threads};
}
// Return the gemms dz weight, and dz^T x over live rows. dz: rows of n classes.
template <class T>
Matmul<T, 1, false> dx_product(const CrossEntropyProblem& p, const typename T::elem* dz,
                               int64_t rows, int64_t c, int64_t n) {
  const Product<T> by_class[1] = {
      {rows_of<T>(dz, n, false), rows_of<T>(elements<T>(p.weight) + c * p.depth, p.depth, true)}};
  return {by_class, rows, p.depth, n, p.threads};
}
template <class T>
Matmul<T, 1, false> dweight_product(const CrossEntropyProblem& p, const typename T::elem* dz,
                                    const uint8_t* live, int64_t first, int64_t rows, int64_t n) {
  const Product<T> by_row[1] = {
      {rows_of<T>(dz, n, true), {elements<T>(p.x) + first * p.depth, p.depth, true, live + first}}};
  return {by_row, n, p.depth, rows, p.threads};
}

// One tile of stored logits, in the layout of a gemm's tile.
template <class T>
size_t kept_tile_bytes() {
  return Arena::bytes_for<typename T::acc>(kPart<T> * kPanel<T>);
}

// Running sums of a chunk's rows: arrays of `size` numbers, a multiple of the vector width.
template <class T>
struct RowSums {
  using acc = typename T::acc;
  int64_t size;
  acc *maximum, *sum, *logits;  // sums of exp(z - maximum) and of w z; total or per panel
  int64_t* best;                // first class with the maximum, or null
  static size_t bytes(int64_t size, bool with_best) {
    return 3 * Arena::bytes_for<acc>(size) + (with_best ? Arena::bytes_for<int64_t>(size) : 0);
  }
  RowSums(int64_t n, bool with_best, Arena& arena)
      : size(n), maximum(arena.take<acc>(n)), sum(arena.take<acc>(n)), logits(arena.take<acc>(n)),
        best(with_best ? arena.take<int64_t>(n) : nullptr) {
    for (int64_t i = 0; i < n; i++) maximum[i] = -kInfinity<acc>, sum[i] = 0, logits[i] = 0;
    for (int64_t i = 0; best && i < n; i++) best[i] = 0;
  }
};

template <class T>
struct ForwardPlan {
  static constexpr int64_t kStep = kBlockPanels * kPanel<T>;  // classes between two merges
  static size_t arena_bytes(int64_t rows, bool correct) {
    const int64_t size = round_up(rows, T::width);
    return RowSums<T>::bytes(size, correct) + RowSums<T>::bytes(kBlockPanels * size, correct) +
           Arena::bytes_for<typename T::acc>(size);
  }
};

// Backward of `count` rows, with sums of dx in acc if requested. want_rest: dweight or dbias too.
template <class T>
struct BackwardPlan {
  using elem = typename T::elem;
  using acc = typename T::acc;
  static constexpr bool kSumsInPlace = std::is_same_v<elem, acc>;
  // Rows of a chunk; classes of a block. Few blocks, because all threads wait at the end of each
  // gemm.
  int64_t step, block;
  bool one_chunk;
  int64_t dx_sums, dweight_sums;  // numbers stored apart from the gradients
  size_t arena_bytes;

  BackwardPlan(const CrossEntropyProblem& p, int64_t count, bool want_dx, bool want_rest)
      : step(min(count, chunk_rows(p))) {
    const int64_t fit = kBlockBytes / (max(step, p.depth) * int64_t(sizeof(elem)));
    block = min(max(fit / kPanel<T> * kPanel<T>, kLeastBlock), round_up(p.classes, kPanel<T>));
    one_chunk = count <= step;
    dx_sums = want_dx && !kSumsInPlace ? count * p.depth : 0,
    dweight_sums = want_rest && !one_chunk ? block * p.depth : 0;
    arena_bytes = Arena::bytes_for<elem>(step * block) + 2 * Arena::bytes_for<acc>(block) +
                  (dx_sums ? Arena::bytes_for<acc>(dx_sums) : 0) +
                  (dweight_sums ? Arena::bytes_for<acc>(dweight_sums) : 0);
  }
  // Return the rows with float sums of dx beside 16-bit gradients at a time. A second group of rows
  // costs another gemm of logits.
  static int64_t rows_at_once(const CrossEntropyProblem& p) {
    return sizeof(elem) == 2 ? max(chunk_rows(p), kSumBytes / (p.depth * int64_t(sizeof(float))))
                             : p.rows;
  }
};

// Return the scratch of forward and backward with all gradients, from the sizes only. kept:
// backward reads forward's stored logits. correct: forward compares argmax and target.
template <class T>
Scratch cross_entropy_scratch(const CrossEntropyProblem& p, bool kept, bool correct) {
  using Backward = BackwardPlan<T>;
  const uint8_t live = 1;  // masked rows change the form of a gemm
  Scratch s;
  const auto edges = [](int64_t all, int64_t step, const auto& f) {
    f(min(all, step)), f((all - 1) % step + 1);
  };
  const auto measure = [&](const auto& product) {
    s.include(product.scratch(StoreEpilogue<T>(nullptr, 0, 0)));
  };
  edges(p.rows, chunk_rows(p), [&](int64_t rows) {
    s.own = max(s.own, ForwardPlan<T>::arena_bytes(rows, correct));
    edges(p.classes, ForwardPlan<T>::kStep,
          [&](int64_t n) { measure(logits_product<T>(p, 0, rows, 0, n)); });
  });
  s.setup = Arena::bytes_for<uint8_t>(p.rows + 2 * T::pack);
  // Mirror the calls in cross_entropy_backward(): the last rows of a split may use larger blocks of
  // classes.
  const auto gradients = [&](int64_t count, bool want_dx, bool want_rest) {
    const Backward plan(p, count, want_dx, want_rest);
    s.own = max(s.own, plan.arena_bytes);
    edges(count, plan.step, [&](int64_t rows) {
      edges(p.classes, plan.block, [&](int64_t n) {
        if (kept) s.local = max(s.local, kept_tile_bytes<T>());
        else measure(logits_product<T>(p, 0, rows, 0, n));
        if (want_dx) measure(dx_product<T>(p, nullptr, rows, 0, n));
        if (want_rest)
          measure(dweight_product<T>(p, nullptr, &live, 0, rows, n)),
              s.include(ColumnSumsPlan<T>(rows, n).scratch);
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
