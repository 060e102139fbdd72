/* Persistent sends and receives: their arguments are kept, and starting one starts an ordinary operation. */
#include "request.h"

/* What a send or receive is started with. `peer` is a world rank, ANY, or MPI_PROC_NULL if `is_from_nobody`. */
typedef struct {
    void *buffer;
    MPI_Count count;
    Datatype *type; /* kept */
    int flags, peer, rank, tag;
    bool is_from_nobody;
} Arguments;

static void drop_arguments(void *state) {
    Arguments *arguments = state;
    let_go(arguments->type);
    free(arguments);
}

static int start_to_send(Request *request) {
    const Arguments *a = request->state;
    if (a->is_from_nobody) return MPI_SUCCESS;
    return step_send(request, 0, a->flags, request->comm->number, a->peer, a->tag, a->buffer, a->count, a->type);
}

static int start_to_send_buffered(Request *request) {
    const Arguments *a = request->state;
    return send_buffered(a->buffer, a->count, a->type, a->rank, a->tag, request->comm);
}

static int start_to_receive(Request *request) {
    const Arguments *a = request->state;
    if (a->is_from_nobody) return set_nobody_status(&request->status), MPI_SUCCESS;
    return step_receive(request, 0, request->comm->number, a->peer, a->tag, a->buffer, a->count, a->type);
}

static Request *make_persistent(Comm *comm, Arguments arguments, int (*start)(Request *request)) {
    Request *made = make_request(comm, arguments.is_from_nobody ? 0 : 1);
    Arguments *kept = NEW(Arguments);
    *kept = arguments;
    keep(kept->type);
    made->state = kept;
    made->drop_state = drop_arguments;
    made->is_persistent = made->is_cancellable = true;
    made->start = start;
    return made;
}

/* `start` is one of those above. */
static int init_send(Arguments arguments, Comm *comm, int (*start)(Request *request), Request **made) {
    int dest = arguments.rank;
    TRY(check_send(arguments.buffer, arguments.count, arguments.type, dest, arguments.tag, comm));
    arguments.is_from_nobody = dest == MPI_PROC_NULL;
    if (!arguments.is_from_nobody) arguments.peer = peer_of(comm, dest);
    *made = make_persistent(comm, arguments, start);
    return MPI_SUCCESS;
}

/* do_Send_init */ /* do_Rsend_init */ /* do_Ssend_init */ /* do_Bsend_init */
#define INIT_SEND(Name, flags, start)                                                                              \
    int do_##Name##_init(const void *buf, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm,      \
                         Request **request) {                                                                      \
        Arguments arguments = {(void *)(uintptr_t)buf, count, datatype, flags, 0, dest, tag, false};               \
        return init_send(arguments, comm, start, request);                                                         \
    }
INIT_SEND(Send, 0, start_to_send)
INIT_SEND(Rsend, 0, start_to_send)
INIT_SEND(Ssend, FLAG_SYNCHRONOUS, start_to_send)
INIT_SEND(Bsend, 0, start_to_send_buffered)

int do_Recv_init(void *buf, MPI_Count count, Datatype *datatype, int source, int tag, Comm *comm, Request **request) {
    TRY(check_receive(buf, count, datatype, source, tag, comm));
    bool is_from_nobody = source == MPI_PROC_NULL;
    int peer = is_from_nobody ? 0 : world_source(comm, source);
    Arguments arguments = {buf, count, datatype, 0, peer, source, lower_tag(tag), is_from_nobody};
    *request = make_persistent(comm, arguments, start_to_receive);
    (*request)->is_receive = !is_from_nobody;
    return MPI_SUCCESS;
}

/* ---- Starting ---- */

int do_Start(MPI_Request *handle) {
    Request *request = request_of(*handle);
    if (request == NULL || !request->is_persistent)
        return fail(MPI_ERR_REQUEST, "the request is null or not persistent: there is nothing to be started");
    if (atomic_load(&request->is_active)) return fail(MPI_ERR_REQUEST,
                                                      "the request has been started and is not completed yet");
    rewind_request(request);
    TRY(request->start(request));
    atomic_store(&request->is_active, true);
    if (request->more) carry_on(request);
    return MPI_SUCCESS;
}

int do_Startall(int count, MPI_Request array_of_requests[]) {
    for (int i = 0; i < count; i++) TRY(do_Start(&array_of_requests[i]));
    return MPI_SUCCESS;
}
