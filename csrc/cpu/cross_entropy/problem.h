// SPDX-License-Identifier: Apache-2.0
// Linear map and cross entropy on the CPU: the problem as plain data. No torch header here or
// below.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt {

// x and weight are row-major and contiguous, of dtype. acc is float, or double for f64.
struct CrossEntropyProblem {
  DType dtype;
  int64_t rows, depth, classes;
  const void* x;          // (rows, depth)
  const void* weight;     // (classes, depth)
  const void* bias;       // (classes,) acc, or null
  const void* weights;    // class weights: (classes,) acc, or null
  const int64_t* target;  // (rows,), each in [0, classes) or ignore_index
  int64_t ignore_index;
  double label_smoothing, softcap;  // softcap 0: none
  int threads;
};

// u = x weight^T + bias, z = softcap tanh(u / softcap) or u, m = max z, l = log(sum exp(z - m))
// loss = (1 - s) w[target] (l - z[target] + m) + s (mean(w) (l + m) - mean(w z)), where w are the
// class weights or 1; 0 if the target is ignored
// m and l are stored apart: m + l loses the digits of l if all logits share a large part.
struct CrossEntropyForward {
  void* loss;       // (rows,) acc
  void* split_lse;  // (2, rows) acc: m, l
  void* product;    // (rows, classes) acc: x weight^T for backward, or null
  void* correct;    // (rows,) acc: 1 if the target is the first largest logit, else 0; or null
};

// dz = p_factor exp(z - m - l) - g w ((1 - s) [c = target] + s / classes)
// du = dz (1 - (z / softcap)^2), or dz; dx = du weight, dweight = du^T x, dbias = sum of du
struct CrossEntropyBackward {
  const void* split_lse;  // (2, rows) acc
  const void* g;          // (rows,) acc; not read if the target is ignored
  const void* p_factor;   // likewise; null if it equals g
  const void* product;    // forward's product, or null: recompute
  void *dx, *dweight;     // of dtype, or null
  void* dbias;            // (classes,) acc, or null
};

struct CrossEntropyKernels {
  void (*forward)(const CrossEntropyProblem&, const CrossEntropyForward&);
  void (*backward)(const CrossEntropyProblem&, const CrossEntropyBackward&);
  // Scratch of both directions with all gradients, from the sizes only.
  int64_t (*scratch_bytes)(const CrossEntropyProblem&, bool kept, bool correct);
};

}  // namespace pt
