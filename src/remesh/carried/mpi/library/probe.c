/* Probes, and messages that a matched probe has taken out of the queue: only their handle can receive them. */
#include "entry.h"
#include "polling.h"
#include "request.h"

void destroy_message(void *object) { let_go(((Message *)object)->comm); }

/* Looks for a message once, unless it is known that there is none. */
static int look_once(int flags, int source, int tag, const Comm *comm, Probed *probed) {
    int64_t asked_ns = begin_poll();
    AskedProbe *asked = find_probe(comm->number, source, tag);
    *probed = (Probed){.found = false};
    if (is_known_absent(asked, asked_ns)) return MPI_SUCCESS;
    TRY(lower_probe(flags, comm->number, source, tag, probed));
    if (!probed->found) note_absent(asked, asked_ns);
    return MPI_SUCCESS;
}

/* Looks for a message; blocking, until there is one. */
static int look(int flags, int source, int tag, const Comm *comm, Probed *probed) {
    if (!(flags & FLAG_BLOCKING)) return look_once(flags, world_source(comm, source), lower_tag(tag), comm, probed);
    for (int turn = 0;; turn += turn < INT_MAX) {
        int now = must_carry_on() ? flags & ~FLAG_BLOCKING : flags;
        TRY(lower_probe(now, comm->number, world_source(comm, source), lower_tag(tag), probed));
        if (probed->found) return MPI_SUCCESS;
        TRY(look_and_pause(turn));
    }
}

/* The same with what the program gave. */
static int probe(int flags, int source, int tag, const Comm *comm, Probed *probed, MPI_Status *status) {
    TRY(check_source(source, tag, comm));
    if (source == MPI_PROC_NULL) {
        *probed = (Probed){.found = true};
        set_nobody_status(status);
        return MPI_SUCCESS;
    }
    TRY(look(flags, source, tag, comm, probed));
    if (probed->found) set_status(status, rank_of_peer(comm, probed->source), probed->tag, probed->num_bytes, false);
    return MPI_SUCCESS;
}

int do_Probe(int source, int tag, Comm *comm, MPI_Status *status) {
    Probed probed;
    return probe(FLAG_BLOCKING, source, tag, comm, &probed, status);
}

int do_Iprobe(int source, int tag, Comm *comm, int *flag, MPI_Status *status) {
    Probed probed;
    TRY(probe(0, source, tag, comm, &probed, status));
    *flag = probed.found;
    return MPI_SUCCESS;
}

/* Stands for MPI_MESSAGE_NO_PROC where a probe makes a message. */
static Message *message_of_nobody(void) {
    static Message nobody;
    nobody.object.handle = BITS(MPI_MESSAGE_NO_PROC);
    return &nobody;
}

static int probe_matched(int flags, int source, int tag, Comm *comm, int *flag, Message **message, MPI_Status *status) {
    Probed probed;
    TRY(probe(flags | FLAG_MATCHED, source, tag, comm, &probed, status));
    *flag = probed.found;
    *message = NULL;
    if (source == MPI_PROC_NULL) {
        *message = message_of_nobody();
    } else if (probed.found) {
        *message = make_object(KIND_MESSAGE, sizeof **message);
        (*message)->comm = comm;
        (*message)->number = probed.message;
        keep(comm);
    }
    return MPI_SUCCESS;
}

int do_Mprobe(int source, int tag, Comm *comm, Message **message, MPI_Status *status) {
    int flag;
    return probe_matched(FLAG_BLOCKING, source, tag, comm, &flag, message, status);
}

int do_Improbe(int source, int tag, Comm *comm, int *flag, Message **message, MPI_Status *status) {
    return probe_matched(0, source, tag, comm, flag, message, status);
}

/* ---- Receiving them ---- */

void *message_errors(MPI_Message handle) {
    const Message *message = message_of(handle);
    return message && !message->comm->object.is_freed ? message->comm : NULL;
}

/* Takes the message out of its handle, which becomes null; NULL if it is from nobody. */
static int take_message(MPI_Message *handle, const void *buffer, MPI_Count count, const Datatype *type,
                        Message **taken) {
    *taken = NULL;
    if (*handle == MPI_MESSAGE_NO_PROC) return *handle = MPI_MESSAGE_NULL, MPI_SUCCESS;
    Message *message = message_of(*handle);
    if (message == NULL) return fail(MPI_ERR_REQUEST, "the message is null, or has been received");
    TRY(check_data(buffer, count, type));
    *handle = MPI_MESSAGE_NULL;
    keep(message);
    free_handle(message);
    *taken = message;
    return MPI_SUCCESS;
}

int do_Mrecv(void *buf, MPI_Count count, Datatype *datatype, MPI_Message *message, MPI_Status *status) {
    Message *taken;
    TRY(take_message(message, buf, count, datatype, &taken));
    if (taken == NULL) return set_nobody_status(status), MPI_SUCCESS;
    Landing landing = landing_for(buf, count, datatype);
    Operation operation = {.at = landing.at, .room = landing.room};
    int64_t room = landing.room;
    int error = lower_receive_message(must_carry_on() ? 0 : FLAG_BLOCKING, taken->number, &operation);
    if (!error && operation.number) error = wait_for_operation(&operation);
    if (error) drop_landing(&landing);
    else land(&landing, operation.ended.num_bytes < room ? operation.ended.num_bytes : room);
    if (!error) error = conclude_receive(&operation.ended, room, taken->comm, status);
    let_go(taken);
    return error;
}

int do_Imrecv(void *buf, MPI_Count count, Datatype *datatype, MPI_Message *message, Request **request) {
    Message *taken;
    TRY(take_message(message, buf, count, datatype, &taken));
    if (taken == NULL) return *request = request_from_nobody(NULL), MPI_SUCCESS;
    Request *made = make_request(taken->comm, 1);
    made->is_receive = true;
    made->one.landing = landing_for(buf, count, datatype);
    made->one.operation.at = made->one.landing.at;
    made->one.operation.room = made->one.landing.room;
    int error = lower_receive_message(0, taken->number, &made->one.operation);
    let_go(taken);
    if (error) return let_go(made), error;
    *request = made;
    return MPI_SUCCESS;
}
