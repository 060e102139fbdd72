/* How an Engine does small reductions to all, and barriers, by the plans of lower/exchange_pattern.py.
 *
 *     a step gives    PART (communicator, clock) with what is folded so far ──>
 *     a step takes    the part of its peer, which has come or will; folds it; goes on
 *
 * Nothing is asked of MPI but to carry wire messages and to fold two operands. So what is not complete, and parts that
 * nobody has taken yet, are state of the lower half, and the next one goes on with them.
 */
#include "_engine.h"
#include <stdlib.h>

enum { GIVE = 0, FOLD_BEFORE = 1, FOLD_AFTER = 2, TAKE = 3, STEP_BYTES = 8 };

struct Doubling {
    uint64_t clock;    /* collectives entered before, on its communicator */
    Request *request;
    PyObject *plan;
    PyObject *mine;    /* bytes: folded so far; nobody else has them before it is complete */
    Fold fold;
    Py_ssize_t step;   /* bytes of the plan that are done */
};

struct Part {
    uint64_t comm, clock;
    int source, error; /* MPI's class: what the fold of the peer met; 0 for nothing */
    PyObject *theirs;
};

/* Fold two operands into the second; MPI's code. */
static int fold_into(Engine *e, const Fold *fold, const char *before, char *after, int64_t num_bytes) {
    int (*reduce)(const void *, void *, int, Handle, Handle) = e->function[FN_REDUCE_LOCAL];
    if (num_bytes == 0) return 0;
    return reduce(before, after, (int)(num_bytes / e->extent[fold->type]), e->type[fold->type], e->op[fold->op]);
}

/* Take a peer's part, whose reference is stolen. */
static void take_part(Engine *e, Doubling *one, int what, int error, PyObject *theirs) {
    Request *request = one->request;
    int64_t num_bytes = PyBytes_Size(one->mine);
    if (error || PyBytes_Size(theirs) != num_bytes) {
        /* Given on with the next parts: all members raise. */
        if (!request->error) request->error = error ? error : e->err_truncate;
        Py_DECREF(theirs);
        return;
    }
    char *mine = PyBytes_AsString(one->mine), *other = PyBytes_AsString(theirs);
    int code = 0;
    if (what == FOLD_BEFORE) code = fold_into(e, &one->fold, other, mine, num_bytes);
    if (what == FOLD_AFTER) code = fold_into(e, &one->fold, mine, other, num_bytes);
    if (code) request->error = e->err_op;
    if (what == FOLD_BEFORE) {
        Py_DECREF(theirs);
    } else {
        Py_DECREF(one->mine);
        one->mine = theirs;
    }
}

/* Bytes of one's own, to be changed in place: Python shares those of one character. */
static PyObject *own_bytes(const char *from, int64_t num_bytes) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, num_bytes);
    if (bytes != NULL && num_bytes) memcpy(PyBytes_AsString(bytes), from, num_bytes);
    return bytes;
}

/* The part of a peer that has come already, removed; NULL if it has not. */
static PyObject *find_part(Engine *e, const Doubling *one, int peer, int *error) {
    for (size_t i = 0; i < e->num_parts; i++) {
        Part part = e->parts[i];
        if (part.comm != one->request->comm || part.clock != one->clock || part.source != peer) continue;
        e->parts[i] = e->parts[--e->num_parts];
        *error = part.error;
        return part.theirs;
    }
    return NULL;
}

static void drop(Doubling *one) {
    Py_XDECREF(one->plan);
    Py_XDECREF(one->mine);
    Py_XDECREF((PyObject *)one->request);
}

/* Do what can be done: 1 if it is complete and gone, 0 if it waits for a part, -1 with an exception. */
static int advance(Engine *e, Doubling *one) {
    const char *plan = PyBytes_AsString(one->plan);
    Request *request = one->request;
    for (; one->step < PyBytes_Size(one->plan); one->step += STEP_BYTES) {
        int what = read_i32(plan + one->step), peer = read_i32(plan + one->step + 4), error = 0;
        if (what == GIVE) {
            int64_t num_bytes = PyBytes_Size(one->mine);
            uint64_t fields[7] = {request->comm, (uint32_t)request->error, WHAT_PART, one->clock, (uint64_t)num_bytes, 0, 0};
            if (send_wire(e, peer, fields, PyBytes_AsString(one->mine), num_bytes)) return -1;
        } else {
            PyObject *theirs = find_part(e, one, peer, &error);
            if (theirs == NULL) return 0;
            take_part(e, one, what, error, theirs);
        }
    }
    set_object(&request->payload, one->mine);
    request->message_bytes = PyBytes_Size(one->mine);
    int failed = complete(e, request);
    drop(one);
    return failed ? -1 : 1;
}

