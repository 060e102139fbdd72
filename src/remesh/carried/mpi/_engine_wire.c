/* Wire messages of an Engine: what is handed to MPI, and what is done about each that comes. */
#include "_engine.h"
#include <stdlib.h>

/* ---- out ---- */

static int push_sending(Engine *e, uint64_t real, char *frame) {
    Sending *sending = with_room(e->sending, e->num_sending, &e->room_sending, sizeof *sending);
    if (sending == NULL) return -1;
    e->sending = sending;
    e->sending[e->num_sending++] = (Sending){real, frame};
    return 0;
}

/* One wire message to another rank. */
int send_wire(Engine *e, int dest, const uint64_t fields[7], const char *payload, int64_t num_bytes) {
    char *frame = malloc(HEADER_BYTES + num_bytes);
    if (frame == NULL) return PyErr_NoMemory(), -1;
    *(WireHeader *)frame = (WireHeader){
        .comm = fields[0], .tag = (int)fields[1], .what = (int16_t)fields[2], .source = e->rank, .pid = (int)fields[5],
        .request = fields[3], .num_bytes = fields[4], .address = fields[6],
        .core = (uint16_t)atomic_load_explicit(e->cpu, memory_order_relaxed)};
    if (num_bytes) memcpy(frame + HEADER_BYTES, payload, num_bytes);
    int (*isend)(const void *, int, Handle, int, int, Handle, uint64_t *) = e->function[FN_ISEND];
    int (*test)(uint64_t *, int *, void *) = e->function[FN_TEST];
    uint64_t real = 0;
    int over = 0, code = isend(frame, (int)(HEADER_BYTES + num_bytes), e->byte, dest, 0, e->comm, &real);
    if (code == 0) {
        e->sent[dest]++;
        code = test(&real, &over, e->status);
    }
    if (code || over) free(frame);
    if (code) return mpi_failed("sending", code);
    return over ? 0 : push_sending(e, real, frame);
}

/* ---- in ---- */

/* While closed nothing matches, and MPI must not be left with what nobody takes. */
static int take_note_of_ahead(Engine *e, Arrived *message, int tag, int is_whole) {
    if (!is_ahead_tag(tag) || message->num_bytes <= 0)
        return PyErr_Format(PyExc_ValueError, "rank %d sends %lld bytes ahead with tag %d, which is not one for that",
                            message->source, (long long)message->num_bytes, tag), -1;
    message->pid = 0;
    message->ahead = tag;
    message->ahead_piece = ahead_piece(e, is_whole);
    return e->closed ? decline(e, message) : 0;
}

int misfit(const Header *header, const char *what, int64_t found) {
    PyErr_Format(PyExc_ValueError, "hearing rank %d: %s %lld, which fits nothing; run one version of remesh on all ranks",
                 header->source, what, (long long)found);
    return -1;
}

/* A payload of another rank's waits for a receive. */
static int hear_announced(Engine *e, const Header *header) {
    if ((int64_t)header->num_bytes < 0) return misfit(header, "bytes of an announced message:", (int64_t)header->num_bytes);
    Arrived *message = new_arrived();
    if (message == NULL) return -1;
    message->comm = header->comm;
    message->source = header->source;
    message->tag = header->tag;
    message->num_bytes = (int64_t)header->num_bytes;
    message->sender_request = header->request;
    message->pid = e->neighbours[header->source] ? header->pid : 0;
    message->address = header->address;
    message->waits = header->what == WHAT_ANNOUNCED_WAITING;
    int is_whole = header->what == WHAT_ANNOUNCED_AHEAD_WHOLE, is_ahead = is_whole || header->what == WHAT_ANNOUNCED_AHEAD;
    int failed = (is_ahead && take_note_of_ahead(e, message, header->pid, is_whole)) || arrive(e, message) ? -1 : 0;
    Py_DECREF((PyObject *)message);
    return failed;
}

