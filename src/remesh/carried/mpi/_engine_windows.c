/* How an Engine serves accesses to windows, and starts short ones.
 *
 *     origin    start_access, out of the ring: one run ──ACCESS──>  target: checks, reads, folds, writes
 *               the request has what was there   <────ACCESSED────
 *
 * The windows are Python's, which makes and frees them. Accesses of several messages, and what must not overtake one that
 * waits, are begun by lower/windows.py. What an access leaves behind:
 *
 *     old = old (op) data        and, if the access fetches, what `old` was goes back to the origin
 */
#include "_engine.h"

/* Instead of an error class. */
enum { RAISED = -1 };

/* An access as it comes to its target. */
typedef struct {
    uint64_t window;
    int op, type, fetches;
    const Run *runs;
    const char *data;
    int num_runs;
    int64_t num_data, num_bytes; /* num_bytes: of all runs */
} Access;

/* ---- the target ---- */

/* Whether a run lies within regions of a window, one behind the other: a program may attach its memory in parts. */
static int regions_hold(PyObject *regions, uint64_t base, int64_t offset, int64_t num_bytes) {
    /* Nothing that another rank says may overflow. */
    __int128 begin = (__int128)base + offset, end = begin + num_bytes;
    for (int has_found = 1; has_found;) {
        PyObject *start, *size;
        Py_ssize_t position = 0;
        has_found = 0;
        while (PyDict_Next(regions, &position, &start, &size)) {
            __int128 low = PyLong_AsUnsignedLongLong(start), high = low + PyLong_AsLongLong(size);
            if (low <= begin && end <= high) return 1;
            if (low > begin || begin >= high) continue;
            begin = high;
            has_found = 1;
        }
    }
    return 0;
}

/* Where displacements of a window count from; an error class if it may not be accessed so. */
static int find_place(Engine *e, const Access *access, uint64_t *base) {
    *base = 0;
    PyObject *window = table_find(e->windows, access->window);
    if (window == NULL) return e->err_win;
    PyObject *value = PyObject_GetAttrString(window, "base"), *regions = PyObject_GetAttrString(window, "regions");
    int error = value == NULL || regions == NULL ? RAISED : 0;
    if (!error) *base = PyLong_AsUnsignedLongLong(value);
    for (int i = 0; !error && i < access->num_runs; i++) {
        const Run *run = &access->runs[i];
        if (!regions_hold(regions, *base, run->offset, run->num_bytes)) error = e->err_rma_range;
    }
    Py_XDECREF(value);
    Py_XDECREF(regions);
    return PyErr_Occurred() ? RAISED : error;
}

/* Between the runs and one run of ours; an error class. */
static int move_runs(Engine *e, const Access *access, uint64_t base, char *here, int outwards) {
    for (int i = 0; i < access->num_runs; i++) {
        uint64_t address = base + (uint64_t)access->runs[i].offset;
        int64_t num_bytes = access->runs[i].num_bytes;
        char *place = in_arena(e, address, num_bytes);
        if (place != NULL) {
            memcpy(outwards ? place : here, outwards ? here : place, (size_t)num_bytes);
        } else if (carry_memory(e, address, here, num_bytes, outwards)) {
            /* Of a program that has ended it is for the rank to say how. */
            if (!PyErr_ExceptionMatches(PyExc_OSError) || PyErr_ExceptionMatches(PyExc_ProcessLookupError)) return RAISED;
            PyErr_Clear();
            return e->err_other;
        }
        here += num_bytes;
    }
    return 0;
}

