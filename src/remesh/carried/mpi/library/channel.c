/* Every call of the lower half, one function each: the request as calls/table.py lays it out, and what the reply says. */
#include "channel.h"

#include <time.h>
#include <unistd.h>

#include "errors.h"
#include "slots.h"

enum { MAX_WAIT = 1000, ASK_AGAIN_US = 50 };
static _Atomic uint64_t next_posted = (uint64_t)1 << 62; /* FIRST_POSTED of the table */

bool channel_is_there(void) { return open_channel(); }

/* MPI_SUCCESS, or the error that a reply tells. */
static int error_in(const char *body) {
    if (__builtin_expect((uint8_t)body[0] == OK, 1)) return MPI_SUCCESS;
    const Failure *told = (const Failure *)body;
    return fail(class_of_lower(told->error), "%.*s", told->num_bytes, body + sizeof *told);
}

/* A request of fixed size that is answered at once. */
static int ask(const char *doing, const void *request, size_t num_bytes) {
    Lease lease = take_slot(doing);
    memcpy(lease.slot + BODY, request, num_bytes);
    int error = error_in(call_lower(lease.slot));
    give_slot(lease);
    return error;
}
#define ASK(doing, Call, ...) ask(doing, &(Call){__VA_ARGS__}, sizeof(Call))

static uint64_t address_of(const void *place, int64_t num_bytes) { return num_bytes ? (uint64_t)(uintptr_t)place : 0; }

/* What a completion says, its payload put in place; where it ends. */
static const char *take(const Completion *told, Operation *operation) {
    const char *end = (const char *)(told + 1);
    Ended *ended = &operation->ended;
    *ended = (Ended){told->source, told->tag, told->error ? class_of_lower(told->error) : MPI_SUCCESS,
                     told->where == PAYLOAD_CANCELLED, told->num_bytes};
    operation->number = 0;
    if (told->where == PAYLOAD_INLINE) {
        int64_t num_bytes = told->num_bytes < operation->room ? told->num_bytes : operation->room;
        if (num_bytes > 0) memcpy(operation->at, end, (size_t)num_bytes);
        if (num_bytes > 0) end += num_bytes;
    }
    return end;
}

/* The reply of one operation: it is over, or has a number. */
static int take_reply(const char *body, Operation *operation) {
    int error = error_in(body);
    if (error) return error;
    const RequestReply *reply = (const RequestReply *)body;
    if (reply->request) operation->number = reply->request;
    else take((const Completion *)(reply + 1), operation);
    return MPI_SUCCESS;
}

static void wait_a_moment(void) { nanosleep(&(struct timespec){0, ASK_AGAIN_US * 1000}, NULL); }

/* Post an operation that stands in the slot's body with its flags in `flags`, and wait for it if they say so. In a slot
 * that others need nobody waits: the operation is begun there, and asked for until it is over.
 */
static int begin(Lease lease, uint8_t *flags, Operation *operation) {
    bool waits = *flags & FLAG_BLOCKING;
    if (lease.is_shared) *flags &= (uint8_t)~FLAG_BLOCKING;
    int error = take_reply(call_lower(lease.slot), operation);
    give_slot(lease);
    if (!lease.is_shared || !waits || error) return error;
    Operation *const only[] = {operation};
    while (!error && operation->number) {
        wait_a_moment();
        error = lower_wait(0, MODE_ALL, only, 1);
    }
    return error;
}

/* ---- start, end, and what is there ---- */

int lower_hello(int *rank, int *size) {
    Lease lease = take_slot("starting MPI");
    lease.slot[BODY] = CALL_HELLO;
    const HelloReply *reply = (const HelloReply *)call_lower(lease.slot);
    int error = error_in((const char *)reply);
    if (!error) *rank = reply->rank, *size = reply->size;
    give_slot(lease);
    return error;
}

/* The string behind a key of a JSON object, without its escapes. */
static void find_text(const char *json, const char *key, char *text, int room) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": \"", key);
    const char *from = strstr(json, quoted);
    char *to = text;
    if (from)
        for (from += strlen(quoted); *from && *from != '"' && to - text < room - 1; from++) {
            if (*from != '\\') *to++ = *from;
            else if (*++from == 'u') *to++ = '?', from += 4;
            else *to++ = *from == 'n' ? '\n' : *from == 't' ? '\t' : *from;
        }
    *to = 0;
}

int lower_describe(const char *key, char *text, int room) {
    Lease lease = take_slot("asking for the MPI library");
    lease.slot[BODY] = CALL_DESCRIBE;
    char *body = call_lower(lease.slot);
    int error = error_in(body);
    if (!error) {
        uint32_t length = ((const WaitReply *)body)->count;
        body[sizeof(WaitReply) + length] = 0;
        find_text(body + sizeof(WaitReply), key, text, room);
    }
    give_slot(lease);
    return error;
}

