// SPDX-License-Identifier: Apache-2.0
// Layer norm, RMS norm and residual + dropout + norm on the CPU: the problem as plain data. No
// torch header here or below.
#pragma once

#include <cstdint>

#include "common/strides.h"

namespace pt {

// acc is float, or double for f64 rows. A problem never mixes f64 with other dtypes.
struct NormProblem {
  int64_t outer, inner, columns;
  bool rms;
  double eps;
  const void* weight;       // (columns,) acc, or null: ones
  const void* bias;         // (columns,) acc, or null: zeros
  uint64_t seed;            // dropout of x
  int64_t row_start;        // first row in the dropout mask
  uint32_t drop_threshold;  // rint(65536 p); 0: no dropout, 65536: all dropped
  int threads;
};

// h = residual + dropout(x), rounded to residual_out's dtype; out = norm(h) in x's dtype.
struct NormForward {
  Rows x, residual;           // null residual: h = dropout(x)
  RowsOut out, residual_out;  // null residual_out: h = x, no residual, no dropout
  void *mean, *rstd;          // (outer * inner,) acc, or null; mean is null for RMS
};

// xhat = (h - mean) rstd, g = d_out weight
// dh = rstd (g - mean(g) - xhat mean(g xhat)) + d_residual_out, without mean(g) for RMS
// dresidual = dh, dx = dropout(dh)
// dweight = sum over the rows of d_out xhat, dbias = sum of d_out
struct NormBackward {
  Rows d_out, d_residual_out, h;  // null d_residual_out: zero; h: residual_out or x
  const void *mean, *rstd;
  RowsOut dx, dresidual;  // null data: not requested
  void *dweight, *dbias;  // (columns,) acc, or null
};

struct NormKernels {
  void (*forward)(const NormProblem&, const NormForward&);
  void (*backward)(const NormProblem&, const NormBackward&);
  // Scratch of both directions with all gradients, from the sizes only.
  int64_t (*scratch_bytes)(const NormProblem&, DType x);
};

}  // namespace pt
