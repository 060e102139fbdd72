/* The upper half's hot path: small sends that are posted and not waited for, and receives that wait in one call.
 *
 * A Port is one thread's slot of the channel. A send is written into the slot's ring and is the program's no more; the
 * lower half takes it when the doorbell wakes it. What does not fit this short way is left to the long one, in Python:
 * every method says so by its result and has changed nothing then.
 */
#include "_port.h"

static PyTypeObject *port_type;

static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    unsigned long long base;
    int number;
    if (!PyArg_ParseTuple(args, "Ki", &base, &number)) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Port *self = (Port *)alloc(type, 0);
    if (self == NULL) return NULL;
    self->base = (char *)(uintptr_t)base;
    self->slot = self->base + FIRST_SLOT + (size_t)number * STRIDE;
    return (PyObject *)self;
}

static void port_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

char *entry_begin(Port *self, size_t num_bytes, uint32_t *end) {
    uint32_t posted = atomic_load_explicit((Word *)(self->slot + POSTED), memory_order_relaxed);
    uint32_t taken = atomic_load_explicit((Word *)(self->slot + TAKEN), memory_order_acquire);
    uint32_t whole = (uint32_t)(num_bytes + 4 + 7) & ~7u;
    uint32_t at = posted % RING_BYTES, left = RING_BYTES - at;
    uint32_t skipped = left < whole ? left : 0;
    if (RING_BYTES - (posted - taken) < whole + skipped) return NULL;
    if (skipped) {
        put_32(self->slot + RING + at, SKIP);
        at = 0;
    }
    *end = posted + skipped + whole;
    return put_32(self->slot + RING + at, whole);
}

void entry_done(Port *self, uint32_t end, int wake) {
    atomic_store_explicit((Word *)(self->slot + POSTED), end, memory_order_release);
    (wake ? ring_bell : ring_softly)(self->base);
}

static int post(Port *self, uint64_t comm, int dest, int tag, const void *data, Py_ssize_t num_bytes) {
    uint32_t end;
    if (num_bytes > POST_BYTES) return 0;
    SendCall *to = (SendCall *)entry_begin(self, sizeof *to + (size_t)num_bytes, &end);
    if (to == NULL) return 0;
    *to = (SendCall){CALL_SEND, FLAG_INLINE, comm, dest, tag, num_bytes, 0};
    if (num_bytes) memcpy(to + 1, data, (size_t)num_bytes);
    entry_done(self, end, 1);
    return 1;
}

/* post(comm, world_dest, tag, view): whether the bytes of a contiguous view were posted. */
static PyObject *port_post(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer view;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 4 expected", nargs);
    uint64_t comm = PyLong_AsUnsignedLongLong(args[0]);
    long dest = PyLong_AsLong(args[1]), tag = PyLong_AsLong(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[3], &view, PyBUF_SIMPLE)) return NULL;
    int done = post((Port *)self, comm, (int)dest, (int)tag, view.buf, view.len);
    PyBuffer_Release(&view);
    return PyBool_FromLong(done);
}

static int post_receive(Port *self, uint64_t number, uint64_t comm, int source, int tag, int64_t capacity, const void *place) {
    uint32_t end;
    StartReceiveCall *to = (StartReceiveCall *)entry_begin(self, sizeof *to, &end);
    if (to == NULL) return 0;
    uint64_t address = capacity ? (uint64_t)(uintptr_t)place : 0;
    *to = (StartReceiveCall){CALL_START_RECEIVE, number, comm, source, tag, capacity, address};
    /* A short message can wait in MPI for a lower half that sleeps; the sender of a long one waits for this receive. */
    entry_done(self, end, capacity < 0 || capacity > EAGER_BYTES);
    return 1;
}

/* start_receive(number, comm, world_source, tag, capacity, address): whether the receive was posted. */
static PyObject *port_start_receive(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 6 expected", nargs);
    uint64_t number = PyLong_AsUnsignedLongLong(args[0]), comm = PyLong_AsUnsignedLongLong(args[1]);
    long source = PyLong_AsLong(args[2]), tag = PyLong_AsLong(args[3]);
    int64_t capacity = PyLong_AsLongLong(args[4]);
    uint64_t address = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    const void *place = (const void *)(uintptr_t)address;
    return PyBool_FromLong(post_receive((Port *)self, number, comm, (int)source, (int)tag, capacity, place));
}

int take_buffer(PyObject *object, Py_buffer *view, int flags) {
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | flags)) {
        PyErr_Clear();
        return 0;
    }
    const char *format = view->format;
    if (format != NULL && (*format == '@' || *format == '<' || *format == '=')) format++;
    if (format == NULL || (format[0] != 0 && format[1] == 0 && strchr("bBhHiIlLqQfdg?", format[0]) != NULL)) return 1;
    PyBuffer_Release(view);
    return 0;
}

