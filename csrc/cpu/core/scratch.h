// SPDX-License-Identifier: Apache-2.0
// Scratch bytes of a call per arena. The plan computes them before the launch, which resets its
// arenas accordingly; pt.explain reports the sum.
#pragma once

#include "cpu/core/arena.h"
#include "cpu/core/vec.h"

namespace pt {
namespace PT_ISA {

struct Scratch {
  size_t setup = 0, shared = 0, own = 0;               // calling thread; own: the op's own arena
  size_t sums = 0, packed_for_all = 0;                 // calling thread, in Matmul
  size_t local = 0, packed_by_each = 0, epilogue = 0;  // each worker, the calling thread included

  // Grow to cover this step and the next one.
  void include(const Scratch& next) {
    for (auto size :
         {&Scratch::setup, &Scratch::shared, &Scratch::own, &Scratch::sums,
          &Scratch::packed_for_all, &Scratch::local, &Scratch::packed_by_each, &Scratch::epilogue})
      this->*size = max(this->*size, next.*size);
  }
  // Return the bytes that the arenas of so many threads hold if every thread gets work.
  int64_t bytes(int threads) const {
    const auto held = [](size_t n) { return int64_t(Arena::held(n)); };
    const int64_t caller = held(setup) + held(shared) + held(own) + held(sums) +
                           held(max(packed_for_all, packed_by_each));
    return caller + threads * (held(local) + held(epilogue)) + (threads - 1) * held(packed_by_each);
  }
};

}  // namespace PT_ISA
}  // namespace pt
