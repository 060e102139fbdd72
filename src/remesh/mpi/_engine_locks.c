/* How an Engine does locks of windows that nobody waits for: lower/exposure.py and windows.py, on the same lists.
 *
 *     origin    lock ────LOCK────>  target: the origin is one more holder, if those who are let it be
 *               its slot's reply    <────LOCKED────
 *               unlock ────UNLOCK────>  one holder less
 *
 * Where somebody waits, whose turn it is is Python's to say; so is what a rank asks of itself.
 */
#include "_engine.h"

/* A list of the lock of a window on this rank, a new reference; NULL where there is no such window. */
static PyObject *list_of_lock(Engine *e, uint64_t number, const char *name) {
    PyObject *window = find_in(e->windows, number);
    PyObject *locks = window == NULL ? NULL : PyObject_GetAttrString(window, "locks");
    PyObject *list = locks == NULL ? NULL : PyObject_GetAttrString(locks, name);
    Py_XDECREF(locks);
    return list;
}

/* An attribute of an asker, as an integer. */
static long said_by(PyObject *asker, const char *name) {
    PyObject *value = PyObject_GetAttrString(asker, name);
    long number = value == NULL ? -1 : PyLong_AsLong(value);
    Py_XDECREF(value);
    return number;
}

/* Who holds the lock of a window that nobody waits for; NULL, perhaps with an exception, if there is no such lock. */
static PyObject *holders_alone(Engine *e, uint64_t window) {
    PyObject *waiting = list_of_lock(e, window, "waiting");
    int is_wanted = waiting == NULL || PyList_Size(waiting) != 0;
    Py_XDECREF(waiting);
    return is_wanted ? NULL : list_of_lock(e, window, "holders");
}

/* Whether those who hold a lock let one more have it, or -1. */
static int may_have(PyObject *holders, int is_exclusive) {
    if (PyList_Size(holders) == 0) return 1;
    if (is_exclusive) return 0;
    long alone = said_by(PyList_GetItem(holders, 0), "exclusive");
    return PyErr_Occurred() ? -1 : !alone;
}

int hear_lock(Engine *e, const Header *header) {
    PyObject *holders = holders_alone(e, header->comm);
    if (holders == NULL) return PyErr_Occurred() ? -1 : 0;
    int granted = may_have(holders, header->tag != 0);
    if (granted > 0) {
        PyObject *is_exclusive = header->tag ? Py_True : Py_False;
        PyObject *asker = PyObject_CallFunction(
            e->asker, "iOK", header->source, is_exclusive, (unsigned long long)header->request);
        uint64_t fields[7] = {header->comm, 0, LOCKED, header->request, 0, 0, 0};
        if (asker == NULL || PyList_Append(holders, asker) || send_wire(e, header->source, fields, NULL, 0)) granted = -1;
        Py_XDECREF(asker);
    }
    Py_DECREF(holders);
    return granted;
}

int hear_unlock(Engine *e, const Header *header) {
    PyObject *holders = holders_alone(e, header->comm);
    if (holders == NULL) return PyErr_Occurred() ? -1 : 0;
    int failed = 0;
    for (Py_ssize_t i = PyList_Size(holders) - 1; !failed && i >= 0; i--) {
        long rank = said_by(PyList_GetItem(holders, i), "rank");
        failed = PyErr_Occurred() || (rank == header->source && PyList_SetSlice(holders, i, i + 1, NULL));
    }
    Py_DECREF(holders);
    return failed ? -1 : 1;
}

int hear_locked(Engine *e, const Header *header) {
    Request *request = find_request(e, header->request);
    int is_lock = request != NULL && request->kind == e->word_window && request->tag == ASKS_FOR_LOCK;
    if (!is_lock || request->done || request->peer != header->source) return PyErr_Occurred() ? -1 : 0;
    request->error = header->tag;
    return complete(e, request) ? -1 : 1;
}

Request *ask_for_lock(Engine *e, const char *call) {
    int target = read_i32(call + 10);
    Request *request = start_request(e, 0, e->word_window);
    if (request == NULL) return NULL;
    request->comm = read_u64(call + 2);
    request->peer = target;
    request->tag = ASKS_FOR_LOCK;
    uint64_t fields[7] = {request->comm, call[14] != 0, LOCK, request->number, 0, 0, 0};
    return send_wire(e, target, fields, NULL, 0) ? NULL : request;
}

int give_lock_back(Engine *e, const char *call) {
    uint64_t fields[7] = {read_u64(call + 1), 0, UNLOCK, 0, 0, 0, 0};
    return send_wire(e, read_i32(call + 9), fields, NULL, 0);
}
