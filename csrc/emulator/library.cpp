// What an emulated library offers beside the ops: the choice of the schedule.
#include <torch/csrc/stable/library.h>

#include "emulator/host.h"

namespace {

void emulator_schedule(int64_t seed) { emu::options().seed = uint64_t(seed); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) { m.def("emulator_schedule(int seed) -> ()"); }  // of the next launch
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) { m.impl("emulator_schedule", TORCH_BOX(&emulator_schedule)); }
