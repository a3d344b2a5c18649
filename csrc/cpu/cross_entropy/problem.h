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

// z = x weight^T + bias, lse = log(sum exp z), loss = lse - (1 - s) z[target] - s mean(z); 0 where target is ignored.
struct CrossEntropyForward {
  void *loss, *lse;  // (rows,) of acc
  void* product;     // (rows, classes) of acc: x weight^T, kept for backward; or null
};

// dz = upstream (exp(z - lse) - (1 - s) [c = target] - s / classes), dx = dz weight, dweight = dz^T x, dbias = sum of dz.
struct CrossEntropyBackward {
  const void *lse, *upstream;  // (rows,) of acc; upstream of ignored rows is not read
  const void* product;         // what forward kept, or null: computed again
  void *dx, *dweight;          // of dtype, null where not wanted
  void* dbias;                 // (classes,) of acc, null where not wanted
};

struct CrossEntropyKernels {
  void (*forward)(const CrossEntropyProblem&, const CrossEntropyForward&);
  void (*backward)(const CrossEntropyProblem&, const CrossEntropyBackward&);
  int64_t (*scratch_bytes)(const CrossEntropyProblem&, bool kept);  // of both, with all gradients; of the sizes alone
};

}  // namespace pt
