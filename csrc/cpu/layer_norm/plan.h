// SPDX-License-Identifier: Apache-2.0
// Layer norm: partition of the rows, and the scratch.
#pragma once

#include "cpu/core/column_dropout.h"
#include "cpu/core/pages.h"
#include "cpu/core/scratch.h"
#include "cpu/core/stream.h"
#include "cpu/layer_norm/problem.h"

namespace pt {
namespace PT_ISA {

// Stream results of a call from this size on. With 32 MB of L3, 16 MB take 0.6 of the time, 0.8
// with a following op that reads them; 8 MB take 1.16. Backward (Zen 5, kernel only): 0.91 of the
// time at 13 MB of dx, 0.83 at 33 MB, 0.66 with dresidual too.
constexpr int64_t kStreamedNorm = int64_t(12) << 20;

// Return the prefetch distance in rows by the bytes read per row: 16 KB, a third of L1, and at
// least two rows. A row of 1024 bf16 takes 70 ns, less than memory latency: forward took 1.23 times
// as long with two rows as with six. In float32 four are as good as three, and add_norm loses from
// three on.
constexpr int64_t rows_ahead(int64_t row_bytes) { return clamp<int64_t>(16384 / row_bytes, 2, 8); }

// X: traits of x. PARAMETERS: compute the gradients of weight or bias, two-stage sums over rows.
template <class X, bool PARAMETERS>
struct NormPlan {
  using acc = typename X::acc;
  int64_t rows, columns, padded;  // columns of a row; padded to full vectors
  int64_t per_block, blocks;
  Scratch scratch;

  explicit NormPlan(const NormProblem& p)
      : rows(p.outer * p.inner), columns(p.columns), padded(round_up(p.columns, X::width)) {
    // Rows per task: enough to be worth a task, few enough to occupy every thread. Results do not
    // depend on it.
    per_block = max<int64_t>(1, 16384 / p.columns), blocks = ceil_div(rows, per_block);
    // forward: two rows
    scratch.local = 2 * Arena::bytes_for<acc>(padded) + ColumnKeep::bytes(p.columns);
    if constexpr (PARAMETERS) {
      // About 32 rows per block, at most 256 blocks, and at most about 32 MB of partial sums. The
      // number of blocks depends only on the shape. Equal upstream gradients round the same way in
      // every row: chains of 44 gave dbias an error of 5.2 eps, above the bound of 4.
      blocks = clamp<int64_t>(ceil_div(rows, 32), 1,
                              clamp<int64_t>((int64_t(1) << 22) / p.columns, 8, 256));
      per_block = ceil_div(rows, blocks);
      scratch.shared = 2 * Arena::bytes_for<acc>(blocks * padded);
    }
  }

  // Return true if the results exceed the caches, are aligned for streaming, and their memory has
  // been touched before. Data may be null.
  template <class T, class U>
  bool streams(const RowsOut& one, const RowsOut& other) const {
    const auto bytes = [&](const RowsOut& t) {
      return t.data ? rows * columns * size_of(t.dtype) : 0;
    };
    return bytes(one) + bytes(other) >= kStreamedNorm &&
           (!one.data || streamable<T>(one, columns)) &&
           (!other.data || streamable<U>(other, columns)) && !untouched(one.data, bytes(one)) &&
           !untouched(other.data, bytes(other));
  }
};

}  // namespace PT_ISA
}  // namespace pt
