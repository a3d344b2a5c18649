// SPDX-License-Identifier: Apache-2.0
#include "cuda/rotary/bwd.cuh"
#include "cuda/rotary/launch.cuh"

namespace pt::cuda {

void rotary_backward(const RotaryProblem& p, const RotaryBackward& f, const RotaryPlan& plan,
                     void* stream) {
  if (!plan.whole) return launch_rotary(rotary_bwd_any_kernel<AnyRows>, plan, stream, p, f);
  with_rows(p.dtype,
            [&](auto t) { launch_rotary(rotary_bwd_kernel<decltype(t)>, plan, stream, p, f); });
}

}  // namespace pt::cuda
