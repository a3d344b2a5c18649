#include "cuda/device.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace pt::cuda {

static void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

DeviceGuard::DeviceGuard(int64_t device) {
  check(cudaGetDevice(&previous_));
  if (previous_ == device) {
    previous_ = -1;
  } else {
    check(cudaSetDevice(int(device)));
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

int multiprocessors() {
  constexpr int kMaxDevices = 64;
  static int counts[kMaxDevices];  // 0: not asked yet; two threads that ask at once write the same number
  int device, count;
  check(cudaGetDevice(&device));
  if (device < kMaxDevices && counts[device]) return counts[device];
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kMaxDevices) counts[device] = count;
  return count;
}

Reachable::Reachable() : kept_(nullptr) {}
Reachable::~Reachable() = default;
void Reachable::add(const void*, size_t, const char*) {}

}  // namespace pt::cuda
