// SPDX-License-Identifier: Apache-2.0
// Launches of kernels, on a GPU and in the emulator. Never synchronises.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/ptx/platform.cuh"

#if defined(PT_EMULATE)
#include "emulator/host.h"
#endif

namespace pt::cuda {

// Runs kernel(arguments...) on the current device, in order with the stream. Throws std::runtime_error with CUDA's message, or, emulated,
// with that of the emulator.
template <class... P>
void launch(void (*kernel)(P...), dim3 grid, int threads, uint32_t smem_bytes, [[maybe_unused]] void* stream, const P&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // no sequences, say: nothing to do, which CUDA takes for an error
#if defined(PT_EMULATE)
  emu::run(grid, threads, smem_bytes, [&] { kernel(arguments...); });
#else
  constexpr uint32_t kWithoutAsking = 48 * 1024;  // of dynamic shared memory
  cudaError_t error = cudaSuccess;
  if (smem_bytes > kWithoutAsking) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem_bytes));
  if (error == cudaSuccess) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), pointers, smem_bytes,
                             static_cast<cudaStream_t>(stream));
  }
  if (error != cudaSuccess) throw std::runtime_error(std::string("a kernel could not be launched: ") + cudaGetErrorString(error));
#endif
}

}  // namespace pt::cuda
