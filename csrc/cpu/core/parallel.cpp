// SPDX-License-Identifier: Apache-2.0
#include "cpu/core/parallel.h"

#include <torch/csrc/stable/ops.h>

namespace pt {

void run_workers(int64_t workers, void (*fn)(void*), void* ctx) {
  torch::stable::parallel_for(0, workers, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) fn(ctx);
  });
}

int pool_threads() { return int(torch::stable::get_num_threads()); }

}  // namespace pt
