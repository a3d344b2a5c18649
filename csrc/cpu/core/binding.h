// SPDX-License-Identifier: Apache-2.0
// Checks of shape, layout and storage for the CPU's torch bindings. Stable ABI only.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <memory>
#include <vector>

#include "common/binding.h"
#include "cpu/core/isa.h"
#include "cpu/core/pages.h"
#include "cpu/core/parallel.h"

namespace pt {
namespace binding {

// Copies of tensors whose values become addresses. A binding checks the copy and kernels read it,
// because another thread may change the tensor after the check.
class IndexCopies {
 public:
  template <class T>
  const T* copy(const void* data, int64_t n) {
    copies_.push_back(std::make_unique<std::byte[]>(n * sizeof(T)));
    if (n) std::memcpy(copies_.back().get(), data, n * sizeof(T));
    return reinterpret_cast<const T*>(copies_.back().get());
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

// Check the tensors of one call. `like` has the dtype that the call's matrices must have.
class Binding {
 public:
  Binding(const char* op, const Tensor& like) : op_(op), dtype_(like.scalar_type()) {}

  // Return a contiguous (rows, columns) matrix of the op's dtype, or null.
  void* matrix(const MaybeTensor& t, const char* name, int64_t rows, int64_t columns) const {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == rows && t->size(1) == columns &&
                        t->is_contiguous() && t->scalar_type() == dtype_,
                    op_, ": ", name, " must be a contiguous (", rows, ", ", columns,
                    ") matrix of the dtype of x");
    return write_address(op_, *t, name);
  }
  // Return a (rows, columns) matrix whose transpose is contiguous.
  void* transposed(const Tensor& t, const char* name, int64_t rows, int64_t columns) const {
    STD_TORCH_CHECK(t.size(0) == rows && t.size(1) == columns && t.stride(0) == 1 &&
                        t.stride(1) == rows && t.scalar_type() == dtype_,
                    op_, ": ", name, " or its transpose must be a contiguous (", rows, ", ",
                    columns, ") matrix of the dtype of x");
    return write_address(op_, t, name);
  }
  // Return a matrix for writing, on huge pages.
  void* target(const MaybeTensor& t, const char* name, int64_t rows, int64_t columns) const {
    void* data = matrix(t, name, rows, columns);
    if (data) advise_huge_pages(data, t->numel() * t->element_size());
    return data;
  }
  // Return n contiguous numbers of the accumulator dtype, or null.
  void* vector(const MaybeTensor& t, const char* name, int64_t n) const {
    return numbers(t, name, n,
                   dtype_ == ScalarType::Double ? ScalarType::Double : ScalarType::Float,
                   "float32 (float64 for float64)");
  }
  void* integers(const MaybeTensor& t, const char* name, int64_t n) const {
    return numbers(t, name, n, ScalarType::Long, "int64");
  }

 private:
  void* numbers(const MaybeTensor& t, const char* name, int64_t n, ScalarType type,
                const char* wanted) const {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == type, op_, ": ",
                    name, " must be contiguous, of ", n, " ", wanted, " numbers");
    return write_address(op_, *t, name);
  }
  const char* op_;
  ScalarType dtype_;
};

}  // namespace binding
}  // namespace pt
