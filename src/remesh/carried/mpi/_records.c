/* Request, Posted and Arrived as Python types over C structs. They take the arguments of the dataclasses of the same
 * names, have the same attributes, and are equal when all attributes are.
 */
#include "_records.h"
#include <stddef.h>
#include <structmember.h>

static PyMemberDef request_members[] = {
    {"number", T_ULONGLONG, offsetof(Request, number), 0, NULL},
    {"kind", T_OBJECT, offsetof(Request, kind), 0, NULL},
    {"comm", T_ULONGLONG, offsetof(Request, comm), 0, NULL},
    {"peer", T_INT, offsetof(Request, peer), 0, NULL},
    {"tag", T_INT, offsetof(Request, tag), 0, NULL},
    {"address", T_ULONGLONG, offsetof(Request, address), 0, NULL},
    {"num_bytes", T_LONGLONG, offsetof(Request, num_bytes), 0, NULL},
    {"done", T_BOOL, offsetof(Request, done), 0, NULL},
    {"detached", T_BOOL, offsetof(Request, detached), 0, NULL},
    {"source", T_INT, offsetof(Request, source), 0, NULL},
    {"message_tag", T_INT, offsetof(Request, message_tag), 0, NULL},
    {"message_bytes", T_LONGLONG, offsetof(Request, message_bytes), 0, NULL},
    {"error", T_INT, offsetof(Request, error), 0, NULL},
    {"cancelled", T_BOOL, offsetof(Request, cancelled), 0, NULL},
    {"written", T_BOOL, offsetof(Request, written), 0, NULL},
    {"payload", T_OBJECT, offsetof(Request, payload), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef posted_members[] = {
    {"request", T_ULONGLONG, offsetof(Posted, request), 0, NULL},
    {"comm", T_ULONGLONG, offsetof(Posted, comm), 0, NULL},
    {"source", T_INT, offsetof(Posted, source), 0, NULL},
    {"tag", T_INT, offsetof(Posted, tag), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef arrived_members[] = {
    {"comm", T_ULONGLONG, offsetof(Arrived, comm), 0, NULL},
    {"source", T_INT, offsetof(Arrived, source), 0, NULL},
    {"tag", T_INT, offsetof(Arrived, tag), 0, NULL},
    {"num_bytes", T_LONGLONG, offsetof(Arrived, num_bytes), 0, NULL},
    {"payload", T_OBJECT, offsetof(Arrived, payload), 0, NULL},
    {"sender_request", T_ULONGLONG, offsetof(Arrived, sender_request), 0, NULL},
    {"pid", T_INT, offsetof(Arrived, pid), 0, NULL},
    {"address", T_ULONGLONG, offsetof(Arrived, address), 0, NULL},
    {"waits", T_BOOL, offsetof(Arrived, waits), 0, NULL},
    {"ahead", T_INT, offsetof(Arrived, ahead), 0, NULL},
    {"ahead_piece", T_INT, offsetof(Arrived, ahead_piece), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject *request_type, *posted_type, *arrived_type;

static PyMemberDef *members_of(PyObject *self) {
    if (Py_TYPE(self) == request_type) return request_members;
    return Py_TYPE(self) == posted_type ? posted_members : arrived_members;
}

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = alloc(type, 0);
    if (self != NULL && type == request_type) ((Request *)self)->source = ((Request *)self)->message_tag = ANY;
    return self;
}

static int record_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    PyMemberDef *members = members_of(self);
    Py_ssize_t given = PyTuple_Size(args), at = 0;
    for (; members[at].name != NULL && at < given; at++)
        if (PyObject_SetAttrString(self, members[at].name, PyTuple_GetItem(args, at))) return -1;
    if (at < given) {
        PyErr_Format(PyExc_TypeError, "%zd arguments given, %zd fields expected", given, at);
        return -1;
    }
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (kwargs != NULL && PyDict_Next(kwargs, &position, &name, &value))
        if (PyObject_SetAttr(self, name, value)) return -1;
    return 0;
}

static void record_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (type == request_type) {
        Py_XDECREF(((Request *)self)->kind);
        Py_XDECREF(((Request *)self)->payload);
    } else if (type == arrived_type) {
        Py_XDECREF(((Arrived *)self)->payload);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *record_compare(PyObject *self, PyObject *other, int operation) {
    if ((operation != Py_EQ && operation != Py_NE) || Py_TYPE(self) != Py_TYPE(other)) Py_RETURN_NOTIMPLEMENTED;
    int equal = 1;
    for (PyMemberDef *member = members_of(self); equal == 1 && member->name != NULL; member++) {
        PyObject *one = PyObject_GetAttrString(self, member->name);
        PyObject *two = one == NULL ? NULL : PyObject_GetAttrString(other, member->name);
        equal = two == NULL ? -1 : PyObject_RichCompareBool(one, two, Py_EQ);
        Py_XDECREF(one);
        Py_XDECREF(two);
    }
    return equal < 0 ? NULL : PyBool_FromLong((operation == Py_EQ) == equal);
}

static PyTypeObject *add_type(PyObject *module, const char *name, int size, PyMemberDef *members) {
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)record_new},
        {Py_tp_init, (void *)record_init},
        {Py_tp_dealloc, (void *)record_dealloc},
        {Py_tp_richcompare, (void *)record_compare},
        {Py_tp_hash, (void *)PyObject_HashNotImplemented},
        {Py_tp_members, members},
        {0, NULL},
    };
    PyType_Spec spec = {name, size, 0, Py_TPFLAGS_DEFAULT, slots};
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddType(module, type)) return NULL;
    return type;
}

Request *new_request(void) { return (Request *)record_new(request_type, NULL, NULL); }
Posted *new_posted(void) { return (Posted *)record_new(posted_type, NULL, NULL); }
Arrived *new_arrived(void) { return (Arrived *)record_new(arrived_type, NULL, NULL); }

int add_records(PyObject *module) {
    request_type = add_type(module, "remesh.carried.mpi._fast.Request", sizeof(Request), request_members);
    posted_type = add_type(module, "remesh.carried.mpi._fast.Posted", sizeof(Posted), posted_members);
    arrived_type = add_type(module, "remesh.carried.mpi._fast.Arrived", sizeof(Arrived), arrived_members);
    return request_type == NULL || posted_type == NULL || arrived_type == NULL ? -1 : 0;
}
