// SPDX-License-Identifier: Apache-2.0
// The host side of an emulated library: launches with the schedule that was asked for.
#pragma once

#include "emulator/emulator.h"

namespace emu {

// The options of the next launches; the seed moves on with each.
Options& options();

// Products of warpgroups, or else of warps, that the launches of this process have executed: tells which kernels ran, and what they
// left out.
uint64_t products(bool warps);

// Runs a kernel; throws std::runtime_error with the emulator's message.
void run(dim3 grid, int threads, size_t smem_bytes, const std::function<void()>& kernel);

}  // namespace emu
