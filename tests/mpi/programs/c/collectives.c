/* Every collective in its three forms, on communicators of many kinds, against what each rank can work out by itself.
 *
 * `collectives ROUNDS PAUSE` goes through all of it so often, with a pause in us after each round; rank 0 prints
 * `answer` at the end.
 */
#include <unistd.h>

#include "checking.h"

#include "gate.h"

/* ---- Data as they are ---- */

static void rooted(MPI_Comm comm, int form, const Layout *l, int root, long *send, long *receive) {
    int rank, size, starts = 2;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    clear(send, receive);
    if (rank == root) fill(send, l, 0, COUNT, root, 0);
    RUN(Bcast, Ibcast, send, COUNT, l->type, root);
    check(send, l, 0, COUNT, root, 0, "Bcast");

    clear(send, receive);
    fill(send, l, 0, COUNT, rank, 0);
    RUN(Gather, Igather, send, COUNT, l->type, receive, rank == root ? COUNT : -5,
        rank == root ? l->type : MPI_DATATYPE_NULL, root);
    for (int r = 0; rank == root && r < size; r++) check(receive, l, r * COUNT, COUNT, r, 0, "Gather");
    if (rank == root) fill(receive, l, rank * COUNT, COUNT, rank, 9);
    fill(send, l, 0, COUNT, rank, 9);
    RUN(Gather, Igather, rank == root ? MPI_IN_PLACE : send, COUNT, rank == root ? MPI_DATATYPE_NULL : l->type,
        receive, COUNT, l->type, root);
    for (int r = 0; rank == root && r < size; r++) check(receive, l, r * COUNT, COUNT, r, 9, "Gather in place");

    clear(send, receive);
    if (rank == root)
        for (int r = 0; r < size; r++) fill(send, l, r * COUNT, COUNT, r, 4);
    RUN(Scatter, Iscatter, send, COUNT, l->type, receive, COUNT, l->type, root);
    check(receive, l, 0, COUNT, rank, 4, "Scatter");
    if (rank == root)
        for (int r = 0; r < size; r++) fill(receive, l, r * COUNT, COUNT, r, 6);
    RUN(Scatter, Iscatter, receive, COUNT, l->type, rank == root ? MPI_IN_PLACE : send, COUNT, l->type, root);
    check(rank == root ? receive + place(l, rank * COUNT * l->per) : send, l, 0, COUNT, rank, 6, "Scatter in place");
}

/* Blocks of 1, 2, 3, 1, ... elements, from the last rank to the first with a gap between. */
static void uneven(int size, int *counts, int *places) {
    for (int r = 0; r < size; r++) counts[r] = r % 3 + 1, places[r] = (size - 1 - r) * 4;
}

static void uneven_blocks(MPI_Comm comm, int form, const Layout *l, int root, long *send, long *receive) {
    int rank, size, starts = 2, counts[64], places[64];
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    uneven(size, counts, places);
    clear(send, receive);
    fill(send, l, 0, counts[rank], rank, 1);
    RUN(Gatherv, Igatherv, send, counts[rank], l->type, receive, counts, places, l->type, root);
    for (int r = 0; rank == root && r < size; r++) check(receive, l, places[r], counts[r], r, 1, "Gatherv");
    clear(send, receive);
    for (int r = 0; rank == root && r < size; r++) fill(send, l, places[r], counts[r], r, 2);
    RUN(Scatterv, Iscatterv, send, counts, places, l->type, receive, counts[rank], l->type, root);
    check(receive, l, 0, counts[rank], rank, 2, "Scatterv");
    clear(send, receive);
    fill(send, l, 0, counts[rank], rank, 3);
    RUN(Allgatherv, Iallgatherv, send, counts[rank], l->type, receive, counts, places, l->type);
    for (int r = 0; r < size; r++) check(receive, l, places[r], counts[r], r, 3, "Allgatherv");
    clear(send, receive);
    fill(receive, l, places[rank], counts[rank], rank, 3);
    RUN(Allgatherv, Iallgatherv, MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, receive, counts, places, l->type);
    for (int r = 0; r < size; r++) check(receive, l, places[r], counts[r], r, 3, "Allgatherv in place");
}

