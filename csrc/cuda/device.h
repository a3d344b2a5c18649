// SPDX-License-Identifier: Apache-2.0
// What the bindings need of the device. No CUDA header: bindings are plain C++. Implemented by device.cu, and for the emulator by
// csrc/emulator/host.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pt::cuda {

// Makes a device current while it lives, and its context that of the thread.
class DeviceGuard {
 public:
  explicit DeviceGuard(int64_t device);
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  void* previous_;  // context; null: the thread had none, and shall have none again
  bool changed_;
};

// Why kernels of this library cannot run on the device, or nothing. Asks for the driver's version and a small kernel's attributes: a driver
// may be older than the CUDA runtime that is part of the library.
std::string why_not_device(int64_t device);

// Of the current device.
int multiprocessors();

// Whether the current device runs the kernels for sm_90a, and this library has them. PYTRANSFORMER_CUDA_PATH=portable says no; the emulator
// says yes to PYTRANSFORMER_CUDA_PATH=sm90 only.
bool runs_sm90a();

// Memory that the next launches may reach, for the emulator; nothing on a GPU. Holds until the object's end.
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
