/* What an Engine does for the program: calls out of the rings and bodies of slots. */
#include "_engine.h"
#include <stdarg.h>
#include <stdio.h>

/* Of a ring: the shortest call behind 4 bytes, padded to 8. */
enum { LEAST_ENTRY = (4 + UNLOCK_BYTES + 7) & ~7 };

int damaged(int slot, const char *format, ...) {
    char found[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(found, sizeof found, format, arguments);
    va_end(arguments);
    PyErr_Format(PyExc_ValueError,
                 "taking calls from the program: slot %d of its channel is damaged: %s; look for what in the program "
                 "writes out of bounds, and restart from the last checkpoint", slot, found);
    return -1;
}

/* `room`: bytes that the payload may have where the call stands. */
static int do_send(Engine *e, int slot, const char *call, int64_t room) {
    uint64_t comm = read_u64(call + 2);
    int dest = read_i32(call + 10), tag = read_i32(call + 14);
    int64_t num_bytes = read_i64(call + 18);
    if (dest < 0 || dest >= e->size) return damaged(slot, "a send to rank %d of %d", dest, e->size);
    if (num_bytes < 0 || num_bytes > room)
        return damaged(slot, "a send of %lld bytes in %lld", (long long)num_bytes, (long long)room);
    if (dest == e->rank) return arrive_short(e, comm, dest, tag, call + SEND_BYTES, num_bytes);
    uint64_t fields[7] = {comm, (uint32_t)tag, MESSAGE, 0, (uint64_t)num_bytes, 0, 0};
    return send_wire(e, dest, fields, call + SEND_BYTES, num_bytes);
}

/* Borrowed request of a send whose payload stays where it is until a receive matches. */
static Request *announce(Engine *e, const char *call) {
    Request *request = start_request(e, 0, e->word_send);
    if (request == NULL) return NULL;
    request->comm = read_u64(call + 2);
    request->peer = read_i32(call + 10);
    request->tag = read_i32(call + 14);
    request->num_bytes = read_i64(call + 18);
    request->address = read_u64(call + 26);
    int ahead = new_ahead_tag(e, request->peer);
    uint64_t pid = e->neighbours[request->peer] ? (uint32_t)e->upper_pid : (uint32_t)ahead;
    uint64_t what = call[1] & FLAG_BLOCKING ? ANNOUNCED_WAITING : ANNOUNCED;
    if (ahead) what = in_arena(e, request->address, request->num_bytes) ? ANNOUNCED_AHEAD_WHOLE : ANNOUNCED_AHEAD;
    uint64_t fields[7] = {
        request->comm, (uint32_t)request->tag, what, request->number, (uint64_t)request->num_bytes, pid, request->address};
    if (send_wire(e, request->peer, fields, NULL, 0)) return NULL;
    return ahead && stream_ahead(e, request, ahead) ? NULL : request;
}

static int is_other_rank(const Engine *e, int rank) { return rank >= 0 && rank < e->size && rank != e->rank; }

/* Whether a send is a long one to another rank. */
static int is_long(Engine *e, const char *call) {
    return !(call[1] & FLAG_INLINE) && read_i64(call + 18) > EAGER_BYTES && is_other_rank(e, read_i32(call + 10));
}

/* Borrowed request of a receive that has been started; ``at`` points to comm, source, tag, capacity, address. */
static Request *do_receive(Engine *e, int slot, uint64_t number, const char *at) {
    uint64_t comm = read_u64(at);
    int source = read_i32(at + 8), tag = read_i32(at + 12);
    int64_t capacity = read_i64(at + 16);
    if (capacity < PARCEL) return damaged(slot, "a receive of %lld bytes", (long long)capacity), NULL;
    Request *request = start_request(e, number, e->word_receive);
    if (request == NULL) return NULL;
    request->comm = comm;
    request->peer = source;
    request->tag = tag;
    request->num_bytes = capacity;
    request->address = read_u64(at + 24);
    Arrived *message = take_arrived(e, comm, source, tag);
    if (PyErr_Occurred()) return NULL;
    if (message == NULL) {
        Posted *receive = new_posted();
        PyObject *queue = receive == NULL ? NULL : queue_of(e->posted, comm, 1);
        int failed = queue == NULL;
        if (!failed) {
            receive->request = request->number;
            receive->comm = comm;
            receive->source = source;
            receive->tag = tag;
            failed = PyList_Append(queue, (PyObject *)receive);
        }
        Py_XDECREF((PyObject *)receive);
        return failed ? NULL : request;
    }
    int failed = match(e, request, message);
    Py_DECREF((PyObject *)message);
    return failed ? NULL : request;
}

/* Answer the start of an operation, or let the slot wait for it. */
static int started(Engine *e, int slot, uint8_t flags, Request *request) {
    if (request->done) return tell_single(e, slot, request);
    if (flags & FLAG_BLOCKING) {
        e->single[slot] = request->number;
        e->singles |= 1u << slot;
        return 0;
    }
    put_64(put_u8(slot_at(e, slot) + BODY, 0), request->number);
    answer(e, slot);
    return 0;
}

typedef struct {
    Handle comm;
    int rank, size;
} Real;

/* Start a collective on the real MPI; MPI's code. */
static int start_real(Engine *e, const char *call, Real real, const void *send, void *receive, uint64_t *handle) {
    int kind = call[2], op = call[3], type = call[4], root = read_i32(call + 13);
    int send_bytes = (int)read_i64(call + 25), receive_bytes = (int)read_i64(call + 41), size = real.size;
    typedef int (*Folding)(const void *, void *, int, Handle, Handle, Handle, uint64_t *);
    typedef int (*Rooted)(const void *, int, Handle, void *, int, Handle, int, Handle, uint64_t *);
    typedef int (*Even)(const void *, int, Handle, void *, int, Handle, Handle, uint64_t *);
    switch (kind) {
    case BARRIER:
        return ((int (*)(Handle, uint64_t *))e->function[FN_BARRIER])(real.comm, handle);
    case BCAST: {
        int (*bcast)(void *, int, Handle, int, Handle, uint64_t *) = e->function[FN_BCAST];
        if (real.rank == root) return bcast((void *)send, send_bytes, e->byte, root, real.comm, handle);
        return bcast(receive, receive_bytes, e->byte, root, real.comm, handle);
    }
    case GATHER:
        return ((Rooted)e->function[FN_GATHER])(send, send_bytes, e->byte, receive, receive_bytes / size, e->byte, root, real.comm, handle);
    case SCATTER:
        return ((Rooted)e->function[FN_SCATTER])(send, send_bytes / size, e->byte, receive, receive_bytes, e->byte, root, real.comm, handle);
    case ALLGATHER:
        return ((Even)e->function[FN_ALLGATHER])(send, send_bytes, e->byte, receive, receive_bytes / size, e->byte, real.comm, handle);
    case ALLTOALL:
        return ((Even)e->function[FN_ALLTOALL])(send, send_bytes / size, e->byte, receive, receive_bytes / size, e->byte, real.comm, handle);
    case REDUCE: {
        int (*reduce)(const void *, void *, int, Handle, Handle, int, Handle, uint64_t *) = e->function[FN_REDUCE];
        return reduce(send, receive, send_bytes / (int)e->extent[type], e->type[type], e->op[op], root, real.comm, handle);
    }
    default: {
        int which = kind == ALLREDUCE ? FN_ALLREDUCE : kind == SCAN ? FN_SCAN : FN_EXSCAN;
        return ((Folding)e->function[which])(send, receive, send_bytes / (int)e->extent[type], e->type[type], e->op[op], real.comm, handle);
    }
    }
}

/* Whether operands of so many bytes can be folded here. */
static int can_fold(Engine *e, int op, int type, int64_t num_bytes) {
    return op < e->num_ops && type < e->num_types && e->extent[type] && num_bytes % e->extent[type] == 0;
}

/* Whether a collective is one for here: short, even, of basic types, on a communicator that is there. */
static int is_short(Engine *e, const char *call, Real *real) {
    int kind = call[2], op = (uint8_t)call[3], type = (uint8_t)call[4];
    int64_t send_bytes = read_i64(call + 25), receive_bytes = read_i64(call + 41);
    if (e->holding || read_u32(call + 49) || send_bytes > EAGER_BYTES || receive_bytes > EAGER_BYTES) return 0;
    if ((send_bytes && !(call[1] & FLAG_INLINE)) || receive_bytes < 0 || send_bytes < 0) return 0;
    switch (kind) {
    case REDUCE: case ALLREDUCE: case SCAN: case EXSCAN:
        if (!can_fold(e, op, type, send_bytes)) return 0;
        break;
    case BARRIER: case BCAST: case GATHER: case SCATTER: case ALLGATHER: case ALLTOALL:
        break;
    default:
        return 0;
    }
    PyObject *found = find_in(e->reals, read_u64(call + 5));
    if (found == NULL) return PyErr_Occurred() ? -1 : 0;
    real->comm = (Handle)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(found, 0));
    real->rank = (int)PyLong_AsLong(PyTuple_GetItem(found, 1));
    real->size = (int)PyLong_AsLong(PyTuple_GetItem(found, 2));
    if (PyErr_Occurred()) return -1;
    int is_fold = kind == REDUCE || kind == ALLREDUCE || kind == SCAN || kind == EXSCAN;
    int has_result = kind != REDUCE || read_i32(call + 13) == real->rank;
    return !is_fold || receive_bytes == (has_result ? send_bytes : 0);
}

