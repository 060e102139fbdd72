/* Memory that ranks of one host share: a file in a folder in memory that all of a job's ranks there have in common. */
#ifndef REMESH_SHARED_MEMORY_H
#define REMESH_SHARED_MEMORY_H

#include "comm.h"

/* Where each rank's part begins, and the whole; mapped by all members, at addresses of their own. */
typedef struct {
    char *at;
    int64_t num_bytes;
    int64_t *starts; /* by rank; NOWHERE: nothing, on no page of its own */
} SharedMemory;

enum { NOWHERE = -1 };

/* Where a rank's part begins; NULL: nowhere. */
static inline char *part_of(const SharedMemory *memory, int rank) {
    return memory->starts[rank] == NOWHERE ? NULL : memory->at + memory->starts[rank];
}

/* Of each member, a number that those have in common who can share memory. All members call. */
INTERNAL int gather_hosts(Comm *comm, uint64_t *hosts);
/* Zeroed, under the communicator's number, with parts of these sizes one behind the other, or each on pages of its own.
 * All members call; on all or on none it is there afterwards.
 */
INTERNAL int make_shared_memory(Comm *comm, const int64_t *sizes, bool is_apart, SharedMemory **made);
/* Gives it back, its file too. All members call; NULL is allowed. */
INTERNAL int free_shared_memory(Comm *comm, SharedMemory *memory);

#endif
