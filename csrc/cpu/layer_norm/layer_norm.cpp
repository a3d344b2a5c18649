// SPDX-License-Identifier: Apache-2.0
// Layer norm on the CPU, binding: check the kernels' requirements and fill in the problem.
//
// Row tensors are not empty, and contiguous or (outer, inner, columns) views with contiguous
// columns: see pytransformer/ops/_backends/cpu/layer_norm.py.
#include "cpu/layer_norm/problem.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/binding.h"
#include "cpu/core/isa.h"
#include "cpu/core/pages.h"
#include "cpu/core/parallel.h"

PT_DECLARE_KERNELS(NormKernels, layer_norm_kernels);

namespace {

using pt::MaybeTensor;
using pt::ScalarType;
using pt::Tensor;

constexpr const char* kOp = "layer_norm";

// Return a tensor's rows on the problem's grid.
template <class R>
R rows_of(const Tensor& t, const char* name, const pt::NormProblem& p) {
  R rows;
  rows.data = pt::write_address(kOp, t, name), rows.dtype = dtype_of(t, name, pt::Float64::taken);
  if (t.is_contiguous()) {
    STD_TORCH_CHECK(t.numel() == p.outer * p.inner * p.columns, "layer norm: ", name, " has ",
                    t.numel(), " elements; expected ", p.outer * p.inner * p.columns);
    rows.outer = p.inner * p.columns, rows.inner = p.columns;
    return rows;
  }
  STD_TORCH_CHECK(
      t.dim() == 3 && t.size(0) == p.outer && t.size(1) == p.inner && t.size(2) == p.columns,
      "layer norm: ", name, " must be contiguous or have the shape (outer, inner, columns)");
  STD_TORCH_CHECK(t.stride(2) == 1 || p.columns <= 1, "layer norm: the columns of ", name,
                  " must be contiguous");
  rows.outer = t.stride(0), rows.inner = t.stride(1);
  return rows;
}
template <class R>
R rows_of(const MaybeTensor& t, const char* name, const pt::NormProblem& p) {
  return t ? rows_of<R>(*t, name, p) : R();
}

// Return a tensor's rows for writing.
pt::RowsOut target_of(const MaybeTensor& t, const char* name, const pt::NormProblem& p) {
  if (!t) return {};
  const pt::RowsOut rows = rows_of<pt::RowsOut>(*t, name, p);
  if (t->is_contiguous()) pt::advise_huge_pages(rows.data, t->numel() * t->element_size());
  return rows;
}

// Return a contiguous vector of the accumulator dtype, or null.
void* vector_of(const MaybeTensor& t, const char* name, int64_t n, const Tensor& x) {
  if (!t) return nullptr;
  const auto work = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == work,
                  "layer norm: ", name, " must be contiguous, of ", n,
                  " float32 numbers (float64 for float64)");
  return pt::write_address(kOp, *t, name);
}

pt::NormProblem problem_of(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                           const MaybeTensor& seed, int64_t outer, int64_t columns,
                           int64_t row_start, double eps, double dropout_p, bool rms) {
  pt::NormProblem p{};
  const int64_t n = x.numel();
  STD_TORCH_CHECK(outer > 0 && columns > 0 && n > 0 && n % columns == 0 && n / columns % outer == 0,
                  "layer norm: ", n, " elements are not outer = ", outer, " times rows of ",
                  columns, " columns");
  p.outer = outer, p.inner = n / columns / outer, p.columns = columns;
  pt::check_start(kOp, row_start, "row_start");
  p.rms = rms, p.eps = eps;
  p.weight = vector_of(weight, "weight", p.columns, x);
  p.bias = vector_of(bias, "bias", p.columns, x);
  p.row_start = row_start, p.drop_threshold = pt::drop_threshold_of(dropout_p);
  if (p.drop_threshold) p.seed = pt::seed_of(kOp, seed);
  p.threads = pt::pool_threads();
  return p;
}

void check_stream(const pt::Rows& x, pt::DType stream, const char* name) {
  STD_TORCH_CHECK((x.dtype == pt::DType::f64) == (stream == pt::DType::f64), "layer norm: x and ",
                  name, " must both be float64 or neither");
}

