// SPDX-License-Identifier: Apache-2.0
// Reports if the CUDA kernels can run on a device. Each op registers itself in its binding.
#include "cuda/device.h"

#include <torch/csrc/stable/library.h>

namespace {

std::string cuda_why_not_device(int64_t device) { return pt::cuda::why_not_device(device); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def("cuda_why_not_device(int device) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl("cuda_why_not_device", TORCH_BOX(&cuda_why_not_device));
}