int lower_finish(void) { return ASK("ending MPI", FinishCall, CALL_FINISH); }

/* Not answered: the lower half ends the job. A thread that is inside a call comes here by an error handler. */
int lower_abort(int code) { return ASK("aborting the job", AbortCall, CALL_ABORT, code); }

/* ---- point to point ---- */

static bool post_send(const char *doing, uint64_t comm, int dest, int tag, const void *data, int64_t num_bytes) {
    Lease lease = take_slot(doing);
    uint32_t end;
    SendCall *to = (SendCall *)begin_entry(lease.slot, sizeof *to + (size_t)num_bytes, &end);
    if (to) {
        *to = (SendCall){CALL_SEND, FLAG_INLINE, comm, dest, tag, num_bytes, 0};
        if (num_bytes) memcpy(to + 1, data, (size_t)num_bytes);
        publish(lease.slot, end, true);
    }
    give_slot(lease);
    return to != NULL;
}

int lower_send(int flags, uint64_t comm, int dest, int tag, const void *data, int64_t num_bytes, Operation *operation) {
    operation->number = 0;
    operation->ended = (Ended){.source = ANY, .tag = ANY};
    bool is_short = num_bytes <= POST_BYTES && !(flags & FLAG_SYNCHRONOUS);
    if (is_short && post_send("sending", comm, dest, tag, data, num_bytes)) return MPI_SUCCESS;
    Lease lease = take_slot("sending");
    SendCall *call = (SendCall *)(lease.slot + BODY);
    *call = (SendCall){CALL_SEND, (uint8_t)flags, comm, dest, tag, num_bytes, 0};
    if (num_bytes <= EAGER_BYTES && !(flags & FLAG_SYNCHRONOUS)) {
        call->flags |= FLAG_INLINE;
        if (num_bytes) memcpy(call + 1, data, (size_t)num_bytes);
    } else {
        call->address = address_of(data, num_bytes);
    }
    return begin(lease, &call->flags, operation);
}

static bool post_receive(uint64_t comm, int source, int tag, Operation *operation) {
    Lease lease = take_slot("receiving");
    uint32_t end;
    StartReceiveCall *to = (StartReceiveCall *)begin_entry(lease.slot, sizeof *to, &end);
    if (to) {
        operation->number = atomic_fetch_add(&next_posted, 1);
        *to = (StartReceiveCall){CALL_START_RECEIVE, operation->number, comm, source, tag, operation->room,
                                 address_of(operation->at, operation->room)};
        /* A short message can wait in MPI for a lower half that sleeps; the sender of a long one waits for this. */
        publish(lease.slot, end, operation->room > EAGER_BYTES);
    }
    give_slot(lease);
    return to != NULL;
}

int lower_receive(int flags, uint64_t comm, int source, int tag, Operation *operation) {
    operation->number = 0;
    if (!(flags & FLAG_BLOCKING) && post_receive(comm, source, tag, operation)) return MPI_SUCCESS;
    Lease lease = take_slot("receiving");
    ReceiveCall *call = (ReceiveCall *)(lease.slot + BODY);
    *call = (ReceiveCall){CALL_RECEIVE, (uint8_t)flags, comm, source, tag, operation->room,
                          address_of(operation->at, operation->room)};
    return begin(lease, &call->flags, operation);
}

int lower_receive_message(int flags, uint64_t message, Operation *operation) {
    operation->number = 0;
    Lease lease = take_slot("receiving a matched message");
    ReceiveMessageCall *call = (ReceiveMessageCall *)(lease.slot + BODY);
    *call = (ReceiveMessageCall){CALL_RECEIVE_MESSAGE, (uint8_t)flags, message, operation->room,
                                 address_of(operation->at, operation->room)};
    return begin(lease, &call->flags, operation);
}

int lower_probe(int flags, uint64_t comm, int source, int tag, Probed *probed) {
    int error;
    bool waits = flags & FLAG_BLOCKING, is_shared;
    do {
        Lease lease = take_slot_to_ask("probing");
        is_shared = lease.is_shared;
        int asked = is_shared ? flags & ~FLAG_BLOCKING : flags;
        *(ProbeCall *)(lease.slot + BODY) = (ProbeCall){CALL_PROBE, (uint8_t)asked, comm, source, tag};
        const ProbeReply *reply = (const ProbeReply *)call_lower(lease.slot);
        error = error_in((const char *)reply);
        if (!error)
            *probed = (Probed){reply->found, reply->source, reply->tag, reply->num_bytes, reply->message};
        give_slot(lease);
        if (!error && probed->found) note_news();
        if (is_shared && waits && !error && !probed->found) wait_a_moment();
    } while (is_shared && waits && !error && !probed->found);
    return error;
}

