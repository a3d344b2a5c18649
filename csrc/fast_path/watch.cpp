// SPDX-License-Identifier: Apache-2.0
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <optional>

#include "fast_path.h"

namespace pt::fast_path {
namespace {

// Dispatch keys of a plain tensor, without an allocation: a mode may be on, and there may be no
// GPU.
struct KeySets {
  static c10::DispatchKeySet of_a_tensor(c10::Device device, c10::DispatchKey key, bool inference) {
    const c10::InferenceMode guard(inference);
    c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr,
                         false);
    return c10::make_intrusive<c10::TensorImpl>(std::move(nothing), c10::DispatchKeySet(key),
                                                caffe2::TypeMeta::Make<float>())
        ->key_set();
  }
  KeySets(c10::Device device, c10::DispatchKey key)
      : usual(of_a_tensor(device, key, false)), inference(of_a_tensor(device, key, true)) {}
  c10::DispatchKeySet usual, inference;
};
bool plain_keys(c10::DispatchKeySet keys) {
  static const KeySets cpu(at::kCPU, c10::DispatchKey::CPU),
      cuda(c10::Device(at::kCUDA, 0), c10::DispatchKey::CUDA);
  return keys == cpu.usual || keys == cpu.inference || keys == cuda.usual || keys == cuda.inference;
}

// Owned until the process ends.
PyObject *traces = nullptr, *backward = nullptr, *facts = nullptr;
std::vector<PyObject*> watchers;

// Return true if a container is empty. The caller holds the GIL.
bool is_empty(PyObject* o) { return !(PyDict_Check(o) ? PyDict_Size(o) : PyList_GET_SIZE(o)); }

// Hold the GIL in the scope. The entry points already have it; autograd nodes and the kernel of
// aten::scaled_dot_product_attention do not.
class Gil {
 public:
  Gil() {
    if (!PyGILState_Check()) acquired_.emplace();
  }

 private:
  std::optional<py::gil_scoped_acquire> acquired_;
};

bool holds_data(const Tensor& t) {
  const c10::IntArrayRef sizes = t.sizes(), strides = t.strides();
  int64_t last = t.storage_offset();
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] == 0) return true;
    last += (sizes[d] - 1) * strides[d];
  }
  const c10::Storage& storage = t.unsafeGetTensorImpl()->unsafe_storage();
  return (last + 1) * int64_t(t.element_size()) <= int64_t(storage.nbytes());
}

bool has_tangent(const Tensor& t) { return torch::autograd::isFwGradDefined(t); }

}  // namespace

Limits limits;

PyObject* fact(const char* name) {
  PyObject* found = PyDict_GetItemString(facts, name);
  TORCH_CHECK(found, "the fast path was not told ", name);
  return found;
}

void connect(PyObject* watchers_, PyObject* traces_, PyObject* backward_, PyObject* facts_) {
  watchers.clear();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watchers_); i++)
    watchers.push_back(Py_NewRef(PyTuple_GET_ITEM(watchers_, i)));
  traces = Py_NewRef(traces_), backward = Py_NewRef(backward_), facts = Py_NewRef(facts_);
  for (auto [name, number] :
       {std::pair("kept_bytes", &limits.kept_bytes), std::pair("kept_depth", &limits.kept_depth),
        std::pair("held_bytes", &limits.held_bytes)})
    *number = PyLong_AsLongLong(fact(name));
}

bool unwatched() {
  // A thread's dispatch keys if nothing watches it, with and without inference mode. Each
  // torch.func transform, dispatch mode, functionalization and trace adds a key.
  constexpr c10::DispatchKeySet inference(c10::DispatchKey::BackendSelect);
  constexpr c10::DispatchKeySet usual =
      inference | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  if ((included != usual && included != inference) ||
      at::impl::PythonTorchFunctionTLS::stack_len() || torch::profiler::impl::profilerEnabled())
    return false;
  const Gil gil;
  return std::all_of(watchers.begin(), watchers.end(), is_empty);
}

void record(const char* op, const char* direction, const char* backend) {
  const Gil gil;
  if (is_empty(traces)) return;
  py::handle(fact("trace"))(std::string(op) + direction, backend);
}

bool plain(const Tensor& t) {
  if (!t.defined()) return true;
  return plain_keys(t.key_set()) && holds_data(t) && !has_tangent(t);
}

bool plain(PyObject* o) { return THPVariable_CheckExact(o) && plain(THPVariable_Unpack(o)); }

namespace {

py::tuple wrapped(const variable_list& list) {
  py::tuple all(list.size());
  for (size_t i = 0; i < list.size(); i++)
    all[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(list[i]));
  return all;
}

py::object name_of(Route::Backend backend) {
  if (backend == Route::kAny) return py::none();
  return py::str(backend == Route::kCpu ? "cpu" : backend == Route::kTriton ? "triton" : "cuda");
}

}  // namespace

variable_list backward_in_python(const InPython& call, const variable_list& grads,
                                 const std::vector<bool>& wanted) {
  py::gil_scoped_acquire gil;
  py::object found;
  try {
    found = py::reinterpret_borrow<py::object>(backward)(
        call.op, wrapped(grads), wrapped(call.tensors), call.others(), wrapped(call.saved), wanted,
        name_of(call.route.backend), call.route.strict);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error carried;
    carried.persist();
    throw std::move(carried);
  }
  variable_list results;
  for (py::handle result : found)
    results.push_back(result.is_none() ? Tensor() : THPVariable_Unpack(result.ptr()));
  return results;
}

py::object record_forward(const InPython& call, const std::function<py::object()>& given,
                          bool save) {
  const py::handle record(fact("record_forward"));
  return record(call.op, given(), wrapped(call.tensors), call.others(), save,
                name_of(call.route.backend), call.route.strict);
}

py::object record_backward(const InPython& call, const variable_list& grads,
                           const std::vector<bool>& wanted) {
  const py::handle record(fact("record_backward"));
  return record(call.op, wrapped(grads), wrapped(call.tensors), call.others(), wrapped(call.saved),
                wanted, name_of(call.route.backend), call.route.strict);
}

}  // namespace pt::fast_path
