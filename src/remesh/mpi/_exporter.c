/* A base for classes written in Python that lend memory: `__buffer__(flags)` gives a memoryview, which is lent on. From
 * Python 3.12 on every class can do that (PEP 688).
 */
#include "_fast.h"

static int exporter_lend(PyObject *self, Py_buffer *view, int flags) {
    view->obj = NULL;
    PyObject *lent = PyObject_CallMethod(self, "__buffer__", "i", flags);
    if (lent == NULL) return -1;
    int failed = PyObject_GetBuffer(lent, view, flags);
    Py_DECREF(lent); /* the view holds one of its own */
    return failed;
}

/* Never called, as views belong to what was lent on. That it is there tells NumPy to keep a view, not only the lender. */
static void exporter_release(PyObject *self, Py_buffer *view) {}

static PyType_Slot exporter_slots[] = {
    {Py_bf_getbuffer, exporter_lend},
    {Py_bf_releasebuffer, exporter_release},
    {Py_tp_doc, "Lends the memory that `__buffer__` gives."},
    {0, NULL},
};

static PyType_Spec exporter_spec = {
    "remesh.mpi._fast.Exporter", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, exporter_slots,
};

int add_exporter(PyObject *module) {
    PyObject *type = PyType_FromSpec(&exporter_spec);
    if (type == NULL) return -1;
    int failed = PyModule_AddObjectRef(module, "Exporter", type);
    Py_DECREF(type);
    return failed;
}
