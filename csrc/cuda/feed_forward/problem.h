// SPDX-License-Identifier: Apache-2.0
// Problems of the feed-forward gemms with fused epilogues, as plain data without torch and CUDA
// headers.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "cuda/matmul/problem.h"

namespace pt::cuda {

using pt::Activation;

// Dropout of hidden.
struct HiddenDropout {
  const uint64_t* seed;
  uint32_t threshold;     // rint(65536 p); 0: no dropout, 65536: drops everything
  uint32_t column_start;  // offset of the mask's columns; a multiple of 32
  int64_t row_start;
};

// pre = x w1^T + b1; gate = x gate_weight^T + gate_bias; hidden = dropout(act(pre)), or gated
// dropout(act(gate) pre). The product's a[0] is x, b[0] w1^T and b[1] gate_weight^T.
struct HiddenProblem {
  Product product;
  Activation activation;
  HiddenDropout dropout;
  Bias b1, gate_bias;
  MatrixOut hidden, pre, gate;  // data null: not stored
};

// d = dropout(d_out w2); d_pre = d act'(pre), or gated d_pre = d act(gate), d_gate = d pre
// act'(gate). Recomputes hidden from pre and gate. The product's a[0] is d_out, b[0] w2.
struct HiddenGradient {
  Product product;
  Activation activation;
  HiddenDropout dropout;
  Matrix pre, gate;  // gate.data null: no gate
  MatrixOut d_pre, d_gate, hidden;
  // (ceil(rows / 64), columns): sums of d_pre and d_gate over 64 rows each; may be null.
  float *b1_partials, *gate_bias_partials;
};

}  // namespace pt::cuda
