/* Collectives on packed bytes, for the library's own needs. */
#include "exchange.h"
#include "channel.h"
#include "datatype.h"
#include "errors.h"
#include "request.h"

enum { WORDS_BYTES = 1024 };

/* A blocking collective of the lower half. */
static int collect(Comm *comm, Collective collective, void *into, int64_t room) {
    Operation operation = {.at = into, .room = room};
    TRY(lower_collective(must_carry_on() ? 0 : FLAG_BLOCKING, comm->number, &collective, &operation));
    TRY(wait_for_operation(&operation));
    return operation.ended.error;
}

int barrier(Comm *comm) {
    return collect(comm, (Collective){.kind = KIND_BARRIER}, NULL, 0);
}

int broadcast(Comm *comm, int root, void *data, int64_t num_bytes) {
    Collective collective = {.kind = KIND_BCAST, .root = root};
    if (comm->rank != root) return collect(comm, collective, data, num_bytes);
    collective.send = data;
    collective.send_bytes = num_bytes;
    return collect(comm, collective, NULL, 0);
}

int gather_all(Comm *comm, const void *mine, int64_t num_bytes, void *all) {
    Collective collective = {.kind = KIND_ALLGATHER, .send = mine, .send_bytes = num_bytes};
    return collect(comm, collective, all, num_bytes * comm->size);
}

int gather_unevenly(Comm *comm, Bytes mine, const int64_t *num_bytes, void *all) {
    Collective collective = {.kind = KIND_ALLGATHERV, .send = mine.at, .send_bytes = mine.num_bytes};
    collective.counts = num_bytes;
    collective.num_counts = (uint32_t)comm->size;
    int64_t room = 0;
    for (int rank = 0; rank < comm->size; rank++) room += num_bytes[rank];
    return collect(comm, collective, all, room);
}

int swap_with(uint64_t number, int world, int tag, Bytes mine, Bytes into) {
    Operation sent = {0}, taken = {.at = (void *)(uintptr_t)into.at, .room = into.num_bytes};
    TRY(lower_send(0, number, world, tag, mine.at, mine.num_bytes, &sent));
    int error = lower_receive(must_carry_on() ? 0 : FLAG_BLOCKING, number, world, tag, &taken);
    if (!error) error = wait_for_operation(&taken);
    /* What is sent must stay until it has been taken, even if nothing comes back. */
    TRY(wait_for_operation(&sent));
    return error ? error : taken.ended.error;
}

int swap_groups(Comm *comm, Bytes mine, void **theirs, int64_t *num_bytes) {
    int tag = next_tag(comm), leader = comm->remote[0], error = MPI_SUCCESS;
    uint64_t number = hidden_number(comm);
    *theirs = NULL;
    Bytes into = {num_bytes, sizeof *num_bytes}, size = {&mine.num_bytes, sizeof mine.num_bytes};
    if (comm->rank == 0) error = swap_with(number, leader, tag, size, into);
    if (!error) error = broadcast(comm->local, 0, num_bytes, sizeof *num_bytes);
    if (error) return error;
    *theirs = NEW_ARRAY(char, *num_bytes);
    if (comm->rank == 0) error = swap_with(number, leader, tag, mine, (Bytes){*theirs, *num_bytes});
    if (!error) error = broadcast(comm->local, 0, *theirs, *num_bytes);
    return error;
}

int agree(Comm *comm, int error) {
    char words[WORDS_BYTES];
    snprintf(words, sizeof words, "%s", error ? noted_words() : "");
    int mine = error ? comm->rank : INT_MAX, first = INT_MAX, told = error;
    Collective least = {.kind = KIND_ALLREDUCE, .op = OP_MIN, .send = &mine, .send_bytes = sizeof mine};
    least.type = real_type(datatype_of(MPI_INT));
    TRY(collect(comm, least, &first, sizeof first));
    if (first == INT_MAX) return MPI_SUCCESS;
    TRY(broadcast(comm, first, &told, sizeof told));
    TRY(broadcast(comm, first, words, sizeof words));
    return fail(told, "%s (rank %d)", words, first);
}
