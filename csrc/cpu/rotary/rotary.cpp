// SPDX-License-Identifier: Apache-2.0
// Rotary positions on the CPU, binding: check the kernels' requirements and fill in the problems.
// Tensors are not empty, and their last dimension is contiguous: see
// pytransformer/ops/_backends/cpu/rotary.py.
#include "cpu/rotary/problem.h"

#include "cpu/core/binding.h"

PT_DECLARE_KERNELS(RotaryKernels, rotary_kernels);

namespace {

using pt::MaybeTensor;
using pt::ScalarType;
using pt::Tensor;

constexpr const char* kOp = "rotary";

// Return the rows of a (batch, heads, length, columns) tensor of x's dtype.
template <class Rows>
Rows heads_of(const Tensor& t, const char* name, const Tensor& x, int64_t batch, int64_t length,
              int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == batch && t.size(2) == length &&
                      t.size(3) == columns && t.scalar_type() == x.scalar_type(),
                  "rotary: ", name, " must have the shape (", batch, ", heads, ", length, ", ",
                  columns, ") and the dtype of x");
  STD_TORCH_CHECK(t.stride(3) == 1 || columns <= 1, "rotary: the last dimension of ", name,
                  " must be contiguous");
  Rows rows;
  rows.data = pt::write_address(kOp, t, name), rows.heads = t.size(1);
  rows.strides = {t.stride(0), t.stride(1), t.stride(2), 1};
  return rows;
}
template <class Rows>
Rows heads_of(const Tensor& t, const char* name, const Tensor& x) {
  return heads_of<Rows>(t, name, x, x.size(0), x.size(2), x.size(3));
}
template <class Rows>
Rows heads_of(const MaybeTensor& t, const char* name, const Tensor& x) {
  return t ? heads_of<Rows>(*t, name, x) : Rows();
}

pt::RotaryProblem problem_of(const Tensor& x, const MaybeTensor& cos, const MaybeTensor& sin,
                             bool interleaved, double eps, double weight_offset) {
  STD_TORCH_CHECK(x.dim() == 4 && x.numel() > 0,
                  "rotary: x must have 4 dimensions and not be empty");
  pt::RotaryProblem p{};
  p.batch = x.size(0), p.length = x.size(2), p.dim = x.size(3);
  p.dtype = pt::dtype_of(x, "x", pt::Float64::taken);
  p.interleaved = interleaved, p.eps = eps, p.weight_offset = weight_offset;
  p.threads = pt::pool_threads();
  STD_TORCH_CHECK(bool(cos) == bool(sin), "rotary: cos and sin come together");
  if (!cos) return p;
  const auto work = p.dtype == pt::DType::f64 ? ScalarType::Double : ScalarType::Float;
  p.turned = cos->size(-1);
  for (const Tensor* t : {&*cos, &*sin})
    STD_TORCH_CHECK(
        t->dim() == 3 && (t->size(0) == p.batch || t->size(0) == 1) && t->size(0) == cos->size(0) &&
            t->size(1) == p.length && t->size(2) == p.turned && t->is_contiguous() &&
            t->scalar_type() == work,
        "rotary: cos and sin must be contiguous float32 (float64 for float64) of the shape (",
        p.batch, " or 1, ", p.length, ", turned)");
  STD_TORCH_CHECK(p.turned % 2 == 0 && p.turned <= p.dim, "rotary: cos has ", p.turned,
                  " columns; expected an even number up to ", p.dim);
  p.cos = pt::read_address(kOp, *cos, "cos"), p.sin = pt::read_address(kOp, *sin, "sin");
  p.table_batch = cos->size(0) == 1 ? 0 : p.length * p.turned;
  return p;
}

void rotary_fwd(Tensor x, MaybeTensor cos, MaybeTensor sin, MaybeTensor weight, Tensor out,
                MaybeTensor rstd, bool interleaved, double eps, double weight_offset) {
  const pt::RotaryProblem p = problem_of(x, cos, sin, interleaved, eps, weight_offset);
  const pt::binding::Binding binding("rotary", x);
  pt::RotaryForward f;
  f.x = heads_of<pt::Heads>(x, "x", x);
  f.out = heads_of<pt::HeadsOut>(out, "out", x);
  STD_TORCH_CHECK(f.out.heads == f.x.heads, "rotary: out must have the heads of x");
  f.weight = binding.vector(weight, "weight", p.dim);
  f.rstd = binding.vector(rstd, "rstd", p.batch * f.x.heads * p.length);
  PT_SELECT(rotary_kernels).forward(p, f);
}

