/* torch gives the functions of DLPack's exchange protocol: what a tensor is comes of one call, which makes no object.
 *
 * https://dmlc.github.io/dlpack/latest/python_spec.html, and dlpack.h of DLPack 1.3, from which the structures are.
 */
#include "_tensors.h"

#include <stdint.h>

enum { MAJOR = 1, ON_HOST = 1 };

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* in elements; no strides: flat */
    uint64_t byte_offset;
} Described;

typedef struct Exchange {
    uint32_t major, minor;
    struct Exchange *older;
    void *make, *export_owned, *import_owned;
    int (*describe)(void *tensor, Described *out); /* NULL, or 0 where it succeeds, -1 with an error */
    void *find_stream;
} Exchange;

static PyObject *tensor_type;
static const Exchange *exchange;

PyObject *learn(PyObject *module, PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const Exchange *found = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* what it points at stays as long as the process */
    PyErr_Clear();       /* a torch that does not speak it */
    while (found != NULL && found->major > MAJOR) found = found->older;
    if (found == NULL || found->major != MAJOR || found->describe == NULL) Py_RETURN_FALSE;
    Py_XDECREF(tensor_type);
    tensor_type = Py_NewRef(type);
    exchange = found;
    Py_RETURN_TRUE;
}

/* Its size in bytes if they lie side by side in the host's memory, 0 if they do not. */
static Py_ssize_t flat_bytes(const Described *tensor) {
    int64_t num = 1;
    for (int32_t dim = tensor->ndim - 1; dim >= 0; dim--) {
        if (tensor->strides != NULL && tensor->shape[dim] != 1 && tensor->strides[dim] != num) return 0;
        num *= tensor->shape[dim];
    }
    int bits = tensor->dtype.bits * tensor->dtype.lanes;
    return tensor->device_type == ON_HOST && bits % 8 == 0 ? num * (bits / 8) : 0;
}

/* The bytes of a tensor; None where `keep` says so; NULL with an error. */
static PyObject *copy_bytes(PyObject *tensor, Py_ssize_t *left) {
    Described found;
    if (exchange == NULL || !PyObject_TypeCheck(tensor, (PyTypeObject *)tensor_type)) Py_RETURN_NONE;
    if (exchange->describe(tensor, &found) < 0) {
        /* A sparse tensor has no bytes of its own, and some kinds of elements DLPack has no name for. */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    Py_ssize_t num_bytes = flat_bytes(&found);
    if (num_bytes == 0 || num_bytes > *left || found.data == NULL) Py_RETURN_NONE;
    *left -= num_bytes;
    return PyBytes_FromStringAndSize((const char *)found.data + found.byte_offset, num_bytes);
}

PyObject *keep(PyObject *tensors, Py_ssize_t most_bytes) {
    if (!PyList_Check(tensors)) Py_RETURN_NONE;
    PyObject *kept = PyList_New(0);
    for (Py_ssize_t i = 0; kept != NULL && i < PyList_Size(tensors); i++) {
        PyObject *pair = NULL, *tensor = Py_NewRef(PyList_GetItem(tensors, i));
        PyObject *copy = copy_bytes(tensor, &most_bytes);
        if (copy == Py_None) {
            Py_DECREF(tensor);
            Py_DECREF(kept);
            return copy;
        }
        if (copy != NULL) pair = PyTuple_Pack(2, tensor, copy);
        if (pair == NULL || PyList_Append(kept, pair) < 0) Py_CLEAR(kept);
        Py_XDECREF(pair);
        Py_XDECREF(copy);
        Py_DECREF(tensor);
    }
    return kept;
}
