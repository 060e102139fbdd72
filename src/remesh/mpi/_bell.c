/* How the upper half calls the lower one, and waits for it.
 *
 * Both stand on one core (_engine_rest.c says why), so a call is two switches. Who sleeps in a futex has to be woken, which
 * costs as much as the switch; so as long as calls are dense neither sleeps: each *gives way* to the other and is back
 * when that one does the same. A half that has waited for longer sleeps.
 */
#include "_fast.h"

/* Where somebody else computes on this core, who gives way comes back only when that one's turn has ended; who sleeps is
 * woken at once. So many calls go without giving way then.
 */
enum { LATE_US = 200, NUM_WITHOUT = 500 };

static Word *at(char *base, size_t offset) { return (Word *)(base + offset); }

/* Let the lower half run, which is ready to, on this core. */
static void give_core(char *base) {
    int64_t start_us = now_us();
    sched_yield();
    if (now_us() - start_us > LATE_US && atomic_load(at(base, SLEEPING)) != AWAKE)
        atomic_store_explicit(at(base, CALLS_WITHOUT), NUM_WITHOUT, memory_order_relaxed);
}

void ring_softly(char *base) {
    unsigned cpu = 0;
    if (getcpu(&cpu, NULL) == 0) atomic_store_explicit(at(base, CORE), cpu + 1, memory_order_relaxed);
    atomic_fetch_add(at(base, DOORBELL), 1);
}

void ring_bell(char *base) {
    ring_softly(base);
    uint32_t state = atomic_load(at(base, SLEEPING));
    if (state == ASLEEP) futex_wake(at(base, DOORBELL));
    if (state == GIVES_WAY) give_core(base);
}

/* Let the lower half run until the reply is there, for as long as it wants that. */
static void give_way(char *base, const Word *reply, uint32_t number) {
    Word *without = at(base, CALLS_WITHOUT);
    int64_t longest_us = atomic_load_explicit(at(base, GIVE_WAY), memory_order_relaxed);
    uint32_t left = atomic_load_explicit(without, memory_order_relaxed);
    if (left) atomic_store_explicit(without, left - 1, memory_order_relaxed);
    if (left || longest_us == 0 || atomic_load_explicit(reply, memory_order_acquire) == number) return;
    int64_t end_us = now_us() + longest_us;
    while (atomic_load_explicit(reply, memory_order_acquire) != number && now_us() < end_us) give_core(base);
}

/* -1 with an exception that a signal handler raised. */
static int await_reply(char *base, char *slot, uint32_t number) {
    Word *reply = at(slot, REPLY), *waiting = at(slot, WAITING);
    for (uint64_t spin = atomic_load_explicit(at(base, SPIN), memory_order_relaxed);; spin = 0) {
        Py_BEGIN_ALLOW_THREADS;
        for (; spin && atomic_load_explicit(reply, memory_order_acquire) != number; spin--) relax();
        give_way(base, reply, number);
        uint32_t seen = atomic_load_explicit(reply, memory_order_acquire);
        if (seen != number) {
            atomic_store(waiting, 1);
            seen = atomic_load(reply);
            if (seen != number) futex_wait(reply, seen, 1000000);
            atomic_store_explicit(waiting, 0, memory_order_relaxed);
        }
        Py_END_ALLOW_THREADS;
        if (atomic_load_explicit(reply, memory_order_acquire) == number) return 0;
        if (PyErr_CheckSignals()) return -1;
    }
}

int call_lower(char *base, char *slot) {
    Word *request = at(slot, 0);
    uint32_t number = atomic_load_explicit(request, memory_order_relaxed) + 1;
    atomic_store_explicit(request, number, memory_order_release);
    ring_bell(base);
    return await_reply(base, slot, number);
}
