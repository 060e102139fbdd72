/* What an Engine knows: requests, the replies of those that are over, and the two queues, matched by MPI's rule. */
#include "_engine.h"
#include <stdio.h>
#include <stdlib.h>

void answer(Engine *e, int slot) {
    char *at = slot_at(e, slot);
    Word *reply = (Word *)(at + REPLY);
    atomic_store(reply, atomic_load_explicit((Word *)at, memory_order_relaxed));
    if (atomic_load((Word *)(at + WAITING))) futex_wake(reply);
}

int mpi_failed(const char *what, int code) {
    PyErr_Format(PyExc_RuntimeError, "%s on the real MPI: error %d; see what the library printed", what, code);
    return -1;
}

void *with_room(void *items, size_t count, size_t *room, size_t item_bytes) {
    if (count < *room) return items;
    size_t larger = *room ? 2 * *room : 16;
    void *moved = realloc(items, larger * item_bytes);
    if (moved == NULL) return PyErr_NoMemory();
    *room = larger;
    return moved;
}

/* ---- requests ---- */

Request *find_request(Engine *e, uint64_t number) { return (Request *)table_find(e->by_number, number); }

void forget(Engine *e, const Request *request) { table_remove(e->by_number, request->number); }

void complete(Engine *e, Request *request) {
    request->done = 1;
    e->recheck = 1;
    if (request->detached) forget(e, request);
}

/* A new request under its number (0: the next one); borrowed from the table. */
Request *start_request(Engine *e, uint64_t number, PyObject *kind) {
    Request *request = new_request();
    if (request == NULL) return NULL;
    request->number = number ? number : (*e->next_number)++;
    set_object(&request->kind, kind);
    int failed = table_set(e->by_number, request->number, (PyObject *)request);
    Py_DECREF((PyObject *)request);
    return failed ? NULL : request;
}

/* ---- replies ---- */

/* How a completion's payload goes into a reply with so much room: its bytes, or -1 where that is for Python. */
static int64_t inline_bytes(const Request *request, int64_t room, uint8_t *where) {
    *where = PAYLOAD_NONE;
    if (request->cancelled) return *where = PAYLOAD_CANCELLED, 0;
    if (request->written) return *where = PAYLOAD_WRITTEN, 0;
    if (request->payload == NULL || request->payload == Py_None) return 0;
    int64_t length = PyObject_Size(request->payload);
    if (request->num_bytes != PARCEL && length > request->num_bytes) length = request->num_bytes;
    *where = PAYLOAD_INLINE;
    return length > EAGER_BYTES || length > room ? -1 : length;
}

static char *payload_bytes(const Request *request) {
    PyObject *payload = request->payload;
    return PyBytes_Check(payload) ? PyBytes_AsString(payload) : PyByteArray_AsString(payload);
}

static char *put_completion(char *to, const Request *request, uint8_t where, int64_t length) {
    *(Completion *)to = (Completion){.source = request->source, .tag = request->message_tag, .error = request->error,
                                     .num_bytes = request->message_bytes, .where = where};
    to += sizeof(Completion);
    if (length) memcpy(to, payload_bytes(request), length);
    return to + length;
}

/* The reply of one blocking operation that is over. */
int tell_single(Engine *e, int slot, Request *request) {
    char *body = slot_at(e, slot) + BODY;
    uint8_t where;
    int64_t length = inline_bytes(request, (int64_t)(BODY_BYTES - sizeof(RequestReply) - sizeof(Completion)), &where);
    if (length < 0) {
        e->attention = 1;
        PyObject *done = PyObject_CallFunction(e->tell, "iO", slot, request);
        if (done == NULL) return -1;
        Py_DECREF(done);
    } else {
        *(RequestReply *)body = (RequestReply){OK, 0};
        put_completion(body + sizeof(RequestReply), request, where, length);
        forget(e, request);
    }
    answer(e, slot);
    return 0;
}

void fail(Engine *e, int slot, const char *what, int code) {
    char *body = slot_at(e, slot) + BODY, text[96];
    int length = snprintf(text, sizeof text, "%s on the real MPI: error %d", what, code);
    *(Failure *)body = (Failure){FAILED, e->err_other, length};
    memcpy(body + sizeof(Failure), text, length);
    answer(e, slot);
}

enum { ENDED_BYTES = sizeof(Index) + sizeof(Completion) };

