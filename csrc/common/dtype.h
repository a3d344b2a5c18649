// SPDX-License-Identifier: Apache-2.0
// The element types of the kernels' tensors, as data.
#pragma once

#include <cstdint>

namespace pt {

// f64 is for the CPU alone; the CUDA backend's binding refuses it.
enum class DType : int32_t { f32, bf16, f16, f64 };

constexpr int size_of(DType t) { return t == DType::f32 ? 4 : t == DType::f64 ? 8 : 2; }

// What the rows of a cache are stored as: the dtype of the query, or numbers of eight bits, with a float32 scale for each row.
enum class EightBits : int32_t { none, int8, e4m3 };

}  // namespace pt
