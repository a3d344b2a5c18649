// SPDX-License-Identifier: Apache-2.0
// Binding of the norms on a GPU: checks the arguments, fills in the problem, allocates the partial
// sums and launches.
//
// A tensor of rows is contiguous of any shape, or a view (outer, inner, columns) with contiguous
// columns. It is not empty: see pytransformer/ops/_backends/cuda/layer_norm.py.
#include "cuda/binding.h"
#include "cuda/layer_norm/kernels.h"

namespace {

using namespace pt::cuda;

constexpr const char* kOp = "layer_norm";

// Fills in a problem from tensors. The tensors' alignment decides between the kernels.
class Builder {
 public:
  Builder(const Tensor& x, int64_t outer, int64_t columns)
      : outer_(outer), columns_(columns), aligned_(columns % kVectorColumns == 0) {
    const int64_t n = x.numel();
    STD_TORCH_CHECK(
        outer > 0 && columns > 0 && n > 0 && n % columns == 0 && n / columns % outer == 0,
        "layer_norm: ", n, " elements are not outer = ", outer, " times rows of ", columns,
        " columns");
    STD_TORCH_CHECK(columns < int64_t(1) << 31, "layer_norm: ", columns,
                    " columns, at most 2147483647 are possible");
    inner_ = n / columns / outer;
  }

  LayerNormProblem problem(const MaybeTensor& weight, const MaybeTensor& seed, int64_t row_start,
                           double dropout_p, bool rms) {
    LayerNormProblem p{};
    p.rows = rows(), p.inner = inner_, p.columns = columns();
    p.rms = rms;
    p.weight = columns_of(weight, "weight");
    pt::check_start(kOp, row_start, "row_start");
    p.row_start = row_start, p.drop_threshold = drop_threshold_of(dropout_p);
    if (p.drop_threshold) {
      STD_TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
                      "layer_norm: dropout needs an int64 seed");
      p.seed = static_cast<const uint64_t*>(read_from(kOp, *seed, "dropout_seed", reachable));
    }
    return p;
  }

  template <class R>
  R rows_of(const MaybeTensor& t, const char* name) {
    R r;
    if (!t) return r;
    r.dtype = dtype_of(*t, name);
    if constexpr (std::is_same_v<R, Rows>) r.data = read_from(kOp, *t, name, reachable);
    else r.data = write_to(kOp, *t, name, reachable);
    if (t->is_contiguous()) {
      STD_TORCH_CHECK(t->numel() == rows() * columns_, "layer_norm: ", name, " has ", t->numel(),
                      " elements; expected ", rows() * columns_);
      r.outer = inner_ * columns_, r.inner = columns_;
    } else {
      STD_TORCH_CHECK(
          t->dim() == 3 && t->size(0) == outer_ && t->size(1) == inner_ && t->size(2) == columns_,
          "layer_norm: ", name, " must be contiguous or have the shape (outer, inner, columns)");
      STD_TORCH_CHECK(t->stride(2) == 1 || columns_ == 1, "layer_norm: the columns of ", name,
                      " must be contiguous");
      r.outer = t->stride(0), r.inner = t->stride(1);
    }
    const int per_piece = 16 / size_of(r.dtype);
    const bool aligned = at_piece(r.data) && (outer_ == 1 || r.outer % per_piece == 0) &&
                         (inner_ == 1 || r.inner % per_piece == 0);
    aligned_ &= aligned;
    return r;
  }

  Columns columns_of(const MaybeTensor& t, const char* name) {
    if (!t) return {};
    STD_TORCH_CHECK(t->numel() == columns() && t->is_contiguous(), "layer_norm: ", name,
                    " must be contiguous, of ", columns(), " numbers");
    const Columns c{read_from(kOp, *t, name, reachable), dtype_of(*t, name)};
    aligned_ &= at_piece(c.data);
    return c;
  }

  // Return the address of (rows,) float32, or null.
  float* per_row(const MaybeTensor& t, const char* name) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(
        t->numel() == rows() && t->is_contiguous() && t->scalar_type() == ScalarType::Float,
        "layer_norm: ", name, " must be contiguous, of ", rows(), " float32 numbers");
    return static_cast<float*>(write_to(kOp, *t, name, reachable));
  }

  int64_t rows() const { return outer_ * inner_; }
  int columns() const { return int(columns_); }
  LayerNormShape shape(DType x, DType residual_out) const {
    return {rows(), columns(), x, residual_out, aligned_};
  }

  Reachable reachable;

 private:
  static bool at_piece(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

  int64_t outer_, inner_, columns_;
  bool aligned_;
};

