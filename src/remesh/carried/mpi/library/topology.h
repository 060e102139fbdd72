/* Topologies: who is whose neighbour. */
#ifndef REMESH_TOPOLOGY_H
#define REMESH_TOPOLOGY_H

#include "comm.h"

/* Neighbours, in MPI's order. */
typedef struct {
    int count;
    int *ranks;   /* of the communicator; MPI_PROC_NULL beyond a border */
    int *weights; /* NULL: none were given */
} Neighbours;

typedef struct Topology {
    _Atomic int references; /* duplicates of a communicator share it */
    int kind;               /* MPI_CART, MPI_GRAPH, MPI_DIST_GRAPH */
    Neighbours sources, destinations; /* of this rank */
    int num_dims;           /* of a grid, row-major */
    int *dims, *periods, *coords;
    int num_nodes;          /* of a graph that all know */
    int *index, *edges;     /* of rank r: end of its neighbours in `edges` */
} Topology;

INTERNAL Topology *make_topology(int kind);
INTERNAL Topology *keep_topology(Topology *topology);
INTERNAL void drop_topology(Topology *topology);
/* A communicator of the first `num_ranks` of this one, with the topology; NULL for those behind. Takes the topology. */
INTERNAL int make_with_topology(Comm *comm, int num_ranks, Topology *topology, Comm **made);
/* The topology if it is of this kind, else NULL with the error noted. */
INTERNAL int expect_topology(const Comm *comm, int kind, Topology **topology);
INTERNAL int *copy_numbers(int64_t count, const int *numbers);

#endif
