/* The program's end of the channel to the lower half: one function for each call of calls/table.py.
 *
 * Ranks are ranks of the world, communicators and windows are numbers of ours, data are plain bytes; ANY is any source
 * or tag. Each function returns MPI_SUCCESS, or the error class that the lower half told, with its words noted by fail().
 * Any thread may call; a call waits only if the table says that it can (FLAG_BLOCKING).
 */
#ifndef REMESH_CHANNEL_H
#define REMESH_CHANNEL_H

#include "core.h"
#include "../_calls.h"

/* How an operation of the lower half ended. */
typedef struct {
    int source, tag; /* world rank; ANY where there was no message */
    int error;       /* error class of the face, MPI_SUCCESS if none */
    bool is_cancelled;
    int64_t num_bytes; /* of the message; may be more than the room if error is MPI_ERR_TRUNCATE */
} Ended;

/* The lower half has said that something is not there yet; see polling.h. */
typedef struct {
    uint64_t calls; /* calls_made() by then */
    int64_t from_ns, until_ns;
} NotYet;

/* An operation under way. `at` and `room` say where its payload goes; the memory must stay until it is over. */
typedef struct {
    uint64_t number; /* in the lower half; 0: it is over, and `ended` says how */
    void *at;
    int64_t room;
    Ended ended;
    NotYet not_yet;
} Operation;

typedef struct {
    bool found;
    int source, tag;
    int64_t num_bytes;
    uint64_t message; /* of a matched probe */
} Probed;

/* Whether there is a channel: whether this process was started by Remesh. Opens it at the first call. */
INTERNAL bool channel_is_there(void);
/* Whether this process has opened it. */
INTERNAL bool channel_is_open(void);
/* How many calls have been made, by all threads; those that only asked for something that is not there do not count. */
INTERNAL uint64_t calls_made(void);
INTERNAL int lower_hello(int *rank, int *size);
/* What the lower half says of a key: text without quotes, cut to `room` bytes with its end. See `describe` of the table. */
INTERNAL int lower_describe(const char *key, char *text, int room);
INTERNAL int lower_finish(void);
INTERNAL int lower_abort(int code);

/* FLAG_SYNCHRONOUS, FLAG_BLOCKING. operation->number is 0 if the send is over; `data` must stay until it is. */
INTERNAL int lower_send(int flags, uint64_t comm, int dest, int tag, const void *data, int64_t num_bytes, Operation *operation);
/* FLAG_BLOCKING. The caller has set `at` and `room` of the operation; the same for those below. */
INTERNAL int lower_receive(int flags, uint64_t comm, int source, int tag, Operation *operation);
/* FLAG_BLOCKING, FLAG_MATCHED. */
INTERNAL int lower_probe(int flags, uint64_t comm, int source, int tag, Probed *probed);
INTERNAL int lower_receive_message(int flags, uint64_t message, Operation *operation);
/* One round of waiting for some of `count` operations, those with number 0 left out (NULL too): those that ended have
 * number 0 afterwards. MODE_ALL, MODE_ANY or MODE_SOME; without FLAG_BLOCKING it only looks. Takes any count.
 */
INTERNAL int lower_wait(int flags, int mode, Operation *const *operations, int64_t count);
INTERNAL int lower_cancel(uint64_t number);
/* Nobody asks for it any more; the lower half gives it up when it ends. */
INTERNAL int lower_free(uint64_t number);

INTERNAL int lower_make_communicator(uint64_t comm, int count, const int *world_ranks);
INTERNAL int lower_free_communicator(uint64_t comm);

/* A collective on packed bytes, in order of ranks. `counts`: bytes for each rank, then bytes from each, as KIND_ asks for
 * (elements for a KIND_REDUCE_SCATTER); NULL for others. There may be more than fit in a slot: see MAX_COUNTS of the
 * table. `op` and `type` index REAL_OPS and REAL_TYPES of the table.
 */
typedef struct {
    int kind, op, type, root;
    const void *send;
    int64_t send_bytes;
    const int64_t *counts;
    uint32_t num_counts;
} Collective;
INTERNAL int lower_collective(int flags, uint64_t comm, const Collective *collective, Operation *operation);

INTERNAL int lower_make_window(uint64_t window, const void *base);
INTERNAL int lower_free_window(uint64_t window);
INTERNAL int lower_attach_memory(uint64_t window, const void *address, int64_t num_bytes);
INTERNAL int lower_detach_memory(uint64_t window, const void *address);
/* An access to a window's memory at `target` (world rank): what ACCESS_OPS does with `data` and the bytes that `runs`
 * name. `result`, where `fetches`, gets what stood there. `unit`: bytes of an element, which is never torn.
 */
typedef struct {
    int op, type, unit, target;
    bool fetches;
    const void *data;
    int64_t data_bytes;
    const Run *runs; /* at most MAX_RUNS */
    uint32_t num_runs;
} Access;
/* operation->at and room: where the result goes. */
INTERNAL int lower_access(uint64_t window, const Access *access, Operation *operation);
INTERNAL int lower_lock(int flags, uint64_t window, int target, bool exclusive, Operation *operation);
INTERNAL int lower_unlock(uint64_t window, int target);

/* While a thread is between these, no image of any rank is taken: it uses a file that other ranks have open. No call of
 * the lower half may be made in between.
 */
INTERNAL void enter_gate(void);
INTERNAL void leave_gate(void);

#endif
