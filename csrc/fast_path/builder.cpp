// SPDX-License-Identifier: Apache-2.0
// Build a program from the record of fast_path.py; see program.h.
#include <ATen/ScalarOps.h>

#include <algorithm>
#include <unordered_map>

#include "steps.h"

namespace pt::fast_path {
namespace {

class Builder {
 public:
  explicit Builder(const py::tuple& recorded) : program_(std::make_shared<Recorded>()) {
    const auto inputs = recorded[0].cast<py::tuple>(), results = recorded[2].cast<py::tuple>();
    program_->name = recorded[3].cast<std::string>();
    if (!recorded[4].is_none()) program_->stream = recorded[4];
    for (py::handle input : inputs) {
      const Tensor t = tensor(input);
      if (t.defined() && !slots_.count(key(t))) slots_[key(t)] = next_;
      if (t.defined() && next_ == 0) program_->device = t.device();
      if (t.defined()) storages_.push_back(t.storage().unsafeGetStorageImpl());
      views_.push_back({next_, 0});
      makers_.push_back(-1);
      next_++;
    }
    inputs_ = next_;
    for (py::handle event : recorded[1]) {
      const auto parts = event.cast<py::tuple>();
      if (parts.size() == 2) {
        add_launch(parts);
        continue;
      }
      precision_ = Precision::of(parts[4].cast<std::array<int64_t, 3>>());
      add_op(parts);
    }
    finish(results);
  }

  std::shared_ptr<const Program> made() const { return why_not_.empty() ? program_ : nullptr; }
  const std::string& why_not() const { return why_not_; }

 private:
  static Tensor tensor(py::handle o) {
    return THPVariable_Check(o.ptr()) ? THPVariable_Unpack(o.ptr()) : Tensor();
  }
  static const void* key(const Tensor& t) { return t.unsafeGetTensorImpl(); }
  static uintptr_t address(const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr());
  }
  void refuse(const std::string& why) {
    if (why_not_.empty()) why_not_ = why;
  }

  // Return the slot of a tensor that a step takes unchanged, and mark the steps that compute it as
  // needed.
  int64_t needed(const Tensor& t) {
    const auto found = slots_.find(key(t));
    if (found == slots_.end()) return -1;
    need(found->second);
    return found->second;
  }
  void need(int64_t slot) {
    const int64_t maker = makers_[slot];
    if (maker < 0 || needed_[maker]) return;
    needed_[maker] = true;
    for (const auto& place : steps_[maker].places) need(place.slot);
  }
  int64_t new_slot(const Tensor& t, int64_t maker) {
    slots_[key(t)] = next_;
    views_.push_back({next_, 0});
    makers_.push_back(maker);
    return next_++;
  }

  void add_op(const py::tuple& event) {
    const auto func = event[0].cast<py::object>();
    const auto args = event[1].cast<py::tuple>();
    const auto kwargs = event[2].cast<py::dict>();
    const Tensor made = tensor(event[3]);
    const std::string name = func.attr("_schema").attr("name").cast<std::string>();
    static const std::vector<std::string> allocations = {
        "aten::empty",          "aten::empty_like", "aten::empty_strided",
        "aten::empty_permuted", "aten::new_empty",  "aten::new_empty_strided"};
    if (std::find(allocations.begin(), allocations.end(), name) != allocations.end() &&
        made.device() == program_->device) {
      Step step;
      step.kind = Step::kAllocate;
      step.sizes = made.sizes().vec(), step.strides = made.strides().vec(),
      step.options = made.options();
      step.made = {new_slot(made, int64_t(steps_.size()))};
      steps_.push_back(std::move(step));
      needed_.push_back(false);
      return;
    }
    add_call(name, func.attr("_schema").attr("overload_name").cast<std::string>(), args, kwargs,
             event[3]);
  }

