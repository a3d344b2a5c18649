// SPDX-License-Identifier: Apache-2.0
// Rotary positions on the CPU: the problems as plain data. No torch header here or below.
#pragma once

#include <cstdint>

#include "common/heads.h"

namespace pt {

// With r the turning of neighbours by the layout, (-x2, x1) of a pair:
//   y = x, or with a weight x rstd (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps);   out = y cos + r(y) sin
// over the first `turned` columns, out = y over the rest. "acc" is float, for f64 double.
struct RotaryProblem {
  int64_t batch, length, dim, turned;  // turned is even, 0: nothing turns
  DType dtype;
  bool interleaved;  // pairs are (2i, 2i + 1); else (i, i + turned / 2)
  double eps, weight_offset;
  const void *cos, *sin;  // (batch, length, turned) acc
  int64_t table_batch;    // elements from one sequence's table to the next; 0: one for all
  int threads;
};

struct RotaryForward {
  Heads x;
  HeadsOut out;
  const void* weight;  // (dim,) acc, or null: y = x
  void* rstd;          // (batch, heads, length) acc, null where not wanted
};

struct RotaryBackward {
  Heads d_out, x;
  const void *weight, *rstd;
  HeadsOut dx;    // data null where not wanted
  void* dweight;  // (dim,) acc, null where not wanted
};

// Where the keys and values of a sequence go: position t of sequence b is row t of its caches, or with a table of pages row
// t % page_size of page table[b, t / page_size]. A negative position, or one outside, is written nowhere.
struct AppendKV {
  RotaryForward query, key;
  Heads value;
  int64_t value_dim;
  const int64_t* positions;             // (batch, length)
  HeadsOut key_cache, value_cache;      // strides.b: from one sequence, or page, to the next
  const int64_t* table;                 // (batch, pages), or null
  int64_t pages, num_pages, page_size;  // without a table page_size is the caches' length
};

struct RotaryKernels {
  void (*forward)(const RotaryProblem&, const RotaryForward&);
  void (*backward)(const RotaryProblem&, const RotaryBackward&);
  void (*append)(const RotaryProblem&, const AppendKV&);
};

}  // namespace pt
