/* Collectives between the neighbours of a topology, three forms of each. Source: MPI 4.1, section 8.6. */
#include "forms.h"
#include "prepare.h"
#include "topology.h"

static int begin(Plan *plan, Comm *comm) {
    if (!comm->topology) return fail(MPI_ERR_TOPOLOGY, "comm has no topology, so no rank of it has neighbours");
    *plan = (Plan){.comm = comm, .kind = KIND_NEIGHBOURS};
    return MPI_SUCCESS;
}

int prepare_neighbours(Plan *plan, Comm *comm, Blocks send, Blocks receive) {
    TRY(begin(plan, comm));
    plan->send = send;
    plan->receive = receive;
    if (!send.num || !comm->topology->destinations.count) plan->send.num = comm->topology->destinations.count;
    plan->receive.num = comm->topology->sources.count;
    TRY(check_blocks(&plan->send));
    return check_blocks(&plan->receive);
}

int prepare_neighbours_typed(Plan *plan, Comm *comm, TypedBlocks send, TypedBlocks receive) {
    TRY(begin(plan, comm));
    return take_both(plan, send, comm->topology->destinations.count, receive, comm->topology->sources.count);
}

/* do_Neighbor_allgather */ /* do_Ineighbor_allgather */ /* do_Neighbor_allgather_init */
FORMS(Neighbor_allgather, Ineighbor_allgather, prepare_neighbours, (SEND, RECEIVE), (SENT, RECEIVED_EVENLY))

/* do_Neighbor_allgatherv */ /* do_Ineighbor_allgatherv */ /* do_Neighbor_allgatherv_init */
FORMS(Neighbor_allgatherv, Ineighbor_allgatherv, prepare_neighbours, (SEND, GATHER_V),
      (SENT, uneven_blocks(recvbuf, recvcounts, displs, recvtype)))

/* do_Neighbor_alltoall */ /* do_Ineighbor_alltoall */ /* do_Neighbor_alltoall_init */
FORMS(Neighbor_alltoall, Ineighbor_alltoall, prepare_neighbours, (SEND, RECEIVE), (SENT_EVENLY, RECEIVED_EVENLY))

/* do_Neighbor_alltoallv */ /* do_Ineighbor_alltoallv */ /* do_Neighbor_alltoallv_init */
FORMS(Neighbor_alltoallv, Ineighbor_alltoallv, prepare_neighbours, (SEND_V, RECEIVE_V),
      (uneven_blocks(sendbuf, sendcounts, sdispls, sendtype), uneven_blocks(recvbuf, recvcounts, rdispls, recvtype)))

/* do_Neighbor_alltoallw */ /* do_Ineighbor_alltoallw */ /* do_Neighbor_alltoallw_init */
FORMS(Neighbor_alltoallw, Ineighbor_alltoallw, prepare_neighbours_typed,
      (const void *sendbuf, Counts sendcounts, const MPI_Aint sdispls[], const MPI_Datatype sendtypes[], void *recvbuf,
       Counts recvcounts, const MPI_Aint rdispls[], const MPI_Datatype recvtypes[]),
      ((TypedBlocks){sendbuf, sendcounts, (Counts){sdispls, sizeof *sdispls}, sendtypes},
       (TypedBlocks){recvbuf, recvcounts, (Counts){rdispls, sizeof *rdispls}, recvtypes}))