  void add_call(const std::string& name, const std::string& overload, const py::tuple& args,
                const py::dict& kwargs, py::handle result) {
    Step step;
    step.kind = Step::kCall;
    step.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const c10::FunctionSchema& schema = step.op->schema();
    step.on_stream = !schema.arguments().empty() && schema.arguments().back().name() == "stream";
    py::tuple whole(args.size());
    for (size_t i = 0; i < args.size(); i++) whole[i] = with_number(schema.arguments()[i], args[i]);
    step.stack =
        torch::jit::createStackForSchema(schema, torch::jit::tuple_slice(whole),
                                         py::reinterpret_borrow<py::kwargs>(kwargs), std::nullopt);
    for (at::Tag tag : step.op->getTags())
      if (tag == at::Tag::data_dependent_output || tag == at::Tag::inplace_view ||
          (tag == at::Tag::dynamic_output_shape && !indexes_by_number(name, step.stack)))
        return refuse(name + " goes by what a tensor holds, or changes a view in place");
    bool writes = false;
    for (size_t i = 0; i < step.stack.size(); i++) {
      const bool written =
          schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite();
      writes |= written;
      take(step, i, step.stack[i], written);
    }
    const Tensor source = step.places.empty() ? Tensor() : source_of(step);
    std::vector<Tensor> made;
    if (THPVariable_Check(result.ptr())) made.push_back(tensor(result));
    else if (py::isinstance<py::tuple>(result) || py::isinstance<py::list>(result))
      for (py::handle one : result) {
        if (!THPVariable_Check(one.ptr())) return refuse(name + " returns what is no tensor");
        made.push_back(tensor(one));
      }
    else if (!result.is_none()) return refuse(name + " returns what is no tensor");
    bool views = !writes && source.defined() && !made.empty();
    for (const Tensor& t : made) {
      if (t.device() != program_->device) return refuse(name + " leaves the device");
      views =
          views && t.storage().unsafeGetStorageImpl() == source.storage().unsafeGetStorageImpl();
    }
    const auto number = int64_t(steps_.size());
    const auto from = views ? views_[slots_.at(key(source))] : std::pair<int64_t, int64_t>();
    const uintptr_t start = views ? address(source) : 0;
    const int64_t base = views ? views_[slots_.at(key(source))].second : 0;
    for (const Tensor& t : made) {
      const int64_t slot = new_slot(t, number);
      step.made.push_back(slot);
      if (views) views_[slot] = {from.first, base + int64_t(address(t) - start)};
    }
    steps_.push_back(std::move(step));
    needed_.push_back(false);
    if (!views) {
      if (program_->precision.value_or(precision_) != precision_ ||
          precision_.float32 != Precision::now().float32)
        return refuse("products of one call are differently exact");
      program_->precision = precision_;
      needed_.back() = true;
      for (const auto& place : steps_.back().places) need(place.slot);
    }
  }

  // Return true for an index op without masks, which would select by value.
  static bool indexes_by_number(const std::string& name, const torch::jit::Stack& stack) {
    if (name != "aten::index") return false;
    const auto list = stack[1].toListRef();
    return std::none_of(list.begin(), list.end(), [](const c10::IValue& index) {
      return index.isTensor() && index.toTensor().defined() &&
             (index.toTensor().scalar_type() == at::kBool ||
              index.toTensor().scalar_type() == at::kByte);
    });
  }

  // Convert a number to a tensor if the op takes a tensor, as PyTorch does.
  static py::object with_number(const c10::Argument& argument, py::handle given) {
    const bool number = PyFloat_CheckExact(given.ptr()) || PyLong_CheckExact(given.ptr());
    if (!number || argument.type()->kind() != c10::TypeKind::TensorType)
      return py::reinterpret_borrow<py::object>(given);
    const auto value = PyLong_CheckExact(given.ptr()) ? c10::Scalar(given.cast<int64_t>())
                                                      : c10::Scalar(given.cast<double>());
    const Tensor t = c10::scalar_to_tensor(value);
    t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
  }

  // Return the first tensor among the arguments.
  Tensor source_of(const Step& step) {
    const auto& [argument, index, slot] = step.places[0];
    const c10::IValue& value = step.stack[argument];
    return index < 0 ? value.toTensor() : value.toListRef()[index].toTensor();
  }

