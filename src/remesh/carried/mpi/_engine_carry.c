/* How an Engine carries long payloads between programs of one host: it reads them where they are, past MPI.
 *
 *     sender    ANNOUNCED ────────────>  matches a receive; reads the sender's memory
 *               helps     <────────────  WANTED, if the sender's program waits: the second half is the sender's to write
 *               HELPED    ────────────>
 *               complete  <────────────  TAKEN
 *
 * A payload of unknown size, or longer than its buffer, is gathered here, and told like a short one. A carry goes on by
 * itself, a part at a time, also while closed: only new ones are not begun then.
 */
#include "_engine.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>

enum { STAGING_BYTES = 1 << 19, PART_BYTES = 1 << 20, SHARED_WORK_BYTES = 1 << 18, PAGE_BYTES = 4096 };

struct Carry {
    Request *request; /* here */
    uint64_t other;   /* the request there */
    uint64_t here, there; /* addresses in both programs */
    char *gathered;   /* where it goes here instead of the program; NULL else */
    int peer, pid;    /* rank there, and the process of its program */
    int64_t done, end;
    char is_helping;  /* writes there; else it reads from there */
    char awaits_help, failed;
};

char *in_arena(Engine *e, uint64_t address, int64_t num_bytes) {
    uint64_t start = address - e->arena_start;
    int fits = address >= e->arena_start && start <= e->arena_bytes && (uint64_t)num_bytes <= e->arena_bytes - start;
    return fits ? (char *)(uintptr_t)address : NULL;
}

/* One call moves all or, where pages are missing, less. 0 or an errno. */
static int move(long number, int pid, uint64_t there, char *here, int64_t num_bytes) {
    while (num_bytes > 0) {
        struct iovec local = {here, (size_t)num_bytes}, remote = {(void *)(uintptr_t)there, (size_t)num_bytes};
        long moved = syscall(number, (pid_t)pid, &local, 1UL, &remote, 1UL, 0UL);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved < 0 ? errno : EFAULT;
        there += (uint64_t)moved;
        here += moved;
        num_bytes -= moved;
    }
    return 0;
}

int carry_memory(Engine *e, uint64_t address, char *here, int64_t num_bytes, int outwards) {
    int error;
    Py_BEGIN_ALLOW_THREADS;
    error = move(outwards ? SYS_process_vm_writev : SYS_process_vm_readv, e->upper_pid, address, here, num_bytes);
    Py_END_ALLOW_THREADS;
    if (error == 0) return 0;
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError), -1;
}

/* The next part of a payload: one copy where our program's buffer is shared with us, else two through a piece of
 * ours that stays in the cache. Called without the GIL.
 */
static int carry_part(Engine *e, const Carry *one, int64_t num_bytes) {
    uint64_t here = one->here + (uint64_t)one->done, there = one->there + (uint64_t)one->done;
    long in = SYS_process_vm_readv, out = SYS_process_vm_writev;
    char *place = one->gathered != NULL ? one->gathered + one->done : in_arena(e, here, num_bytes);
    if (place != NULL) return move(one->is_helping ? out : in, one->pid, there, place, num_bytes);
    int from_pid = one->is_helping ? e->upper_pid : one->pid, to_pid = one->is_helping ? one->pid : e->upper_pid;
    uint64_t from = one->is_helping ? here : there, to = one->is_helping ? there : here;
    for (int64_t moved = 0; moved < num_bytes; moved += STAGING_BYTES) {
        int64_t step = num_bytes - moved < STAGING_BYTES ? num_bytes - moved : STAGING_BYTES;
        int error = move(in, from_pid, from + (uint64_t)moved, e->staging, step);
        if (!error) error = move(out, to_pid, to + (uint64_t)moved, e->staging, step);
        if (error) return error;
    }
    return 0;
}

static Carry *push_carry(Engine *e, Request *request) {
    if (e->staging == NULL && (e->staging = malloc(STAGING_BYTES)) == NULL) return PyErr_NoMemory(), NULL;
    Carry *carries = with_room(e->carries, e->num_carries, &e->room_carries, sizeof *carries);
    if (carries == NULL) return NULL;
    e->carries = carries;
    Carry *one = &e->carries[e->num_carries++];
    memset(one, 0, sizeof *one);
    Py_INCREF((PyObject *)request);
    one->request = request;
    /* Two halves that copy on one core would take turns. */
    leave_program(e);
    return one;
}

