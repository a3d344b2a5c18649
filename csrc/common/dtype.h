// SPDX-License-Identifier: Apache-2.0
// Element types of the kernels' tensors.
#pragma once

#include <cstdint>

namespace pt {

// f64 is CPU only: the CUDA binding refuses it.
enum class DType : int32_t { f32, bf16, f16, f64 };

constexpr int size_of(DType t) { return t == DType::f32 ? 4 : t == DType::f64 ? 8 : 2; }

// Storage of a KV cache: the query's dtype, or 8-bit numbers with one float32 scale per row.
enum class EightBits : int32_t { none, int8, e4m3 };

}  // namespace pt
