// SPDX-License-Identifier: Apache-2.0
// Attention for one instruction set (PT_ISA).
#include "cpu/attention/bwd.h"
#include "cpu/attention/fwd.h"

namespace pt {
namespace PT_ISA {

namespace {

// Call f(Op<traits of the dtype>(p, args...)).
template <template <class> class Op, class F, class... Args>
void with(const AttentionProblem& p, const F& f, const Args&... args) {
  switch (p.dtype) {
    case DType::f32: return f(Op<Float<float>>(p, args...));
    case DType::bf16: return f(Op<Bf16>(p, args...));
    case DType::f16: return f(Op<Float<f16>>(p, args...));
    case DType::f64: return f(Op<Double>(p, args...));
  }
}

template <template <class> class Op, class... Args>
void run(AttentionProblem p, const Args&... args) {
  if (p.blocks.offsets) map_blocks(p);
  else map_tiles(p);
  with<Op>(p, [](auto op) { op.run(); }, args...);
}

void forward(const AttentionProblem& p) { run<Forward>(p); }
void backward(const AttentionProblem& p, const AttentionGrads& g) {
  run<bwd::AttentionBackward>(p, g);
}

int64_t scratch_bytes(AttentionProblem p, const AttentionGrads* g) {
  static const int32_t mapped = TileMap::kAll;  // placeholder for the map, which is not built
  Scratch s;
  if ((s.own = map_bytes(p))) p.tiles.data = &mapped;
  const auto measure = [&](auto op) { s.include(op.scratch()); };
  with<Forward>(p, measure);
  if (g) with<bwd::AttentionBackward>(p, measure, *g);
  return s.bytes(p.threads);
}

}  // namespace

extern const AttentionKernels attention_kernels{forward, backward, scratch_bytes};

}  // namespace PT_ISA
}  // namespace pt