/* Rank and tag as plain integers that need no second look; the world rank of a peer, or -1. */
static int take_peer(PyObject *peers, PyObject *rank, PyObject *tag, long lowest_tag, long *tag_value) {
    long index = PyLong_AsLong(rank);
    *tag_value = PyLong_AsLong(tag);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        *tag_value = ANY - 1;
        return -1;
    }
    if (index < 0 || index >= PyTuple_Size(peers) || *tag_value < lowest_tag || *tag_value > INT_MAX) return -1;
    return (int)PyLong_AsLong(PyTuple_GetItem(peers, index));
}

/* send(comm, peers, buffer, dest, tag): whether that was a send for the short way. */
static PyObject *port_send(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer view;
    long tag;
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 5 expected", nargs);
    uint64_t comm = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    int dest = take_peer(args[1], args[3], args[4], 0, &tag);
    if (dest < 0 || !take_buffer(args[2], &view, 0)) Py_RETURN_FALSE;
    int done = post((Port *)self, comm, dest, (int)tag, view.buf, view.len);
    PyBuffer_Release(&view);
    return PyBool_FromLong(done);
}

/* The world rank of a source that needs no second look, or ANY; below that if there is none. */
static int take_source(PyObject *peers, PyObject *rank, PyObject *tag, long *tag_value) {
    int source = take_peer(peers, rank, tag, ANY, tag_value);
    if (source >= 0 || *tag_value < ANY || *tag_value > INT_MAX) return source < 0 ? ANY - 1 : source;
    return PyLong_AsLong(rank) == ANY ? ANY : ANY - 1;
}

/* start(number, comm, peers, buffer, source, tag): a view of the buffer if the receive was posted; None if it was not. */
static PyObject *port_start(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Port *self = (Port *)object;
    Py_buffer view;
    long tag;
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 6 expected", nargs);
    uint64_t number = PyLong_AsUnsignedLongLong(args[0]), comm = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    int source = take_source(args[2], args[4], args[5], &tag);
    if (source < ANY || !take_buffer(args[3], &view, PyBUF_WRITABLE)) Py_RETURN_NONE;
    /* As long as there is a view nobody can move the buffer. */
    PyObject *kept = PyMemoryView_FromObject(args[3]);
    int done = kept != NULL && post_receive(self, number, comm, source, (int)tag, view.len, view.buf);
    PyBuffer_Release(&view);
    if (done || kept == NULL) return kept;
    Py_DECREF(kept);
    Py_RETURN_NONE;
}

/* Put the payload that came with a completion, if one did, into the program's buffer. */
static void land(const Completion *told, const Py_buffer *view) {
    int64_t num_bytes = told->num_bytes < view->len ? told->num_bytes : view->len;
    if (told->where == PAYLOAD_INLINE && num_bytes > 0) memcpy(view->buf, told + 1, (size_t)num_bytes);
}

/* The completion behind the reply of one operation. */
static Completion *told_in(char *body) { return (Completion *)(body + sizeof(RequestReply)); }

/* Wait for a message in the slot's body: (world source, tag, bytes, error), or an integer if it failed. */
static PyObject *receive_now(Port *self, uint64_t comm, int source, long tag, const Py_buffer *view) {
    char *body = self->slot + BODY;
    uint64_t address = view->len ? (uint64_t)(uintptr_t)view->buf : 0;
    *(ReceiveCall *)body = (ReceiveCall){CALL_RECEIVE, FLAG_BLOCKING, comm, source, (int)tag, view->len, address};
    if (call_lower(self->base, self->slot)) return NULL;
    if (body[0]) return PyLong_FromLong(body[0]);
    const Completion *told = told_in(body);
    land(told, view);
    return Py_BuildValue("(iiLi)", told->source, told->tag, (long long)told->num_bytes, told->error);
}

/* receive(comm, peers, buffer, source, tag): how a blocking receive ended, as (world source, tag, bytes, error); None
 * if it is not one for the short way; an integer if it failed, and the reply in the body says how.
 */
static PyObject *port_receive(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer view;
    long tag;
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 5 expected", nargs);
    uint64_t comm = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    int source = take_source(args[1], args[3], args[4], &tag);
    if (source < ANY || !take_buffer(args[2], &view, PyBUF_WRITABLE)) Py_RETURN_NONE;
    PyObject *result = receive_now((Port *)self, comm, source, tag, &view);
    PyBuffer_Release(&view);
    return result;
}

