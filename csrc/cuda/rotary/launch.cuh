// SPDX-License-Identifier: Apache-2.0
// Launches of the rotary kernels.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/rotary/kernels.h"

namespace pt::cuda {

// Call f(T{}) for the element type of full rows.
template <class F>
void with_rows(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(ptx::bf16{});
    case DType::f16: return f(ptx::f16{});
    case DType::f64: return;  // rejected by the binding
  }
}

template <class Arguments>
void launch_rotary(void (*kernel)(RotaryProblem, Arguments), const RotaryPlan& plan, void* stream,
                   const RotaryProblem& p, const Arguments& arguments) {
  launch(kernel, dim3(unsigned(plan.blocks)), kRotaryThreads, plan.smem_bytes, stream, p,
         arguments);
}

}  // namespace pt::cuda
