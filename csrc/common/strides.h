// SPDX-License-Identifier: Apache-2.0
// Where the rows of a tensor lie, as data. All strides are in elements; a broadcast dimension has stride 0.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt {

// Of (batch, head, row, column) or, of what has no columns, (batch, head, row). Packed tensors have batch stride 0.
struct Strides {
  int64_t b = 0, h = 0, l = 0, d = 1;
};

// Rows of a tensor on a grid of outer x inner rows; the columns of a row are contiguous. Data null: no tensor.
template <class Pointer>
struct GridRows {
  Pointer data = nullptr;
  int64_t outer = 0, inner = 0;
  DType dtype = DType::f32;
};
using Rows = GridRows<const void*>;
using RowsOut = GridRows<void*>;

}  // namespace pt
