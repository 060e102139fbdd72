/* Every collective in its three forms, on communicators of many kinds, against what each rank can work out by itself.
 *
 * What rank r gives as its i-th value is value(r, i), so everybody knows what must come. `collectives ROUNDS` goes
 * through all of it so often; rank 0 prints `answer` at the end, and whoever finds a difference ends the job.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 3, MOST = 4096 };
enum { BLOCKING, STARTED, PERSISTENT, NUM_FORMS };

static int round_number, world_rank;
static long checked;

static long value(int rank, int i) { return 1000L * round_number + 37L * rank + 5L * i + 1; }

static void expect(long found, long expected, const char *what, int rank, int i) {
    checked += found;
    if (found == expected) return;
    fprintf(stderr, "%s: from rank %d, on rank %d of the world, value %d: %ld, expected %ld\n", what, rank,
            world_rank, i, found, expected);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Runs one collective in the form that is asked for. A persistent one is started `starts` times. */
#define RUN(Name, Iname, ...)                                              \
    do {                                                                   \
        MPI_Request request;                                               \
        if (form == BLOCKING) {                                            \
            MPI_##Name(__VA_ARGS__, comm);                                 \
        } else if (form == STARTED) {                                      \
            MPI_##Iname(__VA_ARGS__, comm, &request);                      \
            MPI_Wait(&request, MPI_STATUS_IGNORE);                         \
        } else {                                                           \
            MPI_##Name##_init(__VA_ARGS__, comm, MPI_INFO_NULL, &request); \
            for (int start = 0; start < starts; start++) {                 \
                MPI_Start(&request);                                       \
                MPI_Wait(&request, MPI_STATUS_IGNORE);                     \
            }                                                              \
            MPI_Request_free(&request);                                    \
        }                                                                  \
    } while (0)

/* How values stand in a buffer: `per` to an element, every `gap`-th long, elements `stride` longs apart. */
typedef struct {
    MPI_Datatype type;
    int per, gap, stride;
} Layout;

static int place(const Layout *layout, int i) {
    return i / layout->per * layout->stride + i % layout->per * layout->gap;
}

static void fill(long *buffer, const Layout *layout, int at, int count, int rank, int from) {
    for (int i = 0; i < count * layout->per; i++) buffer[place(layout, at * layout->per + i)] = value(rank, from + i);
}

static void check(const long *buffer, const Layout *layout, int at, int count, int rank, int from, const char *what) {
    for (int i = 0; i < count * layout->per; i++)
        expect(buffer[place(layout, at * layout->per + i)], value(rank, from + i), what, rank, i);
}

static void clear(long *one, long *two) {
    memset(one, -1, MOST * sizeof *one);
    memset(two, -1, MOST * sizeof *two);
}

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

/* Affine maps x -> a x + b: their composition is associative and keeps the order. */
static void compose(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    const long *first = in, prime = 1000003;
    for (int i = 0; i < *count; i++) {
        long *second = (long *)inout + 2 * i, a = first[2 * i], b = first[2 * i + 1];
        long c = second[0], d = second[1];
        second[0] = a * c % prime;
        second[1] = (a * d + b) % prime;
    }
}

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

