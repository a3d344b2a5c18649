// SPDX-License-Identifier: Apache-2.0
// Steps of a recorded program, and how they run; see program.h.
#pragma once

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>
#include <optional>
#include <utility>

#include "fast_path.h"

namespace pt::fast_path {

// Precision of gemms: process-wide switches that Triton, our kernels and cuBLAS follow, and that a
// backend may set temporarily.
struct Precision {
  int64_t float32 = 0, bf16 = 0, fp16 = 0;

  static Precision of(const std::array<int64_t, 3>& told) { return {told[0], told[1], told[2]}; }

  static Precision now() {
    at::Context& context = at::globalContext();
    return {int64_t(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL)),
            int64_t(context.allowBF16ReductionCuBLAS()),
            int64_t(context.allowFP16ReductionCuBLAS())};
  }
  bool operator==(const Precision&) const = default;

  void set() const {
    using at::CuBLASReductionOption;
    at::Context& context = at::globalContext();
    const auto allows = [](int64_t option) {
      return option == int64_t(CuBLASReductionOption::AllowReducedPrecisionWithSplitK);
    };
    const auto splits = [](int64_t option) {
      return option != int64_t(CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
    };
    context.setAllowBF16ReductionCuBLAS(allows(bf16), splits(bf16));
    context.setAllowFP16ReductionCuBLAS(allows(fp16), splits(fp16));
  }
};

class WithPrecision {
 public:
  explicit WithPrecision(const std::optional<Precision>& wanted) {
    if (wanted && !(*wanted == before_)) wanted->set(), changed_ = true;
  }
  ~WithPrecision() {
    if (changed_) before_.set();
  }

 private:
  Precision before_ = Precision::now();
  bool changed_ = false;
};

using Object = py::object;

// Argument of a launch: a value, a tensor's address, or a tuple that contains one.
struct Argument {
  Object fixed;
  int64_t slot = -1, offset = 0;
  std::vector<Argument> inner;

  bool is_fixed() const { return slot < 0 && inner.empty(); }
  PyObject* make(const variable_list& slots) const {  // new reference
    if (slot >= 0)
      return PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(slots[slot].const_data_ptr()) +
                                         offset);
    if (inner.empty()) return Py_NewRef(fixed.ptr());
    PyObject* all = PyTuple_New(Py_ssize_t(inner.size()));
    for (size_t i = 0; i < inner.size(); i++) PyTuple_SET_ITEM(all, i, inner[i].make(slots));
    return all;
  }
};

struct Step {
  enum Kind { kAllocate, kCall, kLaunch } kind = kCall;
  // Slots: computed by the step, and not used by later steps.
  std::vector<int64_t> made, last;
  // kAllocate.
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;
  // kCall: arguments without tensors, which are at (place, index in a list or -1, slot).
  struct Place {
    size_t argument;
    int64_t index, slot;
  };
  std::optional<c10::OperatorHandle> op;
  torch::jit::Stack stack;
  std::vector<Place> places;
  // The last argument is the stream: for our raw ops.
  bool on_stream = false;
  // kLaunch.
  Object launch;
  std::vector<Argument> arguments;
};

class Recorded final : public Program {
 public:
  std::vector<Step> steps;
  std::vector<int64_t> results;
  size_t slots = 0;
  c10::Device device = at::kCPU;
  std::optional<Precision> precision;
  std::string name;
  Object stream;  // callable: device index -> stream
  std::vector<Tensor> constants;

  const char* backend() const override { return name.c_str(); }

  variable_list run(const variable_list& inputs) const override {
    at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const c10::OptionalDeviceGuard here(device.is_cpu() ? std::nullopt : std::optional(device));
    const WithPrecision exact(precision);
    variable_list held(inputs);
    held.resize(slots);
    Object queue;
    if (stream) queue = stream(device.is_cpu() ? 0 : int64_t(device.index()));
    for (const Step& step : steps) {
      if (step.kind == Step::kAllocate)
        held[step.made[0]] = empty_strided(step.sizes, step.strides, step.options);
      else if (step.kind == Step::kCall) call(step, held, queue);
      else launch(step, held, queue.ptr());
      for (int64_t slot : step.last) held[slot] = Tensor();
    }
    variable_list found;
    found.reserve(results.size());
    for (int64_t slot : results) found.push_back(slot < 0 ? Tensor() : held[slot]);
    return found;
  }

 private:
  static void call(const Step& step, variable_list& held, const Object& queue) {
    torch::jit::Stack stack = step.stack;
    size_t copied = stack.size();
    for (const auto& [argument, index, slot] : step.places) {
      if (index < 0) {
        stack[argument] = held[slot];
        continue;
      }
      // Copy the list: the recorded one must not change.
      if (copied != argument) stack[argument] = stack[argument].toList().copy(), copied = argument;
      stack[argument].toList().set(index, held[slot]);
    }
    if (step.on_stream) stack.back() = queue.cast<int64_t>();
    step.op->callBoxed(stack);
    size_t next = 0;
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) held[step.made[next++]] = value.toTensor();
      else if (value.isTensorList())
        for (const Tensor& t : value.toTensorVector()) held[step.made[next++]] = t;
    }
  }

  static void launch(const Step& step, const variable_list& held, PyObject* queue) {
    static PyObject* const names = PyTuple_Pack(1, PyUnicode_InternFromString("stream"));
    std::vector<PyObject*> all;
    all.reserve(step.arguments.size() + 1);
    for (const Argument& argument : step.arguments) all.push_back(argument.make(held));
    all.push_back(queue);
    PyObject* done =
        PyObject_Vectorcall(step.launch.ptr(), all.data(), step.arguments.size(), names);
    all.pop_back();
    for (PyObject* o : all) Py_DECREF(o);
    if (!done) throw python_error();
    Py_DECREF(done);
  }
};

// Build a program from the record of fast_path.py, or return the reason for none.
std::pair<std::shared_ptr<const Program>, std::string> built(const py::tuple& recorded);

}  // namespace pt::fast_path
