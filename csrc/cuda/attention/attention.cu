#include "cuda/attention/bwd_queries.cuh"
#include "cuda/attention/kernels.h"
#include "cuda/attention/key_bits.cuh"
#include "cuda/attention/sm90_kernels.h"
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
  }
}

}  // namespace

Redo attention_forward_redo(const AttentionForward& f) {
  if (!f.p.looks_up() || !runs_sm90a()) return {};
  const Sm90Plan plan = plan_sm90_forward(f, multiprocessors());
  return plan.why_not
             ? Redo{}
             : Redo{nullptr, PT_FAULT(flags_for_half_a_tile) ? 64 : sm90_forward_tile(plan.head_class, true).rows(), plan.order.tiles};
}

void attention_forward(const AttentionForward& f, void* stream) {
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_forward(f, multiprocessors()); !plan.why_not) {
      with_half(f.p, [&](auto t) { sm90_attention_forward_as<decltype(t)>(f, plan, stream); });
      if (!f.redo.flags) return;
    }
  const AttentionPlan plan = plan_attention(Pass::Forward, f.p, false);
  with_dtype(f.p, [&](auto t) { attention_forward_as<decltype(t)>(f, plan, stream); });
}

void attention_key_bits(const AttentionKeyBits& f, void* stream) {
  launch(attention_key_bits_kernel<Kind<256, true>>, dim3(attention_blocks(f.masks, 1, 1)), kKeyBitsThreads, kKeyBitsThreads / 32 * 16,
         stream, f);
}

Redo attention_backward_redo(const AttentionBackward& g, Pass pass) {
  if (!runs_sm90a()) return {};
  const Sm90Plan plan = plan_sm90_backward(g, pass, multiprocessors());
  const bool keys = pass == Pass::Keys;
  if (plan.why_not || !(plan.looks_up || (!PT_FAULT(no_flags_for_holes) && g.p.key_bits.data && !keys))) return {};
  const Sm90Tile tile =
      keys ? sm90_keys_tile(plan.head_class, plan.general, plan.looks_up) : sm90_queries_tile(plan.head_class, plan.general, plan.looks_up);
  return {nullptr, PT_FAULT(flags_for_half_a_tile_backward) ? 64 : tile.rows(), plan.order.tiles};
}

void attention_backward_rows(const AttentionRows& r, void* stream) {
  const int64_t rows = int64_t(r.p.sequences) * r.p.heads * r.p.num_queries;
  launch(attention_bwd_rows_kernel<Kind<256, true>>, dim3(attention_blocks(1, 1, (rows + kRowsOfABlock - 1) / kRowsOfABlock)), 128, 0,
         stream, r);
}

void attention_backward_queries(const AttentionBackward& g, void* stream) {
  AttentionBackward rest = g;
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_backward(g, Pass::Queries, multiprocessors()); !plan.why_not) {
      with_half(g.p, [&](auto t) { sm90_attention_queries_as<decltype(t)>(g, plan, stream); });
      if (!g.redo.flags) return;
      // What hidden rows hold reaches no sum of dS.
      if (!PT_FAULT(sums_by_diagonals_made_again)) rest.slope_parts = rest.diagonal_parts = nullptr;
    }
  const AttentionPlan plan = plan_attention(Pass::Queries, g.p, rest.diagonal_parts);
  with_dtype(g.p, [&](auto t) { attention_queries_as<decltype(t)>(rest, plan, stream); });
}

void attention_backward_keys(const AttentionBackward& g, void* stream) {
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_backward(g, Pass::Keys, multiprocessors()); !plan.why_not) {
      with_half(g.p, [&](auto t) { sm90_attention_keys_as<decltype(t)>(g, plan, stream); });
      if (!g.redo.flags) return;
    }
  const AttentionPlan plan = plan_attention(Pass::Keys, g.p, false);
  with_dtype(g.p, [&](auto t) { attention_keys_as<decltype(t)>(g, plan, stream); });
}

int64_t attention_sums_wanted(const AttentionBackward& g) {
  if (!runs_sm90a()) return 0;
  const Sm90Plan plan = plan_sm90_fused(g, multiprocessors());
  return plan.why_not ? 0 : sm90_sums(g.p, plan.head_class);
}

void attention_backward_fused(const AttentionBackward& g, void* stream) {
  const Sm90Plan plan = plan_sm90_fused(g, multiprocessors());
  AttentionBackward with_tiles = g;
  with_tiles.sum_tiles = sm90_sum_tiles(g.p, plan.head_class);
  sm90_attention_backward_fused(with_tiles, plan, stream);
}

void attention_backward_dense(const AttentionDense& f, void* stream) {
  if (runs_sm90a())
    if (const Sm90Plan plan = plan_sm90_dense(f, multiprocessors()); !plan.why_not)
      return with_half(f.b.p, [&](auto t) { sm90_attention_dense_as<decltype(t)>(f, plan, stream); });
  const AttentionPlan plan = plan_attention(Pass::Dense, f.b.p, false);
  with_dtype(f.b.p, [&](auto t) { attention_dense_as<decltype(t)>(f, plan, stream); });
}

void attention_backward_sums(const AttentionSums& f, void* stream) {
  launch(attention_bwd_sums_kernel<Kind<256, true>>, dim3(attention_blocks(1, f.heads, (f.outputs + 3) / 4)), 128, 0, stream, f);
}

}  // namespace pt::cuda
