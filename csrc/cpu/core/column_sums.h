// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a matrix in three stages with a fixed order: runs of rows, blocks of runs,
// all blocks.
#pragma once

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace pt {
namespace PT_ISA {

// out[j] = sum over blocks of part[block * stride + j], in order, for columns [first, last).
template <class A>
void add_blocks(const A* part, int64_t blocks, int64_t stride, int64_t first, int64_t last,
                A* out) {
  for (int64_t j = first; j < last; j++) out[j] = part[j];
  for (int64_t b = 1; b < blocks; b++)
    for (int64_t j = first; j < last; j++) out[j] += part[b * stride + j];
}

// Partition of a matrix: row blocks, whose number depends only on the shape, and column strips.
template <class T>
struct ColumnSumsPlan {
  static constexpr int64_t kColumns = 32 * T::width;
  int64_t blocks, per_block, strips, padded;
  Scratch scratch;
  ColumnSumsPlan(int64_t rows, int64_t columns)
      : blocks(clamp<int64_t>(ceil_div(rows, 64), 1, 64)), per_block(ceil_div(rows, blocks)),
        strips(ceil_div(columns, kColumns)), padded(strips * kColumns) {
    scratch.shared = Arena::bytes_for<typename T::acc>(blocks * padded);
  }
};

// out[j] = sum of column j of a contiguous (rows, columns) matrix.
template <class T>
void column_sums(const typename T::elem* x, int64_t rows, int64_t columns, int threads,
                 typename T::acc* out) {
  using acc = typename T::acc;
  const ColumnSumsPlan<T> plan(rows, columns);
  constexpr int64_t kColumns = ColumnSumsPlan<T>::kColumns;
  // rows per partial sum: equal terms then round the same way each time
  constexpr int64_t kRun = 8;
  const int64_t blocks = plan.blocks, strips = plan.strips, padded = plan.padded;
  shared_arena.reset(plan.scratch.shared);
  acc* part = shared_arena.take<acc>(blocks * padded);
  for_each_task(blocks * strips, threads, [&](int64_t task) {
    const int64_t block = task / strips, c = task % strips * kColumns,
                  n = min(kColumns, columns - c);
    acc* sum = part + block * padded + c;
    for (int64_t j = 0; j < kColumns; j++) sum[j] = 0;
    const int64_t end = min(rows, (block + 1) * plan.per_block);
    for (int64_t i = block * plan.per_block; i < end; i += kRun)
      for (int64_t j = 0; j < n; j += T::width) {
        typename T::vec run = T::load(x + i * columns + c + j, n - j);
        for (int64_t k = i + 1; k < min(end, i + kRun); k++)
          run = run + T::load(x + k * columns + c + j, n - j);
        store(sum + j, load(sum + j) + run);
      }
  });
  add_blocks(part, blocks, padded, 0, columns, out);
}

}  // namespace PT_ISA
}  // namespace pt
