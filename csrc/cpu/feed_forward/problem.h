// SPDX-License-Identifier: Apache-2.0
// The feed-forward network on the CPU: the problem as plain data. No torch header here or below.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"

namespace pt {

// All matrices are row-major and contiguous, of dtype. Vectors and sums are acc: float, or double
// for f64.
struct FeedForwardProblem {
  DType dtype;
  int64_t rows, in, hidden, out;
  const void* x;                 // (rows, in)
  const void *w1, *gate_weight;  // (hidden, in); null gate_weight: not gated
  const void* w2;                // (out, hidden)
  const void *b1, *gate_bias;    // (hidden,), or null
  const void* b2;                // (out,), or null
  Activation activation;
  uint64_t seed;                    // dropout of hidden
  int64_t row_start, column_start;  // first row and column in the dropout mask
  uint32_t drop_threshold;          // rint(65536 p)
  int threads;
};

// pre = x w1^T + b1, gate = x gate_weight^T + gate_bias
// h = dropout(act(pre)), or gated dropout(act(gate) pre); y = h w2^T + b2
struct FeedForwardForward {
  void *pre, *gate;  // (rows, hidden), or null
  void* y;           // (rows, out); null: only pre and gate
};

struct FeedForwardBackward {
  const void* dy;                       // (rows, out)
  const void *pre, *gate;               // (rows, hidden), as stored by forward
  void *h, *dpre, *dgate;               // (rows, hidden); dpre, dgate may alias pre, gate
  void *dx, *dw1, *dgate_weight, *dw2;  // of dtype, or null
  void *db1, *dgate_bias, *db2;         // acc, or null
};

// Linear: y = x w2^T + b2.
struct LinearWeight {
  bool along_k;        // w2 is (hidden, out) in memory
  const void* panels;  // w2 as linear_pack wrote it, or null
};
struct LinearBackward {
  const void* dy;  // (rows, out)
  void *dx, *dw2;  // of dtype, dw2 in the layout of w2, or null
  void* db2;       // acc, or null
};

struct FeedForwardKernels {
  void (*forward)(const FeedForwardProblem&, const FeedForwardForward&);
  void (*backward)(const FeedForwardProblem&, const FeedForwardBackward&);
  // The last gemm alone, of (rows, hidden) x.
  void (*linear)(const FeedForwardProblem&, const LinearWeight&, void* y);
  void (*linear_backward)(const FeedForwardProblem&, const LinearWeight&, const LinearBackward&);
  // Write the panels of w2 for linear, panels_bytes() of them.
  void (*linear_pack)(const FeedForwardProblem&, const LinearWeight&, void* panels);
  int64_t (*linear_panels_bytes)(const FeedForwardProblem&);
  // Scratch of both directions with all gradients, from the sizes only.
  int64_t (*scratch_bytes)(const FeedForwardProblem&);
};

}  // namespace pt
