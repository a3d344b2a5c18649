// SPDX-License-Identifier: Apache-2.0
// Shared parts of row-major gemms: operands, biases, and epilogues that store or add a finished
// tile.
#pragma once

#include "cpu/core/matmul.h"
#include "cpu/core/stream.h"

namespace pt {
namespace PT_ISA {

template <class T>
INLINE const typename T::elem* elements(const void* p) {
  return static_cast<const typename T::elem*>(p);
}
template <class T>
INLINE typename T::elem* elements(void* p) {
  return static_cast<typename T::elem*>(p);
}

// Return a row-major matrix as an operand.
template <class T>
INLINE Operand<T> rows_of(const void* p, int64_t columns, bool along_k) {
  return {elements<T>(p), columns, along_k};
}

// row[0, n) = f(j, row[j ...]). Rows of a tile are padded to full vectors.
template <class T, class F>
INLINE void update_row(typename T::acc* row, int64_t n, const F& f) {
  for (int64_t j = 0; j < n; j += T::width) store(row + j, f(j, load(row + j)));
}

// Traits of rows of acc.
template <class T>
using VectorOf = std::conditional_t<std::is_same_v<typename T::acc, double>, Double, Float<float>>;

// Columns [n0, n0 + n) of a bias, or zeros without one.
template <class T>
class Bias {
 public:
  Bias(const void* bias, int64_t n0, int64_t n) {
    const auto* from = static_cast<const typename T::acc*>(bias) + (bias ? n0 : 0);
    for (int64_t j = 0; j < kPanel<T>; j += T::width)
      v_[j / T::width] = bias ? VectorOf<T>::load(from + j, n - j) : typename T::vec{};
  }
  INLINE typename T::vec at(int64_t j) const { return v_[j / T::width]; }

 private:
  typename T::vec v_[kPanel<T> / T::width];
};

// Return true if tiles of a contiguous (rows, columns) matrix bypass the caches: the matrix is
// large and its rows are aligned.
template <class T>
INLINE bool streams(const void* out, int64_t rows, int64_t columns) {
  const int64_t row = columns * int64_t(sizeof(typename T::elem));
  return rows * row >= kStreamBytes && row % kVecBytes == 0 &&
         reinterpret_cast<intptr_t>(out) % kVecBytes == 0;
}

// Store a finished tile, plus a bias, to a matrix.
template <class T>
class StoreEpilogue {
  using acc = typename T::acc;
  using elem = typename T::elem;

 public:
  StoreEpilogue(elem* out, int64_t rows, int64_t columns, const void* bias = nullptr)
      : out_(out), columns_(columns), bias_(bias), streaming_(streams<T>(out, rows, columns)) {}
  size_t scratch_bytes() const { return 0; }
  void fetch(int64_t m0, int64_t rows, int64_t n0, int64_t n) const {
    if (!streaming_) fetch_rows(out_ + m0 * columns_ + n0, columns_, rows, n);
  }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t rows, int64_t n0, int64_t n,
                  Arena&) const {
    const Bias<T> b(bias_, n0, n);
    for (int64_t r = 0; r < rows; r++) {
      acc* row = tiles[0] + r * ld;
      if (bias_) update_row<T>(row, n, [&](int64_t j, typename T::vec v) { return v + b.at(j); });
      write_row<T>(out_ + (m0 + r) * columns_ + n0, row, n, streaming_);
    }
  }

 private:
  elem* out_;
  int64_t columns_;
  const void* bias_;
  bool streaming_;
};

// Store or add a finished tile to sums in acc.
template <class T>
struct AddEpilogue {
  using acc = typename T::acc;
  using Vector = VectorOf<T>;
  acc* sums;  // (rows, columns)
  int64_t columns;
  bool first;

  size_t scratch_bytes() const { return 0; }
  void fetch(int64_t m0, int64_t rows, int64_t n0, int64_t n) const {
    fetch_rows(sums + m0 * columns + n0, columns, rows, n);
  }
  void operator()(acc* const* tiles, int64_t ld, int64_t m0, int64_t rows, int64_t n0, int64_t n,
                  Arena&) const {
    for (int64_t r = 0; r < rows; r++) {
      const acc* tile = tiles[0] + r * ld;
      acc* sum = sums + (m0 + r) * columns + n0;
      for (int64_t j = 0; j < n; j += T::width)
        Vector::store(sum + j, n - j,
                      first ? load(tile + j) : load(tile + j) + Vector::load(sum + j, n - j));
    }
  }
};

// Round sums of a contiguous (rows, columns) matrix to elem.
template <class T>
void round_rows(const typename T::acc* sums, int64_t rows, int64_t columns, int threads,
                typename T::elem* out) {
  for_each_task(rows, threads, [&](int64_t r) {
    for (int64_t j = 0; j < columns; j += T::width)
      T::store(out + r * columns + j, columns - j,
               VectorOf<T>::load(sums + r * columns + j, columns - j));
  });
}

// Run a gemm that another function set up.
struct RunProduct {
  template <class Matmul, class Epilogue>
  void operator()(Matmul product, const Epilogue& epilogue) const {
    product.run(epilogue);
  }
};
struct MeasureProduct {
  Scratch& sum;
  template <class Matmul, class Epilogue>
  void operator()(const Matmul& product, const Epilogue& epilogue) const {
    sum.include(product.scratch(epilogue));
  }
};

}  // namespace PT_ISA
}  // namespace pt
