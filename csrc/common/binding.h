// SPDX-License-Identifier: Apache-2.0
// Shared by the torch bindings of all backends. Stable ABI only; no kernel includes this.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
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
      STD_TORCH_CHECK(false, name, " has dtype number ", int(t.scalar_type()),
                      "; expected float32, bfloat16",
                      float64 == Float64::taken ? ", float16 or float64" : " or float16");
  }
}

// Return the bytes from a tensor's first element to the end of its last. One call reads all sizes,
// because each call adds nanoseconds to every op.
inline int64_t extent_of(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return (last + 1) * int64_t(t.element_size());
}

// Raise unless the storage holds every element. A freed storage has no bytes, but the tensor keeps
// its shape, and the address of a view with an offset is not null.
inline void check_storage(const char* op, const Tensor& t, const char* name) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  const int64_t extent = extent_of(t);
  if (extent == 0) return;
  const int64_t needed = t.storage_offset() * int64_t(t.element_size()) + extent;
  STD_TORCH_CHECK(bytes > 0, op, ": ", name,
                  " has no storage: it was freed (FSDP2 reshard, or untyped_storage().resize_(0)); "
                  "keep it allocated until backward has run");
  STD_TORCH_CHECK(needed <= bytes, op, ": ", name, " must have a storage of at least ", needed,
                  " bytes, got ", bytes, "; its storage was resized");
}

// Return the address of a tensor whose storage holds every element, or null if it has no elements.
inline const void* read_address(const char* op, const Tensor& t, const char* name) {
  check_storage(op, t, name);
  return t.const_data_ptr();  // not mutable_data_ptr: it copies a copy-on-write tensor
}
inline void* write_address(const char* op, const Tensor& t, const char* name) {
  check_storage(op, t, name);
  return t.mutable_data_ptr();
}

// Read a dropout seed on the host.
inline uint64_t seed_of(const char* op, const MaybeTensor& seed) {
  STD_TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long, op,
                  ": dropout_seed must be one int64; dropout needs it");
  return *static_cast<const uint64_t*>(read_address(op, *seed, "dropout_seed"));
}

// Raise unless the index of a first row, column, head or batch element leaves room for sums.
inline void check_start(const char* op, int64_t start, const char* name) {
  STD_TORCH_CHECK(start >= 0 && start < int64_t(1) << 48, op, ": ", name,
                  " must be between 0 and 2^48 - 1, got ", start);
}

// Raise unless the sizes are positive and the bytes of any two-dimensional product fit in 62 bits.
inline void check_sizes(const char* op, std::initializer_list<int64_t> sizes) {
  int64_t largest = 1, second = 1;
  for (int64_t size : sizes) {
    STD_TORCH_CHECK(size > 0, op, ": sizes must be positive, got ", size, "; nothing to compute");
    if (size > largest) second = largest, largest = size;
    else if (size > second) second = size;
  }
  STD_TORCH_CHECK(largest <= (int64_t(1) << 58) / second, op, ": a matrix of ", largest, " x ",
                  second, " must have at most 2^58 elements");
}

// Return the dropout probability in units of 1 / 65536, rounded half to even: 65536 drops
// everything.
inline uint32_t drop_threshold_of(double p) {
  STD_TORCH_CHECK(p >= 0 && p <= 1, "dropout_p is ", p, "; expected between 0 and 1");
  return uint32_t(std::nearbyint(65536 * p));
}

}  // namespace pt
