// SPDX-License-Identifier: Apache-2.0
// Compare a module with the state in which a conversion rule found it
// (integrations/convert/rules.py).
//
// A rule's condition reads hooks, classes, dropouts, weights and settings of a module and of its
// inner modules. A State describes their dictionaries when the condition ran, and keeps its result,
// with what the rule read there; while they are equal, the condition need not run again.
//
// A State keeps no weight alive: it describes a tensor by its type, dimensions, dtype and device,
// and modules and dictionaries by their contents. It holds all other values, and compares them by
// identity.
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "fast_path.h"

namespace pt::fast_path {
namespace {

struct Entry {
  PyObject* key = nullptr;
  PyObject* value = nullptr;     // null if it is described
  PyTypeObject* type = nullptr;  // null at the end of a dictionary
  int64_t form = 0;              // of a tensor

  bool operator==(const Entry& o) const {
    return key == o.key && value == o.value && type == o.type && form == o.form;
  }
};

struct State {
  PyObject_HEAD std::vector<Entry>* entries;
  std::vector<std::array<PyObject*, 3>>* functions;  // owner, name, function
  PyObject* result;                                  // of the condition
};

PyTypeObject* state_type = nullptr;

bool is_modules(PyObject* key) {
  static PyObject* const name = PyUnicode_InternFromString("_modules");
  return key == name || (PyUnicode_Check(key) && PyUnicode_GET_LENGTH(key) == 8 &&
                         !PyUnicode_CompareWithASCIIString(key, "_modules"));
}

int64_t form_of(const Tensor& t) {
  if (!t.defined()) return 0;
  return 1 + t.dim() + (int64_t(t.scalar_type()) << 8) + (int64_t(t.device().type()) << 16) +
         (int64_t(t.device().index()) << 24);
}

// Visits a module's entries and those of its inner modules, in order. `visit` returns false to
// stop. Nothing here runs Python code.
template <class Visit>
class Walk {
 public:
  explicit Walk(const Visit& visit) : visit_(visit) {}

  bool module(PyObject* m, int depth = 0) {
    constexpr int kMaxDepth = 64;  // a module may contain itself
    const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(m, nullptr));
    if (!dict) PyErr_Clear();
    if (!dict || depth == kMaxDepth || !visit_({nullptr, nullptr, Py_TYPE(m)})) return false;
    return contents(dict.ptr(), [&](PyObject* key, PyObject* value) {
      if (!PyDict_Check(value)) return leaf(key, value);
      if (!visit_({key, nullptr, Py_TYPE(value)})) return false;
      if (!is_modules(key)) return dictionary(value);
      return contents(value, [&](PyObject* name, PyObject* inner) {
        if (inner == Py_None) return leaf(name, inner);
        return visit_({name, nullptr, Py_TYPE(inner)}) && module(inner, depth + 1);
      });
    });
  }

  bool dictionary(PyObject* dict) {
    return contents(dict, [&](PyObject* key, PyObject* value) { return leaf(key, value); });
  }

 private:
  bool leaf(PyObject* key, PyObject* value) {
    // THPVariable_Check would run Python code for every other type.
    if (PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject*>(THPVariableClass)))
      return visit_({key, nullptr, Py_TYPE(value), form_of(THPVariable_Unpack(value))});
    return visit_({key, value, Py_TYPE(value)});
  }

  template <class Each>
  bool contents(PyObject* dict, const Each& each) {
    PyObject *key, *value;
    for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value);)
      if (Py_TYPE(value) != state_type && !each(key, value)) return false;
    return visit_({});
  }

  const Visit& visit_;
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  State& state = *reinterpret_cast<State*>(self);
  Py_VISIT(Py_TYPE(self));
  for (const Entry& e : *state.entries) {
    Py_VISIT(e.key);
    Py_VISIT(e.value);
    Py_VISIT(e.type);
  }
  for (const auto& function : *state.functions)
    for (PyObject* o : function) Py_VISIT(o);
  Py_VISIT(state.result);
  return 0;
}

