/* The bytes of torch's tensors, in C, without anything of torch when this is built. */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* learn(type): whether this class of tensors says in C where their bytes are; then copy_bytes works for it. */
PyObject *learn(PyObject *module, PyObject *type);

/* keep(tensors, most_bytes): [(tensor, its bytes)...]; None if that is no list of tensors of the class that was learned,
 * or one is not flat, not in the host's memory or empty, or they are too large. */
PyObject *keep(PyObject *tensors, Py_ssize_t most_bytes);
