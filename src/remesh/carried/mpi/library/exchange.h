/* Collectives on packed bytes, for the library's own needs: windows, files, communicators. All members call,
 * and where nothing else is said the communicator has a single group.
 */
#ifndef REMESH_EXCHANGE_H
#define REMESH_EXCHANGE_H

#include "comm.h"

typedef struct {
    const void *at;
    int64_t num_bytes;
} Bytes;

INTERNAL int barrier(Comm *comm);
INTERNAL int broadcast(Comm *comm, int root, void *data, int64_t num_bytes);
/* `all` has room for num_bytes of each member. */
INTERNAL int gather_all(Comm *comm, const void *mine, int64_t num_bytes, void *all);
/* `num_bytes`: of each member. */
INTERNAL int gather_unevenly(Comm *comm, Bytes mine, const int64_t *num_bytes, void *all);
/* Between two processes, by world rank, on a number that only they use in this order: theirs is written to `into`. */
INTERNAL int swap_with(uint64_t number, int world, int tag, Bytes mine, Bytes into);
/* What the leader of the other group of an intercommunicator gives, its rank 0; the caller frees it. */
INTERNAL int swap_groups(Comm *comm, Bytes mine, void **theirs, int64_t *num_bytes);
/* Whether all members give MPI_SUCCESS; else, on all members, the error class and words of the first that did not. */
INTERNAL int agree(Comm *comm, int error);

#endif
