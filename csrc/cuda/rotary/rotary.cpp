// SPDX-License-Identifier: Apache-2.0
// Binding of rotary positions on a GPU: checks the arguments, fills in the problems, allocates the
// partial sums and launches. Tensors of rows have a contiguous last dimension; x, d_out and key are
// not empty: see pytransformer/ops/_backends/cuda/rotary.py.
#include "cuda/binding.h"
#include "cuda/layer_norm/kernels.h"
#include "cuda/rotary/kernels.h"

namespace {

using namespace pt::cuda;

constexpr const char* kAppend = "append_kv";

// Fills in a problem from tensors. The tensors' alignment decides between the kernels.
class Builder {
 public:
  Builder(const char* op, const Tensor& x, const MaybeTensor& cos, const MaybeTensor& sin,
          bool interleaved)
      : op_(op) {
    STD_TORCH_CHECK(x.dim() == 4 && x.numel() > 0, op_,
                    ": x must have 4 dimensions and not be empty");
    STD_TORCH_CHECK(x.size(3) <= kMaxRotaryColumns, op_, ": ", x.size(3), " columns, at most ",
                    kMaxRotaryColumns, " are possible");
    p.batch = size_of_dim(x, 0), p.length = size_of_dim(x, 2), p.dim = int(x.size(3));
    p.dtype = dtype_of(x, "x");
    p.interleaved = interleaved;
    STD_TORCH_CHECK(bool(cos) == bool(sin), op_, ": cos and sin come together");
    if (!cos) return;
    p.turned = int(cos->size(-1));
    STD_TORCH_CHECK(p.turned % 2 == 0 && p.turned <= p.dim, op_, ": cos has ", p.turned,
                    " columns; expected an even number up to ", p.dim);
    p.cos = angles_of(*cos, "cos"), p.sin = angles_of(*sin, "sin");
  }

  // Return rows (batch, heads, length, columns) of x's dtype. `pages`: a cache, which has its own
  // first and third dimension.
  template <class R>
  R heads_of(const MaybeTensor& t, const char* name, int64_t columns, bool pages = false) {
    R r;
    if (!t) return r;
    STD_TORCH_CHECK(
        t->dim() == 4 && t->size(3) == columns &&
            ((pages && eight_bits_of(*t) != EightBits::none) || dtype_of(*t, name) == p.dtype) &&
            (pages || (t->size(0) == p.batch && t->size(2) == p.length)),
        op_, ": ", name, " must have the shape (", p.batch, ", heads, ", p.length, ", ", columns,
        ") and the dtype of x");
    STD_TORCH_CHECK(t->stride(3) == 1 || columns <= 1, op_, ": the last dimension of ", name,
                    " must be contiguous");
    STD_TORCH_CHECK(pages || rows_of(t->size(1)) <= kMaxRotaryRows, op_, ": ", name,
                    " has more than ", kMaxRotaryRows, " rows");
    r.heads = t->size(1), r.strides = {t->stride(0), t->stride(1), t->stride(2), 1};
    if constexpr (std::is_same_v<R, Heads>) r.data = read_from(op_, *t, name, reachable);
    else r.data = write_to(op_, *t, name, reachable);
    see(*t, r.data);
    return r;
  }

  Columns weight_of(const MaybeTensor& t, const char* name) {
    if (!t) return {};
    STD_TORCH_CHECK(t->numel() == p.dim && t->is_contiguous(), op_, ": ", name,
                    " must be contiguous, of ", p.dim, " numbers");
    const Columns c{read_from(op_, *t, name, reachable), dtype_of(*t, name)};
    see(*t, c.data);
    return c;
  }

  // Return the address of (batch, heads, length) float32, or null.
  float* per_row(const MaybeTensor& t, int64_t heads) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(
        t->numel() == rows_of(heads) && t->is_contiguous() && t->scalar_type() == ScalarType::Float,
        op_, ": rstd must be contiguous, of ", rows_of(heads), " float32 numbers");
    return static_cast<float*>(write_to(op_, *t, "rstd", reachable));
  }

  // Plan, and copy the parts that kernels read to the problem.
  RotaryPlan plan(int64_t heads, bool sums, bool also_aligned = true) {
    const RotaryShape shape{rows_of(heads), p.dim, p.turned, p.interleaved,
                            aligned_ && also_aligned};
    const RotaryPlan plan = plan_rotary(shape, sums, multiprocessors());
    p.lanes = plan.lanes, p.pair_chunks = plan.pair_chunks, p.chunks = plan.chunks;
    return plan;
  }
  int64_t rows_of(int64_t heads) const { return int64_t(p.batch) * p.length * heads; }

