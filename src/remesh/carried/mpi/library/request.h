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
    bool is_receive;       /* its status is that of its first step */
    atomic_bool is_finished; /* steps are over and `finish` has run */
    int error;
    MPI_Status status;     /* once finished */
    int (*finish)(Request *request); /* run once when all steps are over: unpacks, folds; may be NULL */
    void *state;           /* of the functions here; given to `drop_state`, or else to free */
    void (*drop_state)(void *state);
    /* A request that has to do several rounds: starts the next steps, or leaves none. Run when all steps are over,
     * before `finish`; the request goes on while it leaves steps that are not over. See carry_on().
     */
    int (*more)(Request *request);
    /* Whether that is over which is no operation of the lower half; asked again and again. Most have no such thing. */
    bool (*is_over_elsewhere)(Request *request);
    atomic_int claim;      /* a thread looks after it */
    bool is_carried_on;    /* see carry_on() */
    Request *next;         /* of those that are carried on */
    atomic_bool is_listed; /* a call of the program is about to complete it: there can be one only */
    bool is_cancellable;   /* a send or receive */
    bool is_unwanted;      /* the program has asked to cancel it */
    bool is_shared;        /* the one of all sends that are over at once: finished, and never freed */
    /* Persistent requests. */
    bool is_persistent;
    atomic_bool is_active;
    int (*start)(Request *request);  /* begins it anew: fills the steps */
    struct Generalized *generalized; /* MPI_Grequest_start; generalized.c */
    struct Partitioned *partitioned; /* MPI_Psend_init, MPI_Precv_init; partitioned.c */
};

/* A message that a matched probe has taken out of the queue. */
struct Message {
    Object object;
    Comm *comm;      /* kept */
    uint64_t number; /* in the lower half */
};

/* A request with room for so many steps, all empty. */
INTERNAL Request *make_request(Comm *comm, int num_steps);
/* Starts a send or receive as the i-th step; peers are world ranks. Data that are not dense are packed or unpacked. */
INTERNAL int step_send(Request *request, int i, int flags, uint64_t number, int peer, int tag, const void *buffer,
                       MPI_Count count, Datatype *type);
INTERNAL int step_receive(Request *request, int i, uint64_t number, int peer, int tag, void *buffer, MPI_Count count,
                          Datatype *type);
/* Asks the lower half until all of these are finished (any one, if not `every`), or once if not blocking. NULL and
 * inactive ones count as finished. Runs `more` and `finish`.
 */
INTERNAL int progress(Request *const *requests, int64_t count, bool blocking, bool every);
/* Until it is finished; its error; lets it go. For the library's own. */
INTERNAL int finish_now(Request *request);
/* When the library is loaded: makes the request of all sends that are over at once, and what requests need. */
INTERNAL void make_predefined_requests(void);
/* A thread that waits for anything goes on with this one, too, as MPI asks of requests with `more`: another rank may wait for
 * the next round. It lasts until it is finished.
 */
INTERNAL void carry_on(Request *request);
/* Whether there is such a request: then no call may wait in the lower half for one operation alone. */
INTERNAL bool must_carry_on(void);
/* Waits for one operation that stands nowhere else, and goes on with those requests. */
INTERNAL int wait_for_operation(Operation *operation);
/* A look at those requests without waiting, and a pause that gets longer with `turn`: for who has to ask again. */
INTERNAL int look_and_pause(int turn);
/* Gets it ready for another start. */
INTERNAL void rewind_request(Request *request);
/* Whether it counts as finished in a list: NULL, or persistent and not started. */
static inline bool is_idle(const Request *request) {
    return !request || (request->is_persistent && !request->is_active);
}

/* What a receive says in a status, which may be MPI_STATUS_IGNORE. */
INTERNAL void set_receive_status(const Ended *ended, const Comm *comm, MPI_Status *status);

/* completion.c: the status of a finished request in `status`, without its MPI_ERROR; the error of a query function. */
INTERNAL int tell_status(Request *request, MPI_Status *status);

/* point_to_point.c: arguments of sends and receives. What MPI_PROC_NULL means is left to the caller. */
INTERNAL int check_send(const void *buffer, MPI_Count count, const Datatype *type, int dest, int tag, const Comm *comm);
INTERNAL int check_receive(const void *buffer, MPI_Count count, const Datatype *type, int source, int tag,
                           const Comm *comm);
INTERNAL int check_data(const void *buffer, MPI_Count count, const Datatype *type);
INTERNAL int check_source(int source, int tag, const Comm *comm);
static inline int world_source(const Comm *comm, int source) {
    return source == MPI_ANY_SOURCE ? ANY : peer_of(comm, source);
}
static inline int lower_tag(int tag) { return tag == MPI_ANY_TAG ? ANY : tag; }
/* What becomes of the status of an operation with MPI_PROC_NULL. */
static inline void set_nobody_status(MPI_Status *status) { set_status(status, MPI_PROC_NULL, MPI_ANY_TAG, 0, false); }
/* The status of a receive, and its error. */
INTERNAL int conclude_receive(const Ended *ended, int64_t room, const Comm *comm, MPI_Status *status);
/* A receive from nobody as a request, which is finished. */
INTERNAL Request *request_from_nobody(Comm *comm);

/* The request of all sends that are over at once; it is never freed. */
INTERNAL extern Request *sent_request;

/* buffered.c: sends a copy; the program may use its buffer at once. */
INTERNAL int send_buffered(const void *buffer, MPI_Count count, Datatype *type, int dest, int tag, Comm *comm);
/* Goes on with the send of a request that the program frees; its data may stand in the program's memory. */
INTERNAL int adopt_send(Request *request);
/* Until no buffered or adopted send of this rank will be received any more: MPI ends. All ranks call it. */
INTERNAL int finish_buffered(void);
/* probe.c */
INTERNAL void destroy_message(void *object);

/* generalized.c */
INTERNAL int query_generalized(Request *request, MPI_Status *status);
INTERNAL int free_generalized(Request *request);
INTERNAL int cancel_generalized(Request *request);
/* Its functions are Fortran's. */
INTERNAL void speak_fortran(Request *request);

#endif
