// SPDX-License-Identifier: Apache-2.0
// Looks up functions of the CUDA driver by name. The library does not link to libcuda, so it also
// loads on machines without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace pt::cuda {

// Return the function as of CUDA `version` (12000 for 12.0). Throws std::runtime_error.
template <class F>
F driver_function(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  if (found != cudaDriverEntryPointSuccess || !entry)
    throw std::runtime_error("the driver has no " + std::string(name) + ": it is older than CUDA " +
                             std::to_string(version / 1000));
  return reinterpret_cast<F>(entry);
}

}  // namespace pt::cuda
