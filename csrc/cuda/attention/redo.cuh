// Results made twice where the first time was too optimistic: see Redo in problem.h. Exact, and the same at every run.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace pt::cuda {

// By the optimistic kernel: what holds row `row` of head h of sequence b must be made again.
PT_DEVICE void raise(const Redo& redo, int64_t head, int row) { ptx::st_global_u32(redo.flags + head * redo.tiles + row / redo.rows, 1); }

// Of the careful kernel: whether it has anything to do for rows [first, end) of a head (b * heads + h).
PT_DEVICE bool must_do(const Redo& redo, int64_t head, int first, int end) {
  if (!redo.flags) return true;
  for (int tile = most(first, 0) / redo.rows; tile < redo.tiles && tile * redo.rows < end; ++tile)
    if (ptx::ld_global_u32(redo.flags + head * redo.tiles + tile)) return true;
  return false;
}

// Whether some of the sums of a lane's two rows, laid out as accumulators, are NaN or infinite; rows whose factor is zero do not count.
template <int N>
PT_DEVICE bool not_finite(const float (&x)[N], const float (&factor)[2]) {
  float zero = 0.0f;
  PT_UNROLL
  for (int i = 0; i < N; ++i) zero = ptx::fma_rn(factor[i / 2 % 2] == 0.0f ? 0.0f : x[i], 0.0f, zero);
  return zero != 0.0f;  // NaN
}

}  // namespace pt::cuda
