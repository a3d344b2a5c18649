// SPDX-License-Identifier: Apache-2.0
#include "cpu/core/arena.h"

namespace pt {

int64_t arena_bytes = 0;

}  // namespace pt
