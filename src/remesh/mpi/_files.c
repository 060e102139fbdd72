/* Files that ranks have open together: how a thread of the program is let in, and how bytes get between its memory and
 * the runs of a file.
 *
 * The gate is one word of the channel (channel.py says in which order both halves use it). A thread goes in and out
 * without a word to the lower half; only where the gate is closed it calls it, in Python. All of an access that may have
 * to be undone happens in here: no exception of a signal handler comes between going in and going out.
 */
#include "_fast.h"

#include <errno.h>
#include <stdlib.h>

/* ---- the gate ---- */

typedef struct {
    PyObject_HEAD
    Word *word;
    PyObject *wait; /* called without arguments: comes back when the gate may be open again */
} Gate;

static PyTypeObject *gate_type, *data_type;

/* How often this thread has gone in: a signal handler may use a file while its thread is inside, and goes with it. */
static _Thread_local unsigned depth;

static int try_gate(Word *word) {
    uint32_t seen = atomic_load(word);
    do {
        if (seen & GATE_CLOSED) return 0;
    } while (!atomic_compare_exchange_weak(word, &seen, seen + GATE_ONE_INSIDE));
    return 1;
}

/* -1 with an exception that the waiting raised: then this thread is not inside. */
static int enter(Gate *self) {
    while (depth == 0 && !try_gate(self->word)) {
        PyObject *came_back = PyObject_CallNoArgs(self->wait);
        if (came_back == NULL) return -1;
        Py_DECREF(came_back);
    }
    depth++;
    return 0;
}

static void leave(Gate *self) {
    if (--depth == 0) atomic_fetch_sub(self->word, GATE_ONE_INSIDE);
}

static PyObject *gate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    unsigned long long word;
    PyObject *wait;
    if (!PyArg_ParseTuple(args, "KO", &word, &wait)) return NULL;
    Gate *self = (Gate *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->word = word_at(word);
    self->wait = Py_NewRef(wait);
    return (PyObject *)self;
}

static void gate_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Gate *)self)->wait);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *gate_enter(PyObject *self, PyObject *unused) {
    (void)unused;
    if (enter((Gate *)self)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *gate_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)args, (void)nargs;
    if (depth == 0) return PyErr_Format(PyExc_RuntimeError, "leaving a gate: this thread has not gone in");
    leave((Gate *)self);
    Py_RETURN_NONE;
}

/* ---- the data of a view: upper/file_views.py says what a view is, and has the same walk in Python ---- */

typedef struct {
    int64_t offset, length; /* in the tile, bytes */
    int64_t before;         /* data of the tile before it, bytes */
} Segment;

typedef struct {
    PyObject_HEAD
    PyObject *gate;
    int descriptor, is_dense;
    int64_t displacement, etype_bytes;
    int64_t size, extent; /* of a tile: its data, and from one to the next; bytes */
    Py_ssize_t num_segments;
    Segment *segments;
} ViewData;

typedef struct {
    const ViewData *data;
    int64_t base, skipped, left; /* where the tile begins; data of the segment that are passed over; data to come */
    Py_ssize_t at;               /* segment */
} Walk;

/* The last segment that begins at or before a byte of a tile's data. */
static Py_ssize_t find_segment(const ViewData *data, int64_t within) {
    Py_ssize_t low = 0, high = data->num_segments;
    while (high - low > 1) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (data->segments[middle].before <= within) low = middle;
        else high = middle;
    }
    return low;
}

static Walk walk_from(const ViewData *data, int64_t start, int64_t num_bytes) {
    if (data->is_dense || num_bytes == 0) return (Walk){data, data->displacement + start, 0, num_bytes, 0};
    int64_t tile = start / data->size, within = start % data->size;
    Py_ssize_t at = find_segment(data, within);
    int64_t base = data->displacement + tile * data->extent;
    return (Walk){data, base, within - data->segments[at].before, num_bytes, at};
}

