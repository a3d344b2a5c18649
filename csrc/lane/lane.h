// The C++ lane: an op called eagerly, from Python's arguments to the raw op of the CPU library, without Python on the way. What is not for
// it, an entry answers with NotImplemented; the Python lane (pytransformer/ops) then does the call, and words every error.
//
// What an op is to the lane is a struct like Attention of attention.h:
//   Inputs              tensors, undefined where not given, those with a gradient first (kDifferentiable)
//   Numbers             all else; collect(f) shows each to f
//   Outputs, Saved      tensors; the last kSaved of the outputs are kept for backward
//   kGrads              how many outputs may have gradients
//   forward, backward   lower them to the raw ops of pytransformer_C, below autograd
//   tensors, others     the arguments of the Python op
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

// ---- who watches (watch.cpp)

// Whether nothing stands between the caller and the kernel that would have to see the raw op: unwatched() of ops/_core/autograd.py, and
// all of Python's watchers are empty.
bool unwatched();

// Tells the traces of ops/_core/registry.py, if there are any, which raw op ran.
void record(const char* op, const char* direction);

// Whether a kernel may read and write the tensor by its address: dense, on the CPU, of no subclass, no wrapper, no tangent.
bool plain(const Tensor& t);
bool plain(PyObject* tensor);  // its Python type too

// From Python, see ops/_core/lane.py: a tuple of the dicts and lists that are empty where nobody watches; the list of traces; and the way
// back into Python's backward, backward(op, grads, tensors, others, saved, wanted) -> one gradient or None for each differentiable input
// of the lane.
void connect(PyObject* watchers, PyObject* traces, PyObject* backward);

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
    const auto others = [](const void* n) { return Op::others(*static_cast<const typename Op::Numbers*>(n)); };
    return backward_in_python(Op::kName, grads, Op::tensors(given), {saved.begin(), saved.end()}, wanted, others, &numbers);
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
  int64_t natural(PyObject* o) {
    require(PyLong_CheckExact(o));
    int overflow = 0;
    const int64_t value = mine_ ? PyLong_AsLongLongAndOverflow(o, &overflow) : 0;
    require(!overflow && value >= 0);
    return value;
  }
  bool boolean(PyObject* o) {
    require(PyBool_Check(o));
    return o == Py_True;
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

// ---- entries: each returns NotImplemented where the call is for Python

PyObject* attention_entry(PyObject*, PyObject* const* arguments, Py_ssize_t n);
PyObject* layer_norm_entry(PyObject*, PyObject* const* arguments, Py_ssize_t n);
PyObject* activate(PyObject*, PyObject* replacement);
PyObject* deactivate(PyObject*, PyObject*);

}  // namespace pt::lane
