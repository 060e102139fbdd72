/* The lower half's hot path: short messages, waits for them and small collectives, from the channel to MPI and back.
 *
 * An Engine works on the objects of the Python half.py that made it: the same requests, the same queues of messages and
 * receives. It does itself what is short and frequent, and calls back for the rest (a payload that is announced, a
 * call of another kind), so there is one state and one set of rules. MPI is called through the addresses of the loaded
 * library's functions; its handles are integers or pointers and both travel in a register.
 *
 *     run: pass ── rings and bodies of slots, frame from MPI, sends and collectives that are done, slots that wait
 *          rest ── nothing to do (_engine_rest.c): poll, give way, sleep at the doorbell
 *
 * Nothing here blocks in MPI. While closed nothing is taken from the channel and nothing is told.
 */
#include "_engine.h"
#include <stddef.h>
#include <stdlib.h>

static PyTypeObject *engine_type;

/* ---- MPI ---- */

/* Ask MPI whether a wire message stands in the frame; MPI's code. Where none may be waited for by a receive, one that has
 * come is looked for, and received then.
 */
static int ask_for_frame(Engine *e, int *ready) {
    int (*test)(uint64_t *, int *, void *) = e->function[FN_TEST];
    if (e->frame_request != NULL) return test(e->frame_request, ready, e->status);
    if (!e->is_probed) {
        int (*improbe)(int, int, Handle, int *, uint64_t *, void *) = e->function[FN_IMPROBE];
        int (*imrecv)(void *, int, Handle, uint64_t *, uint64_t *) = e->function[FN_IMRECV];
        uint64_t message = 0;
        int code = improbe(e->any_source, 0, e->comm, &e->is_probed, &message, e->status);
        if (code || !e->is_probed) return code;
        code = imrecv(e->frame, HEADER_BYTES + EAGER_BYTES, e->byte, &message, &e->probed);
        if (code) return code;
    }
    int code = test(&e->probed, ready, e->status);
    if (*ready) e->is_probed = 0;
    return code;
}

/* Ask MPI about everything of ours; whether something is there for `pass`. Calls no Python. */
int look(Engine *e) {
    int (*test)(uint64_t *, int *, void *) = e->function[FN_TEST];
    int code = 0, ready = e->frame_ready;
    if (!ready) {
        code = ask_for_frame(e, &ready);
        e->frame_ready = ready;
    }
    size_t kept = 0;
    for (size_t i = 0; i < e->num_sending; i++) {
        int over = 0;
        if (!code) code = test(&e->sending[i].real, &over, e->status);
        if (over) free(e->sending[i].frame);
        else e->sending[kept++] = e->sending[i];
    }
    e->num_sending = kept;
    for (size_t i = 0; i < e->num_running; i++) {
        int over = e->running[i].done;
        if (!over && !code) code = test(&e->running[i].real, &over, e->status);
        e->running[i].done = (char)over;
        ready |= over;
    }
    for (int i = 0; i < e->num_watched && !code; i++) {
        int over = 0;
        code = test(e->watched[i], &over, e->status);
        if (over) e->attention = ready = 1;
    }
    if (e->attention) e->num_watched = 0;
    for (size_t i = 0; i < e->num_streams && !code; i++) ready |= look_at_stream(e, &e->streams[i]);
    if (code) e->mpi_problem = code;
    return ready | (code != 0);
}

/* Serve what the slots have, if anybody has rung: whether there was anything, or -1. */
static int hear_program(Engine *e) {
    uint32_t bell = atomic_load(e->doorbell);
    if (e->closed || (bell == e->scanned && !e->rescan)) return 0;
    e->scanned = bell;
    e->rescan = 0;
    int served = scan(e);
    return served < 0 ? -1 : served > 0;
}

/* Whatever can be done now: whether there was anything, or -1. */
static int pass(Engine *e) {
    int progress = hear_program(e);
    if (progress < 0) return -1;
    look(e);
    if (e->mpi_problem) return mpi_failed("looking after what is under way", e->mpi_problem);
    if (e->frame_ready) {
        progress = 1;
        if (take_frame(e)) return -1;
    }
    size_t kept = 0;
    for (size_t i = 0; i < e->num_running; i++) {
        if (!e->running[i].done) {
            e->running[kept++] = e->running[i];
            continue;
        }
        progress = 1;
        finish_running(e, &e->running[i]);
    }
    e->num_running = kept;
    int carried = carry_on(e), streamed = carried < 0 ? -1 : stream_on(e);
    if (streamed < 0) return -1;
    progress |= carried | streamed;
    if (e->closed) return progress;
    if (e->recheck && waiting_slots(e) && tell_waiting(e)) return -1;
    return progress;
}

