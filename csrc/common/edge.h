// SPDX-License-Identifier: Apache-2.0
// What the torch edges of the tiers share: tensors in, plain data out. Stable ABI only; no kernel includes this.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>

#include "common/dtype.h"

namespace pt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

enum class Float64 { refused, taken };

inline DType dtype_of(const Tensor& t, const char* name, Float64 float64) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Double:
      if (float64 == Float64::taken) return DType::f64;
      [[fallthrough]];
    default:
      STD_TORCH_CHECK(false, name, " has dtype number ", int(t.scalar_type()), "; wanted float32, bfloat16",
                      float64 == Float64::taken ? ", float16 or float64" : " or float16");
  }
}

// The probability of dropout in units of 1 / 65536, half to even: 0 drops nothing, 65536 everything.
inline uint32_t drop_threshold_of(double p) {
  STD_TORCH_CHECK(p >= 0 && p <= 1, "dropout_p is ", p, "; wanted between 0 and 1");
  return uint32_t(std::nearbyint(65536 * p));
}

}  // namespace pt
