// SPDX-License-Identifier: Apache-2.0
// Creates TMA tensor maps on the host, for a GPU and for the emulator.
#pragma once

#include <stdexcept>
#include <string>

#include "common/dtype.h"
#include "cuda/ptx/platform.cuh"

#if !defined(PT_EMULATE)
#include "cuda/driver.h"
#endif

namespace pt::cuda {

constexpr int kMaxMapRank = 5;
constexpr uint32_t kMapColumns = 64;  // usual box width: 128 bytes, the swizzle's row

// A tensor of 16-bit elements, innermost dimension first. Strides are in elements; stride[0] is 1.
struct MappedTensor {
  const void* data;
  DType dtype;
  int rank;
  uint64_t dim[kMaxMapRank], stride[kMaxMapRank];
};

constexpr uint32_t kMaxBoxRows = 256;

// Return why TMA cannot read the tensor, or null. Source: CUDA driver API, cuTensorMapEncodeTiled.
inline const char* why_not_mapped(const MappedTensor& t) {
  if (t.rank < 2 || t.rank > kMaxMapRank) return "it has not 2 to 5 dimensions";
  if (size_of(t.dtype) != 2) return "its elements have not 16 bits";
  if (reinterpret_cast<uintptr_t>(t.data) % 16)
    return "it does not begin at a multiple of 16 bytes";
  for (int i = 0; i < t.rank; ++i) {
    if (t.dim[i] == 0 || t.dim[i] > uint64_t(1) << 32)
      return "a dimension is empty or has more than 2^32 elements";
    if (i && t.dim[i] > 1 &&
        (t.stride[i] == 0 || t.stride[i] % 8 || t.stride[i] >= uint64_t(1) << 39))
      return "a stride is no multiple of 16 bytes, zero, or 2^40 bytes long";
  }
  return nullptr;
}

// Encode boxes of `columns` elements by `rows` of dimension 1. In shared memory rows of 128 bytes
// are swizzled, shorter ones are not; elements outside the tensor are zero. Throws
// std::runtime_error.
inline ptx::TensorMap tensor_map(const MappedTensor& t, uint32_t rows,
                                 uint32_t columns = kMapColumns) {
  if (rows == 0 || rows > kMaxBoxRows)
    throw std::runtime_error("no box of a tensor map has " + std::to_string(rows) + " rows");
  if (const char* reason = why_not_mapped(t))
    throw std::runtime_error(std::string("no tensor map can be made of a tensor: ") + reason);
  uint64_t bytes[kMaxMapRank] = {};  // byte strides
  uint32_t box[kMaxMapRank];
  for (int i = 0; i < t.rank; ++i) {
    bytes[i] = i && t.dim[i] > 1 ? t.stride[i] * 2 : 16;
    box[i] = i == 0 ? columns : i == 1 ? rows : 1;
  }
  ptx::TensorMap map{};
#if defined(PT_EMULATE)
  map.base = static_cast<const uint8_t*>(t.data);
  map.elem_bytes = 2;
  map.rank = t.rank;
  map.swizzle = columns == kMapColumns ? emu::Swizzle::B128 : emu::Swizzle::None;
  for (int i = 0; i < t.rank; ++i)
    map.dim[i] = t.dim[i], map.stride[i] = bytes[i], map.box[i] = box[i];
#else
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  const uint32_t steps[kMaxMapRank] = {1, 1, 1, 1, 1};
  const CUresult result = encode(
      &map,
      t.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      uint32_t(t.rank), const_cast<void*>(t.data), t.dim, bytes + 1, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      columns == kMapColumns ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(int(result)));
#endif
  return map;
}

}  // namespace pt::cuda