/* Count one more; how many had been entered, or -1. */
static int64_t count_entered(Engine *e, uint64_t comm) {
    PyObject *key = PyLong_FromUnsignedLongLong(comm);
    PyObject *before = key == NULL ? NULL : PyDict_GetItemWithError(e->entered, key);
    int64_t count = before == NULL ? 0 : PyLong_AsLongLong(before);
    PyObject *after = PyErr_Occurred() ? NULL : PyLong_FromLongLong(count + 1);
    int failed = after == NULL || PyDict_SetItem(e->entered, key, after);
    Py_XDECREF(after);
    Py_XDECREF(key);
    return failed ? -1 : count;
}

/* The plan of a collective that is messages of ours; NULL if it is not one, perhaps with an exception. collectives.py
 * has the same rule, for those that come from Python.
 */
static PyObject *small_plan(Engine *e, const char *call) {
    int kind = call[2];
    int64_t send_bytes = read_i64(call + 25), receive_bytes = read_i64(call + 41);
    if (e->holding || read_u32(call + 49) || (kind != BARRIER && kind != ALLREDUCE)) return NULL;
    if (send_bytes != receive_bytes || send_bytes < 0 || send_bytes > e->small_bytes) return NULL;
    if (send_bytes && !(call[1] & FLAG_INLINE)) return NULL;
    if (kind == ALLREDUCE && !can_fold(e, (uint8_t)call[3], (uint8_t)call[4], send_bytes)) return NULL;
    return find_in(e->plans, read_u64(call + 5));
}

