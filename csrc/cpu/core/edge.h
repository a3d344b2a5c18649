// SPDX-License-Identifier: Apache-2.0
// What the torch edges of the ops on matrices share: checks of shape and layout, data pointers. Stable ABI only.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/edge.h"
#include "cpu/core/isa.h"
#include "cpu/core/pages.h"
#include "cpu/core/parallel.h"

namespace pt {
namespace edge {

// Checks the tensors of one call. `like` has the dtype that its matrices must have.
class Edge {
 public:
  Edge(const char* op, const Tensor& like) : op_(op), dtype_(like.scalar_type()) {}

  // A contiguous (rows, columns) matrix of the op's dtype, or null.
  void* matrix(const MaybeTensor& t, const char* name, int64_t rows, int64_t columns) const {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == rows && t->size(1) == columns && t->is_contiguous() && t->scalar_type() == dtype_, op_,
                    ": ", name, " must be a contiguous (", rows, ", ", columns, ") matrix of the dtype of x");
    return t->mutable_data_ptr();
  }
  // A (rows, columns) matrix whose transpose is contiguous.
  void* transposed(const Tensor& t, const char* name, int64_t rows, int64_t columns) const {
    STD_TORCH_CHECK(t.size(0) == rows && t.size(1) == columns && t.stride(0) == 1 && t.stride(1) == rows && t.scalar_type() == dtype_, op_,
                    ": ", name, " or its transpose must be a contiguous (", rows, ", ", columns, ") matrix of the dtype of x");
    return t.mutable_data_ptr();
  }
  // A matrix as above, to be written.
  void* target(const MaybeTensor& t, const char* name, int64_t rows, int64_t columns) const {
    void* data = matrix(t, name, rows, columns);
    if (data) advise_huge_pages(data, t->numel() * t->element_size());
    return data;
  }
  // n contiguous numbers of the work type, or null.
  void* vector(const MaybeTensor& t, const char* name, int64_t n) const {
    return numbers(t, name, n, dtype_ == ScalarType::Double ? ScalarType::Double : ScalarType::Float, "float32 (float64 for float64)");
  }
  void* integers(const MaybeTensor& t, const char* name, int64_t n) const { return numbers(t, name, n, ScalarType::Long, "int64"); }

 private:
  void* numbers(const MaybeTensor& t, const char* name, int64_t n, ScalarType type, const char* wanted) const {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == type, op_, ": ", name, " must be contiguous, of ", n, " ",
                    wanted, " numbers");
    return t->mutable_data_ptr();
  }
  const char* op_;
  ScalarType dtype_;
};

}  // namespace edge
}  // namespace pt
