// SPDX-License-Identifier: Apache-2.0
// The C++ lane: an op called eagerly, from Python's arguments to the raw op of the CPU library, without Python on the way. What is not for
// it, an entry answers with NotImplemented; the Python lane (pytransformer/ops) then does the call, and words every error.
//
// What an op is to the lane is a struct like Attention of attention.h:
//   Inputs              tensors, undefined where not given, those with a gradient first (kDifferentiable)
//   Numbers             all else; collect(f) shows each to f
//   Outputs, Saved      tensors; the last kSaved of the outputs are kept for backward
//   kGrads              how many outputs may have gradients
//   fits                whether a call is for the lane; fills in what it leaves open
//   forward, backward   lower them to the raw ops of pytransformer_C, below autograd
//   tensors, others     the arguments of the Python op
// Ops that share a lowering number their inputs by one set of names, -1 for what an op does not have: pick().
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace pt::lane {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using torch::autograd::variable_list;

inline Maybe maybe(const Tensor& t) { return t.defined() ? Maybe(t) : std::nullopt; }

// The tensor of this number, undefined if there is none.
template <int number, class Tensors>
const Tensor& pick(const Tensors& all) {
  static const Tensor none;
  if constexpr (number < 0) return none;
  else return all[number];
}

// ---- who watches (watch.cpp)

// Whether nothing stands between the caller and the kernel that would have to see the raw op: unwatched() of ops/_core/autograd.py, and
// all of Python's watchers are empty.
bool unwatched();

// Tells the traces of ops/_core/registry.py, if there are any, which raw op ran.
void record(const char* op, const char* direction);

// Whether a kernel may read and write the tensor by its address: dense, on the CPU, of no subclass, no wrapper, no tangent.
bool plain(const Tensor& t);
bool plain(PyObject* tensor);  // its Python type too

// From Python, see ops/_core/lane.py: a tuple of the dicts and lists that are empty where nobody watches; the list of traces; the way back
// into Python's backward, backward(op, grads, tensors, others, saved, wanted) -> one gradient or None for each differentiable input; and
// what the ops' own files know, by name.
void connect(PyObject* watchers, PyObject* traces, PyObject* backward, PyObject* facts);
PyObject* fact(const char* name);  // borrowed; the caller has the GIL
struct Limits {
  int64_t kept_bytes = 0, hidden_bytes = 0, least_rows = 0, held_bytes = 0;
};
extern Limits limits;  // those of the facts that are numbers

variable_list backward_in_python(const char* op, const variable_list& grads, const variable_list& tensors, const variable_list& saved,
                                 const std::vector<bool>& wanted, py::tuple (*others)(const void* numbers), const void* numbers);

// ---- memory (memory.cpp): all that the lane allocates without filling it

// From Python: a function that is given each new tensor and returns what takes its place, or None. For tests, which poison memory.
void replace_memory(PyObject* function);

Tensor empty(at::IntArrayRef shape, const at::TensorOptions& options);

// The functions of the same names in ops/_core/tensors.py.
Tensor empty_in_order(const Tensor& like, at::IntArrayRef shape);
inline Tensor empty_in_order(const Tensor& like) { return empty_in_order(like, like.sizes()); }
Tensor last_contiguous(const Tensor& t);
inline at::ScalarType work_dtype(const Tensor& t) { return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// Of a dtype that the kernels know, or not given.
bool floating(const Tensor& t);
// Whether autocast would cast it.
bool autocast_casts(const Tensor& t);
// As a contiguous vector of the dtype that the kernels compute in.
Maybe vector(const Tensor& t, at::ScalarType work);
// The same numbers as (rows, columns).
Tensor matrix(const Tensor& t);
Maybe maybe_matrix(const Tensor& t);
// Where a kernel writes the gradient of a vector, or of a matrix, t; deliver() then gives it t's dtype and memory order.
Tensor vector_target(const Tensor& t, at::ScalarType work);
Tensor matrix_target(const Tensor& t);
Tensor deliver(const Tensor& written, const Tensor& t);
Tensor filled(int64_t value);  // a number
// The seed of a call that drops something: drawn if none is given, as dropout_arguments of ops/_core/tensors.py draws it.
Tensor drawn(const Tensor& seed, double dropout_p);
// Stands for an output that an op leaves out.
const Tensor& nothing();

template <class Signature>
auto raw_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// ---- autograd

template <class Op>
class OpNode final : public torch::autograd::Node {
  using SavedVariable = torch::autograd::SavedVariable;

 public:
  std::string name() const override { return std::string(Op::kName) + "_functionBackward"; }

  void save(const typename Op::Inputs& given, const typename Op::Numbers& n) {
    numbers = n;
    for (size_t i = 0; i < given.size(); i++)
      if (given[i].defined()) inputs[i] = SavedVariable(given[i], false);
  }

  // The first `differentiable` outputs get gradients.
  void save(const typename Op::Outputs& results, size_t differentiable) {
    for (size_t i = 0, first = results.size() - Op::kSaved; i < Op::kSaved; i++)
      outputs[i] = SavedVariable(results[first + i], first + i < differentiable);
  }

  variable_list apply(variable_list&& grads) override {
    typename Op::Inputs given;
    typename Op::Saved saved;
    {
      const std::lock_guard<std::mutex> lock(mutex_);  // not while Python may run: another thread could wait for it with the GIL
      for (size_t i = 0; i < given.size(); i++) given[i] = inputs[i].unpack();
      for (size_t i = 0; i < saved.size(); i++) saved[i] = outputs[i].unpack(getptr());
    }
    std::vector<bool> wanted(Op::kDifferentiable);
    bool any_wanted = false, any_given = false, direct = !at::GradMode::is_enabled() && unwatched();
    for (size_t i = 0; i < wanted.size(); i++) any_wanted |= wanted[i] = task_should_compute_output(i);
    for (const Tensor& g : grads) any_given |= g.defined(), direct = direct && plain(g);
    for (const Tensor& t : given) direct = direct && plain(t);
    for (const Tensor& t : saved) direct = direct && plain(t);
    if (!any_wanted || !any_given) return variable_list(Op::kDifferentiable);
    grads.resize(Op::kGrads);
    if (!direct) return python(grads, given, saved, wanted);
    record(Op::kName, "_bwd");
    at::AutoDispatchBelowADInplaceOrView below;
    return Op::backward(given, saved, numbers, grads, wanted);
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& v : inputs) v.reset_data();
    for (auto& v : outputs) v.reset_data();
  }

  // Compiled autograd traces a node by calling it with stand-ins, which are not plain: it sees the raw op of Python.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const auto& v : inputs) args.collect(v, false);
    for (const auto& v : outputs) args.collect(v, true);
    numbers.collect([&](const auto& value) { args.collect(value); });
  }
  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (auto& v : inputs) saved.before(v);
    for (auto& v : outputs) saved.before(v);
    variable_list results = apply(variable_list(grads));
    for (auto& v : inputs) saved.after(v);
    for (auto& v : outputs) saved.after(v);
    return results;
  }

 private:
  variable_list python(const variable_list& grads, const typename Op::Inputs& given, const typename Op::Saved& saved,
                       const std::vector<bool>& wanted) const {
    variable_list kept(saved.begin(), saved.end());
    for (Tensor& t : kept)
      if (!t.defined()) t = nothing();
    const auto others = [](const void* n) { return Op::others(*static_cast<const typename Op::Numbers*>(n)); };
    return backward_in_python(Op::kName, grads, Op::tensors(given), kept, wanted, others, &numbers);
  }

  std::array<SavedVariable, std::tuple_size_v<typename Op::Inputs>> inputs;
  std::array<SavedVariable, Op::kSaved> outputs;
  typename Op::Numbers numbers;
};

