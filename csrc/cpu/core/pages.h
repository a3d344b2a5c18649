// SPDX-License-Identifier: Apache-2.0
// Fresh memory for large outputs. The first touch of a 4 KB page costs about 1 us, twice the cost
// of normalizing its contents. Functions are static: every instruction set compiles its own, and
// the linker must not choose among them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace pt {

// Request 2 MB pages inside [p, p + bytes). Advice only: it does not affect resident pages.
static inline void advise_huge_pages(void* p, size_t bytes) {
  constexpr uintptr_t huge = uintptr_t(2) << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + huge - 1) / huge * huge,
                  end = (reinterpret_cast<uintptr_t>(p) + bytes) / huge * huge;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

// Return true if [p, p + bytes) is untouched memory, judged by three pages. glibc maps blocks above
// 32 MB anew for every call. Streaming stores take twice the time there, because the kernel has
// just zeroed each page in the caches.
static inline bool untouched(const void* p, size_t bytes) {
  constexpr uintptr_t step = 65536;  // multiple of every page size
  const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + step - 1) / step * step,
                  end = reinterpret_cast<uintptr_t>(p) + bytes;
  if (first + 4 * step > end) return false;
  for (const uintptr_t at :
       {first, first + (end - first) / 2 / step * step, (end - step) / step * step}) {
    unsigned char there = 1;
    if (mincore(reinterpret_cast<void*>(at), 1, &there) != 0 || there & 1) return false;
  }
  return true;
}

}  // namespace pt