/* Of the requests that one `wait` asks for, those that are over and are to be told. */
typedef struct {
    int64_t count;
    int64_t room;    /* bytes that their payloads leave of its reply; below 0: the reply cannot have all of them */
    int has_unplaced; /* one has a payload whose place in the program is not known */
} Over;

static Over count_over(Engine *e, const uint64_t *asked, uint32_t count, uint8_t mode) {
    Over over = {0, BODY_BYTES - (int64_t)sizeof(WaitReply), 0};
    uint8_t where;
    for (uint32_t i = 0; i < count && !(mode == MODE_ANY && over.count); i++) {
        Request *request = find_request(e, asked[i]);
        if (request != NULL && !request->done) continue;
        over.count++;
        over.room -= ENDED_BYTES;
        if (request == NULL) continue;
        int64_t length = inline_bytes(request, EAGER_BYTES, &where);
        over.room -= length < 0 ? BODY_BYTES : length;
        over.has_unplaced |= request->num_bytes == PARCEL;
    }
    return over;
}

/* Choose how a completion's payload reaches the program: by the reply, which has so much room for it, or else into its
 * buffer now. How many bytes the reply gets, or -1 with an exception.
 */
static int64_t place_payload(Engine *e, const Request *request, int64_t room, uint8_t *where) {
    int64_t length = inline_bytes(request, room, where);
    if (length >= 0) return length;
    *where = PAYLOAD_WRITTEN;
    length = PyObject_Size(request->payload);
    if (length > request->num_bytes) length = request->num_bytes;
    return carry_memory(e, request->address, payload_bytes(request), length, 1) ? -1 : 0;
}

/* Write how so many of them ended into a reply. Who is asked for twice is forgotten with the first answer, and unknown
 * then: so all are looked for again.
 */
static int put_ended(Engine *e, char *to, const uint64_t *asked, uint32_t count, int64_t over) {
    const char *end = to + BODY_BYTES - sizeof(WaitReply);
    uint8_t where;
    for (uint32_t i = 0; i < count && over; i++) {
        Request *request = find_request(e, asked[i]);
        if (request != NULL && !request->done) continue;
        int64_t room = end - to - over-- * ENDED_BYTES;
        to = put_32(to, i);
        if (request == NULL) {
            *(Completion *)to = (Completion){.error = e->err_request};
            to += sizeof(Completion);
        } else {
            int64_t length = place_payload(e, request, room, &where);
            if (length < 0) return -1;
            to = put_completion(to, request, where, length);
            forget(e, request);
        }
    }
    return 0;
}

/* Whether one of the requests that a slot waits for is not over, or -1: with many, few are looked at again. */
static int is_one_open(Engine *e, int slot, const uint64_t *asked, uint32_t count) {
    for (uint32_t *at = &e->open_in[slot]; *at < count; ++*at) {
        Request *request = find_request(e, asked[*at]);
        if (request != NULL && !request->done) return 1;
    }
    return 0;
}

/* The reply of ``wait`` if what it asks for is over: 1, or 0, or -1 with an exception. */
int try_wait(Engine *e, int slot) {
    char *body = slot_at(e, slot) + BODY;
    const WaitCall *call = (const WaitCall *)body;
    uint8_t mode = call->mode;
    uint32_t count = call->count;
    /* Copied, for the reply is written over them. */
    uint64_t asked[(BODY_BYTES - sizeof(WaitCall)) / 8];
    if (count > sizeof asked / sizeof *asked)
        return damaged(slot, "a wait for %u requests", count);
    memcpy(asked, call + 1, count * sizeof *asked);
    int is_open = mode == MODE_ALL ? is_one_open(e, slot, asked, count) : 0;
    if (is_open) return is_open < 0 ? -1 : 0;
    Over over = count_over(e, asked, count, mode);
    /* Modes ANY and SOME want one at least, ALL wants all. */
    if (mode == MODE_ALL ? over.count < count : over.count == 0) return 0;
    if (over.has_unplaced && over.room < 0) {
        e->attention = 1;
        PyObject *done = PyObject_CallFunction(e->tell_wait, "i", slot);
        if (done == NULL) return -1;
        Py_DECREF(done);
    } else {
        if (put_ended(e, body + sizeof(WaitReply), asked, count, over.count)) return -1;
        *(WaitReply *)body = (WaitReply){OK, (uint32_t)over.count};
    }
    answer(e, slot);
    return 1;
}

