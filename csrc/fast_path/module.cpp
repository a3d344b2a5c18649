// SPDX-License-Identifier: Apache-2.0
#include "fast_path.h"

namespace pt::fast_path {
namespace {

PyObject* connect_entry(PyObject*, PyObject* const* a, Py_ssize_t n) {
  bool right = n == 4 && PyTuple_Check(a[0]) && PyList_Check(a[1]) && PyCallable_Check(a[2]) &&
               PyDict_Check(a[3]);
  for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(a[0]); i++)
    right = PyDict_Check(PyTuple_GET_ITEM(a[0], i)) || PyList_Check(PyTuple_GET_ITEM(a[0], i));
  if (!right) {
    PyErr_SetString(
        PyExc_TypeError,
        "connect(watchers: tuple of dicts and lists, traces: list, backward, facts: dict)");
    return nullptr;
  }
  connect(a[0], a[1], a[2], a[3]);
  Py_RETURN_NONE;
}

PyObject* replace_memory_entry(PyObject*, PyObject* function) {
  replace_memory(function);
  Py_RETURN_NONE;
}

#define FAST(f) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)), METH_FASTCALL
#define OP(name)              \
  {#name, FAST(name##_entry), \
   "pytransformer." #name " with all arguments by position, or NotImplemented"}
PyMethodDef methods[] = {
    {"connect", FAST(connect_entry), "connect(watchers, traces, backward, facts): see fast_path.h"},
    OP(attention),
    OP(attention_varlen),
    OP(layer_norm),
    OP(rms_norm),
    OP(add_norm),
    OP(feed_forward),
    {"linear", FAST(linear_entry), "pytransformer.nn.linear without gradient, or NotImplemented"},
    OP(linear_cross_entropy),
    OP(rotary),
    OP(append_kv),
    OP(scaled_dot_product_attention),
    {"post_norm_layer", FAST(post_norm_layer_entry), "a layer without gradient, or NotImplemented"},
    {"pre_norm_heads", FAST(pre_norm_heads_entry), "a layer's heads, or NotImplemented"},
    {"pre_norm_rest", FAST(pre_norm_rest_entry), "the layer from its heads, or NotImplemented"},
    {"remember", FAST(remember_entry),
     "remember(module, dicts, functions, result): see modules.cpp"},
    {"recall", FAST(recall_entry), "recall(state, module, dicts): see modules.cpp"},
    {"activate", activate, METH_O,
     "activate(replacement): override aten::scaled_dot_product_attention"},
    {"deactivate", deactivate, METH_NOARGS, "end the override"},
    {"replace_memory", replace_memory_entry, METH_O,
     "replace_memory(function or None): what takes the place of each new tensor"},
    {"precision", precision_entry, METH_NOARGS, "how exact products are now, for fast_path.py"},
    {"programs", programs_entry, METH_NOARGS,
     "(number of programs, reasons why calls have none): see program.h"},
    {"forget", forget_entry, METH_NOARGS, "forget every program: see program.h"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast_path",
                      "The C++ fast path of eager calls; see fast_path.h.", -1, methods};

}  // namespace
}  // namespace pt::fast_path

PyMODINIT_FUNC PyInit__fast_path() { return PyModule_Create(&pt::fast_path::module); }
