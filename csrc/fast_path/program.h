// SPDX-License-Identifier: Apache-2.0
// Warm calls of the GPU backends. A program holds the allocations, launches and ops that a backend in Python made for one call. It serves
// every call with an equal key, which differs in addresses alone. docs/design/fast-path.md.
//
// Python runs the first call with a key. The second is recorded (ops/_core/recording.py); it and all later ones run from here. Calls that
// cannot be recorded stay in Python, such as those of a backend that reads the values of a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>

namespace pt::fast_path {

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

}  // namespace pt::fast_path
