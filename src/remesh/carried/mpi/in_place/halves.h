/* What both halves of one process know of each other.
 *
 * The upper half is the program, with its C library. The lower half is a second program with a C library of its own, and
 * with the real MPI, which load.c maps into the same process. A thread of the kernel runs in one half at a time: which
 * one is decided by its thread pointer, the register fs, that both C libraries find their thread-local storage by.
 */
#ifndef REMESH_HALVES_H
#define REMESH_HALVES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* What a function must find again that is left in one half and gone on with in the other: see cross.S. */
typedef struct {
    uint64_t rbx, rbp, r12, r13, r14, r15, rsp, fs;
} Context;

/* Thread-local storage of the lower half that one thread of the program borrows. It is that of a thread of the lower half
 * which sleeps for as long as the half is there, so that its C library knows of it as of any other.
 */
typedef struct Place {
    uint64_t fs;
    _Atomic uint64_t owner; /* thread pointer of the program's thread that has it; 0: nobody */
    const char *doing;      /* the call that the owner is in or was in last, for who tells of a crash */
    struct Place *next;     /* in a list of free ones */
} Place;

/* The lower half makes more places when it is asked for them. Words are for futex. */
typedef struct {
    _Atomic uint32_t wanted, made; /* how many, in all */
    _Atomic(Place *) fresh;        /* made, and not yet taken over by the upper half */
    _Atomic int failed;            /* errno, if one could not be made */
} Lending;

/* The loader gives its address to the lower half, which fills in the rest and leaves. */
typedef struct {
    Context upper;          /* where the thread that loads goes on */
    const void *functions;  /* what the lower half offers: a struct that both know */
    Place first;            /* of the thread that starts the lower half */
    int64_t place_offset;   /* from a thread pointer of the lower half to a word: the Place that it is of, or NULL */
    Lending lending;
    void (*end)(void);      /* to be entered, not called: what a program does at its end, with this thread pointer ... */
    uint64_t ending_fs;
    void *stack;            /* ... and on this stack */
} Handover;

/* cross.S */
void enter_program(Context *save, void *stack, void *entry);
_Noreturn void go_on(Context *there);

static inline uint64_t thread_pointer(void) {
    uint64_t fs;
    __asm__ volatile("rdfsbase %0" : "=r"(fs));
    return fs;
}
static inline void set_thread_pointer(uint64_t fs) { __asm__ volatile("wrfsbase %0" ::"r"(fs) : "memory"); }

#endif
