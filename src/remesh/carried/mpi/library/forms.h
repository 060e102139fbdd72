/* How the three forms of a collective are made from its preparation, and words for MPI's parameters.
 *
 * `arguments` is what the preparation gets of MPI's parameters, which have MPI's names. Each use names its functions in
 * a comment for generate.py.
 */
#ifndef REMESH_FORMS_H
#define REMESH_FORMS_H

#define UNPACK(...) __VA_ARGS__
#define FORMS(Name, Iname, prepare, parameters, arguments)                                       \
    int do_##Name(UNPACK parameters, Comm *comm) {                                               \
        Plan plan;                                                                               \
        TRY(prepare(&plan, comm, UNPACK arguments));                                             \
        return run_plan(&plan);                                                                  \
    }                                                                                            \
    int do_##Iname(UNPACK parameters, Comm *comm, Request **request) {                           \
        Plan plan;                                                                               \
        TRY(prepare(&plan, comm, UNPACK arguments));                                             \
        return start_plan(&plan, request);                                                       \
    }                                                                                            \
    int do_##Name##_init(UNPACK parameters, Comm *comm, Info *info, Request **request) {         \
        Plan plan;                                                                               \
        (void)info;                                                                              \
        TRY(prepare(&plan, comm, UNPACK arguments));                                             \
        return keep_plan(&plan, request);                                                        \
    }

#define SEND const void *sendbuf, MPI_Count sendcount, Datatype *sendtype
#define RECEIVE void *recvbuf, MPI_Count recvcount, Datatype *recvtype
#define SEND_V const void *sendbuf, Counts sendcounts, Counts sdispls, Datatype *sendtype
#define SCATTER_V const void *sendbuf, Counts sendcounts, Counts displs, Datatype *sendtype
#define RECEIVE_V void *recvbuf, Counts recvcounts, Counts rdispls, Datatype *recvtype
#define GATHER_V void *recvbuf, Counts recvcounts, Counts displs, Datatype *recvtype
#define SEND_W const void *sendbuf, Counts sendcounts, Counts sdispls, const MPI_Datatype sendtypes[]
#define RECEIVE_W void *recvbuf, Counts recvcounts, Counts rdispls, const MPI_Datatype recvtypes[]
#define REDUCED const void *sendbuf, void *recvbuf, MPI_Count count, Datatype *datatype, Op *op
#define SENT one_block(sendbuf, sendcount, sendtype)
#define SENT_EVENLY even_blocks(sendbuf, sendcount, sendtype)
#define RECEIVED one_block(recvbuf, recvcount, recvtype)
#define RECEIVED_EVENLY even_blocks(recvbuf, recvcount, recvtype)
#define OPERANDS (Operands){sendbuf, recvbuf, count, datatype, op}
#define NO_COUNTS (Counts){NULL, 0}

#endif