int finish_running(Engine *e, Running *one) {
    Request *request = one->request;
    set_object(&request->payload, one->result);
    request->message_bytes = PyBytes_Size(one->result);
    int failed = complete(e, request);
    Py_DECREF(one->send);
    Py_DECREF(one->result);
    Py_DECREF((PyObject *)request);
    return failed;
}

static int do_collective(Engine *e, int slot, const char *call, Real real) {
    uint64_t comm = read_u64(call + 5);
    Running *running = with_room(e->running, e->num_running, &e->room_running, sizeof *running);
    if (running == NULL) return -1;
    e->running = running;
    int64_t receive_bytes = read_i64(call + 41);
    uint8_t flags = call[1];
    Running one = {0};
    one.send = PyBytes_FromStringAndSize(call + COLLECTIVE_BYTES, read_i64(call + 25));
    one.result = PyBytes_FromStringAndSize(NULL, receive_bytes);
    one.request = one.send == NULL || one.result == NULL ? NULL : start_request(e, 0, e->word_collective);
    if (one.request == NULL || count_entered(e, comm) < 0) {
        Py_XDECREF(one.send);
        Py_XDECREF(one.result);
        return -1;
    }
    Py_INCREF((PyObject *)one.request);
    one.request->comm = comm;
    one.request->peer = read_i32(call + 13);
    one.request->address = read_u64(call + 33);
    one.request->num_bytes = receive_bytes;
    memset(PyBytes_AsString(one.result), 0, receive_bytes);
    int (*test)(uint64_t *, int *, void *) = e->function[FN_TEST];
    int over = 0;
    int code = start_real(e, call, real, PyBytes_AsString(one.send), PyBytes_AsString(one.result), &one.real);
    if (code == 0) code = test(&one.real, &over, e->status);
    if (code) {
        int failed = forget(e, one.request);
        fail(e, slot, "a collective", code);
        Py_DECREF(one.send);
        Py_DECREF(one.result);
        Py_DECREF((PyObject *)one.request);
        return failed;
    }
    Request *request = one.request;
    Py_INCREF((PyObject *)request);
    int failed = 0;
    if (over) failed = finish_running(e, &one);
    else e->running[e->num_running++] = one;
    if (!failed) failed = started(e, slot, flags, request);
    Py_DECREF((PyObject *)request);
    return failed;
}