template <class Node>
auto make_node() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return std::shared_ptr<Node>(new Node, torch::autograd::deleteNode);
#else
  return c10::make_intrusive<Node>();
#endif
}

// The op, with gradients of its first `differentiable` outputs where an input needs one; or nothing where it refuses the arguments: Python
// finds out again, and says in its own words what is wrong. The caller has seen that nobody watches.
template <class Op>
std::optional<typename Op::Outputs> run(const typename Op::Inputs& inputs, const typename Op::Numbers& numbers, size_t differentiable) {
  bool needs_gradient = false;
  if (at::GradMode::is_enabled())
    for (size_t i = 0; i < Op::kDifferentiable; i++) needs_gradient |= inputs[i].defined() && inputs[i].requires_grad();
  typename Op::Outputs outputs;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    outputs = Op::forward(inputs, numbers, needs_gradient);
  } catch (const std::exception&) { return std::nullopt; }
  record(Op::kName, "_fwd");
  if (!needs_gradient) return outputs;
  const auto node = make_node<OpNode<Op>>();
  torch::autograd::edge_list edges;
  edges.reserve(Op::kDifferentiable);
  for (size_t i = 0; i < Op::kDifferentiable; i++)
    edges.push_back(inputs[i].defined() ? torch::autograd::impl::gradient_edge(inputs[i]) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  node->save(inputs, numbers);
  for (size_t i = 0; i < differentiable; i++) torch::autograd::set_history(outputs[i], node);
  node->save(outputs, differentiable);
  return outputs;
}

