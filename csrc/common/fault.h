// SPDX-License-Identifier: Apache-2.0
// Faults that tests plant: mistakes that the source names where they would be made, to show that tests find them.
//
//   if (!PT_FAULT(scores_not_awaited)) ptx::wgmma_wait<1>();
//   const int head = PT_FAULT(values_of_another_head) ? 0 : w.h / p.group;
//
// In a normal build the macro is `false`, and nothing of a fault remains. The emulator's library (PT_EMULATE) and the lane of
// tests/ops/test_lane_mutants.py (PT_FAULTS) have all faults, and PYTRANSFORMER_FAULT=name plants one when they are loaded. The lists of
// the tests have the same names, with what shows each.
#pragma once

#if !defined(PT_EMULATE) && !defined(PT_FAULTS)
#define PT_FAULT(name) false
#else
#include <algorithm>
#include <cstddef>

namespace pt::fault {

struct Fault {
  explicit Fault(const char* name);  // joins the list of all

  const char* name;
  bool planted = false;
  Fault* next;
};

template <size_t N>
struct Name {
  constexpr Name(const char (&name)[N]) { std::copy_n(name, N, text); }
  char text[N];
};

template <Name name>
inline Fault named{name.text};

}  // namespace pt::fault

#define PT_FAULT(name) (::pt::fault::named<#name>.planted)
#endif
