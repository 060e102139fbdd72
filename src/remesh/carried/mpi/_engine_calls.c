/* What an Engine does for the program: calls out of the rings and bodies of slots. */
#include "_engine.h"
#include <stdarg.h>
#include <stdio.h>

/* Of a ring: the shortest call behind 4 bytes, padded to 8. */
enum { LEAST_ENTRY = (4 + sizeof(UnlockCall) + 7) & ~7 };

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

/* A short send. */
static int do_send(Engine *e, const SendCall *call, const char *payload) {
    if (call->dest == e->rank) return arrive_short(e, call->comm, e->rank, call->tag, payload, call->num_bytes);
    uint64_t fields[7] = {call->comm, (uint32_t)call->tag, WHAT_MESSAGE, 0, (uint64_t)call->num_bytes, 0, 0};
    return send_wire(e, call->dest, fields, payload, call->num_bytes);
}

/* Whether a send is one; `room`: bytes that its payload may have where the call stands. */
static int check_send(Engine *e, int slot, const SendCall *call, int64_t room) {
    if (call->dest < 0 || call->dest >= e->size) return damaged(slot, "a send to rank %d of %d", call->dest, e->size);
    if (call->num_bytes < 0 || call->num_bytes > room)
        return damaged(slot, "a send of %lld bytes in %lld", (long long)call->num_bytes, (long long)room);
    return 0;
}

/* A payload for this rank waits for a receive of its own. */
static int announce_here(Engine *e, const Request *request) {
    Arrived *message = new_arrived();
    if (message == NULL) return -1;
    message->comm = request->comm;
    message->source = e->rank;
    message->tag = request->tag;
    message->num_bytes = request->num_bytes;
    message->sender_request = request->number;
    int failed = arrive(e, message);
    Py_DECREF((PyObject *)message);
    return failed;
}

/* Borrowed request of a send whose payload stays where it is until a receive matches. */
static Request *announce(Engine *e, const SendCall *call) {
    Request *request = start_request(e, 0, e->word_send);
    if (request == NULL) return NULL;
    request->comm = call->comm;
    request->peer = call->dest;
    request->tag = call->tag;
    request->num_bytes = call->num_bytes;
    request->address = call->address;
    if (request->peer == e->rank) return announce_here(e, request) ? NULL : request;
    int ahead = request->num_bytes > EAGER_BYTES ? new_ahead_tag(e, request->peer) : 0;
    uint64_t pid = e->neighbours[request->peer] ? (uint32_t)e->upper_pid : (uint32_t)ahead;
    uint64_t what = call->flags & FLAG_BLOCKING ? WHAT_ANNOUNCED_WAITING : WHAT_ANNOUNCED;
    if (ahead)
        what = in_arena(e, request->address, request->num_bytes) ? WHAT_ANNOUNCED_AHEAD_WHOLE : WHAT_ANNOUNCED_AHEAD;
    uint64_t fields[7] = {
        request->comm, (uint32_t)request->tag, what, request->number, (uint64_t)request->num_bytes, pid, request->address};
    if (send_wire(e, request->peer, fields, NULL, 0)) return NULL;
    return ahead && stream_ahead(e, request, ahead) ? NULL : request;
}

/* Borrowed request of a receive that has been started. */
static Request *do_receive(Engine *e, int slot, uint64_t number, const ReceiveCall *call) {
    if (call->capacity < PARCEL) return damaged(slot, "a receive of %lld bytes", (long long)call->capacity), NULL;
    Request *request = start_request(e, number, e->word_receive);
    if (request == NULL) return NULL;
    request->comm = call->comm;
    request->peer = call->source;
    request->tag = call->tag;
    request->num_bytes = call->capacity;
    request->address = call->address;
    Arrived *message = take_arrived(e, request->comm, request->peer, request->tag);
    if (message == NULL) return PyErr_Occurred() || post(e, request) ? NULL : request;
    int failed = match(e, request, message);
    Py_DECREF((PyObject *)message);
    return failed ? NULL : request;
}

void wait_for(Engine *e, int slot, uint64_t request) {
    e->single[slot] = request;
    e->singles |= 1u << slot;
    e->recheck = 1;
}

static int is_no_rank(const Engine *e, int rank) { return rank < 0 || rank >= e->size; }

/* Answer the start of an operation, or let the slot wait for it. */
static int started(Engine *e, int slot, uint8_t flags, Request *request) {
    if (request->done) return tell_single(e, slot, request);
    if (flags & FLAG_BLOCKING) {
        wait_for(e, slot, request->number);
        return 0;
    }
    *(RequestReply *)(slot_at(e, slot) + BODY) = (RequestReply){OK, request->number};
    answer(e, slot);
    return 0;
}

