/* How an Engine does short accesses to windows: lower/windows.py, on the same tables.
 *
 *     origin    start_access, out of the ring: one run ──ACCESS──>  target: checks, reads, folds, writes
 *               the request has what was there   <────ACCESSED────
 *
 * The windows are Python's, which makes and frees them. Accesses of several messages, values with an index, locks, and
 * what must not overtake a longer access that waits are Python's, too.
 */
#include "_engine.h"

/* Instead of an error class. */
enum { FOR_PYTHON = -1, RAISED = -2 };

/* An access as it comes to its target. */
typedef struct {
    uint64_t window;
    int op, type, fetches;
    const char *runs, *data;
    int num_runs;
    int64_t num_data, num_bytes; /* num_bytes: of all runs */
} Access;

/* ---- the target ---- */

/* Whether a run lies within one region of a window. */
static int region_holds(PyObject *regions, uint64_t base, int64_t offset, int64_t num_bytes) {
    PyObject *start, *size;
    Py_ssize_t position = 0;
    /* Nothing that another rank says may overflow. */
    __int128 begin = (__int128)base + offset, end = begin + num_bytes;
    while (PyDict_Next(regions, &position, &start, &size)) {
        __int128 low = PyLong_AsUnsignedLongLong(start), high = low + PyLong_AsLongLong(size);
        if (low <= begin && end <= high) return 1;
    }
    return 0;
}

/* Where displacements of a window count from; an error class if it may not be accessed so. */
static int find_place(Engine *e, const Access *access, uint64_t *base) {
    PyObject *window = find_in(e->windows, access->window);
    if (window == NULL) return PyErr_Occurred() ? RAISED : e->err_win;
    PyObject *value = PyObject_GetAttrString(window, "base"), *regions = PyObject_GetAttrString(window, "regions");
    int error = value == NULL || regions == NULL ? RAISED : 0;
    *base = error ? 0 : PyLong_AsUnsignedLongLong(value);
    for (int i = 0; !error && i < access->num_runs; i++) {
        const char *run = access->runs + (size_t)i * RUN_BYTES;
        if (!region_holds(regions, *base, read_i64(run), read_i64(run + 8))) error = e->err_rma_range;
    }
    Py_XDECREF(value);
    Py_XDECREF(regions);
    return PyErr_Occurred() ? RAISED : error;
}

/* Between the runs and one run of ours; an error class. */
static int move_runs(Engine *e, const Access *access, uint64_t base, char *here, int outwards) {
    for (int i = 0; i < access->num_runs; i++) {
        const char *run = access->runs + (size_t)i * RUN_BYTES;
        uint64_t address = base + read_u64(run);
        int64_t num_bytes = read_i64(run + 8);
        char *place = in_arena(e, address, num_bytes);
        if (place != NULL) {
            memcpy(outwards ? place : here, outwards ? here : place, (size_t)num_bytes);
        } else if (carry_memory(e, address, here, num_bytes, outwards)) {
            if (!PyErr_ExceptionMatches(PyExc_OSError)) return RAISED;
            PyErr_Clear();
            return e->err_other;
        }
        here += num_bytes;
    }
    return 0;
}

/* What an access leaves in the place of `old`, into `new`; an error class. */
static int fold(Engine *e, const Access *access, const char *old, char *new) {
    _Alignas(16) char data[EAGER_BYTES];
    int64_t num_bytes = access->num_bytes;
    if (access->op == COMPARE_AND_SWAP) {
        if (access->num_data != 2 * num_bytes) return e->err_other;
        int is_expected = memcmp(access->data + num_bytes, old, (size_t)num_bytes) == 0;
        memcpy(new, is_expected ? access->data : old, (size_t)num_bytes);
        return 0;
    }
    if (access->num_data != num_bytes) return e->err_other;
    if (access->op == REPLACE) {
        memcpy(new, access->data, (size_t)num_bytes);
        return 0;
    }
    int64_t extent = e->extent[access->type];
    if (num_bytes % extent) return e->err_other;
    int (*reduce)(const void *, void *, int, Handle, Handle) = e->function[FN_REDUCE_LOCAL];
    memcpy(data, access->data, (size_t)num_bytes);
    memcpy(new, old, (size_t)num_bytes);
    if (num_bytes == 0) return 0;
    return reduce(data, new, (int)(num_bytes / extent), e->type[access->type], e->op[access->op]) ? e->err_op : 0;
}

/* Do it, as `_carry_out` does in Python: an error class. `old` has room for EAGER_BYTES. */
static int carry_out(Engine *e, const Access *access, char *old) {
    _Alignas(16) char new[EAGER_BYTES];
    uint64_t base;
    int folds = access->op < REPLACE;
    if (folds && (access->op >= e->num_ops || access->type >= e->num_types || !e->extent[access->type])) return FOR_PYTHON;
    int error = find_place(e, access, &base);
    if (!error && (access->fetches || (access->op != REPLACE && access->op != NO_OP)))
        error = move_runs(e, access, base, old, 0);
    if (error || access->op == NO_OP) return error;
    error = fold(e, access, old, new);
    return error ? error : move_runs(e, access, base, new, 1);
}

