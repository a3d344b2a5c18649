// SPDX-License-Identifier: Apache-2.0
// The host side of the CUDA backend (device.cu, launch.cuh, tensor_map.cuh) against a runtime and a
// driver implemented here, without a GPU: prints "ok" or "FAIL" and the name of each expectation.
// Built by nvcc without its runtime: test_host_layer.py.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.cuh"

// ---- state of the stubs, and recorded calls

namespace {

struct Machine {
  int driver = 13000;
  cudaError_t load = cudaSuccess, launch = cudaSuccess, attribute = cudaSuccess;
  bool has_maps = true;
} machine;

std::vector<std::string> calls;  // since the last expectation
CUcontext current = nullptr;
CUtensorMapDataType map_type;
std::vector<uint64_t> map_numbers;  // rank, dims, strides, box

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(intptr_t(0x100 + device)); }
void say(const std::string& text) { calls.push_back(text); }

CUresult device_get(CUdevice* handle, int ordinal) { return *handle = ordinal, CUDA_SUCCESS; }
CUresult retain(CUcontext* context, CUdevice device) {
  say("retain " + std::to_string(device));
  return *context = context_of(device), CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) { return *context = current, CUDA_SUCCESS; }
CUresult set_current(CUcontext context) {
  say("set " + std::to_string(intptr_t(context)));
  return current = context, CUDA_SUCCESS;
}
CUresult encode(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank, void*,
                const cuuint64_t* dim, const cuuint64_t* stride, const cuuint32_t* box,
                const cuuint32_t* step, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  map_type = type, map_numbers = {rank};
  for (unsigned i = 0; i < rank; ++i) map_numbers.push_back(dim[i]);
  for (unsigned i = 0; i + 1 < rank; ++i) map_numbers.push_back(stride[i]);
  for (unsigned i = 0; i < rank; ++i) map_numbers.push_back(box[i]);
  // Check the arguments by the driver's documentation.
  bool good = rank >= 1 && rank <= 5 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
              fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && box[0] * 2 <= 128;
  for (unsigned i = 0; i < rank; ++i)
    good &=
        box[i] >= 1 && box[i] <= 256 && step[i] == 1 && dim[i] >= 1 && dim[i] <= uint64_t(1) << 32;
  for (unsigned i = 0; i + 1 < rank; ++i)
    good &= stride[i] % 16 == 0 && stride[i] > 0 && stride[i] < uint64_t(1) << 40;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

#if !defined(__CUDA_ARCH__)
extern "C" {
cudaError_t cudaDriverGetVersion(int* v) { return *v = machine.driver, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorNoKernelImageForDevice ? "no kernel image" : "some error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) {
  return *d = current ? int(intptr_t(current)) - 0x100 : 0, cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  say("cudaSetDevice");
  return current = context_of(d), cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  return *v = a == cudaDevAttrMultiProcessorCount ? 100 + d : 9, cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  return say("attributes"), machine.load;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int v) {
  return say("shared " + std::to_string(v)), machine.attribute;
}
cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void** arguments, size_t smem,
                             cudaStream_t stream) {
  say("launch " + std::to_string(grid.x) + "x" + std::to_string(grid.y) + " of " +
      std::to_string(block.x) + ", " + std::to_string(smem) + " bytes, stream " +
      std::to_string(intptr_t(stream)) + ", " + std::to_string(*static_cast<int*>(arguments[0])));
  return machine.launch;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::pair<const char*, void*> known[] = {
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(set_current)},
      {"cuTensorMapEncodeTiled", machine.has_maps ? reinterpret_cast<void*>(encode) : nullptr}};
  *entry = nullptr;
  for (const auto& [their, function] : known)
    if (!std::strcmp(their, name)) *entry = function;
  *found = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
// Functions with which nvcc's code registers kernels.
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
char __cudaInitModule(void**) { return 0; }
}
#endif

namespace {

using namespace pt;

int failures = 0;

void expect(const char* name, bool good) {
  failures += !good;
  std::printf("%s %s", good ? "ok  " : "FAIL", name);
  if (!good)
    for (const std::string& call : calls) std::printf(" [%s]", call.c_str());
  std::printf("\n");
  calls.clear();
}

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const std::exception& error) { return error.what(); }
  return "";
}
bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
using Calls = std::vector<std::string>;

void contexts() {
  {
    const cuda::DeviceGuard guard(1);
    expect("a thread without a context gets the device's",
           current == context_of(1) && calls == Calls{"retain 1", "set 257"});
    expect("the device's facts are asked for", cuda::multiprocessors() == 101);
  }
  expect("and has none again, of GPU 0 neither", current == nullptr && calls == Calls{"set 0"});
  current = context_of(2);
  { const cuda::DeviceGuard guard(1); }
  expect("another device's context comes back",
         current == context_of(2) && calls == Calls{"set 257", "set 258"});
  current = context_of(1);
  { const cuda::DeviceGuard guard(1); }
  expect("the device's own costs no call", current == context_of(1) && calls.empty());
  expect("a device that is not there",
         has(error_of([] { const cuda::DeviceGuard guard(64); }), "no device 64"));
}

