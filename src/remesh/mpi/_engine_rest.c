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

/* Run where this rank's share of the cores is. Two that only ask MPI on one core would keep each other from it, and the
 * kernel moves nobody who never sleeps.
 */
void leave_program(Engine *e) {
    if (e->home == AT_SEAT) return;
    note_allowed(e);
    cpu_set_t seat;
    CPU_AND(&seat, &e->seat, &e->allowed);
    if (CPU_COUNT(&seat) == 0) seat = e->allowed;
    /* Beside the program is at the seat where that is one core, and the program on it. */
    if (e->home != ANYWHERE && CPU_COUNT(&seat) == 1 && CPU_ISSET(e->home - 1, &seat)) return;
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

static void sleep_at_bell(Engine *e, int64_t timeout_us) {
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

/* Rest while the program computes. */
static void rest_without_caller(Engine *e, int expecting, int64_t now, int64_t deadline_us) {
    if (e->always_spins) {
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

/* Wait until there may be something to do, or the deadline. Only MPI and shared words: called without the GIL. */
void rest(Engine *e, int is_waiting, int expecting, int64_t deadline_us) {
    int64_t now = now_us();
    if (e->idle_since_us == 0) e->idle_since_us = now;
    if (e->num_watched || has_moving_stream(e) || (is_waiting && e->num_streams)) leave_program(e);
    if (!is_waiting) {
        rest_without_caller(e, expecting, now, deadline_us);
        return;
    }
    for (;;) {
        if (look(e) || atomic_load_explicit(e->doorbell, memory_order_acquire) != e->scanned) return;
        now = now_us();
        if (now >= deadline_us || atomic_load(&e->woken)) return;
        int64_t idle = now - e->idle_since_us;
        /* A stream moves on only while MPI is asked. */
        if (idle > e->patient_us && !e->num_watched && !has_moving_stream(e)) {
            int64_t longest = e->shortest_us + (idle - e->patient_us) / 4;
            sleep_at_bell(e, longest < e->longest_us ? longest : e->longest_us);
        } else if (idle > e->eager_us) {
            /* Whoever else waits for this core may be whom this waits for; then the two should not share one. */
            sched_yield();
            if (now_us() - now > SHARED_CORE_US) stay_apart(e, now);
        }
    }
}

/* How long the program computed. Long times are remembered for a while: short ones come in between, with replies. */
void note_gap(Engine *e) {
    if (e->free_since_us) {
        int64_t gap = now_us() - e->free_since_us;
        e->gap_us = gap > e->gap_us ? gap : (e->gap_us + gap) / 2;
    }
    e->free_since_us = e->idle_since_us = 0;
}
