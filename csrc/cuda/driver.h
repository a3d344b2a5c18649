// SPDX-License-Identifier: Apache-2.0
// Functions of the CUDA driver, asked for by name: the library does not link to libcuda, so that it loads where there is none.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace pt::cuda {

// As CUDA `version` has it, 12000 for 12.0. Throws std::runtime_error.
template <class F>
F driver_function(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  if (found != cudaDriverEntryPointSuccess || !entry)
    throw std::runtime_error("the driver has no " + std::string(name) + ": it is older than CUDA " + std::to_string(version / 1000));
  return reinterpret_cast<F>(entry);
}

}  // namespace pt::cuda
