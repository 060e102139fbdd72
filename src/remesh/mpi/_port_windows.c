/* The upper half's short way to windows of other ranks: accesses that are posted, with their data, and not waited for. */
#include "_port.h"

/* An access to a window, as calls/table.py has it. */
typedef struct {
    uint64_t number, window, result;
    long op, type, target;
    int fetches;
    int64_t offset, num_bytes; /* at the target */
} Access;

/* Any call that is answered: rings are emptied before. -1 with an exception that a signal handler raised. */
static int empty_ring(Port *self) {
    put_status(self->slot + BODY, CALL_HELLO);
    return call_lower(self->base, self->slot);
}

/* Post it with its data, which are in two parts: 1, 0 if it is not short, or -1 with an exception. */
static int post_access(Port *self, const Access *access, const Py_buffer data[2]) {
    uint32_t end;
    Py_ssize_t num_data = data[0].len + data[1].len;
    if (num_data > POST_BYTES || access->num_bytes > POST_BYTES || access->num_bytes <= 0) return 0;
    /* The long way would be Python's, and so would then be all that must not overtake what goes that way. */
    size_t whole = sizeof(StartAccessCall) + (size_t)num_data;
    char *to = entry_begin(self, whole, &end);
    if (to == NULL && empty_ring(self)) return -1;
    if (to == NULL && (to = entry_begin(self, whole, &end)) == NULL) return 0;
    *(StartAccessCall *)to = (StartAccessCall){
        .call = CALL_START_ACCESS, .request = access->number, .op = (uint8_t)access->op, .type = (uint8_t)access->type,
        .fetches = (uint8_t)access->fetches, .window = access->window, .target = (int)access->target, .result = access->result,
        .num_data = (uint32_t)num_data, .offset = access->offset, .num_bytes = access->num_bytes};
    to += sizeof(StartAccessCall);
    for (int i = 0; i < 2; i++)
        if (data[i].len) memcpy(to, data[i].buf, data[i].len), to += data[i].len;
    /* A lower half that has a window looks up often; whoever flushes soon calls it once, for all that was posted. */
    entry_done(self, end, 0);
    return 1;
}

/* post_access(number, verb, place, run, data, result): whether it was posted. ``verb``: operation, type, whether it
 * fetches; ``place``: window, world rank; ``run``: bytes from the window's base, bytes; ``result``: an address.
 */
PyObject *port_post_access(PyObject *self, PyObject *args) {
    Access access;
    Py_buffer data[2] = {{0}};
    unsigned long long number, window, result;
    long long offset, num_bytes;
    if (!PyArg_ParseTuple(args, "K(lli)(Kl)(LL)y*K", &number, &access.op, &access.type, &access.fetches, &window, &access.target,
                          &offset, &num_bytes, data, &result)) {
        /* A run that no integer of the channel names: the long way says so. */
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return NULL;
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    access.number = number, access.window = window, access.result = result;
    access.offset = offset, access.num_bytes = num_bytes;
    int done = post_access((Port *)self, &access, data);
    PyBuffer_Release(data);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* post_unlock(window, world rank): give a lock back; whether that was posted. Others may wait for it, so it rings. */
PyObject *port_post_unlock(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Port *self = (Port *)object;
    uint32_t end;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 2 expected", nargs);
    uint64_t window = PyLong_AsUnsignedLongLong(args[0]);
    long target = PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    UnlockCall *to = (UnlockCall *)entry_begin(self, sizeof *to, &end);
    if (to == NULL) Py_RETURN_FALSE;
    *to = (UnlockCall){CALL_UNLOCK, window, (int)target};
    entry_done(self, end, 1);
    Py_RETURN_TRUE;
}

/* Fill in what is done where; whether that is for the short way. `args` are those of `access`, `like` one of its
 * buffers.
 */
static int take_access(PyObject *const *args, const Py_buffer *like, Access *access) {
    PyObject *letters = PyTuple_GetItem(args[1], 1);
    if (letters == NULL) return 0;
    const char *format = like->format == NULL ? "B" : like->format;
    access->number = PyLong_AsUnsignedLongLong(args[0]);
    access->op = PyLong_AsLong(PyTuple_GetItem(args[1], 0));
    access->type = 0;
    if (PyBytes_Size(letters)) access->type = (uint8_t)PyBytes_AsString(letters)[(uint8_t)format[strlen(format) - 1] & 127];
    access->window = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[2], 0));
    access->target = PyLong_AsLong(PyTuple_GetItem(args[2], 1));
    int64_t unit = PyLong_AsLongLong(PyTuple_GetItem(args[2], 2)), displacement = PyLong_AsLongLong(args[3]);
    access->num_bytes = like->len;
    if (PyErr_Occurred() || access->type == 255) return 0;
    return !__builtin_mul_overflow(displacement, unit, &access->offset);
}

static int are_alike(const Py_buffer *one, const Py_buffer *other) {
    const char *a = one->format == NULL ? "B" : one->format, *b = other->format == NULL ? "B" : other->format;
    return one->len == other->len && a[strlen(a) - 1] == b[strlen(b) - 1];
}

/* access(number, (op, types), (window, world rank, unit), displacement, whether it is one element, origin, compare,
 * result): start an access of plain buffers, those that it has not being None: a view of the result, or where there is none
 * the bytes at the target; None if it is not one for the short way. ``types`` as those of a collective.
 */
PyObject *port_access(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer buffers[3] = {{0}}; /* origin, compare, result */
    const Py_buffer *like = NULL;
    Access access;
    int is_short = 1;
    if (nargs != 8) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 8 expected", nargs);
    for (int i = 0; is_short && i < 3; i++) {
        if (args[5 + i] == Py_None) continue;
        is_short = take_buffer(args[5 + i], &buffers[i], i == 2 ? PyBUF_WRITABLE : 0);
        if (like == NULL) like = &buffers[i];
        is_short = is_short && are_alike(like, &buffers[i]) && (args[4] != Py_True || buffers[i].len == buffers[i].itemsize);
    }
    PyObject *kept = NULL;
    int posted = 0;
    if (is_short && like != NULL && take_access(args, like, &access)) {
        /* As long as there is a view nobody can move the buffer. */
        kept = args[7] == Py_None ? PyLong_FromLongLong(access.num_bytes) : PyMemoryView_FromObject(args[7]);
        access.fetches = args[7] != Py_None;
        access.result = (uint64_t)(uintptr_t)buffers[2].buf;
        /* What takes no data was given them to say what it fetches. */
        if (access.op == OP_NO_OP && buffers[0].obj != NULL) PyBuffer_Release(&buffers[0]), buffers[0].len = 0;
        if (kept != NULL) posted = post_access((Port *)self, &access, buffers);
        if (posted <= 0) Py_CLEAR(kept);
    }
    for (int i = 0; i < 3; i++)
        if (buffers[i].obj != NULL) PyBuffer_Release(&buffers[i]);
    if (kept != NULL || posted < 0) return kept;
    /* What is wrong with them the long way says. */
    PyErr_Clear();
    Py_RETURN_NONE;
}
