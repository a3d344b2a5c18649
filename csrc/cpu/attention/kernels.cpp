// SPDX-License-Identifier: Apache-2.0
// Attention for one instruction set (PT_ISA).
#include "cpu/attention/bwd.h"
#include "cpu/attention/fwd.h"

namespace pt {
namespace PT_ISA {

namespace {

template <template <class> class Op, class... Args>
void run(AttentionProblem p, const Args&... args) {
  if (p.blocks.offsets) map_blocks(p);
  else map_tiles(p);
  switch (p.dtype) {
    case DType::f32: return Op<Float<float>>(p, args...).run();
    case DType::bf16: return Op<Bf16>(p, args...).run();
    case DType::f16: return Op<Float<f16>>(p, args...).run();
    case DType::f64: return Op<Double>(p, args...).run();
  }
}

void forward(const AttentionProblem& p) { run<Forward>(p); }
void backward(const AttentionProblem& p, const AttentionGrads& g) { run<bwd::AttentionBackward>(p, g); }

}  // namespace

extern const AttentionKernels attention_kernels{forward, backward};

}  // namespace PT_ISA
}  // namespace pt