/* Whether the first of two values is smaller (-1) or larger (1); `letter` as in PAIR_FORMATS. */
static int compare_values(char letter, const char *one, const char *other) {
    if (letter == 'f' || letter == 'd') {
        double values[2];
        float floats[2];
        memcpy(&floats[0], one, sizeof *floats), memcpy(&floats[1], other, sizeof *floats);
        values[0] = floats[0], values[1] = floats[1];
        if (letter == 'd') memcpy(&values[0], one, sizeof *values), memcpy(&values[1], other, sizeof *values);
        return (values[0] > values[1]) - (values[0] < values[1]);
    }
    if (letter == 'g') {
        long double values[2];
        memcpy(&values[0], one, sizeof *values), memcpy(&values[1], other, sizeof *values);
        return (values[0] > values[1]) - (values[0] < values[1]);
    }
    int64_t values[2];
    for (int i = 0; i < 2; i++) {
        const char *from = i ? other : one;
        int16_t number;
        memcpy(&number, from, sizeof number);
        values[i] = letter == 'h' ? number : read_i32(from);
        if (letter == 'q') memcpy(&values[i], from, sizeof values[i]);
    }
    return (values[0] > values[1]) - (values[0] < values[1]);
}

/* MINLOC or MAXLOC on values with an index, which travel without gaps; of equal values the smaller index stays. The real
 * MPI does not fold them: their gaps differ from MPI to MPI.
 */
static int fold_pairs(Engine *e, const Access *access, char *new) {
    char letter = e->pair[access->type];
    size_t width = letter == 'h' ? 2 : letter == 'q' || letter == 'd' ? 8 : letter == 'g' ? 16 : 4, whole = width + 4;
    if ((access->op != OP_MINLOC && access->op != OP_MAXLOC) || access->num_bytes % (int64_t)whole) return e->err_other;
    for (size_t at = 0; at < (size_t)access->num_bytes; at += whole) {
        const char *data = access->data + at;
        int order = compare_values(letter, data, new + at);
        if (access->op == OP_MAXLOC) order = -order;
        if (order < 0 || (order == 0 && read_i32(data + width) < read_i32(new + at + width))) memcpy(new + at, data, whole);
    }
    return 0;
}

/* What an access leaves in the place of `old`, into `new`; an error class. */
static int fold(Engine *e, const Access *access, const char *old, char *new) {
    _Alignas(16) char data[EAGER_BYTES];
    int64_t num_bytes = access->num_bytes;
    if (access->op == OP_COMPARE_AND_SWAP) {
        if (access->num_data != 2 * num_bytes) return e->err_other;
        int is_expected = memcmp(access->data + num_bytes, old, (size_t)num_bytes) == 0;
        memcpy(new, is_expected ? access->data : old, (size_t)num_bytes);
        return 0;
    }
    if (access->num_data != num_bytes) return e->err_other;
    memcpy(new, access->op == OP_REPLACE ? access->data : old, (size_t)num_bytes);
    if (access->op == OP_REPLACE || num_bytes == 0) return 0;
    if (e->pair[access->type]) return fold_pairs(e, access, new);
    int64_t extent = e->extent[access->type];
    if (access->op >= e->num_ops || extent == 0) return e->err_op;
    if (num_bytes % extent) return e->err_other;
    int (*reduce)(const void *, void *, int, Handle, Handle) = e->function[FN_REDUCE_LOCAL];
    memcpy(data, access->data, (size_t)num_bytes);
    return reduce(data, new, (int)(num_bytes / extent), e->type[access->type], e->op[access->op]) ? e->err_op : 0;
}

/* Do it: an error class. `old` has room for EAGER_BYTES. */
static int carry_out(Engine *e, const Access *access, char *old) {
    _Alignas(16) char new[EAGER_BYTES];
    uint64_t base;
    int error = find_place(e, access, &base);
    if (!error && (access->fetches || (access->op != OP_REPLACE && access->op != OP_NO_OP)))
        error = move_runs(e, access, base, old, 0);
    if (error || access->op == OP_NO_OP) return error;
    error = fold(e, access, old, new);
    return error ? error : move_runs(e, access, base, new, 1);
}

