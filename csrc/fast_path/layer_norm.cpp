// SPDX-License-Identifier: Apache-2.0
// pt.layer_norm, pt.rms_norm and pt.add_norm of contiguous tensors: the lowering of
// ops/layer_norm.py and ops/_backends/cpu/layer_norm.py.
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "reader.h"

namespace pt::fast_path {
namespace {

// Indices of each op's inputs and outputs. kStream: residual_out.
struct LayerNorm {
  static constexpr const char* kName = "layer_norm";
  enum { kX, kWeight, kBias, kInputs, kResidual = -1, kSeed = -1 };
  enum { kOut, kMean, kRstd, kOutputs, kStream = -1 };
  static constexpr size_t kDifferentiable = 3, kSaved = 2, kGrads = 1;
};
struct RmsNorm {
  static constexpr const char* kName = "rms_norm";
  enum { kX, kWeight, kInputs, kBias = -1, kResidual = -1, kSeed = -1 };
  enum { kOut, kRstd, kOutputs, kStream = -1, kMean = -1 };
  static constexpr size_t kDifferentiable = 2, kSaved = 1, kGrads = 1;
};
struct AddNorm {
  static constexpr const char* kName = "add_norm";
  enum { kX, kResidual, kWeight, kBias, kSeed, kInputs };
  enum { kOut, kStream, kMean, kRstd, kOutputs };
  static constexpr size_t kDifferentiable = 4, kSaved = 3, kGrads = 2;
};

struct NormNumbers {
  int64_t dims = 1, columns = 0;
  double eps = std::numeric_limits<double>::quiet_NaN(), dropout_p = 0;  // NaN: the dtype's default
  bool rms = false;

  template <class F>
  void collect(const F& f) const {
    f(dims), f(columns), f(eps), f(dropout_p), f(rms);
  }
};

using NormForward = void(const Tensor& x, const Maybe& residual, const Maybe& weight,
                         const Maybe& bias, const Maybe& seed, const Tensor& out,
                         const Maybe& residual_out, const Maybe& mean, const Maybe& rstd,
                         int64_t outer, int64_t columns, int64_t row_start, double eps,
                         double dropout_p, bool rms);
using NormBackward = void(const Tensor& d_out, const Maybe& d_residual_out, const Tensor& h,
                          const Maybe& weight, const Maybe& mean, const Tensor& rstd,
                          const Maybe& seed, const Maybe& dx, const Maybe& dresidual,
                          const Maybe& dweight, const Maybe& dbias, int64_t outer, int64_t columns,
                          int64_t row_start, double dropout_p, bool rms);

double eps_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: return std::numeric_limits<double>::epsilon();
    case at::kBFloat16: return std::numeric_limits<c10::BFloat16>::epsilon();
    case at::kHalf: return std::numeric_limits<c10::Half>::epsilon();
    default: return std::numeric_limits<float>::epsilon();
  }
}

template <class Which>
struct Norm : Which {
  using W = Which;
  using Inputs = std::array<Tensor, W::kInputs>;
  using Outputs = std::array<Tensor, W::kOutputs>;
  using Saved = std::array<Tensor, W::kSaved>;
  using Numbers = NormNumbers;

  static const Tensor& stream(const Inputs& t) {
    const Tensor& residual = pick<W::kResidual>(t);
    return residual.defined() ? residual : t[W::kX];
  }

  static bool complete(Inputs& t, Numbers& n) {
    const Tensor& x = t[W::kX];
    if (x.dim() < n.dims) return false;
    n.columns = c10::multiply_integers(x.sizes().slice(x.dim() - n.dims));
    if (n.eps != n.eps) n.eps = eps_of(stream(t).scalar_type());
    return true;
  }

  static bool fits(const Inputs& t, const Numbers& n) {
    const Tensor &x = t[W::kX], &weight = t[W::kWeight], &bias = pick<W::kBias>(t),
                 &residual = pick<W::kResidual>(t);
    if (!x.is_contiguous() || !x.numel() || !floating(x) || !floating(weight) || !floating(bias))
      return false;
    const at::IntArrayRef normalized = x.sizes().slice(x.dim() - n.dims);
    for (const Tensor& v : {std::cref(weight), std::cref(bias)})
      if (v.defined() && v.sizes() != normalized) return false;
    if (residual.defined() &&
        (!floating(residual) || !residual.is_contiguous() || residual.sizes() != x.sizes()))
      return false;
    return true;
  }

  static Outputs forward(const Inputs& t, const Numbers& n, bool needs_gradient) {
    static const auto raw = raw_op<NormForward>("pytransformer_C::layer_norm_fwd");
    const Tensor &x = t[W::kX], &h = stream(t);
    const auto work = work_dtype(x);
    Outputs results;
    results[W::kOut] = empty(x.sizes(), x.options());
    if constexpr (W::kStream >= 0) results[W::kStream] = empty(h.sizes(), h.options());
    if (needs_gradient) {
      const auto statistics = [&] {
        return empty(x.sizes().slice(0, x.dim() - n.dims), h.options().dtype(work));
      };
      if constexpr (W::kMean >= 0)
        if (!n.rms) results[W::kMean] = statistics();
      results[W::kRstd] = statistics();
    }
    raw.call(x, maybe(pick<W::kResidual>(t)), vector(t[W::kWeight], work),
             vector(pick<W::kBias>(t), work), maybe(pick<W::kSeed>(t)), results[W::kOut],
             maybe(pick<W::kStream>(results)), maybe(pick<W::kMean>(results)),
             maybe(results[W::kRstd]), 1, n.columns, 0, n.eps, n.dropout_p, n.rms);
    return results;
  }

