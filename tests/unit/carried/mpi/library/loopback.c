/* A lower half within the process, for one rank that sends to itself: the library's channel is replaced by this file.
 *
 * When an operation is over is drawn by chance (LOOPBACK_SEED), as if other ranks and the network were slow: sends are
 * taken at once or later, receives end some looks after their message came. So a single process walks through what
 * otherwise takes many, and threads.
 */
#include "basic.h"
#include "channel.h"
#include "op_values.h"

#include <time.h>

typedef struct Message_ {
    struct Message_ *next;
    uint64_t comm, number, send; /* `send`: of the send that waits until it is matched; 0 if it does not */
    int tag;
    int64_t num_bytes;
    char data[];
} Queued;

typedef struct Open {
    struct Open *next;
    uint64_t comm, number;
    int tag, delay; /* looks until it may be told; -1: it is not over */
    bool is_receive, is_unwanted, is_barrier;
    int64_t room;
    char *at;
    Ended ended;
} Open;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Queued *queue, *taken;
static Open *open_ones;
static uint64_t last_number;
static uint64_t last_barrier; /* that has been told: others receive nothing more of what was sent before it */
static uint64_t chance;

static unsigned draw(unsigned below) {
    if (!chance) chance = strtoull(getenv("LOOPBACK_SEED") ? getenv("LOOPBACK_SEED") : "1", NULL, 10) * 2654435761u + 1;
    chance = chance * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(chance >> 33) % below;
}

bool channel_is_there(void) { return true; }
bool channel_is_open(void) { return true; }
int lower_hello(int *rank, int *size) { return *rank = 0, *size = 1, MPI_SUCCESS; }
int lower_describe(const char *key, char *text, int room) { return snprintf(text, (size_t)room, "%s", key),
        MPI_SUCCESS; }
int lower_abort(int code) { _Exit(code ? code : 1); }
/* How many the lower half knows of, for programs that ask. */
int num_communicators;
int lower_make_communicator(uint64_t comm, int count, const int *ranks) {
    (void)comm, (void)count, (void)ranks;
    num_communicators++;
    return MPI_SUCCESS;
}
int lower_free_communicator(uint64_t comm) {
    (void)comm;
    num_communicators--;
    return MPI_SUCCESS;
}
const char *channel_path(void) { return "/no/channel"; }
void enter_gate(void) {}
void leave_gate(void) {}

static void end(Open *one, const Queued *message) {
    int64_t fitting = message->num_bytes < one->room ? message->num_bytes : one->room;
    if (fitting > 0) memcpy(one->at, message->data, (size_t)fitting);
    one->ended = (Ended){0, message->tag, message->num_bytes > one->room ? MPI_ERR_TRUNCATE : 0, false,
        message->num_bytes};
    one->delay = (int)draw(4);
}

static Open *find_open(uint64_t number) {
    for (Open *one = open_ones; one; one = one->next)
        if (one->number == number) return one;
    return NULL;
}

static void note_matched(uint64_t send) {
    Open *one = send ? find_open(send) : NULL;
    if (one) one->delay = (int)draw(3);
}

static Open *add_open(uint64_t comm, int tag, bool is_receive) {
    Open *one = NEW(Open), **last = &open_ones;
    *one = (Open){.comm = comm, .number = ++last_number, .tag = tag, .delay = -1, .is_receive = is_receive};
    one->ended = (Ended){ANY, ANY, 0, false, 0};
    while (*last) last = &(*last)->next;
    return *last = one;
}

/* Waits by looking again; with the lock held. */
static void give_way(void) {
    pthread_mutex_unlock(&lock);
    nanosleep(&(struct timespec){0, 1000}, NULL);
    pthread_mutex_lock(&lock);
}

static void look_until_over(uint64_t number, int flags, Operation *operation) {
    operation->number = number;
    pthread_mutex_unlock(&lock);
    if (flags & FLAG_BLOCKING) lower_wait(FLAG_BLOCKING, MODE_ALL, &operation, 1);
}

/* What is sent may be in the memory of the program, which ends soon. */
/* Each answer is new: none of an earlier one is held on to. */
uint64_t calls_made(void) {
    static _Atomic uint64_t num_calls;
    return atomic_fetch_add(&num_calls, 1);
}

int lower_finish(void) {
    for (const Open *one = open_ones; one; one = one->next)
        if (!one->is_receive && !one->is_unwanted && one->number > last_barrier)
            die("MPI is over while operation %llu is under way", (unsigned long long)one->number);
    return MPI_SUCCESS;
}

