// SPDX-License-Identifier: Apache-2.0
// Warm calls of the GPU backends. A program is the allocations, launches and ops of one call of a
// Python backend. It serves every call with an equal key, which differs only in addresses. See
// docs/design/fast-path.md.
//
// Python runs the first call with a key. The second is recorded (ops/_core/fast_path.py); it and
// all later ones run from here. Calls that cannot be recorded remain in Python, such as those of a
// backend that reads the values of a tensor.
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

// Everything about a call except tensor values and addresses: op, direction, numbers, process-wide
// switches, and each tensor's shape, strides, dtype, device, alignment and identity with an earlier
// one.
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
  // Return the results for tensors like those of the recorded call. The caller holds the GIL.
  // Exceptions of a step propagate.
  virtual variable_list run(const variable_list& inputs) const = 0;
};

// Return the program of a key, or null. At the key's second call, build it from `record`, which
// returns fast_path.py's record. The caller holds the GIL.
std::shared_ptr<const Program> program_for(const Key& key,
                                           const std::function<py::object()>& record);

// For Python: the current precision of gemms, the known programs, and a reset of all of them.
PyObject* precision_entry(PyObject*, PyObject*);
PyObject* programs_entry(PyObject*, PyObject*);
PyObject* forget_entry(PyObject*, PyObject*);

}  // namespace pt::fast_path
