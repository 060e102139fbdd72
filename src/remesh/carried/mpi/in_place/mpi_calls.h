/* What the lower half of an MPI offers: its functions on bytes and ranks of the world, whatever its own mpi.h is. Each
 * returns 0, or an error class of the standard ABI's numbers, which all faces can tell.
 *
 * It grows with channel.h, of which it is to take the place: an Operation there is a request here.
 */
#ifndef REMESH_MPI_CALLS_H
#define REMESH_MPI_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { ANY_RANK = -1, ANY_LABEL = -1 }; /* of any source, with any tag */

typedef struct {
    int rank, size, thread_level; /* 0 to 3: SINGLE to MULTIPLE */
    char library[256];            /* its first line of MPI_Get_library_version */
} World;

/* A message that has come, or could. */
typedef struct {
    int source, tag;
    int64_t num_bytes;
    bool is_there, is_cancelled;
} Arrival;

typedef struct {
    /* `asked`: the program's thread level. It gets SERIALIZED at least, so that a thread of ours may drain for one that
     * computes.
     */
    int (*start)(int asked, World *world);
    int (*finish)(void);
    int (*abort)(int code);
    int (*send)(const void *data, int64_t num_bytes, int dest, int tag);
    int (*receive)(void *at, int64_t room, int source, int tag, Arrival *arrival);
    /* `*request`: a number that is not 0. */
    int (*start_send)(const void *data, int64_t num_bytes, int dest, int tag, bool is_synchronous, uint64_t *request);
    int (*start_receive)(void *at, int64_t room, int source, int tag, uint64_t *request);
    /* Whether it is over; then the request is 0. */
    int (*test)(uint64_t *request, Arrival *arrival);
    /* Waits until it is over, or until `*leave` is not 0: a cut asks all that wait to step out, and the request goes on. */
    int (*wait)(uint64_t *request, const _Atomic uint32_t *leave, Arrival *arrival);
    int (*cancel)(uint64_t request);
    /* Of a message that is taken out of the queue, `*message` is not 0; receive_probed() gets its content. */
    int (*probe)(int source, int tag, Arrival *arrival, uint64_t *message);
    int (*receive_probed)(void *at, int64_t room, uint64_t *message, Arrival *arrival);
    int (*barrier)(void);
    int (*sum_doubles)(const double *from, double *to, int count);
} MpiCalls;

#endif
