// SPDX-License-Identifier: Apache-2.0
#include "cuda/rotary/append.cuh"
#include "cuda/rotary/launch.cuh"

namespace pt::cuda {

void rotary_forward(const RotaryProblem& p, const RotaryForward& f, const RotaryPlan& plan,
                    void* stream) {
  if (!plan.whole) return launch_rotary(rotary_fwd_kernel<AnyRows>, plan, stream, p, f);
  with_rows(p.dtype, [&](auto t) {
    launch_rotary(rotary_fwd_kernel<WholeRows<decltype(t)>>, plan, stream, p, f);
  });
}

void append_kv(const RotaryProblem& p, const AppendKV& f, const RotaryPlan& plan, void* stream) {
  if (!plan.whole) return launch_rotary(rotary_append_kernel<AnyRows>, plan, stream, p, f);
  with_rows(p.dtype, [&](auto t) {
    launch_rotary(rotary_append_kernel<WholeRows<decltype(t)>>, plan, stream, p, f);
  });
}

}  // namespace pt::cuda