/* exchange(comm, peers, sent, dest, send_tag, received, source, receive_tag): a send that is posted, then a receive; as
 * receive. Nothing is sent if it is not both.
 */
static PyObject *port_exchange(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer sent, received;
    long send_tag, tag;
    if (nargs != 8) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 8 expected", nargs);
    uint64_t comm = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    int dest = take_peer(args[1], args[3], args[4], 0, &send_tag), source = take_source(args[1], args[6], args[7], &tag);
    if (dest < 0 || source < ANY || !take_buffer(args[2], &sent, 0)) Py_RETURN_NONE;
    PyObject *result = NULL;
    int is_short = take_buffer(args[5], &received, PyBUF_WRITABLE);
    if (is_short) {
        is_short = post((Port *)self, comm, dest, (int)send_tag, sent.buf, sent.len);
        if (is_short) result = receive_now((Port *)self, comm, source, tag, &received);
        PyBuffer_Release(&received);
    }
    PyBuffer_Release(&sent);
    if (is_short) return result;
    Py_RETURN_NONE;
}

/* What a completion says, its payload put into the view; where it ends, or NULL with an exception. */
static const char *take_completion(const Completion *told, char *into, int64_t room, PyObject **result) {
    int64_t num_bytes = told->num_bytes;
    const char *end = (const char *)(told + 1);
    if (told->where == PAYLOAD_INLINE) {
        int64_t length = num_bytes < room ? num_bytes : room;
        if (length > 0) memcpy(into, end, length);
        end += length;
    }
    *result = Py_BuildValue("(iiLiO)", told->source, told->tag, (long long)num_bytes, told->error,
                            told->where == PAYLOAD_CANCELLED ? Py_True : Py_False);
    return *result == NULL ? NULL : end;
}

/* wait(numbers, views): wait for all of these requests, whose payload goes into views (None: there is none, or it is
 * written by its address): how each ended, as (world source, tag, bytes, error, whether it was cancelled). An integer
 * if that failed.
 */
static PyObject *port_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Port *self = (Port *)object;
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 2 expected", nargs);
    uint32_t count = (uint32_t)PyList_Size(args[0]);
    const uint32_t most = (BODY_BYTES - sizeof(WaitCall)) / 8;
    if (count > most) return PyErr_Format(PyExc_ValueError, "%u requests in one wait, room for %u", count, most);
    char *body = self->slot + BODY, *to = body + sizeof(WaitCall);
    *(WaitCall *)body = (WaitCall){CALL_WAIT, FLAG_BLOCKING, MODE_ALL, count};
    for (uint32_t i = 0; i < count; i++) to = put_64(to, PyLong_AsUnsignedLongLong(PyList_GetItem(args[0], i)));
    if (PyErr_Occurred() || call_lower(self->base, self->slot)) return NULL;
    if (body[0]) return PyLong_FromLong(body[0]);
    PyObject *ended = PyList_New(count);
    const char *told = body + sizeof(WaitReply);
    for (uint32_t i = 0; ended != NULL && i < count; i++) {
        Py_buffer view = {0};
        PyObject *into = PyList_GetItem(args[1], i), *one = NULL;
        if (into == Py_None || PyObject_GetBuffer(into, &view, PyBUF_WRITABLE) == 0)
            told = take_completion((const Completion *)(told + sizeof(Index)), view.buf, view.len, &one);
        if (into != Py_None) PyBuffer_Release(&view);
        if (one == NULL || PyList_SetItem(ended, i, one)) Py_CLEAR(ended);
    }
    return ended;
}

/* How a collective of the short way went; from 0 on: the request of one that is under way. */
enum { NOT_SHORT = -1, OVER = -2, REFUSED = -3, RAISED = -4 };

/* Write the request of a collective into the slot's body; whether it is one for the short way. */
static int put_collective(char *body, PyObject *const *args, uint8_t flags, const Py_buffer *send, const Py_buffer *receive) {
    PyObject *letters = PyTuple_GetItem(args[1], 1);
    if (letters == NULL) return 0;
    long kind = PyLong_AsLong(args[0]), op = PyLong_AsLong(PyTuple_GetItem(args[1], 0)), root = PyLong_AsLong(args[3]);
    uint64_t comm = PyLong_AsUnsignedLongLong(args[2]);
    const uint8_t *types = (const uint8_t *)PyBytes_AsString(letters);
    if (PyErr_Occurred() || send->len > POST_BYTES || receive->len > POST_BYTES) return 0;
    uint8_t type = 0;
    if (PyBytes_Size(letters)) {
        const char *format = send->format == NULL ? "B" : send->format;
        const char *other = receive->format == NULL ? "B" : receive->format;
        type = types[(uint8_t)format[strlen(format) - 1] & 127];
        if (send->obj == NULL || type == 255) return 0;
        if (receive->obj != NULL && (send->len != receive->len || strcmp(format, other))) return 0;
    }
    CollectiveCall *to = (CollectiveCall *)body;
    *to = (CollectiveCall){
        .call = CALL_COLLECTIVE, .flags = flags | FLAG_INLINE, .kind = (uint8_t)kind, .op = (uint8_t)op, .type = type,
        .comm = comm, .root = (int)root, .send_bytes = send->len, .receive_address = (uint64_t)(uintptr_t)receive->buf,
        .receive_bytes = receive->len};
    if (send->len) memcpy(to + 1, send->buf, (size_t)send->len);
    return 1;
}

