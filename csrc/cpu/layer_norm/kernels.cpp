// SPDX-License-Identifier: Apache-2.0
// Layer norm for one instruction set: select the template by dtypes. Compiled once per set, with
// PT_ISA defined.
#include "cpu/layer_norm/bwd.h"
#include "cpu/layer_norm/fwd.h"

namespace pt {
namespace PT_ISA {
namespace {

// Call f(traits of x, traits of the residual stream).
template <class F>
void for_dtypes(DType x, DType residual, const F& f) {
  const auto with = [&](auto first) {
    switch (residual) {
      case DType::bf16: return f(first, Float<bf16>());
      case DType::f16: return f(first, Float<f16>());
      default: return f(first, Float<float>());
    }
  };
  switch (x) {
    case DType::f64: return f(Double(), Double());
    case DType::bf16: return with(Float<bf16>());
    case DType::f16: return with(Float<f16>());
    case DType::f32: return with(Float<float>());
  }
}

void forward(const NormProblem& p, const NormForward& f) {
  for_dtypes(f.x.dtype, f.residual_out.data ? f.residual_out.dtype : f.x.dtype,
             [&](auto x, auto r) { layer_norm_forward<decltype(x), decltype(r)>(p, f); });
}

void backward(const NormProblem& p, const NormBackward& f) {
  for_dtypes(f.d_out.dtype, f.h.dtype,
             [&](auto x, auto r) { layer_norm_backward<decltype(x), decltype(r)>(p, f); });
}

int64_t scratch_bytes(const NormProblem& p, DType x) {
  int64_t bytes = 0;
  for_dtypes(x, x, [&](auto traits, auto) {
    bytes = NormPlan<decltype(traits), true>(p).scratch.bytes(p.threads);
  });
  return bytes;
}

}  // namespace

extern const NormKernels layer_norm_kernels;
const NormKernels layer_norm_kernels = {forward, backward, scratch_bytes};

}  // namespace PT_ISA
}  // namespace pt
