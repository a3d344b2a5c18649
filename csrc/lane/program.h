// SPDX-License-Identifier: Apache-2.0
// Warm calls of the GPU backends. What a backend in Python did for one call, allocations, launches and ops, is a program for all calls that
// differ from it in addresses alone: those with equal keys. Decision 0105.
//
// The first call with a key is Python's; the second is recorded (ops/_core/recording.py) and, like all later ones, run from here. What
// cannot be recorded stays Python's: a backend that reads what a tensor holds, say.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>

namespace pt::lane {

using at::Tensor;
using torch::autograd::variable_list;

// All of a call but what its tensors hold and where they lie: op and direction, numbers, process-wide switches, and of each tensor its
// shape, strides, dtype, device, alignment, and whether it is an earlier one again.
class Key {
 public:
  Key(const char* op, const char* direction, int64_t backend);
  template <class T>
  void add(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void add(const Tensor& t);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
  std::vector<const void*> addresses_;
};

class Program {
 public:
  virtual ~Program() = default;
  virtual const char* backend() const = 0;
  // The results, from tensors like those of the recorded call. The caller has the GIL. Throws what a step throws.
  virtual variable_list run(const variable_list& inputs) const = 0;
};

// The program for a key. Without one: nothing, or at the second call what `record` makes of it: what recording.py returns. The caller has
// the GIL.
std::shared_ptr<const Program> program_for(const Key& key, const std::function<py::object()>& record);

// For Python: how exact products are now; what is known; and all of it forgotten.
PyObject* precision_entry(PyObject*, PyObject*);
PyObject* programs_entry(PyObject*, PyObject*);
PyObject* forget_entry(PyObject*, PyObject*);

}  // namespace pt::lane
