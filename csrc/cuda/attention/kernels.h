// The launchers, called by the torch edge. They run on the current device, in order with the stream, and throw std::runtime_error. Which
// kernel a problem gets is decided here, by pure functions: also pytransformer._C.cuda_attention_plan.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/attention/problem.h"
#include "cuda/attention/sm80/config.h"

namespace pt::cuda {

// The least class that holds both head sizes. f32 has two, and bwd_dbias has one.
inline int head_class(Pass pass, DType dtype, int head_dim, int value_dim) {
  const int widest = head_dim > value_dim ? head_dim : value_dim;
  if (pass == Pass::BwdDbias) return 256;
  if (dtype == DType::f32) return widest <= 64 ? 64 : 256;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
}

struct AttentionPlan {
  int head_class;
  bool has_score_mod;
  AttentionTile tile;
  int smem_bytes;
};

inline AttentionPlan plan_attention(Pass pass, DType dtype, int head_dim, int value_dim, bool bounds_only, bool diagonals) {
  AttentionPlan plan{};
  plan.head_class = head_class(pass, dtype, head_dim, value_dim);
  // Kernels without score_mod: forward, for 16 bits; backward, for bf16, where it saves registers.
  const int widest_bounds_only = pass == Pass::Forward ? 256 : pass == Pass::BwdDq ? 128 : pass == Pass::BwdDkdv ? 64 : 0;
  const bool has_bounds_only =
      plan.head_class <= widest_bounds_only && (pass == Pass::Forward ? dtype != DType::f32 : dtype == DType::bf16);
  plan.has_score_mod = !bounds_only || !has_bounds_only;
  plan.tile = attention_tile(pass, plan.head_class, size_of(dtype), plan.has_score_mod);
  plan.smem_bytes = attention_smem(pass, plan.tile, size_of(dtype), diagonals);
  return plan;
}
inline AttentionPlan plan_attention(Pass pass, const AttentionProblem& p, bool diagonals) {
  return plan_attention(pass, p.dtype, p.head_dim, p.value_dim, p.bounds_only() && !p.key_padding.data, diagonals);
}

// Blocks of one flat dimension, which may exceed 65,535.
inline unsigned attention_blocks(int64_t sequences, int64_t heads, int64_t tiles) {
  const int64_t blocks = sequences * heads * tiles;
  if (blocks >= int64_t(1) << 31)
    throw std::runtime_error("attention: " + std::to_string(blocks) + " blocks, at most 2^31 - 1 are possible");
  return unsigned(blocks);
}

// Of `all`, as many as run at once where few of them have anything to do: two on a multiprocessor.
inline unsigned recompute_blocks(const Recompute& recompute, unsigned all, int multiprocessors) {
  const unsigned few = 2 * unsigned(multiprocessors);
  return recompute.flags && all > few ? few : all;
}

inline int64_t tiles_of(int64_t rows, const AttentionTile& t) { return (rows + t.rows() - 1) / t.rows(); }

// Of one dtype, each compiled in a file of its own: fwd_bf16.cu and so on.
template <class T>
void attention_forward_as(const AttentionForward& f, const AttentionPlan& plan, void* stream);
template <class T>
void attention_bwd_dq_as(const AttentionBackward& g, const AttentionPlan& plan, void* stream);
template <class T>
void attention_bwd_dkdv_as(const AttentionBackward& g, const AttentionPlan& plan, void* stream);
template <class T>
void attention_bwd_dbias_as(const AttentionDbias& f, const AttentionPlan& plan, void* stream);

void attention_key_padding(const AttentionKeyPadding& f, void* stream);
// f.recompute is what attention_forward_recompute says, with flags.
void attention_forward(const AttentionForward& f, void* stream);
Recompute attention_forward_recompute(const AttentionForward& f);
// Of a pass of the backward, with g.recompute as attention_backward_recompute says.
Recompute attention_backward_recompute(const AttentionBackward& g, Pass pass);
void attention_backward_preprocess(const AttentionPreprocess& r, void* stream);
void attention_backward_dq(const AttentionBackward& g, void* stream);
void attention_backward_dkdv(const AttentionBackward& g, void* stream);
// d_query, d_key and d_value at once, the first added across blocks in any order: to g.dq_accum, of as many zeros as
// attention_dq_accum_size says; 0: there is no such kernel for the problem.
int64_t attention_dq_accum_size(const AttentionBackward& g);
void attention_backward_fused(const AttentionBackward& g, void* stream);
void attention_backward_dbias(const AttentionDbias& f, void* stream);
void attention_backward_reduce_partials(const AttentionReducePartials& f, void* stream);

}  // namespace pt::cuda