void rotary_bwd(Tensor d_out, Tensor x, MaybeTensor cos, MaybeTensor sin, MaybeTensor weight,
                MaybeTensor rstd, MaybeTensor dx, MaybeTensor dweight, bool interleaved,
                double weight_offset) {
  const pt::RotaryProblem p = problem_of(d_out, cos, sin, interleaved, 0, weight_offset);
  const pt::binding::Binding binding("rotary", x);
  pt::RotaryBackward f;
  f.d_out = heads_of<pt::Heads>(d_out, "d_out", d_out);
  f.x = heads_of<pt::Heads>(x, "x", d_out);
  f.dx = heads_of<pt::HeadsOut>(dx, "dx", d_out);
  STD_TORCH_CHECK(f.x.heads == f.d_out.heads && (!f.dx.data || f.dx.heads == f.x.heads),
                  "rotary: the numbers of heads differ");
  f.weight = binding.vector(weight, "weight", p.dim);
  f.rstd = binding.vector(rstd, "rstd", p.batch * f.x.heads * p.length);
  f.dweight = binding.vector(dweight, "dweight", p.dim);
  STD_TORCH_CHECK(bool(f.weight) == bool(f.rstd) && (f.weight || (!f.dweight && f.dx.data)),
                  "rotary: weight and rstd come together");
  PT_SELECT(rotary_kernels).backward(p, f);
}

const int64_t* integers_of(pt::binding::IndexCopies& copies, const Tensor& t, const char* name,
                           int64_t rows) {
  STD_TORCH_CHECK(
      t.dim() == 2 && t.size(0) == rows && t.is_contiguous() && t.scalar_type() == ScalarType::Long,
      "append_kv: ", name, " must be a contiguous int64 matrix of ", rows, " rows");
  return copies.copy<int64_t>(pt::read_address("append_kv", t, name), t.numel());
}

void append_kv(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,
               MaybeTensor page_table, Tensor positions, MaybeTensor cos, MaybeTensor sin,
               MaybeTensor q_norm, MaybeTensor k_norm, Tensor out, bool interleaved, double eps,
               double weight_offset) {
  // Take the sizes from key, which has the query's batch, length and dimension: the query has no
  // heads if the call only writes a cache.
  const pt::RotaryProblem p = problem_of(key, cos, sin, interleaved, eps, weight_offset);
  const pt::binding::Binding binding("append_kv", query);
  pt::AppendKV f{};
  f.query.x = heads_of<pt::Heads>(query, "query", query);
  f.query.out = heads_of<pt::HeadsOut>(out, "out", query);
  STD_TORCH_CHECK(f.query.out.heads == f.query.x.heads,
                  "append_kv: out must have the heads of query");
  f.key.x = heads_of<pt::Heads>(key, "key", query);
  f.value_dim = value.size(3);
  f.value = heads_of<pt::Heads>(value, "value", query, p.batch, p.length, f.value_dim);
  f.query.weight = binding.vector(q_norm, "q_norm", p.dim);
  f.key.weight = binding.vector(k_norm, "k_norm", p.dim);
  pt::binding::IndexCopies copies;
  f.positions = integers_of(copies, positions, "positions", p.batch);
  STD_TORCH_CHECK(positions.size(1) == p.length, "append_kv: positions must have ", p.length,
                  " columns");
  f.num_pages = key_cache.size(0), f.page_size = key_cache.size(2);
  f.key_cache =
      heads_of<pt::HeadsOut>(key_cache, "key_cache", query, f.num_pages, f.page_size, p.dim);
  f.value_cache = heads_of<pt::HeadsOut>(value_cache, "value_cache", query, f.num_pages,
                                         f.page_size, f.value_dim);
  for (int64_t heads : {f.value.heads, f.key_cache.heads, f.value_cache.heads})
    STD_TORCH_CHECK(heads == f.key.x.heads,
                    "append_kv: key, value and the caches must have the same heads");
  if (page_table)
    f.table = integers_of(copies, *page_table, "page_table", p.batch),
    f.pages = page_table->size(1);
  STD_TORCH_CHECK(f.table || f.num_pages == p.batch,
                  "append_kv: the caches must have a row for each sequence");
  PT_SELECT(rotary_kernels).append(p, f);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      "rotary_fwd(Tensor x, Tensor? cos, Tensor? sin, Tensor? weight, Tensor(a!) out, Tensor(b!)? "
      "rstd, bool interleaved, float eps, "
      "float weight_offset) -> ()");
  m.def(
      "rotary_bwd(Tensor d_out, Tensor x, Tensor? cos, Tensor? sin, Tensor? weight, Tensor? rstd, "
      "Tensor(a!)? dx, Tensor(b!)? dweight, "
      "bool interleaved, float weight_offset) -> ()");
  m.def(
      "append_kv(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) "
      "value_cache, Tensor? page_table, "
      "Tensor positions, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, Tensor(c!) out, "
      "bool interleaved, float eps, "
      "float weight_offset) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CPU, m) {
  m.impl("rotary_fwd", TORCH_BOX(&rotary_fwd));
  m.impl("rotary_bwd", TORCH_BOX(&rotary_bwd));
  m.impl("append_kv", TORCH_BOX(&append_kv));
}
