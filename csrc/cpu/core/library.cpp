// SPDX-License-Identifier: Apache-2.0
// CPU library functions beside the ops: the active instruction set and scratch size. Each op
// registers itself in a separate file.
#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/core/arena.h"
#include "cpu/core/isa.h"

namespace {

std::string cpu_interface() { return PT_INTERFACE; }

std::string cpu_isa() { return pt::isa_name(pt::active_isa()); }

std::string cpu_vendor() { return pt::cpu_vendor(); }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (pt::Isa isa : pt::built_isas())
    if (pt::runs_here(isa)) names.push_back(pt::isa_name(isa));
  return names;
}

int64_t cpu_scratch_bytes() { return __atomic_load_n(&pt::arena_bytes, __ATOMIC_RELAXED); }

void set_cpu_isa(std::string name) { pt::set_active_isa(name); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def("cpu_interface() -> str");  // digest of csrc/interface.py at compile time
  m.def("cpu_isa() -> str");        // active set
  m.def("cpu_isas() -> str[]");     // built and usable on this CPU, best first
  m.def("cpu_vendor() -> str");
  m.def("cpu_scratch_bytes() -> int");   // scratch buffers of all threads
  m.def("set_cpu_isa(str name) -> ()");  // "" = default; tests run every set in one process
}

STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl("cpu_interface", TORCH_BOX(&cpu_interface));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cpu_isas", TORCH_BOX(&cpu_isas));
  m.impl("cpu_vendor", TORCH_BOX(&cpu_vendor));
  m.impl("cpu_scratch_bytes", TORCH_BOX(&cpu_scratch_bytes));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}