int clear(PyObject* self) {
  State& state = *reinterpret_cast<State*>(self);
  // Empty the state first: releasing an object may run Python code.
  const auto entries = std::exchange(*state.entries, {});
  const auto functions = std::exchange(*state.functions, {});
  for (const Entry& e : entries) Py_XDECREF(e.key), Py_XDECREF(e.value), Py_XDECREF(e.type);
  for (const auto& function : functions)
    for (PyObject* o : function) Py_DECREF(o);
  Py_CLEAR(state.result);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  State& state = *reinterpret_cast<State*>(self);
  delete state.entries;
  delete state.functions;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// A copied or pickled module has None in the place of its state, and makes a new one.
PyObject* reduce(PyObject*, PyObject*) {
  return Py_BuildValue("(O())", reinterpret_cast<PyObject*>(Py_TYPE(Py_None)));
}

bool make_type() {
  static PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"pytransformer._fast_path.State", sizeof(State), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  state_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return state_type;
}

// Return whether a function is still what its owner has under its name.
bool holds(const std::array<PyObject*, 3>& function) {
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(function[0], function[1]));
  if (!found) PyErr_Clear();
  return found.ptr() == function[2];
}

}  // namespace

// Arguments: a module; a tuple of dictionaries outside of modules; a tuple of functions, (owner,
// name, getattr(owner, name)); the condition's result, any object but None. Return a State, or None
// for a module that contains itself.
FAST_PATH_ENTRY(remember) {
  if (count != 4 || !PyTuple_Check(a[1]) || !PyTuple_Check(a[2]) || a[3] == Py_None) {
    PyErr_SetString(PyExc_TypeError,
                    "remember(module, dicts: tuple, functions: tuple, result: not None)");
    return nullptr;
  }
  if (!state_type && !make_type()) return nullptr;
  const auto made = py::reinterpret_steal<py::object>(state_type->tp_alloc(state_type, 0));
  if (!made) return nullptr;
  State& state = *reinterpret_cast<State*>(made.ptr());
  state.entries = new std::vector<Entry>,
  state.functions = new std::vector<std::array<PyObject*, 3>>;
  state.result = Py_NewRef(a[3]);
  const auto keep = [&](const Entry& e) {
    Py_XINCREF(e.key), Py_XINCREF(e.value), Py_XINCREF(e.type);
    state.entries->push_back(e);
    return true;
  };
  Walk walk(keep);
  if (!walk.module(a[0])) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a[1]); i++)
    walk.dictionary(PyTuple_GET_ITEM(a[1], i));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a[2]); i++) {
    PyObject* one = PyTuple_GET_ITEM(a[2], i);
    state.functions->push_back({Py_NewRef(PyTuple_GetItem(one, 0)),
                                Py_NewRef(PyTuple_GetItem(one, 1)),
                                Py_NewRef(PyTuple_GetItem(one, 2))});
  }
  return made.inc_ref().ptr();
}

// Arguments: a State, and the module and the dictionaries that it was made of. Return the result,
// or None if something has changed.
FAST_PATH_ENTRY(recall) {
  if (count != 3 || !state_type || Py_TYPE(a[0]) != state_type || !PyTuple_Check(a[2]))
    Py_RETURN_NONE;
  const State& state = *reinterpret_cast<State*>(a[0]);
  auto entry = state.entries->begin();
  const auto compare = [&](const Entry& e) {
    return entry != state.entries->end() && e == *entry++;
  };
  Walk walk(compare);
  bool same = walk.module(a[1]);
  for (Py_ssize_t i = 0; same && i < PyTuple_GET_SIZE(a[2]); i++)
    same = walk.dictionary(PyTuple_GET_ITEM(a[2], i));
  if (!same || !std::all_of(state.functions->begin(), state.functions->end(), holds))
    Py_RETURN_NONE;
  return Py_NewRef(state.result);
}

}  // namespace pt::fast_path