/* Do a collective by the short way, or start it. */
static int64_t collect(Port *self, PyObject *const *args, uint8_t flags) {
    Py_buffer send = {0}, receive = {0};
    int64_t result = NOT_SHORT;
    char *body = self->slot + BODY;
    const Completion *told = told_in(body);
    if (args[4] != Py_None && !take_buffer(args[4], &send, 0)) return NOT_SHORT;
    if (args[5] == Py_None || take_buffer(args[5], &receive, PyBUF_WRITABLE)) {
        if (put_collective(body, args, flags, &send, &receive)) {
            result = call_lower(self->base, self->slot) ? RAISED : body[0] ? REFUSED : (int64_t)((RequestReply *)body)->request;
            if (result == 0) result = OVER;
        }
        if (result == OVER && told->error) {
            /* The reply is read as that of a call that was refused. */
            *(Failure *)body = (Failure){FAILED, told->error, 0};
            result = REFUSED;
        }
        if (result == OVER) land(told, &receive);
        if (receive.obj != NULL) PyBuffer_Release(&receive);
    }
    if (send.obj != NULL) PyBuffer_Release(&send);
    return PyErr_Occurred() ? RAISED : result;
}

/* collective(kind, (op, types), comm, root, send, receive): whether a blocking collective was one for the short way, and
 * is over now. ``types`` has the number of the real datatype for each format character, 255 for none; it is empty where
 * data are plain bytes. ``send`` and ``receive`` are buffers or None. An integer other than 0 and 1: it failed.
 */
static PyObject *port_collective(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 6 expected", nargs);
    int64_t result = collect((Port *)self, args, FLAG_BLOCKING);
    return result == RAISED ? NULL : PyLong_FromLong(result == NOT_SHORT ? 0 : result == OVER ? 1 : 2);
}

/* start_collective(...): the same for one that is not waited for: its request, 0 if it is over, None if it was not one
 * for the short way, below that if it failed.
 */
static PyObject *port_start_collective(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 6 expected", nargs);
    int64_t result = collect((Port *)self, args, 0);
    if (result == NOT_SHORT) Py_RETURN_NONE;
    return result == RAISED ? NULL : PyLong_FromLongLong(result == OVER ? 0 : result);
}

static PyMethodDef port_methods[] = {
    {"post", (PyCFunction)(void (*)(void))port_post, METH_FASTCALL, NULL},
    {"start", (PyCFunction)(void (*)(void))port_start, METH_FASTCALL, NULL},
    {"start_receive", (PyCFunction)(void (*)(void))port_start_receive, METH_FASTCALL, NULL},
    {"send", (PyCFunction)(void (*)(void))port_send, METH_FASTCALL, NULL},
    {"receive", (PyCFunction)(void (*)(void))port_receive, METH_FASTCALL, NULL},
    {"exchange", (PyCFunction)(void (*)(void))port_exchange, METH_FASTCALL, NULL},
    {"wait", (PyCFunction)(void (*)(void))port_wait, METH_FASTCALL, NULL},
    {"start_collective", (PyCFunction)(void (*)(void))port_start_collective, METH_FASTCALL, NULL},
    {"post_access", port_post_access, METH_VARARGS, NULL},
    {"post_unlock", (PyCFunction)(void (*)(void))port_post_unlock, METH_FASTCALL, NULL},
    {"access", (PyCFunction)(void (*)(void))port_access, METH_FASTCALL, NULL},
    {"collective", (PyCFunction)(void (*)(void))port_collective, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int add_port(PyObject *module) {
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)port_new},
        {Py_tp_dealloc, (void *)port_dealloc},
        {Py_tp_methods, port_methods},
        {0, NULL},
    };
    PyType_Spec spec = {"remesh.mpi._fast.Port", sizeof(Port), 0, Py_TPFLAGS_DEFAULT, slots};
    port_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return port_type == NULL ? -1 : PyModule_AddType(module, port_type);
}
