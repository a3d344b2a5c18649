// SPDX-License-Identifier: Apache-2.0
// Orders in which blocks go through tiles: pure functions, checked by the compiler.
#pragma once

namespace pt::cuda {

// Whether place(0), ..., place(count - 1) are 0, ..., count - 1 in some order.
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