void layer_norm_fwd(Tensor x, MaybeTensor residual, MaybeTensor weight, MaybeTensor bias,
                    MaybeTensor dropout_seed, Tensor out, MaybeTensor residual_out,
                    MaybeTensor mean, MaybeTensor rstd, int64_t outer, int64_t columns,
                    int64_t row_start, double eps, double dropout_p, bool rms) {
  const pt::NormProblem p =
      problem_of(x, weight, bias, dropout_seed, outer, columns, row_start, eps, dropout_p, rms);
  pt::NormForward f;
  f.x = rows_of<pt::Rows>(x, "x", p);
  f.residual = rows_of<pt::Rows>(residual, "residual", p);
  f.out = target_of(out, "out", p);
  f.residual_out = target_of(residual_out, "residual_out", p);
  STD_TORCH_CHECK(f.out.dtype == f.x.dtype, "layer norm: out must have the dtype of x");
  if (f.residual.data) check_stream(f.x, f.residual.dtype, "residual");
  STD_TORCH_CHECK(f.residual_out.data || (!f.residual.data && !p.drop_threshold),
                  "layer norm: residual or dropout needs residual_out");
  STD_TORCH_CHECK(
      !f.residual_out.data || f.residual_out.dtype == (f.residual.data ? f.residual : f.x).dtype,
      "layer norm: residual_out must have the dtype of residual, or of x without a residual");
  f.mean = rms ? nullptr : vector_of(mean, "mean", p.outer * p.inner, x);
  f.rstd = vector_of(rstd, "rstd", p.outer * p.inner, x);
  PT_SELECT(layer_norm_kernels).forward(p, f);
}

void layer_norm_bwd(Tensor d_out, MaybeTensor d_residual_out, Tensor h, MaybeTensor weight,
                    MaybeTensor mean, Tensor rstd, MaybeTensor dropout_seed, MaybeTensor dx,
                    MaybeTensor dresidual, MaybeTensor dweight, MaybeTensor dbias, int64_t outer,
                    int64_t columns, int64_t row_start, double dropout_p, bool rms) {
  const pt::NormProblem p = problem_of(d_out, weight, std::nullopt, dropout_seed, outer, columns,
                                       row_start, 0, dropout_p, rms);
  pt::NormBackward f;
  f.d_out = rows_of<pt::Rows>(d_out, "d_out", p);
  f.d_residual_out = rows_of<pt::Rows>(d_residual_out, "d_residual_out", p);
  f.h = rows_of<pt::Rows>(h, "h", p);
  f.dx = target_of(dx, "dx", p);
  f.dresidual = target_of(dresidual, "dresidual", p);
  check_stream(f.d_out, f.h.dtype, "residual_out");
  STD_TORCH_CHECK(!f.dx.data || f.dx.dtype == f.d_out.dtype,
                  "layer norm: dx must have the dtype of d_out");
  STD_TORCH_CHECK((!f.dresidual.data || f.dresidual.dtype == f.h.dtype) &&
                      (!f.d_residual_out.data || f.d_residual_out.dtype == f.h.dtype),
                  "layer norm: gradients of the residual stream must have its dtype");
  const int64_t rows = p.outer * p.inner;
  f.mean = rms ? nullptr : vector_of(mean, "mean", rows, d_out);
  f.rstd = vector_of(rstd, "rstd", rows, d_out);
  f.dweight = vector_of(dweight, "dweight", p.columns, d_out);
  f.dbias = vector_of(dbias, "dbias", p.columns, d_out);
  STD_TORCH_CHECK(rms || f.mean, "layer norm: mean is missing");
  PT_SELECT(layer_norm_kernels).backward(p, f);
}

// Return the scratch bytes of forward and backward.
int64_t layer_norm_scratch(Tensor x, int64_t columns) {
  pt::NormProblem p{};
  pt::check_sizes(kOp, {columns});
  p.outer = 1, p.inner = x.numel() / columns, p.columns = columns, p.threads = pt::pool_threads();
  return PT_SELECT(layer_norm_kernels).scratch_bytes(p, dtype_of(x, "x", pt::Float64::taken));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      "layer_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? "
      "dropout_seed, Tensor(a!) out, "
      "Tensor(b!)? residual_out, Tensor(c!)? mean, Tensor(d!)? rstd, int outer, int columns, int "
      "row_start, float eps, "
      "float dropout_p, bool rms) -> ()");
  m.def(
      "layer_norm_bwd(Tensor d_out, Tensor? d_residual_out, Tensor h, Tensor? weight, Tensor? "
      "mean, Tensor rstd, Tensor? dropout_seed, "
      "Tensor(a!)? dx, Tensor(b!)? dresidual, Tensor(c!)? dweight, Tensor(d!)? dbias, int outer, "
      "int columns, int row_start, float "
      "dropout_p, "
      "bool rms) -> ()");
  m.def("layer_norm_scratch(Tensor x, int columns) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
  m.impl("layer_norm_scratch", TORCH_BOX(&layer_norm_scratch));
}
