/* The lower half's own part: it starts as any program does, tells the loader what it has, and lends thread-local storage.
 *
 * What it offers is made by another file, lower_functions(): for the real MPI that is lower_mpi.c.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lower_half.h"

enum {
    LENT_STACK_BYTES = 256 << 10, /* a lent thread sleeps; its stack has its thread-local storage, too */
    END_BELOW_BYTES = 16 << 10    /* far below main() */
};

static Handover *handover;
static _Thread_local Place *place; /* of a thread that lends; NULL for any other */

static void sleep_until(_Atomic uint32_t *word, uint32_t old) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL); }
static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX); }

static void *lend(void *nothing) {
    static _Atomic uint32_t never;
    Place own = {.fs = thread_pointer()};
    Lending *lending = &handover->lending;
    (void)nothing;
    place = &own;
    own.next = atomic_load(&lending->fresh);
    while (!atomic_compare_exchange_weak(&lending->fresh, &own.next, &own)) continue;
    atomic_fetch_add(&lending->made, 1);
    wake_all(&lending->made);
    for (;;) sleep_until(&never, 0);
    return NULL;
}

static void *make_places(void *nothing) {
    Lending *lending = &handover->lending;
    pthread_attr_t small;
    (void)nothing;
    pthread_attr_init(&small);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&small, LENT_STACK_BYTES);
    for (uint32_t begun = 0;;) {
        uint32_t wanted = atomic_load(&lending->wanted);
        for (pthread_t thread; begun < wanted; begun++) {
            int error = pthread_create(&thread, &small, lend, NULL);
            if (!error) continue;
            atomic_store(&lending->failed, error);
            wake_all(&lending->made);
            return NULL;
        }
        sleep_until(&lending->wanted, wanted);
    }
}

/* Functions for the end of a program and of its libraries run; the call that would end the process is not made. */
static void end(void) {
    set_thread_pointer(handover->ending_fs);
    exit(0);
}

int main(int count, char **arguments) {
    pthread_t lender;
    if (count != 2) return EINVAL;
    handover = (Handover *)strtoull(arguments[1], NULL, 16);
    place = &handover->first;
    place->fs = thread_pointer();
    handover->place_offset = (int64_t)((uint64_t)&place - place->fs);
    handover->functions = lower_functions();
    handover->end = end;
    /* As a function finds it that was called: below what stands here. */
    handover->stack = (void *)((((uintptr_t)__builtin_frame_address(0) - END_BELOW_BYTES) & ~(uintptr_t)15) - 8);
    int error = pthread_create(&lender, NULL, make_places, NULL);
    if (error) return error;
    go_on(&handover->upper);
}