  RotaryProblem p{};
  Reachable reachable;

 private:
  int size_of_dim(const Tensor& t, int64_t d) const {
    STD_TORCH_CHECK(t.size(d) <= kMaxRotaryRows, op_, ": dimension ", d, " is ", t.size(d),
                    ", at most ", kMaxRotaryRows, " is possible");
    return int(t.size(d));
  }

  AngleTable angles_of(const Tensor& t, const char* name) {
    STD_TORCH_CHECK(t.dim() == 3 && (t.size(0) == p.batch || t.size(0) == 1) &&
                        t.size(1) == p.length && t.size(2) == p.turned,
                    op_, ": ", name, " must have the shape (", p.batch, " or 1, ", p.length, ", ",
                    p.turned, ")");
    STD_TORCH_CHECK(t.stride(2) == 1 || p.turned <= 1, op_, ": the last dimension of ", name,
                    " must be contiguous");
    const AngleTable table{read_from(op_, t, name, reachable), dtype_of(t, name),
                           t.size(0) == 1 ? 0 : t.stride(0), t.stride(1)};
    see(t, table.data);
    return table;
  }

  // Record if the rows start at multiples of 16 bytes (8 for eight-bit values).
  void see(const Tensor& t, const void* data) {
    if (t.numel() == 0) return;
    const int64_t piece = t.element_size() == 1 ? 8 : 16;  // eight values of eight bits
    bool aligned = int64_t(reinterpret_cast<uintptr_t>(data)) % piece == 0;
    for (int64_t d = 0; d + 1 < t.dim(); ++d)
      aligned &= t.size(d) == 1 || t.stride(d) * int64_t(t.element_size()) % piece == 0;
    aligned_ &= aligned;
  }

  const char* op_;
  bool aligned_ = true;
};

void rotary_fwd(Tensor x, MaybeTensor cos, MaybeTensor sin, MaybeTensor weight, Tensor out,
                MaybeTensor rstd, bool interleaved, double eps, double weight_offset,
                int64_t device, int64_t stream) {
  Builder b("rotary", x, cos, sin, interleaved);
  b.p.eps = float(eps), b.p.weight_offset = float(weight_offset);
  RotaryForward f{};
  f.x = b.heads_of<Heads>(x, "x", b.p.dim), f.out = b.heads_of<HeadsOut>(out, "out", b.p.dim);
  STD_TORCH_CHECK(f.out.heads == f.x.heads, "rotary: out must have the heads of x");
  f.weight = b.weight_of(weight, "weight");
  f.rstd = b.per_row(rstd, f.x.heads);
  const DeviceGuard guard(device);
  const RotaryPlan plan = b.plan(f.x.heads, false);
  rotary_forward(b.p, f, plan, reinterpret_cast<void*>(stream));
}

void rotary_bwd(Tensor d_out, Tensor x, MaybeTensor cos, MaybeTensor sin, MaybeTensor weight,
                MaybeTensor rstd, MaybeTensor dx, MaybeTensor dweight, bool interleaved,
                double weight_offset, int64_t device, int64_t stream) {
  Builder b("rotary", d_out, cos, sin, interleaved);
  b.p.weight_offset = float(weight_offset);
  RotaryBackward f{};
  f.d_out = b.heads_of<Heads>(d_out, "d_out", b.p.dim), f.x = b.heads_of<Heads>(x, "x", b.p.dim);
  f.dx = b.heads_of<HeadsOut>(dx, "dx", b.p.dim);
  STD_TORCH_CHECK(f.x.heads == f.d_out.heads && (!f.dx.data || f.dx.heads == f.x.heads),
                  "rotary: the numbers of heads differ");
  f.weight = b.weight_of(weight, "weight");
  f.rstd = b.per_row(rstd, f.x.heads);
  STD_TORCH_CHECK(bool(f.weight.data) == bool(f.rstd) && (f.weight.data || (!dweight && f.dx.data)),
                  "rotary: weight and rstd come together");
  const DeviceGuard guard(device);
  const RotaryPlan plan = b.plan(f.x.heads, bool(dweight));
  // Freed on return; torch's allocator gives the memory only to later work of the same stream.
  std::optional<Tensor> partials;
  LayerNormReduce r{};
  if (dweight) {
    r.blocks = int(plan.whole ? plan.blocks : plan.blocks * plan.rows_per_block()),
    r.columns = b.p.dim;
    partials = torch::stable::new_empty(d_out, {r.blocks, r.columns}, ScalarType::Float);
    f.dweight_partials =
        static_cast<float*>(write_to("rotary", *partials, "partial sums", b.reachable));
    STD_TORCH_CHECK(dweight->numel() == b.p.dim && dweight->is_contiguous(),
                    "rotary: dweight must be contiguous, of ", b.p.dim, " numbers");
    r.partials[0] = f.dweight_partials,
    r.sums[0] = write_to("rotary", *dweight, "dweight", b.reachable),
    r.dtype[0] = dtype_of(*dweight, "dweight");
  }
  rotary_backward(b.p, f, plan, reinterpret_cast<void*>(stream));
  if (dweight) layer_norm_reduce(r, reinterpret_cast<void*>(stream));
}

