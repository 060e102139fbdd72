/* An Engine, and what its files give each other: queues (requests, replies, matching), calls, and the loop. */
#ifndef REMESH_ENGINE_H
#define REMESH_ENGINE_H

#include "_records.h"
#include "_table.h"
#include <sched.h>

typedef uintptr_t Handle;
enum {
    FN_ISEND, FN_TEST, FN_START, FN_ALLGATHER, FN_ALLTOALL, FN_ALLREDUCE, FN_IRECV, FN_REDUCE_LOCAL, FN_ISSEND, FN_IMPROBE,
    FN_IMRECV, NUM_FUNCTIONS
};
/* A wire message, aligned. */
typedef struct {
    uint64_t comm, request, num_bytes, address;
    int tag, what, source, pid;
} Header;

/* `tag` of a request of the kind of windows: of an access it is 0. */
enum { ASKS_FOR_LOCK = 1 };

enum { ANYWHERE = 0, AT_SEAT = INT_MAX };
enum { HEADER_BYTES = sizeof(WireHeader), STATUS_BYTES = 128 };
enum { MAX_OPS = 32, MAX_TYPES = 64, MAX_WATCHED = 64, PIECES_IN_FLIGHT = 4 };

typedef struct {
    uint64_t real;
    char *frame;
} Sending;

typedef struct {
    uint64_t real;
    Request *request;
    PyObject *send, *result;
    int64_t number; /* on its communicator: the first one is 1 */
    int kind, root, op, type;
    char done;
} Running;

typedef struct Carry Carry;
typedef struct Small Small;
typedef struct Part Part;

/* How operands of basic values are folded: indices of `op` and `type`. */
typedef struct {
    int op, type;
} Fold;

/* A small collective as it was asked for; its communicator is the request's. */
typedef struct {
    uint64_t clock; /* collectives entered before, on its communicator */
    int kind, root;
    Fold fold;
    int64_t block_bytes; /* what each member gives, or gets */
} SmallCall;

typedef struct {
    uint64_t real;
    char *buffer; /* NULL: in place */
    int64_t num_bytes;
    int over;
} Piece;

typedef struct {
    Request *request; /* NULL: it is thrown away */
    int peer, tag;
    int is_sending;
    int64_t total, piece_bytes, started, ended; /* bytes */
    int64_t ahead, ahead_piece; /* bytes that go before they are wanted, on a tag of their own, and of a piece of them */
    int ahead_tag, is_declined;
    Piece pieces[PIECES_IN_FLIGHT]; /* those under way begin at `first` */
    int first, count;
} Stream;

typedef struct {
    PyObject_HEAD
    char *base;
    Word *doorbell, *sleeping, *cpu, *upper_spins, *without;
    cpu_set_t allowed, seat;
    uint32_t home; /* where this thread keeps to: ANYWHERE of what is allowed, AT_SEAT, or the program's core, plus 1 */
    /* MPI */
    void *function[NUM_FUNCTIONS];
    Handle comm, byte, op[MAX_OPS], type[MAX_TYPES];
    int64_t extent[MAX_TYPES];
    char pair[MAX_TYPES]; /* of a value with an index: the letter of the value; 0 else */
    int num_ops, num_types, rank, size;
    uint64_t *frame_request; /* posted for wire messages; NULL: they are probed for */
    uint64_t probed;         /* the request of one that was found */
    int any_source, is_probed;
    char *frame;
    uint64_t *sent, *received;
    int frame_ready, mpi_problem;
    Sending *sending;
    size_t num_sending, room_sending;
    Running *running;
    size_t num_running, room_running;
    /* collectives that are messages of ours, and what has come for them */
    Small *small;
    Part **parts;
    size_t num_small, room_small, num_parts, num_part_chains;
    int64_t small_bytes;
    uint64_t *watched[MAX_WATCHED]; /* requests of collectives that Python runs: it is told when one is over */
    int num_watched;
    /* payloads that this carries itself */
    Carry *carries;
    size_t num_carries, room_carries;
    char *staging, *neighbours; /* by rank: whether its program's memory can be reached */
    uint32_t *cores;            /* by rank: where its program last called, plus 1; 0: not known */
    int upper_pid;
    uint64_t arena_start, arena_bytes;
    Stream *streams;
    size_t num_streams, room_streams, num_spare;
    char **spare;
    int64_t piece_bytes;
    int next_stream, next_ahead;
    _Alignas(16) char status[STATUS_BYTES];
    /* what half.py owns */
    Table *by_number, *posted, *arrived, *entered, *reals, *plans, *windows, *accesses, *access_queues;
    uint64_t *next_number; /* of a request */
    PyObject *requests, *owed;
    PyObject *on_message, *make_plan, *serve, *serve_posted, *tell, *tell_wait;
    PyObject *word_send, *word_receive, *word_collective, *word_window, *asker;
    int err_truncate, err_other, err_request, err_op, err_win, err_rma_range;
    /* slots */
    uint64_t single[NUM_SLOTS];
    uint32_t open_in[NUM_SLOTS]; /* of those that a slot waits for, before this one all are over */
    uint32_t singles, waits, probes, blocked, scanned; /* the first three wait: for an operation, several, a message */
    char rescan, recheck, closed, attention;
    _Atomic int woken;
    /* pace */
    uint32_t upper_spin;
    uint64_t lower_spin;
    char always_spins, is_dense;
    PyThreadState *let_go; /* while Python's other threads may run */
    int64_t turn_ended_us; /* when they could last */
    int64_t gap_us, eager_us, patient_us, shortest_us, longest_us, idle_us, idle_since_us, free_since_us, apart_until_us, give_way_us;
} Engine;

