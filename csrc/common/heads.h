// SPDX-License-Identifier: Apache-2.0
// Strided rows of heads.
#pragma once

#include "common/strides.h"

namespace pt {

// Rows of (batch, heads, length, columns) with contiguous columns. Null data: no tensor.
template <class Pointer>
struct HeadRows {
  Pointer data = nullptr;
  Strides strides;
  int64_t heads = 0;
};
using Heads = HeadRows<const void*>;
using HeadsOut = HeadRows<void*>;

}  // namespace pt
