// What the launchers of the sm_90a kernels share.
#pragma once

#include "cuda/attention/problem.h"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.cuh"

namespace pt::cuda {

// Boxes of `rows` rows of an operand with queries' rows, or with keys'.
inline ptx::TensorMap map_rows(const AttentionProblem& p, const In& t, bool keys, int columns, int rows) {
  const bool packed = p.cu_queries;
  const int64_t length = packed ? (keys ? p.total_keys : p.total_queries) : keys ? p.num_keys : p.num_queries;
  const int heads = keys ? p.heads / p.group : p.heads;
  return tensor_map({t.data,
                     p.dtype,
                     4,
                     {uint64_t(columns), uint64_t(length), uint64_t(heads), uint64_t(packed ? 1 : p.sequences)},
                     {1, uint64_t(t.stride.row), uint64_t(t.stride.head), uint64_t(t.stride.batch)}},
                    uint32_t(rows));
}

}  // namespace pt::cuda
