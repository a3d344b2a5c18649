#include <ATen/ops/empty.h>
#include <ATen/ops/empty_permuted.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "lane.h"

namespace pt::lane {

namespace {

PyObject* replacement = nullptr;  // read and written by one thread at a time: tests'

Tensor as_tests_want(Tensor fresh) {
  if (!replacement) return fresh;
  const py::gil_scoped_acquire gil;
  return py::cast<Tensor>(py::reinterpret_borrow<py::object>(replacement)(fresh));
}

}  // namespace

void replace_memory(PyObject* function) { Py_XSETREF(replacement, function == Py_None ? nullptr : Py_NewRef(function)); }

Tensor empty(at::IntArrayRef shape, const at::TensorOptions& options) { return as_tests_want(at::empty(shape, options)); }

Tensor empty_in_order(const Tensor& like, at::IntArrayRef shape) {
  if (like.is_contiguous()) return empty(shape, like.options());
  std::vector<int64_t> order(like.dim());
  std::iota(order.begin(), order.end(), 0);
  const auto stride = [&](int64_t d) { return like.stride(d) ? like.stride(d) : std::numeric_limits<int64_t>::max(); };
  std::stable_sort(order.begin(), order.end() - 1, [&](int64_t a, int64_t b) { return stride(a) > stride(b); });
  return as_tests_want(at::empty_permuted(shape, order, like.options()));
}

Tensor last_contiguous(const Tensor& t) {
  if (t.stride(-1) == 1 || t.size(-1) <= 1) return t;
  return empty_in_order(t).copy_(t);
}

}  // namespace pt::lane
