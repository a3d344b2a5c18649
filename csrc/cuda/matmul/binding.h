// SPDX-License-Identifier: Apache-2.0
// Conversion of tensors to matrices for the bindings of warpgroup gemms.
#pragma once

#include "cuda/binding.h"
#include "cuda/matmul/sm90/plan.h"

namespace pt::cuda {

// Return an operand (height, width). One dimension is contiguous, the other's stride is a multiple
// of 16 bytes. Registers its memory as readable.
inline Matrix matrix_of(const Tensor& t, const char* name, Reachable& reachable) {
  STD_TORCH_CHECK(t.dim() == 2, "products: ", name, " must be a matrix");
  const bool transposed = t.stride(1) != 1 && t.stride(0) == 1;
  STD_TORCH_CHECK(transposed || t.stride(1) == 1, "products: rows or columns of ", name,
                  " must be contiguous");
  const int rows = transposed ? 1 : 0;
  return {read_from("products", t, name, reachable), t.size(rows), t.size(1 - rows), t.stride(rows),
          transposed};
}

// Return a result of the gemm's shape, in the operands' dtype or float32. Its rows have a multiple
// of eight columns in memory.
inline MatrixOut result_of(const MaybeTensor& t, const char* name, const Product& p,
                           Reachable& reachable, bool sums = false) {
  if (!t) return {};
  const int64_t width = (p.columns + 7) / 8 * 8;
  STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == p.rows && t->size(1) == width && t->stride(1) == 1,
                  "products: ", name, " must be (", p.rows, ", ", width,
                  "), its columns contiguous");
  STD_TORCH_CHECK(dtype_of(*t, name) == (sums ? DType::f32 : p.dtype), "products: ", name,
                  sums ? " must be float32" : " must have the operands' dtype");
  const MatrixOut out{write_to("products", *t, name, reachable), t->stride(0)};
  STD_TORCH_CHECK(
      reinterpret_cast<uintptr_t>(out.data) % 16 == 0 && (p.rows == 1 || out.stride % 8 == 0),
      "products: rows of ", name, " must begin at multiples of 16 bytes");
  return out;
}

// Return a bias of `columns` values, padded to an even number in memory.
inline Bias bias_of(const MaybeTensor& t, const char* name, int64_t columns, Reachable& reachable) {
  if (!t) return {};
  const Bias bias{read_from("products", *t, name, reachable), dtype_of(*t, name)};
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) >= columns && t->size(0) % 2 == 0 &&
                      t->stride(0) == 1 && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0,
                  "products: ", name,
                  " must be contiguous, aligned to 16 bytes, of an even number of at least ",
                  columns, " numbers");
  return bias;
}

// Return the plan. Throws if the kernels do not support the problem; Python checks that first.
inline MatmulPlan planned(const Product& p) {
  const MatmulPlan plan = plan_matmul(p, multiprocessors());
  STD_TORCH_CHECK(!plan.why_not, "products: ", plan.why_not);
  STD_TORCH_CHECK(runs_sm90a(), "products: these kernels are for sm_90a");
  return plan;
}

}  // namespace pt::cuda