/* NULL with an exception. */
static Doubling *room_for_doubling(Engine *e) {
    Doubling *doublings = with_room(e->doublings, e->num_doublings, &e->room_doublings, sizeof *doublings);
    if (doublings != NULL) e->doublings = doublings;
    return doublings;
}

int start_doubling(Engine *e, Request *request, uint64_t clock, PyObject *plan, Fold fold, const char *send, int64_t num_bytes) {
    if (room_for_doubling(e) == NULL) return -1;
    Doubling one = {.clock = clock, .request = request, .plan = plan, .fold = fold};
    if ((one.mine = own_bytes(send, num_bytes)) == NULL) return -1;
    Py_INCREF((PyObject *)request);
    Py_INCREF(plan);
    int over = advance(e, &one);
    if (over == 0) e->doublings[e->num_doublings++] = one;
    return over < 0 ? -1 : 0;
}

int hear_part(Engine *e, uint64_t comm, uint64_t clock, int source, int error, const char *payload, int64_t num_bytes) {
    if (num_bytes < 0 || num_bytes > EAGER_BYTES)
        return PyErr_Format(PyExc_ValueError, "a part of %lld bytes from rank %d", (long long)num_bytes, source), -1;
    Part *parts = with_room(e->parts, e->num_parts, &e->room_parts, sizeof *parts);
    if (parts == NULL) return -1;
    e->parts = parts;
    PyObject *theirs = own_bytes(payload, num_bytes);
    if (theirs == NULL) return -1;
    e->parts[e->num_parts++] = (Part){comm, clock, source, error, theirs};
    for (size_t i = 0; i < e->num_doublings; i++) {
        Doubling *one = &e->doublings[i];
        if (one->request->comm != comm || one->clock != clock) continue;
        int over = advance(e, one);
        if (over) *one = e->doublings[--e->num_doublings];
        return over < 0 ? -1 : 0;
    }
    return 0;
}

int resume_doubling(Engine *e, Request *request, uint64_t clock, PyObject *plan, Fold fold, Py_ssize_t step, PyObject *mine) {
    if (step < 0 || step >= PyBytes_Size(plan) || step % STEP_BYTES || fold.op < 0 || fold.type < 0 ||
        fold.op >= e->num_ops || fold.type >= e->num_types || PyBytes_Size(mine) > EAGER_BYTES)
        return PyErr_Format(PyExc_ValueError, "a small collective that is at %zd of a plan of %zd bytes", step, PyBytes_Size(plan)), -1;
    if (room_for_doubling(e) == NULL) return -1;
    Doubling one = {.clock = clock, .request = request, .plan = plan, .fold = fold, .step = step};
    if ((one.mine = own_bytes(PyBytes_AsString(mine), PyBytes_Size(mine))) == NULL) return -1;
    Py_INCREF((PyObject *)request);
    Py_INCREF(plan);
    e->doublings[e->num_doublings++] = one;
    return 0;
}

/* Append what Py_BuildValue has made. */
static int append_built(PyObject *list, PyObject *built) {
    int failed = built == NULL || PyList_Append(list, built);
    Py_XDECREF(built);
    return failed;
}

PyObject *list_doublings(Engine *e) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < e->num_doublings; i++) {
        Doubling *one = &e->doublings[i];
        PyObject *built = Py_BuildValue("(KKiinO)", (unsigned long long)one->request->number, (unsigned long long)one->clock,
                                        one->fold.op, one->fold.type, one->step, one->mine);
        if (append_built(list, built)) Py_CLEAR(list);
    }
    return list;
}

PyObject *list_parts(Engine *e) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < e->num_parts; i++) {
        Part *part = &e->parts[i];
        PyObject *built = Py_BuildValue("(KKiiO)", (unsigned long long)part->comm, (unsigned long long)part->clock, part->source,
                                        part->error, part->theirs);
        if (append_built(list, built)) Py_CLEAR(list);
    }
    return list;
}

void drop_doublings(Engine *e) {
    while (e->num_doublings) drop(&e->doublings[--e->num_doublings]);
    while (e->num_parts) Py_DECREF(e->parts[--e->num_parts].theirs);
    free(e->doublings);
    free(e->parts);
    e->doublings = NULL;
    e->parts = NULL;
    e->room_doublings = e->room_parts = 0;
}
