// Plain products by warpgroups, torch edge.
#include "cuda/matmul/edge.h"
#include "cuda/matmul/kernels.h"

namespace {

using namespace pt::cuda;

// out = a b (+ a2 b2) + bias. a and a2 (rows, k), b and b2 (k, columns); see edge.h.
void matmul(Tensor a, Tensor b, MaybeTensor a2, MaybeTensor b2, MaybeTensor bias, Tensor out, int64_t device, int64_t stream) {
  Reachable reachable;
  LinearProblem l{};
  Product& p = l.product;
  p.dtype = dtype_of(a, "a"), p.rows = a.size(0), p.columns = b.size(1);
  const MaybeTensor operands[] = {a, b, a2, b2};
  const char* const names[] = {"a", "b", "a2", "b2"};
  for (int i = 0; i < 4; ++i) {
    if (!operands[i]) continue;
    STD_TORCH_CHECK(dtype_of(*operands[i], names[i]) == p.dtype, "products: ", names[i], " must have the dtype of a");
    (i % 2 ? p.b : p.a)[i / 2] = matrix_of(*operands[i], names[i], reachable);
  }
  l.out = result_of(out, "out", p, reachable);
  l.bias = bias_of(bias, "bias", p.columns, reachable);
  const DeviceGuard guard(device);
  sm90_linear(l, planned(p), reinterpret_cast<void*>(stream));
}

bool matmul_by_library(int64_t rows, int64_t columns, int64_t depth, bool ours) { return plain_by_library(rows, columns, depth, ours); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(PT_EDGE_OP("matmul(Tensor a, Tensor b, Tensor? a2, Tensor? b2, Tensor? bias, Tensor(a!) out, int device, int stream) -> ()"));
  m.def(PT_EDGE_OP("matmul_by_library(int rows, int columns, int depth, bool ours) -> bool"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) { m.impl(PT_EDGE_OP("matmul"), TORCH_BOX(&matmul)); }
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl(PT_EDGE_OP("matmul_by_library"), TORCH_BOX(&matmul_by_library));
}
