// SPDX-License-Identifier: Apache-2.0
// Emulated library functions beside the ops: the schedule, and the number of gemms its kernels
// computed.
#include <torch/csrc/stable/library.h>

#include "emulator/host.h"

namespace {

void emulator_schedule(int64_t seed) { emu::options().seed = uint64_t(seed); }
int64_t emulator_products(bool warps) { return int64_t(emu::products(warps)); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def("emulator_schedule(int seed) -> ()");           // next launch
  m.def("emulator_products(bool warps=False) -> int");  // by warpgroups or by warps, since load
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl("emulator_schedule", TORCH_BOX(&emulator_schedule));
  m.impl("emulator_products", TORCH_BOX(&emulator_products));
}
