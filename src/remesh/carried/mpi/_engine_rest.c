/* Where and how an Engine waits: on its program's core, at its seat, asleep, giving way, or asking MPI.
 *
 *     the program computes    beside it: gives way while its calls are dense, then sleeps at the doorbell
 *     the program waits       asks MPI without pause, then gives way between two looks, then sleeps between them
 *     copies, streams         at the seat, which is this rank's share of the cores
 *
 * pace.py chooses the times, and says why.
 */
#include "_engine.h"

enum { DENSE_US = 100 };
/* A yield that takes longer has given the core to somebody; this then keeps away for so long, and its program sleeps in
 * so many calls.
 */
enum { SHARED_CORE_US = 20, APART_US = 10000, CALLS_APART = 100 };

/* Who has not chosen yet may run where it was told to, which others may have changed. */
static void note_allowed(Engine *e) {
    if (e->home == ANYWHERE) sched_getaffinity(0, sizeof e->allowed, &e->allowed);
}

/* Whether this rank's program stands on this core and no other's, as all ranks of the host have told with their messages.
 * A core that its program has left is nobody's: two lower halves there would keep each other from it for good.
 */
static int is_ours(const Engine *e, uint32_t cpu) {
    int num_told = 0;
    if (atomic_load_explicit(e->cpu, memory_order_relaxed) != cpu) return 0;
    for (int rank = 0; rank < e->size; rank++) {
        if (rank == e->rank || !e->neighbours[rank]) continue;
        if (e->cores[rank] == 0 || e->cores[rank] == cpu) return 0;
        num_told++;
    }
    return num_told > 0;
}

/* Run where this rank's share of the cores is. Two that only ask MPI on one core would keep each other from it, and the
 * kernel moves nobody who never sleeps. Where each rank has one core, and the programs have chosen others among them than
 * the seats say, they are kept: to cross over would put each beside the program of another rank, and leave a core idle.
 */
void leave_program(Engine *e) {
    if (e->home == AT_SEAT) return;
    note_allowed(e);
    cpu_set_t seat;
    CPU_AND(&seat, &e->seat, &e->allowed);
    if (CPU_COUNT(&seat) == 0) seat = e->allowed;
    int is_one = CPU_COUNT(&seat) == 1;
    /* Beside the program is at the seat where that is one core, and the program on it. */
    if (is_one && e->home != ANYWHERE && (CPU_ISSET(e->home - 1, &seat) || is_ours(e, e->home))) return;
    if (sched_setaffinity(0, sizeof seat, &seat) == 0) e->home = AT_SEAT;
}

/* Run on any core that is allowed: threads and processes that are started now inherit it. */
void go_anywhere(Engine *e) {
    if (e->home != ANYWHERE) sched_setaffinity(0, sizeof e->allowed, &e->allowed);
    e->home = ANYWHERE;
}

/* Sleep where the program runs: its next call then costs a switch between two processes. To wake another core that has
 * gone idle takes several times as long, and one that computes would be taken from another rank.
 */
static void stay_beside_program(Engine *e) {
    uint32_t cpu = atomic_load_explicit(e->cpu, memory_order_relaxed);
    if (cpu == 0 || cpu == e->home || cpu > CPU_SETSIZE) return;
    note_allowed(e);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu - 1, &one);
    if (CPU_ISSET(cpu - 1, &e->allowed) && sched_setaffinity(0, sizeof one, &one) == 0) e->home = cpu;
}

/* Somebody else computes on this core: keep away from it for a while, and let the program sleep rather than give way, so
 * that the kernel finds another core for it when it wakes.
 */
static void stay_apart(Engine *e, int64_t now) {
    leave_program(e);
    e->apart_until_us = now + APART_US;
    atomic_store_explicit(e->without, CALLS_APART, memory_order_relaxed);
}

/* Where there are cores for both halves, both spin as long as calls are dense, each on its own core. */
static void choose_pace(Engine *e, int expecting, int64_t now) {
    char is_dense = e->lower_spin && e->gap_us < DENSE_US;
    if (is_dense != e->is_dense) atomic_store_explicit(e->upper_spins, is_dense ? e->upper_spin : 0, memory_order_relaxed);
    e->is_dense = is_dense;
    if (is_dense || (e->lower_spin && expecting)) leave_program(e);
    else if (now >= e->apart_until_us) stay_beside_program(e);
}

static int is_rung(Engine *e) { return atomic_load(e->doorbell) != e->scanned || atomic_load(&e->woken); }

/* To let go of Python and to take it back costs more than a look at MPI. So whoever rests does it before he sleeps, or
 * when the other threads of this process have not had a turn for so long.
 */
enum { TURN_US = 500 };

static void let_others_run(Engine *e) {
    if (e->let_go == NULL) e->let_go = PyEval_SaveThread();
}

static void let_others_run_in_time(Engine *e, int64_t now) {
    if (now - e->turn_ended_us > TURN_US) let_others_run(e);
}

