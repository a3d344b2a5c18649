// SPDX-License-Identifier: Apache-2.0
// Feed-forward for one instruction set: select the template by dtype. Compiled once per set, with
// PT_ISA defined.
#include "cpu/feed_forward/bwd.h"
#include "cpu/feed_forward/fwd.h"

namespace pt {
namespace PT_ISA {
namespace {

void forward(const FeedForwardProblem& p, const FeedForwardForward& f) {
  switch (p.dtype) {
    case DType::f32: return feed_forward_forward<Float<float>>(p, f);
    case DType::bf16: return feed_forward_forward<Bf16>(p, f);
    case DType::f16: return feed_forward_forward<Float<f16>>(p, f);
    case DType::f64: return feed_forward_forward<Double>(p, f);
  }
}

void backward(const FeedForwardProblem& p, const FeedForwardBackward& f) {
  switch (p.dtype) {
    case DType::f32: return feed_forward_backward<Float<float>>(p, f);
    case DType::bf16: return feed_forward_backward<Bf16>(p, f);
    case DType::f16: return feed_forward_backward<Float<f16>>(p, f);
    case DType::f64: return feed_forward_backward<Double>(p, f);
  }
}

void linear(const FeedForwardProblem& p, bool along_k, void* y) {
  switch (p.dtype) {
    case DType::f32: return feed_forward_linear<Float<float>>(p, along_k, y);
    case DType::bf16: return feed_forward_linear<Bf16>(p, along_k, y);
    case DType::f16: return feed_forward_linear<Float<f16>>(p, along_k, y);
    case DType::f64: return feed_forward_linear<Double>(p, along_k, y);
  }
}

int64_t scratch_bytes(const FeedForwardProblem& p) {
  static char wanted;  // placeholder for every matrix; never read or written
  void* any = &wanted;
  const FeedForwardForward f{any, any, any};
  const FeedForwardBackward g{any, any, any, any, any, any, any, any, any, any, any, any, any};
  switch (p.dtype) {
    case DType::f32: return feed_forward_scratch<Float<float>>(p, f, g).bytes(p.threads);
    case DType::bf16: return feed_forward_scratch<Bf16>(p, f, g).bytes(p.threads);
    case DType::f16: return feed_forward_scratch<Float<f16>>(p, f, g).bytes(p.threads);
    case DType::f64: return feed_forward_scratch<Double>(p, f, g).bytes(p.threads);
  }
  return 0;
}

}  // namespace

extern const FeedForwardKernels feed_forward_kernels;
const FeedForwardKernels feed_forward_kernels = {forward, backward, linear, scratch_bytes};

}  // namespace PT_ISA
}  // namespace pt
