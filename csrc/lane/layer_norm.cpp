// pt.layer_norm of contiguous tensors: the lowering of ops/layer_norm.py and ops/_backends/cpu/layer_norm.py.
#include "lane.h"

namespace pt::lane {
namespace {

struct LayerNorm {
  static constexpr const char* kName = "layer_norm";
  enum { kX, kWeight, kBias, kInputs };
  static constexpr size_t kDifferentiable = 3, kSaved = 2, kGrads = 1;
  using Inputs = std::array<Tensor, kInputs>;
  using Outputs = std::array<Tensor, 3>;  // out, mean, rstd
  using Saved = std::array<Tensor, 2>;    // mean, rstd

  struct Numbers {
    int64_t dims = 1, columns = 0;
    double eps = 1e-5;

    template <class F>
    void collect(const F& f) const {
      f(dims), f(columns), f(eps);
    }
  };

  using Forward = void(const Tensor& x, const Maybe& residual, const Maybe& weight, const Maybe& bias, const Maybe& seed, const Tensor& out,
                       const Maybe& residual_out, const Maybe& mean, const Maybe& rstd, int64_t outer, int64_t columns, double eps,
                       double dropout_p, bool rms);
  using Backward = void(const Tensor& d_out, const Maybe& d_residual_out, const Tensor& h, const Maybe& weight, const Maybe& mean,
                        const Tensor& rstd, const Maybe& seed, const Maybe& dx, const Maybe& dresidual, const Maybe& dweight,
                        const Maybe& dbias, int64_t outer, int64_t columns, double dropout_p, bool rms);

  static Maybe vector(const Tensor& t, at::ScalarType work) { return t.defined() ? Maybe(t.to(work).contiguous()) : std::nullopt; }

  static Outputs forward(const Inputs& t, const Numbers& n, bool needs_gradient) {
    static const auto raw = raw_op<Forward>("pytransformer_C::layer_norm_fwd");
    const Tensor& x = t[kX];
    const auto work = work_dtype(x);
    Outputs results{empty(x.sizes(), x.options())};
    if (needs_gradient)
      for (int i : {1, 2}) results[i] = empty(x.sizes().slice(0, x.dim() - n.dims), x.options().dtype(work));
    raw.call(x, {}, vector(t[kWeight], work), vector(t[kBias], work), {}, results[0], {}, maybe(results[1]), maybe(results[2]), 1,
             n.columns, n.eps, 0, false);
    return results;
  }

  static variable_list backward(const Inputs& t, const Saved& saved, const Numbers& n, const variable_list& grads,
                                const std::vector<bool>& wanted) {
    static const auto raw = raw_op<Backward>("pytransformer_C::layer_norm_bwd");
    const auto& [mean, rstd] = saved;
    const auto work = mean.scalar_type();
    variable_list results(kDifferentiable);
    if (wanted[kX]) results[kX] = empty(t[kX].sizes(), t[kX].options());
    for (int i : {kWeight, kBias})
      if (wanted[i]) results[i] = empty(t[i].sizes(), t[i].options().dtype(work));
    raw.call(grads[0].contiguous(), {}, t[kX], vector(t[kWeight], work), mean, rstd, {}, maybe(results[kX]), {}, maybe(results[kWeight]),
             maybe(results[kBias]), 1, n.columns, 0, false);
    for (int i : {kWeight, kBias})
      if (wanted[i]) results[i] = results[i].to(t[i].scalar_type());
    return results;
  }

  static variable_list tensors(const Inputs& t) { return {t.begin(), t.end()}; }
  static py::tuple others(const Numbers& n) { return py::make_tuple(n.dims, n.eps, py::none(), false); }
};

}  // namespace

PyObject* layer_norm_entry(PyObject*, PyObject* const* a, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  using L = LayerNorm;
  if (count != 7 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  L::Numbers n;
  const L::Inputs t{read.tensor(a[0]), read.tensor_or_none(a[2]), read.tensor_or_none(a[3])};
  int64_t shape[8] = {0};
  if (PyTuple_Check(a[1])) {  // a torch.Size too
    n.dims = PyTuple_GET_SIZE(a[1]);
    read.require(n.dims > 0 && n.dims <= 8);
    for (int64_t d = 0; read && d < n.dims; d++) shape[d] = read.natural(PyTuple_GET_ITEM(a[1], d));
  } else {
    shape[0] = read.natural(a[1]);
  }
  n.eps = read.number(a[4]);
  read.no_other_backend(a[5]);
  read.boolean(a[6]);
  if (!read) Py_RETURN_NOTIMPLEMENTED;
  const at::IntArrayRef normalized(shape, n.dims);
  const Tensor& x = t[L::kX];
  n.columns = c10::multiply_integers(normalized);
  bool fits =
      x.dim() >= n.dims && x.sizes().slice(x.dim() - n.dims) == normalized && x.is_contiguous() && x.numel() && x.is_floating_point();
  for (int i : {L::kWeight, L::kBias}) fits = fits && (!t[i].defined() || (t[i].sizes() == normalized && t[i].is_floating_point()));
  if (!fits) Py_RETURN_NOTIMPLEMENTED;
  std::optional<L::Outputs> outputs;
  {
    const WithoutGil others_run;
    outputs = run<L>(t, n, 1);
  }
  if (!outputs) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move((*outputs)[0]));
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::lane
