/* Requests: operations under way, and what is to be done in this process when they are over. */
#ifndef REMESH_REQUEST_H
#define REMESH_REQUEST_H

#include "channel.h"
#include "comm.h"
#include "datatype.h"

/* One operation of a request with the places of its data. */
typedef struct {
    Operation operation;
    Landing landing;  /* where it receives; .type NULL otherwise */
    void *owned;      /* packed data that it sends; freed when it is over */
} Step;

struct Request {
    Object object;
    Comm *comm;            /* kept; NULL if none. Translates the source of a receive, and has the error handler */
    Win *win;              /* of an access: has the error handler */
    Step *steps;           /* a neighbourhood collective is many; `one` if there is a single one */
    int num_steps;
    Step one;
    bool is_receive;       /* its status is that of its single step */
    bool is_finished;      /* steps are over and `finish` has run */
    int error;
    MPI_Status status;     /* once finished */
    int (*finish)(Request *request); /* run once when all steps are over: unpacks, folds; may be NULL */
    void *state;           /* of `finish`, `start` and `more`; freed by `drop_state` */
    void (*drop_state)(void *state);
    /* A request that has to do several rounds: starts the next steps, or leaves none. Run when all steps are over, before
     * `finish`; the request goes on while it leaves steps that are not over.
     */
    int (*more)(Request *request);
    /* Persistent requests. */
    bool is_persistent, is_active;
    int (*start)(Request *request);  /* begins it anew: fills the steps */
    struct Generalized *generalized; /* MPI_Grequest_start */
    struct Partitioned *partitioned; /* MPI_Psend_init, MPI_Precv_init */
};

/* A request with room for so many steps, all empty. */
INTERNAL Request *make_request(Comm *comm, int num_steps);
/* Starts a send or receive as the i-th step; peers are world ranks. Data that are not dense are packed or unpacked. */
INTERNAL int step_send(Request *request, int i, int flags, uint64_t number, int peer, int tag, const void *buffer, MPI_Count count, Datatype *type);
INTERNAL int step_receive(Request *request, int i, uint64_t number, int peer, int tag, void *buffer, MPI_Count count, Datatype *type);
/* Asks the lower half until all of these are finished (any one, if not `every`), or once if not blocking. NULL and inactive
 * ones count as finished. Runs `more` and `finish`.
 */
INTERNAL int progress(Request *const *requests, int64_t count, bool blocking, bool every);
/* Until it is finished; its error; lets it go. For the library's own. */
INTERNAL int finish_now(Request *request);
/* Until all buffered sends are over: MPI ends. */
INTERNAL int finish_buffered(void);
/* Makes what is behind the predefined handles, when the library is loaded. */
INTERNAL void make_predefined_requests(void);

#endif