int lower_send(int flags, uint64_t comm, int dest, int tag, const void *data, int64_t num_bytes, Operation *operation) {
    (void)dest;
    pthread_mutex_lock(&lock);
    /* Data of a long message are read when other threads have gone on. */
    if (num_bytes > 32768) give_way();
    Queued *message = must_have(malloc(sizeof *message + (size_t)num_bytes)), **last = &queue;
    *message = (Queued){.comm = comm, .tag = tag, .num_bytes = num_bytes};
    if (num_bytes) memcpy(message->data, data, (size_t)num_bytes);
    for (Open *one = open_ones; one; one = one->next) {
        if (!one->is_receive || one->delay >= 0 || one->comm != comm || (one->tag != ANY && one->tag != tag)) continue;
        end(one, message);
        free(message);
        pthread_mutex_unlock(&lock);
        operation->number = 0;
        return MPI_SUCCESS;
    }
    while (*last) last = &(*last)->next;
    *last = message;
    bool waits = flags & FLAG_SYNCHRONOUS || num_bytes > 32768 || (num_bytes > 4096 && draw(2));
    if (waits) message->send = add_open(comm, tag, false)->number;
    look_until_over(message->send, waits ? flags : 0, operation);
    return MPI_SUCCESS;
}

static Queued **find_queued(uint64_t comm, int tag) {
    Queued **at = &queue;
    while (*at && ((*at)->comm != comm || (tag != ANY && (*at)->tag != tag))) at = &(*at)->next;
    return at;
}

static int receive(Queued **from, int flags, Open *one, Operation *operation) {
    one->room = operation->room;
    one->at = operation->at;
    if (*from) {
        Queued *message = *from;
        *from = message->next;
        note_matched(message->send);
        end(one, message);
        free(message);
    }
    look_until_over(one->number, flags, operation);
    return MPI_SUCCESS;
}

int lower_receive(int flags, uint64_t comm, int source, int tag, Operation *operation) {
    (void)source;
    pthread_mutex_lock(&lock);
    return receive(find_queued(comm, tag), flags, add_open(comm, tag, true), operation);
}

int lower_receive_message(int flags, uint64_t number, Operation *operation) {
    pthread_mutex_lock(&lock);
    Queued **at = &taken;
    while ((*at)->number != number) at = &(*at)->next;
    return receive(at, flags, add_open((*at)->comm, (*at)->tag, true), operation);
}

int lower_probe(int flags, uint64_t comm, int source, int tag, Probed *probed) {
    (void)source;
    pthread_mutex_lock(&lock);
    Queued **at = find_queued(comm, tag);
    while (!*at && flags & FLAG_BLOCKING) {
        give_way();
        at = find_queued(comm, tag);
    }
    *probed = (Probed){.found = *at};
    if (*at) {
        Queued *found = *at;
        *probed = (Probed){true, 0, found->tag, found->num_bytes, 0};
        if (flags & FLAG_MATCHED) {
            *at = found->next;
            found->next = taken;
            taken = found;
            probed->message = found->number = ++last_number;
        }
    }
    pthread_mutex_unlock(&lock);
    return MPI_SUCCESS;
}

/* Whether this one is over and told by now. */
static bool tell(Operation *operation) {
    for (Open **at = &open_ones; *at; at = &(*at)->next) {
        Open *one = *at;
        if (one->number != operation->number) continue;
        if (one->delay < 0 || one->delay-- > 0) return false;
        operation->ended = one->ended;
        operation->number = 0;
        if (one->is_barrier) last_barrier = one->number;
        *at = one->next;
        free(one);
        return true;
    }
    die("operation %llu is not there: it has been told already", (unsigned long long)operation->number);
}

int lower_wait(int flags, int mode, Operation *const *operations, int64_t count) {
    pthread_mutex_lock(&lock);
    for (;;) {
        int64_t num_open = 0, num_told = 0;
        for (int64_t i = 0; i < count; i++) {
            if (!operations[i] || !operations[i]->number) continue;
            if (mode == MODE_ANY && num_told) continue;
            if (tell(operations[i])) num_told++;
            else num_open++;
        }
        if (!(flags & FLAG_BLOCKING) || !num_open || (mode != MODE_ALL && num_told)) break;
        give_way();
    }
    pthread_mutex_unlock(&lock);
    return MPI_SUCCESS;
}

int lower_cancel(uint64_t number) {
    pthread_mutex_lock(&lock);
    Open *one = find_open(number);
    if (one) one->is_unwanted = true; /* a send goes on all the same */
    if (one && one->is_receive && one->delay < 0) {
        one->ended.is_cancelled = true;
        one->delay = (int)draw(3);
    }
    pthread_mutex_unlock(&lock);
    return MPI_SUCCESS;
}

int lower_free(uint64_t number) {
    pthread_mutex_lock(&lock);
    Open *one = find_open(number);
    if (one) one->is_unwanted = true;
    pthread_mutex_unlock(&lock);
    return MPI_SUCCESS;
}

/* With one member every collective gives what was put in. */
int lower_collective(int flags, uint64_t comm, const Collective *collective, Operation *operation) {
    (void)comm;
    pthread_mutex_lock(&lock);
    Open *one = add_open(comm, 0, false);
    int64_t fitting = collective->send_bytes < operation->room ? collective->send_bytes : operation->room;
    if (fitting > 0 && collective->kind != KIND_EXSCAN) memcpy(operation->at, collective->send, (size_t)fitting);
    one->ended.num_bytes = fitting;
    one->is_barrier = collective->kind == KIND_BARRIER;
    one->delay = (int)draw(4);
    look_until_over(one->number, flags, operation);
    return MPI_SUCCESS;
}

