// SPDX-License-Identifier: Apache-2.0
// Linear map and cross entropy on a GPU: the problems as plain data. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "cuda/matmul/problem.h"

namespace pt::cuda {

// What each row is compared with: the class target[r], with on_target = 1 - s, and all of them, with s = on_each in equal shares. A row
// whose target is ignore_index has loss 0 and no gradient.
struct Labels {
  const int64_t* target;
  int64_t ignore_index;
  float on_target, on_each;
};

// z = x weight^T + bias, by the product's a[0] = x and b[0] = weight^T, in tiles of classes. Of each row a tile leaves in `parts`, (2, or
// with on_each 3; tiles of classes; rows): its maximum, the sum of exponentials about it, the sum of its logits. And in `picked` the logit
// of the target, from the tile that has it.
struct LogitPartials {
  Product product;
  Bias bias;
  Labels labels;
  float *partials, *picked;
};

// m = max z, l = log sum exp(z - m); loss = l - on_target (z_target - m) - on_each (mean(z) - m), from the parts, in order. m and l stay
// apart: m + l loses the digits of l when all logits share a large part.
struct LossProblem {
  Labels labels;
  const float *partials, *picked;
  float *loss, *row_max, *log_sum;  // (rows,): loss, m, l
  int64_t rows, classes, tiles;
};

// d_logits = (exp(z - m - l) - on_target [class = target] - on_each / classes) g, and its sums over 64 rows each.
struct DLogitsProblem {
  Product product;
  Bias bias;
  Labels labels;
  const float *row_max, *log_sum;  // (rows,)
  const float* g;                  // (rows,): the upstream gradient of the row's loss, times a scale that the caller removes
  MatrixOut d_logits;
  float* bias_partials;  // (ceil(rows / 64), classes); null where not wanted
};

}  // namespace pt::cuda
