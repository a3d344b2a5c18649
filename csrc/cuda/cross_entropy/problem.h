// SPDX-License-Identifier: Apache-2.0
// Problems of fused linear + cross entropy on a GPU, as plain data without torch and CUDA headers.
#pragma once

#include <cstdint>

#include "cuda/matmul/problem.h"

namespace pt::cuda {

// Targets: class target[r] has weight on_target = 1 - s, and all classes share on_each = s, the
// label smoothing. A row with target ignore_index has loss 0 and no gradient.
struct Labels {
  const int64_t* target;
  int64_t ignore_index;
  float on_target, on_each;
};

// u = x weight^T + bias, where product.a[0] = x and b[0] = weight^T, in tiles of classes. z =
// softcap tanh(u / softcap), or u if softcap is 0. `partials`, (2, or 3 with on_each; class tiles;
// rows), receives per tile and row the maximum, the sum of exp(z - maximum) and the sum of logits.
// `picked` receives the target's logit. `exponentials` receives exp(z - maximum of the tile) if its
// data is not null; it is then bf16, without a softcap.
struct LogitPartials {
  Product product;
  Bias bias;
  Labels labels;
  float *partials, *picked;
  float softcap;
  MatrixOut exponentials;
};

// m = max z, l = log sum exp(z - m); loss = l - on_target (z_target - m) - on_each (mean(z) - m),
// from the partials in order. m and l stay separate: m + l loses digits of l if all logits share a
// large offset.
struct LossProblem {
  Labels labels;
  const float *partials, *picked;
  float *loss, *row_max, *log_sum;  // (rows,): loss, m, l
  int64_t rows, classes, tiles;
};

// d_logits = (p_factor exp(z - m - l) - g (on_target [class = target] + on_each / classes)) (1 - (z
// / softcap)^2), where p_factor is g if null, and its column sums over 64 rows each.
struct DLogitsProblem {
  Product product;
  Bias bias;
  Labels labels;
  const float *row_max, *log_sum;  // (rows,)
  const float* g;                  // (rows,): upstream gradient, scaled by the caller
  MatrixOut d_logits;
  float* bias_partials;   // (ceil(rows / 64), classes); may be null
  const float* p_factor;  // (rows,), or null without softcap, class weights and z-loss
  float softcap;          // 0: none; else p_factor is not null
};

// The same d_logits without a softcap, in place of `exponentials` of LogitPartials: each is
// multiplied with p_factor exp(maximum of the tile - m - l). The target's probability comes from
// `picked`, because p - 1 of a rounded p would have no digits.
struct ExponentialsProblem {
  Labels labels;
  const float *maxima, *picked;  // LogitPartials' partials and picked
  const float *row_max, *log_sum, *g, *p_factor;
  MatrixOut d_logits;
  float* bias_partials;
  int64_t rows, classes;
};

// out = g from, rounded once: forward's bf16 gradients times the loss's gradient. In place (out is
// from) nothing is read or written if g is 1.
struct ScaleProblem {
  const void* from;
  void* out;
  const float* g;
  int64_t count;
};

}  // namespace pt::cuda