/* ---- windows: this rank is the target of all its accesses ---- */

typedef struct Memory {
    struct Memory *next;
    uint64_t window;
    char *at;
    int64_t num_bytes;
    bool is_window; /* `at` is its base */
} Memory;
static Memory *memories;

static void add_memory(Memory memory) {
    Memory *one = NEW(Memory);
    *one = memory;
    pthread_mutex_lock(&lock);
    one->next = memories;
    memories = one;
    pthread_mutex_unlock(&lock);
}

/* Takes out what a window has at an address, or all of it. */
static void remove_memory(uint64_t window, const void *at) {
    pthread_mutex_lock(&lock);
    for (Memory **place = &memories; *place;) {
        Memory *one = *place;
        if (one->window != window || (at && (one->is_window || one->at != at))) {
            place = &one->next;
            continue;
        }
        *place = one->next;
        free(one);
    }
    pthread_mutex_unlock(&lock);
}

int lower_make_window(uint64_t window, const void *base) {
    add_memory((Memory){NULL, window, (char *)(uintptr_t)base, 0, true});
    return MPI_SUCCESS;
}
int lower_free_window(uint64_t window) { return remove_memory(window, NULL), MPI_SUCCESS; }
int lower_attach_memory(uint64_t window, const void *at, int64_t num_bytes) {
    add_memory((Memory){NULL, window, (char *)(uintptr_t)at, num_bytes, false});
    return MPI_SUCCESS;
}
int lower_detach_memory(uint64_t window, const void *address) { return remove_memory(window, address), MPI_SUCCESS; }

/* Where a run stands; NULL: not within memory of the window. */
static char *place_of(uint64_t window, const Run *run) {
    char *at = NULL;
    for (const Memory *one = memories; one; one = one->next)
        if (one->window == window && one->is_window) at = (char *)((uintptr_t)one->at + (uintptr_t)run->offset);
    for (const Memory *one = memories; one; one = one->next)
        if (one->window == window && at >= one->at && at + run->num_bytes <= one->at + one->num_bytes) return at;
    return NULL;
}

/* What the bytes at the target become. */
static void change(const Access *access, char *bytes, int64_t num_bytes) {
    const char *data = access->data;
    if (access->op == OP_NO_OP) return;
    if (access->op == OP_COMPARE_AND_SWAP) {
        if (!memcmp(bytes, data + num_bytes, (size_t)num_bytes)) memcpy(bytes, data, (size_t)num_bytes);
        return;
    }
    if (access->op == OP_REPLACE) {
        memcpy(bytes, data, (size_t)num_bytes);
        return;
    }
    int basic = BASIC_BYTE;
    /* Several have the same, and not all are folded. */
    while (basic < NUM_BASICS &&
           (basic_of((Basic)basic)->real_type != access->type || !fold_of(access->op, (Basic)basic)))
        basic++;
    fold_of(access->op, (Basic)basic)(data, bytes, num_bytes / access->unit);
}

/* Under the lock, so that nothing is torn. */
static int carry_out(uint64_t window, const Access *access, char *result) {
    int64_t num_bytes = 0, at = 0;
    for (uint32_t i = 0; i < access->num_runs; i++) {
        if (!place_of(window, &access->runs[i])) return MPI_ERR_RMA_RANGE;
        num_bytes += access->runs[i].num_bytes;
    }
    char *bytes = NEW_ARRAY(char, num_bytes);
    for (uint32_t i = 0; i < access->num_runs; at += access->runs[i++].num_bytes)
        memcpy(bytes + at, place_of(window, &access->runs[i]), (size_t)access->runs[i].num_bytes);
    if (access->fetches) memcpy(result, bytes, (size_t)num_bytes);
    change(access, bytes, num_bytes);
    at = 0;
    for (uint32_t i = 0; i < access->num_runs; at += access->runs[i++].num_bytes)
        memcpy(place_of(window, &access->runs[i]), bytes + at, (size_t)access->runs[i].num_bytes);
    free(bytes);
    return MPI_SUCCESS;
}

int lower_access(uint64_t window, const Access *access, Operation *operation) {
    pthread_mutex_lock(&lock);
    Open *one = add_open(window, 0, false);
    one->ended.error = carry_out(window, access, operation->at);
    one->delay = (int)draw(6);
    look_until_over(one->number, 0, operation);
    return MPI_SUCCESS;
}

int lower_lock(int flags, uint64_t window, int target, bool exclusive, Operation *operation) {
    (void)target, (void)exclusive;
    pthread_mutex_lock(&lock);
    Open *one = add_open(window, 0, false);
    one->delay = (int)draw(4);
    look_until_over(one->number, flags, operation);
    return MPI_SUCCESS;
}
int lower_unlock(uint64_t window, int target) { return (void)window, (void)target, MPI_SUCCESS; }
