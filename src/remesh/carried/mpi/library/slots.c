/* The program's slots in the channel: who has which, how a request is posted, and how its reply is waited for.
 *
 * A thread keeps the slot of its first call until it ends, so a call needs no lock. With more threads than slots the last
 * slot is shared: who has none of its own takes it for one call, which must not wait for another rank, and waits by asking
 * again (channel.c).
 *
 * Both halves stand on one core (_engine_rest.c says why), so a call is two switches. As long as calls are dense neither
 * half sleeps: each gives way to the other. A half that has waited for longer sleeps in a futex.
 */
#include "slots.h"
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef _Atomic uint32_t Word;

enum { CHANNEL_BYTES = FIRST_SLOT + NUM_SLOTS * STRIDE, SHARED_SLOT = NUM_SLOTS - 1 };
#define SKIP 0xFFFFFFFFu
/* What stands at SLEEPING; see _fast.h. */
enum { AWAKE, ASLEEP, GIVES_WAY };
/* Where somebody else computes on this core, who gives way comes back late; so many calls go without it then. */
enum { LATE_US = 200, NUM_WITHOUT = 500 };
/* How often a program looks whether its lower half has said whose the channel is, which it does at once. */
enum { START_US = 200 };

static const char *const default_channel = "/tmp/.remesh/channel";
static const char magic[] = "RMSHCHN3";

static char *_Atomic base;
static bool is_forked; /* this is a child of the program: the channel is its parent's */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER, sharing = PTHREAD_MUTEX_INITIALIZER;
static uint32_t free_slots = (1u << SHARED_SLOT) - 1;
static pthread_key_t on_thread_end;
static _Atomic uint64_t num_calls;
static _Thread_local char *own_slot;
static _Thread_local bool is_calling;

static Word *at(char *start, size_t offset) { return (Word *)(void *)(start + offset); }
static char *slot_of(unsigned number) { return base + FIRST_SLOT + (size_t)number * STRIDE; }

/* The slot, and the lower half knows that it has to look there. */
static char *use_slot(unsigned number) {
    atomic_fetch_or(at(base, USED_SLOTS), 1u << number);
    return slot_of(number);
}

static void return_slot(void *slot) {
    unsigned number = (unsigned)(((char *)slot - base - FIRST_SLOT) / STRIDE);
    /* What else ends with the thread may call MPI, too: it takes a slot anew. */
    own_slot = NULL;
    LOCKED free_slots |= 1u << number;
}

static void note_fork(void) { is_forked = true; }

static void *map_channel(const char *path) {
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) die("opening the channel %s: %s; start the program by `remesh mpi run`", path, strerror(errno));
    struct stat status;
    if (fstat(descriptor, &status) || status.st_size < CHANNEL_BYTES) die("the channel %s is too short", path);
    void *start = mmap(NULL, CHANNEL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (start == MAP_FAILED) die("mapping the channel %s: %s", path, strerror(errno));
    if (memcmp(start, magic, sizeof magic - 1)) die("the channel %s is of another version of Remesh", path);
    return start;
}

/* The channel is the program's alone, and within it one library's: what two post into one slot looks like one call. */
static void take_channel(char *start) {
    uint32_t program;
    while (!(program = atomic_load(at(start, PROGRAM)))) usleep(START_US);
    if (program != (uint32_t)getpid())
        die("starting MPI in process %d: it is for process %u, which `remesh mpi run` has started, and not for those that "
            "this starts; let a script end with `exec` and the program", (int)getpid(), program);
    if (atomic_exchange(at(start, OPENED), 1))
        die("starting MPI: another MPI library has started in this process; link the program, and all libraries that it "
            "loads, with one MPI");
}

const char *channel_path(void) {
    const char *path = getenv("REMESH_CHANNEL");
    return path ? path : default_channel;
}

bool open_channel(void) {
    if (base) return true;
    const char *path = channel_path();
    if (path == default_channel && access(path, F_OK)) return false;
    pthread_mutex_lock(&opening);
    if (base == NULL) {
        char *start = map_channel(path);
        take_channel(start);
        pthread_key_create(&on_thread_end, return_slot);
        pthread_atfork(NULL, NULL, note_fork);
        base = start;
    }
    pthread_mutex_unlock(&opening);
    return true;
}

bool channel_is_open(void) { return base; }

Word *gate_word(void) { return at(base, GATE); }

static char *find_own_slot(void) {
    int number = -1;
    LOCKED if (free_slots) {
        number = __builtin_ctz(free_slots);
        free_slots &= ~(1u << number);
    }
    if (number < 0) return NULL;
    own_slot = use_slot((unsigned)number);
    pthread_setspecific(on_thread_end, own_slot);
    return own_slot;
}

