// SPDX-License-Identifier: Apache-2.0
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_permuted.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "fast_path.h"

namespace pt::fast_path {

namespace {

PyObject* replacement = nullptr;  // for tests, on one thread at a time

Tensor as_tests_want(Tensor fresh) {
  if (!replacement) return fresh;
  const py::gil_scoped_acquire gil;
  return py::cast<Tensor>(py::reinterpret_borrow<py::object>(replacement)(fresh));
}

}  // namespace

void replace_memory(PyObject* function) {
  Py_XSETREF(replacement, function == Py_None ? nullptr : Py_NewRef(function));
}

// Bypass the dispatcher, which doubles the time: nobody watches.
Tensor empty(at::IntArrayRef shape, const at::TensorOptions& options) {
  return as_tests_want(at::detail::empty_cpu(shape, c10::typeMetaToScalarType(options.dtype())));
}

Tensor empty_strided(at::IntArrayRef shape, at::IntArrayRef strides,
                     const at::TensorOptions& options) {
  return as_tests_want(at::empty_strided(shape, strides, options));
}

Tensor empty_in_order(const Tensor& like, at::IntArrayRef shape) {
  if (like.is_contiguous()) return empty(shape, like.options());
  std::vector<int64_t> order(like.dim());
  std::iota(order.begin(), order.end(), 0);
  const auto stride = [&](int64_t d) {
    return like.stride(d) ? like.stride(d) : std::numeric_limits<int64_t>::max();
  };
  std::stable_sort(order.begin(), order.end() - 1,
                   [&](int64_t a, int64_t b) { return stride(a) > stride(b); });
  return as_tests_want(at::empty_permuted(shape, order, like.options()));
}

Tensor last_contiguous(const Tensor& t) {
  if (t.stride(-1) == 1 || t.size(-1) <= 1) return t;
  return empty_in_order(t).copy_(t);
}

bool floating(const Tensor& t) {
  if (!t.defined()) return true;
  const auto dtype = t.scalar_type();
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

bool autocast_casts(const Tensor& t) {
  const auto dtype = t.scalar_type();
  return at::autocast::is_autocast_enabled(at::kCPU) && dtype != at::kDouble &&
         dtype != at::autocast::get_autocast_dtype(at::kCPU);
}

Maybe vector(const Tensor& t, at::ScalarType work) {
  if (!t.defined()) return std::nullopt;
  return t.scalar_type() == work && t.is_contiguous() ? t : t.to(work).contiguous();
}

// Return another tensor on the same storage without the dispatcher: `view` takes 0.6 us.
Tensor matrix(const Tensor& t) {
  if (!t.is_contiguous()) return matrix(t.contiguous());
  if (t.dim() == 2) return t;
  const int64_t columns = t.size(-1);
  const auto seen = t.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(), /*allow_tensor_metadata_change=*/true);
  seen->set_sizes_contiguous({columns ? t.numel() / columns : 0, columns});
  return Tensor(seen);
}
Maybe maybe_matrix(const Tensor& t) { return t.defined() ? Maybe(matrix(t)) : std::nullopt; }

Tensor vector_target(const Tensor& t, at::ScalarType work) {
  return empty(t.sizes(), t.options().dtype(work));
}
Tensor matrix_target(const Tensor& t) { return empty(t.sizes(), t.options()); }

Tensor deliver(const Tensor& written, const Tensor& t) {
  if (written.scalar_type() == t.scalar_type() && t.is_contiguous()) return written;
  return empty_in_order(t).copy_(written);
}

Tensor filled(int64_t value, at::Device device) {
  if (!device.is_cpu()) return at::full({}, value, at::TensorOptions(device).dtype(at::kLong));
  const Tensor t = empty({}, at::kLong);
  *t.mutable_data_ptr<int64_t>() = value;
  return t;
}

Tensor drawn(at::Device device) {
  return at::randint(INT64_MIN, INT64_MAX, {}, at::TensorOptions(device).dtype(at::kLong));
}

const Tensor& nothing() {
  static const Tensor none = [] {
    const c10::InferenceMode usual(false);
    return at::detail::empty_cpu({0}, at::kFloat);
  }();
  return none;
}

}  // namespace pt::fast_path
