/* Topologies: what all kinds share. */
#include "topology.h"

#ifdef FACE_MPICH
static int unweighted, weights_empty;
int *const MPI_UNWEIGHTED = &unweighted;
int *const MPI_WEIGHTS_EMPTY = &weights_empty;
#endif

enum { BY_TOPOLOGY = 32 };

int *copy_numbers(int64_t count, const int *numbers) {
    int *copy = NEW_ARRAY(int, count);
    if (count > 0) memcpy(copy, numbers, sizeof *numbers * (size_t)count);
    return copy;
}

Topology *make_topology(int kind) {
    Topology *topology = NEW(Topology);
    topology->references = 1;
    topology->kind = kind;
    return topology;
}

Topology *keep_topology(Topology *topology) {
    if (topology) atomic_fetch_add(&topology->references, 1);
    return topology;
}

void drop_topology(Topology *topology) {
    if (!topology || atomic_fetch_sub(&topology->references, 1) > 1) return;
    int *owned[] = {topology->sources.ranks, topology->sources.weights, topology->destinations.ranks,
                    topology->destinations.weights, topology->dims, topology->periods, topology->coords,
                    topology->index, topology->edges};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(topology);
}

int make_with_topology(Comm *comm, int num_ranks, Topology *topology, Comm **made) {
    *made = NULL;
    int error = MPI_SUCCESS;
    uint64_t number = next_number(comm, BY_TOPOLOGY);
    if (comm->rank < num_ranks) error = make_comm(comm, number, num_ranks, comm->world, made);
    if (*made) (*made)->topology = topology;
    else drop_topology(topology);
    return error;
}

int expect_topology(const Comm *comm, int kind, Topology **topology) {
    const char *name = kind == MPI_CART ? "grid" : "graph";
    if (!comm->topology) return fail(MPI_ERR_TOPOLOGY, "comm has no topology, expected a %s", name);
    if (comm->topology->kind != kind) return fail(MPI_ERR_TOPOLOGY, "comm has another topology, expected a %s", name);
    *topology = comm->topology;
    return MPI_SUCCESS;
}

int do_Topo_test(Comm *comm, int *status) {
    *status = comm->topology ? comm->topology->kind : MPI_UNDEFINED;
    return MPI_SUCCESS;
}