static void all_to_all(MPI_Comm comm, int form, const Layout *l, long *send, long *receive) {
    int rank, size, starts = 2, sent[64], taken[64], to[64], from[64];
    MPI_Datatype types[64];
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    clear(send, receive);
    fill(send, l, 0, COUNT, rank, 0);
    RUN(Allgather, Iallgather, send, COUNT, l->type, receive, COUNT, l->type);
    for (int r = 0; r < size; r++) check(receive, l, r * COUNT, COUNT, r, 0, "Allgather");
    clear(send, receive);
    for (int r = 0; r < size; r++) fill(send, l, r * COUNT, COUNT, rank, 10 * r);
    RUN(Alltoall, Ialltoall, send, COUNT, l->type, receive, COUNT, l->type);
    for (int r = 0; r < size; r++) check(receive, l, r * COUNT, COUNT, r, 10 * rank, "Alltoall");
    starts = 1;
    RUN(Alltoall, Ialltoall, MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, send, COUNT, l->type);
    for (int r = 0; r < size; r++) check(send, l, r * COUNT, COUNT, r, 10 * rank, "Alltoall in place");
    starts = 2;
    clear(send, receive);
    for (int r = 0; r < size; r++) {
        sent[r] = (rank + r) % 3;
        taken[r] = (rank + r) % 3;
        to[r] = from[r] = (size - 1 - r) * 4;
        types[r] = l->type;
        fill(send, l, to[r], sent[r], rank, 10 * r);
    }
    RUN(Alltoallv, Ialltoallv, send, sent, to, l->type, receive, taken, from, l->type);
    for (int r = 0; r < size; r++) check(receive, l, from[r], taken[r], r, 10 * rank, "Alltoallv");
    memset(receive, -1, MOST * sizeof *receive);
    for (int r = 0; r < size; r++) to[r] = from[r] = (int)sizeof(long) * l->stride * 4 * (size - 1 - r);
    RUN(Alltoallw, Ialltoallw, send, sent, to, types, receive, taken, from, types);
    for (int r = 0; r < size; r++) check(receive, l, (size - 1 - r) * 4, taken[r], r, 10 * rank, "Alltoallw");
}

/* ---- Reductions ---- */

/* The fold over ranks 0 to last of values i and i + 1. */
static void folded(int last, int i, MPI_Op sum, int is_own, long *result) {
    result[0] = value(0, i), result[1] = value(0, i + 1);
    for (int r = 1; r <= last; r++) {
        long next[2] = {value(r, i), value(r, i + 1)};
        int one = 1;
        MPI_Datatype none = MPI_DATATYPE_NULL;
        if (is_own) compose(result, next, &one, &none);
        for (int k = 0; k < 2 && !is_own; k++) {
            if (sum == MPI_SUM) next[k] += result[k];
            else if (sum == MPI_MAX) next[k] = next[k] > result[k] ? next[k] : result[k];
            else if (sum == MPI_BXOR) next[k] ^= result[k];
        }
        memcpy(result, next, sizeof next);
    }
}

static void check_folded(const long *buffer, int count, int first, int last, MPI_Op op, int is_own, const char *what) {
    for (int i = 0; i < count; i++) {
        long expected[2];
        folded(last, 2 * (first + i), op, is_own, expected);
        for (int k = 0; k < 2; k++) expect(buffer[2 * i + k], expected[k], what, last, i);
    }
}

