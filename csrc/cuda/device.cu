#include "cuda/device.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace pt::cuda {

static void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

DeviceGuard::DeviceGuard(int64_t device) {
  check(cudaGetDevice(&previous_));
  // Also where it is current already: a thread that has made no CUDA call yet, as one of autograd's, has no context, without which the
  // driver encodes no tensor map. This gives it the device's; a capture of a graph does not mind.
  check(cudaSetDevice(int(device)));
  if (previous_ == device) previous_ = -1;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

// Of the current device; positive.
template <cudaDeviceAttr Attribute>
static int attribute() {
  constexpr int kMaxDevices = 64;
  static int values[kMaxDevices];  // 0: not asked yet; two threads that ask at once write the same number
  int device, value;
  check(cudaGetDevice(&device));
  if (device < kMaxDevices && values[device]) return values[device];
  check(cudaDeviceGetAttribute(&value, Attribute, device));
  if (device < kMaxDevices) values[device] = value;
  return value;
}

int multiprocessors() { return attribute<cudaDevAttrMultiProcessorCount>(); }

bool runs_sm90a() {
#if defined(PT_BUILT_SM90A)
  const char* path = std::getenv("PYTRANSFORMER_CUDA_PATH");
  if (path && std::string(path) == "portable") return false;
  return attribute<cudaDevAttrComputeCapabilityMajor>() == 9;  // there is no 9.x but 9.0
#else
  return false;
#endif
}

Reachable::Reachable() : kept_(nullptr) {}
Reachable::~Reachable() = default;
void Reachable::add(const void*, size_t, const char*) {}

}  // namespace pt::cuda