static void fill_pairs(long *buffer, int rank, int count) {
    for (int i = 0; i < 2 * count; i++) buffer[i] = value(rank, i);
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

/* ---- Between two groups ---- */

/* Of the group of one parity, in the order of the world, the fold over its ranks. */
static void expect_of_group(const long *found, int count, int first, int parity, int size, MPI_Op op, int is_own,
                            const char *what) {
    for (int i = 0; i < count; i++) {
        long result[2] = {value(parity, 2 * (first + i)), value(parity, 2 * (first + i) + 1)};
        for (int r = parity + 2; r < size; r += 2) {
            long next[2] = {value(r, 2 * (first + i)), value(r, 2 * (first + i) + 1)};
            int one = 1;
            MPI_Datatype none = MPI_DATATYPE_NULL;
            if (is_own) compose(result, next, &one, &none);
            else next[0] += result[0], next[1] += result[1];
            memcpy(result, next, sizeof next);
        }
        (void)op;
        for (int k = 0; k < 2; k++) expect(found[2 * i + k], result[k], what, parity, i);
    }
}

static void between(MPI_Comm comm, int form, MPI_Datatype pair, MPI_Op op, int is_own, long *send, long *receive) {
    int rank, ours, theirs, size = 0, starts = 2, parity = world_rank % 2, other = 1 - parity;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ours);
    MPI_Comm_remote_size(comm, &theirs);
    size = ours + theirs;
    const Layout longs = {MPI_LONG, 1, 1, 1};
    int root = parity == 0 ? rank == 0 ? MPI_ROOT : MPI_PROC_NULL : 0;
    MPI_Barrier(comm);
    clear(send, receive);
    if (root == MPI_ROOT) fill(send, &longs, 0, COUNT, 0, 0);
    RUN(Bcast, Ibcast, send, COUNT, MPI_LONG, root);
    if (parity == 1) check(send, &longs, 0, COUNT, 0, 0, "Bcast between groups");
    fill(send, &longs, 0, COUNT, world_rank, 0);
    RUN(Gather, Igather, send, COUNT, MPI_LONG, receive, COUNT, MPI_LONG, root);
    for (int r = 0; root == MPI_ROOT && r < theirs; r++)
        check(receive, &longs, r * COUNT, COUNT, 2 * r + 1, 0, "Gather between groups");
    RUN(Allgather, Iallgather, send, COUNT, MPI_LONG, receive, COUNT, MPI_LONG);
    for (int r = 0; r < theirs; r++)
        check(receive, &longs, r * COUNT, COUNT, 2 * r + other, 0, "Allgather between groups");
    for (int r = 0; r < theirs; r++) fill(send, &longs, r, 1, world_rank, 2 * r + other);
    RUN(Alltoall, Ialltoall, send, 1, MPI_LONG, receive, 1, MPI_LONG);
    for (int r = 0; r < theirs; r++) check(receive, &longs, r, 1, 2 * r + other, world_rank, "Alltoall between groups");
    MPI_Datatype type = is_own ? pair : MPI_LONG;
    int per = is_own ? 1 : 2, whole = ours * theirs;
    fill_pairs(send, world_rank, whole + COUNT);
    RUN(Reduce, Ireduce, send, receive, per * COUNT, type, op, root);
    if (root == MPI_ROOT) expect_of_group(receive, COUNT, 0, 1, size, op, is_own, "Reduce between groups");
    RUN(Allreduce, Iallreduce, send, receive, per * COUNT, type, op);
    expect_of_group(receive, COUNT, 0, other, size, op, is_own, "Allreduce between groups");
    RUN(Reduce_scatter_block, Ireduce_scatter_block, send, receive, per * theirs, type, op);
    expect_of_group(receive, theirs, rank * theirs, other, size, op, is_own, "Reduce_scatter_block between groups");
}

static void groups(MPI_Datatype pair, MPI_Op own, long *send, long *receive) {
    MPI_Comm half, both, twin, merged;
    int size, result, high;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size < 2) return;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, 0, &half);
    /* Only a leader must know the communicator of both. */
    MPI_Intercomm_create(half, 0, world_rank < 2 ? MPI_COMM_WORLD : MPI_COMM_NULL, 1 - world_rank % 2, 7, &both);
    MPI_Comm_dup(both, &twin);
    MPI_Comm_compare(both, twin, &result);
    expect(result, MPI_CONGRUENT, "Comm_compare of groups", 0, 0);
    for (int form = BLOCKING; form < NUM_FORMS; form++) {
        between(both, form, pair, MPI_SUM, 0, send, receive);
        between(twin, form, pair, own, 1, send, receive);
    }
    MPI_Intercomm_merge(both, world_rank % 2 == 0, &merged);
    MPI_Comm_rank(merged, &high);
    expect(high, world_rank % 2 ? world_rank / 2 : size / 2 + world_rank / 2, "Intercomm_merge", 0, 0);
    MPI_Comm_free(&merged);
    MPI_Comm_free(&twin);
    MPI_Comm_free(&both);
    MPI_Comm_free(&half);
}

/* ---- Between neighbours ---- */