/* Length of the next run, whose pieces touch in the file, and its position; 0 at the end. */
static int64_t next_run(Walk *walk, int64_t *position) {
    const ViewData *data = walk->data;
    int64_t length = 0;
    if (data->is_dense) {
        *position = walk->base;
        length = walk->left;
        walk->left = 0;
    }
    while (walk->left) {
        const Segment *segment = &data->segments[walk->at];
        int64_t piece = walk->base + segment->offset + walk->skipped, piece_bytes = segment->length - walk->skipped;
        if (length == 0) *position = piece;
        else if (piece != *position + length) break;
        if (piece_bytes > walk->left) piece_bytes = walk->left;
        length += piece_bytes;
        walk->left -= piece_bytes;
        walk->skipped = 0;
        if (++walk->at == data->num_segments) {
            walk->at = 0;
            walk->base += data->extent;
        }
    }
    return length;
}

/* Move data until all have been or the file ends, one system call for each run; 0 or an errno, and how many were. */
static int move_runs(const ViewData *data, int writes, int64_t start, char *memory, int64_t num_bytes, int64_t *done) {
    Walk walk = walk_from(data, start, num_bytes);
    int64_t position = 0, length;
    *done = 0;
    while ((length = next_run(&walk, &position)) != 0) {
        while (length) {
            ssize_t moved = writes ? pwrite(data->descriptor, memory + *done, (size_t)length, (off_t)position)
                                   : pread(data->descriptor, memory + *done, (size_t)length, (off_t)position);
            if (moved < 0) return errno;
            if (moved == 0) return writes ? EIO : 0;
            *done += moved;
            position += moved;
            length -= moved;
        }
    }
    return 0;
}

/* The same inside the gate; the bytes that were moved, or -1 with an exception. */
static int64_t move_inside(const ViewData *data, int writes, int64_t start, const Py_buffer *view) {
    int64_t done = 0, moved;
    int error;
    if (enter((Gate *)data->gate)) return -1;
    do {
        Py_BEGIN_ALLOW_THREADS;
        error = move_runs(data, writes, start + done, (char *)view->buf + done, view->len - done, &moved);
        Py_END_ALLOW_THREADS;
        done += moved;
    } while (error == EINTR && PyErr_CheckSignals() == 0);
    leave((Gate *)data->gate);
    if (error == 0) return done;
    errno = error;
    if (!PyErr_Occurred()) PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* Byte of the view's data at which an access begins, or -1 with an exception: its end has no position in a file. */
static int64_t find_start(const ViewData *data, int64_t offset, int64_t num_bytes) {
    int64_t start, end = 0, tiles = 0;
    int too_far = __builtin_mul_overflow(offset, data->etype_bytes, &start) || __builtin_add_overflow(start, num_bytes, &end);
    if (!too_far && data->size) tiles = end / data->size + 1;
    too_far = too_far || __builtin_mul_overflow(tiles, data->extent, &end) || end > INT64_MAX - data->displacement;
    if (!too_far) return start;
    errno = EOVERFLOW;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static PyObject *transfer(ViewData *self, PyObject *const *args, Py_ssize_t nargs, int writes) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "%zd arguments given, 2 expected", nargs);
    Py_buffer view;
    int64_t offset = PyLong_AsLongLong(args[0]), done = -1;
    if (offset == -1 && PyErr_Occurred()) return NULL;
    if (offset < 0 || !take_buffer(args[1], &view, writes ? PyBUF_SIMPLE : PyBUF_WRITABLE)) Py_RETURN_NONE;
    int is_short = view.len == 0 || (self->size && view.len % self->etype_bytes == 0);
    if (is_short) {
        int64_t start = find_start(self, offset, view.len);
        if (start >= 0) done = move_inside(self, writes, start, &view);
    }
    PyBuffer_Release(&view);
    if (!is_short) Py_RETURN_NONE;
    return done < 0 ? NULL : PyLong_FromLongLong(done);
}

