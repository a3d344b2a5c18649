// SPDX-License-Identifier: Apache-2.0
// The C++ fast path: an eager op from Python's arguments to the CPU library's raw op, or to a
// recorded program of a GPU backend (program.h), without Python. An entry returns NotImplemented
// for any other call; the Python path (pytransformer/ops) then runs it and raises every error.
//
// A struct like Attention of attention.h describes an op:
//   Inputs              tensors, undefined if absent, differentiable ones first (kDifferentiable)
//   Numbers             all other arguments; collect(f) passes each to f
//   Outputs, Saved      tensors; backward saves the last kSaved outputs
//   kGrads              number of outputs that may have gradients
//   kSeed               index of the dropout seed, or -1
//   complete            fills in defaults such as a scale; false for invalid arguments
//   fits                true if the CPU library supports a completed call
//   forward, backward   lower to the raw ops of pytransformer_C, below autograd
//   tensors, others     arguments of the Python op
// Ops that share a lowering use one set of input names, -1 for an absent input: pick().
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "program.h"

namespace pt::fast_path {

using Maybe = std::optional<Tensor>;

inline Maybe maybe(const Tensor& t) { return t.defined() ? Maybe(t) : std::nullopt; }

// Return the tensor with this index, undefined if it is negative.
template <int number, class Tensors>
const Tensor& pick(const Tensors& all) {
  static const Tensor none;
  if constexpr (number < 0) return none;
  else return all[number];
}

// Watchers (watch.cpp).

// Return true if nothing between the caller and the kernel must see the raw op: unwatched() of
// ops/_core/autograd.py, and all of Python's watchers are empty.
bool unwatched();

// Add the raw op to the traces of ops/_core/registry.py, if one is open in the process.
void record(const char* op, const char* direction, const char* backend = "cpu");

// Return true if a kernel may read and write the tensor by its address: dense, on the CPU or a GPU,
// no subclass, no wrapper, no tangent, and a storage that holds every element (FSDP2 frees it).
bool plain(const Tensor& t);
bool plain(PyObject* tensor);  // also checks the Python type

// Connect to Python, see ops/_core/fast_path.py. watchers: a tuple of dicts and lists that are
// empty if nobody watches. traces: the list of open traces. backward(op, grads, tensors, others,
// saved, wanted): Python's backward, which returns one gradient or None per differentiable input.
// facts: named constants of the ops.
void connect(PyObject* watchers, PyObject* traces, PyObject* backward, PyObject* facts);
PyObject* fact(const char* name);  // borrowed; the caller holds the GIL
struct Limits {
  int64_t kept_bytes = 0, kept_depth = 0, held_bytes = 0;
};
extern Limits limits;  // numbers among the facts

// Backend of a call: the CPU library, or a recorded program of another backend.
struct Route {
  enum Backend { kAny, kCpu, kTriton, kCuda } backend = kAny;  // forced backend
  bool strict = false;
  bool recorded = false;
};

// Arguments of the raw op, or of its backward, as on the Python path.
struct InPython {
  const char* op;
  variable_list tensors, saved;
  std::function<py::tuple()> others;  // under the GIL
  Route route;
};
variable_list backward_in_python(const InPython& call, const variable_list& grads,
                                 const std::vector<bool>& wanted);
// Record a call with fast_path.py, for program_for(). `given`: the public function's arguments.
// `save`: a backward may follow.
py::object record_forward(const InPython& call, const std::function<py::object()>& given,
                          bool save);
py::object record_backward(const InPython& call, const variable_list& grads,
                           const std::vector<bool>& wanted);

// Memory (memory.cpp): the only uninitialized allocations of the fast path.

// Set a Python function that receives each new tensor and returns its replacement, or reset it with
// None. Tests poison memory with it.
void replace_memory(PyObject* function);

Tensor empty(at::IntArrayRef shape, const at::TensorOptions& options);
Tensor empty_strided(at::IntArrayRef shape, at::IntArrayRef strides,
                     const at::TensorOptions& options);

// Counterparts of the functions in ops/_core/tensors.py.
Tensor empty_in_order(const Tensor& like, at::IntArrayRef shape);
inline Tensor empty_in_order(const Tensor& like) { return empty_in_order(like, like.sizes()); }
Tensor last_contiguous(const Tensor& t);
inline at::ScalarType work_dtype(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Return true if t is undefined or of a dtype that the kernels support.
bool floating(const Tensor& t);
// Return true if autocast would cast t.
bool autocast_casts(const Tensor& t);
// Return t as a contiguous vector of the accumulator dtype.
Maybe vector(const Tensor& t, at::ScalarType work);
// Return t as (rows, columns).
Tensor matrix(const Tensor& t);
Maybe maybe_matrix(const Tensor& t);
// Allocate a kernel's output for the gradient of a vector, or a matrix, t. deliver() then converts
// it to t's dtype and memory order.
Tensor vector_target(const Tensor& t, at::ScalarType work);
Tensor matrix_target(const Tensor& t);
Tensor deliver(const Tensor& written, const Tensor& t);
Tensor filled(int64_t value, at::Device device);  // one int64
// Draw the seed of a call with dropout, like dropout_arguments of ops/_core/tensors.py.
Tensor drawn(at::Device device);
template <class Op>
bool draws(const typename Op::Inputs& t, const typename Op::Numbers& n) {
  if constexpr (Op::kSeed < 0) return false;
  else return n.dropout_p != 0 && !t[Op::kSeed].defined();
}
// Return a placeholder for an absent output.
const Tensor& nothing();

template <class Signature>
auto raw_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Autograd.

template <class Op>
class OpNode final : public torch::autograd::Node {
  using SavedVariable = torch::autograd::SavedVariable;

 public:
  std::string name() const override { return std::string(Op::kName) + "_functionBackward"; }

  void save(const typename Op::Inputs& given, const typename Op::Numbers& n, const Route& r) {
    numbers = n, route = r;
    for (size_t i = 0; i < given.size(); i++)
      if (given[i].defined()) inputs[i] = SavedVariable(given[i], false);
  }

  // Save the outputs. The first `differentiable` ones get gradients.
  void save(const typename Op::Outputs& results, size_t differentiable) {
    for (size_t i = 0, first = results.size() - Op::kSaved; i < Op::kSaved; i++)
      outputs[i] = SavedVariable(results[first + i], first + i < differentiable);
  }

  variable_list apply(variable_list&& grads) override {
    typename Op::Inputs given;
    typename Op::Saved saved;
    {
      // Release the lock before Python may run: another thread could wait for it with the GIL.
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < given.size(); i++) given[i] = inputs[i].unpack();
      for (size_t i = 0; i < saved.size(); i++) saved[i] = outputs[i].unpack(getptr());
    }
    std::vector<bool> wanted(Op::kDifferentiable);
    bool any_wanted = false, any_given = false, direct = !at::GradMode::is_enabled() && unwatched();
    for (size_t i = 0; i < wanted.size(); i++)
      any_wanted |= wanted[i] = task_should_compute_output(i);
    for (const Tensor& g : grads) any_given |= g.defined(), direct = direct && plain(g);
    for (const Tensor& t : given) direct = direct && plain(t);
    for (const Tensor& t : saved) direct = direct && plain(t);
    if (!any_wanted || !any_given) return variable_list(Op::kDifferentiable);
    grads.resize(Op::kGrads);
    if (!direct) return backward_in_python(in_python(given, saved), grads, wanted);
    if (route.recorded) return recorded(grads, given, saved, wanted);
    record(Op::kName, "_bwd");
    at::AutoDispatchBelowADInplaceOrView below;
    return Op::backward(given, saved, numbers, grads, wanted);
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& v : inputs) v.reset_data();
    for (auto& v : outputs) v.reset_data();
  }

