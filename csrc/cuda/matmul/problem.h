// SPDX-License-Identifier: Apache-2.0
// Products of matrices of 16-bit elements on sm_90a: the problem as plain data. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt::cuda {

// A matrix whose rows lie in memory: row r begins `stride` elements behind row r - 1, its columns are contiguous. Rows begin at multiples
// of 16 bytes. An operand with `transposed` is read with rows and columns exchanged.
struct Matrix {
  const void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
  bool transposed = false;

  int64_t height() const { return transposed ? columns : rows; }
  int64_t width() const { return transposed ? rows : columns; }
};

// Of a result: rows hold a multiple of eight columns in memory, and what is behind `columns` is written too.
struct MatrixOut {
  void* data = nullptr;  // null where not wanted
  int64_t stride = 0;
};

// A bias: `columns` contiguous numbers from a multiple of 16 bytes on, an even number of them in memory; or data null.
struct Bias {
  const void* data = nullptr;
  DType dtype = DType::f32;
};

constexpr int kRowsOfAPart = 64;  // of a result, that a line of partial sums of a bias's gradient covers

// (rows, columns) float32 sums of one or two products: a[0] b[0] (+ a[1] b[1]), whose result an epilogue makes. Or, gated, of two products
// side by side: a[0] b[0] and a[0] b[1].
struct Product {
  DType dtype;
  int64_t rows, columns;  // of one product
  Matrix a[2], b[2];      // data null where there is no second
  bool gated = false;

  bool two_loops() const { return !gated && a[1].data; }
};

// out = a b (+ a' b') + bias, rounded.
struct LinearProblem {
  Product product;
  Bias bias;
  MatrixOut out;
};

// out = a b (+ a' b'), or, with add, out += it: float32.
struct SumsProblem {
  Product product;
  MatrixOut out;
  bool add;
};

}  // namespace pt::cuda