static int fits(int wanted_source, int wanted_tag, int source, int tag) {
    return (wanted_source == ANY || wanted_source == source) && (wanted_tag == ANY || wanted_tag == tag);
}

/* The message that a receive would take; borrowed, where it stands in its queue in `at`. NULL if there is none. */
static Arrived *find_arrived(Engine *e, uint64_t comm, int source, int tag, PyObject **queue, Py_ssize_t *at) {
    *queue = table_find(e->arrived, comm);
    Py_ssize_t length = *queue == NULL ? 0 : PyList_Size(*queue);
    for (*at = 0; *at < length; ++*at) {
        Arrived *message = (Arrived *)PyList_GetItem(*queue, *at);
        if (fits(source, tag, message->source, message->tag)) return message;
    }
    return NULL;
}

/* The reply of `probe` if its message is there: 1, or 0, or -1 with an exception. */
int try_probe(Engine *e, int slot) {
    char *body = slot_at(e, slot) + BODY;
    ProbeCall call = *(const ProbeCall *)body;
    PyObject *queue;
    Py_ssize_t at;
    Arrived *message = find_arrived(e, call.comm, call.source, call.tag, &queue, &at);
    if (message == NULL) return 0;
    /* Who takes the message out of the queue gets a number for it. */
    if (call.flags & FLAG_MATCHED) return serve_in_python(e, slot) ? -1 : 1;
    *(ProbeReply *)body = (ProbeReply){OK, 1, message->source, message->tag, message->num_bytes, 0};
    answer(e, slot);
    return 1;
}

/* Slots whose operation may be over now. */
int tell_waiting(Engine *e) {
    e->recheck = 0;
    for (uint32_t left = e->probes; left; left &= left - 1) {
        int slot = __builtin_ctz(left), found = try_probe(e, slot);
        if (found < 0) return -1;
        if (found) e->probes &= ~(1u << slot);
    }
    for (uint32_t left = e->singles | e->waits; left; left &= left - 1) {
        int slot = __builtin_ctz(left);
        uint32_t bit = 1u << slot;
        if (e->waits & bit) {
            int over = try_wait(e, slot);
            if (over < 0) return -1;
            if (over) e->waits &= ~bit;
            continue;
        }
        Request *request = find_request(e, e->single[slot]);
        if (request == NULL) return PyErr_SetString(PyExc_KeyError, "a slot waits for no request"), -1;
        if (!request->done) continue;
        e->singles &= ~bit;
        if (tell_single(e, slot, request)) return -1;
    }
    return 0;
}

/* ---- matching ----
 *
 * MPI's rule (MPI 4.1, section 3.5): a message that arrives goes to the oldest posted receive that fits it; a receive
 * that is posted takes the earliest message that fits. Both queues are lists of matching.py, by communicator, in order.
 */

static int append_to(Table *queues, uint64_t comm, PyObject *one) {
    PyObject *queue = table_find(queues, comm);
    if (queue != NULL) return PyList_Append(queue, one);
    queue = PyList_New(0);
    int failed = queue == NULL || PyList_Append(queue, one) || table_set(queues, comm, queue);
    Py_XDECREF(queue);
    return failed ? -1 : 0;
}

int post(Engine *e, const Request *request) {
    Posted *receive = new_posted();
    if (receive == NULL) return -1;
    receive->request = request->number;
    receive->comm = request->comm;
    receive->source = request->peer;
    receive->tag = request->tag;
    int failed = append_to(e->posted, receive->comm, (PyObject *)receive);
    Py_DECREF((PyObject *)receive);
    return failed;
}

char *gathered(const Request *request) {
    PyObject *payload = request->payload;
    return payload != NULL && PyByteArray_Check(payload) ? PyByteArray_AsString(payload) : NULL;
}

/* Have a place here for what the program's buffer is not known for, or too small. */
static int gather(Request *request, int64_t num_bytes) {
    PyObject *place = PyByteArray_FromStringAndSize(NULL, num_bytes);
    if (place == NULL) return -1;
    set_object(&request->payload, place);
    Py_DECREF(place);
    return 0;
}

/* What the program sends to itself. */
static int take_own(Engine *e, Request *request, const Arrived *message) {
    Request *send = find_request(e, message->sender_request);
    if (send == NULL) return PyErr_SetString(PyExc_KeyError, "a message of no send"), -1;
    if (gather(request, send->num_bytes)) return -1;
    if (send->num_bytes && carry_memory(e, send->address, gathered(request), send->num_bytes, 0)) return -1;
    complete(e, send);
    complete(e, request);
    return 0;
}