void probe() {
  expect("a driver that can", cuda::why_not_device(1).empty() && calls == Calls{"attributes"});
  machine.driver = 12080;
  expect("a driver too old", cuda::why_not_device(1) ==
                                     "the NVIDIA driver is for CUDA 12.8, and the CUDA library was "
                                     "built with 13.0: update the driver" &&
                                 calls.empty());
  machine.driver = 0;
  expect("no driver",
         cuda::why_not_device(1).find("there is no NVIDIA driver, or one too old for CUDA") == 0);
  machine.driver = 13020, machine.load = cudaErrorNoKernelImageForDevice;
  expect("kernels that do not load",
         has(cuda::why_not_device(1), "do not load: CUDA: no kernel image"));
  machine = {};
}

__global__ void kernel(int) {}

void launches() {
  void* const stream = reinterpret_cast<void*>(7);
  cuda::launch(kernel, dim3(3, 2), 128, 1000, stream, 42);
  expect("a launch in its stream", calls == Calls{"launch 3x2 of 128, 1000 bytes, stream 7, 42"});
  cuda::launch(kernel, dim3(1), 32, 200000, stream, 1);
  expect("much shared memory is asked for first",
         calls == Calls{"shared 200000", "launch 1x1 of 32, 200000 bytes, stream 7, 1"});
  const auto shared = [&](uint32_t bytes) { cuda::launch(kernel, dim3(1), 32, bytes, stream, 1); };
  shared(200000), shared(60000);
  expect("once per kernel and device, while it suffices", calls.size() == 2);
  shared(220000);
  expect("more is requested", calls.size() == 2 && calls[0] == "shared 220000");
  cudaSetDevice(2);
  calls.clear();
  shared(60000);
  expect("another device is asked too", calls.size() == 2 && calls[0] == "shared 60000");
  machine.attribute = cudaErrorInvalidValue;
  expect("a request refused",
         has(error_of([&] { shared(230000); }), "could not be launched: some error"));
  machine.attribute = cudaSuccess;
  calls.clear();
  shared(230000);
  expect("a refused request is repeated", calls.size() == 2 && calls[0] == "shared 230000");
  cuda::launch(kernel, dim3(0), 32, 0, stream, 1);
  expect("no blocks, no launch", calls.empty());
  machine.launch = cudaErrorInvalidValue;
  expect("a launch refused", has(error_of([&] { cuda::launch(kernel, dim3(1), 32, 0, stream, 1); }),
                                 "could not be launched: some error"));
  machine = {};
}

void maps() {
  alignas(16) static uint16_t data[8];
  using Numbers = std::vector<uint64_t>;
  const auto map = [](cuda::MappedTensor t, uint32_t rows) {
    return error_of([&] { cuda::tensor_map(t, rows); });
  };
  const cuda::MappedTensor good{data, pt::DType::bf16, 4, {72, 100, 3, 2}, {1, 216, 72, 21600}};
  machine.has_maps = false;
  expect("a driver without tensor maps",
         has(map(good, 64), "no cuTensorMapEncodeTiled: it is older than CUDA 12"));
  machine = {};
  expect("a tensor map",
         map(good, 128).empty() && map_type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 &&
             map_numbers == Numbers{4, 72, 100, 3, 2, 432, 144, 43200, 64, 128, 1, 1});
  cuda::MappedTensor t = good;
  t.dtype = pt::DType::f16, t.dim[3] = 1, t.stride[3] = 5;
  expect("a stride that nobody steps", map(t, 256).empty() &&
                                           map_type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 &&
                                           map_numbers[7] == 16);
  for (const uint32_t rows : {0u, 257u})
    expect("a box too high or without rows", has(map(good, rows), "no box of a tensor map has"));
  const auto refused = [&](const char* reason, auto change) {
    cuda::MappedTensor wrong = good;
    change(wrong);
    expect(reason, has(map(wrong, 64), reason));
  };
  refused("2 to 5 dimensions", [](auto& w) { w.rank = 1; });
  refused("not 16 bits", [](auto& w) { w.dtype = pt::DType::f32; });
  refused("begin at a multiple of 16", [](auto& w) { w.data = data + 1; });
  refused("a dimension is empty", [](auto& w) { w.dim[2] = 0; });
  refused("a stride is no multiple of 16 bytes", [](auto& w) { w.stride[1] = 217; });
  refused("a stride is no multiple of 16 bytes, zero", [](auto& w) { w.stride[2] = 0; });
}

}  // namespace

int main() {
  contexts();
  probe();
  launches();
  maps();
  return failures != 0;
}
