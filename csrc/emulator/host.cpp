// SPDX-License-Identifier: Apache-2.0
// Replacement of csrc/cuda/device.cu.
#include "emulator/host.h"

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device.h"

namespace emu {

Options& options() {
  static Options current;
  return current;
}

static uint64_t of_warps = 0, of_warpgroups = 0;
uint64_t products(bool warps) { return warps ? of_warps : of_warpgroups; }

void run(dim3 grid, int threads, size_t smem_bytes, const std::function<void()>& kernel) {
  const Report report = launch(grid, {unsigned(threads)}, smem_bytes, kernel, options());
  of_warps += report.products, of_warpgroups += report.warpgroup_products;
  const uint64_t seed = options().seed++;
  if (!report.error.empty())
    throw std::runtime_error("emulator, schedule " + std::to_string(seed) + ": " + report.error);
}

}  // namespace emu

namespace pt::cuda {

DeviceGuard::DeviceGuard(int64_t) : previous_(nullptr), changed_(false) {}
DeviceGuard::~DeviceGuard() = default;

int multiprocessors() { return 2; }  // few, so that persistent blocks run several tiles

bool runs_sm90a() {
  const char* path = std::getenv("PYTRANSFORMER_CUDA_PATH");
  return path && std::string(path) == "sm90";
}

using Kept = std::vector<std::unique_ptr<emu::GlobalMemory>>;
Reachable::Reachable() : kept_(new Kept) {}
Reachable::~Reachable() { delete static_cast<Kept*>(kept_); }
void Reachable::add(const void* base, size_t bytes, const char* name) {
  static_cast<Kept*>(kept_)->push_back(std::make_unique<emu::GlobalMemory>(base, bytes, name));
}

}  // namespace pt::cuda
