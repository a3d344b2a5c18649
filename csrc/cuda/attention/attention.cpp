// SPDX-License-Identifier: Apache-2.0
// Binding of attention on a GPU: reads the problem, plans it, allocates shared scratch and
// launches.
#include <string>

#include "cuda/attention/binding.h"
#include "cuda/attention/kernels.h"

namespace {

using namespace pt::cuda;

// Return the properties of the current device.
Gpu current_gpu() { return {runs_sm90a(), multiprocessors()}; }

void pack_key_padding(AttentionBinding& e, const Tensor& like, void* stream) {
  AttentionKeyPadding f = e.take_key_padding();
  if (!f.masks) return;
  f.bits = e.words_like(
      like, "key_padding",
      int64_t(f.masks) * (KeyPadding::kHead + KeyPadding::words(f.num_keys, f.before)));
  attention_key_padding(f, stream);
  e.p.key_padding.data = f.bits;
}

// Build lists of the blocks of a dense boolean mask that have a visible pair, for kernels that
// iterate over KV tiles (of_queries) or Q tiles (of_keys).
void list_blocks(AttentionBinding& e, bool of_queries, bool of_keys, const Tensor& like,
                 void* stream) {
  AttentionMaskLists f = e.take_mask_lists();
  if (!f.masks || !(of_queries || of_keys)) return;
  f.states = e.words_like(like, "states of blocks", f.blocks());
  attention_mask_lists(f, stream);
  const auto make = [&](BlockLists& lists, bool by_keys) {
    lists = e.lists_like(like, f, by_keys);
    attention_mask_lists(f, stream);
  };
  if (of_queries) make(e.p.blocks.queries, false);
  if (of_keys) make(e.p.blocks.keys, true);
  e.p.blocks.places = 1;
}

// Pack bits per pair for the sm_90a kernels, by queries or by keys: of a dense boolean mask, and of
// dropout.
void pack_pair_bits(AttentionBinding& e, bool by_queries, bool by_keys, bool dropout,
                    const Tensor& like, void* stream) {
  AttentionProblem& p = e.p;
  if (!(by_queries || by_keys)) return;
  const auto make = [&](AttentionPairBits f, PairBits& bits, bool of_batch, bool of_head) {
    const auto room = [&](PairBits::Rows& rows, bool of_keys, const char* name) {
      const int64_t of_pairs = int64_t(f.rows(of_keys)) * f.words(of_keys);
      uint32_t* const words = e.words_like(like, name, f.size(of_keys));
      rows = {words, of_batch ? of_pairs * f.heads : 0, of_head ? of_pairs : 0,
              f.rows(of_keys) > 1 ? f.words(of_keys) : 0};
      return words;
    };
    if (by_queries) f.queries = room(bits.queries, false, "bits of queries");
    if (by_keys) f.keys = room(bits.keys, true, "bits of keys");
    attention_pair_bits(f, stream);
  };
  AttentionPairBits f{
      {},      {},     p.sequences, p.heads, p.num_queries, p.num_keys, int(p.key_start % 32),
      nullptr, nullptr};
  if (p.mask.data && p.mask.type == DenseType::boolean) {
    AttentionPairBits of_mask = f;
    of_mask.mask = p.mask, of_mask.sequences = p.mask.batch ? p.sequences : 1,
    of_mask.heads = p.mask.head ? p.heads : 1;
    make(of_mask, p.mask_bits, p.mask.batch, p.mask.head);
  }
  f.dropout = {p.seed,       p.drop_threshold,        p.batch_start,
               p.head_start, uint32_t(p.query_start), uint32_t(p.key_start / 32)};
  if (dropout && p.draws_once()) make(f, p.keep_bits, true, true);
}

void attention_fwd(Tensor query, Tensor key, Tensor value, Tensor out,
                   Tensor lse PT_CUDA_ATTENTION_ARGUMENTS(PT_PARAMETER), int64_t device,
                   int64_t stream_) {
  AttentionBinding e(query, key, value, {PT_CUDA_ATTENTION_ARGUMENTS(PT_VALUE)});
  void* const stream = reinterpret_cast<void*>(stream_);
  const DeviceGuard guard(device);
  pack_key_padding(e, lse, stream);
  list_blocks(e, !splits_keys(e.p), false, lse, stream);
  AttentionForward f{};
  f.p = e.p, f.out = e.result(out, "out", e.p.heads, e.rows_q(), e.p.value_dim);
  f.lse = e.per_query<float>(lse, "lse"), f.at = e.per_query_strides();
  const PassPlan plan = plan_attention_forward(f, current_gpu());
  // With score_mod, the forward kernel draws dropout itself.
  pack_pair_bits(e, plan.on_sm90(), false, !plan.sm90.has_score_mod, lse, stream);
  f.p = e.p;
  f.recompute = e.flags_like(lse, plan.recompute, e.p.heads);
  f.split.splits = plan.split.splits;
  if (plan.split.merges()) {
    const int64_t partials = plan.split.rows * plan.split.splits;
    f.split = {plan.split.splits, e.floats_like(lse, "statistics of splits", 2 * partials),
               e.floats_like(lse, "values of splits", partials * e.p.value_dim)};
  }
  attention_forward(f, plan, stream);
}

// Compute the row stats of backward: delta, and row_max from lse.
AttentionPreprocess preprocess(AttentionBinding& e, const Tensor& grad_out,
                               const MaybeTensor& grad_lse, const Tensor& out, const Tensor& lse,
                               void* stream) {
  AttentionPreprocess r{};
  r.p = e.p, r.at = e.per_query_strides();
  r.out = e.rows_of(out, "out", false), r.d_out = e.rows_of(grad_out, "grad_out"),
  r.columns = int(out.size(out.dim() - 1));
  r.lse = e.per_query<const float>(lse, "lse");
  r.d_lse = grad_lse ? e.per_query<const float>(*grad_lse, "grad_lse") : nullptr;
  r.delta = e.floats_like(lse, "delta", lse.numel()),
  r.row_max = e.floats_like(lse, "row_max", lse.numel());
  attention_backward_preprocess(r, stream);
  return r;
}

// Recompute log2 of each row's sum if lse lost it; row_max then holds the maximum alone.
const float* recompute_row_stats(AttentionBinding& e, const AttentionPreprocess& r,
                                 const Tensor& lse, void* stream) {
  AttentionForward f{};
  f.p = e.p, f.at = r.at, f.lse = const_cast<float*>(r.lse);
  f.row_max = r.row_max, f.log2_sum = e.floats_like(lse, "log2_sum", lse.numel());
  attention_forward(f, plan_attention_forward(f, current_gpu()), stream);
  return f.log2_sum;
}

// Compute the requested ones of d_query, d_key and d_value, and partial sums.
void run_passes(AttentionBinding& e, AttentionBackward& g, const BackwardPlan& plan,
                const Tensor& lse, void* stream) {
  if (plan.is_fused()) {
    g.dq_accum = plan.turns ? e.floats_like(lse, "dq_accum", plan.dq_accum)
                            : e.zeros_like(lse, "dq_accum", plan.dq_accum);
    attention_backward_fused(
        g, plan, plan.turns ? e.zero_words_like(lse, "turns", plan.turns) : nullptr, stream);
    return;
  }
  if (g.dq.data || g.slope_partials || g.diagonal_partials) {
    g.recompute = e.flags_like(lse, plan.dq.recompute, e.p.heads);
    attention_backward_dq(g, plan.dq, stream);
  }
  if (g.dk.data || g.dv.data) {
    g.recompute = e.flags_like(lse, plan.dkdv.recompute, int(e.key_heads()));
    attention_backward_dkdv(g, plan.dkdv, stream);
  }
}

// Reduce the Q tiles' partial sums to the gradients of slopes and T5's table.
void reduce_partials(AttentionBinding& e, const AttentionBackward& g, int tiles,
                     const MaybeTensor& dslopes, const MaybeTensor& dtable,
                     const MaybeTensor& bucket_ranges, void* stream) {
  AttentionReducePartials sums{nullptr, nullptr, nullptr, e.p.sequences, e.p.heads, tiles,
                               1,       1,       {}};
  if (dslopes) {
    sums.partials = g.slope_partials, sums.sums = e.floats<float>(dslopes, "dslopes", e.p.heads);
    attention_backward_reduce_partials(sums, stream);
  }
  if (dtable) {
    STD_TORCH_CHECK(bucket_ranges->scalar_type() == ScalarType::Int &&
                        bucket_ranges->is_contiguous() &&
                        bucket_ranges->numel() * e.p.heads == 2 * dtable->numel(),
                    "attention: bucket_ranges must be contiguous int32, (buckets, 2)");
    sums.ranges = static_cast<const int32_t*>(
        read_from(kAttention, *bucket_ranges, "bucket_ranges", e.reachable));
    sums.partials = g.diagonal_partials,
    sums.sums = e.floats<float>(dtable, "dtable", dtable->numel());
    sums.width = e.p.before + e.p.after + 1, sums.outputs = int(dtable->numel() / e.p.heads);
    attention_backward_reduce_partials(sums, stream);
  }
}

void attention_bwd(Tensor grad_out, MaybeTensor grad_lse, Tensor query, Tensor key, Tensor value,
                   Tensor out, Tensor lse PT_CUDA_ATTENTION_ARGUMENTS(PT_PARAMETER), MaybeTensor dq,
                   MaybeTensor dk, MaybeTensor dv, MaybeTensor dmask, MaybeTensor dbias,
                   MaybeTensor dslopes, MaybeTensor dtable, MaybeTensor dsinks,
                   MaybeTensor bucket_ranges, bool deterministic, int64_t device, int64_t stream_) {
  STD_TORCH_CHECK(!page_table && !key_scale,
                  "attention: page_table and keys in eight bits have no gradients");
  AttentionBinding e(query, key, value, {PT_CUDA_ATTENTION_ARGUMENTS(PT_VALUE)});
  void* const stream = reinterpret_cast<void*>(stream_);
  const DeviceGuard guard(device);
  pack_key_padding(e, lse, stream);
  const AttentionPreprocess r = preprocess(e, grad_out, grad_lse, out, lse, stream);

  BackwardRequest request{};
  AttentionBackward& g = request.g;
  g.p = e.p, g.at = r.at, g.d_out = r.d_out, g.delta = r.delta, g.row_max = r.row_max;
  g.dq = e.result(dq, "dq", e.p.heads, e.rows_q(), e.p.head_dim);
  g.dk = e.result(dk, "dk", e.key_heads(), e.rows_k(), e.p.head_dim);
  g.dv = e.result(dv, "dv", e.key_heads(), e.rows_k(), e.p.value_dim);
  STD_TORCH_CHECK((!dslopes || e.p.slopes) && (!dtable || (e.p.diagonals && bucket_ranges)),
                  "attention: a gradient of nothing");
  request.diagonals = dtable.has_value(), request.deterministic = deterministic;
  request.dbias[0] = e.dense_gradient(dmask, "dmask", mask),
  request.dbias[1] = e.dense_gradient(dbias, "dbias", bias);
  for (AttentionDbias& f : request.dbias) f.b = g;

  const BackwardPlan plan = plan_attention_backward(request, current_gpu());
  list_blocks(e, plan.walks_keys(request), plan.walks_queries(request), lse, stream);
  pack_pair_bits(e, plan.asks_queries(request), plan.asks_keys(request), true, lse, stream);
  g.p = e.p;
  if (e.p.split_lse()) g.log2_sum = recompute_row_stats(e, r, lse, stream);
  if (dsinks) {
    STD_TORCH_CHECK(e.p.sinks, "attention: a gradient of nothing");
    attention_backward_dsinks({e.p, r.at, r.lse, r.d_lse, r.delta, r.row_max, g.log2_sum,
                               e.floats<float>(dsinks, "dsinks", e.p.heads)},
                              stream);
  }
  const int64_t blocks = int64_t(e.p.sequences) * e.p.heads * plan.partial_tiles;
  if (dslopes) g.slope_partials = e.floats_like(lse, "partials of slopes", blocks);
  if (dtable)
    g.diagonal_partials =
        e.zeros_like(lse, "partials of diagonals", blocks * (e.p.before + e.p.after + 1));
  run_passes(e, g, plan, lse, stream);
  reduce_partials(e, g, plan.partial_tiles, dslopes, dtable, bucket_ranges, stream);
  for (int i = 0; i < 2; ++i) {
    AttentionDbias& f = request.dbias[i];
    f.b = g;
    if (f.data) attention_backward_dbias(f, plan.dbias[i], stream);
  }
}

// Return a call's plan with all gradients as JSON: per pass the reason why the sm_90a kernels do
// not run it, or null; the number of float32 values in dq_accum; the minimum queries and keys of a
// block of a block mask; and if a dense mask gets block lists.
std::string attention_plan(Tensor query, Tensor key,
                           Tensor value PT_CUDA_ATTENTION_ARGUMENTS(PT_PARAMETER),
                           bool deterministic, int64_t device, int64_t) {
  AttentionBinding e(query, key, value, {PT_CUDA_ATTENTION_ARGUMENTS(PT_VALUE)},
                     AttentionBinding::Purpose::plan);
  const DeviceGuard guard(device);
  e.take_key_padding();
  AttentionForward f{};
  f.p = e.p, f.out = planned_out(e.p.value_dim);
  BackwardRequest request{};
  AttentionBackward& g = request.g;
  g.p = e.p, g.d_out = {kPlanned, kPlannedStrides};
  g.dq = g.dk = planned_out(e.p.head_dim), g.dv = planned_out(e.p.value_dim);
  request.diagonals = e.p.diagonals, request.deterministic = deterministic;
  const MaybeTensor* const dense[] = {&mask, &bias};
  for (int i = 0; i < 2; ++i) {
    AttentionDbias& d = request.dbias[i];
    if (!*dense[i] || (*dense[i])->scalar_type() == ScalarType::Bool) continue;
    d.b = g, d.data = kPlanned, d.key = 1;
    for (int k = 0; k < 4; ++k) d.sizes[k] = int((*dense[i])->size(k));
  }
  const BackwardPlan plan = plan_attention_backward(request, current_gpu());
  std::string passes;
  const auto tell = [&](const char* pass, const Sm90Plan& sm90) {
    passes += std::string(passes.empty() ? "\"" : ", \"") + pass +
              "\": " + (sm90.why_not ? "\"" + std::string(sm90.why_not) + "\"" : "null");
  };
  const PassPlan forward = plan_attention_forward(f, current_gpu());
  tell("forward", forward.sm90);
  if (page_table || key_scale) {  // forward only
  } else if (plan.is_fused()) tell("bwd_fused", plan.fused);
  else tell("bwd_dq", plan.dq.sm90), tell("bwd_dkdv", plan.dkdv.sm90);
  for (int i = 0; i < 2; ++i)
    if (request.dbias[i].data) tell(i == 0 ? "d_mask" : "d_bias", plan.dbias[i].sm90);
  const LeastBlock least = least_block(e.p.dtype, e.p.head_dim, e.p.value_dim);
  return "{\"passes\": {" + passes + "}, \"dq_accum\": " + std::to_string(plan.dq_accum) +
         ", \"least_block\": [" + std::to_string(least.queries) + ", " +
         std::to_string(least.keys) + "], \"lists_mask\": " +
         (e.take_mask_lists().masks && !forward.split.splits ? "true" : "false") +
         ", \"splits\": " + std::to_string(forward.split.splits) +
         ", \"workspace\": " + std::to_string(forward.split.floats(e.p.value_dim)) + "}";
}

}  // namespace

