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

void linear(const FeedForwardProblem& p, const LinearWeight& weight, void* y) {
  switch (p.dtype) {
    case DType::f32: return linear_forward<Float<float>>(p, weight, y);
    case DType::bf16: return linear_forward<Bf16>(p, weight, y);
    case DType::f16: return linear_forward<Float<f16>>(p, weight, y);
    case DType::f64: return linear_forward<Double>(p, weight, y);
  }
}

void linear_bwd(const FeedForwardProblem& p, const LinearWeight& weight, const LinearBackward& f) {
  switch (p.dtype) {
    case DType::f32: return linear_backward<Float<float>>(p, weight, f);
    case DType::bf16: return linear_backward<Bf16>(p, weight, f);
    case DType::f16: return linear_backward<Float<f16>>(p, weight, f);
    case DType::f64: return linear_backward<Double>(p, weight, f);
  }
}

void pack(const FeedForwardProblem& p, const LinearWeight& weight, void* panels) {
  switch (p.dtype) {
    case DType::f32: return linear_pack<Float<float>>(p, weight, panels);
    case DType::bf16: return linear_pack<Bf16>(p, weight, panels);
    case DType::f16: return linear_pack<Float<f16>>(p, weight, panels);
    case DType::f64: return linear_pack<Double>(p, weight, panels);
  }
}

int64_t panels_bytes(const FeedForwardProblem& p) {
  switch (p.dtype) {
    case DType::f32: return linear_panels_bytes<Float<float>>(p);
    case DType::bf16: return linear_panels_bytes<Bf16>(p);
    case DType::f16: return linear_panels_bytes<Float<f16>>(p);
    case DType::f64: return linear_panels_bytes<Double>(p);
  }
  return 0;
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
const FeedForwardKernels feed_forward_kernels = {forward, backward,     linear,       linear_bwd,
                                                 pack,    panels_bytes, scratch_bytes};

}  // namespace PT_ISA
}  // namespace pt
