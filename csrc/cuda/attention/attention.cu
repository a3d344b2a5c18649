#include "cuda/attention/bwd_preprocess.cuh"
#include "cuda/attention/bwd_reduce_partials.cuh"
#include "cuda/attention/kernels.h"
#include "cuda/attention/key_padding.cuh"
#include "cuda/attention/sm90/kernels.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace pt::cuda {

namespace {

// Calls run(T{}) for the type of the problem's elements.
template <class F>
void with_dtype(const AttentionProblem& p, F run) {
  switch (p.dtype) {
    case DType::f32: return run(float{});
    case DType::bf16: return run(ptx::bf16{});
    case DType::f16: return run(ptx::f16{});
    case DType::f64: return;  // refused at the edge
  }
}

}  // namespace

Recompute attention_forward_recompute(const AttentionForward& f) {
  if (!f.p.elementwise_mask() || !runs_sm90a()) return {};
  const Sm90Plan plan = plan_sm90_forward(f, multiprocessors());
  return plan.why_not
             ? Recompute{}
             : Recompute{nullptr, PT_FAULT(flags_for_half_a_tile) ? 64 : sm90_forward_tile(plan.head_class, true).rows(), plan.order.tiles};
}

void attention_forward(const AttentionForward& f, void* stream) {
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_forward(f, multiprocessors()); !plan.why_not) {
      with_half(f.p, [&](auto t) { sm90_attention_forward_as<decltype(t)>(f, plan, stream); });
      if (!f.recompute.flags) return;
    }
  const AttentionPlan plan = plan_attention(Pass::Forward, f.p, false);
  with_dtype(f.p, [&](auto t) { attention_forward_as<decltype(t)>(f, plan, stream); });
}

void attention_key_padding(const AttentionKeyPadding& f, void* stream) {
  launch(attention_key_padding_kernel<Kind<256, true>>, dim3(attention_blocks(f.masks, 1, 1)), kKeyPaddingThreads,
         kKeyPaddingThreads / 32 * 16, stream, f);
}

Recompute attention_backward_recompute(const AttentionBackward& g, Pass pass) {
  if (!runs_sm90a()) return {};
  const Sm90Plan plan = plan_sm90_backward(g, pass, multiprocessors());
  const bool keys = pass == Pass::BwdDkdv;
  if (plan.why_not || !(plan.elementwise_mask || (!PT_FAULT(no_flags_for_padding_gaps) && g.p.key_padding.data && !keys))) return {};
  const Sm90Tile tile = keys ? sm90_bwd_dkdv_tile(plan.head_class, plan.has_score_mod, plan.elementwise_mask)
                             : sm90_bwd_dq_tile(plan.head_class, plan.has_score_mod, plan.elementwise_mask);
  return {nullptr, PT_FAULT(flags_for_half_a_tile_backward) ? 64 : tile.rows(), plan.order.tiles};
}

void attention_backward_preprocess(const AttentionPreprocess& r, void* stream) {
  const int64_t rows = int64_t(r.p.sequences) * r.p.heads * r.p.num_queries;
  launch(attention_bwd_preprocess_kernel<Kind<256, true>>, dim3(attention_blocks(1, 1, (rows + kRowsOfABlock - 1) / kRowsOfABlock)), 128, 0,
         stream, r);
}

void attention_backward_dq(const AttentionBackward& g, void* stream) {
  AttentionBackward rest = g;
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_backward(g, Pass::BwdDq, multiprocessors()); !plan.why_not) {
      with_half(g.p, [&](auto t) { sm90_attention_bwd_dq_as<decltype(t)>(g, plan, stream); });
      if (!g.recompute.flags) return;
      // What hidden rows hold reaches no sum of dS.
      if (!PT_FAULT(sums_by_diagonals_recomputed)) rest.slope_partials = rest.diagonal_partials = nullptr;
    }
  const AttentionPlan plan = plan_attention(Pass::BwdDq, g.p, rest.diagonal_partials);
  with_dtype(g.p, [&](auto t) { attention_bwd_dq_as<decltype(t)>(rest, plan, stream); });
}

void attention_backward_dkdv(const AttentionBackward& g, void* stream) {
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_backward(g, Pass::BwdDkdv, multiprocessors()); !plan.why_not) {
      with_half(g.p, [&](auto t) { sm90_attention_bwd_dkdv_as<decltype(t)>(g, plan, stream); });
      if (!g.recompute.flags) return;
    }
  const AttentionPlan plan = plan_attention(Pass::BwdDkdv, g.p, false);
  with_dtype(g.p, [&](auto t) { attention_bwd_dkdv_as<decltype(t)>(g, plan, stream); });
}

int64_t attention_dq_accum_size(const AttentionBackward& g) {
  if (!runs_sm90a()) return 0;
  const Sm90Plan plan = plan_sm90_fused(g, multiprocessors());
  return plan.why_not ? 0 : sm90_dq_accum_size(g.p, plan.head_class);
}

void attention_backward_fused(const AttentionBackward& g, void* stream) {
  const Sm90Plan plan = plan_sm90_fused(g, multiprocessors());
  AttentionBackward with_tiles = g;
  with_tiles.dq_accum_tiles = sm90_dq_accum_tiles(g.p, plan.head_class);
  sm90_attention_backward_fused(with_tiles, plan, stream);
}

void attention_backward_dbias(const AttentionDbias& f, void* stream) {
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_dbias(f, multiprocessors()); !plan.why_not)
      return with_half(f.b.p, [&](auto t) { sm90_attention_bwd_dbias_as<decltype(t)>(f, plan, stream); });
  const AttentionPlan plan = plan_attention(Pass::BwdDbias, f.b.p, false);
  with_dtype(f.b.p, [&](auto t) { attention_bwd_dbias_as<decltype(t)>(f, plan, stream); });
}

void attention_backward_reduce_partials(const AttentionReducePartials& f, void* stream) {
  launch(attention_bwd_reduce_partials_kernel<Kind<256, true>>, dim3(attention_blocks(1, f.heads, (f.outputs + 3) / 4)), 128, 0, stream, f);
}

}  // namespace pt::cuda