void layer_norm_fwd(Tensor x, MaybeTensor residual, MaybeTensor weight, MaybeTensor bias,
                    MaybeTensor dropout_seed, Tensor out, MaybeTensor residual_out,
                    MaybeTensor mean, Tensor rstd, int64_t outer, int64_t columns,
                    int64_t row_start, double eps, double dropout_p, bool rms, int64_t device,
                    int64_t stream) {
  Builder b(x, outer, columns);
  LayerNormForward f{};
  f.p = b.problem(weight, dropout_seed, row_start, dropout_p, rms);
  f.eps = float(eps);
  f.bias = b.columns_of(bias, "bias");
  f.x = b.rows_of<Rows>(x, "x");
  f.residual = b.rows_of<Rows>(residual, "residual");
  f.out = b.rows_of<RowsOut>(out, "out");
  f.residual_out = b.rows_of<RowsOut>(residual_out, "residual_out");
  STD_TORCH_CHECK(f.out.dtype == f.x.dtype, "layer_norm: out must have the dtype of x");
  STD_TORCH_CHECK(f.residual_out.data || (!f.residual.data && !f.p.drop_threshold),
                  "layer_norm: residual or dropout needs residual_out");
  STD_TORCH_CHECK(
      !f.residual_out.data || f.residual_out.dtype == (f.residual.data ? f.residual : f.x).dtype,
      "layer_norm: residual_out must have the dtype of residual, or of x without a residual");
  f.mean = rms ? nullptr : b.per_row(mean, "mean");
  f.rstd = b.per_row(rstd, "rstd");
  STD_TORCH_CHECK(rms || f.mean, "layer_norm: mean is missing");

  const DeviceGuard guard(device);
  const LayerNormShape shape =
      b.shape(f.x.dtype, f.residual_out.data ? f.residual_out.dtype : f.x.dtype);
  const LayerNormPlan plan = plan_forward(shape, multiprocessors());
  f.p.aligned = shape.aligned, f.p.lanes = plan.lanes;
  layer_norm_forward(f, plan, reinterpret_cast<void*>(stream));
}

void layer_norm_bwd(Tensor d_out, MaybeTensor d_residual_out, Tensor h, MaybeTensor weight,
                    MaybeTensor mean, Tensor rstd, MaybeTensor dropout_seed, MaybeTensor dx,
                    MaybeTensor dresidual, MaybeTensor dweight, MaybeTensor dbias, int64_t outer,
                    int64_t columns, int64_t row_start, double dropout_p, bool rms, int64_t device,
                    int64_t stream) {
  Builder b(d_out, outer, columns);
  LayerNormBackward f{};
  f.p = b.problem(weight, dropout_seed, row_start, dropout_p, rms);
  f.d_out = b.rows_of<Rows>(d_out, "d_out");
  f.d_residual_out = b.rows_of<Rows>(d_residual_out, "d_residual_out");
  f.h = b.rows_of<Rows>(h, "h");
  f.mean = rms ? nullptr : b.per_row(mean, "mean");
  f.rstd = b.per_row(rstd, "rstd");
  f.dx = b.rows_of<RowsOut>(dx, "dx");
  f.dresidual = b.rows_of<RowsOut>(dresidual, "dresidual");
  STD_TORCH_CHECK(rms || f.mean, "layer_norm: mean is missing");
  STD_TORCH_CHECK(!f.dx.data || f.dx.dtype == f.d_out.dtype,
                  "layer_norm: dx must have the dtype of d_out");
  STD_TORCH_CHECK((!f.dresidual.data || f.dresidual.dtype == f.h.dtype) &&
                      (!f.d_residual_out.data || f.d_residual_out.dtype == f.h.dtype),
                  "layer_norm: gradients of the residual stream must have its dtype");

  const DeviceGuard guard(device);
  const LayerNormShape shape = b.shape(f.d_out.dtype, f.h.dtype);
  const LayerNormPlan plan = plan_backward(shape, multiprocessors());
  f.p.aligned = shape.aligned, f.p.lanes = plan.lanes;
  // Freed on return; torch's allocator gives the memory only to later work of the same stream.
  std::optional<Tensor> partials;
  LayerNormReduce r{{nullptr, nullptr}, {nullptr, nullptr}, {}, int(plan.blocks), b.columns()};
  if (dweight || dbias) {
    partials = torch::stable::new_empty(d_out, {2, plan.blocks, b.columns()}, ScalarType::Float);
    auto* p = static_cast<float*>(write_to(kOp, *partials, "partial sums", b.reachable));
    if (dweight) f.dweight_partials = p;
    if (dbias) f.dbias_partials = p + plan.blocks * b.columns();
  }
  r.partials[0] = f.dweight_partials, r.partials[1] = f.dbias_partials;
  const MaybeTensor* sums[] = {&dweight, &dbias};
  for (int i = 0; i < 2; ++i) {
    if (!*sums[i]) continue;
    const char* name = i ? "dbias" : "dweight";
    const Columns c = b.columns_of(*sums[i], name);
    r.sums[i] = write_to(kOp, **sums[i], name, b.reachable), r.dtype[i] = c.dtype;
  }
  layer_norm_backward(f, plan, reinterpret_cast<void*>(stream));
  if (partials) layer_norm_reduce(r, reinterpret_cast<void*>(stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      PT_EDGE_OP("layer_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? "
                 "dropout_seed, Tensor(a!) out, "
                 "Tensor(b!)? residual_out, Tensor(c!)? mean, Tensor(d!) rstd, int outer, int "
                 "columns, int row_start, float eps, float "
                 "dropout_p, bool "
                 "rms, int device, int stream) -> ()"));
  m.def(
      PT_EDGE_OP("layer_norm_bwd(Tensor d_out, Tensor? d_residual_out, Tensor h, Tensor? weight, "
                 "Tensor? mean, Tensor rstd, Tensor? dropout_seed, "
                 "Tensor(a!)? dx, Tensor(b!)? dresidual, Tensor(c!)? dweight, Tensor(d!)? dbias, "
                 "int outer, int columns, int row_start, float "
                 "dropout_p, bool rms, "
                 "int device, "
                 "int stream) -> ()"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("layer_norm_fwd"), TORCH_BOX(&layer_norm_fwd));
  m.impl(PT_EDGE_OP("layer_norm_bwd"), TORCH_BOX(&layer_norm_bwd));
}
