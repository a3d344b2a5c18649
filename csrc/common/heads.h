// SPDX-License-Identifier: Apache-2.0
// Where the rows of heads lie, as data.
#pragma once

#include "common/strides.h"

namespace pt {

// Rows of (batch, heads, length, columns), the columns contiguous. Data null: no tensor.
template <class Pointer>
struct HeadRows {
  Pointer data = nullptr;
  Strides strides;
  int64_t heads = 0;
};
using Heads = HeadRows<const void*>;
using HeadsOut = HeadRows<void*>;

}  // namespace pt