static void reductions(MPI_Comm comm, int form, MPI_Datatype pair, MPI_Op op, int is_own, int root, long *send,
                       long *receive) {
    int rank, size, starts = 2, per = is_own ? 1 : 2, counts[64], sum = 0, before = 0;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    MPI_Datatype type = is_own ? pair : MPI_LONG;
    for (int r = 0; r < size; r++) {
        counts[r] = per * (r % 3);
        if (r < rank) before += r % 3;
        sum += r % 3;
    }
    clear(send, receive);
    fill_pairs(send, rank, size * COUNT + sum);
    RUN(Reduce, Ireduce, send, receive, per * COUNT, type, op, root);
    if (rank == root) check_folded(receive, COUNT, 0, size - 1, op, is_own, "Reduce");
    RUN(Allreduce, Iallreduce, send, receive, per * COUNT, type, op);
    check_folded(receive, COUNT, 0, size - 1, op, is_own, "Allreduce");
    RUN(Scan, Iscan, send, receive, per * COUNT, type, op);
    check_folded(receive, COUNT, 0, rank, op, is_own, "Scan");
    memset(receive, -1, MOST * sizeof *receive);
    RUN(Exscan, Iexscan, send, receive, per * COUNT, type, op);
    if (rank) check_folded(receive, COUNT, 0, rank - 1, op, is_own, "Exscan");
    else expect(receive[0], -1, "Exscan on the first rank", rank, 0);
    RUN(Reduce_scatter_block, Ireduce_scatter_block, send, receive, per * COUNT, type, op);
    check_folded(receive, COUNT, rank * COUNT, size - 1, op, is_own, "Reduce_scatter_block");
    RUN(Reduce_scatter, Ireduce_scatter, send, receive, counts, type, op);
    check_folded(receive, rank % 3, before, size - 1, op, is_own, "Reduce_scatter");
    starts = 1;
    fill_pairs(receive, rank, COUNT);
    RUN(Allreduce, Iallreduce, MPI_IN_PLACE, receive, per * COUNT, type, op);
    check_folded(receive, COUNT, 0, size - 1, op, is_own, "Allreduce in place");
    fill_pairs(receive, rank, COUNT);
    RUN(Reduce, Ireduce, rank == root ? MPI_IN_PLACE : receive, rank == root ? receive : NULL, per * COUNT, type, op,
        root);
    if (rank == root) check_folded(receive, COUNT, 0, size - 1, op, is_own, "Reduce in place");
    fill_pairs(receive, rank, COUNT);
    RUN(Scan, Iscan, MPI_IN_PLACE, receive, per * COUNT, type, op);
    check_folded(receive, COUNT, 0, rank, op, is_own, "Scan in place");
}

/* ---- All of it, on one communicator ---- */

static void within(MPI_Comm comm, MPI_Datatype strided, MPI_Datatype pair, MPI_Op own, long *send, long *receive) {
    const Layout layouts[] = {{MPI_LONG, 1, 1, 1}, {strided, 2, 2, 4}};
    const MPI_Op ops[] = {MPI_SUM, MPI_MAX, MPI_BXOR};
    int size;
    MPI_Comm_size(comm, &size);
    for (int form = BLOCKING; form < NUM_FORMS; form++) {
        int root = (round_number + form) % size;
        for (int i = 0; i < 2; i++) {
            rooted(comm, form, &layouts[i], root, send, receive);
            uneven_blocks(comm, form, &layouts[i], root, send, receive);
            all_to_all(comm, form, &layouts[i], send, receive);
        }
        for (int i = 0; i < 3; i++) reductions(comm, form, pair, ops[i], 0, root, send, receive);
        reductions(comm, form, pair, own, 1, root, send, receive);
    }
    MPI_Barrier(comm);
}

/* Several of a program's own folds under way at once, finished in another order. */
static void overlapping(MPI_Comm comm, MPI_Datatype pair, MPI_Op own) {
    enum { NUM = 6 };
    long given[2 * NUM], got[2 * NUM];
    MPI_Request requests[NUM];
    int rank, size;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    fill_pairs(given, rank, NUM);
    for (int i = 0; i < NUM; i++) MPI_Iallreduce(given + 2 * i, got + 2 * i, 1, pair, own, comm, &requests[i]);
    for (int i = NUM - 1; i >= 0; i--) MPI_Wait(&requests[(i + rank) % NUM], MPI_STATUS_IGNORE);
    check_folded(got, NUM, 0, size - 1, own, 1, "overlapping Iallreduce");
}

