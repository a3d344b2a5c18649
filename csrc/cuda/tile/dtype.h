// The element types of the kernels' tensors, as data.
#pragma once

#include <cstdint>

namespace pt::cuda {

enum class DType : int32_t { f32, bf16, f16 };

constexpr int size_of(DType t) { return t == DType::f32 ? 4 : 2; }

}  // namespace pt::cuda
