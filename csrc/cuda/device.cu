// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cuda/driver.h"

namespace pt::cuda {

constexpr int kMaxDevices = 64;  // devices with cached attributes

static void check(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}
static void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(std::string(what) + " failed: CUDA error " +
                             std::to_string(int(result)));
}

// Return the device's primary context, which PyTorch's runtime also uses. Retained forever.
static CUcontext primary_context(int device) {
  // concurrent first calls store the same value
  static std::atomic<CUcontext> contexts[kMaxDevices];
  if (device < 0 || device >= kMaxDevices)
    throw std::runtime_error("no device " + std::to_string(device));
  if (CUcontext known = contexts[device]) return known;
  static const auto get = driver_function<decltype(&cuDeviceGet)>("cuDeviceGet", 2000);
  static const auto retain =
      driver_function<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain", 7000);
  CUdevice handle;
  CUcontext context;
  check(get(&handle, device), "cuDeviceGet");
  check(retain(&context, handle), "cuDevicePrimaryCtxRetain");
  return contexts[device] = context;
}

static CUresult set_context(CUcontext context) {
  static const auto set = driver_function<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent", 4000);
  return set(context);
}

// A thread without an earlier CUDA call (an autograd thread, for example) has no context, and the
// driver encodes no tensor map without one. cudaSetDevice is unsuitable: restoring such a thread's
// device would create a context on GPU 0. Graph capture allows both driver calls.
DeviceGuard::DeviceGuard(int64_t device) {
  static const auto current = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent", 4000);
  const CUcontext wanted = primary_context(int(device));
  CUcontext previous;
  check(current(&previous), "cuCtxGetCurrent");
  previous_ = previous;
  changed_ = previous != wanted;
  if (changed_) check(set_context(wanted), "cuCtxSetCurrent");
}

DeviceGuard::~DeviceGuard() {
  if (changed_) set_context(static_cast<CUcontext>(previous_));
}

static __global__ void probe_kernel() {}

static std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string why_not_device(int64_t device) {
  int driver = 0, runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  // The runtime returns no version for some outdated drivers and for a missing driver.
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
    return "there is no NVIDIA driver, or one too old for CUDA " + version_text(runtime) +
           ", which the CUDA library was built with: update it";
  if (driver / 1000 < runtime / 1000)
    return "the NVIDIA driver is for CUDA " + version_text(driver) +
           ", and the CUDA library was built with " + version_text(runtime) + ": update the driver";
  try {
    const DeviceGuard guard(device);
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel)));
  } catch (const std::exception& error) {
    cudaGetLastError();  // reported here, not by the next launch
    return std::string("the CUDA library's kernels do not load: ") + error.what();
  }
  return "";
}

// Return a positive attribute of the current device.
template <cudaDeviceAttr Attribute>
static int attribute() {
  static int values[kMaxDevices];  // 0: not queried; concurrent first calls store the same value
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
  return attribute<cudaDevAttrComputeCapabilityMajor>() == 9;  // 9.0 is the only 9.x
#else
  return false;
#endif
}

Reachable::Reachable() : kept_(nullptr) {}
Reachable::~Reachable() = default;
void Reachable::add(const void*, size_t, const char*) {}

}  // namespace pt::cuda