Lease take_slot_to_ask(const char *doing) {
    if (__builtin_expect(is_calling || is_forked, 0)) {
        if (is_forked) die("%s in a process that the program has forked: only the program itself may use MPI", doing);
        die("%s in a signal handler that has come in the middle of another call of MPI", doing);
    }
    is_calling = true;
    if (own_slot) return (Lease){own_slot, false};
    if (!open_channel()) die("%s: this process was not started by `remesh mpi run`", doing);
    if (find_own_slot()) return (Lease){own_slot, false};
    pthread_mutex_lock(&sharing);
    return (Lease){use_slot(SHARED_SLOT), true};
}

uint64_t calls_made(void) { return atomic_load_explicit(&num_calls, memory_order_relaxed); }

void note_news(void) { atomic_fetch_add_explicit(&num_calls, 1, memory_order_relaxed); }

Lease take_slot(const char *doing) {
    note_news();
    return take_slot_to_ask(doing);
}

void give_slot(Lease lease) {
    if (lease.is_shared) pthread_mutex_unlock(&sharing);
    is_calling = false;
}

/* ---- waking and waiting ---- */

static void futex_wait(Word *word, uint32_t seen) {
    struct timespec limit = {1, 0};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Let the lower half run, which is ready to, on this core. */
static void give_core(void) {
    int64_t start_us = now_us();
    sched_yield();
    if (now_us() - start_us > LATE_US && atomic_load(at(base, SLEEPING)) != AWAKE)
        atomic_store_explicit(at(base, CALLS_WITHOUT), NUM_WITHOUT, memory_order_relaxed);
}

static void ring_softly(void) {
    unsigned core = 0;
    if (getcpu(&core, NULL) == 0) atomic_store_explicit(at(base, CORE), core + 1, memory_order_relaxed);
    atomic_fetch_add(at(base, DOORBELL), 1);
}

static void ring(void) {
    ring_softly();
    uint32_t state = atomic_load(at(base, SLEEPING));
    if (state == ASLEEP) syscall(SYS_futex, at(base, DOORBELL), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    if (state == GIVES_WAY) give_core();
}

static bool is_there(const Word *reply, uint32_t number) {
    return atomic_load_explicit(reply, memory_order_acquire) == number;
}

/* Let the lower half run until the reply is there, for as long as it wants that. */
static void give_way(const Word *reply, uint32_t number) {
    Word *without = at(base, CALLS_WITHOUT);
    int64_t longest_us = atomic_load_explicit(at(base, GIVE_WAY), memory_order_relaxed);
    uint32_t left = atomic_load_explicit(without, memory_order_relaxed);
    if (left) atomic_store_explicit(without, left - 1, memory_order_relaxed);
    if (left || longest_us == 0 || is_there(reply, number)) return;
    int64_t end_us = now_us() + longest_us;
    while (!is_there(reply, number) && now_us() < end_us) give_core();
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

char *call_lower(char *slot) {
    Word *reply = at(slot, REPLY), *waiting = at(slot, WAITING);
    uint32_t number = atomic_load_explicit(at(slot, 0), memory_order_relaxed) + 1;
    atomic_store_explicit(at(slot, 0), number, memory_order_release);
    ring();
    for (uint64_t spin = atomic_load_explicit(at(base, SPIN), memory_order_relaxed);; spin = 0) {
        for (; spin && !is_there(reply, number); spin--) relax();
        give_way(reply, number);
        if (is_there(reply, number)) return slot + BODY;
        atomic_store(waiting, 1);
        uint32_t seen = atomic_load(reply);
        if (seen != number) futex_wait(reply, seen);
        atomic_store_explicit(waiting, 0, memory_order_relaxed);
        if (is_there(reply, number)) return slot + BODY;
    }
}

/* ---- rings ---- */

char *begin_entry(char *slot, size_t num_bytes, uint32_t *end) {
    uint32_t posted = atomic_load_explicit(at(slot, POSTED), memory_order_relaxed);
    uint32_t taken = atomic_load_explicit(at(slot, TAKEN), memory_order_acquire);
    uint32_t whole = (uint32_t)(num_bytes + 4 + 7) & ~7u;
    uint32_t start = posted % RING_BYTES, left = RING_BYTES - start, skipped = left < whole ? left : 0;
    if (RING_BYTES - (posted - taken) < whole + skipped) return NULL;
    if (skipped) {
        memcpy(slot + RING + start, &(uint32_t){SKIP}, 4);
        start = 0;
    }
    *end = posted + skipped + whole;
    memcpy(slot + RING + start, &whole, 4);
    return slot + RING + start + 4;
}

void publish(char *slot, uint32_t end, bool wake) {
    atomic_store_explicit(at(slot, POSTED), end, memory_order_release);
    if (wake) ring();
    else ring_softly();
}
