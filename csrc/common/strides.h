// SPDX-License-Identifier: Apache-2.0
// Strided rows of a tensor. Strides are in elements; a broadcast dimension has stride 0.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt {

// Strides of (batch, head, row, column), or (batch, head, row) without columns. Packed tensors have
// batch stride 0.
struct Strides {
  int64_t b = 0, h = 0, l = 0, d = 1;
};

// Rows on a grid of outer x inner rows, each with contiguous columns. Null data: no tensor.
template <class Pointer>
struct GridRows {
  Pointer data = nullptr;
  int64_t outer = 0, inner = 0;
  DType dtype = DType::f32;
};
using Rows = GridRows<const void*>;
using RowsOut = GridRows<void*>;

}  // namespace pt