/* A send that stands in a body: a payload that is not there is read, or stays in the program until it is wanted. */
static int serve_send(Engine *e, int slot, const SendCall *call) {
    char payload[EAGER_BYTES];
    int is_inline = call->flags & FLAG_INLINE, flags = call->flags;
    int is_announced = !is_inline && (call->num_bytes > EAGER_BYTES || flags & FLAG_SYNCHRONOUS);
    if (check_send(e, slot, call, is_announced ? INT64_MAX : EAGER_BYTES)) return -1;
    if (is_announced) {
        Request *request = announce(e, call);
        return request == NULL ? -1 : started(e, slot, (uint8_t)flags, request);
    }
    if (!is_inline && call->num_bytes && carry_memory(e, call->address, payload, call->num_bytes, 0)) return -1;
    if (do_send(e, call, is_inline ? (const char *)(call + 1) : payload)) return -1;
    *(RequestReply *)(slot_at(e, slot) + BODY) = (RequestReply){OK, 0};
    answer(e, slot);
    return 0;
}

typedef struct {
    Handle comm;
    int size;
} Real;

/* Start a collective on the real MPI; MPI's code. */
static int start_real(
    Engine *e, const CollectiveCall *call, Real real, const void *send, void *receive, uint64_t *handle) {
    int op = call->op, type = call->type, send_bytes = (int)call->send_bytes, each = (int)call->receive_bytes / real.size;
    typedef int (*Even)(const void *, int, Handle, void *, int, Handle, Handle, uint64_t *);
    typedef int (*Folding)(const void *, void *, int, Handle, Handle, Handle, uint64_t *);
    if (call->kind == KIND_ALLGATHER)
        return ((Even)e->function[FN_ALLGATHER])(send, send_bytes, e->byte, receive, each, e->byte, real.comm, handle);
    if (call->kind == KIND_ALLTOALL)
        return ((Even)e->function[FN_ALLTOALL])(send, send_bytes / real.size, e->byte, receive, each, e->byte, real.comm, handle);
    int count = send_bytes / (int)e->extent[type];
    return ((Folding)e->function[FN_ALLREDUCE])(send, receive, count, e->type[type], e->op[op], real.comm, handle);
}

/* Whether operands of so many bytes can be folded here. */
static int can_fold(Engine *e, int op, int type, int64_t num_bytes) {
    return op < e->num_ops && type < e->num_types && e->extent[type] && num_bytes % e->extent[type] == 0;
}

/* Whether a collective is one for here: short, even, of basic types, on a communicator that is there, and one that ends
 * for nobody before all have entered it. collectives.py sees to the others.
 */
static int is_short(Engine *e, const CollectiveCall *call, Real *real) {
    int64_t send_bytes = call->send_bytes, receive_bytes = call->receive_bytes;
    if (call->num_counts || send_bytes > EAGER_BYTES || receive_bytes > EAGER_BYTES) return 0;
    if (!(call->flags & FLAG_INLINE) || receive_bytes <= 0 || send_bytes <= 0) return 0;
    int is_fold = call->kind == KIND_ALLREDUCE;
    if (!is_fold && call->kind != KIND_ALLGATHER && call->kind != KIND_ALLTOALL) return 0;
    if (is_fold && (receive_bytes != send_bytes || !can_fold(e, call->op, call->type, send_bytes))) return 0;
    PyObject *found = table_find(e->reals, call->comm);
    if (found == NULL) return 0;
    real->comm = (Handle)PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(found, 0));
    real->size = (int)PyLong_AsLong(PyTuple_GetItem(found, 1));
    return PyErr_Occurred() ? -1 : 1;
}

/* Count one more; how many had been entered, or -1. */
static int64_t count_entered(Engine *e, uint64_t comm) {
    PyObject *before = table_find(e->entered, comm);
    int64_t count = before == NULL ? 0 : PyLong_AsLongLong(before);
    PyObject *after = PyErr_Occurred() ? NULL : PyLong_FromLongLong(count + 1);
    int failed = after == NULL || table_set(e->entered, comm, after);
    Py_XDECREF(after);
    return failed ? -1 : count;
}

