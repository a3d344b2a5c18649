// SPDX-License-Identifier: Apache-2.0
// Fibers: the only part of the emulator that knows about the host's architecture.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(EMU_UCONTEXT)
#include <ucontext.h>
#endif

namespace emu {

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
using Context = void*;  // the saved stack pointer
#else
using Context = ucontext_t;
#endif

// Saves where it is called in `from` and goes on where `to` was saved.
void switch_context(Context& from, Context& to);

// `context` will begin in `entry`, which must not return, on the stack of that many bytes.
void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)());

// The same stack each time for a block's slot and a thread, with an unmapped page at its low end; null if there is no memory.
char* fiber_stack(int slot, int thread);
constexpr size_t kStack = 256 * 1024;

}  // namespace emu