/* Whether this is an access that a lower half of ours may have sent; `payload` is its runs and data. */
static int take_access(Engine *e, const Header *header, const char *payload, Access *access) {
    int word = header->tag, num_runs = header->pid;
    int64_t num_payload = (int64_t)header->num_bytes;
    if (num_payload < 0 || num_payload > EAGER_BYTES || num_runs < 0 || num_runs > num_payload / (int64_t)sizeof(Run)) return 0;
    *access = (Access){.window = header->comm, .op = word & 0xFF, .type = word >> 8 & 0xFF, .fetches = word >> 16 != 0,
                       .runs = (const Run *)payload, .num_runs = num_runs, .data = payload + num_runs * sizeof(Run),
                       .num_data = num_payload - num_runs * (int64_t)sizeof(Run)};
    for (int i = 0; i < num_runs; i++) {
        int64_t num_bytes = access->runs[i].num_bytes;
        if (num_bytes < 0 || num_bytes > EAGER_BYTES - access->num_bytes) return 0;
        access->num_bytes += num_bytes;
    }
    return access->op <= OP_COMPARE_AND_SWAP && access->type < e->num_types;
}

int serve_access(Engine *e, const Header *header, const char *payload, char *old, int64_t *fetched) {
    Access access;
    int error = take_access(e, header, payload, &access) ? carry_out(e, &access, old) : e->err_other;
    *fetched = error || !access.fetches ? 0 : access.num_bytes;
    return error;
}

int hear_access(Engine *e, const Header *header, const char *payload) {
    _Alignas(16) char old[EAGER_BYTES];
    int64_t num_bytes;
    int error = serve_access(e, header, payload, old, &num_bytes);
    if (error < 0) return -1;
    uint64_t fields[7] = {header->comm, (uint32_t)error, WHAT_ACCESSED, header->request, (uint64_t)num_bytes, 0, header->address};
    return send_wire(e, header->source, fields, old, num_bytes);
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
    complete(e, request);
    return 0;
}

int hear_accessed(Engine *e, const Header *header, const char *payload) {
    if (table_find(e->accesses, header->request) != Py_None) return 0;
    Request *request = find_request(e, header->request);
    if (request == NULL || request->peer != header->source || header->num_bytes > EAGER_BYTES) return 0;
    table_remove(e->accesses, header->request);
    return finish_access(e, request, header->tag, payload, (int64_t)header->num_bytes) ? -1 : 1;
}

int start_access(Engine *e, int slot, const StartAccessCall *call, int64_t num_bytes) {
    _Alignas(16) char old[EAGER_BYTES];
    int64_t num_payload = (int64_t)sizeof(Run) + call->num_data;
    /* The run and the data behind it stand as they do in a wire message. */
    const char *payload = (const char *)&call->offset;
    Header header = {.comm = call->window, .request = call->request, .num_bytes = (uint64_t)num_payload, .what = WHAT_ACCESS,
                     .source = e->rank, .tag = call->op | call->type << 8 | (call->fetches != 0) << 16, .pid = 1};
    Access access;
    if (call->target < 0 || call->target >= e->size)
        return damaged(slot, "an access to rank %d of %d", call->target, e->size);
    if (num_bytes < (int64_t)sizeof *call + call->num_data)
        return damaged(slot, "an access with %lld bytes of data in %lld", (long long)call->num_data,
                       (long long)num_bytes - (int64_t)sizeof *call);
    PyObject *waiting = table_find(e->access_queues, (uint64_t)call->target);
    int is_first = waiting == NULL || PyObject_Size(waiting) == 0;
    if (!is_first || !take_access(e, &header, payload, &access) || access.num_bytes == 0) return PyErr_Occurred() ? -1 : 0;
    int is_here = call->target == e->rank, error = is_here ? carry_out(e, &access, old) : 0;
    if (error < 0) return -1;
    Request *request = start_request(e, call->request, e->word_window);
    if (request == NULL) return -1;
    request->comm = call->window;
    request->peer = call->target;
    request->address = call->result;
    request->num_bytes = access.fetches ? access.num_bytes : 0;
    if (is_here) return finish_access(e, request, error, old, error ? 0 : request->num_bytes) ? -1 : 1;
    uint64_t fields[7] = {header.comm, (uint32_t)header.tag, WHAT_ACCESS, header.request, (uint64_t)num_payload, 1, 0};
    /* None in Python's table of accesses under way: it is ours. */
    return table_set(e->accesses, header.request, Py_None) || send_wire(e, request->peer, fields, payload, num_payload) ? -1 : 1;
}
