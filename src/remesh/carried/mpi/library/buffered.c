/* Buffered sends: of a copy, so they are over for the program at once.
 *
 * The copies are memory of the library's own. The program's buffer is held only to be given back by a detach, which
 * waits until all that was sent meanwhile has been taken, as MPI wants; a message for which it is too small is sent
 * all the same. Sends whose requests the program has freed stand beside them, since MPI_Finalize waits for both: until
 * they have been received, or all ranks have come there.
 */
#include "buffered.h"

/* Sends that no receive has matched yet, under process.guard; `state` names the buffer that they stand in. */
static Request *pending;

/* How many buffers of sessions there are: a communicator does not know whose it is. */
static atomic_int num_session_buffers;
static BufferedSends of_process;
/* Stands for none, where the program has freed the request. */
static const BufferedSends of_nobody;

/* ---- Sends ---- */

/* Takes the sends that are pending for one owner (NULL: for anybody) out of the list; how many. One more has room. */
static Request **take_pending(const void *owner, int *count) {
    Request **taken = NULL;
    *count = 0;
    LOCKED {
        int room = 1;
        for (Request *one = pending; one; one = one->next) room++;
        taken = NEW_ARRAY(Request *, room);
        for (Request **at = &pending; *at;) {
            if (owner && (*at)->state != owner) {
                at = &(*at)->next;
                continue;
            }
            taken[*count] = *at;
            *at = taken[(*count)++]->next;
        }
    }
    return taken;
}

static void put_pending(Request *request) {
    LOCKED {
        request->next = pending;
        pending = request;
    }
}

/* Lets go those that are over; waits for one of them or for `other`, unless that is NULL. */
static int look_after_pending(Request *other) {
    if (!pending) return MPI_SUCCESS;
    int count;
    Request **taken = take_pending(NULL, &count);
    taken[count] = other;
    int error = count ? progress(taken, count + (other != NULL), other != NULL, false) : MPI_SUCCESS;
    for (int i = count - 1; i >= 0; i--) {
        if (atomic_load(&taken[i]->is_finished)) let_go(taken[i]);
        else put_pending(taken[i]);
    }
    free(taken);
    return error;
}

/* Until those of one owner have been taken. */
static int flush(const void *owner) {
    int count;
    Request **taken = take_pending(owner, &count);
    int error = count ? progress(taken, count, true, true) : MPI_SUCCESS;
    for (int i = 0; i < count; i++) {
        if (!error) error = taken[i]->error;
        let_go(taken[i]);
    }
    free(taken);
    return error;
}

int finish_buffered(void) {
    /* Who has nothing to wait for goes on: a rank that has failed comes here, too, at its exit, and others do not. */
    Request *all_are_here;
    TRY(do_Ibarrier(comm_world(), &all_are_here));
    uint64_t number = all_are_here->one.operation.number;
    int error = MPI_SUCCESS;
    while (!error && pending && !atomic_load(&all_are_here->is_finished)) error = look_after_pending(all_are_here);
    if (!error && number && !atomic_load(&all_are_here->is_finished)) error = lower_free(number);
    let_go(all_are_here);
    return error;
}

static void forget_state(void *state) { (void)state; }

/* Goes on with a send that is not over; `owner` is only compared. */
static void keep_sending(Step step, const BufferedSends *owner, Comm *comm) {
    Request *request = make_request(comm, 1);
    request->one = step;
    request->state = (void *)(uintptr_t)owner;
    request->drop_state = forget_state;
    put_pending(request);
}

int adopt_send(Request *request) {
    TRY(look_after_pending(NULL));
    keep_sending(request->one, &of_nobody, request->comm);
    request->one = (Step){0};
    return MPI_SUCCESS;
}

int send_buffered(const void *buffer, MPI_Count count, Datatype *type, int dest, int tag, Comm *comm) {
    if (dest == MPI_PROC_NULL) return MPI_SUCCESS;
    if (!comm->buffer && !of_process.is_attached && !atomic_load(&num_session_buffers))
        return fail(MPI_ERR_BUFFER, "no buffer is attached: call MPI_Buffer_attach first");
    TRY(look_after_pending(NULL));
    int64_t num_bytes = data_bytes(type, count);
    void *copy = must_have(malloc((size_t)num_bytes + 1));
    pack_elements(buffer, count, type, copy);
    Operation operation = {0};
    int error = lower_send(0, comm->number, peer_of(comm, dest), tag, copy, num_bytes, &operation);
    const BufferedSends *owner = comm->buffer ? comm->buffer : &of_process;
    if (!error && operation.number) keep_sending((Step){.operation = operation, .owned = copy}, owner, comm);
    else free(copy);
    return error;
}

int do_Bsend(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm) {
    TRY(check_send(buf, count, datatype, dest, tag, comm));
    return send_buffered(buf, count, datatype, dest, tag, comm);
}

