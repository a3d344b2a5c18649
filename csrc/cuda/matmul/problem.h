// SPDX-License-Identifier: Apache-2.0
// Problem of a gemm of 16-bit elements on sm_90a, as plain data without torch and CUDA headers.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt::cuda {

// A matrix in memory: row r starts `stride` elements after row r - 1, at a multiple of 16 bytes;
// columns are contiguous. The kernels read an operand with `transposed` with rows and columns
// exchanged.
struct Matrix {
  const void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
  bool transposed = false;

  int64_t height() const { return transposed ? columns : rows; }
  int64_t width() const { return transposed ? rows : columns; }
};

// A result. Its rows have a multiple of eight columns in memory; the padding is written too.
struct MatrixOut {
  void* data = nullptr;  // null: not stored
  int64_t stride = 0;
};

// A bias: `columns` contiguous values from a multiple of 16 bytes on, padded to an even number;
// data may be null.
struct Bias {
  const void* data = nullptr;
  DType dtype = DType::f32;
};

constexpr int kRowsOfAPart = 64;  // rows per line of partial bias gradients

// (rows, columns) float32 sums of one or two products, a[0] b[0] (+ a[1] b[1]), that an epilogue
// turns into results. Gated: two products side by side, a[0] b[0] and a[0] b[1].
struct Product {
  DType dtype;
  int64_t rows, columns;  // of one product
  Matrix a[2], b[2];      // data null: no second product
  bool gated = false;

  bool two_loops() const { return !gated && a[1].data; }
};

// out = a b (+ a' b') + bias, rounded.
struct LinearProblem {
  Product product;
  Bias bias;
  MatrixOut out;
};

// out = a b (+ a' b'), or out += the same with `add`: float32.
struct SumsProblem {
  Product product;
  MatrixOut out;
  bool add;
};

}  // namespace pt::cuda
