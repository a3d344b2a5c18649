// SPDX-License-Identifier: Apache-2.0
// Faults in source text: a build with faults (faults.py) compiles changed copies of files, and the
// environment selects a fault at load time.
//
//   ds = w * (down - (PT_FAULT(delta_forgotten) ? 0.0f : row.delta));
//
// PYTRANSFORMER_FAULT=delta_forgotten plants it. The sources themselves contain no faults; faults
// at call sites need no text (sites.h).
#pragma once

#include <algorithm>
#include <cstddef>

namespace pt::fault {

struct Fault {
  explicit Fault(const char* name);  // joins the global list

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
