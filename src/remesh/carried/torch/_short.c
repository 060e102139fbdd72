/* The short way of a collective whose call waits for it: while the gate is open, all of it takes place here.
 *
 *     copy what it changes in place -> count it at the gate -> call the real group -> wait -> take it out again
 *
 * A rank sleeps in each of its small collectives, and when it wakes little of Python is left in the processor's caches:
 * in Python each of these steps takes microseconds. So a group has a `Way` in place of each method that is a collective,
 * with all at hand that a call needs. CPython's limited API (3.11); torch is called by its Python names.
 *
 * What is under way is a `Waiting`. It knows nothing of cuts: a thread that prepares one puts an heir into it, which is
 * then told how the wait has ended. All fields are guarded by the interpreter's lock, which is held but in calls.
 */
#include "_tensors.h"

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

/* A method of a group. */
typedef struct {
    PyObject_HEAD
    PyObject *name;
    PyObject *real;             /* the method of the real group; None while there is none */
    PyObject *rule, *rank;      /* what is kept to begin anew is rule(arguments, options, rank) */
    Py_ssize_t most_bytes;      /* or copies of its first argument's tensors, which are no more than this */
    PyObject *gate, *acquire, *release; /* the gate, and what its lock does */
    PyObject *tally, *under_way;
    PyObject *otherwise;        /* otherwise(name, arguments, options): what is not for the short way */
    PyObject *outlive;          /* outlive(heir): waits for what an heir goes on with */
    PyObject *ended;            /* what is returned */
} Way;

static PyObject *waiting_type, *no_options;
static PyObject *s_is_open, *s_entered, *s_wait, *s_outlast, *s_is_async;

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

