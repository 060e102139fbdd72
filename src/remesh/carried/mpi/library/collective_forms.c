/* MPI's collectives, three forms of each. */
#include "forms.h"
#include "prepare.h"

int do_Barrier(Comm *comm) {
    Plan plan;
    TRY(prepare_barrier(&plan, comm));
    return run_plan(&plan);
}

int do_Ibarrier(Comm *comm, Request **request) {
    Plan plan;
    TRY(prepare_barrier(&plan, comm));
    return start_plan(&plan, request);
}

int do_Barrier_init(Comm *comm, Info *info, Request **request) {
    Plan plan;
    (void)info;
    TRY(prepare_barrier(&plan, comm));
    return keep_plan(&plan, request);
}

/* do_Bcast */ /* do_Ibcast */ /* do_Bcast_init */
FORMS(Bcast, Ibcast, prepare_bcast, (void *buffer, MPI_Count count, Datatype *datatype, int root),
      (one_block(buffer, count, datatype), root))

/* do_Gather */ /* do_Igather */ /* do_Gather_init */
FORMS(Gather, Igather, prepare_gather, (SEND, RECEIVE, int root), (KIND_GATHER, SENT, RECEIVED_EVENLY, root))

/* do_Gatherv */ /* do_Igatherv */ /* do_Gatherv_init */
FORMS(Gatherv, Igatherv, prepare_gather, (SEND, GATHER_V, int root),
      (KIND_GATHERV, SENT, uneven_blocks(recvbuf, recvcounts, displs, recvtype), root))

/* do_Scatter */ /* do_Iscatter */ /* do_Scatter_init */
FORMS(Scatter, Iscatter, prepare_scatter, (SEND, RECEIVE, int root), (KIND_SCATTER, SENT_EVENLY, RECEIVED, root))

/* do_Scatterv */ /* do_Iscatterv */ /* do_Scatterv_init */
FORMS(Scatterv, Iscatterv, prepare_scatter, (SCATTER_V, RECEIVE, int root),
      (KIND_SCATTERV, uneven_blocks(sendbuf, sendcounts, displs, sendtype), RECEIVED, root))

/* do_Allgather */ /* do_Iallgather */ /* do_Allgather_init */
FORMS(Allgather, Iallgather, prepare_allgather, (SEND, RECEIVE), (KIND_ALLGATHER, SENT, RECEIVED_EVENLY))

/* do_Allgatherv */ /* do_Iallgatherv */ /* do_Allgatherv_init */
FORMS(Allgatherv, Iallgatherv, prepare_allgather, (SEND, GATHER_V),
      (KIND_ALLGATHERV, SENT, uneven_blocks(recvbuf, recvcounts, displs, recvtype)))

/* do_Alltoall */ /* do_Ialltoall */ /* do_Alltoall_init */
FORMS(Alltoall, Ialltoall, prepare_alltoall, (SEND, RECEIVE), (KIND_ALLTOALL, SENT_EVENLY, RECEIVED_EVENLY))

/* do_Alltoallv */ /* do_Ialltoallv */ /* do_Alltoallv_init */
FORMS(Alltoallv, Ialltoallv, prepare_alltoall, (SEND_V, RECEIVE_V),
      (KIND_ALLTOALLV, uneven_blocks(sendbuf, sendcounts, sdispls, sendtype),
       uneven_blocks(recvbuf, recvcounts, rdispls, recvtype)))

/* do_Alltoallw */ /* do_Ialltoallw */ /* do_Alltoallw_init */
FORMS(Alltoallw, Ialltoallw, prepare_alltoallw, (SEND_W, RECEIVE_W),
      ((TypedBlocks){sendbuf, sendcounts, sdispls, sendtypes}, (TypedBlocks){recvbuf, recvcounts, rdispls, recvtypes}))

/* do_Reduce */ /* do_Ireduce */ /* do_Reduce_init */
FORMS(Reduce, Ireduce, prepare_reduce, (REDUCED, int root), (OPERANDS, root))

/* do_Allreduce */ /* do_Iallreduce */ /* do_Allreduce_init */
FORMS(Allreduce, Iallreduce, prepare_allreduce, (REDUCED), (KIND_ALLREDUCE, OPERANDS))

/* do_Scan */ /* do_Iscan */ /* do_Scan_init */
FORMS(Scan, Iscan, prepare_allreduce, (REDUCED), (KIND_SCAN, OPERANDS))

/* do_Exscan */ /* do_Iexscan */ /* do_Exscan_init */
FORMS(Exscan, Iexscan, prepare_allreduce, (REDUCED), (KIND_EXSCAN, OPERANDS))

/* do_Reduce_scatter */ /* do_Ireduce_scatter */ /* do_Reduce_scatter_init */
FORMS(Reduce_scatter, Ireduce_scatter, prepare_reduce_scatter,
      (const void *sendbuf, void *recvbuf, Counts recvcounts, Datatype *datatype, Op *op),
      ((Operands){sendbuf, recvbuf, 0, datatype, op}, recvcounts))

/* do_Reduce_scatter_block */ /* do_Ireduce_scatter_block */ /* do_Reduce_scatter_block_init */
FORMS(Reduce_scatter_block, Ireduce_scatter_block, prepare_reduce_scatter,
      (const void *sendbuf, void *recvbuf, MPI_Count recvcount, Datatype *datatype, Op *op),
      ((Operands){sendbuf, recvbuf, recvcount, datatype, op}, NO_COUNTS))
