// SPDX-License-Identifier: Apache-2.0
// Problem of layer norm, RMS norm and residual + dropout + norm on a GPU, as plain data without
// torch and CUDA headers.
#pragma once

#include <cstdint>

#include "common/strides.h"

namespace pt::cuda {

using pt::Rows;
using pt::RowsOut;

// (columns,) contiguous values; data may be null.
struct Columns {
  const void* data = nullptr;
  DType dtype = DType::f32;
};

struct LayerNormProblem {
  int64_t rows, inner;  // row r is (r / inner, r % inner) of the grid
  int columns;
  // aligned: every row, weight and bias start at multiples of 16 bytes; columns % 8 == 0
  bool rms, aligned;
  int lanes;                // lanes per row in the Lanes kernel
  Columns weight;           // data null: ones
  const uint64_t* seed;     // of dropout
  int64_t row_start;        // offset of the mask's rows
  uint32_t drop_threshold;  // rint(65536 p); 0: no dropout, 65536: drops everything
};

// h = residual + dropout(x), rounded to residual_out's dtype; out = norm(h) in x's dtype.
struct LayerNormForward {
  LayerNormProblem p;
  float eps;
  Columns bias;               // data null: zeros
  Rows x, residual;           // residual.data null: h = dropout(x)
  RowsOut out, residual_out;  // residual_out.data null: h = x, neither residual nor dropout
  float *mean, *rstd;         // (rows,); mean null for RMS
};

// With xhat = (h - mean) rstd and g = d_out weight:
//   dh = rstd (g - mean(g) - xhat mean(g xhat)) + d_residual_out, without mean(g) for RMS
//   dresidual = dh, dx = dropout(dh)
//   dweight = sum over the rows of d_out xhat, dbias = sum of d_out
struct LayerNormBackward {
  LayerNormProblem p;
  // d_residual_out.data null: zero; h = residual_out, or x in a plain norm
  Rows d_out, d_residual_out, h;
  const float *mean, *rstd;
  RowsOut dx, dresidual;  // data null: not computed
  // (blocks, columns): each block's sum over its rows; may be null
  float *dweight_partials, *dbias_partials;
};

// The second stage: dweight[c] = sum over the blocks, in order, of dweight_partials[:, c]; dbias
// likewise.
struct LayerNormReduce {
  const float* partials[2];
  void* sums[2];  // may be null
  DType dtype[2];
  int blocks, columns;
};

}  // namespace pt::cuda
