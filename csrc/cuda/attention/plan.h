// SPDX-License-Identifier: Apache-2.0
// Plan of an attention call: per pass the sm_90a or the portable kernels, which results are
// recomputed, and scratch sizes. Pure functions of the problem and the GPU, computed once per call:
// the binding allocates by the plan, the launchers follow it, and explain shows it (raw op
// attention_plan).
#pragma once

#include "cuda/attention/sm80/plan.h"
#include "cuda/attention/sm90/plan.h"

namespace pt::cuda {

// Placeholder for a tensor that a planned call would create: aligned memory that nothing accesses.
inline void* const kPlanned = reinterpret_cast<void*>(16);
constexpr HeadRows kPlannedStrides{8, 8, 8};
inline Out planned_out(int columns) { return {kPlanned, kPlannedStrides, columns, true}; }

struct Gpu {
  bool sm90a;  // supports the sm_90a kernels
  int multiprocessors;
};

struct PassPlan {
  Sm90Plan sm90;         // why_not null: the sm_90a kernels run
  Sm80Plan sm80;         // runs otherwise, and recomputes flagged tiles
  Recompute recompute;   // without flags; tiles 0: nothing is flagged
  SplitPlan split = {};  // if it has splits, only its kernels run

  bool on_sm90() const { return !sm90.why_not; }
};

// The gradients that backward computes. `g` and `dbias` have no scratch; null data: not requested.
struct BackwardRequest {
  AttentionBackward g;
  AttentionDbias dbias[2];                       // of the mask, of the bias
  bool diagonals = false, deterministic = true;  // diagonals: T5's table has a gradient
};

struct BackwardPlan {
  Sm90Plan fused;                            // why_not null: fused backward
  int64_t dq_accum = 0, dq_accum_tiles = 0;  // float32 values in dq_accum; tiles per head
  int64_t turns = 0;                         // words that order the additions; 0: any order
  PassPlan dq, dkdv, dbias[2];
  int partial_tiles = 0;  // Q tiles, each with partial sums for slopes and diagonals

  bool is_fused() const { return !fused.why_not; }
  // Return true if portable kernels (or the row stats) iterate over KV tiles.
  bool walks_keys(const BackwardRequest& r) const {
    const AttentionBackward& g = r.g;
    const bool dq_wanted = !is_fused() && (g.dq.data || r.diagonals || g.p.slopes);
    return g.p.split_lse() || (dq_wanted && !dq.on_sm90()) ||
           (r.dbias[0].data && !dbias[0].on_sm90()) || (r.dbias[1].data && !dbias[1].on_sm90());
  }
  // Return true if sm_90a kernels read a dense mask by queries; the next function, by keys.
  bool asks_queries(const BackwardRequest& r) const {
    const AttentionBackward& g = r.g;
    const bool dq_wanted = !is_fused() && (g.dq.data || r.diagonals || g.p.slopes);
    return (dq_wanted && dq.on_sm90()) || (r.dbias[0].data && dbias[0].on_sm90()) ||
           (r.dbias[1].data && dbias[1].on_sm90());
  }
  bool asks_keys(const BackwardRequest& r) const {
    return !is_fused() && (r.g.dk.data || r.g.dv.data) && dkdv.on_sm90();
  }
  bool walks_queries(const BackwardRequest& r) const {
    return !is_fused() && (r.g.dk.data || r.g.dv.data) && !dkdv.on_sm90();
  }
};

// Return plan() if the GPU supports the sm_90a kernels.
template <class F>
Sm90Plan on_sm90(const Gpu& gpu, F plan) {
  if (gpu.sm90a) return plan(gpu.multiprocessors);
  Sm90Plan none{};
  none.why_not =
      "they need a GPU of compute capability 9.0, and PYTRANSFORMER_CUDA_PATH not portable";
  return none;
}

inline PassPlan plan_attention_forward(const AttentionForward& f, const Gpu& gpu) {
  PassPlan plan{on_sm90(gpu, [&](int n) { return plan_sm90_forward(f, n); }),
                plan_sm80(Pass::Forward, f.p, false),
                {}};
  if (f.out.data) plan.split = plan_split(f.p);
  if (plan.split.splits) plan.sm90.why_not = "of so few queries the keys are split over blocks";
  if (plan.on_sm90() && f.p.elementwise_mask())
    plan.recompute = {nullptr, plan.sm90.tile.rows(), plan.sm90.order.tiles};
  return plan;
}

inline PassPlan plan_backward_pass(const AttentionBackward& g, Pass pass, bool diagonals,
                                   const Gpu& gpu) {
  PassPlan plan{on_sm90(gpu, [&](int n) { return plan_sm90_backward(g, pass, n); }), {}, {}};
  // Values of hidden rows do not reach sums of dS: tiles are recomputed without sums by diagonals.
  plan.sm80 = plan_sm80(pass, g.p, diagonals && !plan.on_sm90());
  const bool padding_gaps = g.p.key_padding.data && pass == Pass::BwdDq;
  if (plan.on_sm90() && (plan.sm90.elementwise_mask || padding_gaps))
    plan.recompute = {nullptr, plan.sm90.tile.rows(), plan.sm90.order.tiles};
  return plan;
}

inline PassPlan plan_attention_dbias(const AttentionDbias& f, const Gpu& gpu) {
  return {on_sm90(gpu, [&](int n) { return plan_sm90_dbias(f, n); }),
          plan_sm80(Pass::BwdDbias, f.b.p, false),
          {}};
}

inline BackwardPlan plan_attention_backward(const BackwardRequest& request, const Gpu& gpu) {
  const AttentionBackward& g = request.g;
  BackwardPlan plan{};
  plan.fused = on_sm90(gpu, [&](int n) { return plan_sm90_fused(g, request.deterministic, n); });
  if (plan.is_fused()) {
    plan.dq_accum = sm90_dq_accum_size(g.p, plan.fused.head_class);
    plan.dq_accum_tiles = sm90_dq_accum_tiles(g.p, plan.fused.head_class);
    if (request.deterministic) plan.turns = 1 + plan.dq_accum / (64 * 64);
  }
  plan.dq = plan_backward_pass(g, Pass::BwdDq, request.diagonals, gpu);
  plan.dkdv = plan_backward_pass(g, Pass::BwdDkdv, false, gpu);
  for (int i = 0; i < 2; ++i)
    if (request.dbias[i].data) plan.dbias[i] = plan_attention_dbias(request.dbias[i], gpu);
  plan.partial_tiles = int(tiles_of(g.p.num_queries, plan.dq.sm80.tile));
  return plan;
}

}  // namespace pt::cuda
