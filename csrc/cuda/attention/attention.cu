// SPDX-License-Identifier: Apache-2.0
// The launchers that the binding calls, and the kernels that no dtype has to itself.
#include "cuda/attention/combine.cuh"
#include "cuda/attention/kernels.h"
#include "cuda/attention/mask.cuh"
#include "cuda/attention/preprocess.cuh"
#include "cuda/attention/sm80/config.h"
#include "cuda/launch.cuh"

namespace pt::cuda {

namespace {

// Call run(T{}) for the problem's element type.
template <class F>
void with_dtype(const AttentionProblem& p, F run) {
  switch (p.dtype) {
    case DType::f32: return run(float{});
    case DType::bf16: return run(ptx::bf16{});
    case DType::f16: return run(ptx::f16{});
    case DType::f64: return;  // rejected by the binding
  }
}

// Call run(T{}) for the problem's 16-bit element type.
template <class F>
void with_half(const AttentionProblem& p, F run) {
  if (p.dtype == DType::bf16) run(ptx::bf16{});
  else run(ptx::f16{});
}

// Launch the sm_90a kernels if planned. Then launch the portable kernels, either alone or for the
// tiles that the sm_90a kernels flagged.
template <class F, class G>
void run_pass(const AttentionProblem& p, const PassPlan& plan, bool flagged, F sm90, G sm80) {
  if (plan.on_sm90()) with_half(p, sm90);
  if (!plan.on_sm90() || flagged) with_dtype(p, sm80);
}

}  // namespace

void attention_key_padding(const AttentionKeyPadding& f, void* stream) {
  launch(attention_mask_kernel<Kind<256, true>>, dim3(attention_blocks(f.masks, 1, 1)),
         kMaskThreads, kMaskThreads / 32 * 16, stream, AttentionMask{f, {}, {}});
}

void attention_pair_bits(const AttentionPairBits& f, void* stream) {
  constexpr int kWarps = kMaskThreads / 32;
  launch(attention_mask_kernel<Kind<256, true>>,
         dim3(attention_blocks(1, 1, (f.tiles() + kWarps - 1) / kWarps)), kMaskThreads, 0, stream,
         AttentionMask{{}, {}, f});
}

void attention_mask_lists(const AttentionMaskLists& f, void* stream) {
  const int64_t lists = int64_t(f.masks) * f.lists();
  const dim3 grid(
      attention_blocks(1, 1, f.offsets ? (lists + kMaskThreads - 1) / kMaskThreads : f.blocks()));
  launch(attention_mask_kernel<Kind<256, true>>, grid, kMaskThreads,
         f.offsets ? 0 : kMaskThreads / 32 * 4, stream, AttentionMask{{}, f, {}});
}

void attention_forward(const AttentionForward& f, const PassPlan& plan, void* stream) {
  if (plan.split.splits) {
    with_dtype(f.p, [&](auto t) {
      if (f.p.in_eight_bits())
        sm80_attention_split_eight_bits_as<decltype(t)>(f, plan.split, stream);
      else sm80_attention_split_as<decltype(t)>(f, plan.split, stream);
    });
    return;
  }
  if (f.p.in_eight_bits()) {
    with_dtype(f.p, [&](auto t) {
      sm80_attention_forward_eight_bits_as<decltype(t)>(f, plan.sm80, stream);
    });
    return;
  }
  run_pass(
      f.p, plan, f.recompute.flags,
      [&](auto t) { sm90_attention_forward_as<decltype(t)>(f, plan.sm90, stream); },
      [&](auto t) { sm80_attention_forward_as<decltype(t)>(f, plan.sm80, stream); });
}

void attention_backward_preprocess(const AttentionPreprocess& r, void* stream) {
  const int64_t rows = int64_t(r.p.sequences) * r.p.heads * r.p.num_queries;
  launch(attention_bwd_preprocess_kernel<Kind<256, true>>,
         dim3(attention_blocks(1, 1, (rows + kRowsOfABlock - 1) / kRowsOfABlock)), 128, 0, stream,
         r);
}

void attention_backward_dq(const AttentionBackward& g, const PassPlan& plan, void* stream) {
  AttentionBackward portable = g;
  // Values of hidden rows do not reach the sums of dS.
  if (plan.on_sm90()) portable.slope_partials = portable.diagonal_partials = nullptr;
  run_pass(
      g.p, plan, g.recompute.flags,
      [&](auto t) { sm90_attention_bwd_dq_as<decltype(t)>(g, plan.sm90, stream); },
      [&](auto t) { sm80_attention_bwd_dq_as<decltype(t)>(portable, plan.sm80, stream); });
}

void attention_backward_dkdv(const AttentionBackward& g, const PassPlan& plan, void* stream) {
  run_pass(
      g.p, plan, g.recompute.flags,
      [&](auto t) { sm90_attention_bwd_dkdv_as<decltype(t)>(g, plan.sm90, stream); },
      [&](auto t) { sm80_attention_bwd_dkdv_as<decltype(t)>(g, plan.sm80, stream); });
}

void attention_backward_fused(const AttentionBackward& g, const BackwardPlan& plan, uint32_t* turns,
                              void* stream) {
  AttentionBackward with_tiles = g;
  with_tiles.dq_accum_tiles = plan.dq_accum_tiles;
  with_half(g.p, [&](auto t) {
    using T = decltype(t);
    sm90_attention_bwd_fused_as<T>(with_tiles, plan.fused, turns, stream);
    AttentionBackward portable = g;
    if (g.recompute.flags && (g.dk.data || g.dv.data))
      sm80_attention_bwd_dkdv_as<T>(portable, plan.dkdv.sm80, stream);
    portable.recompute = g.dq_recompute;
    if (g.dq_recompute.flags && g.dq.data)
      sm80_attention_bwd_dq_as<T>(portable, plan.dq.sm80, stream);
  });
}

void attention_backward_dbias(const AttentionDbias& f, const PassPlan& plan, void* stream) {
  run_pass(
      f.b.p, plan, false,
      [&](auto t) { sm90_attention_bwd_dbias_as<decltype(t)>(f, plan.sm90, stream); },
      [&](auto t) { sm80_attention_bwd_dbias_as<decltype(t)>(f, plan.sm80, stream); });
}

void attention_backward_dsinks(const AttentionDsinks& f, void* stream) {
  AttentionReducePartials sums{};
  sums.sinks = f;
  launch(attention_bwd_reduce_partials_kernel<Kind<256, true>>, dim3(unsigned(f.p.heads)),
         kReduceThreads, kReduceThreads / 32 * 16, stream, sums);
}

void attention_backward_reduce_partials(const AttentionReducePartials& f, void* stream) {
  launch(attention_bwd_reduce_partials_kernel<Kind<256, true>>,
         dim3(attention_blocks(1, f.heads, (f.outputs + 3) / 4)), kReduceThreads, 0, stream, f);
}

}  // namespace pt::cuda