/* The plan of a member for a kind of small collective; borrowed, NULL if there is none, perhaps with an exception. */
static PyObject *find_plan(Engine *e, uint64_t comm, int kind, int root) {
    Table *plans = (Table *)table_find(e->plans, comm);
    if (plans == NULL) return NULL;
    uint64_t key = (uint64_t)kind << 32 | (uint32_t)root;
    PyObject *plan = table_find(plans, key);
    if (plan != NULL) return plan;
    PyObject *made = PyObject_CallFunction(e->make_plan, "Kii", (unsigned long long)comm, kind, root);
    Py_XDECREF(made);
    return made == NULL ? NULL : table_find(plans, key);
}

/* Bytes of a block of a collective that could be messages of ours: the same on all ranks. -1: it could not. */
static int64_t block_of(Engine *e, const CollectiveCall *call) {
    int64_t sent = call->send_bytes, received = call->receive_bytes;
    if (call->num_counts || sent < 0 || received < 0) return -1;
    switch (call->kind) {
    case KIND_BARRIER:
        return sent || received ? -1 : 0;
    case KIND_BCAST:
        return sent ? sent : received;
    case KIND_SCATTER:
        return received;
    case KIND_GATHER:
        return sent;
    case KIND_REDUCE: case KIND_ALLREDUCE: case KIND_SCAN: case KIND_EXSCAN:
        return can_fold(e, call->op, call->type, sent) ? sent : -1;
    default:
        return -1;
    }
}

/* The plan of a collective that is messages of ours; NULL if it is not one, perhaps with an exception. It depends only
 * on what MPI wants to be the same on all ranks.
 */
static PyObject *small_plan(Engine *e, const CollectiveCall *call, int64_t block_bytes) {
    int kind = call->kind, is_for_all = kind == KIND_ALLREDUCE || kind == KIND_BARRIER;
    if (block_bytes < 0 || block_bytes > (is_for_all ? e->small_bytes : EAGER_BYTES)) return NULL;
    int has_root = kind == KIND_BCAST || kind == KIND_GATHER || kind == KIND_SCATTER || kind == KIND_REDUCE;
    PyObject *plan = find_plan(e, call->comm, kind == KIND_BARRIER ? KIND_ALLREDUCE : kind, has_root ? call->root : 0);
    int goes_together = kind == KIND_GATHER || kind == KIND_SCATTER;
    return plan != NULL && goes_together && block_bytes * size_of_plan(plan) > EAGER_BYTES ? NULL : plan;
}

void finish_running(Engine *e, Running *one) {
    Request *request = one->request;
    set_object(&request->payload, one->result);
    request->message_bytes = PyBytes_Size(one->result);
    complete(e, request);
    Py_DECREF(one->send);
    Py_DECREF(one->result);
    Py_DECREF((PyObject *)request);
}

static int do_collective(Engine *e, int slot, const CollectiveCall *call, Real real) {
    Running *running = with_room(e->running, e->num_running, &e->room_running, sizeof *running);
    if (running == NULL) return -1;
    e->running = running;
    int64_t receive_bytes = call->receive_bytes;
    uint8_t flags = call->flags;
    Running one = {0};
    one.send = PyBytes_FromStringAndSize((const char *)(call + 1), call->send_bytes);
    one.result = PyBytes_FromStringAndSize(NULL, receive_bytes);
    one.request = one.send == NULL || one.result == NULL ? NULL : start_request(e, 0, e->word_collective);
    one.number = one.request == NULL ? 0 : count_entered(e, call->comm) + 1;
    if (one.number <= 0) {
        Py_XDECREF(one.send);
        Py_XDECREF(one.result);
        return -1;
    }
    Py_INCREF((PyObject *)one.request);
    one.request->comm = call->comm;
    one.request->peer = call->root;
    one.request->address = call->receive_address;
    one.request->num_bytes = receive_bytes;
    one.kind = call->kind;
    one.root = call->root;
    one.op = call->op;
    one.type = call->type;
    memset(PyBytes_AsString(one.result), 0, receive_bytes);
    int (*test)(uint64_t *, int *, void *) = e->function[FN_TEST];
    int over = 0;
    int code = start_real(e, call, real, PyBytes_AsString(one.send), PyBytes_AsString(one.result), &one.real);
    if (code == 0) code = test(&one.real, &over, e->status);
    if (code) {
        forget(e, one.request);
        fail(e, slot, "a collective", code);
        Py_DECREF(one.send);
        Py_DECREF(one.result);
        Py_DECREF((PyObject *)one.request);
        return 0;
    }
    Request *request = one.request;
    Py_INCREF((PyObject *)request);
    if (over) finish_running(e, &one);
    else e->running[e->num_running++] = one;
    int failed = started(e, slot, flags, request);
    Py_DECREF((PyObject *)request);
    return failed;
}