int do_Ibsend(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm, Request **request) {
    TRY(do_Bsend(buf, count, datatype, dest, tag, comm));
    *request = sent_request;
    return MPI_SUCCESS;
}

/* ---- Buffers ---- */

int attach_buffer(BufferedSends *to, void *buffer, MPI_Count size) {
    if (to->is_attached) return fail(MPI_ERR_BUFFER, "a buffer is attached already: detach it first");
    *to = (BufferedSends){true, buffer, size};
    return MPI_SUCCESS;
}

int detach_buffer(BufferedSends *from, void *buffer_addr, MPI_Count *size) {
    if (!from->is_attached) return fail(MPI_ERR_BUFFER, "no buffer is attached");
    TRY(flush(from));
    /* MPI_BUFFER_AUTOMATIC comes back as it was given. */
    memcpy(buffer_addr, &from->at, sizeof from->at);
    *size = from->size;
    from->is_attached = false;
    return MPI_SUCCESS;
}

int do_Buffer_attach(void *buffer, MPI_Count size) { return attach_buffer(&of_process, buffer, size); }
int do_Buffer_detach(void *buffer_addr, MPI_Count *size) { return detach_buffer(&of_process, buffer_addr, size); }
int do_Buffer_flush(void) { return flush(&of_process); }

int do_Comm_attach_buffer(Comm *comm, void *buffer, MPI_Count size) {
    if (comm->buffer) return fail(MPI_ERR_BUFFER, "a buffer is attached to the communicator already: detach it first");
    comm->buffer = NEW(BufferedSends);
    return attach_buffer(comm->buffer, buffer, size);
}

int do_Comm_detach_buffer(Comm *comm, void *buffer_addr, MPI_Count *size) {
    if (!comm->buffer) return fail(MPI_ERR_BUFFER, "no buffer is attached to the communicator");
    TRY(detach_buffer(comm->buffer, buffer_addr, size));
    free(comm->buffer);
    comm->buffer = NULL;
    return MPI_SUCCESS;
}

int do_Comm_flush_buffer(Comm *comm) { return comm->buffer ? flush(comm->buffer) : MPI_SUCCESS; }

/* ---- Buffers of sessions ---- */

/* One for each session that has a buffer; under process.guard. */
typedef struct OfSession {
    const Session *session;
    BufferedSends buffer;
    struct OfSession *next;
} OfSession;
static OfSession *of_sessions;

static OfSession **find_session(const Session *session) {
    OfSession **at = &of_sessions;
    while (*at && (*at)->session != session) at = &(*at)->next;
    return at;
}

int do_Session_attach_buffer(Session *session, void *buffer, MPI_Count size) {
    int error = MPI_SUCCESS;
    LOCKED {
        OfSession **at = find_session(session);
        if (*at) {
            error = fail(MPI_ERR_BUFFER, "a buffer is attached to the session already: detach it first");
        } else {
            *at = NEW(OfSession);
            **at = (OfSession){session, {true, buffer, size}, NULL};
            atomic_fetch_add(&num_session_buffers, 1);
        }
    }
    return error;
}

int do_Session_detach_buffer(Session *session, void *buffer_addr, MPI_Count *size) {
    OfSession *found = NULL;
    TRY(flush(&of_process)); /* sends of a session's communicators are noted there */
    LOCKED {
        OfSession **at = find_session(session);
        found = *at;
        if (found) *at = found->next;
    }
    if (!found) return fail(MPI_ERR_BUFFER, "no buffer is attached to the session");
    atomic_fetch_sub(&num_session_buffers, 1);
    memcpy(buffer_addr, &found->buffer.at, sizeof found->buffer.at);
    *size = found->buffer.size;
    free(found);
    return MPI_SUCCESS;
}

int do_Session_flush_buffer(Session *session) { return (void)session, flush(&of_process); }

/* ---- Flushes under way ---- */

/* Whether all sends that this flush found have been taken. */
static bool are_taken(Request *request) {
    bool found = false;
    look_after_pending(NULL);
    LOCKED for (const Request *one = pending; one; one = one->next) found |= one->state == request->state;
    return !found;
}

/* MPI lets it be over later than it has to be: sends that begin meanwhile count, too. */
static int start_flush(void *owner, Request **made) {
    *made = make_request(NULL, 0);
    (*made)->state = owner;
    (*made)->drop_state = forget_state;
    (*made)->is_over_elsewhere = are_taken;
    return MPI_SUCCESS;
}

int do_Buffer_iflush(Request **request) { return start_flush(&of_process, request); }
int do_Session_iflush_buffer(Session *session, Request **request) { return (void)session, start_flush(&of_process,
                                                                                                      request); }
int do_Comm_iflush_buffer(Comm *comm, Request **request) { return start_flush(comm->buffer, request); }