// ---- Python's arguments

// Reads arguments one by one; what is not for the lane makes it say so once and for all.
class Reader {
 public:
  explicit operator bool() const { return mine_; }
  void require(bool condition) { mine_ = mine_ && condition; }

  Tensor tensor(PyObject* o) {
    require(mine_ && plain(o));
    return mine_ ? THPVariable_Unpack(o) : Tensor();
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
  // Lengths, segments, offsets.
  Tensor integers_or_none(PyObject* o) {
    Tensor t = tensor_or_none(o);
    require(!t.defined() || at::isIntegralType(t.scalar_type(), false));
    return mine_ && t.defined() ? t.to(at::kLong).contiguous() : t;
  }
  // Undefined where none is given, or nothing is dropped.
  Tensor seed(PyObject* o, double dropout_p) {
    require(dropout_p >= 0 && dropout_p <= 1);
    if (!mine_ || dropout_p == 0 || o == Py_None) return {};
    if (THPVariable_Check(o)) {
      const Tensor t = tensor(o);
      require(mine_ && t.dim() == 0 && t.scalar_type() == at::kLong);
      return t;
    }
    const int64_t value = integer(o);
    return mine_ ? filled(value) : Tensor();
  }
  void no_other_backend(PyObject* o) { require(o == Py_None || (PyUnicode_CheckExact(o) && !PyUnicode_CompareWithASCIIString(o, "cpu"))); }

 private:
  bool mine_ = true;
};

// Other threads may run Python while a kernel runs.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// ---- entries: each gets all arguments of the public function by position, and returns NotImplemented where the call is for Python

// Runs the op, if it fits; the first `returned` outputs.
template <class Op>
PyObject* finish(const Reader& read, typename Op::Inputs& t, typename Op::Numbers& n, size_t differentiable, size_t returned) {
  if (!read) Py_RETURN_NOTIMPLEMENTED;
  std::optional<typename Op::Outputs> outputs;
  {
    const WithoutGil others_run;
    if (Op::fits(t, n)) outputs = run<Op>(t, n, differentiable);
  }
  if (!outputs) Py_RETURN_NOTIMPLEMENTED;
  if (returned == 1) return THPVariable_Wrap(std::move((*outputs)[0]));
  return Py_BuildValue("(NN)", THPVariable_Wrap(std::move((*outputs)[0])), THPVariable_Wrap(std::move((*outputs)[1])));
}

#define LANE_ENTRY(name) PyObject* name##_entry(PyObject*, PyObject* const* a, Py_ssize_t count)
LANE_ENTRY(attention);
LANE_ENTRY(attention_varlen);
LANE_ENTRY(layer_norm);
LANE_ENTRY(rms_norm);
LANE_ENTRY(add_norm);
LANE_ENTRY(feed_forward);
LANE_ENTRY(linear_cross_entropy);
LANE_ENTRY(scaled_dot_product_attention);

PyObject* activate(PyObject*, PyObject* replacement);
PyObject* deactivate(PyObject*, PyObject*);

}  // namespace pt::lane