#define PT_QUERY_KEY_VALUE "Tensor query, Tensor key, Tensor value"
#define PT_SHARED PT_CUDA_ATTENTION_ARGUMENTS(PT_SCHEMA)
STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(PT_EDGE_OP("attention_fwd(" PT_QUERY_KEY_VALUE ", Tensor(a!) out, Tensor(b!) lse" PT_SHARED
                   ", int device, int stream) -> ()"));
  m.def(PT_EDGE_OP("attention_bwd(Tensor grad_out, Tensor? grad_lse, " PT_QUERY_KEY_VALUE
                   ", Tensor out, Tensor lse" PT_SHARED
                   ", Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dmask, "
                   "Tensor(e!)? dbias, Tensor(f!)? dslopes, Tensor(g!)? dtable, "
                   "Tensor(h!)? dsinks, Tensor? bucket_ranges, bool deterministic, int device, "
                   "int stream) -> ()"));
  m.def(PT_EDGE_OP("attention_plan(" PT_QUERY_KEY_VALUE PT_SHARED
                   ", bool deterministic, int device, int stream) -> str"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("attention_fwd"), TORCH_BOX(&attention_fwd));
  m.impl(PT_EDGE_OP("attention_bwd"), TORCH_BOX(&attention_bwd));
  m.impl(PT_EDGE_OP("attention_plan"), TORCH_BOX(&attention_plan));
}
