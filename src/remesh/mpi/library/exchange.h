/* Collectives on packed bytes, for the library's own needs: windows, files, communicators. All members call. */
#ifndef REMESH_EXCHANGE_H
#define REMESH_EXCHANGE_H

#include "comm.h"

INTERNAL int barrier(Comm *comm);
INTERNAL int broadcast(Comm *comm, int root, void *data, int64_t num_bytes);
/* `all` has room for num_bytes of each member. */
INTERNAL int gather_all(Comm *comm, const void *mine, int64_t num_bytes, void *all);
/* Whether all members give MPI_SUCCESS; else, on all members, the error class and words of the first that did not. */
INTERNAL int agree(Comm *comm, int error);

#endif