static int leave_to_python(Engine *e, const Header *h, const char *payload) {
    int has_payload = h->what == WHAT_ACCESSED;
    if (has_payload && h->num_bytes > EAGER_BYTES)
        return PyErr_SetString(PyExc_ValueError, "a message longer than its frame"), -1;
    e->attention = 1;
    PyObject *done = PyObject_CallFunction(
        e->on_message, "i(KiiKKiK)y#", h->source, (unsigned long long)h->comm, h->tag, h->what,
        (unsigned long long)h->request, (unsigned long long)h->num_bytes, h->pid, (unsigned long long)h->address,
        payload, has_payload ? (Py_ssize_t)h->num_bytes : (Py_ssize_t)0);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Of a send that was announced to this rank: what the header says is wanted, or done. */
static int hear_of_send(Engine *e, const Header *header, Request *request) {
    if (request == NULL || request->kind != e->word_send || request->peer != header->source)
        return misfit(header, "it speaks of a send that is none, or not to it: request", (int64_t)header->request);
    if (header->what == WHAT_TAKEN) return complete(e, request), 0;
    if (header->what == WHAT_DECLINED) return hear_declined(e, header->source, request);
    if (header->pid)
        return help_directly(e, header->source, request, header->num_bytes, header->pid, header->address);
    if (!is_stream_tag((int64_t)header->num_bytes)) return misfit(header, "tag of a stream:", (int64_t)header->num_bytes);
    return stream_out(e, header->source, request, (Wanted){(int)header->num_bytes, header->tag, (int64_t)header->address});
}

static int hear(Engine *e, const Header *header, const char *payload) {
    int done;
    switch (header->what) {
    case WHAT_MESSAGE:
        if (header->num_bytes > EAGER_BYTES) return misfit(header, "bytes of a short message:", (int64_t)header->num_bytes);
        return arrive_short(e, header->comm, header->source, header->tag, payload, (int64_t)header->num_bytes);
    case WHAT_ANNOUNCED:
    case WHAT_ANNOUNCED_WAITING:
    case WHAT_ANNOUNCED_AHEAD:
    case WHAT_ANNOUNCED_AHEAD_WHOLE:
        return hear_announced(e, header);
    case WHAT_TAKEN:
    case WHAT_WANTED:
    case WHAT_DECLINED:
        return hear_of_send(e, header, find_request(e, header->request));
    case WHAT_HELPED:
        if (hear_helped(e, header->request, header->num_bytes != 0)) return 0;
        return misfit(header, "it has helped with request", (int64_t)header->request);
    case WHAT_GIVEN_UP:
        return discard_ahead(e, header->source, (int64_t)header->num_bytes, (int64_t)header->address, header->tag);
    case WHAT_PART:
        return hear_part(e, header->comm, header->request, header->source, header->tag, payload, (int64_t)header->num_bytes);
    case WHAT_ACCESS:
        return hear_access(e, header, payload);
    case WHAT_ACCESSED:
        done = hear_accessed(e, header, payload);
        return done ? (done < 0 ? -1 : 0) : leave_to_python(e, header, payload);
    case WHAT_LOCK:
        return hear_lock(e, header);
    case WHAT_LOCKED:
        return hear_locked(e, header);
    case WHAT_UNLOCK:
        return hear_unlock(e, header);
    case WHAT_JOIN:
    case WHAT_GO:
        return leave_to_python(e, header, payload);
    default:
        return misfit(header, "a message of the kind", header->what);
    }
}

/* The wire message that stands in the frame. */
int take_frame(Engine *e) {
    const WireHeader *frame = (const WireHeader *)e->frame;
    Header header = {
        .comm = frame->comm, .tag = frame->tag, .what = frame->what, .source = frame->source, .pid = frame->pid,
        .request = frame->request, .num_bytes = frame->num_bytes, .address = frame->address};
    if (header.source < 0 || header.source >= e->size)
        return PyErr_SetString(PyExc_ValueError, "a message of no rank"), -1;
    e->received[header.source]++;
    e->cores[header.source] = frame->core;
    if (hear(e, &header, e->frame + HEADER_BYTES)) return -1;
    e->frame_ready = 0;
    if (e->frame_request == NULL) return 0;
    int code = ((int (*)(uint64_t *))e->function[FN_START])(e->frame_request);
    return code ? mpi_failed("receiving", code) : 0;
}
