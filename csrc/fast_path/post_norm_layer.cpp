// SPDX-License-Identifier: Apache-2.0
// A layer of a post-norm encoder without gradient and dropout, such as BERT's: PostNormLayer of
// integrations/convert/hugging_face_rules.py in one call.
#include <ATen/ops/linear.h>

#include "attention.h"
#include "reader.h"

namespace pt::fast_path {
namespace {

// Return an entry of a dictionary in a module's dictionary, borrowed; None if it is absent. It runs
// no Python code, unlike the module's attribute, which takes 1.2 us.
PyObject* entry(PyObject* module, const char* dictionary, const char* name) {
  const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!own) PyErr_Clear();
  PyObject* const all = own ? PyDict_GetItemString(own.ptr(), dictionary) : nullptr;
  PyObject* const found = all && PyDict_Check(all) ? PyDict_GetItemString(all, name) : nullptr;
  return found ? found : Py_None;
}
PyObject* parameter(PyObject* module, const char* name) {
  return entry(module, "_parameters", name);
}
template <class... Names>
PyObject* inner(PyObject* module, Names... path) {
  ((module = entry(module, "_modules", path)), ...);
  return module;
}

struct WeightAndBias {
  Tensor weight, bias;
};

WeightAndBias read_parameters(Reader& read, PyObject* module) {
  WeightAndBias p{read.tensor(parameter(module, "weight")),
                  read.tensor_or_none(parameter(module, "bias"))};
  read.require(read && !needs_gradient({p.weight, p.bias}));
  return p;
}

Tensor project(const Tensor& x, const WeightAndBias& p, int64_t max_rows) {
  const Tensor found = linear_forward(x, p.weight, p.bias, {}, max_rows);
  return found.defined() ? found : at::linear(x, p.weight, maybe(p.bias));
}

struct PostNormLayer {
  Tensor x, mask;
  enum { kQuery, kKey, kValue, kOut, kNorm, kFirst, kSecond, kLastNorm, kModules };
  std::array<WeightAndBias, kModules> parameters;
  double scale = 1, eps[2] = {};
  int64_t head_size = 0, max_rows = 0;
  FeedForward::Numbers network;

  bool fits() const {
    const Tensor& w = parameters[kQuery].weight;
    if (x.dim() != 3 || !x.is_contiguous() || !x.numel() || !floating(x) || autocast_casts(x))
      return false;
    for (int i : {kQuery, kKey, kValue, kOut, kFirst, kSecond})
      if (parameters[i].weight.dim() != 2 || parameters[i].weight.scalar_type() != x.scalar_type())
        return false;
    for (int i : {kNorm, kLastNorm})
      if (parameters[i].weight.dim() != 1 || parameters[i].weight.scalar_type() != x.scalar_type())
        return false;
    return w.size(1) == x.size(2) && head_size > 0 && w.size(0) % head_size == 0 &&
           parameters[kKey].weight.sizes() == w.sizes() &&
           parameters[kValue].weight.sizes() == w.sizes();
  }

  std::optional<Tensor> attend() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto heads = [&](int which) {
      const Tensor t = project(x, parameters[which], max_rows);
      return t.view({x.size(0), x.size(1), -1, head_size}).transpose(1, 2);
    };
    Attention::Inputs t{heads(kQuery), heads(kKey), heads(kValue), mask};
    Attention::Numbers n;
    n.scale = scale;
    if (!Attention::complete(t, n) || !Attention::fits(t, n)) return std::nullopt;
    const auto found = run<Attention>(t, n, 1);
    if (!found) return std::nullopt;
    // in the memory order of the query
    return project((*found)[0].transpose(1, 2).reshape({x.size(0), x.size(1), -1}),
                   parameters[kOut], max_rows);
  }

  std::optional<Tensor> add_norm(const Tensor& sublayer, const Tensor& residual, int norm) const {
    using Op = Norm<AddNorm>;
    Op::Inputs t{sublayer, residual, parameters[norm].weight, parameters[norm].bias};
    Op::Numbers n;
    n.eps = eps[norm == kLastNorm];
    if (!Op::complete(t, n) || !Op::fits(t, n)) return std::nullopt;
    const auto found = run<Op>(t, n, 2);
    return found ? std::optional((*found)[0]) : std::nullopt;
  }

  std::optional<Tensor> feed_forward(const Tensor& h) const {
    const auto &first = parameters[kFirst], &second = parameters[kSecond];
    FeedForward::Inputs t{h, first.weight, first.bias, second.weight, second.bias};
    if (!FeedForward::fits(t, network)) return std::nullopt;
    const auto found = run<FeedForward>(t, network, 1);
    return found ? std::optional((*found)[0]) : std::nullopt;
  }

  Tensor forward() const {
    if (!fits()) return {};
    const auto attended = attend();
    if (!attended) return {};
    const auto h = add_norm(*attended, x, kNorm);
    if (!h) return {};
    const auto out = feed_forward(*h);
    if (!out) return {};
    return add_norm(*out, *h, kLastNorm).value_or(Tensor());
  }
};

}  // namespace

// Arguments: x (B, L, d); a mask or None; the layer; a tuple of the scale, the head size, the
// activation and both eps; the max number of rows of our product.
FAST_PATH_ENTRY(post_norm_layer) {
  HANDLE_TH_ERRORS
  if (count != 5 || !unwatched() || !PyTuple_Check(a[3]) || PyTuple_GET_SIZE(a[3]) != 5)
    Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  PostNormLayer layer;
  layer.x = read.tensor(a[0]), layer.mask = read.tensor_or_none(a[1]);
  const auto setting = [&](int i) { return PyTuple_GET_ITEM(a[3], i); };
  layer.scale = read.number(setting(0)), layer.head_size = read.natural(setting(1));
  layer.network.activation = read.choice(setting(2), kActivationNames);
  layer.eps[0] = read.number(setting(3)), layer.eps[1] = read.number(setting(4));
  layer.max_rows = read.natural(a[4]);
  PyObject *const attend = inner(a[2], "attention", "self"),
                  *const after = inner(a[2], "attention", "output"),
                  *const last = inner(a[2], "output");
  PyObject* const modules[] = {
      inner(attend, "query"), inner(attend, "key"),      inner(attend, "value"),
      inner(after, "dense"),  inner(after, "LayerNorm"), inner(a[2], "intermediate", "dense"),
      inner(last, "dense"),   inner(last, "LayerNorm"),
  };
  for (int i = 0; i < PostNormLayer::kModules; i++)
    layer.parameters[i] = read_parameters(read, modules[i]);
  read.require(read && layer.x.is_cpu() && !needs_gradient({layer.x, layer.mask}));
  if (!read) Py_RETURN_NOTIMPLEMENTED;
  Tensor out;
  {
    const WithoutGil others_run;
    try {
      out = layer.forward();
    } catch (const std::exception&) {}  // Python raises the error
  }
  if (!out.defined()) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::fast_path