static int do_small(Engine *e, int slot, const char *call, PyObject *plan) {
    uint64_t comm = read_u64(call + 5);
    int64_t num_bytes = read_i64(call + 41), clock = count_entered(e, comm);
    Request *request = clock < 0 ? NULL : start_request(e, 0, e->word_collective);
    if (request == NULL) return -1;
    request->comm = comm;
    request->address = read_u64(call + 33);
    request->num_bytes = num_bytes;
    Fold fold = {(uint8_t)call[3], (uint8_t)call[4]};
    uint8_t flags = call[1];
    if (start_doubling(e, request, (uint64_t)clock, plan, fold, call + COLLECTIVE_BYTES, num_bytes)) return -1;
    return started(e, slot, flags, request);
}

/* Leave the request in a slot to Python; it stays blocked there if it has no answer yet. */
static int serve_in_python(Engine *e, int slot) {
    e->attention = 1;
    PyObject *answered = PyObject_CallFunction(e->serve, "i", slot);
    if (answered == NULL) return -1;
    if (answered == Py_True) answer(e, slot);
    else e->blocked |= 1u << slot;
    Py_DECREF(answered);
    return 0;
}

static int serve_body(Engine *e, int slot) {
    const char *body = slot_at(e, slot) + BODY;
    uint8_t flags = body[1];
    Real real;
    switch ((uint8_t)body[0]) {
    case CALL_HELLO:
        put_32(put_32(put_u8((char *)body, 0), (uint32_t)e->rank), (uint32_t)e->size);
        answer(e, slot);
        return 0;
    case CALL_SEND:
        if (is_long(e, body)) {
            Request *request = announce(e, body);
            return request == NULL ? -1 : started(e, slot, flags, request);
        }
        if (!(flags & FLAG_INLINE)) break;
        if (do_send(e, slot, body, EAGER_BYTES)) return -1;
        put_64(put_u8((char *)body, 0), 0);
        answer(e, slot);
        return 0;
    case CALL_RECEIVE: {
        Request *request = do_receive(e, slot, 0, body + 2);
        return request == NULL ? -1 : started(e, slot, flags, request);
    }
    case CALL_WAIT: {
        e->open_in[slot] = 0;
        int over = try_wait(e, slot);
        if (over) return over < 0 ? -1 : 0;
        if (flags & FLAG_BLOCKING) {
            e->waits |= 1u << slot;
            return 0;
        }
        put_32(put_u8((char *)body, 0), 0);
        answer(e, slot);
        return 0;
    }
    case CALL_LOCK: {
        if (!is_other_rank(e, read_i32(body + 10))) break;
        Request *request = ask_for_lock(e, body);
        return request == NULL ? -1 : started(e, slot, flags, request);
    }
    case CALL_COLLECTIVE: {
        PyObject *plan = small_plan(e, body);
        if (plan != NULL) return do_small(e, slot, body, plan);
        int here = PyErr_Occurred() ? -1 : is_short(e, body, &real);
        if (here < 0) return -1;
        if (here) return do_collective(e, slot, body, real);
        break;
    }
    default:
        break;
    }
    return serve_in_python(e, slot);
}

