// SPDX-License-Identifier: Apache-2.0
// Rotary positions for one instruction set: select the template by dtype. Compiled once per set,
// with PT_ISA defined.
#include "cpu/rotary/append.h"
#include "cpu/rotary/bwd.h"

namespace pt {
namespace PT_ISA {
namespace {

template <class F>
void for_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f64: return f(Double());
    case DType::bf16: return f(Float<bf16>());
    case DType::f16: return f(Float<f16>());
    case DType::f32: return f(Float<float>());
  }
}

void forward(const RotaryProblem& p, const RotaryForward& f) {
  for_dtype(p.dtype, [&](auto x) { rotary_forward<decltype(x)>(p, f); });
}
void backward(const RotaryProblem& p, const RotaryBackward& f) {
  for_dtype(p.dtype, [&](auto x) { rotary_backward<decltype(x)>(p, f); });
}
void append(const RotaryProblem& p, const AppendKV& f) {
  for_dtype(p.dtype, [&](auto x) { append_kv<decltype(x)>(p, f); });
}

}  // namespace

extern const RotaryKernels rotary_kernels;
const RotaryKernels rotary_kernels = {forward, backward, append};

}  // namespace PT_ISA
}  // namespace pt
