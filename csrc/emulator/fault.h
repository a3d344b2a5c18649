// SPDX-License-Identifier: Apache-2.0
// Faults in the text of the sources: what a build with faults (faults.py) puts into its own copy of a file, chosen when it is loaded.
//
//   ds = w * (down - (PT_FAULT(delta_forgotten) ? 0.0f : row.delta));
//
// PYTRANSFORMER_FAULT=delta_forgotten plants it. The sources themselves have no faults; those at call sites need no text (sites.h).
#pragma once

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