/* Leave what was posted in a ring to Python. */
static int serve_posted_in_python(Engine *e, int slot, const char *call, int64_t num_bytes) {
    e->attention = 1;
    PyObject *done = PyObject_CallFunction(e->serve_posted, "iy#", slot, call, (Py_ssize_t)num_bytes);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* One call out of a ring, whose entry has so many bytes for it. */
static int serve_posted(Engine *e, int slot, const char *call, int64_t num_bytes) {
    int done;
    switch ((uint8_t)call[0]) {
    case CALL_SEND:
        if (num_bytes < SEND_BYTES) break;
        return do_send(e, slot, call, num_bytes - SEND_BYTES);
    case CALL_START_RECEIVE:
        if (num_bytes < START_RECEIVE_BYTES) break;
        return do_receive(e, slot, read_u64(call + 1), call + 9) == NULL ? -1 : 0;
    case CALL_START_ACCESS:
        if (num_bytes < START_ACCESS_BYTES) break;
        done = start_access(e, slot, call, num_bytes);
        return done ? (done < 0 ? -1 : 0) : serve_posted_in_python(e, slot, call, num_bytes);
    case CALL_UNLOCK:
        if (num_bytes < UNLOCK_BYTES) break;
        if (is_other_rank(e, read_i32(call + 9))) return give_lock_back(e, call);
        return serve_posted_in_python(e, slot, call, num_bytes);
    default:
        break;
    }
    return damaged(slot, "call %d in an entry of %lld bytes", (uint8_t)call[0], (long long)num_bytes + 4);
}

/* Everything in the ring of a slot, in order; how many entries, or -1. */
static int serve_ring(Engine *e, int slot) {
    char *at = slot_at(e, slot);
    Word *taken_word = (Word *)(at + TAKEN);
    uint32_t taken = atomic_load_explicit(taken_word, memory_order_relaxed);
    uint32_t posted = atomic_load_explicit((Word *)(at + POSTED), memory_order_acquire);
    int served = 0;
    if (posted - taken > RING_BYTES || (taken | posted) & 7)
        return damaged(slot, "%u bytes in a ring of %d, from %u on", posted - taken, RING_BYTES, taken);
    while (taken != posted) {
        uint32_t left = posted - taken, offset = taken % RING_BYTES, to_end = RING_BYTES - offset;
        const char *entry = at + RING + offset;
        uint32_t whole = read_u32(entry);
        if (whole == SKIP && to_end < left) {
            taken += to_end;
            continue;
        }
        if (whole < LEAST_ENTRY || whole > to_end || whole > left || whole & 7)
            return damaged(slot, "an entry of %u bytes, and %u to the end of what is posted", whole, left);
        if (serve_posted(e, slot, entry + 4, (int64_t)whole - 4)) return -1;
        taken += whole;
        atomic_store_explicit(taken_word, taken, memory_order_release);
        served++;
    }
    atomic_store_explicit(taken_word, taken, memory_order_release);
    return served;
}

/* Take what the slots have. Rings go first: a body may wait for what another thread had posted before. */
int scan(Engine *e) {
    uint32_t mask = 0;
    int served = 0;
    for (int slot = 0; slot < NUM_SLOTS; slot++) {
        char *at = slot_at(e, slot);
        uint32_t reply = atomic_load_explicit((Word *)(at + REPLY), memory_order_relaxed);
        if (atomic_load_explicit((Word *)at, memory_order_acquire) != reply) mask |= 1u << slot;
    }
    for (int slot = 0; slot < NUM_SLOTS; slot++) {
        int some = serve_ring(e, slot);
        if (some < 0) return -1;
        served += some;
    }
    for (mask &= ~(e->singles | e->waits | e->blocked); mask; mask &= mask - 1, served++)
        if (serve_body(e, __builtin_ctz(mask))) return -1;
    return served;
}
