// SPDX-License-Identifier: Apache-2.0
#include "program.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "steps.h"

extern char** environ;

namespace pt::fast_path {
namespace {

constexpr size_t kMost = 4096;  // max keys; then all are dropped
struct Known {
  std::string why_not;  // why recording failed
  std::shared_ptr<const Program> program;
};
auto& known() {  // under the GIL
  static auto* const all = new std::unordered_map<std::string, Known>;
  return *all;
}

}  // namespace

Key::Key(const char* op, const char* direction, int64_t backend) {
  bytes_.reserve(1024);
  add(op), add(direction), add(backend), add(Precision::now());
  for (auto device : {at::kCPU, at::kCUDA})
    add(at::autocast::is_autocast_enabled(device)
            ? int64_t(at::autocast::get_autocast_dtype(device))
            : -1);
  // PYTRANSFORMER_* variables select checks and kernels.
  for (char** entry = environ; entry && *entry; entry++)
    if (**entry == 'P' && !std::strncmp(*entry, "PYTRANSFORMER_", 14)) bytes_.append(*entry);
}

void Key::add(const Tensor& t) {
  if (!t.defined()) return add(int64_t(-1));
  const void* address = t.const_data_ptr();
  const auto found = std::find(addresses_.begin(), addresses_.end(), address);
  const int64_t facts[] = {t.dim(),
                           int64_t(t.scalar_type()),
                           int64_t(t.device().type()),
                           t.device().index(),
                           int64_t(reinterpret_cast<uintptr_t>(address) & 15),
                           found == addresses_.end() ? -1 : found - addresses_.begin()};
  bytes_.append(reinterpret_cast<const char*>(facts), sizeof facts);
  for (at::IntArrayRef each : {t.sizes(), t.strides()})
    bytes_.append(reinterpret_cast<const char*>(each.data()), each.size() * sizeof(int64_t));
  addresses_.push_back(address);
}

std::shared_ptr<const Program> program_for(const Key& key,
                                           const std::function<py::object()>& record) {
  auto& all = known();
  const auto found = all.find(key.bytes());
  if (found == all.end()) {
    if (all.size() >= kMost) all.clear();
    all[key.bytes()];
    return nullptr;
  }
  if (found->second.program || !found->second.why_not.empty()) return found->second.program;
  Known entry;
  try {
    const py::object recorded = record();
    if (recorded.is_none()) return nullptr;  // not now
    if (py::isinstance<py::str>(recorded)) {
      entry.why_not = recorded.cast<std::string>();
    } else {
      std::tie(entry.program, entry.why_not) = built(recorded);
    }
  } catch (const std::exception& error) {  // Python runs the call and reports the error
    entry.why_not = std::string("error: ") + error.what();
    PyErr_Clear();
  }
  known()[key.bytes()] = entry;
  return entry.program;
}

// Return (number of programs, reasons for keys without one).
PyObject* programs_entry(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  py::list reasons;
  size_t programs = 0;
  for (const auto& [key, entry] : known()) {
    programs += bool(entry.program);
    if (!entry.why_not.empty()) reasons.append(entry.why_not);
  }
  return py::make_tuple(programs, reasons).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* precision_entry(PyObject*, PyObject*) {
  const Precision now = Precision::now();
  return Py_BuildValue("(LLL)", (long long)now.float32, (long long)now.bf16, (long long)now.fp16);
}

PyObject* forget_entry(PyObject*, PyObject*) {
  known().clear();
  Py_RETURN_NONE;
}

}  // namespace pt::fast_path
