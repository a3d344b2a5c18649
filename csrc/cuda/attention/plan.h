// SPDX-License-Identifier: Apache-2.0
// What a call of attention runs: for each pass the kernels of sm_90a or the portable ones, which results are recomputed, and how much
// scratch there is. Pure functions of the problem and the GPU, computed once a call: the binding allocates by a plan, the launchers follow
// it, and explain shows it (the raw op attention_plan).
#pragma once

#include "cuda/attention/sm80/plan.h"
#include "cuda/attention/sm90/plan.h"

namespace pt::cuda {

// A tensor that a call would make stands in its plan as memory that is aligned, and that nobody touches.
inline void* const kPlanned = reinterpret_cast<void*>(16);
constexpr HeadRows kPlannedStrides{8, 8, 8};
inline Out planned_out(int columns) { return {kPlanned, kPlannedStrides, columns, true}; }

struct Gpu {
  bool sm90a;  // runs the kernels for sm_90a
  int multiprocessors;
};

struct PassPlan {
  Sm90Plan sm90;         // why_not null: its kernels run
  Sm80Plan sm80;         // its kernels run where those do not, and recompute the tiles that those flag
  Recompute recompute;   // without flags; no tiles: nothing is flagged
  SplitPlan split = {};  // its kernels run, and no others, if it has splits

  bool on_sm90() const { return !sm90.why_not; }
};

// What backward is asked for. `g` and `dbias` without scratch; null data: a gradient that is not wanted.
struct BackwardRequest {
  AttentionBackward g;
  AttentionDbias dbias[2];                       // of the mask, of the bias
  bool diagonals = false, deterministic = true;  // diagonals: T5's table has a gradient
};

struct BackwardPlan {
  Sm90Plan fused;                            // why_not null: its kernel makes d_query, d_key and d_value at once
  int64_t dq_accum = 0, dq_accum_tiles = 0;  // float32 numbers to which its blocks add d_query; tiles of a head
  int64_t turns = 0;                         // words by which they add in order; 0: in any order
  PassPlan dq, dkdv, dbias[2];
  int partial_tiles = 0;  // tiles of queries, each with partial sums for slopes and diagonals

  bool is_fused() const { return !fused.why_not; }
  // Whether portable kernels go along keys, as those of row stats do; and along queries.
  bool walks_keys(const BackwardRequest& r) const {
    const AttentionBackward& g = r.g;
    const bool dq_wanted = !is_fused() && (g.dq.data || r.diagonals || g.p.slopes);
    return g.p.split_lse() || (dq_wanted && !dq.on_sm90()) || (r.dbias[0].data && !dbias[0].on_sm90()) ||
           (r.dbias[1].data && !dbias[1].on_sm90());
  }
  // Whether kernels for sm_90a ask a dense mask query by query, and key by key.
  bool asks_queries(const BackwardRequest& r) const {
    const AttentionBackward& g = r.g;
    const bool dq_wanted = !is_fused() && (g.dq.data || r.diagonals || g.p.slopes);
    return (dq_wanted && dq.on_sm90()) || (r.dbias[0].data && dbias[0].on_sm90()) || (r.dbias[1].data && dbias[1].on_sm90());
  }
  bool asks_keys(const BackwardRequest& r) const { return !is_fused() && (r.g.dk.data || r.g.dv.data) && dkdv.on_sm90(); }
  bool walks_queries(const BackwardRequest& r) const { return !is_fused() && (r.g.dk.data || r.g.dv.data) && !dkdv.on_sm90(); }
};

// plan() where the GPU runs the kernels for sm_90a.
template <class F>
Sm90Plan on_sm90(const Gpu& gpu, F plan) {
  if (gpu.sm90a) return plan(gpu.multiprocessors);
  Sm90Plan none{};
  none.why_not = "they need a GPU of compute capability 9.0, and PYTRANSFORMER_CUDA_PATH not portable";
  return none;
}

inline PassPlan plan_attention_forward(const AttentionForward& f, const Gpu& gpu) {
  PassPlan plan{on_sm90(gpu, [&](int n) { return plan_sm90_forward(f, n); }), plan_sm80(Pass::Forward, f.p, false), {}};
  if (f.out.data) plan.split = plan_split(f.p);
  if (plan.split.splits) plan.sm90.why_not = "of so few queries the keys are split over blocks";
  if (plan.on_sm90() && f.p.elementwise_mask()) plan.recompute = {nullptr, plan.sm90.tile.rows(), plan.sm90.order.tiles};
  return plan;
}

inline PassPlan plan_backward_pass(const AttentionBackward& g, Pass pass, bool diagonals, const Gpu& gpu) {
  PassPlan plan{on_sm90(gpu, [&](int n) { return plan_sm90_backward(g, pass, n); }), {}, {}};
  // What hidden rows hold reaches no sum of dS: tiles are recomputed without sums by diagonals.
  plan.sm80 = plan_sm80(pass, g.p, diagonals && !plan.on_sm90());
  const bool padding_gaps = g.p.key_padding.data && pass == Pass::BwdDq;
  if (plan.on_sm90() && (plan.sm90.elementwise_mask || padding_gaps))
    plan.recompute = {nullptr, plan.sm90.tile.rows(), plan.sm90.order.tiles};
  return plan;
}

inline PassPlan plan_attention_dbias(const AttentionDbias& f, const Gpu& gpu) {
  return {on_sm90(gpu, [&](int n) { return plan_sm90_dbias(f, n); }), plan_sm80(Pass::BwdDbias, f.b.p, false), {}};
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
