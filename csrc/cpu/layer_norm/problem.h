// SPDX-License-Identifier: Apache-2.0
// Layer norm, RMS norm and residual + dropout + norm on the CPU: the problem as plain data. No torch header here or below.
#pragma once

#include <cstdint>

#include "common/strides.h"

namespace pt {

// "acc" is float, for f64 rows double. f64 and other dtypes never meet in one problem.
struct NormProblem {
  int64_t outer, inner, columns;
  bool rms;
  double eps;
  const void* weight;       // (columns,) acc, or null: ones
  const void* bias;         // (columns,) acc, or null: zeros
  uint64_t seed;            // dropout of x
  int64_t row_start;        // of dropout's mask, whose rows count from there
  uint32_t drop_threshold;  // rint(65536 p); 0 = no dropout, 65536 = everything dropped
  int threads;
};

// h = residual + dropout(x), rounded to residual_out's dtype; out = norm(h) in x's dtype.
struct NormForward {
  Rows x, residual;           // residual.data null: h = dropout(x)
  RowsOut out, residual_out;  // residual_out.data null: h = x, neither residual nor dropout
  void *mean, *rstd;          // (outer * inner,) acc; null where not wanted, mean for RMS too
};

// With xhat = (h - mean) rstd and g = d_out weight:
//   dh = rstd (g - mean(g) - xhat mean(g xhat)) + d_residual_out, without mean(g) for RMS; dresidual = dh, dx = dropout(dh);
//   dweight = sum over the rows of d_out xhat, dbias = sum of d_out.
struct NormBackward {
  Rows d_out, d_residual_out, h;  // d_residual_out.data null = zero; h = residual_out, or x in a plain norm
  const void *mean, *rstd;
  RowsOut dx, dresidual;  // data null where not wanted
  void *dweight, *dbias;  // (columns,) acc; null where not wanted
};

struct NormKernels {
  void (*forward)(const NormProblem&, const NormForward&);
  void (*backward)(const NormProblem&, const NormBackward&);
  int64_t (*scratch_bytes)(const NormProblem&, DType x);  // of both, with all gradients; of the sizes alone
};

}  // namespace pt