/* Whether what this rank gives and gets is of the size that the others take it for. */
static int fits_block(const CollectiveCall *call, int64_t block_bytes, int size) {
    int64_t gives = call->kind == KIND_SCATTER ? size * block_bytes : block_bytes;
    int64_t gets = call->kind == KIND_GATHER ? size * block_bytes : block_bytes;
    return (!call->send_bytes || call->send_bytes == gives) && (!call->receive_bytes || call->receive_bytes == gets);
}

static int do_small(Engine *e, int slot, const CollectiveCall *call, PyObject *plan, int64_t block_bytes) {
    char operand[EAGER_BYTES];
    int64_t num_bytes = call->send_bytes, clock = count_entered(e, call->comm);
    Request *request = clock < 0 ? NULL : start_request(e, 0, e->word_collective);
    if (request == NULL) return -1;
    request->comm = call->comm;
    request->address = call->receive_address;
    request->num_bytes = call->receive_bytes;
    if (!fits_block(call, block_bytes, size_of_plan(plan))) {
        /* Told to all with the parts. */
        request->error = e->err_truncate;
        num_bytes = 0;
    }
    SmallCall asked = {(uint64_t)clock, call->kind, call->root, {call->op, call->type}, block_bytes};
    uint8_t flags = call->flags;
    if (flags & FLAG_INLINE) memcpy(operand, call + 1, (size_t)num_bytes);
    else if (num_bytes && carry_memory(e, call->send_address, operand, num_bytes, 0)) return -1;
    if (start_small(e, request, asked, plan, operand, num_bytes)) return -1;
    return started(e, slot, flags, request);
}

/* Leave the request in a slot to Python: it has its reply (0), waits for a request, or stays blocked there (-1). */
int serve_in_python(Engine *e, int slot) {
    e->attention = 1;
    PyObject *found = PyObject_CallFunction(e->serve, "i", slot);
    long long request = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    if (PyErr_Occurred()) return -1;
    if (request == 0) answer(e, slot);
    else if (request > 0) wait_for(e, slot, (uint64_t)request);
    else e->blocked |= 1u << slot;
    return 0;
}

static int serve_collective(Engine *e, int slot, const CollectiveCall *call) {
    Real real;
    int64_t block_bytes = block_of(e, call);
    PyObject *plan = small_plan(e, call, block_bytes);
    if (plan != NULL) return do_small(e, slot, call, plan, block_bytes);
    int here = PyErr_Occurred() ? -1 : is_short(e, call, &real);
    if (here < 0) return -1;
    return here ? do_collective(e, slot, call, real) : serve_in_python(e, slot);
}

static int serve_wait(Engine *e, int slot, const WaitCall *call) {
    e->open_in[slot] = 0;
    int is_blocking = call->flags & FLAG_BLOCKING, over = try_wait(e, slot);
    if (over) return over < 0 ? -1 : 0;
    if (is_blocking) {
        e->waits |= 1u << slot;
        return 0;
    }
    *(WaitReply *)(slot_at(e, slot) + BODY) = (WaitReply){OK, 0};
    answer(e, slot);
    return 0;
}

/* A probe that does not wait counts what has come to MPI, and is not in a queue yet. */
static int serve_probe(Engine *e, int slot, const ProbeCall *call) {
    enum { MOST_FRAMES = 64 };
    int is_blocking = call->flags & FLAG_BLOCKING, found = try_probe(e, slot);
    for (int i = 0; !found && !is_blocking && i < MOST_FRAMES; i++) {
        look(e);
        if (!e->frame_ready || e->mpi_problem) break;
        found = take_frame(e) ? -1 : try_probe(e, slot);
    }
    if (found) return found < 0 ? -1 : 0;
    if (is_blocking) {
        e->probes |= 1u << slot;
        return 0;
    }
    *(ProbeReply *)(slot_at(e, slot) + BODY) = (ProbeReply){.status = OK};
    answer(e, slot);
    return 0;
}

