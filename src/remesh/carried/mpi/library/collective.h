/* Collectives: one preparation for each, from which its three forms are made. */
#ifndef REMESH_COLLECTIVE_H
#define REMESH_COLLECTIVE_H

#include "blocks.h"
#include "channel.h"
#include "comm.h"
#include "op.h"
#include "request.h"

/* Besides the KIND_ of the lower half. */
enum { KIND_NEIGHBOURS = 64 };

/* What one rank does in one collective: what a preparation makes of MPI's arguments. */
typedef struct {
    Comm *comm;
    int kind;
    int root;             /* a rank; MPI_ROOT or MPI_PROC_NULL too on an intercommunicator */
    Blocks send, receive; /* what goes where; nothing if there is no block */
    bool discards;        /* what comes is not looked at: it is in its place already */
    Op *op;               /* of a reduction, whose operand is `send`; else NULL */
    Counts shares;        /* of a KIND_REDUCE_SCATTER: elements for each rank of the (local) group */
    MPI_Count share;      /* the same for all, where `shares` has no values */
} Plan;

static inline MPI_Count share_of(const Plan *plan, int rank) {
    return plan->shares.values ? count_at(plan->shares, rank) : plan->share;
}
/* Whether the real MPI does it, in one call of the lower half. */
static inline bool is_one_call(const Plan *plan) {
    return !plan->comm->remote && plan->kind != KIND_NEIGHBOURS && (!plan->op || is_real(plan->op, plan->send.type));
}
/* What of the reduction's result is for this rank. */
static inline MPI_Count own_count(const Plan *plan) {
    return plan->kind == KIND_REDUCE_SCATTER ? share_of(plan, plan->comm->rank) : plan->send.count;
}

/* The three forms. They use up the plan. */
INTERNAL int run_plan(Plan *plan);
INTERNAL int start_plan(Plan *plan, Request **request);
INTERNAL int keep_plan(Plan *plan, Request **request);

/* A plan under way: the state of a request. */
typedef struct {
    Plan plan;
    void *packed;      /* where what comes stands until it is unpacked; NULL if it lands in its place */
    struct Fold *fold; /* fold.c */
    Comm *own;         /* of a persistent one: the plan's, of which the program knows nothing; else NULL */
} Running;

/* pairwise.c: a block for each peer or neighbour and one from each. */
INTERNAL int num_pairwise_steps(const Plan *plan);
INTERNAL int start_pairwise(Request *request);
/* fold.c: a reduction by messages of ours. */
INTERNAL int num_fold_steps(const Plan *plan);
INTERNAL int start_fold(Request *request);
INTERNAL void drop_fold(struct Fold *fold);

#endif
