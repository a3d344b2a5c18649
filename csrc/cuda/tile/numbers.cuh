// SPDX-License-Identifier: Apache-2.0
// Constants of kernels with exponentials.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f,
                kFloatMax = 3.4028234663852886e38f;

PT_DEVICE float minus_infinity() { return ptx::bits_float(0xff800000u); }
PT_DEVICE float infinity() { return ptx::bits_float(0x7f800000u); }

}  // namespace pt::cuda