  // Record the positions of the program's tensors in an argument. Other tensors are constants that
  // a backend stores between calls.
  void take(Step& step, size_t i, const c10::IValue& value, bool written) {
    const auto one = [&](const Tensor& t, int64_t index) {
      const auto found = slots_.find(key(t));
      if (found != slots_.end()) step.places.push_back({i, index, found->second});
      else if (written) refuse("a call writes to memory from elsewhere");
    };
    if (value.isTensor() && value.toTensor().defined()) one(value.toTensor(), -1);
    if (!value.isList()) return;
    const auto list = value.toListRef();
    for (size_t k = 0; k < list.size(); k++)
      if (list[k].isTensor() && list[k].toTensor().defined()) one(list[k].toTensor(), int64_t(k));
  }

  void add_launch(const py::tuple& event) {
    Step step;
    step.kind = Step::kLaunch;
    step.launch = event[0];
    for (py::handle argument : event[1]) step.arguments.push_back(argument_of(argument));
    steps_.push_back(std::move(step));
    needed_.push_back(true);
  }

  Argument argument_of(py::handle o) {
    Argument argument;
    if (const Tensor t = tensor(o); t.defined()) {
      const auto found = slots_.find(key(t));
      if (found == slots_.end()) {  // stored by a backend between calls
        program_->constants.push_back(t);
        argument.fixed = py::int_(address(t));
        return argument;
      }
      std::tie(argument.slot, argument.offset) = views_[found->second];
      need(argument.slot);
      return argument;
    }
    if (py::isinstance<py::tuple>(o)) {
      bool fixed = true;
      for (py::handle each : o) {
        argument.inner.push_back(argument_of(each));
        fixed = fixed && argument.inner.back().is_fixed();
      }
      if (!fixed) return argument;
      argument.inner.clear();
    }
    argument.fixed = py::reinterpret_borrow<py::object>(o);
    return argument;
  }

  void finish(const py::tuple& results) {
    for (py::handle result : results) {
      const Tensor t = tensor(result);
      const int64_t slot = t.defined() ? needed(t) : -1;
      if (t.defined()) {
        const auto* storage = t.storage().unsafeGetStorageImpl();
        if (slot < int64_t(inputs_) ||
            std::find(storages_.begin(), storages_.end(), storage) != storages_.end())
          refuse("a result is an argument, or another result");
        storages_.push_back(storage);
      }
      program_->results.push_back(slot);
    }
    // Release each slot after its last use, so that device memory is returned as in Python.
    std::vector<bool> later(next_, false);
    for (int64_t slot : program_->results)
      if (slot >= 0) later[slot] = true;
    const auto last_of = [&](Step& step, int64_t slot) {
      if (slot < int64_t(inputs_) || later[slot]) return;
      later[slot] = true;
      step.last.push_back(slot);
    };
    const std::function<void(Step&, const Argument&)> look = [&](Step& step,
                                                                 const Argument& argument) {
      if (argument.slot >= 0) last_of(step, argument.slot);
      for (const Argument& each : argument.inner) look(step, each);
    };
    for (size_t i = steps_.size(); i-- > 0;) {
      if (!needed_[i]) continue;
      Step& step = steps_[i];
      for (int64_t slot : step.made) last_of(step, slot);
      for (const auto& place : step.places) {
        last_of(step, place.slot);
        // hold no memory of the recorded call
        if (place.index < 0) step.stack[place.argument] = c10::IValue();
        else step.stack[place.argument].toList().set(place.index, Tensor());
      }
      for (const Argument& argument : step.arguments) look(step, argument);
    }
    for (size_t i = 0; i < steps_.size(); i++)
      if (needed_[i]) program_->steps.push_back(std::move(steps_[i]));
    program_->slots = size_t(next_);
  }

  std::shared_ptr<Recorded> program_;
  std::vector<Step> steps_;
  std::vector<bool> needed_;
  std::unordered_map<const void*, int64_t> slots_;
  // Per slot: the slot that owns its memory, and the offset in it.
  std::vector<std::pair<int64_t, int64_t>> views_;
  std::vector<int64_t> makers_;  // per slot: the step that computes it
  std::vector<const void*> storages_;
  int64_t next_ = 0, inputs_ = 0;
  Precision precision_;  // at the current op
  std::string why_not_;
};

}  // namespace

std::pair<std::shared_ptr<const Program>, std::string> built(const py::tuple& recorded) {
  const Builder builder(recorded);
  return {builder.made(), builder.why_not()};
}

}  // namespace pt::fast_path
