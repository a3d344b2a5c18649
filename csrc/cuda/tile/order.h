// SPDX-License-Identifier: Apache-2.0
// Compile-time check of the orders in which blocks process tiles.
#pragma once

namespace pt::cuda {

// Return true if place(0), ..., place(count - 1) is a permutation of 0, ..., count - 1.
template <class F>
constexpr bool each_once(int count, F place) {
  for (int wanted = 0; wanted < count; ++wanted) {
    int times = 0;
    for (int n = 0; n < count; ++n) times += place(n) == wanted;
    if (times != 1) return false;
  }
  return true;
}

}  // namespace pt::cuda