/* What the receiver carries itself where the sender helps, to the end of a page. */
static int64_t first_half(int64_t num_bytes) { return num_bytes / 2 & ~(int64_t)(PAGE_BYTES - 1); }

int take_directly(Engine *e, Request *request, const Arrived *message) {
    Carry *one = push_carry(e, request);
    if (one == NULL) return -1;
    one->end = message->num_bytes;
    one->peer = message->source;
    one->pid = message->pid;
    one->other = message->sender_request;
    one->here = request->address;
    one->there = message->address;
    one->gathered = gathered(request);
    if (one->gathered != NULL || !message->waits || message->num_bytes < SHARED_WORK_BYTES) return 0;
    one->awaits_help = 1;
    one->end = first_half(message->num_bytes);
    uint64_t fields[7] = {request->comm, 0, WHAT_WANTED, one->other, request->number, (uint32_t)e->upper_pid, one->here};
    return send_wire(e, one->peer, fields, NULL, 0);
}

int help_directly(Engine *e, int source, Request *request, uint64_t receive, int pid, uint64_t address) {
    Carry *one = push_carry(e, request);
    if (one == NULL) return -1;
    one->is_helping = 1;
    one->peer = source;
    one->pid = pid;
    one->other = receive;
    one->here = request->address;
    one->there = address;
    one->done = first_half(request->num_bytes);
    one->end = request->num_bytes;
    return 0;
}

int hear_helped(Engine *e, uint64_t receive, int is_done) {
    for (size_t i = 0; i < e->num_carries; i++) {
        Carry *one = &e->carries[i];
        if (one->is_helping || !one->awaits_help || one->request->number != receive) continue;
        one->awaits_help = 0;
        if (!is_done && !one->failed) one->end = one->request->message_bytes;
        return 1;
    }
    return 0;
}

/* One that has nothing left to copy: 1 if it is over, 0 if it waits for help, -1 with an exception. */
static int finish_carry(Engine *e, Carry *one) {
    Request *request = one->request;
    if (one->is_helping) {
        uint64_t fields[7] = {request->comm, 0, WHAT_HELPED, one->other, !one->failed, 0, 0};
        return send_wire(e, one->peer, fields, NULL, 0) ? -1 : 1;
    }
    if (one->awaits_help) return 0;
    if (one->failed) {
        /* This process may not look into that one; from now on payloads go through MPI, this one from its beginning. */
        memset(e->neighbours, 0, (size_t)e->size);
        Arrived message = {.source = one->peer, .num_bytes = request->message_bytes, .sender_request = one->other};
        return stream_in(e, request, &message) ? -1 : 1;
    }
    request->written = one->gathered == NULL;
    uint64_t fields[7] = {request->comm, 0, WHAT_TAKEN, one->other, 0, 0, 0};
    complete(e, request);
    return send_wire(e, one->peer, fields, NULL, 0) ? -1 : 1;
}

int carry_on(Engine *e) {
    int progress = 0;
    size_t kept = 0, count = e->num_carries;
    for (size_t i = 0; i < count; i++) {
        Carry one = e->carries[i];
        int64_t num_bytes = one.end - one.done < PART_BYTES ? one.end - one.done : PART_BYTES;
        if (num_bytes > 0) {
            int error;
            Py_BEGIN_ALLOW_THREADS;
            error = carry_part(e, &one, num_bytes);
            Py_END_ALLOW_THREADS;
            one.done = error ? one.end : one.done + num_bytes;
            one.failed = one.failed || error != 0;
            progress = 1;
        }
        int over = one.done < one.end ? 0 : finish_carry(e, &one);
        if (over < 0) return -1;
        if (over) {
            progress = 1;
            Py_DECREF((PyObject *)one.request);
        } else {
            e->carries[kept++] = one;
        }
    }
    if (kept == count) return progress;
    /* One that ends may begin another. */
    memmove(e->carries + kept, e->carries + count, (e->num_carries - count) * sizeof *e->carries);
    e->num_carries -= count - kept;
    return progress;
}

void drop_carries(Engine *e) {
    for (size_t i = 0; i < e->num_carries; i++) Py_DECREF((PyObject *)e->carries[i].request);
    e->num_carries = 0;
    free(e->carries);
    free(e->staging);
    e->carries = NULL;
    e->staging = NULL;
    e->room_carries = 0;
}
