// SPDX-License-Identifier: Apache-2.0
// Helpers of the CUDA bindings: the names of raw ops, and checked access to tensors.
//
// A binding is compiled twice: for libpytransformer_cuda.so, and with PT_EMULATE, where the same
// ops accept CPU tensors and run in the emulator.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/binding.h"
#include "cuda/device.h"

#if defined(PT_EMULATE)
#define PT_EDGE_OP(name) "emulated_" name
#define PT_EDGE_KEY CPU
#else
#define PT_EDGE_OP(name) "cuda_" name
#define PT_EDGE_KEY CUDA
#endif

namespace pt::cuda {

using pt::drop_threshold_of;
using pt::DType;
using pt::EightBits;
using pt::MaybeTensor;
using pt::ScalarType;
using pt::Tensor;

inline DType dtype_of(const Tensor& t, const char* name) {
  return pt::dtype_of(t, name, Float64::refused);
}

inline EightBits eight_bits_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Char: return EightBits::int8;
    case ScalarType::Float8_e4m3fn: return EightBits::e4m3;
    default: return EightBits::none;
  }
}

// Return the tensor's memory and register it as readable (or writable) by the next kernels.
inline const void* read_from(const char* op, const Tensor& t, const char* name,
                             Reachable& reachable) {
  const void* data = read_address(op, t, name);
  reachable.add(data, size_t(extent_of(t)), name);
  return data;
}
inline void* write_to(const char* op, const Tensor& t, const char* name, Reachable& reachable) {
  void* data = write_address(op, t, name);
  reachable.add(data, size_t(extent_of(t)), name);
  return data;
}

}  // namespace pt::cuda
