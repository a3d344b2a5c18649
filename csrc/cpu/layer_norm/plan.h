// SPDX-License-Identifier: Apache-2.0
// Layer norm: how rows are shared out, and the scratch that takes.
#pragma once

#include "cpu/core/column_dropout.h"
#include "cpu/core/pages.h"
#include "cpu/core/scratch.h"
#include "cpu/core/stream.h"
#include "cpu/layer_norm/problem.h"

namespace pt {
namespace PT_ISA {

// Results of a call from this size on are stored past the caches. With 32 MB of L3 that takes 0.6 of the time at 16 MB, 0.8 with an op that
// reads them behind it, and 1.16 at 8 MB. Backward (Zen 5, the kernel alone): 0.91 of the time at 13 MB of dx, 0.83 at 33 MB, 0.66 with
// dresidual beside it.
constexpr int64_t kStreamedNorm = int64_t(12) << 20;

// How many rows ahead memory is asked for, by what is read of one: 16 KB, a third of the first cache, but two rows at least. A row of 1024
// bf16 takes 70 ns, less than an answer from memory: two ahead, forward took 1.23 of the time of six. In float32 four are as good as three,
// and add_norm loses from three on.
constexpr int64_t rows_ahead(int64_t row_bytes) { return clamp<int64_t>(16384 / row_bytes, 2, 8); }

// X: traits of x. PARAMETERS: the gradients of weight or bias are wanted, sums over rows in two stages: blocks of rows, then the blocks.
template <class X, bool PARAMETERS>
struct NormPlan {
  using acc = typename X::acc;
  int64_t rows, columns, padded;  // all; columns of one, and rounded up to whole vectors
  int64_t per_block, blocks;
  Scratch scratch;

  explicit NormPlan(const NormProblem& p) : rows(p.outer * p.inner), columns(p.columns), padded(round_up(p.columns, X::width)) {
    // Rows of one task: enough to be worth one, few enough to keep every thread busy. Results do not depend on it.
    per_block = max<int64_t>(1, 16384 / p.columns), blocks = ceil_div(rows, per_block);
    scratch.local = 2 * Arena::bytes_for<acc>(padded) + ColumnKeep::bytes(p.columns);  // forward: two rows
    if constexpr (PARAMETERS) {
      // About 32 rows a block, at most 256 blocks, and partial sums of at most about 32 MB. The number depends on the shape alone. Equal
      // upstream gradients round the same way in every row: 44 in turn left dbias 5.2 of the 4 eps that it may be off.
      blocks = clamp<int64_t>(ceil_div(rows, 32), 1, clamp<int64_t>((int64_t(1) << 22) / p.columns, 8, 256));
      per_block = ceil_div(rows, blocks);
      scratch.shared = 2 * Arena::bytes_for<acc>(blocks * padded);
    }
  }

  // Whether what is written is more than the next op would find in the caches, lies so that it can be streamed, and has been written to
  // before. Data may be null.
  template <class T, class U>
  bool streams(const RowsOut& one, const RowsOut& other) const {
    const auto bytes = [&](const RowsOut& t) { return t.data ? rows * columns * size_of(t.dtype) : 0; };
    return bytes(one) + bytes(other) >= kStreamedNorm && (!one.data || streamable<T>(one, columns)) &&
           (!other.data || streamable<U>(other, columns)) && !untouched(one.data, bytes(one)) && !untouched(other.data, bytes(other));
  }
};

}  // namespace PT_ISA
}  // namespace pt