/* Note that a payload is to be asked for when the ranks are open. */
static int owe(Engine *e, Request *request, Arrived *message) {
    PyObject *pair = PyTuple_Pack(2, request, message);
    int failed = pair == NULL || PyList_Append(e->owed, pair);
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* An announced payload has a receive. */
static int bring(Engine *e, Request *request, Arrived *message) {
    if (e->closed) return owe(e, request, message);
    if (message->source == e->rank) return take_own(e, request, message);
    int has_room = request->num_bytes != PARCEL && request->num_bytes >= message->num_bytes;
    if (!has_room && gather(request, message->num_bytes)) return -1;
    int is_near = message->pid && e->neighbours[message->source];
    return (is_near ? take_directly : stream_in)(e, request, message);
}

static void note_match(Engine *e, Request *request, int source, int tag, int64_t num_bytes) {
    request->source = source;
    request->message_tag = tag;
    request->message_bytes = num_bytes;
    if (request->num_bytes != PARCEL && num_bytes > request->num_bytes) request->error = e->err_truncate;
}

static void give_payload(Engine *e, Request *request, PyObject *payload) {
    set_object(&request->payload, payload);
    complete(e, request);
}

int match(Engine *e, Request *request, Arrived *message) {
    note_match(e, request, message->source, message->tag, message->num_bytes);
    if (message->payload == NULL || message->payload == Py_None) return bring(e, request, message);
    give_payload(e, request, message->payload);
    return 0;
}

/* The oldest receive that fits a message, not posted any more: its request, borrowed; NULL if there is none, perhaps with
 * an exception.
 */
static Request *take_posted(Engine *e, uint64_t comm, int source, int tag) {
    PyObject *queue = table_find(e->posted, comm);
    Py_ssize_t length = queue == NULL ? 0 : PyList_Size(queue);
    for (Py_ssize_t i = 0; i < length; i++) {
        Posted *receive = (Posted *)PyList_GetItem(queue, i);
        if (!fits(receive->source, receive->tag, source, tag)) continue;
        Request *request = find_request(e, receive->request);
        if (request == NULL) return PyErr_SetString(PyExc_KeyError, "a receive of no request"), NULL;
        return PyList_SetSlice(queue, i, i + 1, NULL) ? NULL : request;
    }
    return NULL;
}

/* No receive waits for it, but perhaps a probe. */
static int keep_arrived(Engine *e, Arrived *message) {
    e->recheck |= e->probes != 0;
    return append_to(e->arrived, message->comm, (PyObject *)message);
}

int arrive(Engine *e, Arrived *message) {
    Request *request = take_posted(e, message->comm, message->source, message->tag);
    if (request != NULL) return match(e, request, message);
    return PyErr_Occurred() ? -1 : keep_arrived(e, message);
}

static int keep_short(Engine *e, uint64_t comm, int source, int tag, PyObject *payload) {
    Arrived *message = new_arrived();
    if (message == NULL) return -1;
    message->comm = comm;
    message->source = source;
    message->tag = tag;
    message->num_bytes = PyBytes_Size(payload);
    set_object(&message->payload, payload);
    int failed = keep_arrived(e, message);
    Py_DECREF((PyObject *)message);
    return failed;
}

/* The same for one whose payload has come with it: where a receive waits, nothing else is made of it. */
int arrive_short(Engine *e, uint64_t comm, int source, int tag, const char *data, int64_t num_bytes) {
    PyObject *payload = PyBytes_FromStringAndSize(data, num_bytes);
    Request *request = payload == NULL ? NULL : take_posted(e, comm, source, tag);
    int failed = 0;
    if (request != NULL) {
        note_match(e, request, source, tag, num_bytes);
        give_payload(e, request, payload);
    } else {
        failed = PyErr_Occurred() ? -1 : keep_short(e, comm, source, tag, payload);
    }
    Py_XDECREF(payload);
    return failed;
}

/* The earliest message that fits, removed; a new reference, or NULL. */
Arrived *take_arrived(Engine *e, uint64_t comm, int source, int tag) {
    PyObject *queue;
    Py_ssize_t at;
    Arrived *message = find_arrived(e, comm, source, tag, &queue, &at);
    if (message == NULL) return NULL;
    Py_INCREF((PyObject *)message);
    if (PyList_SetSlice(queue, at, at + 1, NULL)) Py_CLEAR(message);
    return message;
}