static int call_plainly(PyObject *callable) {
    PyObject *said = PyObject_CallNoArgs(callable);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

/* Count it, if the gate is open: 1 if it is, 0 if not, -1 with an error. */
static int enter(Way *way, Waiting *one) {
    int result = -1;
    if (call_plainly(way->acquire) < 0) return -1;
    PyObject *is_open = PyObject_GetAttr(way->gate, s_is_open);
    if (is_open != NULL) result = is_open == Py_True;
    Py_XDECREF(is_open);
    if (result == 1) {
        one->number = add_entered(way->tally, 1);
        if (one->number < 0 || PyDict_SetItem(way->under_way, (PyObject *)one, Py_None) < 0) result = -1;
    }
    return call_plainly(way->release) < 0 ? -1 : result;
}

/* Take out what the real group has refused, and keep the error. */
static void leave(Way *way, Waiting *one) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (call_plainly(way->acquire) == 0) {
        PyDict_DelItem(way->under_way, (PyObject *)one);
        add_entered(way->tally, -1);
        call_plainly(way->release);
    }
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

/* Wait, and take it out, or tell the heir: what the call returns, NULL with an error. */
static PyObject *see_end(Way *way, Waiting *one) {
    PyObject *type = NULL, *error = NULL, *traceback = NULL, *result = NULL;
    PyObject *said = PyObject_CallMethodObjArgs(one->inner, s_wait, NULL);
    if (said == NULL) {
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
    }
    Py_XDECREF(said);
    one->is_over = 1;
    if (one->heir != NULL) {
        /* The work keeps connections, which end before the heir's next group is made. */
        Py_CLEAR(one->inner);
        PyObject *told = PyObject_CallMethodObjArgs(one->heir, s_outlast, error == NULL ? Py_None : error, NULL);
        if (told != NULL) result = PyObject_CallFunctionObjArgs(way->outlive, one->heir, NULL);
        Py_XDECREF(told);
    } else if (PyDict_DelItem(way->under_way, (PyObject *)one) == 0 && error == NULL) {
        return Py_NewRef(way->ended);
    } else if (error != NULL) {
        PyErr_Restore(type, error, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return result;
}

static Waiting *begin(Way *way, PyObject *arguments, PyObject *kept) {
    Waiting *one = PyObject_New(Waiting, (PyTypeObject *)waiting_type);
    if (one == NULL) return NULL;
    one->number = one->is_over = 0;
    one->name = Py_NewRef(way->name);
    one->arguments = Py_NewRef(arguments);
    one->kept = Py_NewRef(kept);
    one->inner = one->heir = NULL;
    return one;
}

/* What the call returns once the collective has ended; NULL with an error, or without one if the gate is not open: then
 * nothing was done. What the real group refuses is raised. */
static PyObject *go(Way *way, PyObject *arguments) {
    PyObject *result = NULL, *kept = Py_NewRef(Py_None);
    if (way->most_bytes > 0) {
        Py_DECREF(kept);
        kept = keep(PyTuple_GetItem(arguments, 0), way->most_bytes);
    }
    if (kept == Py_None) {
        Py_DECREF(kept);
        kept = PyObject_CallFunctionObjArgs(way->rule, arguments, no_options, way->rank, NULL);
    }
    if (kept == NULL) return NULL;
    Waiting *one = begin(way, arguments, kept);
    Py_DECREF(kept);
    if (one == NULL) return NULL;
    if (enter(way, one) == 1) {
        /* It is there while the gate is open, but a program may destroy the group. Who waits refers to it no more: after
         * a cut the wait lasts until another group is made, and this one has to be gone before. */
        PyObject *real = Py_NewRef(way->real);
        one->inner = PyObject_Call(real, arguments, NULL);
        Py_DECREF(real);
        if (one->inner != NULL) result = see_end(way, one);
        else leave(way, one);
    }
    Py_DECREF((PyObject *)one);
    return result;
}

/* Whether the call waits itself, as torch's functions say in the options, their last argument: 1, 0, -1 with an error. */
static int waits_itself(PyObject *arguments) {
    Py_ssize_t num = PyTuple_Size(arguments);
    if (num == 0) return 0;
    PyObject *is_async = PyObject_GetAttr(PyTuple_GetItem(arguments, num - 1), s_is_async);
    if (is_async == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(is_async);
    return is_async == Py_False;
}

static PyObject *way_call(PyObject *self, PyObject *arguments, PyObject *options) {
    Way *way = (Way *)self;
    if (way->real != Py_None && (options == NULL || PyDict_Size(options) == 0)) {
        int waits = waits_itself(arguments);
        PyObject *result = waits == 1 ? go(way, arguments) : NULL;
        if (result != NULL || PyErr_Occurred()) return result;
    }
    if (options == NULL) options = no_options;
    return PyObject_CallFunctionObjArgs(way->otherwise, way->name, arguments, options, NULL);
}

/* Way(group, name, rule, rank, most_bytes, ended) */
static PyObject *way_new(PyTypeObject *type, PyObject *arguments, PyObject *options) {
    PyObject *group, *name, *rule, *rank, *ended, *lock = NULL;
    Py_ssize_t most_bytes;
    if (!PyArg_ParseTuple(arguments, "OUOOnO", &group, &name, &rule, &rank, &most_bytes, &ended)) return NULL;
    Way *way = PyObject_New(Way, type);
    if (way == NULL) return NULL;
    way->name = Py_NewRef(name);
    way->rule = Py_NewRef(rule);
    way->rank = Py_NewRef(rank);
    way->ended = Py_NewRef(ended);
    way->real = Py_NewRef(Py_None);
    way->most_bytes = most_bytes;
    way->gate = PyObject_GetAttrString(group, "_gate");
    way->tally = PyObject_GetAttrString(group, "_tally");
    way->otherwise = PyObject_GetAttrString(group, "_communicate");
    way->outlive = PyObject_GetAttrString(group, "_outlive");
    if (way->gate != NULL) lock = PyObject_GetAttrString(way->gate, "lock");
    way->acquire = lock == NULL ? NULL : PyObject_GetAttrString(lock, "acquire");
    way->release = lock == NULL ? NULL : PyObject_GetAttrString(lock, "release");
    way->under_way = way->tally == NULL ? NULL : PyObject_GetAttrString(way->tally, "under_way");
    Py_XDECREF(lock);
    if (PyErr_Occurred()) Py_CLEAR(way);
    return (PyObject *)way;
}

static void way_free(PyObject *self) {
    Way *way = (Way *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject *fields[] = {
        way->name, way->rule,  way->rank,      way->ended,     way->real,    way->gate,
        way->tally, way->acquire, way->release, way->under_way, way->otherwise, way->outlive,
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++) Py_XDECREF(fields[i]);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *get_way_name(PyObject *self, void *unused) { return Py_NewRef(((Way *)self)->name); }
static PyObject *get_real(PyObject *self, void *unused) { return Py_NewRef(((Way *)self)->real); }

static int set_real(PyObject *self, PyObject *real, void *unused) {
    PyObject *old = ((Way *)self)->real;
    ((Way *)self)->real = Py_NewRef(real == NULL ? Py_None : real);
    Py_DECREF(old);
    return 0;
}

static PyGetSetDef way_fields[] = {
    {"__name__", get_way_name, NULL, "The method's name.", NULL},
    {"real", get_real, set_real, "The method of the real group; None while there is none.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot way_slots[] = {
    {Py_tp_new, way_new},
    {Py_tp_dealloc, way_free},
    {Py_tp_call, way_call},
    {Py_tp_getset, way_fields},
    {Py_tp_doc, "Way(group, name, rule, rank, most_bytes, ended): a method of a group that is a collective."},
    {0, NULL},
};

static PyType_Spec way_spec = {
    "remesh.carried.torch._short.Way", sizeof(Way), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, way_slots,
};

/* What is asked of a work that has ended: a builtin function torch's C++ side would take for its own. */
static PyObject *say_yes(PyObject *self, PyObject *arguments, PyObject *options) { Py_RETURN_TRUE; }

static PyType_Slot yes_slots[] = {{Py_tp_call, say_yes}, {Py_tp_doc, "Yes(): a function that returns True."}, {0, NULL}};

static PyType_Spec yes_spec = {
    "remesh.carried.torch._short.Yes", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, yes_slots,
};

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
    "remesh.carried.torch._short.Waiting", sizeof(Waiting), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, waiting_slots,
};

/* keep(tensors, most_bytes), as in _tensors.h */
static PyObject *keep_tensors(PyObject *module, PyObject *arguments) {
    PyObject *tensors;
    Py_ssize_t most_bytes;
    return PyArg_ParseTuple(arguments, "On", &tensors, &most_bytes) ? keep(tensors, most_bytes) : NULL;
}

static PyMethodDef methods[] = {
    {"learn", learn, METH_O, NULL},
    {"keep", keep_tensors, METH_VARARGS, NULL},
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
    {&s_is_open, "is_open"}, {&s_entered, "entered"}, {&s_wait, "wait"}, {&s_outlast, "outlast"}, {&s_is_async, "asyncOp"},
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyObject **kept) {
    PyObject *type = PyType_FromSpec(spec);
    int failed = type == NULL || PyModule_AddObjectRef(module, name, type) < 0;
    if (kept != NULL) *kept = type;
    else Py_XDECREF(type);
    return failed;
}

PyMODINIT_FUNC PyInit__short(void) {
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        *names[i].where = PyUnicode_InternFromString(names[i].text);
        if (*names[i].where == NULL) return NULL;
    }
    no_options = PyDict_New();
    PyObject *module = no_options == NULL ? NULL : PyModule_Create(&definition);
    if (module == NULL || add_type(module, "Waiting", &waiting_spec, &waiting_type)) return NULL;
    return add_type(module, "Way", &way_spec, NULL) || add_type(module, "Yes", &yes_spec, NULL) ? NULL : module;
}
