/* Partitioned sends and receives: one message, sent when its last partition is ready.
 *
 * MPI matches them by communicator, rank and tag in the order in which they were *made*, and with nothing else. So the
 * n-th that is made for a peer and a tag has a number of its own, under which its messages travel, whatever the order
 * in which they are started and become ready.
 */
#include "request.h"

struct Partitioned {
    void *buffer;
    MPI_Count count;      /* of all partitions */
    int num_partitions;
    Datatype *type;       /* kept */
    bool is_send, is_from_nobody;
    uint64_t number;      /* messages travel under it */
    int peer;             /* world rank */
    int tag;              /* the number tells messages apart; this is for the receiver's status */
    atomic_int num_ready;
    atomic_bool *are_ready; /* of a send: NULL otherwise */
};
typedef struct Partitioned Partitioned;

/* ---- Numbers ---- */

/* How many have been made for a communicator, peer, tag and direction; under process.guard. */
typedef struct Made {
    uint64_t comm;
    int peer, tag;
    bool is_send;
    uint64_t count;
    struct Made *next;
} Made;
static Made *made_so_far;

static uint64_t next_of_its_kind(uint64_t comm, int peer, int tag, bool is_send) {
    uint64_t count = 0;
    LOCKED {
        Made *one = made_so_far;
        while (one && !(one->comm == comm && one->peer == peer && one->tag == tag && one->is_send == is_send))
            one = one->next;
        if (one == NULL) {
            one = NEW(Made);
            *one = (Made){comm, peer, tag, is_send, 0, made_so_far};
            made_so_far = one;
        }
        count = one->count++;
    }
    return count;
}

/* Apart from the numbers of communicators, and from those that their own messages have. */
static uint64_t number_for(const Comm *comm, int peer, int tag, bool is_send) {
    uint64_t count = next_of_its_kind(comm->number, peer, tag, is_send);
    return mix_numbers(mix_numbers(comm->number, (uint64_t)(unsigned)tag), count) | (uint64_t)1 << 63;
}

/* ---- Requests ---- */

static void drop_partitioned(void *state) {
    Partitioned *partitioned = state;
    let_go(partitioned->type);
    free(partitioned->are_ready);
}

static bool is_sent(Request *request) {
    const Partitioned *p = request->partitioned;
    return atomic_load(&p->num_ready) > p->num_partitions;
}

static int start_partitioned(Request *request) {
    Partitioned *p = request->partitioned;
    if (p->is_from_nobody && !p->is_send) return set_nobody_status(&request->status), MPI_SUCCESS;
    if (!p->is_send) return step_receive(request, 0, p->number, p->peer, p->tag, p->buffer, p->count, p->type);
    for (int i = 0; i < p->num_partitions; i++) atomic_store(&p->are_ready[i], false);
    atomic_store(&p->num_ready, 0);
    return MPI_SUCCESS;
}

static int init(Partitioned given, int rank, int tag, MPI_Count count, Comm *comm, Request **made) {
    if (given.num_partitions < 1) return fail(MPI_ERR_ARG, "%d partitions, expected 1 or more", given.num_partitions);
    if (!given.is_send && (rank == MPI_ANY_SOURCE || tag == MPI_ANY_TAG))
        return fail(rank == MPI_ANY_SOURCE ? MPI_ERR_RANK : MPI_ERR_TAG, "a partitioned receive has no wildcard");
    if (count < 0) return fail(MPI_ERR_COUNT, "count is %lld, expected 0 or more", (long long)count);
    TRY(check_send(given.buffer, count, given.type, rank, tag, comm));
    given.count = count * given.num_partitions;
    given.is_from_nobody = rank == MPI_PROC_NULL;
    if (!given.is_from_nobody) {
        given.peer = peer_of(comm, rank);
        given.tag = tag;
        given.number = number_for(comm, given.peer, tag, given.is_send);
    }
    if (given.is_send) given.are_ready = NEW_ARRAY(atomic_bool, given.num_partitions);
    keep(given.type);
    Request *request = make_request(comm, 1);
    request->partitioned = NEW(Partitioned);
    *request->partitioned = given;
    request->state = request->partitioned;
    request->drop_state = drop_partitioned;
    request->is_persistent = true;
    request->is_receive = !given.is_send && !given.is_from_nobody;
    request->start = start_partitioned;
    if (given.is_send) request->is_over_elsewhere = is_sent;
    *made = request;
    return MPI_SUCCESS;
}

int do_Psend_init(const void *buf, int partitions, MPI_Count count, Datatype *datatype, int dest, int tag, Comm *comm,
                  Info *info,
                  Request **request) {
    (void)info;
    Partitioned given = {.buffer = (void *)(uintptr_t)buf, .num_partitions = partitions, .type = datatype,
        .is_send = true};
    return init(given, dest, tag, count, comm, request);
}

int do_Precv_init(void *buf, int partitions, MPI_Count count, Datatype *datatype, int source, int tag, Comm *comm,
                  Info *info,
                  Request **request) {
    (void)info;
    Partitioned given = {.buffer = buf, .num_partitions = partitions, .type = datatype};
    return init(given, source, tag, count, comm, request);
}

/* ---- Partitions ---- */

/* Sends the message, once all partitions are ready. */
static int send_whole(Request *request) {
    Partitioned *p = request->partitioned;
    int error = MPI_SUCCESS;
    if (!p->is_from_nobody) error = step_send(request, 0, 0, p->number, p->peer, p->tag, p->buffer, p->count,
                                            p->type);
    /* Only now may another thread that waits take it for sent. */
    atomic_fetch_add(&p->num_ready, 1);
    return error;
}

int do_Pready(int partition, Request *request) {
    Partitioned *p = request->partitioned;
    if (!p || !p->is_send || !request->is_active) return fail(MPI_ERR_REQUEST,
                                                              "the request is no partitioned send that is started");
    if (partition < 0 || partition >= p->num_partitions)
        return fail(MPI_ERR_ARG, "partition %d, expected 0 to %d", partition, p->num_partitions - 1);
    if (atomic_exchange(&p->are_ready[partition], true)) return fail(MPI_ERR_ARG, "partition %d is ready already",
                                                                     partition);
    return atomic_fetch_add(&p->num_ready, 1) == p->num_partitions - 1 ? send_whole(request) : MPI_SUCCESS;
}

int do_Pready_range(int partition_low, int partition_high, Request *request) {
    for (int i = partition_low; i <= partition_high; i++) TRY(do_Pready(i, request));
    return MPI_SUCCESS;
}

int do_Pready_list(int length, const int array_of_partitions[], Request *request) {
    for (int i = 0; i < length; i++) TRY(do_Pready(array_of_partitions[i], request));
    return MPI_SUCCESS;
}

int do_Parrived(Request *request, int partition, int *flag) {
    const Partitioned *p = request->partitioned;
    if (!p || p->is_send) return fail(MPI_ERR_REQUEST, "the request is no partitioned receive");
    if (partition < 0 || partition >= p->num_partitions)
        return fail(MPI_ERR_ARG, "partition %d, expected 0 to %d", partition, p->num_partitions - 1);
    if (!is_idle(request)) TRY(progress(&request, 1, false, true));
    *flag = is_idle(request) || atomic_load(&request->is_finished);
    return MPI_SUCCESS;
}
