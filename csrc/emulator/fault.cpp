// SPDX-License-Identifier: Apache-2.0
// Plants the fault that PYTRANSFORMER_FAULT names, when the library or program is loaded.
#include "emulator/fault.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace pt::fault {

static Fault* faults = nullptr;

Fault::Fault(const char* name) : name(name), next(faults) { faults = this; }

static void plant(std::string_view name) {
  for (Fault* f = faults; f; f = f->next)
    if (f->name == name) {
      f->planted = true;
      return;
    }
  std::fprintf(stderr, "PYTRANSFORMER_FAULT=%.*s: the sources have no such fault\n", int(name.size()), name.data());
  std::exit(2);
}

// Objects of an archive are initialised after those that it is linked to: all faults are in the list.
[[maybe_unused]] static const bool planted = [] {
  const char* name = std::getenv("PYTRANSFORMER_FAULT");
  if (name && *name && std::string_view(name).find('@') == std::string_view::npos) plant(name);  // else at a call site: sites.cpp
  return name != nullptr;
}();

}  // namespace pt::fault