// Fill in the scales of eight-bit caches.
void fill_scales(Builder& b, AppendKV& f, const Tensor& key_cache, const Tensor& value_cache,
                 const MaybeTensor& key_scale, const MaybeTensor& value_scale) {
  f.eight_bits = eight_bits_of(key_cache);
  const bool wanted = f.eight_bits != EightBits::none;
  STD_TORCH_CHECK(bool(key_scale) == wanted && bool(value_scale) == wanted &&
                      eight_bits_of(value_cache) == f.eight_bits,
                  "append_kv: key_scale and value_scale come with caches that are both int8, or "
                  "both float8_e4m3fn");
  const auto scales = [&](const Tensor& t, const Tensor& cache, const char* name) {
    STD_TORCH_CHECK(t.dim() == 3 && t.scalar_type() == ScalarType::Float, "append_kv: ", name,
                    " must be float32 of 3 dimensions");
    for (int d = 0; d < 3; ++d)
      STD_TORCH_CHECK(t.size(d) == cache.size(d), "append_kv: ", name,
                      " must have a number for each row");
    HeadsOut out;
    out.data = write_to(kAppend, t, name, b.reachable), out.heads = t.size(1),
    out.strides = {t.stride(0), t.stride(1), t.stride(2), 1};
    return out;
  };
  if (wanted)
    f.key_scales = scales(*key_scale, key_cache, "key_scale"),
    f.value_scales = scales(*value_scale, value_cache, "value_scale");
}

// Fill in the destinations of keys, and check the caches.
void fill_cache(Builder& b, AppendKV& f, const Tensor& key_cache, const Tensor& value_cache,
                const MaybeTensor& page_table, const Tensor& positions) {
  const int64_t rows = key_cache.size(2), pages = page_table ? page_table->size(1) : 1;
  f.num_pages = key_cache.size(0);
  f.key.out = b.heads_of<HeadsOut>(key_cache, "key_cache", b.p.dim, true);
  f.value_cache = b.heads_of<HeadsOut>(value_cache, "value_cache", f.value_dim, true);
  STD_TORCH_CHECK(value_cache.size(0) == f.num_pages && value_cache.size(2) == rows,
                  "append_kv: the caches must have the same pages");
  STD_TORCH_CHECK(
      rows <= kMaxRotaryRows && pages <= kMaxRotaryRows && rows * pages <= kMaxRotaryRows,
      "append_kv: a sequence has room for more than ", kMaxRotaryRows, " positions");
  f.page_size = int(rows), f.pages = int(pages);
  for (int64_t heads : {f.value.heads, f.key.out.heads, f.value_cache.heads})
    STD_TORCH_CHECK(heads == f.key.x.heads,
                    "append_kv: key, value and the caches must have the same heads");
  STD_TORCH_CHECK(
      positions.dim() == 2 && positions.size(0) == b.p.batch && positions.size(1) == b.p.length &&
          positions.is_contiguous() && positions.scalar_type() == ScalarType::Long,
      "append_kv: positions must be a contiguous int64 matrix (", b.p.batch, ", ", b.p.length, ")");
  f.positions =
      static_cast<const int64_t*>(read_from(kAppend, positions, "positions", b.reachable));
  if (!page_table) {
    STD_TORCH_CHECK(f.num_pages == b.p.batch,
                    "append_kv: the caches must have a row for each sequence");
    return;
  }
  f.table_is_int64 = page_table->scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(
      page_table->dim() == 2 && page_table->size(0) == b.p.batch && page_table->is_contiguous() &&
          (f.table_is_int64 || page_table->scalar_type() == ScalarType::Int),
      "append_kv: page_table must be a contiguous int64 or int32 matrix of ", b.p.batch, " rows");
  f.table = read_from(kAppend, *page_table, "page_table", b.reachable);
}

