// SPDX-License-Identifier: Apache-2.0
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>

#include "lane.h"

namespace pt::lane {
namespace {

struct KeySets {
  static c10::DispatchKeySet of_a_tensor(bool inference) {
    const c10::InferenceMode guard(inference);
    return at::detail::empty_cpu({0}, at::kFloat).key_set();  // past the dispatcher: a mode may be on
  }
  c10::DispatchKeySet usual = of_a_tensor(false), inference = of_a_tensor(true);
};
const KeySets& plain_keys() {
  static const KeySets keys;
  return keys;
}

// Owned until the process ends.
PyObject *traces = nullptr, *backward = nullptr, *facts = nullptr;
std::vector<PyObject*> watchers;

// Read without the GIL: one aligned word, which may change before or after, as a call in another thread may come before or after.
bool holds_nothing(PyObject* o) {
  const Py_ssize_t& size = PyDict_Check(o) ? reinterpret_cast<PyDictObject*>(o)->ma_used : reinterpret_cast<PyVarObject*>(o)->ob_size;
  return !__atomic_load_n(&size, __ATOMIC_RELAXED);
}

bool has_tangent(const Tensor& t) { return torch::autograd::isFwGradDefined(t); }

}  // namespace

Limits limits;

PyObject* fact(const char* name) {
  PyObject* found = PyDict_GetItemString(facts, name);
  TORCH_CHECK(found, "the lane was not told ", name);
  return found;
}

void connect(PyObject* watchers_, PyObject* traces_, PyObject* backward_, PyObject* facts_) {
  watchers.clear();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watchers_); i++) watchers.push_back(Py_NewRef(PyTuple_GET_ITEM(watchers_, i)));
  traces = Py_NewRef(traces_), backward = Py_NewRef(backward_), facts = Py_NewRef(facts_);
  for (auto [name, number] : {std::pair("kept_bytes", &limits.kept_bytes), std::pair("hidden_bytes", &limits.hidden_bytes),
                              std::pair("least_rows", &limits.least_rows), std::pair("held_bytes", &limits.held_bytes)})
    *number = PyLong_AsLongLong(fact(name));
}

bool unwatched() {
  // What a thread dispatches on when nothing watches it, without and with inference mode. Each torch.func transform, dispatch mode,
  // functionalization and trace adds a key.
  constexpr c10::DispatchKeySet inference(c10::DispatchKey::BackendSelect);
  constexpr c10::DispatchKeySet usual = inference | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included == usual || included == inference) && !at::impl::PythonTorchFunctionTLS::stack_len() &&
         !torch::profiler::impl::profilerEnabled() && std::all_of(watchers.begin(), watchers.end(), holds_nothing);
}

void record(const char* op, const char* direction) {
  if (holds_nothing(traces)) return;
  const py::gil_scoped_acquire gil;
  for (py::handle trace : py::reinterpret_borrow<py::list>(traces))
    trace.attr("append")(py::make_tuple(std::string(op) + direction, "cpu"));
}

bool plain(const Tensor& t) {
  if (!t.defined()) return true;
  const c10::DispatchKeySet keys = t.key_set();
  const auto& [usual, inference] = plain_keys();
  return (keys == usual || keys == inference) && !has_tangent(t);
}

bool plain(PyObject* o) { return THPVariable_CheckExact(o) && plain(THPVariable_Unpack(o)); }

variable_list backward_in_python(const char* op, const variable_list& grads, const variable_list& tensors, const variable_list& saved,
                                 const std::vector<bool>& wanted, py::tuple (*others)(const void*), const void* numbers) {
  py::gil_scoped_acquire gil;
  const auto wrapped = [](const variable_list& list) {
    py::tuple all(list.size());
    for (size_t i = 0; i < list.size(); i++) all[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(list[i]));
    return all;
  };
  py::object found;
  try {
    found = py::reinterpret_borrow<py::object>(backward)(op, wrapped(grads), wrapped(tensors), others(numbers), wrapped(saved), wanted);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error carried;
    carried.persist();
    throw std::move(carried);
  }
  variable_list results;
  for (py::handle result : found) results.push_back(result.is_none() ? Tensor() : THPVariable_Unpack(result.ptr()));
  return results;
}

}  // namespace pt::lane
