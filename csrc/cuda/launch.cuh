// SPDX-License-Identifier: Apache-2.0
// Launches kernels on a GPU or in the emulator, without synchronization.
#pragma once

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/ptx/platform.cuh"

#if defined(PT_EMULATE)
#include "emulator/host.h"
#endif

namespace pt::cuda {

#if !defined(PT_EMULATE)
// Allow a kernel this much dynamic shared memory on the current device. CUDA stores the attribute,
// so each kernel and device needs only its largest request: cudaFuncSetAttribute costs 0.5 us per
// launch.
inline cudaError_t allow_shared_memory(const void* kernel, uint32_t bytes) {
  static std::mutex mutex;
  // never destroyed: outlives every thread
  static auto* const allowed = new std::map<std::pair<const void*, int>, uint32_t>;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  uint32_t& known = (*allowed)[{kernel, device}];
  if (bytes <= known) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error == cudaSuccess) known = bytes;
  return error;
}
#endif

// Run kernel(arguments...) on the current device in stream order. Throws std::runtime_error with
// the message of CUDA or of the emulator.
template <class... P>
void launch(void (*kernel)(P...), dim3 grid, int threads, uint32_t smem_bytes,
            [[maybe_unused]] void* stream, const P&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // CUDA rejects an empty grid
#if defined(PT_EMULATE)
  emu::run(grid, threads, smem_bytes, [&] { kernel(arguments...); });
#else
  // bytes of dynamic shared memory available by default
  constexpr uint32_t kWithoutAsking = 48 * 1024;
  cudaError_t error = cudaSuccess;
  if (smem_bytes > kWithoutAsking)
    error = allow_shared_memory(reinterpret_cast<const void*>(kernel), smem_bytes);
  if (error == cudaSuccess) {
    void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
    error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), pointers,
                             smem_bytes, static_cast<cudaStream_t>(stream));
  }
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("a kernel could not be launched: ") +
                             cudaGetErrorString(error));
#endif
}

}  // namespace pt::cuda