/* Whether this is an access that a lower half of ours may have sent; `payload` is its runs and data. */
static int take_access(Engine *e, const Header *header, const char *payload, Access *access) {
    int word = header->tag, num_runs = header->pid;
    int64_t num_payload = (int64_t)header->num_bytes;
    if (num_payload < 0 || num_payload > EAGER_BYTES || num_runs < 0 || num_runs > num_payload / RUN_BYTES) return 0;
    *access = (Access){.window = header->comm, .op = word & 0xFF, .type = word >> 8 & 0xFF, .fetches = word >> 16 != 0,
                       .runs = payload, .num_runs = num_runs, .data = payload + (size_t)num_runs * RUN_BYTES,
                       .num_data = num_payload - (int64_t)num_runs * RUN_BYTES};
    for (int i = 0; i < num_runs; i++) {
        int64_t num_bytes = read_i64(payload + (size_t)i * RUN_BYTES + 8);
        if (num_bytes < 0 || num_bytes > EAGER_BYTES - access->num_bytes) return 0;
        access->num_bytes += num_bytes;
    }
    return access->op <= COMPARE_AND_SWAP && access->type < e->num_types;
}

int hear_access(Engine *e, const Header *header, const char *payload) {
    _Alignas(16) char old[EAGER_BYTES];
    Access access;
    if (!take_access(e, header, payload, &access)) return 0;
    int error = carry_out(e, &access, old);
    if (error < 0) return error == FOR_PYTHON ? 0 : -1;
    int64_t num_bytes = error || !access.fetches ? 0 : access.num_bytes;
    uint64_t fields[7] = {header->comm, (uint32_t)error, ACCESSED, header->request, (uint64_t)num_bytes, 0, header->address};
    return send_wire(e, header->source, fields, old, num_bytes) ? -1 : 1;
}

/* ---- the origin ---- */

/* What there was goes to the program with the request's completion. */
static int finish_access(Engine *e, Request *request, int error, const char *old, int64_t num_bytes) {
    request->error = error || num_bytes == request->num_bytes ? error : e->err_other;
    request->message_bytes = request->error ? 0 : num_bytes;
    if (request->message_bytes) {
        PyObject *payload = PyBytes_FromStringAndSize(old, num_bytes);
        if (payload == NULL) return -1;
        set_object(&request->payload, payload);
        Py_DECREF(payload);
    }
    return complete(e, request);
}

/* Note in Python's table of accesses under way that one is ours. */
static int note_access(Engine *e, uint64_t number) {
    PyObject *key = PyLong_FromUnsignedLongLong(number);
    int failed = key == NULL || PyDict_SetItem(e->accesses, key, Py_None);
    Py_XDECREF(key);
    return failed ? -1 : 0;
}

int hear_accessed(Engine *e, const Header *header, const char *payload) {
    if (find_in(e->accesses, header->request) != Py_None) return PyErr_Occurred() ? -1 : 0;
    Request *request = find_request(e, header->request);
    if (request == NULL || request->peer != header->source || header->num_bytes > EAGER_BYTES) return PyErr_Occurred() ? -1 : 0;
    PyObject *key = PyLong_FromUnsignedLongLong(header->request);
    int failed = key == NULL || PyDict_DelItem(e->accesses, key);
    Py_XDECREF(key);
    return failed || finish_access(e, request, header->tag, payload, (int64_t)header->num_bytes) ? -1 : 1;
}

int start_access(Engine *e, int slot, const char *call, int64_t num_bytes) {
    _Alignas(16) char old[EAGER_BYTES];
    uint64_t number = read_u64(call + 1), window = read_u64(call + 12);
    int target = read_i32(call + 20), fetches = call[11] != 0;
    int64_t num_payload = RUN_BYTES + (int64_t)read_u32(call + 32);
    const char *payload = call + START_ACCESS_BYTES - RUN_BYTES;
    Header header = {.comm = window, .request = number, .num_bytes = (uint64_t)num_payload, .what = ACCESS, .source = e->rank,
                     .tag = (uint8_t)call[9] | (uint8_t)call[10] << 8 | fetches << 16, .pid = 1};
    Access access;
    if (target < 0 || target >= e->size) return damaged(slot, "an access to rank %d of %d", target, e->size);
    if (num_bytes < START_ACCESS_BYTES - RUN_BYTES + num_payload)
        return damaged(slot, "an access with %lld bytes of data in %lld", (long long)num_payload - RUN_BYTES,
                       (long long)num_bytes - START_ACCESS_BYTES);
    PyObject *waiting = find_in(e->access_queues, (uint64_t)target);
    int is_first = waiting == NULL ? !PyErr_Occurred() : PyObject_Size(waiting) == 0;
    if (!is_first || !take_access(e, &header, payload, &access) || access.num_bytes == 0) return PyErr_Occurred() ? -1 : 0;
    int is_here = target == e->rank, error = is_here ? carry_out(e, &access, old) : 0;
    if (error < 0) return error == FOR_PYTHON ? 0 : -1;
    Request *request = start_request(e, number, e->word_window);
    if (request == NULL) return -1;
    request->comm = window;
    request->peer = target;
    request->address = read_u64(call + 24);
    request->num_bytes = fetches ? access.num_bytes : 0;
    if (is_here) return finish_access(e, request, error, old, error ? 0 : request->num_bytes) ? -1 : 1;
    uint64_t fields[7] = {window, (uint32_t)header.tag, ACCESS, number, (uint64_t)num_payload, 1, 0};
    return note_access(e, number) || send_wire(e, target, fields, payload, num_payload) ? -1 : 1;
}
