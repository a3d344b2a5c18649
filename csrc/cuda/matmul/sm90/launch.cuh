// SPDX-License-Identifier: Apache-2.0
// Launches of warpgroup gemms for problems that `plan_matmul` supports.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/matmul/sm90/matmul.cuh"
#include "cuda/tensor_map.cuh"

namespace pt::cuda {

// Map boxes of `rows` rows and 64 columns.
inline ptx::TensorMap map_matrix(const Matrix& m, DType dtype, int rows) {
  return tensor_map(
      {m.data, dtype, 2, {uint64_t(m.columns), uint64_t(m.rows)}, {1, uint64_t(m.stride)}},
      uint32_t(rows));
}

// panels: the matrices (rows, columns) that the epilogue reads.
template <class T, class K, class E>
void launch_matmul(const Product& p, const E& epilogue, const MatmulPlan& plan, void* stream,
                   const Matrix* panels = nullptr) {
  constexpr int kStep = kMatmulTile.step;
  MatmulArgs<E> args{{}, {}, {}, epilogue, plan.grid, plan.halves, p.rows, p.columns, {}};
  for (int i = 0; i < 2; ++i) {
    if (p.a[i].data) {
      args.a[i] = map_matrix(p.a[i], p.dtype, K::a_by_k ? kStep : kMatmulTile.rows());
      args.steps[i] = int((p.a[i].width() + kStep - 1) / kStep);
    }
    if (p.b[i].data)
      args.b[i] = map_matrix(p.b[i], p.dtype, K::b_by_k ? kStep : kHalfColumns / K::products);
    if (i < E::kPanels) args.panels[i] = map_matrix(panels[i], p.dtype, kMatmulTile.rows());
  }
  launch(sm90_matmul_kernel<T, K, E>, dim3(unsigned(plan.blocks)), kMatmulTile.threads(),
         matmul_smem(kMatmulTile, E::kScratch), stream, args);
}

// Call run(T{}) for the problem's 16-bit element type.
template <class F>
void with_half(DType dtype, F run) {
  if (dtype == DType::bf16) run(ptx::bf16{});
  else run(ptx::f16{});
}

// Launch a gemm without a fused op, by the layouts of its operands.
template <class E>
void launch_plain(const Product& p, const E& epilogue, const MatmulPlan& plan, void* stream) {
  with_half(p.dtype, [&](auto t) {
    using T = decltype(t);
    if (p.a[0].transposed) launch_matmul<T, TN>(p, epilogue, plan, stream);
    else if (p.b[0].transposed) launch_matmul<T, NT>(p, epilogue, plan, stream);
    else launch_matmul<T, NN>(p, epilogue, plan, stream);
  });
}

}  // namespace pt::cuda
