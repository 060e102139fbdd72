/* How an Engine does small collectives, by the plans of lower/exchange_pattern.py.
 *
 *     a step gives    PART (communicator, clock) with blocks of what this rank has ──>
 *     a step takes    the part of its peer, which has come or will; folds or puts it; goes on
 *
 * Nothing is asked of MPI but to carry wire messages and to fold two operands. So what is not complete, and parts that
 * nobody has taken yet, are state of the lower half, and the next one goes on with them.
 */
#include "_engine.h"
#include <stdlib.h>

enum { GIVE = 0, FOLD_BEFORE = 1, FOLD_AFTER = 2, TAKE = 3, ROTATE = 4 };

/* What a plan begins with, and a step of it: `count` blocks from `first` on. */
typedef struct {
    int32_t size, num_blocks; /* of the communicator; that this rank has room for */
} PlanHead;
typedef struct {
    int32_t what, peer, first, count;
} Step;

struct Small {
    SmallCall call;
    Request *request;
    PyObject *plan;
    PyObject *mine; /* bytes: the blocks of this rank; nobody else has them before it is complete */
    Py_ssize_t step; /* how many are done */
};

int size_of_plan(PyObject *plan) { return ((const PlanHead *)PyBytes_AsString(plan))->size; }

static int num_blocks_of(PyObject *plan) { return ((const PlanHead *)PyBytes_AsString(plan))->num_blocks; }

static Py_ssize_t num_steps_of(PyObject *plan) {
    return (PyBytes_Size(plan) - (Py_ssize_t)sizeof(PlanHead)) / (Py_ssize_t)sizeof(Step);
}

static const Step *steps_of(PyObject *plan) { return (const Step *)(PyBytes_AsString(plan) + sizeof(PlanHead)); }

/* Fold two operands into the second; MPI's code. */
static int fold_into(Engine *e, const Fold *fold, const char *before, char *after, int64_t num_bytes) {
    int (*reduce)(const void *, void *, int, Handle, Handle) = e->function[FN_REDUCE_LOCAL];
    if (num_bytes == 0) return 0;
    return reduce(before, after, (int)(num_bytes / e->extent[fold->type]), e->type[fold->type], e->op[fold->op]);
}

/* Do a step with a peer's part, whose reference is stolen. */
static void use_part(Engine *e, Small *one, const Step *step, int error, PyObject *theirs) {
    Request *request = one->request;
    int64_t num_bytes = step->count * one->call.block_bytes;
    if (error || PyBytes_Size(theirs) != num_bytes) {
        /* Given on with the next parts: all members that wait for them raise. */
        if (!request->error) request->error = error ? error : e->err_truncate;
        Py_DECREF(theirs);
        return;
    }
    char *mine = PyBytes_AsString(one->mine) + step->first * one->call.block_bytes, *other = PyBytes_AsString(theirs);
    int code = 0;
    if (step->what == TAKE) memcpy(mine, other, (size_t)num_bytes);
    if (step->what == FOLD_BEFORE) code = fold_into(e, &one->call.fold, other, mine, num_bytes);
    if (step->what == FOLD_AFTER) {
        /* It comes out where theirs was; who folds has one block. */
        code = fold_into(e, &one->call.fold, mine, other, num_bytes);
        PyObject *before = one->mine;
        one->mine = theirs;
        theirs = before;
    }
    if (code) request->error = e->err_op;
    Py_DECREF(theirs);
}

/* Bytes of one's own, to be changed in place: Python shares those of one character. */
static PyObject *own_bytes(const char *from, int64_t num_bytes) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, num_bytes);
    if (bytes != NULL && num_bytes) memcpy(PyBytes_AsString(bytes), from, (size_t)num_bytes);
    return bytes;
}

/* The first `count` blocks, turned to the left by `first`. */
static int rotate(Small *one, const Step *step) {
    int64_t left = step->first * one->call.block_bytes, right = (step->count - step->first) * one->call.block_bytes;
    PyObject *before = one->mine, *after = own_bytes(PyBytes_AsString(before), PyBytes_Size(before));
    if (after == NULL) return -1;
    memcpy(PyBytes_AsString(after), PyBytes_AsString(before) + left, (size_t)right);
    memcpy(PyBytes_AsString(after) + right, PyBytes_AsString(before), (size_t)left);
    one->mine = after;
    Py_DECREF(before);
    return 0;
}

static int give(Engine *e, const Small *one, const Step *step) {
    const char *from = PyBytes_AsString(one->mine) + step->first * one->call.block_bytes;
    int64_t num_bytes = step->count * one->call.block_bytes;
    uint64_t fields[7] = {
        one->request->comm, (uint32_t)one->request->error, WHAT_PART, one->call.clock, (uint64_t)num_bytes, 0, 0};
    return send_wire(e, step->peer, fields, from, num_bytes);
}

static void drop(Small *one) {
    Py_XDECREF(one->plan);
    Py_XDECREF(one->mine);
    Py_XDECREF((PyObject *)one->request);
}

