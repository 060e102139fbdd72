/* How an Engine keeps the locks of windows, on the lists of lower/exposure.py.
 *
 *     origin    lock ────LOCK────>  target: a queue for each window
 *               its slot's reply    <────LOCKED────  when it is the origin's turn
 *               unlock ────UNLOCK────>  one holder less; the next are told
 *
 * Who asks for a lock gets it when all who hold it may share it with him and none waits: so waiting ranks are served
 * in order of arrival, and a row of sharers never keeps an exclusive lock away (MPI 4.1, section 12.5.3).
 */
#include "_engine.h"

/* A list of the lock of a window on this rank, a new reference; NULL where there is no such window. */
static PyObject *list_of_lock(Engine *e, uint64_t number, const char *name) {
    PyObject *window = table_find(e->windows, number);
    PyObject *locks = window == NULL ? NULL : PyObject_GetAttrString(window, "locks");
    PyObject *list = locks == NULL ? NULL : PyObject_GetAttrString(locks, name);
    Py_XDECREF(locks);
    return list;
}

/* An attribute of an asker, as an integer. */
static uint64_t said_by(PyObject *asker, const char *name) {
    PyObject *value = PyObject_GetAttrString(asker, name);
    uint64_t number = value == NULL ? 0 : PyLong_AsUnsignedLongLong(value);
    Py_XDECREF(value);
    return number;
}

/* The lock of a window is a rank's, or `error` says why not. */
static int tell_locked(Engine *e, uint64_t window, int error, int rank, uint64_t number) {
    if (rank != e->rank) {
        uint64_t fields[7] = {window, (uint32_t)error, WHAT_LOCKED, number, 0, 0, 0};
        return send_wire(e, rank, fields, NULL, 0);
    }
    Request *request = find_request(e, number);
    if (request == NULL) return PyErr_SetString(PyExc_KeyError, "a lock of no request"), -1;
    request->error = error;
    complete(e, request);
    return 0;
}

/* Whether those who hold a lock let one more have it. */
static int may_have(PyObject *holders, PyObject *asker) {
    if (PyList_Size(holders) == 0) return 1;
    return !said_by(asker, "exclusive") && !said_by(PyList_GetItem(holders, 0), "exclusive");
}

/* Those whose turn it is have the lock. */
static int grant(Engine *e, uint64_t window, PyObject *holders, PyObject *waiting) {
    while (PyList_Size(waiting)) {
        PyObject *asker = PyList_GetItem(waiting, 0);
        int is_next = may_have(holders, asker), rank = (int)said_by(asker, "rank");
        uint64_t number = said_by(asker, "request");
        if (PyErr_Occurred()) return -1;
        if (!is_next) return 0;
        if (PyList_Append(holders, asker) || PyList_SetSlice(waiting, 0, 1, NULL)) return -1;
        if (tell_locked(e, window, 0, rank, number)) return -1;
    }
    return 0;
}

int hear_lock(Engine *e, const Header *header) {
    PyObject *holders = list_of_lock(e, header->comm, "holders"), *waiting = list_of_lock(e, header->comm, "waiting");
    int failed = -1;
    if (holders == NULL || waiting == NULL) {
        if (!PyErr_Occurred()) failed = tell_locked(e, header->comm, e->err_win, header->source, header->request);
    } else {
        PyObject *is_exclusive = header->tag ? Py_True : Py_False;
        PyObject *asker = PyObject_CallFunction(
            e->asker, "iOK", header->source, is_exclusive, (unsigned long long)header->request);
        if (asker != NULL && PyList_Append(waiting, asker) == 0) failed = grant(e, header->comm, holders, waiting);
        Py_XDECREF(asker);
    }
    Py_XDECREF(holders);
    Py_XDECREF(waiting);
    return failed;
}

int hear_unlock(Engine *e, const Header *header) {
    PyObject *holders = list_of_lock(e, header->comm, "holders"), *waiting = list_of_lock(e, header->comm, "waiting");
    /* The lock of a window that has been freed since went with the window. */
    int failed = PyErr_Occurred() != NULL;
    for (Py_ssize_t i = holders == NULL ? -1 : PyList_Size(holders) - 1; !failed && i >= 0; i--) {
        int rank = (int)said_by(PyList_GetItem(holders, i), "rank");
        failed = PyErr_Occurred() || (rank == header->source && PyList_SetSlice(holders, i, i + 1, NULL));
    }
    if (!failed && holders != NULL) failed = grant(e, header->comm, holders, waiting);
    Py_XDECREF(holders);
    Py_XDECREF(waiting);
    return failed ? -1 : 0;
}

int hear_locked(Engine *e, const Header *header) {
    Request *request = find_request(e, header->request);
    int is_lock = request != NULL && request->kind == e->word_window && request->tag == ASKS_FOR_LOCK;
    if (!is_lock || request->done || request->peer != header->source)
        return misfit(header, "a lock that was not asked for: request", (int64_t)header->request);
    request->error = header->tag;
    complete(e, request);
    return 0;
}

Request *ask_for_lock(Engine *e, const LockCall *call) {
    Request *request = start_request(e, 0, e->word_window);
    if (request == NULL) return NULL;
    request->comm = call->window;
    request->peer = call->target;
    request->tag = ASKS_FOR_LOCK;
    Header header = {.comm = call->window, .tag = call->exclusive != 0, .source = e->rank, .request = request->number};
    if (call->target == e->rank) return hear_lock(e, &header) ? NULL : request;
    uint64_t fields[7] = {header.comm, (uint64_t)header.tag, WHAT_LOCK, header.request, 0, 0, 0};
    return send_wire(e, call->target, fields, NULL, 0) ? NULL : request;
}

int give_lock_back(Engine *e, const UnlockCall *call) {
    Header header = {.comm = call->window, .source = e->rank};
    if (call->target == e->rank) return hear_unlock(e, &header);
    uint64_t fields[7] = {call->window, 0, WHAT_UNLOCK, 0, 0, 0, 0};
    return send_wire(e, call->target, fields, NULL, 0);
}
