#include "cpu/core/arena.h"

namespace pt {

int64_t arena_bytes = 0;

}  // namespace pt
