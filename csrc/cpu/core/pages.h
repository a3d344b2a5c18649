// SPDX-License-Identifier: Apache-2.0
// Fresh memory for large outputs. The first touch of a 4 KB page costs about 1 us, twice what it takes to norm its contents.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace pt {

// Asks for 2 MB pages where [p, p + bytes) holds whole ones. Advice only: does nothing to pages already there.
inline void advise_huge_pages(void* p, size_t bytes) {
  constexpr uintptr_t huge = uintptr_t(2) << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + huge - 1) / huge * huge,
                  end = (reinterpret_cast<uintptr_t>(p) + bytes) / huge * huge;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

// Whether [p, p + bytes) is memory that nobody has touched yet, by three of its pages. glibc maps blocks beyond 32 MB anew for every call.
// Stores past the caches take twice the time there: the kernel has just zeroed each page, in the caches.
inline bool untouched(const void* p, size_t bytes) {
  constexpr uintptr_t step = 65536;  // a multiple of every page size
  const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + step - 1) / step * step, end = reinterpret_cast<uintptr_t>(p) + bytes;
  if (first + 4 * step > end) return false;
  for (const uintptr_t at : {first, first + (end - first) / 2 / step * step, (end - step) / step * step}) {
    unsigned char there = 1;
    if (mincore(reinterpret_cast<void*>(at), 1, &there) != 0 || there & 1) return false;
  }
  return true;
}

}  // namespace pt
