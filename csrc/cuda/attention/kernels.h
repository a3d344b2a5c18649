// The launchers, called by the torch edge. They run on the current device, in order with the stream, and throw std::runtime_error. Which
// kernel a problem gets is decided here, by pure functions: also pytransformer._C.cuda_attention_plan.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/attention/config.h"
#include "cuda/attention/problem.h"

namespace pt::cuda {

// The least class that holds both head sizes. f32 has two, and passes over masks and biases have one.
inline int head_class(Pass pass, DType dtype, int head_dim, int value_dim) {
  const int widest = head_dim > value_dim ? head_dim : value_dim;
  if (pass == Pass::Dense) return 256;
  if (dtype == DType::f32) return widest <= 64 ? 64 : 256;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
}

struct AttentionPlan {
  int head_class;
  bool general;
  AttentionTile tile;
  int smem_bytes;
};

inline AttentionPlan plan_attention(Pass pass, DType dtype, int head_dim, int value_dim, bool plain, bool diagonals) {
  AttentionPlan plan{};
  plan.head_class = head_class(pass, dtype, head_dim, value_dim);
  // Kernels without terms: forward, for 16 bits; backward, for bf16, where it saves registers.
  const int widest_plain = pass == Pass::Forward ? 256 : pass == Pass::Queries ? 128 : pass == Pass::Keys ? 64 : 0;
  const bool has_plain = plan.head_class <= widest_plain && (pass == Pass::Forward ? dtype != DType::f32 : dtype == DType::bf16);
  plan.general = !plain || !has_plain;
  plan.tile = attention_tile(pass, plan.head_class, size_of(dtype), plan.general);
  plan.smem_bytes = attention_smem(pass, plan.tile, size_of(dtype), diagonals);
  return plan;
}
inline AttentionPlan plan_attention(Pass pass, const AttentionProblem& p, bool diagonals) {
  return plan_attention(pass, p.dtype, p.head_dim, p.value_dim, p.plain() && !p.key_bits.data, diagonals);
}

// Blocks of one flat dimension, which may exceed 65,535.
inline unsigned attention_blocks(int64_t sequences, int64_t heads, int64_t tiles) {
  const int64_t blocks = sequences * heads * tiles;
  if (blocks >= int64_t(1) << 31)
    throw std::runtime_error("attention: " + std::to_string(blocks) + " blocks, at most 2^31 - 1 are possible");
  return unsigned(blocks);
}

// Of `all`, as many as run at once where few of them have anything to do: two on a multiprocessor.
inline unsigned blocks_to_make(const Redo& redo, unsigned all, int multiprocessors) {
  const unsigned few = 2 * unsigned(multiprocessors);
  return redo.flags && all > few ? few : all;
}

inline int64_t tiles_of(int64_t rows, const AttentionTile& t) { return (rows + t.rows() - 1) / t.rows(); }

// Of one dtype, each compiled in a file of its own: fwd_bf16.cu and so on.
template <class T>
void attention_forward_as(const AttentionForward& f, const AttentionPlan& plan, void* stream);
template <class T>
void attention_queries_as(const AttentionBackward& g, const AttentionPlan& plan, void* stream);
template <class T>
void attention_keys_as(const AttentionBackward& g, const AttentionPlan& plan, void* stream);
template <class T>
void attention_dense_as(const AttentionDense& f, const AttentionPlan& plan, void* stream);

void attention_key_bits(const AttentionKeyBits& f, void* stream);
// f.redo is what attention_forward_redo says, with flags.
void attention_forward(const AttentionForward& f, void* stream);
Redo attention_forward_redo(const AttentionForward& f);
// Of a pass of the backward, with g.redo as attention_backward_redo says.
Redo attention_backward_redo(const AttentionBackward& g, Pass pass);
void attention_backward_rows(const AttentionRows& r, void* stream);
void attention_backward_queries(const AttentionBackward& g, void* stream);
void attention_backward_keys(const AttentionBackward& g, void* stream);
// d_query, d_key and d_value at once, the first added across blocks in any order: to g.query_sums, of as many zeros as
// attention_sums_wanted says; 0: there is no such kernel for the problem.
int64_t attention_sums_wanted(const AttentionBackward& g);
void attention_backward_fused(const AttentionBackward& g, void* stream);
void attention_backward_dense(const AttentionDense& f, void* stream);
void attention_backward_sums(const AttentionSums& f, void* stream);

}  // namespace pt::cuda
