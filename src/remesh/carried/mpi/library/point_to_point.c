/* Sending and receiving: the blocking forms, and those that start a request.
 *
 * A blocking send or receive of a dense buffer is one call of the lower half without a request, unless something has
 * to be carried on meanwhile (request.h).
 */
#include "request.h"

/* ---- Arguments ---- */

int check_data(const void *buffer, MPI_Count count, const Datatype *type) {
    if (!type->is_committed) return fail(MPI_ERR_TYPE, "the datatype is not committed: call MPI_Type_commit first");
    if (buffer == NULL && type->is_dense && type->size && count)
        return fail(MPI_ERR_BUFFER, "the buffer is NULL, expected %lld elements", (long long)count);
    return MPI_SUCCESS;
}

int check_send(const void *buffer, MPI_Count count, const Datatype *type, int dest, int tag, const Comm *comm) {
    if (dest == MPI_PROC_NULL) return MPI_SUCCESS;
    if (dest < 0 || dest >= num_peers(comm))
        return fail(MPI_ERR_RANK, "sending to rank %d, expected 0 to %d or MPI_PROC_NULL", dest, num_peers(comm) - 1);
    if (tag < 0) return fail(MPI_ERR_TAG, "sending with tag %d, expected 0 or more", tag);
    return check_data(buffer, count, type);
}

int check_source(int source, int tag, const Comm *comm) {
    if (source == MPI_PROC_NULL) return MPI_SUCCESS;
    if (source != MPI_ANY_SOURCE && (source < 0 || source >= num_peers(comm)))
        return fail(MPI_ERR_RANK, "receiving from rank %d, expected 0 to %d, MPI_ANY_SOURCE or MPI_PROC_NULL", source,
                    num_peers(comm) - 1);
    if (tag < 0 && tag != MPI_ANY_TAG)
        return fail(MPI_ERR_TAG, "receiving with tag %d, expected 0 or more, or MPI_ANY_TAG", tag);
    return MPI_SUCCESS;
}

int check_receive(const void *buffer, MPI_Count count, const Datatype *type, int source, int tag, const Comm *comm) {
    TRY(check_source(source, tag, comm));
    return source == MPI_PROC_NULL ? MPI_SUCCESS : check_data(buffer, count, type);
}

int conclude_receive(const Ended *ended, int64_t room, const Comm *comm, MPI_Status *status) {
    if (status != MPI_STATUS_IGNORE) set_receive_status(ended, comm, status);
    if (ended->error == MPI_ERR_TRUNCATE)
        return fail(MPI_ERR_TRUNCATE, "a message of %lld bytes from rank %d with tag %d: room for %lld",
                    (long long)ended->num_bytes,
                    rank_of_peer(comm, ended->source), ended->tag, (long long)room);
    return ended->error ? fail(ended->error, "a receive has failed in the lower half") : MPI_SUCCESS;
}

/* ---- Blocking ---- */

static int send_and_wait(int flags, const void *buffer, MPI_Count count, Datatype *type, int peer, int tag,
                         Comm *comm) {
    Payload payload = payload_of(buffer, count, type);
    Operation operation = {0};
    bool others = must_carry_on();
    int error = lower_send(others ? flags : flags | FLAG_BLOCKING, comm->number, peer, tag, payload.at,
                           payload.num_bytes, &operation);
    if (!error && operation.number) error = wait_for_operation(&operation);
    free(payload.owned);
    if (!error && operation.ended.error) error = fail(operation.ended.error, "a send has failed in the lower half");
    return error;
}

static int send(int flags, const void *buf, MPI_Count count, Datatype *type, int dest, int tag, Comm *comm) {
    TRY(check_send(buf, count, type, dest, tag, comm));
    return dest == MPI_PROC_NULL ? MPI_SUCCESS : send_and_wait(flags, buf, count, type, peer_of(comm, dest), tag, comm);
}

int do_Send(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm) {
    return send(0, buf, count, datatype, dest, tag, comm);
}

int do_Rsend(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm) {
    return send(0, buf, count, datatype, dest, tag, comm);
}

int do_Ssend(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm) {
    return send(FLAG_SYNCHRONOUS, buf, count, datatype, dest, tag, comm);
}

int do_Recv(void *buf, MPI_Count count, Datatype *datatype, int source, int tag, Comm *comm, MPI_Status *status) {
    TRY(check_receive(buf, count, datatype, source, tag, comm));
    if (source == MPI_PROC_NULL) return set_nobody_status(status), MPI_SUCCESS;
    Landing landing = landing_for(buf, count, datatype);
    Operation operation = {.at = landing.at, .room = landing.room};
    int64_t room = landing.room;
    int flags = must_carry_on() ? 0 : FLAG_BLOCKING;
    int error = lower_receive(flags, comm->number, world_source(comm, source), lower_tag(tag), &operation);
    if (!error && operation.number) error = wait_for_operation(&operation);
    if (error) return drop_landing(&landing), error;
    land(&landing, operation.ended.num_bytes < room ? operation.ended.num_bytes : room);
    return conclude_receive(&operation.ended, room, comm, status);
}

/* ---- Requests ---- */

Request *request_from_nobody(Comm *comm) {
    Request *request = make_request(comm, 0);
    set_nobody_status(&request->status);
    atomic_store(&request->is_finished, true);
    return request;
}

static int start_send(int flags, const void *buf, MPI_Count count, Datatype *type, int dest, int tag, Comm *comm,
                      Request **made) {
    TRY(check_send(buf, count, type, dest, tag, comm));
    if (dest == MPI_PROC_NULL) return *made = sent_request, MPI_SUCCESS;
    Payload payload = payload_of(buf, count, type);
    Operation operation = {0};
    int error = lower_send(flags, comm->number, peer_of(comm, dest), tag, payload.at, payload.num_bytes, &operation);
    if (error || (!operation.number && !operation.ended.error)) {
        free(payload.owned);
        *made = error ? NULL : sent_request;
        return error;
    }
    *made = make_request(comm, 1);
    (*made)->is_cancellable = true;
    (*made)->one = (Step){.operation = operation, .owned = payload.owned};
    return MPI_SUCCESS;
}

int do_Isend(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm, Request **request) {
    return start_send(0, buf, count, datatype, dest, tag, comm, request);
}

int do_Irsend(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm, Request **request) {
    return start_send(0, buf, count, datatype, dest, tag, comm, request);
}

int do_Issend(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm, Request **request) {
    return start_send(FLAG_SYNCHRONOUS, buf, count, datatype, dest, tag, comm, request);
}

int do_Irecv(void *buf, MPI_Count count, Datatype *datatype, int source, int tag, Comm *comm, Request **request) {
    TRY(check_receive(buf, count, datatype, source, tag, comm));
    if (source == MPI_PROC_NULL) return *request = request_from_nobody(comm), MPI_SUCCESS;
    Request *made = make_request(comm, 1);
    made->is_receive = made->is_cancellable = true;
    int error = step_receive(made, 0, comm->number, world_source(comm, source), lower_tag(tag), buf, count, datatype);
    if (error) return let_go(made), error;
    *request = made;
    return MPI_SUCCESS;
}