void append_kv_op(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,
                  MaybeTensor page_table, MaybeTensor key_scale, MaybeTensor value_scale,
                  Tensor positions, MaybeTensor cos, MaybeTensor sin, MaybeTensor q_norm,
                  MaybeTensor k_norm, Tensor out, bool interleaved, double eps,
                  double weight_offset, int64_t device, int64_t stream) {
  // Built from the key, which has the query's batch, length and dimension, because the query has no
  // heads if only a cache is written.
  Builder b(kAppend, key, cos, sin, interleaved);
  b.p.eps = float(eps), b.p.weight_offset = float(weight_offset);
  AppendKV f{};
  f.query.x = b.heads_of<Heads>(query, "query", b.p.dim),
  f.query.out = b.heads_of<HeadsOut>(out, "out", b.p.dim);
  STD_TORCH_CHECK(f.query.out.heads == f.query.x.heads,
                  "append_kv: out must have the heads of query");
  f.key.x = b.heads_of<Heads>(key, "key", b.p.dim);
  STD_TORCH_CHECK(value.dim() == 4 && value.size(3) <= kMaxRotaryColumns,
                  "append_kv: value must have 4 dimensions, at most ", kMaxRotaryColumns,
                  " columns");
  f.value_dim = int(value.size(3));
  f.value = b.heads_of<Heads>(value, "value", f.value_dim);
  f.query.weight = b.weight_of(q_norm, "q_norm"), f.key.weight = b.weight_of(k_norm, "k_norm");
  fill_cache(b, f, key_cache, value_cache, page_table, positions);
  fill_scales(b, f, key_cache, value_cache, key_scale, value_scale);

  const DeviceGuard guard(device);
  RotaryPlan plan = b.plan(f.key.x.heads, false, f.value_dim % 8 == 0);
  f.value_lanes = plan.whole ? lanes_of(chunks_of(f.value_dim)) : 32;
  const auto blocks = [&](int64_t heads, int lanes) {
    return (b.rows_of(heads) * lanes + kRotaryThreads - 1) / kRotaryThreads;
  };
  f.query_blocks = unsigned(blocks(f.query.x.heads, plan.lanes)),
  f.key_blocks = unsigned(plan.blocks);
  plan.blocks += f.query_blocks + (f.value_dim ? blocks(f.value.heads, f.value_lanes) : 0);
  append_kv(b.p, f, plan, reinterpret_cast<void*>(stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      PT_EDGE_OP("rotary_fwd(Tensor x, Tensor? cos, Tensor? sin, Tensor? weight, Tensor(a!) out, "
                 "Tensor(b!)? rstd, bool interleaved, "
                 "float eps, float weight_offset, int device, int stream) -> ()"));
  m.def(PT_EDGE_OP(
      "rotary_bwd(Tensor d_out, Tensor x, Tensor? cos, Tensor? sin, Tensor? weight, Tensor? rstd, "
      "Tensor(a!)? dx, "
      "Tensor(b!)? dweight, bool interleaved, float weight_offset, int device, int stream) -> ()"));
  m.def(
      PT_EDGE_OP("append_kv(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, "
                 "Tensor(b!) value_cache, Tensor? page_table, "
                 "Tensor(d!)? key_scale, Tensor(e!)? value_scale, Tensor positions, Tensor? cos, "
                 "Tensor? sin, Tensor? q_norm, Tensor? "
                 "k_norm, Tensor(c!) out, bool interleaved, float eps, "
                 "float weight_offset, int device, int stream) -> ()"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("rotary_fwd"), TORCH_BOX(&rotary_fwd));
  m.impl(PT_EDGE_OP("rotary_bwd"), TORCH_BOX(&rotary_bwd));
  m.impl(PT_EDGE_OP("append_kv"), TORCH_BOX(&append_kv_op));
}
