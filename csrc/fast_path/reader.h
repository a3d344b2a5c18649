// SPDX-License-Identifier: Apache-2.0
// Read Python's arguments in an entry and run the op; see fast_path.h.
#pragma once

#include "fast_path.h"

namespace pt::fast_path {

// Reads arguments one by one. The first unsupported one makes the reader false for good.
class Reader {
 public:
  explicit operator bool() const { return mine_; }
  void require(bool condition) { mine_ = mine_ && condition; }

  Tensor tensor(PyObject* o) {
    require(mine_ && plain(o));
    if (!mine_) return {};
    const Tensor& t = THPVariable_Unpack(o);
    if (!device_) device_ = t.device();
    require(t.device() == *device_);
    return t;
  }
  Tensor tensor_or_none(PyObject* o) { return o == Py_None ? Tensor() : tensor(o); }
  double number(PyObject* o) {  // finite
    require(PyFloat_CheckExact(o));
    const double value = mine_ ? PyFloat_AS_DOUBLE(o) : 0;
    require(value - value == 0);
    return value;
  }
  int64_t integer(PyObject* o) {
    require(PyLong_CheckExact(o));
    int overflow = 0;
    const int64_t value = mine_ ? PyLong_AsLongLongAndOverflow(o, &overflow) : 0;
    require(!overflow);
    return value;
  }
  int64_t natural(PyObject* o) {
    const int64_t value = integer(o);
    require(value >= 0);
    return value;
  }
  bool boolean(PyObject* o) {
    require(PyBool_Check(o));
    return o == Py_True;
  }
  int64_t choice(PyObject* o, std::initializer_list<const char*> names) {
    int64_t found = 0;
    for (const char* name : names) {
      if (PyUnicode_CheckExact(o) && !PyUnicode_CompareWithASCIIString(o, name)) return found;
      found++;
    }
    require(false);
    return 0;
  }
  // Read lengths, segments or offsets.
  Tensor integers_or_none(PyObject* o) {
    Tensor t = tensor_or_none(o);
    require(!t.defined() || at::isIntegralType(t.scalar_type(), false));
    if (!mine_ || !t.defined() || (t.scalar_type() == at::kLong && t.is_contiguous())) return t;
    return t.to(at::kLong).contiguous();
  }
  // Read a seed; undefined if absent or without dropout.
  Tensor seed(PyObject* o, double dropout_p) {
    require(dropout_p >= 0 && dropout_p <= 1);
    if (!mine_ || dropout_p == 0 || o == Py_None) return {};
    if (THPVariable_Check(o)) {
      const Tensor t = tensor(o);
      require(mine_ && t.dim() == 0 && t.scalar_type() == at::kLong);
      return t;
    }
    const int64_t value = integer(o);
    return mine_ ? filled(value, *device_) : Tensor();
  }
  // Read the last two arguments of every op.
  Route route(PyObject* backend, PyObject* strict) {
    Route route;
    if (backend != Py_None)
      route.backend = Route::Backend(1 + choice(backend, {"cpu", "triton", "cuda"}));
    route.strict = boolean(strict);
    const bool on_cpu = device_ && device_->is_cpu();
    route.recorded = !on_cpu || route.backend > Route::kCpu;
    require(on_cpu || route.backend != Route::kCpu);
    return route;
  }

 private:
  bool mine_ = true;
  std::optional<at::Device> device_;
};

// Scope in which other threads may run Python while a kernel runs.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// All arguments of a public function.
struct Given {
  PyObject* const* first;
  Py_ssize_t count;

  py::object tuple() const {
    py::tuple all(count);
    for (Py_ssize_t i = 0; i < count; i++) all[i] = py::reinterpret_borrow<py::object>(first[i]);
    return all;
  }
};

// Run the op if it fits; return the first `returned` outputs.
template <class Op>
PyObject* finish(const Reader& read, typename Op::Inputs& t, typename Op::Numbers& n,
                 size_t differentiable, size_t returned, const Route& route,
                 const std::function<py::object()>& given) {
  if (!read || !Op::complete(t, n)) Py_RETURN_NOTIMPLEMENTED;
  std::optional<typename Op::Outputs> outputs;
  if (route.recorded) {
    outputs = run_recorded<Op>(t, n, differentiable, route, given);
  } else {
    const WithoutGil others_run;
    if (Op::fits(t, n)) outputs = run<Op>(t, n, differentiable, route);
  }
  if (!outputs) Py_RETURN_NOTIMPLEMENTED;
  if (returned == 1) return THPVariable_Wrap(std::move((*outputs)[0]));
  return Py_BuildValue("(NN)", THPVariable_Wrap(std::move((*outputs)[0])),
                       THPVariable_Wrap(std::move((*outputs)[1])));
}

}  // namespace pt::fast_path
