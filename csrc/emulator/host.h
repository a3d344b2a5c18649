// SPDX-License-Identifier: Apache-2.0
// Host side of an emulated library: launches with the requested schedule.
#pragma once

#include "emulator/emulator.h"

namespace emu {

// Options of the next launches. Each launch advances the seed.
Options& options();

// Return the number of gemms of warpgroups, or of warps, executed in this process: it shows which
// kernels ran and which work they skipped.
uint64_t products(bool warps);

// Run a kernel; throw std::runtime_error with the emulator's message.
void run(dim3 grid, int threads, size_t smem_bytes, const std::function<void()>& kernel);

}  // namespace emu