/* What the program gets of the blocks: as many bytes as it has asked for. */
static int finish(Engine *e, Small *one) {
    Request *request = one->request;
    int64_t num_bytes = PyBytes_Size(one->mine);
    if (request->num_bytes >= 0 && request->num_bytes < num_bytes) {
        PyObject *part = own_bytes(PyBytes_AsString(one->mine), request->num_bytes);
        if (part == NULL) return -1;
        Py_DECREF(one->mine);
        one->mine = part;
    }
    set_object(&request->payload, one->mine);
    request->message_bytes = PyBytes_Size(one->mine);
    complete(e, request);
    return 0;
}

/* Do what can be done: 1 if it is complete and gone, 0 if it waits for a part, -1 with an exception. */
static int advance(Engine *e, Small *one) {
    for (; one->step < num_steps_of(one->plan); one->step++) {
        const Step *step = steps_of(one->plan) + one->step;
        int error = 0;
        if (step->what == GIVE) {
            if (give(e, one, step)) return -1;
        } else if (step->what == ROTATE) {
            if (rotate(one, step)) return -1;
        } else {
            PyObject *theirs = take_part(e, one->request->comm, one->call.clock, step->peer, &error);
            if (theirs == NULL) return 0;
            use_part(e, one, step, error, theirs);
        }
    }
    int failed = finish(e, one);
    drop(one);
    return failed ? -1 : 1;
}

/* A place for one more; NULL with an exception. */
static Small *room_for_small(Engine *e) {
    Small *small = with_room(e->small, e->num_small, &e->room_small, sizeof *small);
    if (small != NULL) e->small = small;
    return small;
}

int start_small(Engine *e, Request *request, SmallCall call, PyObject *plan, const char *send, int64_t send_bytes) {
    if (room_for_small(e) == NULL) return -1;
    Small one = {.call = call, .request = request, .plan = plan};
    int64_t num_bytes = num_blocks_of(plan) * call.block_bytes;
    if ((one.mine = PyBytes_FromStringAndSize(NULL, num_bytes)) == NULL) return -1;
    if (send_bytes > num_bytes) send_bytes = num_bytes;
    char *mine = PyBytes_AsString(one.mine);
    if (send_bytes) memcpy(mine, send, (size_t)send_bytes);
    if (num_bytes > send_bytes) memset(mine + send_bytes, 0, (size_t)(num_bytes - send_bytes));
    Py_INCREF((PyObject *)request);
    Py_INCREF(plan);
    int over = advance(e, &one);
    if (over == 0) e->small[e->num_small++] = one;
    return over < 0 ? -1 : 0;
}

int hear_part(Engine *e, uint64_t comm, uint64_t clock, int source, int error, const char *payload, int64_t num_bytes) {
    if (num_bytes < 0 || num_bytes > EAGER_BYTES)
        return PyErr_Format(PyExc_ValueError, "a part of %lld bytes from rank %d", (long long)num_bytes, source), -1;
    PyObject *theirs = own_bytes(payload, num_bytes);
    if (theirs == NULL || keep_part(e, comm, clock, source, error, theirs)) return -1;
    for (size_t i = 0; i < e->num_small; i++) {
        Small *one = &e->small[i];
        if (one->request->comm != comm || one->call.clock != clock) continue;
        int over = advance(e, one);
        if (over) *one = e->small[--e->num_small];
        return over < 0 ? -1 : 0;
    }
    return 0;
}

int resume_small(Engine *e, Request *request, SmallCall call, PyObject *plan, Py_ssize_t step, PyObject *mine) {
    const Fold *fold = &call.fold;
    if (step < 0 || step >= num_steps_of(plan) || fold->op < 0 || fold->type < 0 || fold->op >= e->num_ops ||
        fold->type >= e->num_types || call.block_bytes < 0 || call.block_bytes > EAGER_BYTES ||
        PyBytes_Size(mine) != num_blocks_of(plan) * call.block_bytes)
        return PyErr_Format(PyExc_ValueError, "a small collective that is at step %zd of a plan of %zd, with %zd bytes", step,
                            num_steps_of(plan), PyBytes_Size(mine)), -1;
    if (room_for_small(e) == NULL) return -1;
    Small one = {.call = call, .request = request, .plan = plan, .step = step};
    if ((one.mine = own_bytes(PyBytes_AsString(mine), PyBytes_Size(mine))) == NULL) return -1;
    Py_INCREF((PyObject *)request);
    Py_INCREF(plan);
    e->small[e->num_small++] = one;
    return 0;
}

PyObject *list_small(Engine *e) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < e->num_small; i++) {
        const Small *one = &e->small[i];
        const SmallCall *call = &one->call;
        PyObject *built = Py_BuildValue(
            "(KKiiiiLnO)", (unsigned long long)one->request->number, (unsigned long long)call->clock, call->kind, call->root,
            call->fold.op, call->fold.type, (long long)call->block_bytes, one->step, one->mine);
        if (built == NULL || PyList_Append(list, built)) Py_CLEAR(list);
        Py_XDECREF(built);
    }
    return list;
}

void drop_small(Engine *e) {
    while (e->num_small) drop(&e->small[--e->num_small]);
    free(e->small);
    e->small = NULL;
    e->room_small = 0;
}