/* Those whose calls the engine has yet to answer. */
static inline uint32_t waiting_slots(const Engine *e) { return e->singles | e->waits | e->probes; }

static inline char *slot_at(Engine *e, int slot) { return e->base + FIRST_SLOT + (size_t)slot * STRIDE; }

/* _engine.c: ask MPI about everything of ours; whether something is there to be done. Calls no Python. */
int look(Engine *e);

/* _engine_rest.c: from the program's core to this rank's share of the cores; to any core that is allowed. */
void leave_program(Engine *e);
void go_anywhere(Engine *e);
/* Whether this is beside its program, whose calls are dense. */
int may_give_way(Engine *e);
/* There was something to do again: note how long the program computed. */
void note_gap(Engine *e, int64_t now);
/* Wait until there may be something to do, or the deadline. Only MPI and shared words: others of Python run meanwhile. */
void rest(Engine *e, int is_waiting, int64_t now, int64_t deadline_us);

/* _engine_queues.c. Integers are 0, or -1 with an exception; requests are borrowed, NULL may come without one. */
/* An array that grows, with room for one more; NULL with an exception, and the array is as it was. */
void *with_room(void *items, size_t count, size_t *room, size_t item_bytes);
void answer(Engine *e, int slot);
int mpi_failed(const char *what, int code);
Request *find_request(Engine *e, uint64_t number);
void forget(Engine *e, const Request *request);
void complete(Engine *e, Request *request);
Request *start_request(Engine *e, uint64_t number, PyObject *kind);
int tell_single(Engine *e, int slot, Request *request);
void fail(Engine *e, int slot, const char *what, int code);
/* The program can write anything into its channel: say what does not fit, before it is followed. -1 with an exception. */
int damaged(int slot, const char *format, ...) __attribute__((format(printf, 2, 3)));
int try_wait(Engine *e, int slot);
int try_probe(Engine *e, int slot);
int tell_waiting(Engine *e);
/* A receive waits for its message. */
int post(Engine *e, const Request *request);
/* The caller that matches takes the message. */
int arrive(Engine *e, Arrived *message);
int arrive_short(Engine *e, uint64_t comm, int source, int tag, const char *data, int64_t num_bytes);
/* A receive has got its message, short or announced. */
int match(Engine *e, Request *request, Arrived *message);
/* Where the payload of a receive is gathered here, as its size was not known or it does not fit; NULL: in the program. */
char *gathered(const Request *request);
Arrived *take_arrived(Engine *e, uint64_t comm, int source, int tag);

/* _engine_wire.c. */
/* What another rank says does not fit. -1 with an exception. */
int misfit(const Header *header, const char *what, int64_t found);
int send_wire(Engine *e, int dest, const uint64_t fields[7], const char *payload, int64_t num_bytes);
int take_frame(Engine *e);

/* _engine_calls.c. */
void finish_running(Engine *e, Running *one);
int scan(Engine *e);
/* Leave the request in a slot to Python: it has its reply, or waits. */
int serve_in_python(Engine *e, int slot);
/* A slot that Python serves waits for the end of this request. */
void wait_for(Engine *e, int slot, uint64_t request);