/* ---- the type ---- */

/* step(news): one pass; whether there was anything to do. ``news``: Python has completed a request. */
static PyObject *engine_step(PyObject *self, PyObject *news) {
    Engine *e = (Engine *)self;
    if (PyObject_IsTrue(news)) e->recheck = 1;
    int progress = pass(e);
    if (progress > 0) note_gap(e, now_us());
    return progress < 0 ? NULL : PyBool_FromLong(progress);
}

/* Note the requests that a run watches: a list of where their handles stand. */
static int take_watched(Engine *e, PyObject *addresses) {
    Py_ssize_t count = PyList_Size(addresses);
    if (count > MAX_WATCHED)
        return PyErr_Format(PyExc_ValueError, "%zd requests to watch, room for %d", count, MAX_WATCHED), -1;
    for (Py_ssize_t i = 0; i < count; i++)
        e->watched[i] = (uint64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(PyList_GetItem(addresses, i));
    e->num_watched = (int)count;
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether something goes on only while MPI is asked. */
static int is_busy(Engine *e) {
    return waiting_slots(e) || e->num_watched || e->num_carries || e->num_sending || e->num_running || has_moving_stream(e);
}

/* Pass and rest until there is something for Python: 1, or not in time: 0, or -1 with an exception. */
static int run_until(Engine *e, int64_t deadline_us) {
    for (int fruitful = 0; !atomic_load(&e->woken);) {
        int progress = pass(e);
        if (progress < 0) return -1;
        int64_t now = now_us();
        if (progress) note_gap(e, now);
        if (e->attention) return 1;
        if (progress) {
            /* A program that polls always has a next request: the time must end this, too. */
            if ((++fruitful & 63) == 0 && now >= deadline_us) break;
            /* A caller that has its reply runs before anything else is looked at. */
            if (is_busy(e) || !may_give_way(e)) continue;
        }
        if (now >= deadline_us) break;
        rest(e, waiting_slots(e) != 0, now, deadline_us);
    }
    return 0;
}

/* run(timeout_us, watched): pass and rest until Python has something to look at, or that time is over.
 * ``watched``: requests of MPI's, by where their handles stand, whose end Python wants to know.
 */
static PyObject *engine_run(PyObject *self, PyObject *args) {
    Engine *e = (Engine *)self;
    long long timeout_us;
    PyObject *watched;
    if (!PyArg_ParseTuple(args, "LO!", &timeout_us, &PyList_Type, &watched)) return NULL;
    if (take_watched(e, watched)) return NULL;
    e->attention = 0;
    int found = run_until(e, now_us() + timeout_us);
    e->num_watched = 0;
    return found < 0 ? NULL : PyBool_FromLong(found);
}

/* send(dest, fields, payload): one wire message. */
static PyObject *engine_send(PyObject *self, PyObject *args) {
    Engine *e = (Engine *)self;
    int dest, tag, what, pid;
    unsigned long long comm, request, num_bytes, address;
    Py_buffer payload;
    if (!PyArg_ParseTuple(
            args, "i(KiiKKiK)y*", &dest, &comm, &tag, &what, &request, &num_bytes, &pid, &address, &payload))
        return NULL;
    uint64_t fields[7] = {comm, (uint32_t)tag, (uint32_t)what, request, num_bytes, (uint32_t)pid, address};
    int failed = dest < 0 || dest >= e->size;
    if (failed) PyErr_Format(PyExc_ValueError, "sending to rank %d of %d", dest, e->size);
    else failed = send_wire(e, dest, fields, payload.buf, payload.len);
    PyBuffer_Release(&payload);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* wake(): make a run return soon; from any thread. */
static PyObject *engine_wake(PyObject *self, PyObject *ignored) {
    Engine *e = (Engine *)self;
    (void)ignored;
    atomic_store(&e->woken, 1);
    atomic_fetch_add(e->doorbell, 1);
    futex_wake(e->doorbell);
    Py_RETURN_NONE;
}

/* was_woken(): whether wake was called since this was asked. */
static PyObject *engine_was_woken(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyBool_FromLong(atomic_exchange(&((Engine *)self)->woken, 0));
}

/* set(closed, blocked): what the checkpoint and Python's own waits ask for; slots are looked at anew. */
static PyObject *engine_set(PyObject *self, PyObject *args) {
    Engine *e = (Engine *)self;
    int closed;
    unsigned int blocked;
    if (!PyArg_ParseTuple(args, "pI", &closed, &blocked)) return NULL;
    if (closed) go_anywhere(e);
    e->closed = (char)closed;
    e->blocked = blocked;
    e->rescan = e->recheck = 1;
    Py_RETURN_NONE;
}

/* attach(pid): the process of the program. */
static PyObject *engine_attach(PyObject *self, PyObject *pid) {
    ((Engine *)self)->upper_pid = (int)PyLong_AsLong(pid);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* match(request, message): a receive has got this message, which Python had kept. */
static PyObject *engine_match(PyObject *self, PyObject *args) {
    PyObject *request, *message;
    if (!PyArg_ParseTuple(args, "OO", &request, &message)) return NULL;
    if (match((Engine *)self, (Request *)request, (Arrived *)message)) return NULL;
    Py_RETURN_NONE;
}

/* wait_for(slot, request): the slot is answered when this request is over. */
static PyObject *engine_wait_for(PyObject *self, PyObject *args) {
    int slot;
    unsigned long long request;
    if (!PyArg_ParseTuple(args, "iK", &slot, &request)) return NULL;
    wait_for((Engine *)self, slot, request);
    Py_RETURN_NONE;
}

/* access(window, verb, runs, payload): an access of this rank to itself: (error class, what it has fetched). */
static PyObject *engine_access(PyObject *self, PyObject *args) {
    _Alignas(16) char old[EAGER_BYTES];
    Engine *e = (Engine *)self;
    unsigned long long window;
    Header header = {.what = WHAT_ACCESS, .source = e->rank};
    Py_buffer payload;
    if (!PyArg_ParseTuple(args, "Kiiy*", &window, &header.tag, &header.pid, &payload)) return NULL;
    int64_t fetched = 0;
    header.comm = window;
    header.num_bytes = (uint64_t)payload.len;
    int error = serve_access(e, &header, payload.buf, old, &fetched);
    PyBuffer_Release(&payload);
    return error < 0 ? NULL : Py_BuildValue("(iy#)", error, old, (Py_ssize_t)fetched);
}

/* decline(message): of one that no receive has; what came ahead of it counts for nothing, all of it is asked for later. */
static PyObject *engine_decline(PyObject *self, PyObject *message) {
    if (decline((Engine *)self, (Arrived *)message)) return NULL;
    Py_RETURN_NONE;
}

/* discard(message): the same without a word to the sender, all ranks being about to leave. */
static PyObject *engine_discard(PyObject *self, PyObject *message) {
    if (discard((Engine *)self, (Arrived *)message)) return NULL;
    Py_RETURN_NONE;
}

/* give_up_ahead(): what has gone ahead counts no more, all ranks being about to leave. */
static PyObject *engine_give_up_ahead(PyObject *self, PyObject *ignored) {
    (void)ignored;
    give_up_ahead((Engine *)self);
    Py_RETURN_NONE;
}

static PyObject *list_of(const uint64_t *values, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(values[i]);
        if (value == NULL || PyList_SetItem(list, i, value)) Py_CLEAR(list);
    }
    return list;
}

static PyObject *get_sent(PyObject *self, void *unused) {
    (void)unused;
    return list_of(((Engine *)self)->sent, ((Engine *)self)->size);
}

static PyObject *get_received(PyObject *self, void *unused) {
    (void)unused;
    return list_of(((Engine *)self)->received, ((Engine *)self)->size);
}

static PyObject *get_handed_over(PyObject *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(((Engine *)self)->num_sending == 0);
}

static PyObject *get_carrying(PyObject *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(((Engine *)self)->num_carries || ((Engine *)self)->num_streams);
}

static PyObject *get_waiting(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLong(waiting_slots((Engine *)self));
}

/* {slot: request}: blocking operations that slots wait for. */
static PyObject *get_singles(PyObject *self, void *unused) {
    Engine *e = (Engine *)self;
    (void)unused;
    PyObject *found = PyDict_New();
    for (uint32_t left = e->singles; found != NULL && left; left &= left - 1) {
        int slot = __builtin_ctz(left);
        PyObject *key = PyLong_FromLong(slot), *number = PyLong_FromUnsignedLongLong(e->single[slot]);
        if (key == NULL || number == NULL || PyDict_SetItem(found, key, number)) Py_CLEAR(found);
        Py_XDECREF(key);
        Py_XDECREF(number);
    }
    return found;
}

/* Collectives that run on the real MPI: (request, number, kind, root, op, type, send, bytes of the result). */
static PyObject *get_running(PyObject *self, void *unused) {
    Engine *e = (Engine *)self;
    (void)unused;
    PyObject *list = PyList_New((Py_ssize_t)e->num_running);
    for (size_t i = 0; list != NULL && i < e->num_running; i++) {
        Running *one = &e->running[i];
        PyObject *built = Py_BuildValue(
            "(OLiiiiOn)", (PyObject *)one->request, (long long)one->number, one->kind, one->root, one->op, one->type, one->send,
            PyBytes_Size(one->result));
        if (built == NULL || PyList_SetItem(list, (Py_ssize_t)i, built)) Py_CLEAR(list);
    }
    return list;
}

/* Collectives that are messages of ours:
 * (request's number, clock, kind, root, op, type, bytes of a block, steps of its plan that are done, blocks).
 */
static PyObject *get_small(PyObject *self, void *unused) {
    (void)unused;
    return list_small((Engine *)self);
}

/* Parts of such that nobody has taken: (communicator, clock, source, error, operand). */
static PyObject *get_parts(PyObject *self, void *unused) {
    (void)unused;
    return list_parts((Engine *)self);
}

/* resume_small(request, clock, kind, root, op, type, bytes of a block, plan, step, blocks): go on with what another lower
 * half began.
 */
static PyObject *engine_resume_small(PyObject *self, PyObject *args) {
    PyObject *request, *plan, *mine;
    unsigned long long clock;
    long long block_bytes;
    SmallCall call;
    Py_ssize_t step;
    if (!PyArg_ParseTuple(args, "OKiiiiLSnS", &request, &clock, &call.kind, &call.root, &call.fold.op, &call.fold.type,
                          &block_bytes, &plan, &step, &mine))
        return NULL;
    call.clock = clock;
    call.block_bytes = block_bytes;
    if (resume_small((Engine *)self, (Request *)request, call, plan, step, mine)) return NULL;
    Py_RETURN_NONE;
}

/* keep_part(comm, clock, source, error, operand): what another lower half had heard. */
static PyObject *engine_keep_part(PyObject *self, PyObject *args) {
    unsigned long long comm, clock;
    int source, error;
    const char *payload;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTuple(args, "KKiiy#", &comm, &clock, &source, &error, &payload, &num_bytes)) return NULL;
    if (hear_part((Engine *)self, comm, clock, source, error, payload, num_bytes)) return NULL;
    Py_RETURN_NONE;
}

static uint64_t field(PyObject *setup, const char *name) {
    PyObject *value = PyErr_Occurred() ? NULL : PyObject_GetAttrString(setup, name);
    if (value == NULL) return 0;
    uint64_t number = PyLong_AsUnsignedLongLongMask(value);
    Py_DECREF(value);
    return number;
}

static PyObject *object(PyObject *setup, const char *name) {
    return PyErr_Occurred() ? NULL : PyObject_GetAttrString(setup, name);
}

/* Integers of a tuple; how many. */
static int field_list(PyObject *setup, const char *name, uint64_t *to, int most) {
    PyObject *tuple = object(setup, name);
    if (tuple == NULL) return 0;
    int count = (int)PyTuple_Size(tuple);
    if (count > most) PyErr_Format(PyExc_ValueError, "%d %s given, room for %d", count, name, most);
    for (int i = 0; !PyErr_Occurred() && i < count; i++) to[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(tuple, i));
    Py_DECREF(tuple);
    return count;
}

static void take_seat(Engine *e, PyObject *setup) {
    uint64_t cores[CPU_SETSIZE];
    int count = field_list(setup, "seat", cores, CPU_SETSIZE);
    CPU_ZERO(&e->seat);
    for (int i = 0; i < count; i++)
        if (cores[i] < CPU_SETSIZE) CPU_SET(cores[i], &e->seat);
}

/* Where what `Setup` (lower/engine.py) has under a name goes. */
typedef struct {
    const char *name;
    size_t place, num_bytes;
} Field;

#define FIELD(name) {#name, offsetof(Engine, name), sizeof ((Engine *)0)->name}

static const Field NUMBERS[] = {
    FIELD(base), FIELD(next_number), FIELD(comm), FIELD(byte), FIELD(rank), FIELD(size), FIELD(frame_request), FIELD(any_source), FIELD(frame), FIELD(arena_start),
    FIELD(arena_bytes), FIELD(piece_bytes), FIELD(small_bytes), FIELD(err_truncate), FIELD(err_other), FIELD(err_request),
    FIELD(err_op), FIELD(err_win), FIELD(err_rma_range), FIELD(upper_spin), FIELD(lower_spin), FIELD(always_spins),
    FIELD(eager_us), FIELD(patient_us), FIELD(shortest_us), FIELD(longest_us), FIELD(idle_us), FIELD(give_way_us)};

/* Tables come first. */
static const Field OBJECTS[] = {
    FIELD(by_number), FIELD(posted), FIELD(arrived), FIELD(entered), FIELD(reals), FIELD(plans), FIELD(windows),
    FIELD(accesses), FIELD(access_queues), FIELD(requests), FIELD(owed), FIELD(on_message), FIELD(make_plan), FIELD(serve),
    FIELD(serve_posted), FIELD(tell), FIELD(tell_wait), FIELD(word_send), FIELD(word_receive), FIELD(word_collective),
    FIELD(word_window), FIELD(asker)};

enum { NUM_NUMBERS = sizeof NUMBERS / sizeof *NUMBERS, NUM_OBJECTS = sizeof OBJECTS / sizeof *OBJECTS, NUM_TABLES = 9 };

static PyObject **object_at(Engine *e, int which) { return (PyObject **)((char *)e + OBJECTS[which].place); }

static void take_fields(Engine *e, PyObject *setup) {
    for (int i = 0; i < NUM_NUMBERS; i++) {
        uint64_t number = field(setup, NUMBERS[i].name);
        /* Its low bytes come first. */
        memcpy((char *)e + NUMBERS[i].place, &number, NUMBERS[i].num_bytes);
    }
    for (int i = 0; i < NUM_OBJECTS; i++) {
        PyObject *found = *object_at(e, i) = object(setup, OBJECTS[i].name);
        if (i < NUM_TABLES && found != NULL && !is_table(found))
            PyErr_Format(PyExc_TypeError, "%s of an engine's setup is %R, expected a table", OBJECTS[i].name, found);
    }
}

static void take_functions(Engine *e, PyObject *setup) {
    uint64_t functions[NUM_FUNCTIONS] = {0};
    if (field_list(setup, "functions", functions, NUM_FUNCTIONS) != NUM_FUNCTIONS && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a function of MPI is missing");
    for (int i = 0; i < NUM_FUNCTIONS; i++) e->function[i] = (void *)(uintptr_t)functions[i];
}

/* Which types are values with an index. */
static void take_pairs(Engine *e, PyObject *setup) {
    uint64_t letters[MAX_TYPES];
    int count = field_list(setup, "pairs", letters, MAX_TYPES);
    for (int i = 0; !PyErr_Occurred() && i < count; i++) e->pair[i] = (char)letters[i];
}

/* What there is for each rank. */
static void take_ranks(Engine *e, PyObject *setup) {
    size_t size = e->size > 0 ? (size_t)e->size : 1;
    e->neighbours = calloc(size, 1);
    e->cores = calloc(size, sizeof *e->cores);
    e->sent = calloc(2 * size, sizeof *e->sent);
    e->received = e->sent == NULL ? NULL : e->sent + size;
    if ((e->sent == NULL || e->neighbours == NULL || e->cores == NULL) && !PyErr_Occurred()) PyErr_NoMemory();
    PyObject *neighbours = object(setup, "neighbours");
    if (neighbours != NULL && e->neighbours != NULL && PyBytes_Size(neighbours) == e->size)
        memcpy(e->neighbours, PyBytes_AsString(neighbours), (size_t)e->size);
    Py_XDECREF(neighbours);
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *setup;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O", &setup)) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Engine *e = (Engine *)alloc(type, 0);
    if (e == NULL) return NULL;
    take_fields(e, setup);
    e->doorbell = (Word *)(e->base + DOORBELL);
    e->sleeping = (Word *)(e->base + SLEEPING);
    e->cpu = (Word *)(e->base + CORE);
    e->upper_spins = (Word *)(e->base + SPIN);
    e->without = (Word *)(e->base + CALLS_WITHOUT);
    take_functions(e, setup);
    e->num_ops = field_list(setup, "ops", (uint64_t *)e->op, MAX_OPS);
    e->num_types = field_list(setup, "types", (uint64_t *)e->type, MAX_TYPES);
    field_list(setup, "extents", (uint64_t *)e->extent, MAX_TYPES);
    take_pairs(e, setup);
    take_seat(e, setup);
    take_ranks(e, setup);
    e->is_dense = e->rescan = 1;
    if (PyErr_Occurred()) Py_CLEAR(e);
    return (PyObject *)e;
}

/* release(): let go of what half.py owns, which refers to this in turn. Nothing else may be called after it. */
static PyObject *engine_release(PyObject *self, PyObject *ignored) {
    (void)ignored;
    go_anywhere((Engine *)self);
    for (int i = 0; i < NUM_OBJECTS; i++) Py_CLEAR(*object_at((Engine *)self, i));
    Py_RETURN_NONE;
}

static void engine_dealloc(PyObject *self) {
    Engine *e = (Engine *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < NUM_OBJECTS; i++) Py_CLEAR(*object_at(e, i));
    /* Frames that MPI still reads from stay where they are. */
    free(e->sending);
    free(e->running);
    free(e->sent);
    drop_carries(e);
    drop_streams(e);
    drop_small(e);
    drop_parts(e);
    free(e->neighbours);
    free(e->cores);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef engine_methods[] = {
    {"step", engine_step, METH_O, NULL},
    {"run", engine_run, METH_VARARGS, NULL},
    {"send", engine_send, METH_VARARGS, NULL},
    {"wake", engine_wake, METH_NOARGS, NULL},
    {"was_woken", engine_was_woken, METH_NOARGS, NULL},
    {"set", engine_set, METH_VARARGS, NULL},
    {"attach", engine_attach, METH_O, NULL},
    {"match", engine_match, METH_VARARGS, NULL},
    {"wait_for", engine_wait_for, METH_VARARGS, NULL},
    {"access", engine_access, METH_VARARGS, NULL},
    {"decline", engine_decline, METH_O, NULL},
    {"discard", engine_discard, METH_O, NULL},
    {"give_up_ahead", engine_give_up_ahead, METH_NOARGS, NULL},
    {"resume_small", engine_resume_small, METH_VARARGS, NULL},
    {"keep_part", engine_keep_part, METH_VARARGS, NULL},
    {"release", engine_release, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_getters[] = {
    {"sent", get_sent, NULL, NULL, NULL},
    {"received", get_received, NULL, NULL, NULL},
    {"handed_over", get_handed_over, NULL, NULL, NULL},
    {"carrying", get_carrying, NULL, NULL, NULL},
    {"waiting", get_waiting, NULL, NULL, NULL},
    {"singles", get_singles, NULL, NULL, NULL},
    {"running", get_running, NULL, NULL, NULL},
    {"small", get_small, NULL, NULL, NULL},
    {"parts", get_parts, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

int add_engine(PyObject *module) {
    PyType_Slot slots[] = {
        {Py_tp_new, (void *)engine_new},
        {Py_tp_dealloc, (void *)engine_dealloc},
        {Py_tp_methods, engine_methods},
        {Py_tp_getset, engine_getters},
        {0, NULL},
    };
    PyType_Spec spec = {"remesh.carried.mpi._fast.Engine", sizeof(Engine), 0, Py_TPFLAGS_DEFAULT, slots};
    engine_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return engine_type == NULL ? -1 : PyModule_AddType(module, engine_type);
}
