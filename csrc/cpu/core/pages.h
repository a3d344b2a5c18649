// SPDX-License-Identifier: Apache-2.0
// Fresh memory for large outputs. The first touch of a 4 KB page costs about 1 us, twice what it takes to norm its contents.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace pt {

// Asks for 2 MB pages where [p, p + bytes) holds whole ones. Advice only: does nothing to pages already there.
inline void advise_huge_pages(void* p, size_t bytes) {
  constexpr uintptr_t huge = uintptr_t(2) << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(p) + huge - 1) / huge * huge,
                  end = (reinterpret_cast<uintptr_t>(p) + bytes) / huge * huge;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace pt
