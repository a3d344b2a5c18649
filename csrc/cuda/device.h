// SPDX-License-Identifier: Apache-2.0
// Device queries for the bindings, which are plain C++ and include no CUDA header. Implemented by
// device.cu and, for the emulator, by csrc/emulator/host.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pt::cuda {

// Makes a device and its primary context current in this thread for the guard's lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(int64_t device);
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  void* previous_;  // context to restore; may be null
  bool changed_;
};

// Return why this library's kernels cannot run on the device, or "". Queries the driver's version
// and a small kernel's attributes, because a driver may be older than the library's CUDA runtime.
std::string why_not_device(int64_t device);

// Return the number of SMs of the current device.
int multiprocessors();

// Return true if the current device runs the sm_90a kernels and this library contains them.
// PYTRANSFORMER_CUDA_PATH=portable disables them; the emulator enables them only with
// PYTRANSFORMER_CUDA_PATH=sm90.
bool runs_sm90a();

// Registers memory that the next launches may access, for the emulator's checks, until the object
// is destroyed. Does nothing on a GPU.
class Reachable {
 public:
  Reachable();
  Reachable(const Reachable&) = delete;
  ~Reachable();
  void add(const void* base, size_t bytes, const char* name);

 private:
  void* kept_;
};

}  // namespace pt::cuda