  // Compiled autograd calls a node with stand-ins, which are not plain, so it sees Python's raw op.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (const auto& v : inputs) args.collect(v, false);
    for (const auto& v : outputs) args.collect(v, true);
    numbers.collect([&](const auto& value) { args.collect(value); });
    args.collect(int64_t(route.backend)), args.collect(route.strict);
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (auto& v : inputs) saved.before(v);
    for (auto& v : outputs) saved.before(v);
    variable_list results = apply(variable_list(grads));
    for (auto& v : inputs) saved.after(v);
    for (auto& v : outputs) saved.after(v);
    return results;
  }

 private:
  InPython in_python(const typename Op::Inputs& given, const typename Op::Saved& saved) const {
    variable_list kept(saved.begin(), saved.end());
    for (Tensor& t : kept)
      if (!t.defined()) t = nothing();
    return {Op::kName, Op::tensors(given), std::move(kept), [this] { return Op::others(numbers); },
            route};
  }

  variable_list recorded(const variable_list& grads, const typename Op::Inputs& given,
                         const typename Op::Saved& saved, const std::vector<bool>& wanted) const {
    const py::gil_scoped_acquire gil;
    Key key(Op::kName, "_bwd", route.backend);
    numbers.collect([&](const auto& value) { key.add(value); });
    for (bool want : wanted) key.add(want);
    for (const Tensor& g : grads) key.add(g);
    for (const Tensor& t : given) key.add(t);
    for (const Tensor& t : saved) key.add(t);
    const auto program =
        program_for(key, [&] { return record_backward(in_python(given, saved), grads, wanted); });
    if (program) {
      variable_list all(grads);
      for (const Tensor& t : Op::tensors(given)) all.push_back(t);
      for (const Tensor& t : saved) all.push_back(t);
      try {
        variable_list results = program->run(all);
        record(Op::kName, "_bwd", program->backend());
        return results;
      } catch (const std::exception&) { PyErr_Clear(); }
    }
    return backward_in_python(in_python(given, saved), grads, wanted);
  }

  std::array<SavedVariable, std::tuple_size_v<typename Op::Inputs>> inputs;
  std::array<SavedVariable, Op::kSaved> outputs;
  typename Op::Numbers numbers;
  Route route;
};

template <class Node>
auto make_node() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  return std::shared_ptr<Node>(new Node, torch::autograd::deleteNode);
#else
  return c10::make_intrusive<Node>();