static void grid(long *send, long *receive) {
    int size, dims[2] = {0, 0}, periods[2] = {1, 0}, coords[2], sides[4], starts = 2, counts[4] = {1, 1, 1, 1};
    MPI_Aint places[4] = {0, 8, 16, 24};
    MPI_Datatype types[4] = {MPI_LONG, MPI_LONG, MPI_LONG, MPI_LONG};
    MPI_Comm comm, row;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Dims_create(size, 2, dims);
    expect(dims[0] * dims[1], size, "Dims_create", 0, 0);
    MPI_Cart_create(MPI_COMM_WORLD, 2, dims, periods, 1, &comm);
    MPI_Cart_coords(comm, world_rank, 2, coords);
    MPI_Cart_shift(comm, 0, 1, &sides[0], &sides[1]);
    MPI_Cart_shift(comm, 1, 1, &sides[2], &sides[3]);
    for (int form = BLOCKING; form < NUM_FORMS; form++) {
        for (int kind = 0; kind < 3; kind++) {
            clear(send, receive);
            for (int i = 0; i < 4; i++) send[i] = value(world_rank, kind ? i : 0);
            if (kind == 0) RUN(Neighbor_allgather, Ineighbor_allgather, send, 1, MPI_LONG, receive, 1, MPI_LONG);
            if (kind == 1) RUN(Neighbor_alltoall, Ineighbor_alltoall, send, 1, MPI_LONG, receive, 1, MPI_LONG);
            if (kind == 2)
                RUN(Neighbor_alltoallw, Ineighbor_alltoallw, send, counts, places, types, receive, counts, places,
                    types);
            for (int i = 0; i < 4; i++) {
                long expected = sides[i] == MPI_PROC_NULL ? -1 : value(sides[i], kind ? i ^ 1 : 0);
                expect(receive[i], expected, "in a grid", world_rank, i);
            }
        }
    }
    int keep[2] = {0, 1}, rank, length;
    MPI_Cart_sub(comm, keep, &row);
    MPI_Comm_rank(row, &rank);
    MPI_Comm_size(row, &length);
    expect(rank, coords[1], "Cart_sub: rank", 0, 0);
    expect(length, dims[1], "Cart_sub: size", 0, 0);
    MPI_Comm_free(&row);
    MPI_Comm_free(&comm);
}

/* Everybody has an edge to the next rank and to the one after it, some named by others. */
static void graph(long *send, long *receive) {
    int size, starts = 2, in, out, weighted, sources[2], targets[2], source_weights[2], target_weights[2];
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm comm;
    int next = (world_rank + 1) % size, degree = 2, weights[2] = {next, 100 + next};
    int to[2] = {(next + 1) % size, (next + 2) % size};
    MPI_Dist_graph_create(MPI_COMM_WORLD, 1, &next, &degree, to, weights, MPI_INFO_NULL, 0, &comm);
    MPI_Dist_graph_neighbors_count(comm, &in, &out, &weighted);
    expect(in, 2, "edges that end", 0, 0);
    expect(out, 2, "edges that begin", 0, 0);
    MPI_Dist_graph_neighbors(comm, 2, sources, source_weights, 2, targets, target_weights);
    for (int i = 0; i < 2; i++) {
        int ahead = (targets[i] + size - world_rank) % size;
        expect(ahead, (target_weights[i] / 100 + 1) % size, "Dist_graph_neighbors", 0, i);
        expect(source_weights[i] % 100, sources[i], "weights of sources", 0, i);
    }
    for (int form = BLOCKING; form < NUM_FORMS; form++) {
        clear(send, receive);
        for (int i = 0; i < 4; i++) send[i] = value(world_rank, i);
        RUN(Neighbor_allgather, Ineighbor_allgather, send, 2, MPI_LONG, receive, 2, MPI_LONG);
        for (int i = 0; i < 4; i++) expect(receive[i], value(sources[i / 2], i % 2), "in a graph", world_rank, i);
    }
    MPI_Comm_free(&comm);
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
        MPI_Comm_rank(comms[i], &rank);
        within(comms[i], strided, pair, own, send, receive);
        overlapping(comms[i], pair, own);
        MPI_Comm_free(&comms[i]);
    }
    MPI_Group_free(&some);
    MPI_Group_free(&everybody);
}

int main(int argc, char **argv) {
    static long send[MOST], receive[MOST];
    MPI_Datatype vector, strided, pair;
    MPI_Op own;
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Type_vector(2, 1, 2, MPI_LONG, &vector);
    MPI_Type_create_resized(vector, 0, 4 * sizeof(long), &strided);
    MPI_Type_contiguous(2, MPI_LONG, &pair);
    MPI_Type_commit(&strided);
    MPI_Type_commit(&pair);
    MPI_Op_create(compose, 0, &own);
    for (round_number = 0; round_number < rounds; round_number++) {
        within(MPI_COMM_WORLD, strided, pair, own, send, receive);
        within(MPI_COMM_SELF, strided, pair, own, send, receive);
        on_many(strided, pair, own, send, receive);
        groups(pair, own, send, receive);
        grid(send, receive);
        graph(send, receive);
    }
    MPI_Op_free(&own);
    MPI_Type_free(&pair);
    MPI_Type_free(&strided);
    MPI_Type_free(&vector);
    if (world_rank == 0) printf("answer %ld\n", checked);
    MPI_Finalize();
    return 0;
}
