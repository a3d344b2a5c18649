// SPDX-License-Identifier: Apache-2.0
// TMA maps of the sm_90a kernels.
#pragma once

#include "cuda/attention/sm90/bwd_tile.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.cuh"

namespace pt::cuda {

// Map boxes of `rows` rows of an operand with queries' or keys' rows.
inline ptx::TensorMap map_rows(const AttentionProblem& p, const In& t, bool keys, int columns,
                               int rows) {
  const bool packed = p.cu_queries;
  const int64_t length = packed ? (keys ? p.total_keys : p.total_queries)
                         : keys ? p.num_keys
                                : p.num_queries;
  const int heads = keys ? p.heads / p.group : p.heads;
  return tensor_map(
      {t.data,
       p.dtype,
       4,
       {uint64_t(columns), uint64_t(length), uint64_t(heads), uint64_t(packed ? 1 : p.sequences)},
       {1, uint64_t(t.stride.row), uint64_t(t.stride.head), uint64_t(t.stride.batch)}},
      uint32_t(rows));
}

// Map backward's operands in boxes of `queries` and `keys` rows.
inline Sm90Operands map_operands(const AttentionBackward& g, int queries, int keys) {
  const AttentionProblem& p = g.p;
  return {map_rows(p, p.q, false, p.head_dim, queries), map_rows(p, p.k, true, p.head_dim, keys),
          map_rows(p, p.v, true, p.value_dim, keys),
          map_rows(p, g.d_out, false, p.value_dim, queries)};
}

}  // namespace pt::cuda