/* ---- waiting ---- */

/* One call for up to MAX_WAIT operations that are under way. */
static int wait_for_some(int flags, int mode, Operation *const *pending, uint32_t count) {
    Lease lease = take_slot_to_ask("waiting");
    WaitCall *call = (WaitCall *)(lease.slot + BODY);
    *call = (WaitCall){CALL_WAIT, (uint8_t)(lease.is_shared ? 0 : flags), (uint8_t)mode, count};
    char *to = (char *)(call + 1);
    for (uint32_t i = 0; i < count; i++, to += 8) memcpy(to, &pending[i]->number, 8);
    const char *body = call_lower(lease.slot);
    int error = error_in(body);
    if (!error) {
        const char *from = body + sizeof(WaitReply);
        if (((const WaitReply *)body)->count) note_news();
        for (uint32_t left = ((const WaitReply *)body)->count; left; left--) {
            const Index *index = (const Index *)from;
            from = take((const Completion *)(index + 1), pending[index->position]);
        }
    }
    give_slot(lease);
    if (lease.is_shared && flags & FLAG_BLOCKING) wait_a_moment();
    return error;
}

static uint32_t collect_pending(Operation *const *operations, int64_t count, int64_t *next, Operation **pending) {
    uint32_t found = 0;
    for (; *next < count && found < MAX_WAIT; ++*next)
        if (operations[*next] && operations[*next]->number) pending[found++] = operations[*next];
    return found;
}

int lower_wait(int flags, int mode, Operation *const *operations, int64_t count) {
    Operation *pending[MAX_WAIT];
    int64_t next = 0;
    uint32_t found = collect_pending(operations, count, &next, pending);
    bool is_whole = next >= count;
    /* With more than one call can ask for, nobody may sleep in one of them unless all are waited for. */
    int asked = is_whole || mode == MODE_ALL ? flags : flags & ~FLAG_BLOCKING;
    bool has_ended = false;
    while (found) {
        TRY(wait_for_some(asked, mode == MODE_ALL && !(asked & FLAG_BLOCKING) ? MODE_SOME : mode, pending, found));
        for (uint32_t i = 0; i < found; i++) has_ended = has_ended || !pending[i]->number;
        if (has_ended && mode == MODE_ANY) break;
        found = collect_pending(operations, count, &next, pending);
    }
    if (!is_whole && !has_ended && asked != flags) wait_a_moment();
    return MPI_SUCCESS;
}

int lower_free(uint64_t number) { return ASK("freeing a request", FreeCall, CALL_FREE, number); }

int lower_cancel(uint64_t number) { return ASK("cancelling", CancelCall, CALL_CANCEL, number); }

/* ---- communicators and collectives ---- */

int lower_make_communicator(uint64_t comm, int count, const int *world_ranks) {
    return ASK("making a communicator", MakeCommunicatorCall, CALL_MAKE_COMMUNICATOR, comm, (uint32_t)count,
               (uint64_t)(uintptr_t)world_ranks);
}

int lower_free_communicator(uint64_t comm) {
    return ASK("freeing a communicator", FreeCommunicatorCall, CALL_FREE_COMMUNICATOR, comm);
}

int lower_collective(int flags, uint64_t comm, const Collective *collective, Operation *operation) {
    uint64_t address = (uint64_t)(uintptr_t)collective->counts;
    bool is_far = collective->num_counts > MAX_COUNTS;
    const void *counts = is_far ? (const void *)&address : collective->counts;
    size_t counts_bytes = 8 * (size_t)(is_far ? 1 : collective->num_counts);
    operation->number = 0;
    Lease lease = take_slot("a collective");
    CollectiveCall *call = (CollectiveCall *)(lease.slot + BODY);
    *call = (CollectiveCall){
        .call = CALL_COLLECTIVE, .flags = (uint8_t)flags, .kind = (uint8_t)collective->kind, .op = (uint8_t)collective->op,
        .type = (uint8_t)collective->type, .comm = comm, .root = collective->root, .send_bytes = collective->send_bytes,
        .receive_address = address_of(operation->at, operation->room), .receive_bytes = operation->room,
        .num_counts = collective->num_counts};
    char *tail = (char *)(call + 1);
    if (counts_bytes) memcpy(tail, counts, counts_bytes);
    if (collective->send_bytes <= EAGER_BYTES && counts_bytes <= EAGER_BYTES / 4) {
        call->flags |= FLAG_INLINE;
        if (collective->send_bytes) memcpy(tail + counts_bytes, collective->send, (size_t)collective->send_bytes);
    } else {
        call->send_address = address_of(collective->send, collective->send_bytes);
    }
    return begin(lease, &call->flags, operation);
}

/* ---- windows ---- */

