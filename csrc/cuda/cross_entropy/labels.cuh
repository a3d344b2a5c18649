// What forward and backward share: where a row's target is.
#pragma once

#include "cuda/cross_entropy/problem.h"
#include "cuda/matmul/epilogue.cuh"
#include "cuda/tile/numbers.cuh"

namespace pt::cuda {

PT_DEVICE int64_t target_of(const Labels& labels, int64_t row) { return int64_t(ptx::ld_global_u64(labels.target + row)); }

// The class as one that exists: values are checked elsewhere, here no address leaves the row.
PT_DEVICE int64_t clamped(int64_t target, int64_t classes) { return target < 0 ? 0 : target < classes ? target : classes - 1; }

}  // namespace pt::cuda
