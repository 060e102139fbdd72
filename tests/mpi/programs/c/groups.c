/* Collectives between two groups and between neighbours, against what each rank can work out by itself.
 *
 * `groups ROUNDS` goes through all of it so often; rank 0 prints `answer` at the end.
 */
#include "checking.h"

#include "gate.h"

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

int main(int argc, char **argv) {
    static long send[MOST], receive[MOST];
    MPI_Datatype pair;
    MPI_Op own;
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Type_contiguous(2, MPI_LONG, &pair);
    MPI_Type_commit(&pair);
    MPI_Op_create(compose, 0, &own);
    for (round_number = 0; round_number < rounds; round_number++) {
        if (world_rank == 0 && round_number == rounds - 1) wait_at_gate();
        groups(pair, own, send, receive);
        grid(send, receive);
        graph(send, receive);
    }
    MPI_Op_free(&own);
    MPI_Type_free(&pair);
    if (world_rank == 0) printf("answer %ld\n", checked);
    MPI_Finalize();
    return 0;
}