int lower_make_window(uint64_t window, const void *memory) {
    return ASK("making a window", MakeWindowCall, CALL_MAKE_WINDOW, window, (uint64_t)(uintptr_t)memory);
}

int lower_free_window(uint64_t window) { return ASK("freeing a window", FreeWindowCall, CALL_FREE_WINDOW, window); }

int lower_attach_memory(uint64_t window, const void *address, int64_t num_bytes) {
    return ASK("attaching memory", AttachMemoryCall, CALL_ATTACH_MEMORY, window, (uint64_t)(uintptr_t)address, num_bytes);
}

int lower_detach_memory(uint64_t window, const void *address) {
    return ASK("detaching memory", DetachMemoryCall, CALL_DETACH_MEMORY, window, (uint64_t)(uintptr_t)address);
}

/* An access of one run, posted with its data; false if the ring has no room. */
static bool post_access(uint64_t window, const Access *access, Operation *operation) {
    Lease lease = take_slot("accessing a window");
    uint32_t end;
    StartAccessCall *to = (StartAccessCall *)begin_entry(lease.slot, sizeof *to + (size_t)access->data_bytes, &end);
    if (to) {
        operation->number = atomic_fetch_add(&next_posted, 1);
        *to = (StartAccessCall){
            .call = CALL_START_ACCESS, .request = operation->number, .op = (uint8_t)access->op,
            .type = (uint8_t)access->type, .fetches = access->fetches, .window = window, .target = access->target,
            .result = address_of(operation->at, operation->room), .num_data = (uint32_t)access->data_bytes,
            .offset = access->runs->offset, .num_bytes = access->runs->num_bytes};
        if (access->data_bytes) memcpy(to + 1, access->data, (size_t)access->data_bytes);
        /* A lower half that has a window looks up often; who flushes soon calls it once, for all that was posted. */
        publish(lease.slot, end, false);
    }
    give_slot(lease);
    return to != NULL;
}

int lower_access(uint64_t window, const Access *access, Operation *operation) {
    operation->number = 0;
    bool is_short = access->num_runs == 1 && access->data_bytes <= POST_BYTES && access->runs->num_bytes > 0 &&
                    access->runs->num_bytes <= POST_BYTES;
    if (is_short && post_access(window, access, operation)) return MPI_SUCCESS;
    Lease lease = take_slot("accessing a window");
    AccessCall *call = (AccessCall *)(lease.slot + BODY);
    *call = (AccessCall){
        .call = CALL_ACCESS, .op = (uint8_t)access->op, .type = (uint8_t)access->type, .fetches = access->fetches,
        .unit = (uint8_t)access->unit, .window = window, .target = access->target,
        .data = address_of(access->data, access->data_bytes), .data_bytes = access->data_bytes,
        .result = address_of(operation->at, operation->room), .num_runs = access->num_runs};
    memcpy(call + 1, access->runs, access->num_runs * sizeof(Run));
    return begin(lease, &call->flags, operation);
}

int lower_lock(int flags, uint64_t window, int target, bool exclusive, Operation *operation) {
    operation->number = 0;
    Lease lease = take_slot("locking a window");
    LockCall *call = (LockCall *)(lease.slot + BODY);
    *call = (LockCall){CALL_LOCK, (uint8_t)flags, window, target, exclusive};
    return begin(lease, &call->flags, operation);
}

int lower_unlock(uint64_t window, int target) {
    Lease lease = take_slot("unlocking a window");
    uint32_t end;
    UnlockCall *to = (UnlockCall *)begin_entry(lease.slot, sizeof *to, &end);
    if (to) {
        *to = (UnlockCall){CALL_UNLOCK, window, target};
        /* Others may wait for it, so it rings. */
        publish(lease.slot, end, true);
    }
    give_slot(lease);
    return to ? MPI_SUCCESS : ASK("unlocking a window", UnlockCall, CALL_UNLOCK, window, target);
}

/* ---- the gate of files ---- */

enum { GATE_CLOSED = 1, ONE_INSIDE = 2 };
/* A signal handler may use a file while its thread is inside, and goes with it. */
static _Thread_local unsigned depth;

void enter_gate(void) {
    _Atomic uint32_t *word = gate_word();
    for (int rank, size; depth == 0; lower_hello(&rank, &size)) {
        uint32_t seen = atomic_load(word);
        while (!(seen & GATE_CLOSED) && !atomic_compare_exchange_weak(word, &seen, seen + ONE_INSIDE)) continue;
        if (!(seen & GATE_CLOSED)) break;
        /* The call above is answered only when the gate is open again, and changes nothing. */
    }
    depth++;
}

void leave_gate(void) {
    if (--depth == 0) atomic_fetch_sub(gate_word(), ONE_INSIDE);
}
