// SPDX-License-Identifier: Apache-2.0
// Linear map and cross entropy on the CPU: the problem as plain data. No torch header here or below.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt {

// x and weight are row-major and contiguous, of dtype; acc is float, double for f64.
struct CrossEntropyProblem {
  DType dtype;
  int64_t rows, depth, classes;
  const void* x;          // (rows, depth)
  const void* weight;     // (classes, depth)
  const void* bias;       // (classes,) of acc, or null
  const int64_t* target;  // (rows,), each in [0, classes) or ignore_index
  int64_t ignore_index;
  double label_smoothing;
  int threads;
};

// z = x weight^T + bias, m = max z, l = log(sum exp(z - m)), loss = l - (1 - s) (z[target] - m) - s (mean(z) - m); 0 where target is
// ignored. m and l stay apart because m + l loses the digits of l when all logits share a large part.
struct CrossEntropyForward {
  void* loss;       // (rows,) of acc
  void* split_lse;  // (2, rows) of acc: m, l
  void* product;    // (rows, classes) of acc: x weight^T, kept for backward; or null
};

// dz = upstream (exp(z - m - l) - (1 - s) [c = target] - s / classes), dx = dz weight, dweight = dz^T x, dbias = sum of dz.
struct CrossEntropyBackward {
  const void* split_lse;  // (2, rows) of acc
  const void* upstream;   // (rows,) of acc; not read where target is ignored
  const void* product;    // what forward kept, or null: computed again
  void *dx, *dweight;     // of dtype, null where not wanted
  void* dbias;            // (classes,) of acc, null where not wanted
};

struct CrossEntropyKernels {
  void (*forward)(const CrossEntropyProblem&, const CrossEntropyForward&);
  void (*backward)(const CrossEntropyProblem&, const CrossEntropyBackward&);
  int64_t (*scratch_bytes)(const CrossEntropyProblem&, bool kept);  // of both, with all gradients; of the sizes alone
};

}  // namespace pt