/* read(offset, buffer): bytes that were there, of as many as the buffer has; the offset is in etypes. None if the buffer
 * is not plain and writable, or no number of etypes: nothing has happened then.
 */
static PyObject *data_read(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    return transfer((ViewData *)self, args, nargs, 0);
}

/* write(offset, buffer): the same for writing: all bytes, or an exception. */
static PyObject *data_write(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    return transfer((ViewData *)self, args, nargs, 1);
}

/* count(buffer): how many etypes a plain buffer has; None if it is not one. */
static PyObject *data_count(PyObject *self, PyObject *buffer) {
    Py_buffer view;
    if (!take_buffer(buffer, &view, PyBUF_SIMPLE)) Py_RETURN_NONE;
    Py_ssize_t num_bytes = view.len;
    PyBuffer_Release(&view);
    return PyLong_FromLongLong(num_bytes / ((ViewData *)self)->etype_bytes);
}

/* The segments of a tile from a tuple of pairs; -1 with an exception. */
static int take_segments(ViewData *self, PyObject *pairs) {
    Py_ssize_t count = PyTuple_Size(pairs);
    if (count < 0) return -1;
    self->segments = calloc((size_t)count + 1, sizeof(Segment));
    if (self->segments == NULL) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        long long offset, length;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pairs, i), "LL", &offset, &length)) return -1;
        self->segments[i] = (Segment){offset, length, self->size};
        self->size += length;
    }
    self->num_segments = count;
    return 0;
}

/* ViewData(gate, descriptor, displacement, etype_bytes, segments, extent): of a view that file_views.py has checked. */
static PyObject *data_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *gate, *segments;
    int descriptor;
    long long displacement, etype_bytes, extent;
    if (!PyArg_ParseTuple(args, "O!iLLO!L", gate_type, &gate, &descriptor, &displacement, &etype_bytes, &PyTuple_Type,
                          &segments, &extent))
        return NULL;
    ViewData *self = (ViewData *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->gate = Py_NewRef(gate);
    self->descriptor = descriptor;
    self->displacement = displacement;
    self->etype_bytes = etype_bytes;
    self->extent = extent;
    if (take_segments(self, segments)) {
        Py_DECREF(self);
        return NULL;
    }
    self->is_dense = self->num_segments == 1 && self->segments[0].offset == 0 && self->size == extent;
    return (PyObject *)self;
}

static void data_dealloc(PyObject *object) {
    ViewData *self = (ViewData *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->segments);
    Py_XDECREF(self->gate);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- the module ---- */

static PyMethodDef gate_methods[] = {
    {"__enter__", gate_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))gate_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef data_methods[] = {
    {"read", (PyCFunction)(void (*)(void))data_read, METH_FASTCALL, NULL},
    {"write", (PyCFunction)(void (*)(void))data_write, METH_FASTCALL, NULL},
    {"count", data_count, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject *add_type(PyObject *module, const char *name, int num_bytes, PyType_Slot *slots) {
    PyType_Spec spec = {name, num_bytes, 0, Py_TPFLAGS_DEFAULT, slots};
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&spec);
    return type == NULL || PyModule_AddType(module, type) ? NULL : type;
}

int add_files(PyObject *module) {
    PyType_Slot gate_slots[] = {
        {Py_tp_new, (void *)gate_new},
        {Py_tp_dealloc, (void *)gate_dealloc},
        {Py_tp_methods, gate_methods},
        {0, NULL},
    };
    PyType_Slot data_slots[] = {
        {Py_tp_new, (void *)data_new},
        {Py_tp_dealloc, (void *)data_dealloc},
        {Py_tp_methods, data_methods},
        {0, NULL},
    };
    gate_type = add_type(module, "remesh.mpi._fast.Gate", sizeof(Gate), gate_slots);
    if (gate_type == NULL) return -1;
    data_type = add_type(module, "remesh.mpi._fast.ViewData", sizeof(ViewData), data_slots);
    return data_type == NULL ? -1 : 0;
}
