/* The short way of a collective whose call waits for it: while the gate is open, all of it takes place here.
 *
 *     copy what it changes in place -> count it at the gate -> call the real group -> wait -> take it out again
 *
 * A rank sleeps in each of its small collectives, and when it wakes little of Python is left in the processor's caches:
 * in Python each of these steps takes microseconds. CPython's limited API (3.11); torch is called by its Python names.
 *
 * What is under way is a `Waiting`. It knows nothing of cuts: a thread that prepares one puts an heir into it, which is
 * then told how the wait has ended. All fields are guarded by the interpreter's lock, which is held but in calls.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

typedef struct {
    PyObject_HEAD
    Py_ssize_t number;   /* in its tally, from 1 on */
    PyObject *name;      /* of the real group's method */
    PyObject *arguments; /* of the call, a tuple */
    PyObject *kept;      /* what is needed to begin anew, None if it cannot */
    PyObject *inner;     /* the real work; NULL until the call has returned */
    PyObject *heir;      /* who goes on after a cut; NULL before one */
    int is_over;         /* whether the wait has ended: then there is no heir any more */
} Waiting;

static PyObject *waiting_type;
static PyObject *s_acquire, *s_release, *s_is_open, *s_entered, *s_under_way, *s_real, *s_wait, *s_outlast;
static PyObject *s_nbytes, *s_is_contiguous, *s_is_cpu, *s_data_ptr;