#endif
}

inline bool needs_gradient(at::TensorList differentiable) {
  return at::GradMode::is_enabled() &&
         std::any_of(differentiable.begin(), differentiable.end(),
                     [](const Tensor& t) { return t.defined() && t.requires_grad(); });
}

// Attach a node: the first `differentiable` outputs propagate gradients to the inputs.
template <class Op>
void attach(const typename Op::Inputs& inputs, const typename Op::Numbers& numbers,
            const Route& route, typename Op::Outputs& outputs, size_t differentiable) {
  const auto node = make_node<OpNode<Op>>();
  torch::autograd::edge_list edges;
  edges.reserve(Op::kDifferentiable);
  for (size_t i = 0; i < Op::kDifferentiable; i++)
    edges.push_back(inputs[i].defined() ? torch::autograd::impl::gradient_edge(inputs[i])
                                        : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  node->save(inputs, numbers, route);
  for (size_t i = 0; i < differentiable; i++) torch::autograd::set_history(outputs[i], node);
  node->save(outputs, differentiable);
}

// Run the op with the CPU library, with gradients if an input needs them. Return nothing if the
// library refuses the arguments; Python then raises the error. The caller has checked that nobody
// watches.
template <class Op>
std::optional<typename Op::Outputs> run(typename Op::Inputs& inputs,
                                        const typename Op::Numbers& numbers, size_t differentiable,
                                        const Route& route = {}) {
  const bool needs = needs_gradient({inputs.data(), Op::kDifferentiable});
  if constexpr (Op::kSeed >= 0)
    if (draws<Op>(inputs, numbers)) inputs[Op::kSeed] = drawn(at::kCPU);
  typename Op::Outputs outputs;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    outputs = Op::forward(inputs, numbers, needs);
  } catch (const std::exception&) { return std::nullopt; }
  record(Op::kName, "_fwd");
  if constexpr (Op::kDifferentiable > 0)
    if (needs) attach<Op>(inputs, numbers, route, outputs, differentiable);
  return outputs;
}

// Run the op with a recorded program, if there is one. `given` builds the public function's
// arguments. The caller holds the GIL.
template <class Op>
std::optional<typename Op::Outputs> run_recorded(typename Op::Inputs& inputs,
                                                 const typename Op::Numbers& numbers,
                                                 size_t differentiable, const Route& route,
                                                 const std::function<py::object()>& given) {
  const bool needs = needs_gradient({inputs.data(), Op::kDifferentiable}),
             draw = draws<Op>(inputs, numbers);
  const at::Device device = inputs[0].device();
  Key key(Op::kName, "_fwd", route.backend);
  key.add(needs), key.add(draw);
  numbers.collect([&](const auto& value) { key.add(value); });
  for (const Tensor& t : inputs) key.add(t);
  const auto program = program_for(key, [&] {
    typename Op::Inputs example(inputs);
    if constexpr (Op::kSeed >= 0)
      if (draw) example[Op::kSeed] = filled(0, device);  // one seed per call
    return record_forward(
        {Op::kName, Op::tensors(example), {}, [&] { return Op::others(numbers); }, route}, given,
        needs);
  });
  if (!program) return std::nullopt;
  if constexpr (Op::kSeed >= 0)
    if (draw) inputs[Op::kSeed] = drawn(device);
  typename Op::Outputs outputs;
  try {
    variable_list found = program->run(Op::tensors(inputs));
    std::move(found.begin(), found.begin() + std::min(found.size(), outputs.size()),
              outputs.begin());
  } catch (const std::exception&) {
    PyErr_Clear();
    return std::nullopt;
  }
  record(Op::kName, "_fwd", program->backend());
  if constexpr (Op::kDifferentiable > 0)
    if (needs) attach<Op>(inputs, numbers, route, outputs, differentiable);
  return outputs;
}

// Entries receive all arguments of the public function by position and return NotImplemented to
// fall back to Python.

#define FAST_PATH_ENTRY(name) \
  PyObject* name##_entry(PyObject*, PyObject* const* a, Py_ssize_t count)
FAST_PATH_ENTRY(attention);
FAST_PATH_ENTRY(attention_varlen);
FAST_PATH_ENTRY(layer_norm);
FAST_PATH_ENTRY(rms_norm);
FAST_PATH_ENTRY(add_norm);
FAST_PATH_ENTRY(feed_forward);
FAST_PATH_ENTRY(linear);  // pytransformer.nn
FAST_PATH_ENTRY(linear_cross_entropy);
FAST_PATH_ENTRY(rotary);
FAST_PATH_ENTRY(append_kv);
FAST_PATH_ENTRY(scaled_dot_product_attention);
FAST_PATH_ENTRY(post_norm_layer);  // for converted modules
FAST_PATH_ENTRY(pre_norm_heads);
FAST_PATH_ENTRY(pre_norm_rest);
FAST_PATH_ENTRY(remember);
FAST_PATH_ENTRY(recall);

PyObject* activate(PyObject*, PyObject* replacement);
PyObject* deactivate(PyObject*, PyObject*);

}  // namespace pt::fast_path
