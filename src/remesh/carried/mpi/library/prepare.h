/* Preparations: what MPI's arguments mean for this rank. Each fills a plan, or says what is wrong with them. */
#ifndef REMESH_PREPARE_H
#define REMESH_PREPARE_H

#include "collective.h"

INTERNAL int prepare_barrier(Plan *plan, Comm *comm);
INTERNAL int prepare_bcast(Plan *plan, Comm *comm, Blocks data, int root);
/* `kind` is the even or the uneven one of the lower half. What is of no meaning on this rank may be anything. */
INTERNAL int prepare_gather(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive, int root);
INTERNAL int prepare_scatter(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive, int root);
INTERNAL int prepare_allgather(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive);
INTERNAL int prepare_alltoall(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive);

/* A collective of all to all whose blocks differ in type; `types` are the program's. */
typedef struct {
    const void *buffer;
    Counts counts, places;
    const MPI_Datatype *types;
} TypedBlocks;
/* Blocks of the program's types on both sides; nothing is kept after an error. */
INTERNAL int take_both(Plan *plan, TypedBlocks send, int num_sent, TypedBlocks receive, int num_received);
INTERNAL int prepare_alltoallw(Plan *plan, Comm *comm, TypedBlocks send, TypedBlocks receive);

typedef struct {
    const void *send;
    void *receive;
    MPI_Count count;
    Datatype *type;
    Op *op;
} Operands;
INTERNAL int prepare_reduce(Plan *plan, Comm *comm, Operands operands, int root);
/* An allreduce, a scan or an exscan. */
INTERNAL int prepare_allreduce(Plan *plan, Comm *comm, int kind, Operands operands);
/* operands.count is of each share, where `shares` has no values. */
INTERNAL int prepare_reduce_scatter(Plan *plan, Comm *comm, Operands operands, Counts shares);

/* Between neighbours. */
INTERNAL int prepare_neighbours(Plan *plan, Comm *comm, Blocks send, Blocks receive);
INTERNAL int prepare_neighbours_typed(Plan *plan, Comm *comm, TypedBlocks send, TypedBlocks receive);

#endif