static void waiting_free(PyObject *self) {
    Waiting *one = (Waiting *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(one->name);
    Py_XDECREF(one->arguments);
    Py_XDECREF(one->kept);
    Py_XDECREF(one->inner);
    Py_XDECREF(one->heir);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *or_none(PyObject *value) {
    return Py_NewRef(value == NULL ? Py_None : value);
}

static PyObject *get_number(PyObject *self, void *unused) { return PyLong_FromSsize_t(((Waiting *)self)->number); }
static PyObject *get_name(PyObject *self, void *unused) { return or_none(((Waiting *)self)->name); }
static PyObject *get_arguments(PyObject *self, void *unused) { return or_none(((Waiting *)self)->arguments); }
static PyObject *get_kept(PyObject *self, void *unused) { return or_none(((Waiting *)self)->kept); }
static PyObject *get_inner(PyObject *self, void *unused) { return or_none(((Waiting *)self)->inner); }
static PyObject *get_heir(PyObject *self, void *unused) { return or_none(((Waiting *)self)->heir); }

/* name_heir(heir): whether it goes on; False if the wait has ended. */
static PyObject *name_heir(PyObject *self, PyObject *heir) {
    Waiting *one = (Waiting *)self;
    if (one->inner == NULL || one->heir != NULL || one->is_over) Py_RETURN_FALSE;
    one->heir = Py_NewRef(heir);
    Py_RETURN_TRUE;
}

static PyGetSetDef waiting_fields[] = {
    {"number", get_number, NULL, "Its number in its tally, from 1 on.", NULL},
    {"name", get_name, NULL, "The name of the real group's method.", NULL},
    {"arguments", get_arguments, NULL, "The arguments of the call, a tuple.", NULL},
    {"kept", get_kept, NULL, "What is needed to begin anew; None if it cannot.", NULL},
    {"inner", get_inner, NULL, "The real work; None until the call has returned.", NULL},
    {"heir", get_heir, NULL, "Who goes on after a cut; None before one.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* The bytes of a tensor that lie side by side, None where they do not, or are none, or more than are left. */
static PyObject *copy_bytes(PyObject *tensor, Py_ssize_t *left) {
    PyObject *found[4] = {NULL, NULL, NULL, NULL}, *copy = NULL;
    found[0] = PyObject_GetAttr(tensor, s_nbytes);
    if (found[0] != NULL) found[1] = PyObject_CallMethodObjArgs(tensor, s_is_contiguous, NULL);
    if (found[1] != NULL) found[2] = PyObject_GetAttr(tensor, s_is_cpu);
    if (found[2] == NULL) {
        /* A sparse tensor has no bytes of its own. */
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            PyErr_Clear();
            copy = Py_NewRef(Py_None);
        }
        goto out;
    }
    Py_ssize_t num_bytes = PyLong_AsSsize_t(found[0]);
    if (num_bytes == -1 && PyErr_Occurred()) goto out;
    if (num_bytes == 0 || num_bytes > *left || found[1] != Py_True || found[2] != Py_True) {
        copy = Py_NewRef(Py_None);
        goto out;
    }
    found[3] = PyObject_CallMethodObjArgs(tensor, s_data_ptr, NULL);
    if (found[3] == NULL) goto out;
    const char *start = PyLong_AsVoidPtr(found[3]);
    if (start == NULL && PyErr_Occurred()) goto out;
    *left -= num_bytes;
    copy = PyBytes_FromStringAndSize(start, num_bytes);
out:
    for (int i = 0; i < 4; i++) Py_XDECREF(found[i]);
    return copy;
}

/* keep(tensors, most_bytes): [(tensor, its bytes)...], None if one is not flat, empty, or they are too large. */
static PyObject *keep(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 2 expected", nargs);
    Py_ssize_t left = PyLong_AsSsize_t(args[1]), num = PySequence_Size(args[0]);
    if (PyErr_Occurred()) return NULL;
    PyObject *kept = PyList_New(0);
    for (Py_ssize_t i = 0; kept != NULL && i < num; i++) {
        PyObject *pair = NULL, *copy = NULL, *tensor = PySequence_GetItem(args[0], i);
        if (tensor != NULL) copy = copy_bytes(tensor, &left);
        if (copy == Py_None) {
            Py_DECREF(tensor);
            Py_DECREF(kept);
            return copy;
        }
        if (copy != NULL) pair = PyTuple_Pack(2, tensor, copy);
        if (pair == NULL || PyList_Append(kept, pair) < 0) Py_CLEAR(kept);
        Py_XDECREF(pair);
        Py_XDECREF(copy);
        Py_XDECREF(tensor);
    }
    return kept;
}

static int call_plainly(PyObject *object, PyObject *name) {
    PyObject *said = PyObject_CallMethodObjArgs(object, name, NULL);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

/* Add to the number of collectives entered; the caller holds the gate's lock. Returns the sum, -1 with an error. */
static Py_ssize_t add_entered(PyObject *tally, Py_ssize_t more) {
    PyObject *old = PyObject_GetAttr(tally, s_entered);
    if (old == NULL) return -1;
    Py_ssize_t sum = PyLong_AsSsize_t(old) + more;
    Py_DECREF(old);
    PyObject *entered = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(sum);
    int failed = entered == NULL || PyObject_SetAttr(tally, s_entered, entered) < 0;
    Py_XDECREF(entered);
    return failed ? -1 : sum;
}

/* Count it, if the gate is open: 1 if it is, 0 if not, -1 with an error. */
static int enter(PyObject *gate, PyObject *lock, PyObject *tally, PyObject *under_way, Waiting *one) {
    int result = -1;
    if (call_plainly(lock, s_acquire) < 0) return -1;
    PyObject *is_open = PyObject_GetAttr(gate, s_is_open);
    if (is_open != NULL) result = is_open == Py_True;
    Py_XDECREF(is_open);
    if (result == 1) {
        one->number = add_entered(tally, 1);
        if (one->number < 0 || PyDict_SetItem(under_way, (PyObject *)one, Py_None) < 0) result = -1;
    }
    return call_plainly(lock, s_release) < 0 ? -1 : result;
}

/* Take out what the real group has refused, and keep the error. */
static void leave(PyObject *lock, PyObject *tally, PyObject *under_way, Waiting *one) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (call_plainly(lock, s_acquire) == 0) {
        PyDict_DelItem(under_way, (PyObject *)one);
        add_entered(tally, -1);
        call_plainly(lock, s_release);
    }
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

/* Wait, and take it out, or tell the heir: what is to be returned, NULL with an error. */
static PyObject *see_end(PyObject *under_way, Waiting *one) {
    PyObject *type = NULL, *error = NULL, *traceback = NULL, *result = NULL;
    if (call_plainly(one->inner, s_wait) < 0) {
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
    }
    one->is_over = 1;
    if (one->heir != NULL) {
        /* The work keeps connections, which end before the heir's next group is made. */
        Py_CLEAR(one->inner);
        PyObject *told = PyObject_CallMethodObjArgs(one->heir, s_outlast, error == NULL ? Py_None : error, NULL);
        if (told != NULL) result = Py_NewRef(one->heir);
        Py_XDECREF(told);
    } else if (PyDict_DelItem(under_way, (PyObject *)one) == 0 && error == NULL) {
        return Py_NewRef(Py_True);
    } else if (error != NULL) {
        PyErr_Restore(type, error, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

/* Call the real group, which is there while the gate is open. */
static PyObject *call_real(PyObject *group, Waiting *one) {
    PyObject *method = NULL, *inner = NULL, *real = PyObject_GetAttr(group, s_real);
    if (real == Py_None) {
        /* The property says why there is none. */
        Py_DECREF(real);
        real = PyObject_GetAttrString(group, "real");
    }
    if (real != NULL) method = PyObject_GetAttr(real, one->name);
    if (method != NULL) inner = PyObject_Call(method, one->arguments, NULL);
    Py_XDECREF(method);
    Py_XDECREF(real);
    return inner;
}

/* run(group, gate, lock, tally, name, kept, arguments): True once the collective has ended; its heir, which has been
 * told of the end, if it has one; None if the gate is not open: nothing was done. What the real group refuses is raised. */
static PyObject *run(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 7) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 7 expected", nargs);
    PyObject *lock = args[2], *tally = args[3], *result = NULL, *under_way = PyObject_GetAttr(tally, s_under_way);
    Waiting *one = under_way == NULL ? NULL : PyObject_New(Waiting, (PyTypeObject *)waiting_type);
    if (one == NULL) {
        Py_XDECREF(under_way);
        return NULL;
    }
    one->number = one->is_over = 0;
    one->name = Py_NewRef(args[4]);
    one->kept = Py_NewRef(args[5]);
    one->arguments = Py_NewRef(args[6]);
    one->inner = one->heir = NULL;
    int entered = enter(args[1], lock, tally, under_way, one);
    if (entered == 0) result = Py_NewRef(Py_None);
    if (entered == 1) {
        one->inner = call_real(args[0], one);
        if (one->inner != NULL) result = see_end(under_way, one);
        else leave(lock, tally, under_way, one);
    }
    Py_DECREF((PyObject *)one);
    Py_DECREF(under_way);
    return result;
}

static PyMethodDef waiting_methods[] = {
    {"name_heir", name_heir, METH_O, "Whether this heir goes on; False if the wait has ended, or not begun."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot waiting_slots[] = {
    {Py_tp_dealloc, waiting_free},
    {Py_tp_getset, waiting_fields},
    {Py_tp_methods, waiting_methods},
    {Py_tp_doc, "A collective that its call waits for."},
    {0, NULL},
};

static PyType_Spec waiting_spec = {
    "remesh.torch_programs._short.Waiting", sizeof(Waiting), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, waiting_slots,
};

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL},
    {"keep", (PyCFunction)(void (*)(void))keep, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_short", "The short way of a collective whose call waits for it.", -1, methods,
    NULL, NULL, NULL, NULL,
};

static const struct {
    PyObject **where;
    const char *text;
} names[] = {
    {&s_acquire, "acquire"}, {&s_release, "release"},   {&s_is_open, "is_open"}, {&s_entered, "entered"},
    {&s_real, "_real"},      {&s_wait, "wait"},         {&s_outlast, "outlast"}, {&s_under_way, "under_way"},
    {&s_nbytes, "nbytes"},   {&s_is_cpu, "is_cpu"},     {&s_data_ptr, "data_ptr"}, {&s_is_contiguous, "is_contiguous"},
};

PyMODINIT_FUNC PyInit__short(void) {
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        *names[i].where = PyUnicode_InternFromString(names[i].text);
        if (*names[i].where == NULL) return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    waiting_type = PyType_FromSpec(&waiting_spec);
    if (waiting_type == NULL || PyModule_AddObjectRef(module, "Waiting", waiting_type) < 0) Py_CLEAR(module);
    return module;
}