  static variable_list backward(const Inputs& t, const Saved& saved, const Numbers& n,
                                const variable_list& grads, const std::vector<bool>& wanted) {
    static const auto raw = raw_op<NormBackward>("pytransformer_C::layer_norm_bwd");
    constexpr int before = W::kOutputs - W::kSaved;  // unsaved outputs
    const Tensor &x = t[W::kX], &mean = pick<(W::kMean < 0 ? -1 : W::kMean - before)>(saved),
                 &rstd = saved[W::kRstd - before];
    const Tensor& h = W::kStream >= 0 ? saved[0] : x;
    const auto work = rstd.scalar_type();
    const Tensor d_out = grads[0].defined() ? grads[0].contiguous() : at::zeros_like(x);
    const Tensor d_stream =
        W::kStream >= 0 && grads[1].defined() ? grads[1].contiguous() : Tensor();
    variable_list results(W::kDifferentiable);
    for (size_t i = 0; i < results.size(); i++)
      if (wanted[i])
        results[i] = i == W::kWeight || int(i) == W::kBias ? vector_target(t[i], work)
                                                           : empty(t[i].sizes(), t[i].options());
    raw.call(d_out, maybe(d_stream), h, vector(t[W::kWeight], work), maybe(mean), rstd,
             maybe(pick<W::kSeed>(t)), maybe(results[W::kX]), maybe(pick<W::kResidual>(results)),
             maybe(results[W::kWeight]), maybe(pick<W::kBias>(results)), 1, n.columns, 0,
             n.dropout_p, n.rms);
    for (size_t i = 0; i < results.size(); i++)
      if (wanted[i]) results[i] = deliver(results[i], t[i]);
    return results;
  }

  static variable_list tensors(const Inputs& t) { return {t.begin(), t.end()}; }
  static py::tuple others(const Numbers& n) {
    if constexpr (W::kStream < 0) return py::make_tuple(n.dims, n.eps, py::none(), false);
    else return py::make_tuple(n.dims, 0, n.eps, n.dropout_p, n.rms, py::none(), false);
  }
};

// Read normalized_shape and check that it is the trailing shape of x, which fits() does not.
void read_shape(Reader& read, PyObject* o, const Tensor& x, NormNumbers& n) {
  const bool several = PyTuple_Check(o);  // also a torch.Size
  n.dims = several ? PyTuple_GET_SIZE(o) : 1;
  read.require(bool(read) && n.dims > 0 && n.dims <= x.dim());
  for (int64_t d = 0; read && d < n.dims; d++)
    read.require(read.natural(several ? PyTuple_GET_ITEM(o, d) : o) ==
                 x.size(x.dim() - n.dims + d));
}

}  // namespace

FAST_PATH_ENTRY(layer_norm) {
  HANDLE_TH_ERRORS
  if (count != 7 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  NormNumbers n;
  Norm<LayerNorm>::Inputs t{read.tensor(a[0]), read.tensor_or_none(a[2]),
                            read.tensor_or_none(a[3])};
  read_shape(read, a[1], t[LayerNorm::kX], n);
  n.eps = read.number(a[4]);
  return finish<Norm<LayerNorm>>(read, t, n, 1, 1, read.route(a[5], a[6]),
                                 [&] { return Given{a, count}.tuple(); });
  END_HANDLE_TH_ERRORS
}

FAST_PATH_ENTRY(rms_norm) {
  HANDLE_TH_ERRORS
  if (count != 6 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  NormNumbers n;
  n.rms = true;
  Norm<RmsNorm>::Inputs t{read.tensor(a[0]), read.tensor_or_none(a[2])};
  read_shape(read, a[1], t[RmsNorm::kX], n);
  if (a[3] != Py_None) n.eps = read.number(a[3]);
  return finish<Norm<RmsNorm>>(read, t, n, 1, 1, read.route(a[4], a[5]),
                               [&] { return Given{a, count}.tuple(); });
  END_HANDLE_TH_ERRORS
}

FAST_PATH_ENTRY(add_norm) {
  HANDLE_TH_ERRORS
  if (count != 10 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  NormNumbers n;
  Norm<AddNorm>::Inputs t{read.tensor(a[0]), read.tensor_or_none(a[1]), read.tensor_or_none(a[2]),
                          read.tensor_or_none(a[3])};
  if (t[AddNorm::kWeight].defined()) n.dims = t[AddNorm::kWeight].dim();
  read.require(n.dims > 0);
  if (a[4] != Py_None) n.eps = read.number(a[4]);
  n.dropout_p = read.number(a[5]);
  t[AddNorm::kSeed] = read.seed(a[6], n.dropout_p);
  n.rms = read.choice(a[7], {"layer", "rms"});
  return finish<Norm<AddNorm>>(read, t, n, 2, 2, read.route(a[8], a[9]),
                               [&] { return Given{a, count}.tuple(); });
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::fast_path
