/* Thread-local storage of the lower half that threads of the program borrow, one place each, from the first call on until
 * they end. Places that come back are lent again, so there are as many as there were threads at once.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "in_place.h"

_Thread_local Crossing my_crossing __attribute__((tls_model("initial-exec")));

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER; /* of all below; never held while inside the lower half */
static Handover *handover;
static Place *free_places;
static Crossing *borrowers;
static pthread_key_t end_of_thread;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void give_back(Crossing *crossing) {
    *crossing->link = crossing->next;
    if (crossing->next) crossing->next->link = crossing->link;
    crossing->place = NULL;
}

static void at_end_of_thread(void *ended) {
    Crossing *crossing = ended;
    pthread_mutex_lock(&guard);
    Place *place = crossing->place;
    if (place) {
        give_back(crossing);
        atomic_store(&place->owner, 0);
        place->next = free_places;
        free_places = place;
    }
    pthread_mutex_unlock(&guard);
}

static void make_key(void) {
    if (pthread_key_create(&end_of_thread, at_end_of_thread)) abort();
}

static void take(Place *place) {
    Crossing *mine = &my_crossing;
    *mine = (Crossing){.place = place, .fs = place->fs, .own = thread_pointer(), .next = borrowers, .link = &borrowers};
    if (borrowers) borrowers->link = &mine->next;
    borrowers = mine;
    atomic_store(&place->owner, mine->own);
    place->doing = NULL;
    /* Its destructor may run before those of the program that call MPI; those borrow again, and it runs once more. */
    pthread_setspecific(end_of_thread, mine);
}

/* Takes over what was made; waits for it if nothing is free. */
static Place *find_place(void) {
    Lending *lending = &handover->lending;
    for (;;) {
        uint32_t made = atomic_load(&lending->made);
        if (!free_places) free_places = atomic_exchange(&lending->fresh, NULL);
        if (free_places) break;
        int error = atomic_load(&lending->failed);
        if (error) {
            fprintf(stderr, "remesh: a thread cannot call MPI: no thread-local storage for it: %s\n", strerror(error));
            abort();
        }
        /* What is wanted is one more than what is made, since whoever asks holds the guard. */
        if (atomic_load(&lending->wanted) <= made) {
            atomic_store(&lending->wanted, made + 1);
            syscall(SYS_futex, &lending->wanted, FUTEX_WAKE_PRIVATE, 1);
        }
        syscall(SYS_futex, &lending->made, FUTEX_WAIT_PRIVATE, made, NULL);
    }
    Place *place = free_places;
    free_places = place->next;
    return place;
}

void borrow_place(void) {
    pthread_mutex_lock(&guard);
    if (!handover) {
        fprintf(stderr, "remesh: MPI is called while there is none in this process\n");
        abort();
    }
    take(find_place());
    pthread_mutex_unlock(&guard);
}

void begin_places(Handover *there) {
    pthread_once(&once, make_key);
    pthread_mutex_lock(&guard);
    handover = there;
    free_places = NULL;
    take(&there->first);
    pthread_mutex_unlock(&guard);
}

void end_places(void) {
    pthread_mutex_lock(&guard);
    while (borrowers) give_back(borrowers);
    handover = NULL;
    free_places = NULL;
    pthread_mutex_unlock(&guard);
}
