// SPDX-License-Identifier: Apache-2.0
// Fibers: the only architecture-dependent part of the emulator.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(EMU_UCONTEXT)
#include <ucontext.h>
#endif

namespace emu {

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
using Context = void*;  // saved stack pointer
#else
using Context = ucontext_t;
#endif

// Save the current context in `from` and resume `to`.
void switch_context(Context& from, Context& to);

// Make `context` start in `entry`, which must not return, on a stack of `bytes` bytes.
void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)());

// Return the stack of a block slot and thread, always the same, with an unmapped page at its low
// end; null if there is no memory.
char* fiber_stack(int slot, int thread);
constexpr size_t kStack = 256 * 1024;

}  // namespace emu