static void take_turn(Engine *e) {
    if (e->let_go == NULL) return;
    PyEval_RestoreThread(e->let_go);
    e->let_go = NULL;
    e->turn_ended_us = now_us();
}

static void sleep_at_bell(Engine *e, int64_t timeout_us) {
    let_others_run(e);
    atomic_store(e->sleeping, ASLEEP);
    if (!is_rung(e)) futex_wait(e->doorbell, e->scanned, timeout_us);
    atomic_store_explicit(e->sleeping, AWAKE, memory_order_relaxed);
}

/* Where the next call is far, to sleep at once costs less than to be run once more for it. */
int may_give_way(Engine *e) {
    int is_beside = e->home != ANYWHERE && e->home != AT_SEAT;
    return is_beside && e->gap_us < e->give_way_us && !atomic_load_explicit(e->without, memory_order_relaxed);
}

/* Let the program run on this core for a while: whether it has rung since. library/slots.c is the other side. */
static int give_way(Engine *e, int64_t now, int64_t deadline_us) {
    int64_t end_us = now + e->give_way_us;
    if (end_us > deadline_us) end_us = deadline_us;
    atomic_store(e->sleeping, GIVES_WAY);
    do sched_yield();
    while (!is_rung(e) && now_us() < end_us);
    atomic_store_explicit(e->sleeping, AWAKE, memory_order_relaxed);
    return is_rung(e);
}

/* A short message for a receive can wait in MPI until the program asks for it. */
static int can_wait(const Engine *e, const Request *request) {
    return request->kind == e->word_receive && request->num_bytes != PARCEL && request->num_bytes <= EAGER_BYTES;
}

/* Whether MPI has to be asked now and then though no slot waits. */
static int is_expecting(const Engine *e) {
    size_t at = 0;
    const Request *request;
    /* Who has a window may be asked at any time. */
    if (e->num_watched || e->num_running || e->num_small || e->num_sending || e->num_streams || e->windows->count) return 1;
    while ((request = (const Request *)table_next(e->by_number, &at)) != NULL)
        if (!request->done && !can_wait(e, request)) return 1;
    return 0;
}

/* Rest while the program computes. */
static void rest_without_caller(Engine *e, int64_t now, int64_t deadline_us) {
    int expecting = is_expecting(e);
    if (e->always_spins) {
        let_others_run(e);
        while (!look(e) && atomic_load_explicit(e->doorbell, memory_order_acquire) == e->scanned)
            if (now_us() >= deadline_us || atomic_load(&e->woken)) return;
        return;
    }
    if (e->free_since_us == 0) e->free_since_us = now;
    choose_pace(e, expecting, now);
    for (uint64_t i = 0; e->is_dense && i < e->lower_spin; i++) {
        if (atomic_load_explicit(e->doorbell, memory_order_acquire) != e->scanned) return;
        relax();
    }
    if (!expecting && may_give_way(e) && (give_way(e, now, deadline_us) || look(e))) return;
    int64_t longest = e->idle_us;
    if (expecting) {
        longest = e->shortest_us + (now - e->idle_since_us) / 4;
        if (longest > e->longest_us) longest = e->longest_us;
    }
    if (now < deadline_us) sleep_at_bell(e, longest < deadline_us - now ? longest : deadline_us - now);
}

/* Rest while the program waits. */
static void rest_with_caller(Engine *e, int64_t now, int64_t deadline_us) {
    for (;;) {
        if (look(e) || atomic_load_explicit(e->doorbell, memory_order_acquire) != e->scanned) return;
        now = now_us();
        if (now >= deadline_us || atomic_load(&e->woken)) return;
        let_others_run_in_time(e, now);
        int64_t idle = now - e->idle_since_us;
        /* A stream moves on only while MPI is asked. */
        if (idle > e->patient_us && !e->num_watched && !has_moving_stream(e)) {
            int64_t longest = e->shortest_us + (idle - e->patient_us) / 4;
            sleep_at_bell(e, longest < e->longest_us ? longest : e->longest_us);
        } else if (idle > e->eager_us) {
            /* If our peer is runnable on this core, we starve it: move. */
            sched_yield();
            if (now_us() - now > SHARED_CORE_US) stay_apart(e, now);
        }
    }
}

void rest(Engine *e, int is_waiting, int64_t now, int64_t deadline_us) {
    if (e->idle_since_us == 0) e->idle_since_us = now;
    let_others_run_in_time(e, now);
    if (e->num_watched || has_moving_stream(e) || (is_waiting && e->num_streams)) leave_program(e);
    if (is_waiting) rest_with_caller(e, now, deadline_us);
    else rest_without_caller(e, now, deadline_us);
    take_turn(e);
}

/* How long the program computed. Long times are remembered for a while: short ones come in between, with replies. */
void note_gap(Engine *e, int64_t now) {
    if (e->free_since_us) {
        int64_t gap = now - e->free_since_us;
        e->gap_us = gap > e->gap_us ? gap : (e->gap_us + gap) / 2;
    }
    e->free_since_us = e->idle_since_us = 0;
}