/* _engine_small.c. */
/* Of how many members a plan is. */
int size_of_plan(PyObject *plan);
int start_small(Engine *e, Request *request, SmallCall call, PyObject *plan, const char *send, int64_t send_bytes);
int hear_part(Engine *e, uint64_t comm, uint64_t clock, int source, int error, const char *payload, int64_t num_bytes);
/* What is left of one that another lower half began: its request is borrowed, `mine` is bytes. */
int resume_small(Engine *e, Request *request, SmallCall call, PyObject *plan, Py_ssize_t step, PyObject *mine);
/* Those that are not complete, as a list of tuples. */
PyObject *list_small(Engine *e);
void drop_small(Engine *e);

/* _engine_parts.c. */
/* The reference is stolen, in any case. */
int keep_part(Engine *e, uint64_t comm, uint64_t clock, int source, int error, PyObject *theirs);
/* The first that has come, which is the caller's now; NULL if there is none. */
PyObject *take_part(Engine *e, uint64_t comm, uint64_t clock, int source, int *error);
/* All of them, as a list of tuples. */
PyObject *list_parts(Engine *e);
void drop_parts(Engine *e);

/* _engine_windows.c. */
/* An access to a window of this rank, from any rank: an error class, -1 with an exception; `old` has room for
 * EAGER_BYTES, and in `fetched` is how many of them are the answer.
 */
int serve_access(Engine *e, const Header *header, const char *payload, char *old, int64_t *fetched);
/* Another rank accesses a window of this one. */
int hear_access(Engine *e, const Header *header, const char *payload);
/* The answer to an access of this one: 1, or 0: that is for Python. */
int hear_accessed(Engine *e, const Header *header, const char *payload);
/* An access that the program has posted, of so many bytes: 1, or 0: that is for Python. */
int start_access(Engine *e, int slot, const StartAccessCall *call, int64_t num_bytes);

/* _engine_locks.c. */
int hear_lock(Engine *e, const Header *header);
int hear_unlock(Engine *e, const Header *header);
int hear_locked(Engine *e, const Header *header);
/* What the program asks; the request is borrowed. */
Request *ask_for_lock(Engine *e, const LockCall *call);
int give_lock_back(Engine *e, const UnlockCall *call);

/* _engine_carry.c. The first is for `match`. */
int take_directly(Engine *e, Request *request, const Arrived *message);
int help_directly(Engine *e, int source, Request *request, uint64_t receive, int pid, uint64_t address);
/* Whether one of these carries waited for the sender's word that it has helped. */
int hear_helped(Engine *e, uint64_t receive, int is_done);
/* Copy a part of each; whether there was anything to do. */
int carry_on(Engine *e);
void drop_carries(Engine *e);
/* The program's bytes at an address as far as they are shared with us; NULL if not. */
char *in_arena(Engine *e, uint64_t address, int64_t num_bytes);
/* Between the program's memory and ours: there if `outwards`, else here. -1 with an exception. */
int carry_memory(Engine *e, uint64_t address, char *here, int64_t num_bytes, int outwards);

/* _engine_streams.c. The first is for `match`. */
int stream_in(Engine *e, Request *request, const Arrived *message);
/* What is wanted of a payload: all of it, or what follows the bytes that were sent ahead. */
typedef struct {
    int tag;
    int64_t from, piece_bytes; /* bytes */
} Wanted;
int stream_out(Engine *e, int dest, Request *request, Wanted wanted);
int new_stream_tag(Engine *e);
int is_stream_tag(int64_t tag);
/* A tag for what goes to a rank before it is wanted, or 0: it may not. */
int new_ahead_tag(Engine *e, int dest);
int is_ahead_tag(int tag);
/* Bytes of each piece of what goes ahead, which is one piece where it stands in an arena. */
int ahead_piece(const Engine *e, int is_whole);
/* Hand it to MPI. */
int stream_ahead(Engine *e, Request *request, int tag);
/* Of a message that no receive has: what comes ahead shall be thrown away, and all of it asked for later. */
int decline(Engine *e, Arrived *message);
/* The receiver has declined what went ahead with this request. */
int hear_declined(Engine *e, int dest, const Request *request);
/* What has gone ahead counts no more: its receivers throw it away. */
void give_up_ahead(Engine *e);
/* What a rank has sent ahead and counts no more: take it from MPI, and throw it away. */
int discard_ahead(Engine *e, int source, int64_t tag, int64_t num_bytes, int64_t piece_bytes);
/* The same for a message that no receive has, all ranks being about to leave. */
int discard(Engine *e, Arrived *message);
/* Whether one moves on now, and not only when a receive matches. */
int has_moving_stream(const Engine *e);
/* Whether its oldest piece is over. */
int look_at_stream(Engine *e, Stream *one);
/* Move all of them on; whether anything was done. */
int stream_on(Engine *e);
void drop_streams(Engine *e);

#endif