/* Persistent ones are matched by the order in which they were made: each rank starts them in another one. */
static void started_in_any_order(MPI_Datatype pair, MPI_Op own, long *send, long *receive) {
    enum { NUM = 4, LONG = MOST };
    long given[2], got[2], word = 0;
    MPI_Request requests[NUM];
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Bcast_init(&word, 1, MPI_LONG, 0, MPI_COMM_WORLD, MPI_INFO_NULL, &requests[0]);
    MPI_Allreduce_init(send, receive, LONG, MPI_LONG, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &requests[1]);
    MPI_Barrier_init(MPI_COMM_WORLD, MPI_INFO_NULL, &requests[2]);
    MPI_Allreduce_init(given, got, 1, pair, own, MPI_COMM_WORLD, MPI_INFO_NULL, &requests[3]);
    for (int start = 1; start <= 2; start++) {
        word = rank == 0 ? 40 + start : 0;
        for (int i = 0; i < LONG; i++) send[i] = i * start;
        fill_pairs(given, rank, 1);
        for (int i = 0; i < NUM; i++) MPI_Start(&requests[rank % 2 ? NUM - 1 - i : (i + rank) % NUM]);
        MPI_Waitall(NUM, requests, MPI_STATUSES_IGNORE);
        expect(word, 40 + start, "Bcast started in any order", start, 0);
        for (int i = 0; i < LONG; i += 500) expect(receive[i], (long)i * start * size, "Allreduce in any order", i, 0);
        check_folded(got, 1, 0, size - 1, own, 1, "own Allreduce in any order");
    }
    for (int i = 0; i < NUM; i++) MPI_Request_free(&requests[i]);
}

/* ---- Communicators ---- */

static void on_many(MPI_Datatype strided, MPI_Datatype pair, MPI_Op own, long *send, long *receive) {
    MPI_Comm comms[6];
    MPI_Group everybody, some;
    int size, first[1][3] = {{0, 0, 1}}, rank;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_dup(MPI_COMM_WORLD, &comms[0]);
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, 0, &comms[1]);
    MPI_Comm_split(MPI_COMM_WORLD, 0, -world_rank, &comms[2]);
    MPI_Comm_group(MPI_COMM_WORLD, &everybody);
    first[0][1] = (size - 1) / 2;
    MPI_Group_range_incl(everybody, 1, first, &some);
    MPI_Comm_create(MPI_COMM_WORLD, some, &comms[3]);
    comms[4] = MPI_COMM_NULL;
    if (world_rank <= (size - 1) / 2) MPI_Comm_create_group(MPI_COMM_WORLD, some, 3, &comms[4]);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &comms[5]);
    MPI_Comm_rank(comms[2], &rank);
    expect(rank, size - 1 - world_rank, "Comm_split by key", rank, 0);
    for (int i = 0; i < 6; i++) {
        if (comms[i] == MPI_COMM_NULL) continue;
        long before = checked;
        within(comms[i], strided, pair, own, send, receive);
        overlapping(comms[i], pair, own);
        /* Who shares a host depends on where the job is; the answer may not. */
        if (i == 5) checked = before;
        MPI_Comm_free(&comms[i]);
    }
    MPI_Group_free(&some);
    MPI_Group_free(&everybody);
}

int main(int argc, char **argv) {
    static long send[MOST], receive[MOST];
    MPI_Datatype vector, strided, pair;
    MPI_Op own;
    int rounds = argc > 1 ? atoi(argv[1]) : 1, pause_us = argc > 2 ? atoi(argv[2]) : 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Type_vector(2, 1, 2, MPI_LONG, &vector);
    MPI_Type_create_resized(vector, 0, 4 * sizeof(long), &strided);
    MPI_Type_contiguous(2, MPI_LONG, &pair);
    MPI_Type_commit(&strided);
    MPI_Type_commit(&pair);
    MPI_Op_create(compose, 0, &own);
    for (round_number = 0; round_number < rounds; round_number++) {
        if (world_rank == 0 && round_number == rounds - 1) wait_at_gate();
        within(MPI_COMM_WORLD, strided, pair, own, send, receive);
        within(MPI_COMM_SELF, strided, pair, own, send, receive);
        on_many(strided, pair, own, send, receive);
        started_in_any_order(pair, own, send, receive);
        usleep((useconds_t)pause_us);
    }
    MPI_Op_free(&own);
    MPI_Type_free(&pair);
    MPI_Type_free(&strided);
    MPI_Type_free(&vector);
    if (world_rank == 0) printf("answer %ld\n", checked);
    MPI_Finalize();
    return 0;
}
