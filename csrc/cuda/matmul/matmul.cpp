// SPDX-License-Identifier: Apache-2.0
// Binding of the warpgroup gemms without a fused op.
#include "cuda/matmul/binding.h"
#include "cuda/matmul/kernels.h"

namespace {

using namespace pt::cuda;

// Return the gemm of operands (rows, k) and (k, columns) of one dtype; see binding.h.
Product product_of(const MaybeTensor (&operands)[4], Reachable& reachable) {
  static const char* const kNames[] = {"a", "b", "a2", "b2"};
  Product p{};
  p.dtype = dtype_of(*operands[0], "a"), p.rows = operands[0]->size(0),
  p.columns = operands[1]->size(1);
  for (int i = 0; i < 4; ++i) {
    if (!operands[i]) continue;
    STD_TORCH_CHECK(dtype_of(*operands[i], kNames[i]) == p.dtype, "products: ", kNames[i],
                    " must have the dtype of a");
    (i % 2 ? p.b : p.a)[i / 2] = matrix_of(*operands[i], kNames[i], reachable);
  }
  return p;
}

// out = a b (+ a2 b2) + bias.
void matmul(Tensor a, Tensor b, MaybeTensor a2, MaybeTensor b2, MaybeTensor bias, Tensor out,
            int64_t device, int64_t stream) {
  Reachable reachable;
  LinearProblem l{product_of({a, b, a2, b2}, reachable), {}, {}};
  l.out = result_of(out, "out", l.product, reachable);
  l.bias = bias_of(bias, "bias", l.product.columns, reachable);
  const DeviceGuard guard(device);
  sm90_linear(l, planned(l.product), reinterpret_cast<void*>(stream));
}

// out = a b, or out += a b: float32.
void matmul_sums(Tensor a, Tensor b, Tensor out, bool add, int64_t device, int64_t stream) {
  Reachable reachable;
  SumsProblem s{product_of({a, b, {}, {}}, reachable), {}, add};
  s.out = result_of(out, "out", s.product, reachable, true);
  const DeviceGuard guard(device);
  sm90_sums(s, planned(s.product), reinterpret_cast<void*>(stream));
}

bool matmul_use_cublas(int64_t rows, int64_t columns, int64_t depth, bool ours) {
  return use_cublas(rows, columns, depth, ours);
}
int64_t matmul_largest_side() { return kLargestSide; }
int64_t matmul_rows_of_a_part() { return kRowsOfAPart; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      PT_EDGE_OP("matmul(Tensor a, Tensor b, Tensor? a2, Tensor? b2, Tensor? bias, Tensor(a!) out, "
                 "int device, int stream) -> ()"));
  m.def(PT_EDGE_OP(
      "matmul_sums(Tensor a, Tensor b, Tensor(a!) out, bool add, int device, int stream) -> ()"));
  m.def(PT_EDGE_OP("matmul_use_cublas(int rows, int columns, int depth, bool ours) -> bool"));
  m.def(PT_EDGE_OP("matmul_largest_side() -> int"));
  m.def(PT_EDGE_OP("matmul_rows_of_a_part() -> int"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("matmul"), TORCH_BOX(&matmul));
  m.impl(PT_EDGE_OP("matmul_sums"), TORCH_BOX(&matmul_sums));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl(PT_EDGE_OP("matmul_use_cublas"), TORCH_BOX(&matmul_use_cublas));
  m.impl(PT_EDGE_OP("matmul_largest_side"), TORCH_BOX(&matmul_largest_side));
  m.impl(PT_EDGE_OP("matmul_rows_of_a_part"), TORCH_BOX(&matmul_rows_of_a_part));
}
