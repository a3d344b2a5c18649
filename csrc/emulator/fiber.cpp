// SPDX-License-Identifier: Apache-2.0
#include "emulator/fiber.h"

#include <sys/mman.h>

#include "emulator/state.h"

namespace emu {

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
extern "C" void emu_switch_stack(void** save, void* load);
asm(R"(
.text
.hidden emu_switch_stack
.globl emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch_stack,.-emu_switch_stack
)");

void switch_context(Context& from, Context& to) { emu_switch_stack(&from, to); }

void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes) - 2;  // the ABI's alignment
  *top = reinterpret_cast<void*>(entry);
  context = top - 6;
}
#else
void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

char* fiber_stack(int slot, int thread) {
  static char* const stacks = [] {  // committed on first touch
    constexpr size_t count = size_t(kMaxThreads) * kMaxResident;
    void* p = mmap(nullptr, kStack * count, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return static_cast<char*>(nullptr);
    for (size_t t = 0; t < count; ++t)
      mprotect(static_cast<char*>(p) + t * kStack, 4096, PROT_NONE);
    return static_cast<char*>(p);
  }();
  return stacks ? stacks + (size_t(slot) * kMaxThreads + thread) * kStack : nullptr;
}

}  // namespace emu
