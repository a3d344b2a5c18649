// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy for one instruction set: select the template by dtype. Compiled once per
// set, with PT_ISA defined.
#include "cpu/cross_entropy/bwd.h"
#include "cpu/cross_entropy/fwd.h"

namespace pt {
namespace PT_ISA {
namespace {

void forward(const CrossEntropyProblem& p, const CrossEntropyForward& f) {
  switch (p.dtype) {
    case DType::f32: return cross_entropy_forward<Float<float>>(p, f);
    case DType::bf16: return cross_entropy_forward<Bf16>(p, f);
    case DType::f16: return cross_entropy_forward<Float<f16>>(p, f);
    case DType::f64: return cross_entropy_forward<Double>(p, f);
  }
}

void backward(const CrossEntropyProblem& p, const CrossEntropyBackward& f) {
  switch (p.dtype) {
    case DType::f32: return cross_entropy_backward<Float<float>>(p, f);
    case DType::bf16: return cross_entropy_backward<Bf16>(p, f);
    case DType::f16: return cross_entropy_backward<Float<f16>>(p, f);
    case DType::f64: return cross_entropy_backward<Double>(p, f);
  }
}

int64_t scratch_bytes(const CrossEntropyProblem& p, bool kept, bool correct) {
  switch (p.dtype) {
    case DType::f32: return cross_entropy_scratch<Float<float>>(p, kept, correct).bytes(p.threads);
    case DType::bf16: return cross_entropy_scratch<Bf16>(p, kept, correct).bytes(p.threads);
    case DType::f16: return cross_entropy_scratch<Float<f16>>(p, kept, correct).bytes(p.threads);
    case DType::f64: return cross_entropy_scratch<Double>(p, kept, correct).bytes(p.threads);
  }
  return 0;
}

}  // namespace

extern const CrossEntropyKernels cross_entropy_kernels;
const CrossEntropyKernels cross_entropy_kernels = {forward, backward, scratch_bytes};

}  // namespace PT_ISA
}  // namespace pt
