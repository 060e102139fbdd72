/* Sends and receives in one call, of two buffers or of one. */
#include "request.h"

/* One direction: `peer` as the program gave it. */
typedef struct {
    void *buffer;
    MPI_Count count;
    Datatype *type;
    int peer, tag;
} Way;

static int check_ways(const Way *out, const Way *in, const Comm *comm) {
    TRY(check_send(out->buffer, out->count, out->type, out->peer, out->tag, comm));
    return check_receive(in->buffer, in->count, in->type, in->peer, in->tag, comm);
}

static int start_sending(const Payload *payload, const Way *out, const Comm *comm, Operation *operation) {
    if (out->peer == MPI_PROC_NULL) return MPI_SUCCESS;
    return lower_send(0, comm->number, peer_of(comm, out->peer), out->tag, payload->at, payload->num_bytes, operation);
}

/* Receives; while the send is not over, without waiting for one of them alone. */
static int receive(const Way *in, const Comm *comm, Operation *sending, MPI_Status *status) {
    if (in->peer == MPI_PROC_NULL) {
        set_nobody_status(status);
        return sending->number ? wait_for_operation(sending) : MPI_SUCCESS;
    }
    Landing landing = landing_for(in->buffer, in->count, in->type);
    Operation operation = {.at = landing.at, .room = landing.room};
    int64_t room = landing.room;
    int flags = sending->number || must_carry_on() ? 0 : FLAG_BLOCKING;
    int error = lower_receive(flags, comm->number, world_source(comm, in->peer), lower_tag(in->tag), &operation);
    if (!error && operation.number) error = wait_for_operation(&operation);
    if (!error && sending->number) error = wait_for_operation(sending);
    if (error) return drop_landing(&landing), error;
    land(&landing, operation.ended.num_bytes < room ? operation.ended.num_bytes : room);
    return conclude_receive(&operation.ended, room, comm, status);
}

static int exchange(Payload payload, const Way *out, const Way *in, Comm *comm, MPI_Status *status) {
    Operation sending = {0};
    int error = start_sending(&payload, out, comm, &sending);
    if (!error) error = receive(in, comm, &sending, status);
    free(payload.owned);
    if (!error && sending.ended.error) error = fail(sending.ended.error, "a send has failed in the lower half");
    return error;
}

/* The data of a buffer that is received into meanwhile. */
static Payload copy_of(const Way *out) {
    int64_t num_bytes = data_bytes(out->type, out->count);
    void *copy = NEW_ARRAY(char, num_bytes);
    pack_elements(out->buffer, out->count, out->type, copy);
    return (Payload){copy, num_bytes, copy};
}

int do_Sendrecv(const void *sendbuf, MPI_Count sendcount, Datatype *sendtype, int dest, int sendtag, void *recvbuf,
                MPI_Count recvcount,
                Datatype *recvtype, int source, int recvtag, Comm *comm, MPI_Status *status) {
    Way out = {(void *)(uintptr_t)sendbuf, sendcount, sendtype, dest, sendtag};
    Way in = {recvbuf, recvcount, recvtype, source, recvtag};
    TRY(check_ways(&out, &in, comm));
    Payload payload = {0};
    if (dest != MPI_PROC_NULL) payload = payload_of(sendbuf, sendcount, sendtype);
    return exchange(payload, &out, &in, comm, status);
}

int do_Sendrecv_replace(void *buf, MPI_Count count, Datatype *datatype, int dest, int sendtag, int source,
                        int recvtag, Comm *comm,
                        MPI_Status *status) {
    Way out = {buf, count, datatype, dest, sendtag}, in = {buf, count, datatype, source, recvtag};
    TRY(check_ways(&out, &in, comm));
    Payload payload = {0};
    if (dest != MPI_PROC_NULL) payload = copy_of(&out);
    return exchange(payload, &out, &in, comm, status);
}

/* ---- Requests: the first step receives, so the status is its ---- */

static int start_both(Payload payload, const Way *out, const Way *in, Comm *comm, Request **request) {
    Request *made = make_request(comm, 2);
    made->steps[1].owned = payload.owned;
    made->is_receive = true;
    int error = MPI_SUCCESS;
    if (in->peer == MPI_PROC_NULL) made->steps[0].operation.ended = (Ended){.source = ANY, .tag = ANY};
    else
        error = step_receive(made, 0, comm->number, world_source(comm, in->peer), lower_tag(in->tag), in->buffer,
                             in->count, in->type);
    if (!error) error = start_sending(&payload, out, comm, &made->steps[1].operation);
    if (error) return let_go(made), error;
    if (in->peer == MPI_PROC_NULL) {
        made->is_receive = false;
        set_nobody_status(&made->status);
    }
    *request = made;
    return MPI_SUCCESS;
}

int do_Isendrecv(const void *sendbuf, MPI_Count sendcount, Datatype *sendtype, int dest, int sendtag, void *recvbuf,
                 MPI_Count recvcount,
                 Datatype *recvtype, int source, int recvtag, Comm *comm, Request **request) {
    Way out = {(void *)(uintptr_t)sendbuf, sendcount, sendtype, dest, sendtag};
    Way in = {recvbuf, recvcount, recvtype, source, recvtag};
    TRY(check_ways(&out, &in, comm));
    Payload payload = {0};
    if (dest != MPI_PROC_NULL) payload = payload_of(sendbuf, sendcount, sendtype);
    return start_both(payload, &out, &in, comm, request);
}

int do_Isendrecv_replace(void *buf, MPI_Count count, Datatype *datatype, int dest, int sendtag, int source,
                         int recvtag, Comm *comm,
                         Request **request) {
    Way out = {buf, count, datatype, dest, sendtag}, in = {buf, count, datatype, source, recvtag};
    TRY(check_ways(&out, &in, comm));
    Payload payload = {0};
    if (dest != MPI_PROC_NULL) payload = copy_of(&out);
    return start_both(payload, &out, &in, comm, request);
}
