// SPDX-License-Identifier: Apache-2.0
// Plant the fault in PYTRANSFORMER_FAULT when the library or program is loaded.
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
  std::fprintf(stderr, "PYTRANSFORMER_FAULT=%.*s: the sources have no such fault\n",
               int(name.size()), name.data());
  std::exit(2);
}

// Static objects of an archive are initialized after the objects that link it, so the
// list contains all faults.
[[maybe_unused]] static const bool planted = [] {
  const char* name = std::getenv("PYTRANSFORMER_FAULT");
  // A name with "@" is a call site: sites.cpp.
  if (name && *name && std::string_view(name).find('@') == std::string_view::npos) plant(name);
  return name != nullptr;
}();

}  // namespace pt::fault