static int serve_body(Engine *e, int slot) {
    char *body = slot_at(e, slot) + BODY;
    Request *request;
    switch (*(uint8_t *)body) {
    case CALL_HELLO:
        *(HelloReply *)body = (HelloReply){OK, e->rank, e->size};
        answer(e, slot);
        return 0;
    case CALL_SEND:
        return serve_send(e, slot, (const SendCall *)body);
    case CALL_RECEIVE:
        request = do_receive(e, slot, 0, (const ReceiveCall *)body);
        return request == NULL ? -1 : started(e, slot, ((const ReceiveCall *)body)->flags, request);
    case CALL_WAIT:
        return serve_wait(e, slot, (const WaitCall *)body);
    case CALL_PROBE:
        return serve_probe(e, slot, (const ProbeCall *)body);
    case CALL_LOCK:
        if (is_no_rank(e, ((const LockCall *)body)->target)) return damaged(slot, "a lock on a rank that is none");
        request = ask_for_lock(e, (const LockCall *)body);
        return request == NULL ? -1 : started(e, slot, ((const LockCall *)body)->flags, request);
    case CALL_UNLOCK:
        if (is_no_rank(e, ((const UnlockCall *)body)->target)) return damaged(slot, "a lock on a rank that is none");
        if (give_lock_back(e, (const UnlockCall *)body)) return -1;
        put_status(body, OK);
        answer(e, slot);
        return 0;
    case CALL_COLLECTIVE:
        return serve_collective(e, slot, (const CollectiveCall *)body);
    default:
        return serve_in_python(e, slot);
    }
}

/* Start an access that stands in a ring; behind one that waits for its turn it is Python's. */
static int serve_access_posted(Engine *e, int slot, const StartAccessCall *call, int64_t num_bytes) {
    int done = start_access(e, slot, call, num_bytes);
    if (done) return done < 0 ? -1 : 0;
    e->attention = 1;
    PyObject *served = PyObject_CallFunction(e->serve_posted, "iy#", slot, call, (Py_ssize_t)num_bytes);
    Py_XDECREF(served);
    return served == NULL ? -1 : 0;
}

/* One call out of a ring, whose entry has so many bytes for it. */
static int serve_posted(Engine *e, int slot, const char *call, int64_t num_bytes) {
    const StartReceiveCall *receive = (const StartReceiveCall *)call;
    switch (*(uint8_t *)call) {
    case CALL_SEND:
        if (num_bytes < (int64_t)sizeof(SendCall)) break;
        if (check_send(e, slot, (const SendCall *)call, num_bytes - (int64_t)sizeof(SendCall))) return -1;
        return do_send(e, (const SendCall *)call, call + sizeof(SendCall));
    case CALL_START_RECEIVE: {
        if (num_bytes < (int64_t)sizeof *receive) break;
        ReceiveCall as_one = {CALL_RECEIVE, 0, receive->comm, receive->source, receive->tag, receive->capacity, receive->address};
        return do_receive(e, slot, receive->request, &as_one) == NULL ? -1 : 0;
    }
    case CALL_START_ACCESS:
        if (num_bytes < (int64_t)sizeof(StartAccessCall)) break;
        return serve_access_posted(e, slot, (const StartAccessCall *)call, num_bytes);
    case CALL_UNLOCK:
        if (num_bytes < (int64_t)sizeof(UnlockCall)) break;
        if (is_no_rank(e, ((const UnlockCall *)call)->target)) return damaged(slot, "a lock on a rank that is none");
        return give_lock_back(e, (const UnlockCall *)call);
    default:
        break;
    }
    return damaged(slot, "call %d in an entry of %lld bytes", *(uint8_t *)call, (long long)num_bytes + 4);
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

/* Those that may have something. Their words stand so that few of them are in a cache at the same time. */
static uint32_t used_slots(Engine *e) {
    uint32_t all = (1u << NUM_SLOTS) - 1, told = atomic_load((Word *)(e->base + USED_SLOTS)) & all;
    return told ? told : all;
}

/* Take what the slots have. Rings go first: a body may wait for what another thread had posted before. */
int scan(Engine *e) {
    uint32_t mask = 0, used = used_slots(e);
    int served = 0;
    for (uint32_t left = used; left; left &= left - 1) {
        int slot = __builtin_ctz(left);
        char *at = slot_at(e, slot);
        uint32_t reply = atomic_load_explicit((Word *)(at + REPLY), memory_order_relaxed);
        if (atomic_load_explicit((Word *)at, memory_order_acquire) != reply) mask |= 1u << slot;
    }
    for (uint32_t left = used; left; left &= left - 1) {
        int some = serve_ring(e, __builtin_ctz(left));
        if (some < 0) return -1;
        served += some;
    }
    for (mask &= ~(waiting_slots(e) | e->blocked); mask; mask &= mask - 1, served++)
        if (serve_body(e, __builtin_ctz(mask))) return -1;
    return served;
}
