// SPDX-License-Identifier: Apache-2.0
// activate(): aten::scaled_dot_product_attention for every caller in the process, like drop_in.py
// but without Python.
#include <torch/library.h>

#include <cmath>
#include <memory>

#include "attention.h"
#include "reader.h"

namespace pt::fast_path {
namespace {

std::unique_ptr<torch::Library> library;
// _replacement of drop_in.py, for calls that the fast path does not take.
PyObject* python_kernel = nullptr;

bool of_no_subclass(const Tensor& t) {
  PyObject* object = t.defined() ? t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() : nullptr;
  return !object || THPVariable_CheckExact(object);
}

// Return true if ops/scaled_dot_product.py would pass these to attention unchanged.
bool as_attention(const Attention::Inputs& t, bool enable_gqa) {
  const Tensor &query = t[Attention::kQuery], &key = t[Attention::kKey];
  return query.dim() == 4 && key.dim() == 4 && query.size(0) == key.size(0) &&
         (enable_gqa || query.size(1) == key.size(1));
}

bool mine(const Attention::Inputs& t, bool enable_gqa) {
  for (const Tensor& i : t)
    if (!plain(i) || !of_no_subclass(i) || (i.defined() && i.device() != t[0].device()))
      return false;
  return as_attention(t, enable_gqa);
}

// Return the arguments of pt.attention by name; omitted ones have defaults.
py::object as_given(const Attention::Inputs& t, const AttentionNumbers& n,
                    std::optional<double> scale) {
  const auto object = [](const Tensor& t) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
  };
  py::dict given;
  given["query"] = object(t[0]), given["key"] = object(t[1]), given["value"] = object(t[2]),
  given["attn_mask"] = object(t[Attention::kMask]);
  given["causal"] = n.align ? py::object(py::str("top_left")) : py::none();
  given["scale"] = scale, given["dropout_p"] = n.dropout_p;
  return given;
}

std::optional<Attention::Outputs> run_anywhere(Attention::Inputs& t, const AttentionNumbers& n,
                                               std::optional<double> scale) {
  if (t[0].is_cpu()) return Attention::fits(t, n) ? run<Attention>(t, n, 1) : std::nullopt;
  const py::gil_scoped_acquire gil;
  return run_recorded<Attention>(t, n, 1, {.recorded = true},
                                 [&] { return as_given(t, n, scale); });
}

Tensor in_python(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                 const Tensor& value, const Maybe& mask, double dropout_p, bool is_causal,
                 std::optional<double> scale, bool enable_gqa) {
  py::gil_scoped_acquire gil;
  const py::object function = py::reinterpret_borrow<py::object>(python_kernel);
  return py::cast<Tensor>(function(keys, query, key, value, mask, dropout_p, is_causal,
                                   py::arg("scale") = scale, py::arg("enable_gqa") = enable_gqa));
}

Tensor scaled_dot_product_attention(c10::DispatchKeySet keys, const Tensor& query,
                                    const Tensor& key, const Tensor& value, const Maybe& mask,
                                    double dropout_p, bool is_causal, std::optional<double> scale,
                                    bool enable_gqa) {
  Attention::Inputs t{query, key, value, mask ? *mask : Tensor()};
  if (unwatched() && mine(t, enable_gqa) && std::isfinite(scale.value_or(1))) {
    AttentionNumbers n;
    n.align = is_causal, n.dropout_p = dropout_p;
    if (scale) n.scale = *scale;
    if (Attention::complete(t, n))
      if (auto outputs = run_anywhere(t, n, scale)) return (*outputs)[0];
  }
  return in_python(keys, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
}

}  // namespace

FAST_PATH_ENTRY(scaled_dot_product_attention) {
  HANDLE_TH_ERRORS
  using A = Attention;
  if (count != 8 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  AttentionNumbers n;
  A::Inputs t{read.tensor(a[0]), read.tensor(a[1]), read.tensor(a[2]), read.tensor_or_none(a[3])};
  n.dropout_p = read.number(a[4]);
  n.align = read.boolean(a[5]);
  std::optional<double> scale;
  if (a[6] != Py_None) scale = n.scale = read.number(a[6]);
  const bool enable_gqa = read.boolean(a[7]);
  read.require(read && as_attention(t, enable_gqa));
  return finish<A>(read, t, n, 1, 1, read.route(Py_None, Py_False),
                   [&] { return as_given(t, n, scale); });
  END_HANDLE_TH_ERRORS
}

PyObject* activate(PyObject*, PyObject* function) {
  HANDLE_TH_ERRORS
  Py_XSETREF(python_kernel, Py_NewRef(function));
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten",
                                             c10::DispatchKey::CompositeImplicitAutograd, __FILE__,
                                             __LINE__);
  library->impl("scaled_dot_product_attention", TORCH_FN(scaled_dot_product_attention));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* deactivate(PyObject*, PyObject*) {
  library.reset();
  Py_RETURN_NONE;
}

}  // namespace pt::fast_path
